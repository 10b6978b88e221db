"""Measures the codecs beside their peers, in one process and in turns."""
