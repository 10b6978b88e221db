"""Maintenance of stores: versions are verified, removed and folded."""
