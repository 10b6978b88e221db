"""What each rank has of a state dict that is saved, where in a version its tensors go, and what is written of them.

Every rank tells what its plan holds: a plan that came from a planner's cache is as good as a new one. Each rank then
computes the same from what all said.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from cnr_codecs import RowCodec, array_dtype
from cnr_store.errors import SaveError, StateError, UnsupportedModelError
from cnr_store.format.grid import MAX_CHUNK_DECODED_BYTES
from cnr_store.format.layout import dense_path, table_name, weight_path
from cnr_store.format.state import encode_state
from cnr_store.format.state_arrays import ArrayLeaf
from cnr_store.ranks.group import Document
from cnr_store.ranks.owners import split_by_size
from cnr_store.ranks.placement import Piece, Placement
from cnr_store.ranks.protocol import Team
from cnr_store.training.distributed.pieces import LocalPiece, by_column
from cnr_store.training.model.object_state import tensor_leaf
from cnr_store.training.model.row_arrays import copy_parts
from cnr_store.training.model.tensors import (
    AnyArray,
    dense_numpy,
    dense_tensor,
    dense_type,
    dtype_name,
    dtype_named,
)
from cnr_store.writing.plan import DensePiece, DenseWrite, Held, RowsWrite

ROWS_BYTES = 16 << 10
"""Smaller tensors are dense, unless a pattern names them."""
_ELEMENTS = frozenset({"float32", "float16", "bfloat16", "float64"})


class Box(NamedTuple):
    """A part of a tensor on a rank."""

    rank: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass
class LocalItems:
    """What this rank's plan holds."""

    # By name: the shape of the whole, and offsets and memory of each part here
    tensors: dict[str, tuple[torch.Size, list[tuple[torch.Size, torch.Tensor]]]] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)  # everything that is no tensor, as tagged JSON
    # By path, arrays in values that are too large to stand there
    beside: dict[str, ArrayLeaf] = field(default_factory=dict)
    # Where names lie in the nested state dict, if the planner says so
    paths: Mapping[str, Sequence[str | int]] = field(default_factory=dict)

    def parts(self, name: str) -> list[tuple[Sequence[int], torch.Tensor]]:
        """Offsets and memory of each part of a tensor here that is not empty."""
        _, parts = self.tensors.get(name, ((), []))
        return [(offsets, part) for offsets, part in parts if part.numel()]

    def say(self) -> Document:
        """What the other ranks must know."""
        return {
            "tensors": {
                name: [
                    list(shape),
                    dtype_name(parts[0][1].dtype),
                    [[list(offsets), list(part.shape)] for offsets, part in parts],
                ]
                for name, (shape, parts) in self.tensors.items()
            },
            "values": self.values,
            "beside": {
                path: [list(leaf.values.shape), leaf.values.dtype.str, leaf.torch_dtype]
                for path, leaf in self.beside.items()
            },
            "paths": {name: list(path) for name, path in self.paths.items()},
        }


def local_items(plan: SavePlan, planner: SavePlanner, rank: int) -> LocalItems:
    """Resolve what a plan holds."""
    found = LocalItems(paths=plan.planner_data if isinstance(plan.planner_data, Mapping) else {})
    for item in plan.items:
        name = item.index.fqn
        if item.type == WriteItemType.BYTE_IO:
            found.values[name] = _encoded(name, _value(planner, item), rank, found.beside)
            continue
        assert item.tensor_data is not None  # only values have none
        if not name:
            raise StateError(
                "a tensor of the state dict has the name '', which no array can have: rename its key"
            )
        tensor = planner.resolve_data(item)
        if not isinstance(tensor, torch.Tensor) or tensor.shape != item.tensor_data.chunk.sizes:
            raise StateError(
                f"{name}: the planner gave {type(tensor).__name__} for a tensor of another shape"
            )
        _, parts = found.tensors.setdefault(name, (item.tensor_data.size, []))
        parts.append((item.tensor_data.chunk.offsets, tensor.detach()))
    return found


def _value(planner: SavePlanner, item: WriteItem) -> object:
    """The value itself: what `resolve_data` gives are pickled bytes, which nothing here reads.

    A planner's own `transform_object` may change values. Whether it does so is seen by the bytes.
    """
    index = item.index
    lookup = getattr(planner, "lookup_object", None)
    if lookup is None:
        raise StateError(
            f"{index.fqn} is no tensor, and {type(planner).__name__} has no lookup_object(index) that gives it: "
            "derive the planner from DefaultSavePlanner"
        )
    found: object = lookup(index)
    usual: Any = DefaultSavePlanner.transform_object
    own = getattr(planner, "transform_object", None)
    if own is not None and getattr(own, "__func__", None) is not usual:
        made, expected = own(item, found), usual(planner, item, found)
        if not isinstance(made, io.BytesIO) or made.getvalue() != expected.getvalue():
            raise StateError(
                f"transform_object of {type(planner).__name__} changes {index.fqn}, which is no tensor, and gives "
                "pickled bytes, which are not stored: change it before the save, or in lookup_object"
            )
    return found


def _encoded(name: str, value: object, rank: int, beside: dict[str, ArrayLeaf]) -> Any:
    def put_beside(path: str, leaf: ArrayLeaf) -> str:
        # The rank's number, because each sees its own names only.
        place = dense_path("state", f"{rank:06d}.{path.partition('values')[2].strip('[]')}")
        while place in beside:
            place += "~"
        beside[place] = leaf
        return place

    # Encoded where it will stand, so that errors say which it is, and what is nested too deep is refused.
    tree = encode_state({"dcp": {"values": {name: value}}}, beside=put_beside, as_leaf=tensor_leaf)
    values: dict[str, Any] = tree["dcp"]["values"]
    return values["$dict"][0][1] if name.startswith("$") else values[name]


@dataclass(frozen=True)
class PlacedTensor:
    """A tensor that is saved: the same on all ranks."""

    name: str  # name, shape, element: as in the state dict; torch's name of the element type
    shape: tuple[int, ...]
    element: str
    boxes: tuple[Box, ...]  # the parts that ranks hold. None is empty.
    is_rows: bool  # whether it is stored as an array of rows
    path: str  # of its array
    # Of an array of rows, who holds which of them; None if one rank has to put it together first
    placement: Placement | None = None
    # The rank that puts it together, or holds it whole; -1 for an array of rows with a placement
    owner: int = -1

    @property
    def nbytes(self) -> int:
        """Its size in memory."""
        return math.prod(self.shape) * dtype_named(self.element).itemsize

    @property
    def is_split(self) -> bool:
        """Whether no rank holds it whole."""
        return [box.sizes for box in self.boxes] != [self.shape] and 0 not in self.shape

    @property
    def rows_shape(self) -> tuple[int, int]:
        """Its shape as an array of rows: one of a single dimension is a column."""
        return self.shape[0], (*self.shape, 1)[1]


def place_tensors(documents: Sequence[Document], is_table: Callable[[str], bool]) -> list[PlacedTensor]:
    """Where each tensor goes, from what all ranks said.

    `is_table`: whether a table of this name is an array of rows, however small.
    """
    merged = _merge(documents)
    placed: list[PlacedTensor] = []
    used: set[str] = set()
    # Names of weights come first, so that none of them has to give way.
    for name in sorted(merged, key=lambda name: (not name.endswith(".weight"), name)):
        shape, element, boxes = merged[name]
        tensor = PlacedTensor(name, shape, element, boxes, False, "")
        is_rows = _is_rows(tensor, is_table)
        path = _rows_path(name, used) if is_rows else dense_path("model", name)
        used.add(path)
        placement = _placement(tensor) if is_rows else None
        placed.append(replace(tensor, is_rows=is_rows, path=path, placement=placement))
    # What is split is put together at one rank, so that each has about as much of it.
    apart = [tensor for tensor in placed if tensor.placement is None and tensor.is_split]
    owners = split_by_size([tensor.nbytes for tensor in apart], range(len(documents)))
    by_name = {tensor.name: owner for tensor, owner in zip(apart, owners, strict=True)}
    return [_owned(tensor, by_name.get(tensor.name)) for tensor in placed]


def _owned(tensor: PlacedTensor, owner: int | None) -> PlacedTensor:
    if tensor.placement is not None:
        return tensor
    if owner is None:
        owner = tensor.boxes[0].rank if tensor.boxes else 0
    placement = None
    if tensor.is_rows:
        rows, columns = tensor.rows_shape
        placement = Placement.of(tensor.name, (rows, columns), [Piece(0, rows, 0, columns, owner)])
    return replace(tensor, placement=placement, owner=owner)


def _merge(documents: Sequence[Document]) -> dict[str, tuple[tuple[int, ...], str, tuple[Box, ...]]]:
    merged: dict[str, tuple[tuple[int, ...], str, list[Box]]] = {}
    for rank, doc in enumerate(documents):
        for name, (shape, element, parts) in doc["tensors"].items():
            kind = (tuple(shape), element)
            known = merged.setdefault(name, (*kind, []))
            if known[:2] != kind:
                raise SaveError(
                    f"{name} is {kind} on rank {rank} and {known[:2]} on others: give all ranks one state dict"
                )
            known[2].extend(
                Box(rank, tuple(offsets), tuple(sizes)) for offsets, sizes in parts if 0 not in sizes
            )
    for name, (shape, _, boxes) in merged.items():
        if sum(math.prod(box.sizes) for box in boxes) != math.prod(shape):
            raise SaveError(
                f"{name}: the boxes of all ranks do not hold the {math.prod(shape)} values of shape {shape} once each: "
                f"{', '.join(map(str, boxes[:4]))}"
            )
    return {name: (shape, element, tuple(boxes)) for name, (shape, element, boxes) in merged.items()}


def _is_rows(tensor: PlacedTensor, is_table: Callable[[str], bool]) -> bool:
    if tensor.element not in _ELEMENTS or len(tensor.shape) not in (1, 2) or 0 in tensor.shape:
        return False
    row_bytes = tensor.rows_shape[1] * array_dtype(tensor.element).itemsize
    if row_bytes > MAX_CHUNK_DECODED_BYTES:
        return False
    if len(tensor.shape) == 2 and is_table(table_name(tensor.name)):
        return True
    return tensor.nbytes >= ROWS_BYTES and (len(tensor.shape) == 2 or tensor.is_split)


def _placement(tensor: PlacedTensor) -> Placement | None:
    """Who holds which rows, if each rank holds one range of them; else None."""
    ranges: dict[int, set[tuple[int, int]]] = {}
    pieces = []
    for rank, (first, *column), (rows, *columns) in tensor.boxes:
        ranges.setdefault(rank, set()).add((first, rows))
        first_column, width = (*column, *columns) if column else (0, 1)
        pieces.append(Piece(first, rows, first_column, width, rank))
    if any(len(found) > 1 for found in ranges.values()):
        return None
    try:
        return Placement.of(tensor.name, tensor.rows_shape, pieces)
    except UnsupportedModelError:
        return None


def _rows_path(name: str, used: set[str]) -> str:
    table = table_name(name)
    while (path := weight_path(table)) in used:
        table += "~"
    return path


def merged_values(documents: Sequence[Document]) -> tuple[dict[str, Any], dict[str, tuple[str | int, ...]]]:
    """The values and the paths of names, of all ranks."""
    values = {name: value for doc in documents for name, value in doc["values"].items()}
    paths = {name: tuple(path) for doc in documents for name, path in doc["paths"].items()}
    return dict(sorted(values.items())), dict(sorted(paths.items()))


@dataclass(frozen=True)
class TensorRows:
    """Rows of a tensor of the state dict, from the parts of its columns side by side. They are read when encoded."""

    tensor: PlacedTensor
    parts: Sequence[LocalPiece]

    def block(self, begin: int, end: int) -> AnyArray:
        columns = sum(part.columns for part in self.parts)
        out = np.empty((end - begin, columns), array_dtype(self.tensor.element))
        copy_parts(self.tensor.name, self.parts, slice(begin, end), out)
        return out


def rows_write(
    tensor: PlacedTensor, local: LocalItems, whole: Mapping[str, DenseWrite], team: Team, codec: RowCodec
) -> RowsWrite:
    """An array of rows to write, of which this rank may have all, some or none.

    `whole`: by path, those that one rank has put together.
    """
    parts = local.parts(tensor.name) if tensor.owner in (-1, team.rank) else []
    if tensor.owner == team.rank and (joint := whole.get(tensor.path)):
        parts = [((0, 0), dense_tensor(joint.values, joint.torch_dtype))]
    columns = by_column(
        tensor.name, [LocalPiece(offsets[0], (*offsets, 0)[1], part) for offsets, part in parts]
    )
    held = None
    if team.world > 1:
        assert tensor.placement is not None  # that of every array of rows is known
        first_row, rows = (columns[0].first_row, len(columns[0].tensor)) if columns else (0, 0)
        spans = tuple((part.first_column, part.columns) for part in columns)
        held = Held(first_row, rows, spans, tensor.placement, None)
    return RowsWrite(
        path=tensor.path,
        shape=tensor.rows_shape,
        element=tensor.element,
        base=None,
        ids=None,
        source=TensorRows(tensor, columns),
        codec=codec,
        held=held,
    )


def dense_write(tensor: PlacedTensor, local: LocalItems, rank: int) -> DenseWrite:
    """A tensor as a dense array to write, with its values where it is whole; of one that is split, with its parts."""
    parts = local.parts(tensor.name)
    if tensor.owner == rank and parts and not tensor.is_split:
        return DenseWrite(tensor.path, *dense_numpy(parts[0][1]))
    kind = dense_type(torch.empty(tensor.shape, dtype=dtype_named(tensor.element), device="meta"))
    pieces = (DensePiece(tuple(offsets), dense_numpy(part)[0]) for offsets, part in parts)
    return DenseWrite(
        *(tensor.path, *kind),
        is_here=tensor.owner == rank,
        pieces=tuple(pieces) if tensor.is_split else None,
        owner=tensor.owner,
    )
