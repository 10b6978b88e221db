"""Which rows of a table may have changed since the last save."""
