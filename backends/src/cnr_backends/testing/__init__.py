"""What tests of a backend, and of anything above one, need. Requires pytest (extra ``testing``)."""

import pytest

pytest.register_assert_rewrite("cnr_backends.testing.conformance", "cnr_backends.testing.store_conformance")

from cnr_backends.testing.conformance import BackendConformance  # noqa: E402 - after the line above
from cnr_backends.testing.delayed import DelayedBackend  # noqa: E402 - as well
from cnr_backends.testing.faulty import FaultyBackend  # noqa: E402 - as well

__all__ = ["BackendConformance", "DelayedBackend", "FaultyBackend"]
