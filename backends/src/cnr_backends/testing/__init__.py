"""What tests of a backend, and of anything above one, need. Requires pytest."""

from cnr_backends.testing.faulty import FaultyBackend

__all__ = ["FaultyBackend"]
