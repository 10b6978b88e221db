"""What tests of a backend, and of code that uses one, need. It requires pytest (extra ``testing``)."""

import pytest

pytest.register_assert_rewrite("cnr_backends.testing.conformance", "cnr_backends.testing.store_conformance")

from cnr_backends.testing.conformance import BackendConformance  # noqa: E402 - pytest rewrites what is imported afterwards
from cnr_backends.testing.delayed import DelayedBackend  # noqa: E402 - as well
from cnr_backends.testing.faulty import FaultyBackend  # noqa: E402 - as well
from cnr_backends.testing.folding import FoldingBackend  # noqa: E402 - as well

__all__ = ["BackendConformance", "DelayedBackend", "FaultyBackend", "FoldingBackend"]
