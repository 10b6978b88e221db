"""Decodes a stored state, and gives parts of it to foreign code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from cnr_store.catalog.catalog import Catalog
from cnr_store.chains.dense import read_dense
from cnr_store.errors import CheckpointError, FormatError, ModelMismatchError
from cnr_store.format.record import Record
from cnr_store.format.state import decode_state
from cnr_store.training.loading.validate_state import state_tensor

_BESIDE_STATE = ("dense/optim/", "dense/state/")


def decode_tree(catalog: Catalog, record: Record, doc: Any, where: str, seen: set[str] | None = None) -> Any:
    """Decode the state of a version, or a part of it, with the arrays that stand beside it.

    Parameters
    ----------
    seen
        Paths of the arrays that other parts have referred to. Those of this one are added.

    Raises
    ------
    FormatError, CorruptionError
        The state is malformed; `where` names the version.
    """
    seen = set() if seen is None else seen

    def read(path: str) -> np.ndarray[Any, Any]:
        # Each reference has an array of its own, so that a small state can't become many large arrays.
        if path in seen or not path.startswith(_BESIDE_STATE):
            raise FormatError(f"{where}: the state refers to {path[:80]!r}, or refers to it twice")
        seen.add(path)
        return read_dense(catalog, record, path)[0]

    return decode_state(doc, read=read, from_leaf=state_tensor)


@contextmanager
def accepted(where: str, taker: str) -> Iterator[None]:
    """Around foreign code: its errors become one that names the version and the `taker` that refused the state."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # whatever foreign code raises for a state that it does not expect
        raise ModelMismatchError(
            f"{where}: {taker} did not accept the stored state: {error!r}; the model is partly "
            "overwritten, load another version or give what was saved"
        ) from error
