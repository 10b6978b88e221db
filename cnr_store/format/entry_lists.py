"""Entries of a record as lists, so that the record of thousands of tables stays small.

The paths of the arrays are those of their Zarr documents, in ascending order. What an entry shares with others, its
element type and codec, or its base, is stored once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from cnr_store.format import validate
from cnr_store.format.arrays import Doc
from cnr_store.format.record import COUNTS, ArrayEntry

T = TypeVar("T")


def pack_entries(entries: Mapping[str, ArrayEntry], nodes: Mapping[str, Doc]) -> tuple[Doc, Doc]:
    """``arrays`` and ``tables`` of a record: entries by path, and lists of all the others.

    `nodes`: the record's Zarr documents by the paths that they lie under.
    """
    arrays = {
        entry.stored or path: entry.to_json() | ({"name": path} if entry.stored else {})
        for path, entry in entries.items()
        if not _fits(entry, nodes.get(path))
    }
    listed = [entries[path] for path in _listed_paths(arrays, nodes)]
    forms: dict[str, tuple[int, Doc]] = {}
    bases: dict[str, tuple[int, str]] = {}
    lists: Doc = {
        "form": [_number(forms, {"element": one.element, "codec": dict(one.codec or {})}) for one in listed],
        "base": [None if one.base is None else _number(bases, one.base) for one in listed],
        "bytes": [one.nbytes for one in listed],
        "rows": [one.rows for one in listed],
    }
    counts = {name: [getattr(one, name) for one in listed] for name in COUNTS}
    shared = {
        name: [one for _, one in values.values()] for name, values in (("forms", forms), ("bases", bases))
    }
    return arrays, shared | lists | {name: each for name, each in counts.items() if any(each)}


def unpack_entries(arrays: Doc, tables: Any, nodes: Mapping[str, Doc]) -> Doc:
    """All entries by path, each as `ArrayEntry.to_json` makes it: those of `tables`, then those of `arrays`."""
    lists: dict[str, list[Any]] = validate.proven(tables, dict[str, list[Any]], "tables")
    forms, bases = validate.proven(lists["forms"], list[Doc], "tables.forms"), lists["bases"]
    columns = [lists[name] for name in ("form", "base", "bytes", "rows")]
    columns += [lists.get(name, [0] * len(lists["form"])) for name in COUNTS]
    entries: Doc = {}
    for path, form, base, nbytes, rows, *counts in zip(_listed_paths(arrays, nodes), *columns, strict=True):
        shared = _chosen(forms, form, "form")
        entries[path] = {
            "kind": "whole" if base is None else "delta",
            "shape": nodes[path].get("shape"),
            "element": shared["element"],
            "bytes": nbytes,
            "base": None if base is None else _chosen(bases, base, "base"),
            "rows": rows,
            "codec": shared["codec"],
            **dict(zip(COUNTS, counts, strict=True)),
        }
    # In the order of the documents, which is the model's.
    return {path: entries[path] for path in nodes if path in entries} | arrays


def _fits(entry: ArrayEntry, doc: Doc | None) -> bool:
    """Whether document and lists say all that an entry does."""
    return (
        doc is not None
        and doc.get("node_type") == "array"
        and doc.get("shape") == list(entry.shape)
        and entry.kind == ("whole" if entry.base is None else "delta")
        and not entry.aliases
        and not entry.boundaries
        and entry.stored is None
    )


def _listed_paths(arrays: Doc, nodes: Mapping[str, Doc]) -> list[str]:
    return sorted(
        path
        for path, doc in nodes.items()
        if path.startswith("tables/") and doc.get("node_type") == "array" and path not in arrays
    )


def _chosen(values: list[Any], index: Any, name: str) -> Any:
    if type(index) is not int or not 0 <= index < len(values):
        raise ValueError(f"tables.{name} has {validate.shown(index)}, where {len(values)} are listed")
    return values[index]


def _number(numbered: dict[str, tuple[int, T]], value: T) -> int:
    """The number under which a value is stored once."""
    return numbered.setdefault(repr(value), (len(numbered), value))[0]
