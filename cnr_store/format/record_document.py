"""What is stored of a commit record: a version's group metadata, written last, with the record in its attributes.

It is ``versions/ID/zarr.json``: a Zarr v3 group with consolidated metadata and ``attributes.cnr``. A version
exists if and only if this object holds ``attributes.cnr``. A *void* record at the same key (``attributes.cnr_void``)
uses the id up instead. A *fold*, the same version's rows without a chain, has a record of the same shape at
``folds/ID/zarr.json``, under ``attributes.cnr_fold``; all its other objects lie below a folder of the record's nonce,
so that several attempts at a fold never touch each other's.

Entries of tables are lists, so that the record of thousands stays small: the paths of the arrays are those of their
Zarr documents, in ascending order. What an entry shares with others, its element type and codec, or its base, is stored
once.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, TypeVar

from msgspec import Meta, Struct
from msgspec.json import encode

from cnr_codecs import array_dtype
from cnr_codecs.payload.coded import valid_move
from cnr_store.errors import CorruptionError, FormatError, SaveError
from cnr_store.format import layout, validate
from cnr_store.format.arrays import MAX_DIMENSIONS, Doc, group_document
from cnr_store.format.layout import ESCAPED_NAMES, FEATURES, FOLDS, FORMAT, MAX_RANKS, VERSIONS, check_stored
from cnr_store.format.record import COUNTS, ArrayEntry, Record
from cnr_store.format.state import dumps, loads
from cnr_store.format.validate import Percent, Time, proven
from cnr_store.policies.checks import MOST, Natural
from cnr_store.policies.past import Past
from cnr_store.policies.policy import Offer

# The digest is that of the record with this in its place, since no text can hold its own.
NO_DIGEST = "0" * 64
_OF_ROWS = {"base", "rows", "codec"}
_DIMENSIONS = (range(1, 3), range(MAX_DIMENSIONS + 1))
_DIGEST = re.compile(rb'"digest":"([0-9a-f]{64})"')
MAX_RECORD_BYTES = 64 << 20
"""Of a record's object, which is read whole before any of it is proven."""

MAX_RANKS_LISTED = 64
"""One by one; of more, only the least, the mean and the most is stored."""

_World = Annotated[int, Meta(ge=0, le=MAX_RANKS)]
_Number = Annotated[float, Meta(ge=0, le=MOST)]
_ATTRIBUTE = {VERSIONS: "cnr", FOLDS: "cnr_fold"}
_SHOWN = 200
T = TypeVar("T")


def encode_record(record: Record) -> bytes:
    """The record's bytes, with their own digest inside."""
    nodes = {record.stored(path): node for path, node in record.nodes.items()}
    arrays, tables = pack_entries(record.arrays, nodes)
    cnr = {
        "digest": NO_DIGEST,  # first, so that no text of the caller's that looks like it comes before
        "format": FORMAT,
        "requires": sorted({*record.requires, *([ESCAPED_NAMES] if record.moved else [])}),
        "id": record.id,
        "nonce": record.nonce,
        "step": record.step,
        "time": record.time,
        "previous": record.previous,
        "needs": list(record.needs),
        "arrays": arrays,
        "tables": tables,
        "policy": dict(record.policy),
        "restores": record.restores,
        **({"spent": record.spent} if record.spent else {}),
        "bytes": record.objects_bytes,
        "manifest": record.manifest_sha256,
        "state": record.state_sha256,
        "metadata": record.metadata,
    }
    if record.prefix == FOLDS:  # by their paths below the record, where plain Zarr readers look for them
        below = {f"{record.nonce}/{path}": node for path, node in nodes.items()}
        nodes = {record.nonce: group_document(), **below}
    doc = group_document({_ATTRIBUTE[record.prefix]: cnr})
    doc["consolidated_metadata"] = {
        "kind": "inline",
        "must_understand": False,
        "metadata": nodes,
    }
    data = dumps(doc)
    if len(data) > MAX_RECORD_BYTES:
        raise SaveError(
            f"the commit record of version {record.id} would take {len(data)} bytes for {len(record.arrays)} arrays; "
            f"at most {MAX_RECORD_BYTES >> 20} MiB can be read: join small tensors into larger ones"
        )
    return with_digest(data)


def decode_record(data: bytes, version: str, prefix: str = VERSIONS) -> Record | None:
    """The commit record of `version`, or of its fold, parsed and proven; None for a void record."""
    what = f"commit record of {'version' if prefix == VERSIONS else 'the fold of version'} {version}"
    try:
        doc = loads(data, what, MAX_RECORD_BYTES)
    except FormatError as error:
        raise CorruptionError(f"{error}; the object was altered or cut") from error
    attributes = validate.member(doc, "attributes")
    cnr = validate.member(attributes, _ATTRIBUTE[prefix])
    if not isinstance(cnr, dict):
        if prefix == VERSIONS and isinstance(validate.member(attributes, "cnr_void"), dict):
            return None
        raise CorruptionError(f"{what}: it is neither a commit nor a void record; the object was altered")
    # The format comes first: another one may compute its digest otherwise.
    validate.check_format(cnr.get("format"), what)
    check_digest(data, cnr, what)
    try:
        unknown = sorted(set(proven(cnr["requires"], list[str], "requires")) - FEATURES)
        if not unknown:
            return _record(cnr, _nodes(doc, cnr, prefix), version, len(data), prefix)
    except (KeyError, ValueError) as error:
        raise CorruptionError(f"{what}: malformed: {error!r}") from error
    raise FormatError(f"{what} requires {', '.join(unknown)[:_SHOWN]}: install a newer cnr-store to read it")


def _nodes(doc: Doc, cnr: Doc, prefix: str) -> dict[str, Doc]:
    metadata = validate.member(doc["consolidated_metadata"], "metadata")
    nodes: dict[str, Doc] = proven(metadata, dict[str, Doc], "consolidated_metadata.metadata")
    return _above(proven(cnr["nonce"], validate.Token, "nonce"), nodes) if prefix == FOLDS else nodes


def _above(folder: str, nodes: Mapping[str, Doc]) -> dict[str, Doc]:
    """Metadata documents by their paths below the folder."""
    inside = {path: node for path, node in nodes.items() if path != folder}
    if any(not path.startswith(f"{folder}/") for path in inside):
        raise ValueError(f"metadata of nodes outside {folder}")
    return {path.removeprefix(f"{folder}/"): node for path, node in inside.items()}


def _record(cnr: Doc, nodes: dict[str, Doc], version: str, record_bytes: int, prefix: str) -> Record:
    arrays = _entries(
        unpack_entries(proven(cnr["arrays"], dict[str, Doc], "arrays"), cnr["tables"], nodes),
        escaped=ESCAPED_NAMES in cnr["requires"],
        bounded=layout.COLUMN_BOUNDARIES in cnr["requires"],
    )
    if prefix == VERSIONS:  # a fold may have a slot without its table
        _check_boundaries(arrays)
    members = {**cnr, "arrays": {}, "nodes": {}, "record_bytes": record_bytes, "prefix": prefix}
    members |= {"objects_bytes": cnr["bytes"], "metadata": cnr["metadata"]}
    members |= {f"{name}_sha256": cnr[name] for name in ("manifest", "state")}
    record: Record = proven(members, Record, "it")
    if record.id != version:
        raise ValueError(f"it is the record of {record.id}: objects were swapped")
    prove_policy(record.policy)
    record = replace(record, arrays=arrays, nodes=nodes)
    plain = {stored: path for path, stored in record.moved.items()}
    if not plain:
        return record
    return replace(record, nodes={plain.get(path, path): node for path, node in nodes.items()})


def _entries(arrays: Doc, *, escaped: bool, bounded: bool) -> dict[str, ArrayEntry]:
    entries: dict[str, ArrayEntry] = {}
    for stored, doc in arrays.items():
        path = stored
        try:
            entry = _entry(doc, bounded)
            if escaped and "name" in doc:
                path = proven(doc["name"], str, "name")
                entry = replace(entry, stored=stored)
            if path in entries or path == entry.stored:
                raise ValueError("it stands twice")
            if (entry.kind == "dense") != validate.array_path(path).startswith("dense/"):
                raise ValueError(f"its kind is {entry.kind}")
            check_stored(stored, path)
        except KeyError as error:
            raise ValueError(f"array {validate.shown(stored)}: it lacks {error}") from error
        except ValueError as error:
            raise ValueError(f"array {validate.shown(stored)}: {error}") from error
        entries[path] = entry
    return entries


def _entry(doc: Doc, bounded: bool) -> ArrayEntry:
    """What `ArrayEntry.to_json` made, proven; ValueError or KeyError where it is malformed."""
    if "boundaries" in doc and not bounded:
        raise ValueError(f"it has boundaries, and the record does not require {layout.COLUMN_BOUNDARIES}")
    is_dense = doc["kind"] == "dense"
    if not is_dense and not doc.keys() >= _OF_ROWS:
        raise ValueError(f"it lacks {', '.join(sorted(_OF_ROWS - doc.keys()))}")
    members = {**doc, "nbytes": doc["bytes"], "stored": None, "features": ()}
    entry: ArrayEntry = proven(members, ArrayEntry, "it")
    validate.check_sizes(entry.shape, "shape", not is_dense, _DIMENSIONS[is_dense])
    if is_dense:
        return ArrayEntry("dense", entry.shape, entry.element, nbytes=entry.nbytes, aliases=entry.aliases)
    if entry.kind != ("whole" if entry.base is None else "delta") or entry.codec is None:
        raise ValueError(f"an array of kind {entry.kind:.60} with base {entry.base}, or without a codec")
    if entry.rows > entry.shape[0]:
        raise ValueError(f"{entry.rows} rows of an array of shape {entry.shape}")
    if not valid_move(*entry.move):
        raise ValueError(f"its grid has moved to {str(entry.move)[:_SHOWN]}")
    if sum(entry.counts.values()) > entry.rows:
        raise ValueError(f"{entry.rows} rows, of which {entry.counts}")
    array_dtype(entry.element)  # refuses types that this release does not decode
    if edges := entry.boundaries:
        ascends = all(one < other for one, other in itertools.pairwise(edges))
        if len(edges) != (*entry.shape, -1)[1] + 1 or edges[0] != 0 or not ascends:
            raise ValueError(f"boundaries are {str(edges)[:_SHOWN]}, of an array of shape {entry.shape}")
    return entry


def _check_boundaries(arrays: Mapping[str, ArrayEntry]) -> None:
    """Prove that boundaries are those of columns of a table."""
    for path, entry in arrays.items():
        table, _, slot = path.rpartition("/")
        weight = arrays.get(f"{table}/weight")
        if entry.boundaries and (
            slot == "weight" or weight is None or weight.shape[1:] != entry.boundaries[-1:]
        ):
            raise ValueError(
                f"array {validate.shown(path)}: its boundaries end at column {entry.boundaries[-1]}, and its table "
                f"{'is not there' if weight is None else f'has shape {weight.shape}'}"
            )


def with_digest(data: bytes) -> bytes:
    """The bytes of a document whose first member ``digest`` is `NO_DIGEST`, with their own digest there."""
    return data.replace(_quoted(NO_DIGEST), _quoted(hashlib.sha256(data).hexdigest()), 1)


def check_digest(data: bytes, doc: Doc, what: str) -> None:
    """Prove the bytes of a document by the digest that it holds."""
    digest = doc.get("digest")
    if not isinstance(digest, str) or _DIGEST.fullmatch(_quoted(digest)) is None:
        raise CorruptionError(f"{what}: its digest is missing or malformed")
    blank = data.replace(_quoted(digest), _quoted(NO_DIGEST), 1)
    if hashlib.sha256(blank).hexdigest() != digest:
        raise CorruptionError(f"{what}: its digest does not match; the object was altered")


def _quoted(digest: str) -> bytes:
    return f'"digest":"{digest}"'.encode()


def encode_void(by: str, nonce: str, time: float) -> bytes:
    """A void record: it uses an id up, so that a late commit under it fails.

    `by`: the claim, or the tool, that made it.
    `nonce`: a random id of this very record.
    `time`: in seconds since 1970, UTC.
    """
    return dumps(group_document({"cnr_void": {"by": by, "nonce": nonce, "time": time}}))


def void_time(data: bytes) -> float:
    """When a void record was made; 0 where it does not say."""
    void = loads(data, "void record")["attributes"]["cnr_void"]
    try:
        return float(proven(void.get("time"), validate.Time, "time"))
    except ValueError:
        return 0.0


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
    lists: dict[str, list[Any]] = proven(tables, dict[str, list[Any]], "tables")
    forms, bases = proven(lists["forms"], list[Doc], "tables.forms"), lists["bases"]
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


class _Reason(Struct):
    count: Natural
    tables: list[str]
    bytes: Natural = 0
    delta_bytes: Natural = 0


class _Spread(Struct):
    min: _Number
    mean: _Number
    max: _Number


class _Budget(Struct):
    percent: Percent
    rms_step: Percent


class _Policy(Struct):
    """The members that writers go by, or that are shown to people one by one."""

    full: bool = True
    offer: Offer | None = None
    past: Past | None = None
    seconds: dict[str, Time] = {}
    ranks: dict[str, _World | list[_Number] | dict[str, Any]] | None = None  # by rank, or as `_Spread`
    whole: dict[str, _Reason] = {}
    budget: _Budget | None = None


def prove_policy(doc: Mapping[str, Any]) -> None:
    """Prove a policy."""
    policy: _Policy = proven(doc, _Policy, "policy")
    if encode(policy.past, order="sorted") != encode(doc.get("past"), order="sorted"):
        raise ValueError("policy.past lacks some member of sums, or has others")
    for reason in policy.whole.values():
        if reason.count < len(reason.tables):
            raise ValueError(f"policy.whole counts {reason.count} tables and names {len(reason.tables)}")
    if policy.ranks is None:
        return
    world = proven(policy.ranks.pop("world", None), _World, "policy.ranks.world")
    for name, numbers in policy.ranks.items():
        ranks = numbers if isinstance(numbers, list) else proven(numbers, _Spread, f"policy.ranks.{name:.60}")
        if isinstance(ranks, list) and (len(ranks) != world or world > MAX_RANKS_LISTED):
            raise ValueError(f"policy.ranks.{name:.60} lists {len(ranks)} ranks of {world}")
