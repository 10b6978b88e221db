"""A checkpoint store for recommendation models."""
