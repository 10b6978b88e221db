"""Models saved as one file, stored as a version."""
