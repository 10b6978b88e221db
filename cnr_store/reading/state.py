"""What a version holds beside tables and tensors: `state_of`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cnr_store.catalog.catalog import Catalog, Url, Version, count_parts, open_record, read_state_part
from cnr_store.catalog.version_info import VersionInfo
from cnr_store.chains.allocation import Array
from cnr_store.chains.dense import read_dense
from cnr_store.errors import CorruptionError, FormatError
from cnr_store.format.record import Record
from cnr_store.format.state import Json, decode_state
from cnr_store.format.state_arrays import Leaf, OfClass

_BESIDE_STATE = ("dense/optim/", "dense/state/")


def state_of(url: Url, version: Version = "latest", **storage_options: Any) -> dict[str, Any]:
    """What a version holds beside tables, tensors and optimizers, without a model and without torch.

    Arrays and tensors come as arrays; of a type that numpy lacks, as unsigned integers that hold their bits. Of a
    tensor of another class come its parts.

    Parameters
    ----------
    url
        Any fsspec URL, a path, or a Zarr store.
    version
        An id, a `VersionInfo`, a step, a tag, or ``latest``.
    storage_options
        For the filesystem, as in fsspec.

    Returns
    -------
    ``version``: its `VersionInfo`. ``state``: what the `state` objects of the `Checkpointer` returned, by name.
    ``readers``: what `save` was given as `reader`, by rank; one of one process.

    Raises
    ------
    EmptyStoreError, VersionNotFoundError, CorruptionError
    """
    catalog, record = open_record(url, version, **storage_options)
    doc, seen, where = catalog.state(record), set[str](), f"version {record.id} of {catalog.backend.url}"
    parts = [read_state_part(catalog, record, doc, rank) for rank in range(count_parts(doc))] or [doc]

    def member(part: Any, name: str) -> Any:
        if not isinstance(part, dict) or name not in part:
            raise CorruptionError(f"{where}: the state has no {name!r}")
        return decode_tree(catalog, record, part[name], where, seen, _plain)

    return {
        "version": VersionInfo.from_record(record),
        "state": member(doc, "objects"),
        "readers": [member(part, "reader") for part in parts],
    }


def decode_tree(
    catalog: Catalog,
    record: Record,
    doc: Json,
    where: str,
    seen: set[str],
    from_leaf: Callable[[Leaf], object],
) -> Any:
    """Decode the state of a version, or a part of it, with the arrays that stand beside it.

    `seen`: paths of the arrays that other parts have referred to. Those of this one are added.
    """

    def read(path: str) -> Array:
        # Each reference has an array of its own, so that a small state can't become many large arrays.
        if path in seen or not path.startswith(_BESIDE_STATE):
            raise FormatError(f"{where}: the state refers to {path[:80]!r}, or refers to it twice")
        seen.add(path)
        return read_dense(catalog, record, path)[0]

    return decode_state(doc, read=read, from_leaf=from_leaf)


def _plain(leaf: Leaf) -> Any:
    return leaf.value if isinstance(leaf, OfClass) else leaf.laid_out()
