"""Which tensors have memory in common."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch.nn.parameter import is_lazy

from cnr_store.training.model.tensors import spread_class

Span = tuple[str, int, int]


def span(tensor: torch.Tensor) -> Span | None:
    """The device of a tensor, and the addresses of its first byte and behind its last one; None if it has no bytes."""
    if spread_class(tensor) is not None or is_lazy(tensor) or tensor.layout is not torch.strided:
        return None
    if tensor.is_meta or not tensor.numel():
        return None
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return str(tensor.device), start, start + (last + 1) * tensor.element_size()


def overlapping(tensors: Iterable[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each pair of distinct tensors that have bytes between their first and their last one in common.

    Tensors of one storage and those over another's memory, as through numpy, are alike here.
    """
    distinct = {id(tensor): tensor for tensor in tensors}
    spans = sorted((place, key) for key, tensor in distinct.items() if (place := span(tensor)) is not None)
    before: list[tuple[Span, int]] = []
    for (device, start, stop), key in spans:
        before = [each for each in before if each[0][0] == device and each[0][2] > start]
        for _, other in before:
            yield distinct[other], distinct[key]
        before.append(((device, start, stop), key))
