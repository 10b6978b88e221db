"""Uniform quantization: a row as codes of evenly spaced values."""
