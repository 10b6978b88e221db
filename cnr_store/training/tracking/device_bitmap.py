"""The bitmap of one table, on the table's device, so that marking never waits for the device."""

from __future__ import annotations

import torch

from cnr_store.training.tracking import bitmap
from cnr_store.training.tracking.bitmap import Bitmap

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def mark_on_device(bits: torch.Tensor, ids: torch.Tensor) -> None:
    """Set the bits of `ids`, integers in ``[0, rows)`` of any shape; the host does not wait for the device.

    `bits` is ``(ceil(rows / 8) + 1,)`` uint8 on the device of `ids`; its last byte is scratch.
    """
    flat = ids.detach().reshape(-1).to(torch.int64)
    byte, bit = flat >> 3, flat & 7
    scratch = torch.full_like(byte, bits.numel() - 1)
    # Bit by bit, so that ids of one byte all write the same value.
    for position in range(8):
        index = torch.where(bit == position, byte, scratch)
        bits[index] = bits[index] | (1 << position)


def mark_nonzero_on_device(bits: torch.Tensor, gradient: torch.Tensor) -> None:
    """Set the bits of the rows of `gradient`, ``(rows, dim)``, whose bits are not all zero."""
    changed = (as_integers(gradient) != 0).any(dim=1)
    padded = changed.new_zeros((bits.numel() - 1) * 8)
    padded[: changed.numel()] = changed
    weights = torch.tensor([1 << position for position in range(8)], dtype=torch.uint8, device=bits.device)
    bits[:-1] |= (padded.view(-1, 8).to(torch.uint8) * weights).sum(dim=1, dtype=torch.uint8)


def as_integers(values: torch.Tensor) -> torch.Tensor:
    """A view of a strided tensor's bits as integers of its shape."""
    return values.detach().view(integers_of(values.dtype))


def integers_of(dtype: torch.dtype) -> torch.dtype:
    """Integers of the same size."""
    return _INTEGERS[dtype.itemsize]


def _host_memory(rows: int) -> tuple[Bitmap, int]:
    """A bitmap and its address, in one value, so that an interrupt never leaves the address of freed memory."""
    memory = bitmap.empty_bitmap(rows)
    return memory, memory.ctypes.data


class RowBits:
    """One bit a row: in host memory, set by compiled kernels, for tables on the CPU; in tensors elsewhere.

    Attributes
    ----------
    host
        The bitmap and its address; None for tables elsewhere.
    """

    __slots__ = ("_bits", "device", "host", "rows")

    def __init__(self, rows: int, device: torch.device) -> None:
        self.rows, self.device = rows, device
        self.host = _host_memory(rows) if device.type == "cpu" else None
        size = 0 if self.host is not None else bitmap.bitmap_bytes(rows) + 1
        with torch.inference_mode(False):  # a tensor made in inference mode could not be marked outside of it
            self._bits = torch.zeros(size, dtype=torch.uint8, device=device)

    def mark(self, ids: torch.Tensor) -> bool:
        """Set the bits of integer `ids` of any shape.

        Returns
        -------
        False if an id is out of range, on the host. On another device all must be in range.

        Raises
        ------
        RuntimeError
            torch's own, or its like, for tensors without values, such as those of a function being transformed.
        """
        # Nearly all ids are such. Only a plain tensor is sure to have its values at its address.
        host, plain = self.host, type(ids) is torch.Tensor and ids.is_cpu and ids.dtype is torch.int64
        if plain and host is not None and ids.is_contiguous():
            address, count = ids.data_ptr(), ids.numel()
            if count and not address:
                raise RuntimeError("these ids have no values")
            return bitmap.mark_at(host[1], self.rows, address, count) < 0
        if host is None:
            mark_on_device(self._bits, ids.detach().to(self.device, non_blocking=True))
            return True
        return bitmap.mark(host[0], self.rows, ids.cpu().numpy().reshape(-1)) < 0

    def mark_gradient(self, gradient: torch.Tensor) -> None:
        """Set the bits of the rows that `gradient`, ``(rows, dim)``, may change.

        A sparse gradient may change the rows it holds, a dense one those with a value that is not +0.
        """
        if gradient.is_sparse:
            indices = gradient._indices()
            self.mark(indices if indices.shape[0] == 1 else indices[0])
        elif self.host is None:
            mark_nonzero_on_device(self._bits, gradient.to(self.device).resolve_neg())
        else:
            bitmap.mark_nonzero(self.host[0], as_integers(gradient.resolve_neg()).cpu().numpy())

    def read(self) -> Bitmap:
        """The bits in host memory, which later marks may write to."""
        return self._bits[:-1].cpu().numpy() if self.host is None else self.host[0]

    def clear(self) -> None:
        """Set none any more."""
        if self.host is None:
            self._bits.zero_()
        else:
            self.host[0].fill(0)

    def take(self) -> Bitmap:
        """The bits in host memory of their own; none is set here afterwards."""
        taken = self.read()
        if self.host is None:
            self._bits.zero_()
        else:
            self.host = _host_memory(self.rows)
        return taken
