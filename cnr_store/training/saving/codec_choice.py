"""Chooses the codec of each table's rows, and of the optimizer state beside them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cnr_codecs import (
    CodecError,
    FloatingRows,
    Followed,
    LatticeRows,
    LosslessRows,
    RowCodec,
    UniformRows,
    compile_decoding,
    compile_encoding,
    row_codec,
)
from cnr_codecs.payload.coded import MANTISSA_BITS
from cnr_store.errors import OptionError
from cnr_store.policies.budget import (
    DEFAULT_BUDGET,
    MIN_STATE_BUDGET,
    STATE,
    Budget,
    check_budget,
    next_step,
)
from cnr_store.policies.widths import (
    LOSSLESS,
    LOSSLESS_BELOW_BYTES,
    MANTISSAS,
    Bits,
    ExpectedRestores,
    StateBits,
    StateWidths,
    auto_bits,
    check_bits,
    choose_bits,
    match_pattern,
)
from cnr_store.training.saving.never_below_codec import QUANTIZABLE, CeilingRows
from cnr_store.training.tracking.bitmap import compile_kernels
from cnr_store.writing.lineage import ArrayLine
from cnr_store.writing.row_codes import is_exact, relative_codec
from cnr_store.writing.steps import keep_grid

if TYPE_CHECKING:  # imports of files go without torch
    from cnr_store.training.model.row_arrays import RowArray
    from cnr_store.training.model.tables import Table

log = logging.getLogger("cnr_store")

CodecOption = str | Mapping[str, Any] | RowCodec | None


def takes_changing_rows(codec: RowCodec) -> bool:
    """Whether rows may change under a codec, as after an interrupt: its kernels take no index from values."""
    return isinstance(codec, LosslessRows) or (isinstance(codec, UniformRows) and codec.bins is None)


class CodecChoice:
    """Chooses codecs by the names of tables and of optimizer state.

    `bits`: 2, 3, 4, 8, 32, ``"auto"``, or a mapping from name patterns to these. ``"auto"`` is what a budget asks
    for, or the width that `expected` allows if it is given.
    `codec`: None (uniform, adaptive, of `bits`); a name, configuration or object that `cnr_codecs.row_codec` takes; or
    a mapping from name patterns to these. `bits` then applies to the tables that no pattern fits. ``"auto"`` is
    `DEFAULT_BUDGET`.
    `expected`: the restores that widths are chosen by, in place of the default budget.
    `state_bits`: see `StateWidths`. None is lossless, or what a budget stands for.
    `budget`: per cent of the loss that restores may cost. Tables that neither `bits` nor `codec` names go by it.
    `exact_parents`: whether lossless rows of float32 are relative, on a grid that has all their bits.
    """

    def __init__(
        self,
        bits: Bits | None = None,
        codec: CodecOption = None,
        expected: ExpectedRestores | None = None,
        state_bits: StateBits | None = None,
        budget: float | None = None,
        exact_parents: bool = False,
    ) -> None:
        check_bits("auto" if bits is None else bits)
        if expected is None:
            bits = None if bits == "auto" else bits
        elif bits is codec is None and not _is_asked(budget):
            bits = "auto"
        self._bits: Bits = "auto" if bits is None else bits
        self._expected = expected
        self._auto, _ = auto_bits(expected, 0)
        self._patterns: Mapping[str, RowCodec] = {}
        self._single: RowCodec | None = None
        self._chosen: dict[tuple[str | int, ...], RowCodec] = {}  # each save asks for all arrays again
        self.exact_parents = exact_parents
        self.budget = _budget_of(bits, codec, budget)
        has_state = self.budget is not None and self.budget.percent >= MIN_STATE_BUDGET
        self._state = StateWidths(state_bits, STATE if has_state else LOSSLESS)
        self._state_bits = state_bits
        try:
            if isinstance(codec, Mapping) and "id" not in codec:
                self._patterns = {pattern: row_codec(one) for pattern, one in codec.items()}
            elif codec is not None and not _is_auto(codec):
                self._single = row_codec(codec)
        except CodecError as error:
            raise OptionError(f"codec {codec!r}: {error}") from error
        if self._single is not None and bits not in (None, "auto"):
            raise OptionError(
                f"bits {bits!r} and codec {codec!r}: give the width in the codec's configuration alone"
            )
        if expected is not None and not self._may_be_auto:
            raise OptionError(f"job.expected_restores={expected} is used only with bits='auto': leave it out")

    @property
    def settings(self) -> dict[str, str]:
        """What was asked for, which ranks compare."""
        patterns = {pattern: codec.get_config() for pattern, codec in self._patterns.items()}
        return {
            "bits": repr(self._bits),
            "codec": repr(patterns if self._single is None else self._single.get_config()),
            "state_bits": repr(self._state_bits),
            "budget": repr(self.budget and self.budget.percent),
        }

    @property
    def _may_be_auto(self) -> bool:
        """Whether a table may get the width that ``"auto"`` stands for."""
        if isinstance(self._bits, Mapping):
            return self.budget is None or (self._expected is not None and "auto" in self._bits.values())
        return self._single is None and self._bits == "auto" and self.budget is None

    def check_tables(self, tables: Sequence[str]) -> None:
        """Refuse patterns that fit no table."""
        for pattern in [*self._patterns, *(self._bits if isinstance(self._bits, Mapping) else ())]:
            if not any(match_pattern({pattern: True}, table) for table in tables):
                raise OptionError(
                    f"the pattern {pattern!r} fits no table; there are {', '.join(map(repr, tables))}"
                )
        self._state.check_tables(tables)

    def warn_unknown_slots(self, find: Callable[[], Mapping[str, Collection[str]]]) -> None:
        """Log patterns of `state_bits` that fit no slot: see `StateWidths.unknown_slots`."""
        for pattern, slots in self._state.unknown_slots(find).items():
            log.warning(
                "state_bits: the pattern %r fits no optimizer state that is stored by rows; its tables have %s",
                pattern,
                ", ".join(map(repr, slots)),
            )

    def resolve_auto(self, restores: int) -> tuple[int, str] | None:
        """Choose the width that ``"auto"`` stands for in a run that was restored `restores` times.

        Returns the width and the reason, for the commit record; None if no width is ``"auto"``.
        """
        before = self._auto
        (self._auto, why), may_be_auto = auto_bits(self._expected, restores), self._may_be_auto
        if self._auto != before:
            self._chosen.clear()
        return (self._auto, why) if may_be_auto else None

    def choose_step(self, spent: float, stored: Mapping[tuple[str, int], float | None]) -> str:
        """Choose the step of the tables that go by the budget; why the next version must be whole, "" if it need not.

        `spent`: per cent of the loss, by restores up to now.
        `stored`: the steps that tables, of that name and so many bytes, have beneath a delta; None for those on none.
        """
        if self.budget is None:
            return ""
        steps = {step for table, step in stored.items() if self._goes_by_budget(*table)}
        step, why = next_step(self.budget.percent - spent, steps)
        if step != self.budget.rms_step:
            self._chosen.clear()
        self.budget = replace(self.budget, spent=spent, rms_step=step)
        return why

    def _goes_by_budget(self, table: str, table_bytes: int) -> bool:
        named = {**self._patterns, **(self._bits if isinstance(self._bits, Mapping) else {})}
        is_large = table_bytes >= LOSSLESS_BELOW_BYTES
        by_budget = (None,) if self._expected else (None, "auto")
        return self.budget is not None and is_large and match_pattern(named, table) in by_budget

    def compile_steps(self, tables: Sequence[Table]) -> Iterator[None]:
        """Compile the kernels that saving and loading these tables will run, one a step.

        First come those that a load waits for; last those of bitmaps, for which numpy stands in. Compiled kernels are
        cached on disk.
        """
        for element in sorted({table.element for table in tables}):
            yield from compile_decoding(element)
        wanted = {
            (self.codec_for(each.name, each.nbytes, each.element), each.dim, each.element) for each in tables
        }
        wanted |= {
            (self._state_codec(width, each.nbytes, each.element, is_relative=False), each.dim, each.element)
            for width in [*self._state.quantized, *[LOSSLESS] * self.exact_parents]
            for each in tables
            if each.element in QUANTIZABLE
        }
        for codec, dim, element in wanted:
            yield from compile_encoding(codec, dim, element)
        yield from compile_kernels()

    def of(self, array: RowArray) -> RowCodec:
        """The codec of an array."""
        if array.is_weight:
            return self.codec_for(array.table.name, array.nbytes, array.element)
        return self.state_codec_for(array.table.name, array.slot, array.nbytes, array.element)

    def why_absolute(self, array: RowArray) -> str:
        """What keeps rows from being lossless and relative: their element type, or the codec; "" if nothing does."""
        codec = self.of(array)
        if is_exact(relative_codec(codec)):
            return ""
        return str(codec.get_config()["id"]) if array.element == "float32" else array.element

    def over(self, array: RowArray, line: ArrayLine | None) -> RowCodec:
        """The codec of an array in a delta over its line, or in a whole version."""
        codec = self.of(array)
        return codec if line is None else keep_grid(codec, line.lattice, line.move)

    def row_bytes(self, array: RowArray) -> float:
        """The bytes that a row of an array is expected to take."""
        return self.of(array).bytes_per_row((*array.shape, 1)[1], array.element)

    def codec_for(self, table: str, table_bytes: int, element: str = "float32") -> RowCodec:
        """The codec of a table of that name and size. Small tables are lossless unless a pattern names them."""
        chosen = self._chosen.get((table, table_bytes, element))
        if chosen is None:
            own = self._choose(table, table_bytes, self._lossless(table_bytes, element))
            chosen = self._chosen[table, table_bytes, element] = self._over_exact(own, element)
        return chosen

    def _lossless(self, nbytes: int, element: str) -> RowCodec:
        """The codec of lossless rows of an array, where no other is asked for."""
        is_relative = self.exact_parents and element == "float32" and nbytes >= LOSSLESS_BELOW_BYTES
        return FloatingRows(MANTISSA_BITS, relative=True) if is_relative else LosslessRows()

    def _over_exact(self, codec: RowCodec, element: str) -> RowCodec:
        """The codec, with exact rows relative where their integers are kept in memory."""
        if isinstance(codec, Followed):
            return Followed(self._over_exact(codec.codec, element), codec.then)
        is_relative = self.exact_parents and element == "float32"
        return replace(codec, relative=is_relative) if is_exact(codec) else codec

    def _choose(self, table: str, table_bytes: int, lossless: RowCodec) -> RowCodec:
        named = match_pattern(self._patterns, table)
        if named is not None:
            return named
        if self._single is not None:
            return LosslessRows() if table_bytes < LOSSLESS_BELOW_BYTES else self._single
        if self.budget is not None and self._goes_by_budget(table, table_bytes):
            return LatticeRows(self.budget.rms_step, relative=True) if self.budget.rms_step else lossless
        width = choose_bits(self._bits, table, table_bytes, self._auto)
        return lossless if width == LOSSLESS else UniformRows(scheme="adaptive", bits=width)

    def state_codec_for(self, table: str, slot: str, nbytes: int, element: str) -> RowCodec:
        """The codec of an array of optimizer state beside a table's rows.

        Element types that can't be quantized, such as integers, are lossless, even if a pattern names them. Floating
        grids are relative where the rows of a large table of that name are.
        """
        is_relative = relative_codec(self.codec_for(table, LOSSLESS_BELOW_BYTES, element)) is not None
        key = table, slot, nbytes, element, is_relative
        chosen = self._chosen.get(key)
        if chosen is None:
            width = self._state.of(table, slot, nbytes)
            chosen = self._chosen[key] = self._state_codec(width, nbytes, element, is_relative)
        return chosen

    def _state_codec(self, width: int | str, nbytes: int, element: str, is_relative: bool) -> RowCodec:
        """The codec of state of a width, lossless where the element type can't be quantized."""
        if width == LOSSLESS or element not in QUANTIZABLE:
            return self._lossless(nbytes, element)
        if isinstance(width, int):
            return CeilingRows(width)
        return self._over_exact(FloatingRows(MANTISSAS[width], is_relative), element)


def _budget_of(bits: Bits | None, codec: CodecOption, budget: float | None) -> Budget | None:
    """The budget of a new run, None where `bits` or `codec` overrule it. Such as name tables leave it the others."""
    percent, is_asked = check_budget(budget), _is_asked(budget)
    if _is_auto(codec):
        percent, is_asked, codec = DEFAULT_BUDGET if percent is None else percent, True, None
    of_all = [each for each in (("bits", bits), ("codec", codec)) if not _names_tables(each[1])]
    if of_all and is_asked:
        raise OptionError(
            f"budget={percent:g} and {' and '.join(f'{name}={each!r}' for name, each in of_all)}: each says how all "
            "tables are rounded. Give one of them, or name the tables that are to differ, as in bits={'users*': 8}"
        )
    return None if percent is None or of_all else Budget.new(percent)


def _is_asked(budget: float | None) -> bool:
    """Whether it differs from what holds where nobody asks for one."""
    return budget not in (None, DEFAULT_BUDGET)


def _is_auto(codec: CodecOption) -> bool:
    return isinstance(codec, str) and codec == "auto"


def _names_tables(option: object) -> bool:
    return option is None or (
        isinstance(option, Mapping) and "id" not in option and option.get("*", "auto") == "auto"
    )
