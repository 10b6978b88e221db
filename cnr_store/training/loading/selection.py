"""Which part of a version a load takes."""

from __future__ import annotations

import fnmatch
import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch

from cnr_store.errors import ModelMismatchError, OptionError
from cnr_store.training.model.patterns import check_patterns

Strict = Literal["raise", "ignore", "report"]
Ids = npt.NDArray[np.int64]
Patterns = tuple[str, ...]
_MAX_ROW = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Selection:
    """What a load takes; by default a whole version, into the model that was saved."""

    tables: Patterns = ("*",)  # tables, tensors: patterns of names
    tensors: Patterns = ("*",)
    # By pattern of table names, the rows to take: ascending, each once. None takes all.
    rows: Mapping[str, Ids] | None = None
    # Whether the rest of training (settings, `state` objects, random numbers) is taken, too
    everything: bool = True
    # What happens where model and version differ: ``raise`` refuses the load, ``ignore`` and ``report`` load what fits
    strict: Strict = "raise"

    @classmethod
    def from_options(
        cls, tables: Any = None, tensors: Any = None, rows: Any = None, strict: object = "raise"
    ) -> Selection:
        """The selection that the options of `Checkpointer.load` stand for."""
        known: Strict | None = next((choice for choice in get_args(Strict) if choice == strict), None)
        if known is None:
            raise OptionError(f"strict={strict!r}: give 'raise', 'ignore' or 'report'")
        if tables is None and tensors is None and rows is None:
            return cls(strict=known)
        by_pattern = _rows(rows)
        if tables is None and by_pattern is not None:
            tables = tuple(by_pattern)
        return cls(
            tables=() if tables is None else check_patterns("tables", tables),
            tensors=() if tensors is None else check_patterns("tensors", tensors),
            rows=by_pattern,
            everything=False,
            strict=known,
        )

    @property
    def whole(self) -> bool:
        """Whether the model has to become exactly what the version holds."""
        return self.everything and self.strict == "raise"

    def digest(self) -> str:
        """What tells it from another selection, for people only by chance."""
        rows = None if self.rows is None else [(name, ids.tobytes()) for name, ids in self.rows.items()]
        text = repr((self.tables, self.tensors, rows, self.everything, self.strict))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def rows_of(self, table: str) -> Ids | None:
        """The rows chosen of a table, by the first pattern that matches; None for all."""
        if self.rows is None:
            return None
        return next((ids for pattern, ids in self.rows.items() if fnmatch.fnmatchcase(table, pattern)), None)

    def check_rows_of(self, tables: Collection[str]) -> None:
        """Prove that rows are chosen of each of these tables, and of no other: a typo must not load all rows.

        `tables`: names of the tables chosen.
        """
        if self.rows is None:
            return
        for pattern in self.rows:
            if pattern != "*" and not fnmatch.filter(tables, pattern):
                raise ModelMismatchError(
                    f"rows: {pattern!r} fits none of the tables chosen, {sorted(tables)}; give rows of these"
                )
        for table in sorted(tables):
            if self.rows_of(table) is None:
                raise ModelMismatchError(
                    f"table {table!r} is chosen, but rows={{...}} has none of it: name its rows there, or load it "
                    "whole by a call of its own"
                )


def _rows(given: Any) -> dict[str, Ids] | None:
    if given is None:
        return None
    by_pattern = given if isinstance(given, Mapping) else {"*": given}
    if not all(isinstance(pattern, str) for pattern in by_pattern):
        raise OptionError(f"rows={given!r}: give rows by names of tables, or by patterns like 'user*'")
    return {pattern: _ids(pattern, rows) for pattern, rows in by_pattern.items()}


def _ids(pattern: str, rows: Any) -> Ids:
    ids = _integers(rows)
    if ids is None or ids.ndim != 1 or (ids.size and (ids.min() < 0 or ids.max() > _MAX_ROW)):
        raise OptionError(f"rows of {pattern!r}: give a range, or a list of row numbers from 0 on")
    return np.unique(ids.astype(np.int64))


def _integers(rows: Any) -> npt.NDArray[np.integer[Any]] | None:
    """The rows given as an array; None if they are not integers, or some are masked."""
    if isinstance(rows, np.ma.MaskedArray):  # np.asarray drops the mask
        return None
    if isinstance(rows, torch.Tensor):
        if rows.is_meta or rows.layout is not torch.strided or rows.is_quantized:
            return None
        rows = rows.detach().cpu()
    try:
        numbers = np.asarray(rows)
    except (TypeError, ValueError):  # an element type that numpy lacks, or lists of different lengths
        return None
    if numbers.size == 0:
        return numbers.astype(np.int64)  # an empty list is an array of float64
    return numbers if numbers.dtype.kind in "iu" else None
