"""Relative codes on trainings: bytes, losses and reads."""
