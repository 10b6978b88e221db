"""Chooses the codec of each table's rows, and of the optimizer state beside them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from cnr_codecs import (
    CodecError,
    FloatingRows,
    LatticeRows,
    LosslessRows,
    RowCodec,
    UniformRows,
    compile_decoding,
    compile_encoding,
    row_codec,
)
from cnr_codecs.payload.coded import MAX_MANTISSA
from cnr_store.errors import OptionError
from cnr_store.format.layout import weight_path
from cnr_store.format.record import Record
from cnr_store.policies.lattices import AutoLattice, Trial, auto_fineness
from cnr_store.policies.widths import (
    AUTO,
    AUTO_DROPPED,
    AUTO_STATE,
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
from cnr_store.writing.row_codes import relative_codec

log = logging.getLogger("cnr_store")

CodecOption = str | Mapping[str, Any] | RowCodec | None


def takes_changing_rows(codec: RowCodec) -> bool:
    """Whether rows may change under a codec, as after an interrupt: its kernels take no index from values."""
    return isinstance(codec, LosslessRows) or (isinstance(codec, UniformRows) and codec.bins is None)


class CodecChoice:
    """Chooses codecs by the names of tables and of optimizer state.

    `bits`: 2, 3, 4, 8, 32, ``"auto"``, or a mapping from name patterns to these.
    `codec`: None (uniform, adaptive, of `bits`); a name, configuration or object that `cnr_codecs.row_codec` takes; or
    a mapping from name patterns to these. `bits` then applies to the tables that no pattern fits. ``"auto"``, or a
    configuration of that id, chooses by the restores expected and by the deltas written: see `AutoLattice`.
    `expected`: the restores that ``"auto"`` chooses a width or a codec by.
    `state_bits`: see `StateWidths`.
    """

    def __init__(
        self,
        bits: Bits = "auto",
        codec: CodecOption = None,
        expected: ExpectedRestores | None = None,
        state_bits: StateBits = LOSSLESS,
    ) -> None:
        self._bits = check_bits(bits)
        self._state, self._state_bits = StateWidths(state_bits), state_bits
        self._expected = expected
        self._auto, _ = auto_bits(expected, 0)
        self._patterns: Mapping[str, RowCodec] = {}
        self._single: RowCodec | None = None
        self._chosen: dict[tuple[str | int, ...], RowCodec] = {}  # each save asks for all arrays again
        self._lattice, self._fineness = AutoLattice.of(codec), auto_fineness(expected, 0)
        self._trials: dict[str, Trial] = {}
        try:
            if self._lattice is not None:
                self._single = self._uniform
            elif isinstance(codec, Mapping) and "id" not in codec:
                self._patterns = {pattern: row_codec(one) for pattern, one in codec.items()}
            elif codec is not None:
                self._single = row_codec(codec)
        except CodecError as error:
            raise OptionError(f"codec {codec!r}: {error}") from error
        if self._single is not None and bits != "auto":
            raise OptionError(
                f"bits {bits!r} and codec {codec!r}: give the width in the codec's configuration alone"
            )
        if expected is not None and not self._may_be_auto and self._lattice is None:
            raise OptionError(
                f"expected_restores={expected} is used only with bits='auto' or codec='auto': leave it out"
            )

    @property
    def settings(self) -> dict[str, str]:
        """What was asked for, which ranks compare."""
        patterns = {pattern: codec.get_config() for pattern, codec in self._patterns.items()}
        return {
            "bits": repr(self._bits),
            "codec": repr(self._lattice or (patterns if self._single is None else self._single.get_config())),
            "state_bits": repr(self._state_bits),
            "expected_restores": repr(self._expected),
        }

    @property
    def _may_be_auto(self) -> bool:
        """Whether a table may get the width that ``"auto"`` stands for."""
        return self._single is None and (self._bits == "auto" or isinstance(self._bits, Mapping))

    def check_tables(self, tables: Sequence[str]) -> None:
        """Refuse patterns that fit no table."""
        for pattern in [*self._patterns, *(self._bits if isinstance(self._bits, Mapping) else ())]:
            if not any(match_pattern({pattern: True}, table) for table in tables):
                raise OptionError(
                    f"the pattern {pattern!r} fits no table; there are {', '.join(map(repr, tables))}"
                )
        self._state.check_tables(tables)

    def choose_tables(self, sizes: Mapping[str, int]) -> None:
        """Choose the tables that ``codec="auto"`` may put on the lattice, of those with these names and bytes."""
        if self._lattice is not None:
            self._trials = {name: Trial() for name in self._lattice.may_take(sizes)}
            self._chosen.clear()

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
        before = self._auto, self._fineness
        self._fineness = auto_fineness(self._expected, restores)
        (self._auto, why), may_be_auto = auto_bits(self._expected, restores), self._may_be_auto
        if (self._auto, self._fineness) != before:
            self._chosen.clear()
        return (self._auto, why) if may_be_auto else None

    def explain_auto(self) -> dict[str, dict[str, Any]]:
        """What ``codec="auto"`` stands for now, as the entry ``codec`` of a record's policy; none for other codecs."""
        found = self._fineness
        said = {"rms_step": found.rms_step, "bits": found.bits, "reason": found.reason}
        return {} if self._lattice is None else {"codec": said}

    def note_deltas(self, record: Record) -> None:
        """Count the deltas that were committed: a table's first ones decide whether it stays on the lattice."""
        for table, trial in self._trials.items():
            entry = record.arrays.get(weight_path(table))
            if entry is not None and entry.kind == "delta" and (entry.codec or {}).get("id") == "cnr_lattice":
                uniform_bytes = entry.rows * self._uniform.bytes_per_row(entry.shape[1], entry.element)
                trial.note(record.id, entry.rows, entry.nbytes, uniform_bytes)
                self._chosen.clear()

    @property
    def _auto_widths(self) -> set[int | str]:
        return {self._fineness.state_bits} if self._lattice is not None and self._lattice.state else set()

    @property
    def _uniform(self) -> UniformRows:
        return UniformRows(scheme="adaptive", bits=self._fineness.bits)

    def compile_steps(self, sizes: Mapping[str, tuple[int, int, str]]) -> Iterator[None]:
        """Compile the kernels that saving and loading these tables will run, one a step.

        First come those that a load waits for; last those of bitmaps, for which numpy stands in. `sizes` are (bytes,
        dim, element type) by table name. Compiled kernels are cached on disk.
        """
        for element in sorted({element for _, _, element in sizes.values()}):
            yield from compile_decoding(element)
        wanted = {
            (self.codec_for(name, nbytes), dim, element) for name, (nbytes, dim, element) in sizes.items()
        }
        wanted |= {
            (_state_codec(width, element, is_relative=False), dim, element)
            for width in self._state.quantized | self._auto_widths
            for _, dim, element in sizes.values()
            if element in QUANTIZABLE
        }
        for codec, dim, element in wanted:
            yield from compile_encoding(codec, dim, element)
        yield from compile_kernels()

    def codec_for(self, table: str, table_bytes: int) -> RowCodec:
        """The codec of a table of that name and size. Small tables are lossless unless a pattern names them."""
        chosen = self._chosen.get((table, table_bytes))
        if chosen is None:
            chosen = self._chosen[table, table_bytes] = self._choose(table, table_bytes)
        return chosen

    def _choose(self, table: str, table_bytes: int) -> RowCodec:
        named = match_pattern(self._patterns, table)
        if named is not None:
            return named
        if self._single is not None:
            return LosslessRows() if table_bytes < LOSSLESS_BELOW_BYTES else self._single_for(table)
        width = choose_bits(self._bits, table, table_bytes, self._auto)
        return LosslessRows() if width == LOSSLESS else UniformRows(scheme="adaptive", bits=width)

    def _single_for(self, table: str) -> RowCodec:
        """The one codec of large tables; of ``"auto"``, the table's."""
        assert self._single is not None
        if self._lattice is None:
            return self._single
        trial = self._trials.get(table)
        if trial is None or trial.lost:
            return self._uniform
        return LatticeRows(self._fineness.rms_step, relative=True)

    def may_drop(self, table: str, slot: str, nbytes: int, element: str) -> bool:
        """Whether an array of optimizer state is stored by what its optimizer does with it: see `Moments`."""
        return element in QUANTIZABLE and self._state.of(table, slot, nbytes) == AUTO

    def state_codec_for(
        self, table: str, slot: str, nbytes: int, element: str, *, is_dropped: bool = False
    ) -> RowCodec:
        """The codec of an array of optimizer state beside a table's rows.

        Element types that can't be quantized, such as integers, are lossless, even if a pattern names them. Floating
        grids are relative where the rows of a large table of that name are.

        `is_dropped`: whether it is stored without its small values.
        """
        is_relative = relative_codec(self.codec_for(table, LOSSLESS_BELOW_BYTES)) is not None
        key = table, slot, nbytes, element, is_relative, is_dropped
        chosen = self._chosen.get(key)
        if chosen is None:
            width = self._state.of(table, slot, nbytes)
            if width == LOSSLESS and nbytes >= LOSSLESS_BELOW_BYTES and self._auto_widths:
                width = self._fineness.state_bits
            elif width == AUTO:
                width = AUTO_DROPPED if is_dropped else AUTO_STATE
            chosen = self._chosen[key] = _state_codec(width, element, is_relative)
        return chosen


def _state_codec(width: int | str, element: str, is_relative: bool) -> RowCodec:
    """The codec of state of a width, lossless where the element type can't be quantized."""
    if width == LOSSLESS or element not in QUANTIZABLE:
        return LosslessRows()
    if isinstance(width, int):
        return CeilingRows(width)
    bits = MANTISSAS[width]
    return FloatingRows(bits, is_relative and bits <= MAX_MANTISSA)  # exact codes are not kept in memory
