"""Imports a model that was saved as one file, as a baseline: its tables by rows, everything else whole."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cnr_backends import open_backend
from cnr_codecs import array_dtype
from cnr_store.catalog.catalog import Catalog, Url
from cnr_store.catalog.claims import check_no_live_writer
from cnr_store.catalog.version_info import VersionInfo
from cnr_store.errors import FormatError, OptionError, UnsupportedModelError, listed, option
from cnr_store.format.grid import MAX_CHUNK_DECODED_BYTES
from cnr_store.format.layout import decode_name, dense_path, table_name, weight_path
from cnr_store.format.record import Record
from cnr_store.format.state import encode_state
from cnr_store.format.state_arrays import Array, ArrayLeaf
from cnr_store.maintenance.collection.retention import room_advice
from cnr_store.policies.checks import integer
from cnr_store.policies.policy import decide
from cnr_store.policies.widths import Bits, match_pattern
from cnr_store.training.importing.model_file import (
    NUMPY_ELEMENTS,
    FileTensor,
    ModelFile,
    read_safetensors_file,
)
from cnr_store.training.model.patterns import check_patterns
from cnr_store.training.saving.codec_choice import CodecChoice, CodecOption
from cnr_store.writing.plan import DenseWrite, Plan, RowsWrite
from cnr_store.writing.writer import Writer

log = logging.getLogger("cnr_store")
TABLE_ROWS = 10_000
"""With ``tables=None``, a matrix of at least so many rows is taken for a table."""
_STEP_IN_NAME = re.compile(
    r"(?:^(?=\d+(?:\.\w+)?$)|(?<![a-z])(?:step|iter|iteration|ckpt|checkpoint)s?[-_=]?)(\d{1,18})(?!\d)", re.I
)


@dataclass(frozen=True)
class FileRows:
    """Rows of a table in a file. Encoding reads them, so the whole table need not fit into memory."""

    tensor: FileTensor

    def block(self, begin: int, end: int) -> Array:
        rows = self.tensor.values[begin:end]
        if self.tensor.element == "bfloat16":
            return (rows.astype(np.uint32) << 16).view(np.float32)
        return np.array(rows, array_dtype(self.tensor.element), order="C")


def import_file(
    source: str | os.PathLike[str],
    url: Url,
    step: int | None = None,
    bits: Bits | None = None,
    *,
    codec: CodecOption = None,
    tables: Sequence[str] | None = None,
    key: str | None = None,
    workers: int = 2,
    **storage_options: Any,
) -> VersionInfo:
    """Store a model's state dict, saved by `torch.save` or as safetensors, as a baseline version.

    A model with these names loads it with `cnr_store.load(url, model)`; without an optimizer, because the file holds
    no optimizer state. The file is mapped into memory, and no code in it is run.

    Parameters
    ----------
    source
        A local file. Prefixes of DistributedDataParallel and `torch.compile` are removed from names, except in a file
        that `cnr_store.export` wrote. Tied tensors are stored once; a safetensors file records them only if
        `cnr_store.export` wrote it.
    url, storage_options
        The store: an fsspec URL, a path, or a Zarr store, and options of its filesystem. Those that are called as a
        parameter is, as S3's ``key``, go into one mapping: ``storage_options={"key": ...}``. The version becomes the
        latest. No run may be live there: the one that wrote last has closed its `Checkpointer`, or was ended by `gc`
        with ``end_run=True``.
    step
        The step that the version gets. By default that of an entry ``step``, ``global_step`` or ``iteration`` beside
        `key`; else that of the file's name, as in ``step-1200.pt``, ``checkpoint_1200.pt`` or ``1200.pt``; else 0.
    bits, codec
        As in `Checkpointer`.
    tables
        Names of embedding tables (without ``.weight``), or patterns of names. Needed if tables are other than the
        matrices called ``weight`` of at least 10,000 rows. What was taken for a table and what not is logged, and
        a warning names smaller matrices that look like tables.
    key
        The entry that holds the state dict, such as ``"model"``, in a checkpoint of several parts. Where no entry is
        called so, dots lead into entries of entries: ``"state.model"``.
    workers
        Threads that encode.

    Returns
    -------
    The new version.

    Raises
    ------
    FormatError
        The file has another format, is damaged, or holds something other than tensors.
    OptionError
        A pattern fits nothing that can be a table, or another option is out of range.
    UnsupportedModelError
        A row of a table is too wide to be stored.
    SaveError
        Writing failed. Nothing was stored.
    SupersededError
        A run is or may be live there. Nothing was stored.
    """
    step = None if step is None else integer("step", step)
    workers = integer("workers", workers, minimum=1)
    path = _path(source)
    patterns = None if tables is None else check_patterns("tables", tables)
    codecs = CodecChoice(bits, codec)
    backend = open_backend(url, **storage_options)  # first, as it tells an option that is misspelled
    model = _open(path, key)
    named = _STEP_IN_NAME.findall(path.name)
    if step is None and model.step is None and not named:
        log.warning("%s: no step found, stored as step 0; give it, as with %s", path, option("step", 1200))
    if step is None:
        step = int([0, *named][-1]) if model.step is None else model.step
    chosen = _choose_tables(model.tensors, patterns)
    codecs.check_tables([table_name(name) for name in chosen])
    Catalog(backend).check_format()
    # Before the check: a job that claims the store after it wins.
    writer = Writer(backend, workers, room_advice=room_advice)
    writer.of_run = False
    check_no_live_writer(backend)
    dense = [
        DenseWrite(
            dense_path("model", name),
            tensor.values,
            torch_dtype=None if tensor.element in NUMPY_ELEMENTS else tensor.element,
            aliases=_aliases(model, name),
        )
        for name, tensor in model.tensors.items()
        if name not in chosen
    ]
    plan = Plan(
        step=step,
        previous=None,
        rows=[_rows(name, model.tensors[name], _aliases(model, name), codecs) for name in chosen],
        dense=dense,
        state=_state(model, dense),
        policy=asdict(decide("full", None, full=True)),
    )
    try:
        record = writer.write(plan)
    finally:
        writer.close()
    log.info("%s is version %s of step %d: %s", path, record.id, record.step, taken_text(record))
    return VersionInfo.from_record(record)


def taken_text(record: Record) -> str:
    """What of a file became tables, and what is stored whole."""
    found: dict[str, list[str]] = {"tables": [], dense_path("model", "")[:-1]: []}
    for path, entry in record.arrays.items():
        place, _, name = path.removesuffix("/weight" * (entry.kind != "dense")).rpartition("/")
        if place in found:
            found[place].append(_shown(decode_name(name), entry.shape))
    tables, whole = found.values()
    return f"tables: {', '.join(tables) or 'none'}; whole: {listed(whole) or 'nothing'}"


def _shown(name: str, shape: Sequence[int]) -> str:
    return f"{name} ({' x '.join(f'{length:,}' for length in shape)})"


def _warn_of_small_tables(
    shapes: Mapping[str, Sequence[int]], chosen: Sequence[str], names: Collection[str]
) -> None:
    """Name matrices with the name and the shape of an embedding that are stored whole. A linear layer has a bias."""
    small = [
        name
        for name, (rows, dim) in shapes.items()
        if dim < rows < TABLE_ROWS and name.removesuffix("weight") + "bias" not in names
    ]
    if small:
        log.warning(
            "stored whole, as they have fewer than 10,000 rows: %s. If any of these are tables, import again with all "
            "of the tables, such as %s",
            listed(_shown(name, shapes[name]) for name in small),
            option("tables", [table_name(name) for name in (*chosen, *small)][:5]),
        )


def _path(source: object) -> Path:
    with suppress(TypeError, UnicodeEncodeError):  # it is no name, or none that a file has
        if b"\0" not in os.fsencode(path := Path(source)):  # type: ignore[arg-type]  # what is no path raises
            return path
    raise OptionError(f"can't import {source!r}: give the path of a file")


def _open(path: Path, key: str | None) -> ModelFile:
    try:
        with path.open("rb") as file:
            is_zip = file.read(4) == b"PK\x03\x04"
            if not is_zip and key is None:
                return read_safetensors_file(file.fileno(), str(path))
    except OSError as error:
        raise FormatError(f"can't read {path}: {error}") from error
    if not is_zip:
        raise FormatError(f"{path} is no file of torch.save, so it has nothing under {option('key', key)}")
    try:
        from cnr_store.training.importing.torch_file import read_torch_file
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(
            f"{path} was written by torch.save, and reading it needs torch: pip install 'cnr-store[torch]'",
            name="torch",
        ) from error
    return read_torch_file(path, key)


def _choose_tables(tensors: Mapping[str, FileTensor], patterns: Sequence[str] | None) -> list[str]:
    candidates = [
        name
        for name, tensor in tensors.items()
        if name.split(".")[-1] == "weight"
        and tensor.element in ("float32", "float16", "bfloat16")
        and (tensor.values.ndim == 2 and tensor.values.size)
    ]
    if patterns is None:
        chosen = [name for name in candidates if len(tensors[name].values) >= TABLE_ROWS]
        _warn_of_small_tables({name: tensors[name].values.shape for name in candidates}, chosen, tensors)
        return chosen
    wanted = dict.fromkeys(patterns, True)
    for pattern in wanted:
        if not any(match_pattern({pattern: True}, table_name(name)) for name in candidates):
            raise OptionError(
                f"tables: the pattern {pattern!r} fits no floating matrix called weight; there are "
                f"{', '.join(repr(table_name(name)) for name in candidates) or 'none'}"
            )
    return [name for name in candidates if match_pattern(wanted, table_name(name))]


def _rows(name: str, tensor: FileTensor, aliases: tuple[str, ...], codecs: CodecChoice) -> RowsWrite:
    rows, dim = tensor.values.shape
    row_bytes = dim * array_dtype(tensor.element).itemsize
    if row_bytes > MAX_CHUNK_DECODED_BYTES:
        raise UnsupportedModelError(
            f"{name}: a row takes {row_bytes} bytes, and at most {MAX_CHUNK_DECODED_BYTES} can be stored by rows; "
            f"name the tables, such as {option('tables', ['users'])}"
        )
    table = table_name(name)
    return RowsWrite(
        path=weight_path(table),
        shape=(rows, dim),
        element=tensor.element,
        base=None,
        ids=None,
        source=FileRows(tensor),
        codec=codecs.codec_for(table, rows * row_bytes),
        aliases=aliases,
    )


def _aliases(model: ModelFile, name: str) -> tuple[str, ...]:
    return tuple(alias for alias, owner in model.aliases.items() if owner == name)


def _state(model: ModelFile, dense: list[DenseWrite]) -> Any:
    """The state of a run without an optimizer. Its large arrays are appended to `dense`."""

    def beside(path: str, leaf: ArrayLeaf) -> str:
        place = dense_path("state", f"imported.{len(dense)}")
        dense.append(DenseWrite(place, leaf.values, leaf.torch_dtype))
        return place

    tree: dict[str, Any] = {
        "reader": None,
        "objects": {},
        "optimizers": [],
        "extra_state": dict(model.extra_state),
        "rng": None,
    }
    if model.module_versions is not None:
        tree["module_versions"] = dict(model.module_versions)
    return encode_state(tree, beside=beside, as_leaf=model.as_leaf)
