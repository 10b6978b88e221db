"""Where the demo's store goes: never into a place that holds something."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from cnr_backends import Backend, open_backend

KEPT_FOLDER = "demo-run"


@contextmanager
def demo_place(
    url: str | None, storage_options: dict[str, Any], keep: bool, say: Callable[[str], object]
) -> Iterator[tuple[str, Backend]]:
    """An empty place and its URL: `url`, or ./demo-run to keep, or a temporary folder that goes in the end.

    A place in use is left alone: the first of its sub-folders run-2, run-3 ... that is free is taken instead.

    Raises: cnr_backends.BackendError if it can't be opened.
    """
    with ExitStack() as stack:
        if url is None and not keep:
            url = stack.enter_context(tempfile.TemporaryDirectory(prefix="cnr-demo-"))
        asked = (url or KEPT_FOLDER).rstrip("/")
        for place in itertools.chain([asked], (f"{asked}/run-{number}" for number in itertools.count(2))):
            backend = stack.enter_context(open_backend(place, **storage_options))
            if not backend.list_names(""):
                break
            say(f"{place} is in use and stays as it is")
        yield place, backend
