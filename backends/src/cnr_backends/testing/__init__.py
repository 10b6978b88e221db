"""What tests of a backend, and of code that uses one, need. It requires pytest (extra ``testing``)."""

import pytest

pytest.register_assert_rewrite("cnr_backends.testing.conformance")

from cnr_backends.testing.conformance import BackendConformance  # noqa: E402 - pytest rewrites what is imported afterwards
from cnr_backends.testing.faulty import DelayedBackend, FaultyBackend, FoldingBackend  # noqa: E402 - as well

__all__ = ["BackendConformance", "DelayedBackend", "FaultyBackend", "FoldingBackend"]
