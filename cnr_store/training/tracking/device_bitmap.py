"""The bitmap of one table, on the table's device, so that marking never waits for the device."""

from __future__ import annotations

import torch

from cnr_store.training.devices import support
from cnr_store.training.tracking import bitmap
from cnr_store.training.tracking.bitmap import Bitmap

_PACKED_BYTES = 1 << 22  # of a bitmap that a device makes together
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_integers(values: torch.Tensor) -> torch.Tensor:
    """A view of a strided tensor's bits as integers of its shape."""
    return values.detach().view(_INTEGERS[values.dtype.itemsize])


def _packed(flags: torch.Tensor) -> Bitmap:
    """A bitmap in host memory, from bytes of 0 and 1 on a device."""
    bits = torch.tensor([1 << place for place in range(8)], dtype=torch.uint8, device=flags.device)
    parts = torch.split(flags.view(-1, 8), _PACKED_BYTES)
    return torch.cat([(each * bits).sum(1, dtype=torch.uint8).cpu() for each in parts]).numpy()


class RowBits:
    """One bit a row in host memory, set by compiled kernels, for tables on the CPU; one byte a row elsewhere.

    Those elsewhere are on the device of their table, and nothing waits for it but what asks for what it found.

    `host`: the bitmap; None for tables elsewhere.
    `there`: uint8, on the device: a byte a row, as many as make whole bytes of a bitmap, and one that ids out of range
    set. Of tables in host memory it is empty.
    """

    __slots__ = ("device", "host", "rows", "there")

    def __init__(self, rows: int, device: torch.device) -> None:
        self.rows, self.device = rows, device
        is_elsewhere = support.is_elsewhere(device)
        self.host = None if is_elsewhere else bitmap.empty_bitmap(rows)
        with torch.inference_mode(False):  # one that is made in it could not be marked outside
            size = -(-rows // 8) * 8 + 1 if is_elsewhere else 0
            self.there = torch.zeros(size, dtype=torch.uint8, device=device)

    @property
    def saw_outside(self) -> bool:
        """Whether a device found an id out of range since the bits were taken or cleared, for which it waits."""
        if self.host is not None:
            return False
        with support.failing_saves(self.device, "flags of rows"):
            return bool(self.there[-1].item())

    def mark(self, ids: torch.Tensor) -> bool:
        """Set the bits of integer `ids` of any shape.

        Returns: False if an id is out of range, on the host. On another device `saw_outside` tells later.
        """
        if self.host is not None:
            return bitmap.mark(self.host, self.rows, ids.cpu().numpy().reshape(-1)) < 0
        flat = ids.detach().to(self.device, non_blocking=True).reshape(-1).to(torch.int64)
        inside = (flat >= 0) & (flat < self.rows)
        self.there.index_fill_(0, torch.where(inside, flat, -(-self.rows // 8) * 8), 1)
        return True

    def mark_gradient(self, gradient: torch.Tensor) -> None:
        """Set the bits of the rows that `gradient`, ``(rows, dim)``, may change.

        A sparse gradient may change the rows it holds, a dense one those with a value that is not +0.
        """
        if gradient.is_sparse:
            indices = gradient._indices()
            self.mark(indices if indices.shape[0] == 1 else indices[0])
        elif not gradient.numel():  # a rank may hold no columns
            return
        elif self.host is not None:
            bitmap.mark_nonzero(self.host, as_integers(gradient.resolve_neg()).cpu().numpy())
        else:
            self.there[: self.rows] |= as_integers(gradient.to(self.device).resolve_neg()).any(dim=1)

    def read(self) -> Bitmap:
        """The bits in host memory, which later marks may write to."""
        if self.host is not None:
            return self.host
        with support.failing_saves(self.device, "flags of rows"):
            return _packed(self.there[:-1])

    def clear(self) -> None:
        """Set none any more."""
        if self.host is not None:
            self.host.fill(0)
        else:
            self.there.zero_()
