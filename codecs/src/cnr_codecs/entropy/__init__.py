"""Entropy coding of integers: static models by the class of a line, and interleaved rANS states."""
