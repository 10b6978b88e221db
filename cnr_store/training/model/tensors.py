"""Rows and values between torch tensors and numpy arrays.

The store sees rows in an *array type*: float32, float16 and integers as they are, bfloat16 widened exactly to float32.
Tensors made here are on the CPU, whatever torch's default device is.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.autograd.graph import increment_version
from torch.nn.parameter import is_lazy

from cnr_store.errors import ModelMismatchError, UnsupportedModelError
from cnr_store.format.state_arrays import SPARSEST, span
from cnr_store.training.devices import support

AnyArray = np.ndarray[Any, Any]

TABLE_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""Element types that a table may have."""

SLOT_DTYPES = TABLE_DTYPES | {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
"""Element types of optimizer state that may be stored row by row."""

_PIECE_BYTES = 64 << 20  # of rows that a device gathers or converts at once
_FEW = 256  # values, which are copied sooner by numpy than by torch
_UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


def dtype_name(dtype: torch.dtype) -> str:
    """torch's own name without its prefix: ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """torch's element type of that name. `ModelMismatchError` if this torch has no such type."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ModelMismatchError(
            f"a stored tensor has the element type {name!r}, which torch {torch.__version__} does not have; "
            "install the torch that saved it"
        )
    return dtype


@functools.cache
def has_numpy_type(dtype: torch.dtype) -> bool:
    """Whether numpy has the same element type."""
    try:
        torch.empty(0, dtype=dtype, device="cpu").numpy()
    except TypeError:
        return False
    return True


@functools.cache
def array_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """The array type for rows of a tensor of `dtype`."""
    if dtype is torch.bfloat16:
        return np.dtype(np.float32)
    return torch.empty(0, dtype=dtype, device="cpu").numpy().dtype


def spread_class(tensor: torch.Tensor) -> str | None:
    """The name of a tensor's class if its values are not in plain memory of this process, as when ranks share them.

    The classes themselves are not asked for, because importing their modules takes long.
    """
    kind = type(tensor).__name__
    try:
        if is_lazy(tensor) or tensor.layout is not torch.strided:
            return None
        tensor.untyped_storage()
        kind = type(tensor.data).__name__
    except (RuntimeError, NotImplementedError):  # ShardedTensor's, say, which has no storage
        return kind
    return kind if kind == "DTensor" else None


def may_overlap_itself(tensor: torch.Tensor) -> bool:
    """Whether elements of a strided tensor may share memory, as in an expanded tensor."""
    if tensor.numel() == 0:
        return False
    span = 1  # elements that the dimensions with smaller strides span
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < span:
                return True
            span += stride * (size - 1)
    return False


def kept_strides(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The strides that a tensor comes back with: None for C order, a copy's for a small part of a memory."""
    # Contiguous or not, it does not matter how a dimension of one index lies; but to products it does.
    if tensor.is_contiguous():
        plain = 1 not in tensor.shape or tensor.stride() == torch.empty(tensor.shape, device="meta").stride()
        if plain or tensor.numel() == 0:
            return None
    is_small = span(tensor.shape, tensor.stride()) > SPARSEST * tensor.numel()
    return (torch.empty_like(tensor, device="meta") if is_small else tensor).stride()


def numpy_view(tensor: torch.Tensor) -> AnyArray:
    """A view of a tensor on the CPU as a numpy array.

    Element types that numpy lacks (bfloat16, float8) appear as unsigned integers of their size. Call `note_change`
    after writing to it.
    """
    plain = tensor.detach()
    if not has_numpy_type(plain.dtype):
        plain = plain.view(_UNSIGNED[plain.element_size()])
    return plain.numpy()


def rows_view(tensor: torch.Tensor) -> AnyArray | None:
    """``(rows, columns)``: a view of a tensor with a line for each row, if its memory holds them in the array type."""
    is_plain = not support.is_elsewhere(tensor.device) and tensor.is_contiguous() and not tensor.is_neg()
    if not is_plain or not has_numpy_type(tensor.dtype):
        return None
    return numpy_view(tensor).reshape(len(tensor), math.prod(tensor.shape[1:]))


def copy_rows(tensor: torch.Tensor, ids: npt.NDArray[np.int64] | slice, out: AnyArray) -> None:
    """Copy rows of a tensor on any device.

    `tensor`: ``(rows,)`` or ``(rows, k)``.
    `ids`: ``(n,)``, each in ``[0, rows)``, or rows that follow one another.
    `out`: takes them: ``(n, ...)`` of `array_dtype`.
    """
    source, target = tensor.detach(), torch.from_numpy(out)
    index = None if isinstance(ids, slice) else torch.from_numpy(ids)
    follow = source[ids] if isinstance(ids, slice) else source

    def taken(first: int, last: int) -> torch.Tensor:
        if index is None:
            return follow[first:last]
        return torch.index_select(source, 0, index[first:last].to(source.device))

    if support.is_elsewhere(source.device) and (index is not None or target.dtype != source.dtype):
        _copy_in_pieces(taken, target)
    elif index is not None and target.dtype == source.dtype and target.is_contiguous():
        torch.index_select(source, 0, index, out=target)
    else:
        target.copy_(taken(0, len(target)))


def _copy_in_pieces(taken: Callable[[int, int], torch.Tensor], target: torch.Tensor) -> None:
    """Copy to `target` the rows that `taken` returns from one to another, with little memory of their device."""
    first, rows = 0, max(1, _PIECE_BYTES // max(1, target[:1].nbytes))
    while first < len(target):
        last = min(first + rows, len(target))
        try:
            target[first:last].copy_(taken(first, last))
        except torch.cuda.OutOfMemoryError:
            if rows == 1:
                raise
            rows = -(-rows // 8)
        else:
            first = last


@contextmanager
def overwriting(tensor: torch.Tensor) -> Iterator[None]:
    """A context in which `tensor` may be written: without autograd, and in inference mode only if it was made there."""
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        yield


def laid_out_as(value: Any, parameter: torch.Tensor) -> Any:
    """State of a parameter, in memory as optimizers make it for that one: fused kernels walk raw memory, not shapes."""
    if type(value) is not torch.Tensor or value.shape != parameter.shape:
        return value
    is_plain = value.layout is parameter.layout is torch.strided
    if not is_plain or (parameter.is_contiguous() and value.is_contiguous()):
        return value
    made = torch.empty_like(parameter.detach(), dtype=value.dtype, device=value.device)
    return value if made.stride() == value.stride() else made.copy_(value.detach())


def assign_rows(tensor: torch.Tensor, start: int, values: AnyArray) -> None:
    """Write `values`, ``(n, ...)`` of the array type, over the rows ``start`` to ``start + n`` of a tensor.

    float32 is rounded to the nearest bfloat16, ties to even; values that came from bfloat16, NaNs included, are
    restored bit for bit.
    """
    source = np.ascontiguousarray(values)
    with overwriting(tensor):
        target = tensor.detach()[start : start + len(source)]
        target.copy_(torch.from_numpy(source))
        if target.dtype is torch.bfloat16:
            _keep_nans(target, source)


def assign_ids(tensor: torch.Tensor, ids: AnyArray, values: AnyArray) -> None:
    """Write `values`, ``(n, dim)`` of the array type, over the rows `ids`, ``(n,)`` ascending, of a tensor."""
    if ids[-1] - ids[0] == len(ids) - 1:
        assign_rows(tensor, int(ids[0]), values)
        return
    source = torch.empty(values.shape, dtype=tensor.dtype, device="cpu")
    assign_rows(source, 0, values)
    with overwriting(tensor):
        tensor.detach().index_copy_(0, torch.from_numpy(ids).to(tensor.device), source.to(tensor.device))


def assign_dense(tensor: torch.Tensor, values: AnyArray, torch_dtype: str | None) -> None:
    """Write what `dense_numpy` copied over a tensor of the same shape."""
    with overwriting(tensor):
        tensor.detach().copy_(dense_tensor(values, torch_dtype))


def _keep_nans(target: torch.Tensor, source: npt.NDArray[np.float32]) -> None:
    """Give a bfloat16 tensor the sign and payload of each NaN of `source`, because torch makes all NaNs alike."""
    where = np.isnan(source)
    if not where.any():
        return
    high = (source.view(np.uint32)[where] >> 16).astype(np.uint16)
    # The upper half of a NaN whose payload is all in the lower half would be infinity.
    high[high & 0x7F == 0] |= 0x40
    bits = torch.from_numpy(high.view(np.int16)).to(target.device)
    target.view(torch.int16)[torch.from_numpy(where).to(target.device)] = bits


def note_change(tensor: torch.Tensor) -> None:
    """Have torch count a change of `tensor` that was written through `numpy_view`, so that trackers see it.

    No changes are counted of tensors made in inference mode.
    """
    if not tensor.is_inference():
        increment_version(tensor)


def check_has_values(tensor: torch.Tensor) -> None:
    """Check that a tensor has plain values, which `dense_numpy` copies."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or tensor.is_meta:
        kind = "nested tensor" if tensor.is_nested else f"tensor of layout {tensor.layout}"
        raise UnsupportedModelError(
            f"a {kind}, type {tensor.dtype} on {tensor.device} has no plain values "
            "to store; convert it to a dense tensor"
        )


def dense_numpy(tensor: torch.Tensor) -> tuple[AnyArray, str | None]:
    """A copy of a strided tensor of any element type as a C-contiguous numpy array of the same shape.

    Returns: The array, and None. Where numpy lacks the element type, the array has unsigned integers, and beside it is
    torch's name of the type (``"bfloat16"``).
    """
    check_has_values(tensor)
    plain = tensor.detach().resolve_conj().resolve_neg()
    # An optimizer may keep thousands of counts, and torch takes several times as long to copy one.
    is_plain = type(plain) is torch.Tensor and plain.is_cpu
    if is_plain and plain.numel() <= _FEW and has_numpy_type(plain.dtype):
        return plain.numpy().copy(), None
    copy = torch.empty(plain.shape, dtype=plain.dtype, device="cpu")
    with support.failing_saves(plain.device, f"a tensor of shape {tuple(plain.shape)}"):
        copy.copy_(plain)
    name = None if has_numpy_type(plain.dtype) else dtype_name(plain.dtype)
    # torch gives a tensor without dimensions no view of another type.
    return numpy_view(copy.reshape(-1)).reshape(tuple(plain.shape)), name


def dense_type(tensor: torch.Tensor) -> tuple[AnyArray, str | None]:
    """What `dense_numpy` returns, without the values: an array of zeros that takes no memory."""
    kind, torch_dtype = dense_numpy(torch.empty(0, dtype=tensor.dtype, device="cpu"))
    return np.broadcast_to(np.zeros((), kind.dtype), tuple(tensor.shape)), torch_dtype


def dense_tensor(array: AnyArray, torch_dtype: str | None) -> torch.Tensor:
    """The tensor that `dense_numpy` copied; it shares the memory of a writable, C-contiguous array."""
    if not (array.flags.c_contiguous and array.flags.writeable):
        array = np.array(array, order="C")
    flat = torch.from_numpy(array.reshape(-1))
    if torch_dtype is not None:
        flat = flat.view(dtype_named(torch_dtype))
    return flat.reshape(array.shape)


_Span = tuple[str, int, int]


def _span(tensor: torch.Tensor) -> _Span | None:
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
    spans = sorted((place, key) for key, tensor in distinct.items() if (place := _span(tensor)) is not None)
    before: list[tuple[_Span, int]] = []
    for (device, start, stop), key in spans:
        before = [each for each in before if each[0][0] == device and each[0][2] > start]
        for _, other in before:
            yield distinct[other], distinct[key]
        before.append(((device, start, stop), key))
