"""One bit a row on the device of its table, set where rows are looked up.

Nothing here waits for the device but what asks for what it found.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cnr_store.training.devices.support import kernels_on

WORD_ROWS = 32
# Behind the bits: a word that torch's operations may write to, and one that is not 0 once an id was out of range.
_SPARE_WORDS = 2


def words_for(rows: int) -> int:
    """How many words the bits of so many rows take."""
    return -(-rows // WORD_ROWS)


class DeviceFlags:
    """The bits of tables on one device, in one piece of memory.

    A row is flagged by its id. An id out of range flags nothing, and `read` tells that there was one.

    Parameters
    ----------
    rows
        Of each table.
    device
        Where the tables are.

    Attributes
    ----------
    words
        int32: bit ``i & 31`` of word ``first_words[t] + (i >> 5)`` stands for row i of table t.
    """

    def __init__(self, rows: Sequence[int], device: torch.device) -> None:
        self.rows, self.device = tuple(rows), device
        sizes = np.array([words_for(each) for each in rows], np.int64)
        self.first_words = tuple((np.cumsum(sizes) - sizes).tolist())
        self._kernels: Any = kernels_on(device)
        with torch.inference_mode(False):  # a tensor made in inference mode could not be marked outside of it
            size = int(sizes.sum()) + _SPARE_WORDS
            self.words = torch.zeros(size, dtype=torch.int32, device=device)
            self._outside = self.words[-1:]
            self._rows, self._first_words = (
                torch.tensor(each, dtype=torch.int64, device=device) for each in (self.rows, self.first_words)
            )

    def mark(self, ids: torch.Tensor, table: int = 0) -> None:
        """Flag the rows `ids`, integers of any shape and type.

        Parameters
        ----------
        table
            Whose rows they are.
        """
        flat, rows = self._on_device(ids), self.rows[table]
        if self._kernels is not None:
            words = self.words[self.first_words[table] :]
            self._kernels.flag(words, rows, flat, self._outside)
            return
        flat = flat.to(torch.int64)
        self._set_bits(flat + WORD_ROWS * self.first_words[table], (flat >= 0) & (flat < rows))

    def mark_bags(self, ids: torch.Tensor, offsets: torch.Tensor) -> None:
        """Flag the rows of a lookup in all tables, as fused embedding bags take it.

        Parameters
        ----------
        ids
            Flat: those of table 0, then those of table 1, and so on.
        offsets
            (tables * batch + 1,): where the ids of each bag begin, and where the last ones end.
        """
        flat, offsets = self._on_device(ids), self._on_device(offsets)
        if self._kernels is not None:
            places = self.words, self._first_words, self._rows
            self._kernels.flag_bags(*places, flat, offsets, self._outside)
            return
        if not flat.numel():
            return
        begins = offsets[:: (offsets.numel() - 1) // len(self.rows)].to(torch.int64).contiguous()
        place = torch.arange(flat.numel(), device=self.device)
        table = torch.searchsorted(begins, place, right=True) - 1
        is_ours = (table >= 0) & (table < len(self.rows))
        table, flat = table.clamp(0, len(self.rows) - 1), flat.to(torch.int64)
        inside = (flat >= 0) & (flat < self._rows[table])
        self._set_bits(flat + WORD_ROWS * self._first_words[table], inside | ~is_ours, is_ours)

    def octets(self, table: int = 0) -> torch.Tensor:
        """The bits of a table, which may be written to, and one more byte."""
        first = 4 * self.first_words[table]
        return self.words.view(torch.uint8)[first : first + (self.rows[table] + 7) // 8 + 1]

    def saw_outside(self) -> bool:
        """Whether an id was out of range, for which it waits for the device."""
        return bool(self._outside.item())

    def _on_device(self, ids: torch.Tensor) -> torch.Tensor:
        # Kernels walk raw memory, and a column of a batch is flat without being in one piece.
        return ids.detach().to(self.device, non_blocking=True).reshape(-1).contiguous()

    def _set_bits(self, bits: torch.Tensor, inside: torch.Tensor, chosen: torch.Tensor | None = None) -> None:
        """Set bits of `words` where `inside`, and `chosen` if that is given; note if one is not inside."""
        self._outside |= (~inside).any().to(torch.int32)
        octets = self.words.view(torch.uint8)
        spare = 4 * (self.words.numel() - _SPARE_WORDS)
        index = torch.where(inside if chosen is None else inside & chosen, bits >> 3, spare)
        # Bit by bit, so that ids of one byte all write the same value.
        for position in range(8):
            place = torch.where(bits & 7 == position, index, spare)
            octets[place] = octets[place] | (1 << position)

    def clear(self) -> None:
        """Flag no row any more."""
        self.words.zero_()

    def read(self) -> tuple[list[npt.NDArray[np.uint8]], bool]:
        """Wait for the device.

        Returns
        -------
        The packed bitmap of each table, in host memory, and whether an id was out of range.
        """
        host = self.words.to("cpu", copy=True).numpy()
        octets, places = host.view(np.uint8), zip(self.first_words, self.rows, strict=True)
        return [octets[4 * first : 4 * first + (rows + 7) // 8] for first, rows in places], bool(host[-1])

    def take(self) -> tuple[list[npt.NDArray[np.uint8]], bool]:
        """`read`, and flag no row any more."""
        found = self.read()
        self.clear()
        return found
