"""Ways to read a version without a model."""
