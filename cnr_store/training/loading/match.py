"""Which part of a version a load takes, and how a model differs from it."""

from __future__ import annotations

import fnmatch
import hashlib
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from cnr_store.catalog.catalog import Catalog
from cnr_store.chains.dense import dense_layout
from cnr_store.errors import CorruptionError, ModelMismatchError, OptionError
from cnr_store.format.layout import decode_name, dense_path, table_parameter
from cnr_store.format.record import ArrayEntry, Record
from cnr_store.training.model.arguments import IGNORE
from cnr_store.training.model.dense_state import Loaders, dense_items, named_state
from cnr_store.training.model.patterns import NOTHING, Exclusion, check_patterns
from cnr_store.training.model.tables import Table
from cnr_store.training.model.tensors import dtype_name, dtype_named

log = logging.getLogger("cnr_store")
_MAX_SHOWN = 20
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
        model = (self.table.rows, self.table.element)
        return self.ids is None and (self.stored_rows, self.element) == model


@dataclass
class Match:
    """What is loaded, and what differs.

    Differences are collected, so that one error names them all; `prove` raises it.
    """

    where: str  # the version, for messages
    selection: Selection  # what was asked for
    rows: Mapping[str, int] = field(default_factory=dict)  # rows stored, by table of the version
    # tables, tensors: what is loaded: tables, and by name the model's dense tensors
    tables: list[TableFit] = field(default_factory=list)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    # missing, unexpected: names of what only the model has, and only the version
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    # Rows stored and rows in the model, by table
    grown: dict[str, tuple[int, int]] = field(default_factory=dict)
    # Element type stored and in the model, by name
    cast: dict[str, tuple[str, str]] = field(default_factory=dict)
    # Further differences, in words
    retied: list[str] = field(default_factory=list)
    # Modules to which entries are left that they may take in another shape, or under other names. None if nothing is.
    loaders: Loaders | None = None
    excluded: Exclusion = NOTHING  # what is left as it is in the model
    # handed, absent: names of tensors that only the version has, and that a module may take; and that only the model
    # has
    handed: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    versions: Mapping[str, int] | None = None  # as `StoredState.module_versions`
    # Differences that keep the load from beginning, each with what to do
    refusals: list[str] = field(default_factory=list)
    # Names of tables that one side holds as tensors, and of their parameters
    turned: set[str] = field(default_factory=set)

    def differs(self, message: str) -> None:
        """Note a difference that ``strict="raise"`` refuses."""
        if self.selection.strict == "raise":
            self.refusals.append(message)

    def lacks(self, names: Collection[str], message: str) -> None:
        """Note what only the model has."""
        self.missing += names
        self.differs(message)

    def prove(self) -> None:
        """Raise if anything was refused so far."""
        if self.refusals:
            hidden = len(self.refusals) - _MAX_SHOWN
            more = f"\nand {hidden} more differences" if hidden > 0 else ""
            raise ModelMismatchError("\n".join(self.refusals[:_MAX_SHOWN]) + more)

    def warn(self) -> None:
        """Log what was passed over, if that was asked for."""
        named = {"only in the model": self.missing, "only in the store": self.unexpected}
        parts = [f"{title}: {', '.join(names)}" for title, names in named.items() if names]
        parts += [f"{name} grew from {old} rows to {new}" for name, (old, new) in self.grown.items()]
        parts += [f"{name} is stored in {old} and becomes {new}" for name, (old, new) in self.cast.items()]
        parts += self.retied
        if self.selection.strict == "report" and parts:
            log.warning("%s is loaded as far as it fits the model: %s", self.where, "; ".join(parts))

    def take_tables(self, stored: Mapping[str, ArrayEntry], tables: Sequence[Table]) -> None:
        """Compare the tables chosen."""
        self.rows = {name: entry.shape[0] for name, entry in stored.items()}
        by_name = {table.name: table for table in tables}
        self.selection.check_rows_of(self._chosen("table", self.selection.tables, {*stored, *by_name}))
        for name in self._common("table", self.selection.tables, stored, by_name):
            table, entry = by_name[name], stored[name]
            fit = TableFit(table, entry.shape[0], entry.element, self.selection.rows_of(name))
            self._compare_shape(fit, entry.shape)
            if fit.element != table.element:
                self.cast[name] = (fit.element, table.element)
                self.differs(
                    f"table {name!r} is {table.element} in the model and {fit.element} in {self.where}; convert the "
                    f"model before loading, or {IGNORE} it converted"
                )
            self.tables.append(fit)

    def _compare_shape(self, fit: TableFit, stored: tuple[int, ...]) -> None:
        name, model = fit.table.name, (fit.table.rows, fit.table.dim)
        differing = self._shapes("table", name, stored, model)
        if stored[1:] != model[1:]:
            self.refusals.append(differing + self._without("table"))
        elif fit.ids is not None:
            if fit.ids.size and fit.ids[-1] >= min(stored[0], model[0]):
                self.refusals.append(
                    f"table {name!r}: row {fit.ids[-1]} was chosen; {self.where} has {stored[0]} rows and the model "
                    f"{model[0]}; choose rows that both have"
                )
        elif stored[0] > model[0]:
            self.refusals.append(f"{differing}, or load a part of it, as with rows=range({model[0]})")
        elif stored[0] < model[0]:
            self.grown[name] = (stored[0], model[0])
            self.differs(f"{differing}, or {IGNORE} its rows and keeps the new ones as they are")

    def _shapes(self, kind: str, name: str, stored: Sequence[int], model: Sequence[int]) -> str:
        return (
            f"{kind} {name!r} is {_times(model)} in the model and {_times(stored)} in {self.where}; give the model "
            "that was saved"
        )

    def _without(self, kind: str) -> str:
        """A way out where a load takes a part anyway."""
        return "" if self.selection.whole else f", or choose the {kind}s to load without it"

    def take_tensors(
        self,
        stored: Mapping[str, tuple[int, ...]],
        tensors: Mapping[str, torch.Tensor],
        stored_type: Callable[[str], str],
    ) -> None:
        """Compare the dense tensors chosen. `stored_type` gives torch's name of the type that one is stored in."""
        for name in self._common("tensor", self.selection.tensors, stored, tensors):
            tensor, shape, type_name = tensors[name], stored[name], stored_type(name)
            if shape != tuple(tensor.shape) and not (self.loaders and self.loaders.takes(name)):
                self.refusals.append(
                    self._shapes("tensor", name, shape, tensor.shape) + self._without("tensor")
                )
            if type_name != dtype_name(tensor.dtype):
                self.cast[name] = (type_name, dtype_name(tensor.dtype))
                self._compare_type(name, tensor, type_name)
            self.tensors[name] = tensor

    def compare_ties(self, stored: Mapping[str, str], model: Mapping[str, str]) -> None:
        """Compare what tied names are the same as, of those that are the same as something loaded.

        `stored`, `model`: by tied name, the name that its values are under.
        """
        loaded = {table_parameter(fit.table.name) for fit in self.tables} | self.tensors.keys()
        for name, owner in model.items():
            if owner in loaded and stored.get(name, owner) != owner:
                self.retied.append(f"{name} was {stored[name]} and gets the values of {owner}")
                self.differs(
                    f"{name!r} is the same as {owner!r} in the model and as {stored[name]!r} in {self.where}; tie it "
                    f"as it was saved, or {IGNORE} the values of {owner!r} into both"
                )

    def _compare_type(self, name: str, tensor: torch.Tensor, stored: str) -> None:
        differing = f"tensor {name!r} is {dtype_name(tensor.dtype)} in the model and {stored} in {self.where}"
        if tensor.is_floating_point() and dtype_named(stored).is_floating_point:
            self.differs(f"{differing}; convert the model before loading, or {IGNORE} it converted")
        else:
            self.refusals.append(
                f"{differing}, and only floating-point numbers are converted; convert the model before loading"
                + self._without("tensor")
            )

    def _common(
        self, kind: str, patterns: Patterns, stored: Collection[str], model: Collection[str]
    ) -> list[str]:
        """Names that a pattern matches and both sides have, in the model's order."""
        chosen = self._chosen(kind, patterns, {*stored, *model})
        missing, unexpected = sorted(chosen - {*stored}), sorted(chosen - {*model})
        if kind == "tensor":
            self.absent = missing
            self.handed = sorted({*unexpected} - {*self.not_taken(unexpected)})
            if self.selection.strict == "raise":  # else they are told of, whatever becomes of them
                missing, unexpected = self.not_taken(missing), self.not_taken(unexpected)
        self.missing += missing
        self.unexpected += unexpected
        # Of a table that the other side holds as a tensor, `match_model` tells: a load of the rest would leave it out.
        lacked, left = sorted({*missing} - self.turned), sorted({*unexpected} - self.turned)
        if lacked or left:
            self.differs(
                f"the model does not fit {self.where}: {kind}s only in the model: {lacked or 'none'}, only in the "
                f"store: {left or 'none'}; give the model that was saved, or {IGNORE} what both have"
            )
        return [name for name in model if name in chosen and name in stored]

    def not_taken(self, names: Iterable[str]) -> list[str]:
        """Those that no module may take, of names that only one side has."""
        return [name for name in names if self.loaders is None or not self.loaders.may_take(name)]

    def _chosen(self, kind: str, patterns: Patterns, names: Collection[str]) -> set[str]:
        """The names that a pattern matches."""
        for pattern in patterns:
            if pattern != "*" and not fnmatch.filter(names, pattern):
                raise ModelMismatchError(
                    f"no {kind} in the model or in {self.where} matches {pattern!r}; there are "
                    f"{sorted(names)}"
                )
        chosen = {name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)}
        excluded, is_table = self.excluded, kind == "table"
        return {
            name for name in chosen if not excluded.fits(name, table_parameter(name) if is_table else name)
        }


def match_model(
    catalog: Catalog,
    record: Record,
    model: nn.Module,
    tables: Sequence[Table],
    selection: Selection,
    loaders: Loaders | None = None,
    excluded: Exclusion = NOTHING,
) -> Match:
    """Compare the tables and dense tensors of a model with those of a version. `loaders` and `excluded`: see
    `Match`.
    """
    match = Match(
        f"version {record.id} of {catalog.backend.url}", selection, loaders=loaders, excluded=excluded
    )

    def stored_type(name: str) -> str:
        path = dense_path("model", name)
        grid = dense_layout(catalog, record, path)
        type_name = grid.torch_dtype or grid.dtype.name
        dtype = getattr(torch, type_name, None)
        if isinstance(dtype, torch.dtype) and dtype.itemsize != grid.dtype.itemsize:
            raise CorruptionError(
                f"{match.where}: {path}: {grid.dtype} does not hold the bits of {type_name[:40]}"
            )
        return type_name

    weights, dense = _entries(record, "tables/", "/weight"), _entries(record, dense_path("model", ""))
    items = list(dense_items(model, tables, named_state(model, excluded)))
    named, in_model = [table.name for table in tables], {name for name, *_ in items}
    turned = (
        [name for name in named if name not in weights and table_parameter(name) in dense],
        [name for name in weights if name not in named and table_parameter(name) in in_model],
    )
    match.turned = {each for names in turned for name in names for each in (name, table_parameter(name))}
    match.take_tables(weights, tables)
    match.take_tensors(
        {name: entry.shape for name, entry in dense.items()},
        {name: tensor for name, owner, tensor in items if name == owner},
        stored_type,
    )
    told = {*match.missing, *match.unexpected}
    whole, by_rows = ([name for name in names if {name, table_parameter(name)} & told] for names in turned)
    if whole or by_rows:
        match.differs(
            f"{match.where} holds {whole or by_rows} {'whole, not ' * bool(whole)}by rows; if that was an import of a "
            f"file, import again with {' '.join(f'--table {name}' for name in named)} (tables={named}), else give the "
            "model that was saved"
        )
    entries = {table_parameter(name): entry for name, entry in weights.items()} | dense
    match.compare_ties(
        {alias: owner for owner, entry in entries.items() for alias in entry.aliases},
        {alias: table_parameter(table.name) for table in tables for alias in table.tied_names}
        | {name: owner for name, owner, _ in items if name != owner},
    )
    match.prove()
    return match


def _entries(record: Record, prefix: str, suffix: str = "") -> dict[str, ArrayEntry]:
    """The entries of a record between these parts of their paths, by name."""
    return {
        decode_name(path[len(prefix) : len(path) - len(suffix)]): entry
        for path, entry in record.arrays.items()
        if path.startswith(prefix) and path.endswith(suffix)
    }


def _times(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "a scalar"
