"""Benchmark of reading: a few rows of huge tables, and whole versions."""
