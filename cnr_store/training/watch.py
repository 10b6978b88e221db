"""What is known of one table's changes in the present interval."""

from __future__ import annotations

import torch

from cnr_store.training import bitmap
from cnr_store.training.bitmap import Bitmap
from cnr_store.training.fingerprint import Fingerprint
from cnr_store.training.rowbits import RowBits
from cnr_store.training.tables import Table


class Watch:
    """Flags of one table, and how far its changes are accounted for.

    Attributes
    ----------
    bits
        Rows flagged in this interval.
    carried
        Rows flagged although not in this interval: looked up in the last one, or given back by a failed save.
    whole
        Why the rows that changed in this interval are not known; None if they are.
    """

    def __init__(self, table: Table) -> None:
        self.table = table
        self.bits = RowBits(table.rows, table.parameter.device)
        self.begin()

    def begin(self, carried: Bitmap | None = None) -> Bitmap:
        """Begin a new interval with the rows `carried` flagged already; returns those of the last one.

        The table may have got another size or device since.
        """
        rows, device = self.table.rows, self.table.parameter.device
        taken = self.bits.take()
        if (self.bits.rows, self.bits.device) != (rows, device):
            self.bits = RowBits(rows, device)
            taken = bitmap.full_bitmap(rows)
        self.carried = bitmap.empty_bitmap(rows) if carried is None else carried
        self.whole: str | None = None
        self._marked = False
        self.account()
        return taken

    @property
    def resized(self) -> bool:
        """Whether the table has another number of rows than flags."""
        return self.bits.rows != self.table.rows

    @property
    def changes(self) -> float:
        """How often the parameter changed in place since that was last accounted for; see `Fingerprint`."""
        return self._seen.changes_in(self.table.parameter)

    @property
    def unaccounted(self) -> bool:
        """Whether the parameter changed since its changes were last accounted for."""
        return self.changes != 0

    @property
    def unexplained(self) -> bool:
        """Whether it changed although no row is flagged."""
        return self.unaccounted and not self._marked and not self.carried.any()

    def account(self) -> None:
        """Declare every change so far flagged."""
        self._seen = Fingerprint(self.table.parameter)

    def mark(self, ids: torch.Tensor) -> None:
        """Flag the rows `ids`, integers of any shape."""
        self._marked = True
        if not self.bits.mark(ids):
            self.make_whole("an id out of range was looked up")

    def mark_gradient(self, gradient: torch.Tensor) -> None:
        """Flag the rows that `gradient`, of the parameter's shape, may change."""
        self._marked = True
        self.bits.mark_gradient(gradient)

    def make_whole(self, reason: str) -> None:
        """Declare that the rows that changed in this interval are not known; the first reason stays."""
        if self.whole is None:
            self.whole = reason

    def give_back(self, flagged: Bitmap) -> None:
        """Flag the rows of a packed bitmap that `Tracker.swap` returned."""
        if flagged.shape == self.carried.shape:
            self.carried = self.carried | flagged
        else:
            self.make_whole("its number of rows changed since a save that failed")
