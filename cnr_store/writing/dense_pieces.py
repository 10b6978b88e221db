"""Brings dense arrays together that ranks hold in pieces: each at the rank that puts it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cnr_store.errors import SaveError
from cnr_store.writing.exchange import Peers
from cnr_store.writing.plan import DensePiece, DenseWrite

_HEADER_BYTES = 8


def joined(dense: Sequence[DenseWrite], peers: Peers | None) -> list[DenseWrite]:
    """The dense arrays of a plan, those that this rank puts with their values.

    Parameters
    ----------
    dense
        The same arrays in pieces on all ranks, in the same order. The others may differ.
    peers
        The ranks that share them; None where this process has them all.

    Raises
    ------
    SaveError
        No rank has some part of an array.
    """
    shared = [write for write in dense if write.pieces is not None]  # which ranks know by their numbers
    if not shared:
        return list(dense)
    me = 0 if peers is None else peers.rank
    pieces = {number: list(write.pieces or ()) for number, write in enumerate(shared) if write.owner == me}
    if peers is not None and peers.world > 1:
        owners = {write.owner for write in shared}
        messages = {owner: _packed(shared, owner) for owner in sorted(owners - {me})}
        others = [rank for rank in range(peers.world) if rank != me] if me in owners else []
        for data in peers.exchange(messages, others).values():
            for number, piece in _unpacked(data, shared):
                pieces[number].append(piece)
    whole = {shared[number].path: _whole(shared[number], pieces[number]) for number in pieces}
    return [whole.get(write.path, write) for write in dense]


def _packed(shared: Sequence[DenseWrite], owner: int) -> list[Any]:
    """What this rank has of the arrays of an owner, as a message."""
    sent = [
        (number, piece)
        for number, write in enumerate(shared)
        if write.owner == owner
        for piece in write.pieces or ()
    ]
    listed = [
        [number, piece.first_row, piece.first_column, list(piece.values.shape)] for number, piece in sent
    ]
    header = json.dumps(listed).encode()
    values = [np.ascontiguousarray(piece.values).reshape(-1).view(np.uint8) for _, piece in sent]
    return [len(header).to_bytes(_HEADER_BYTES, "little"), header, *values]


def _unpacked(data: Any, shared: Sequence[DenseWrite]) -> Iterator[tuple[int, DensePiece]]:
    """The pieces of a message, each with the number of its array."""
    end = _HEADER_BYTES + int.from_bytes(data[:_HEADER_BYTES], "little")
    for number, row, column, shape in json.loads(bytes(data[_HEADER_BYTES:end])):
        dtype = shared[number].values.dtype
        start, end = end, end + math.prod(shape) * dtype.itemsize
        yield number, DensePiece(row, column, np.frombuffer(data[start:end], dtype).reshape(shape))


def _whole(write: DenseWrite, pieces: Sequence[DensePiece]) -> DenseWrite:
    values = np.empty(write.values.shape, write.values.dtype)
    boxes: dict[tuple[Any, ...], int] = {}
    for piece in pieces:  # replicas of a box are alike
        boxes[piece.first_row, piece.first_column, piece.values.shape] = piece.values.size
        target = values[piece.first_row :][: len(piece.values)] if values.ndim else values
        if values.ndim > 1:
            target = target[:, piece.first_column :][:, : piece.values.shape[1]]
        target[...] = piece.values
    if sum(boxes.values()) != values.size:
        raise SaveError(
            f"{write.path}: the ranks that save have {sum(boxes.values()):,} of its {values.size:,} elements; give "
            "Checkpointer the group of all ranks that train the model"
        )
    return replace(write, values=values, pieces=None)
