"""Folders: of the tree, for tests that read its pages or start its programs, and for files kept in memory."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
SHARED_MEMORY = Path("/dev/shm")
"""Linux has it."""
