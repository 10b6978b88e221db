"""What can go wrong in the demo itself."""

from __future__ import annotations

from cnr_store.errors import CheckpointError


class DemoError(CheckpointError, RuntimeError):
    """The demo's training process ended by itself, or its place or options don't fit."""


class DemoDataError(CheckpointError, OSError):
    """The data set is missing, damaged, or could not be fetched."""
