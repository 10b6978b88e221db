"""Which part of a version a load takes, and how that fits the model."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch

from cnr_store.errors import ModelMismatchError, OptionError
from cnr_store.format.record import ArrayEntry
from cnr_store.training.model.tables import Table
from cnr_store.training.model.tensors import dtype_name, dtype_named

Strict = Literal["raise", "ignore", "report"]
Ids = npt.NDArray[np.int64]
Patterns = tuple[str, ...]
_MOST = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Selection:
    """What a load is to take.

    Attributes
    ----------
    tables, tensors
        Patterns of names.
    rows
        By pattern of table names, the rows to take: ascending, each once. None takes all.
    everything
        Whether the rest of training (its settings, schedulers, random numbers) is taken, too, where it fits.
    strict
        What happens where something doesn't fit.
    """

    tables: Patterns
    tensors: Patterns
    rows: Mapping[str, Ids] | None
    everything: bool
    strict: Strict

    @classmethod
    def from_options(
        cls, tables: Any = None, tensors: Any = None, rows: Any = None, strict: object = "raise"
    ) -> Selection | None:
        """The selection that the options of `Checkpointer.load` stand for; None if they ask for all of a version.

        Raises
        ------
        OptionError
        """
        if strict not in get_args(Strict):
            raise OptionError(f"strict={strict!r}: give 'raise', 'ignore' or 'report'")
        everything = tables is None and tensors is None and rows is None
        if everything and strict == "raise":
            return None
        by_pattern = _rows(rows)
        if tables is None and by_pattern is not None:
            tables = tuple(by_pattern)
        return cls(
            tables=("*",) if everything else _patterns("tables", tables),
            tensors=("*",) if everything else _patterns("tensors", tensors),
            rows=by_pattern,
            everything=everything,
            strict=strict,  # type: ignore[arg-type]  # just proven
        )

    def rows_of(self, table: str) -> Ids | None:
        """The rows chosen of a table, by the first pattern that fits; None for all."""
        if self.rows is None:
            return None
        return next((ids for pattern, ids in self.rows.items() if fnmatch.fnmatchcase(table, pattern)), None)

    def check_rows_of(self, tables: Collection[str]) -> None:
        """Prove that rows are chosen of exactly these tables, the ones chosen by name: a typo must not load all rows.

        Raises
        ------
        ModelMismatchError
            Rows are chosen of no table, or none of a table.
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


def _patterns(name: str, given: Any) -> Patterns:
    if given is None:
        return ()
    try:
        found = (given,) if isinstance(given, str) else tuple(given)
    except TypeError:
        found = (None,)
    if not all(isinstance(pattern, str) for pattern in found):
        raise OptionError(f"{name}={given!r}: give names, or patterns like 'user*'")
    return tuple(map(str, found))  # numpy's own kind of text looks otherwise in messages


def _rows(given: Any) -> dict[str, Ids] | None:
    if given is None:
        return None
    by_pattern = given if isinstance(given, Mapping) else {"*": given}
    if not all(isinstance(pattern, str) for pattern in by_pattern):
        raise OptionError(f"rows={given!r}: give rows by names of tables, or by patterns like 'user*'")
    return {pattern: _ids(pattern, rows) for pattern, rows in by_pattern.items()}


def _ids(pattern: str, rows: Any) -> Ids:
    found = _integers(rows)
    if found is None or found.ndim != 1 or (found.size and (found.min() < 0 or found.max() > _MOST)):
        raise OptionError(f"rows of {pattern!r}: give a range, or a list of row numbers from 0 on")
    return np.unique(found.astype(np.int64))


def _integers(rows: Any) -> npt.NDArray[np.integer[Any]] | None:
    """What was given, as an array; None if it holds anything but integers, or some that don't count."""
    if isinstance(rows, np.ma.MaskedArray):  # as an array it would have forgotten its mask
        return None
    if isinstance(rows, torch.Tensor):
        if rows.is_meta or rows.layout is not torch.strided or rows.is_quantized:
            return None
        rows = rows.detach().cpu()
    try:
        found = np.asarray(rows)
    except (TypeError, ValueError):  # of a type that numpy lacks; lists of different lengths
        return None
    if found.size == 0:
        return found.astype(np.int64)
    return found if found.dtype.kind in "iu" else None


@dataclass(frozen=True)
class TableFit:
    """A table to load: of its `stored_rows` rows the rows `ids`, or all (None)."""

    table: Table
    stored_rows: int
    element: str
    ids: Ids | None

    @property
    def exact(self) -> bool:
        """Whether the table is afterwards what the version holds."""
        there = (self.table.rows, self.table.element)
        return self.ids is None and (self.stored_rows, self.element) == there


@dataclass
class Match:
    """What is loaded, and what doesn't fit.

    Attributes
    ----------
    tables, tensors
        What is loaded: tables, and by name the model's dense tensors.
    missing, unexpected
        Names of what only the model has, and only the version.
    grown
        Rows stored and rows in the model, by table.
    cast
        Element type stored and in the model, by name.
    """

    where: str
    tables: list[TableFit] = field(default_factory=list)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    grown: dict[str, tuple[int, int]] = field(default_factory=dict)
    cast: dict[str, tuple[str, str]] = field(default_factory=dict)

    def take_tables(
        self, selection: Selection, stored: Mapping[str, ArrayEntry], tables: Sequence[Table]
    ) -> None:
        """Compare the tables chosen.

        Raises
        ------
        ModelMismatchError
            A pattern fits nothing, rows are chosen of other tables than those chosen, or a table can't be loaded: other
            columns, fewer rows, rows that aren't there.
        """
        there = {table.name: table for table in tables}
        selection.check_rows_of(self._chosen("table", selection.tables, {*stored, *there}))
        for name in self._both("table", selection.tables, stored, there):
            table, entry = there[name], stored[name]
            if entry.shape[1] != table.dim:
                raise ModelMismatchError(
                    f"table {name!r} has {table.dim} columns in the model and {entry.shape[1]} in {self.where}; "
                    "choose the tables to load without it"
                )
            fit = TableFit(table, entry.shape[0], entry.element, selection.rows_of(name))
            self._check_rows(fit)
            if fit.element != table.element:
                self.cast[name] = (fit.element, table.element)
            self.tables.append(fit)

    def _check_rows(self, fit: TableFit) -> None:
        name, rows = fit.table.name, (fit.stored_rows, fit.table.rows)
        if fit.ids is not None:
            if fit.ids.size and fit.ids[-1] >= min(rows):
                raise ModelMismatchError(
                    f"table {name!r}: row {fit.ids[-1]} was chosen; {self.where} has {rows[0]} rows and the model "
                    f"{rows[1]}"
                )
        elif rows[0] > rows[1]:
            raise ModelMismatchError(
                f"table {name!r} has {rows[1]} rows in the model and {rows[0]} in {self.where}: a table that shrank "
                f"is loaded only by rows, as with rows=range({rows[1]})"
            )
        elif rows[0] < rows[1]:
            self.grown[name] = rows

    def take_tensors(
        self,
        selection: Selection,
        stored: Mapping[str, tuple[int, ...]],
        tensors: Mapping[str, torch.Tensor],
        stored_type: Callable[[str], str],
    ) -> None:
        """Compare the dense tensors chosen. `stored_type` gives torch's name of the type that one is stored in.

        Raises
        ------
        ModelMismatchError
            A pattern fits nothing, shapes differ, or types that aren't both floating point.
        """
        for name in self._both("tensor", selection.tensors, stored, tensors):
            tensor, shape, type_name = tensors[name], stored[name], stored_type(name)
            if shape != tuple(tensor.shape):
                raise ModelMismatchError(
                    f"tensor {name!r} is {tuple(tensor.shape)} in the model and {shape} in {self.where}; choose the "
                    "tensors to load without it"
                )
            if type_name != dtype_name(tensor.dtype):
                if not (tensor.is_floating_point() and dtype_named(type_name).is_floating_point):
                    raise ModelMismatchError(
                        f"tensor {name!r} is {dtype_name(tensor.dtype)} in the model and {type_name} in "
                        f"{self.where}, and only floating-point numbers are converted; choose the tensors to load "
                        "without it"
                    )
                self.cast[name] = (type_name, dtype_name(tensor.dtype))
            self.tensors[name] = tensor

    def _both(
        self, kind: str, patterns: Patterns, stored: Collection[str], there: Collection[str]
    ) -> list[str]:
        """Names that a pattern fits and both sides have, in the model's order."""
        chosen = self._chosen(kind, patterns, {*stored, *there})
        self.missing += sorted(chosen - {*stored})
        self.unexpected += sorted(chosen - {*there})
        return [name for name in there if name in chosen and name in stored]

    def _chosen(self, kind: str, patterns: Patterns, names: Collection[str]) -> set[str]:
        """The names that a pattern fits."""
        for pattern in patterns:
            if pattern != "*" and not fnmatch.filter(names, pattern):
                raise ModelMismatchError(
                    f"no {kind} is called {pattern!r}, neither in the model nor in {self.where}; there are "
                    f"{sorted(names)}"
                )
        return {name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)}

    def differences(self) -> str:
        """All that doesn't fit, in words; empty if all does."""
        found = [
            f"{title}: {', '.join(names)}"
            for title, names in (("only in the model", self.missing), ("only in the store", self.unexpected))
            if names
        ]
        found += [f"{name} grew from {old} rows to {new}" for name, (old, new) in self.grown.items()]
        found += [f"{name} is stored in {old} and becomes {new}" for name, (old, new) in self.cast.items()]
        return "; ".join(found)
