"""Import of a model that was saved as one file: its tables by rows, everything else whole, as a baseline."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from cnr_backends import open_backend
from cnr_codecs import array_dtype
from cnr_store.catalog.catalog import Catalog, VersionInfo
from cnr_store.errors import FormatError, OptionError, UnsupportedModelError
from cnr_store.format.grid import MAX_CHUNK_DECODED_BYTES
from cnr_store.format.layout import dense_path, table_name, weight_path
from cnr_store.format.safetensors import LENGTH, MAX_HEADER_BYTES, decode_header
from cnr_store.format.state import encode_state
from cnr_store.format.state_arrays import NUMBER_TYPES, ArrayLeaf
from cnr_store.policies.policy import decide
from cnr_store.policies.widths import Bits, match_pattern
from cnr_store.reading.opening import Url
from cnr_store.training.importing.model_file import FileTensor, ModelFile, clean_names
from cnr_store.training.saving.codec_choice import CodecChoice, CodecOption
from cnr_store.writing.plan import DenseWrite, Plan, RowsWrite
from cnr_store.writing.writer import Writer

Array = np.ndarray[Any, Any]
TABLE_ROWS = 10_000
"""Without being told, a matrix of at least so many rows is taken for a table."""

_COMPARED_BYTES = 8 << 20
_NUMPY_ELEMENTS = frozenset(dtype.name for dtype in NUMBER_TYPES.values())


class FileRows:
    """Rows of a table in a file, read when they are encoded."""

    def __init__(self, tensor: FileTensor) -> None:
        self._tensor = tensor

    def values(self, begin: int, end: int) -> Array:
        rows = self._tensor.values[begin:end]
        if self._tensor.element == "bfloat16":
            return (rows.astype(np.uint32) << 16).view(np.float32)
        return np.array(rows, array_dtype(self._tensor.element), order="C")


def import_file(
    source: str | os.PathLike[str],
    url: Url,
    step: int = 0,
    bits: Bits = "auto",
    *,
    codec: CodecOption = None,
    tables: Sequence[str] | None = None,
    key: str | None = None,
    workers: int = 2,
    **storage_options: Any,
) -> VersionInfo:
    """Store a model's state dict, saved by `torch.save` or as safetensors, as a baseline version.

    A model with these names loads it by `cnr_store.load(url, model)`, without an optimizer, as there is no
    optimizer's state. The file is mapped into memory, and nothing in it is run.

    Parameters
    ----------
    source
        A local file. Prefixes of DistributedDataParallel and `torch.compile` are left out of names, except in a file
        that `cnr_store.export` wrote. Tied tensors are stored once; a safetensors file tells of them only if
        `cnr_store.export` wrote it.
    url, storage_options
        The store, as everywhere. The version becomes its latest, and a run that still saves there is superseded.
    step
        The version's count of training steps.
    bits, codec
        As in `Checkpointer`.
    tables
        Patterns of the names (without ``.weight``) of embedding tables. Must be given if the model has other tables
        than the matrices called ``weight`` that have at least 10,000 rows.
    key
        Where in a checkpoint of several parts the state dict is, such as ``"model"``.
    workers
        Threads that encode.

    Raises
    ------
    FormatError
        The file is neither, is damaged, or holds something else than tensors.
    OptionError
        A pattern fits nothing that can be a table, or another option is out of range.
    SaveError
        Nothing was stored.
    """
    if type(step) is not int or step < 0:
        raise OptionError(f"step={step!r}: give an integer of at least 0")
    if type(workers) is not int or workers < 1:
        raise OptionError(f"workers={workers!r}: give an integer of at least 1")
    path = _path(source)
    patterns = _patterns(tables)
    codecs = CodecChoice(bits, codec)
    found = _open(path, key)
    chosen = _choose_tables(found.tensors, patterns)
    codecs.check_tables([table_name(name) for name in chosen])
    backend = open_backend(url, **storage_options)
    Catalog(backend).check_format()
    dense = [
        _dense(name, tensor, _aliases(found, name))
        for name, tensor in found.tensors.items()
        if name not in chosen
    ]
    plan = Plan(
        step=step,
        previous=None,
        rows=[_rows(name, found.tensors[name], _aliases(found, name), codecs) for name in chosen],
        dense=dense,
        state=_state(found, dense),
        policy=asdict(decide("full", (), full=True)),
    )
    return VersionInfo.from_record(Writer(backend, workers).write(plan))


def _path(source: object) -> Path:
    name = os.fspath(source) if isinstance(source, str | os.PathLike) else None
    try:
        if isinstance(name, str) and b"\0" not in os.fsencode(name):
            return Path(name)
    except UnicodeEncodeError:  # no file is called so
        pass
    raise OptionError(f"can't import {source!r}: give the path of a file")


def _patterns(tables: object) -> list[str] | None:
    if tables is None:
        return None
    try:
        found = [tables] if isinstance(tables, str) else list(tables)  # type: ignore[call-overload]  # or TypeError
    except TypeError:
        found = [None]
    if not all(isinstance(pattern, str) for pattern in found):
        raise OptionError(f"tables={tables!r}: give names, or patterns like 'user*'")
    return found


def _open(path: Path, key: str | None) -> ModelFile:
    try:
        with path.open("rb") as file:
            is_zip = file.read(4) == b"PK\x03\x04"
            if not is_zip and key is None:
                return _read_safetensors(file.fileno(), str(path))
    except OSError as error:
        raise FormatError(f"can't read {path}: {error}") from error
    if not is_zip:
        raise FormatError(f"{path} is no file of torch.save, so there is nothing under key={key!r}")
    try:
        from cnr_store.training.importing.torch_file import read_torch_file
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(
            f"{path} was written by torch.save, and there is no torch: pip install 'cnr-store[torch]'",
            name="torch",
        ) from error
    return read_torch_file(path, key)


def _read_safetensors(file: int, what: str) -> ModelFile:
    nbytes = os.fstat(file).st_size
    length = LENGTH.unpack(os.pread(file, LENGTH.size, 0))[0] if nbytes >= LENGTH.size else 0
    start = LENGTH.size + length
    if not 2 <= length <= MAX_HEADER_BYTES or start > nbytes:
        raise FormatError(f"{what} is neither a safetensors file nor one of torch.save (since torch 1.6)")
    header = decode_header(os.pread(file, length, LENGTH.size), nbytes - start, what)
    data = mmap.mmap(file, 0, access=mmap.ACCESS_READ)
    # What was exported from a store has the names that a model's tensors have in stores already.
    names = {key: key for key in header.tensors} if header.is_ours else clean_names(header.tensors)
    tensors, aliases = {}, {}
    for key, place in header.tensors.items():
        dtype = np.dtype(place.element if place.element in _NUMPY_ELEMENTS else f"u{place.itemsize}")
        values: Array = np.ndarray(place.shape, dtype.newbyteorder("<"), data, start + place.begin)
        tensors[names[key]] = FileTensor(place.element, values)
    for alias, key in header.aliases.items():
        # A tool that changes tensors may leave the note that two of them are one.
        if _same_bytes(tensors[names[alias]].values, tensors[names[key]].values):
            aliases[names[alias]] = names[key]
    return ModelFile({name: each for name, each in tensors.items() if name not in aliases}, aliases)


def _same_bytes(one: Array, other: Array) -> bool:
    """Whether two mapped tensors of one type and shape hold the same bits, compared piece by piece."""
    left, right = (values.reshape(-1).view(np.uint8) for values in (one, other))
    pieces = (slice(first, first + _COMPARED_BYTES) for first in range(0, len(left), _COMPARED_BYTES))
    return all(np.array_equal(left[piece], right[piece]) for piece in pieces)


def _choose_tables(tensors: Mapping[str, FileTensor], patterns: Sequence[str] | None) -> list[str]:
    able = [
        name for name, tensor in tensors.items() if tensor.may_be_table and name.split(".")[-1] == "weight"
    ]
    if patterns is None:
        return [name for name in able if len(tensors[name].values) >= TABLE_ROWS]
    wanted = dict.fromkeys(patterns, True)
    for pattern in wanted:
        if not any(match_pattern({pattern: True}, table_name(name)) for name in able):
            raise OptionError(
                f"tables: the pattern {pattern!r} fits no floating matrix called weight; there are "
                f"{', '.join(repr(table_name(name)) for name in able) or 'none'}"
            )
    return [name for name in able if match_pattern(wanted, table_name(name))]


def _rows(name: str, tensor: FileTensor, aliases: tuple[str, ...], codecs: CodecChoice) -> RowsWrite:
    rows, dim = tensor.values.shape
    row_bytes = dim * array_dtype(tensor.element).itemsize
    if row_bytes > MAX_CHUNK_DECODED_BYTES:
        raise UnsupportedModelError(
            f"{name}: a row takes {row_bytes} bytes, and at most {MAX_CHUNK_DECODED_BYTES} can be stored by rows; "
            "name the tables with tables=..."
        )
    table = table_name(name)
    return RowsWrite(
        path=weight_path(table),
        shape=(rows, dim),
        element=tensor.element,
        base=None,
        ids=None,
        source=FileRows(tensor),
        codec=codecs.of(table, rows * row_bytes),
        aliases=aliases,
    )


def _dense(name: str, tensor: FileTensor, aliases: tuple[str, ...]) -> DenseWrite:
    stored = None if tensor.element in _NUMPY_ELEMENTS else tensor.element
    return DenseWrite(dense_path("model", name), tensor.values, stored, aliases)


def _aliases(found: ModelFile, name: str) -> tuple[str, ...]:
    return tuple(alias for alias, owner in found.aliases.items() if owner == name)


def _state(found: ModelFile, dense: list[DenseWrite]) -> Any:
    """The state of a run without an optimizer; what is large of it is added to `dense`."""

    def beside(path: str, leaf: ArrayLeaf) -> str:
        place = dense_path("state", f"imported.{len(dense)}")
        dense.append(DenseWrite(place, leaf.values, leaf.torch_dtype))
        return place

    tree: dict[str, Any] = {
        "reader": None,
        "objects": {},
        "optimizers": [],
        "extra_state": dict(found.extra_state),
        "rng": None,
    }
    return encode_state(tree, beside=beside, as_leaf=found.as_leaf)
