"""Where the tree lies, for tests that read pages or start programs of it."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
