"""Brings the parts of split tensors to the ranks that write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from cnr_store.dcp.boxes import LocalItems, PlacedTensor
from cnr_store.errors import SaveError
from cnr_store.training.model.tensors import AnyArray, dense_numpy, dtype_named, numpy_view
from cnr_store.writing.team import Team


def gather_split(placed: Sequence[PlacedTensor], local: LocalItems, team: Team) -> dict[str, torch.Tensor]:
    """Put the split tensors together that this rank owns. All ranks call it at once.

    Returns: By name, tensors on the CPU.
    """
    apart = sorted(
        (tensor for tensor in placed if tensor.owner >= 0 and tensor.is_split), key=lambda tensor: tensor.name
    )
    if not apart:
        return {}
    messages: dict[int, list[AnyArray]] = {}
    expected: set[int] = set()
    for tensor in apart:
        for box in tensor.boxes:
            if box.rank == team.rank:
                held = local.tensors[tensor.name][1]
                part = next(part for begin, part in held if [*begin] == [*box.offsets] and part.numel())
                messages.setdefault(tensor.owner, []).append(dense_numpy(part)[0].reshape(-1))
            if tensor.owner == team.rank:
                expected.add(box.rank)
    received = team.exchange(messages, expected)
    return _assembled([tensor for tensor in apart if tensor.owner == team.rank], received)


def _assembled(owned: Sequence[PlacedTensor], received: Mapping[int, memoryview]) -> dict[str, torch.Tensor]:
    """The tensors, from one message of each rank that holds a part of any: its parts in the same order."""
    used = dict.fromkeys(received, 0)
    whole = {}
    for tensor in owned:
        dtype = dtype_named(tensor.element)
        out = whole[tensor.name] = torch.empty(tensor.shape, dtype=dtype, device="cpu")
        for box in tensor.boxes:
            part = torch.empty(box.sizes, dtype=dtype, device="cpu")
            flat = numpy_view(part.reshape(-1)).view("u1")
            begin, end = used[box.rank], used[box.rank] + flat.nbytes
            if end > len(received[box.rank]):
                raise SaveError(f"rank {box.rank} sent too few bytes of {tensor.name}")
            flat[:] = received[box.rank][begin:end]
            used[box.rank] = end
            out[tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))] = part
    return whole
