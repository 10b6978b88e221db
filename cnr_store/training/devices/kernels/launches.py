"""Launches the kernels: for each of them, how many rows and columns a program takes, and what it is compiled for.

No kernel may contract a product and a sum into one operation that rounds once: its codes would differ from the host's.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton

from cnr_codecs.kernels.search import trials
from cnr_store.training.devices.kernels import codes, decode, flagging, lattice, ranges, search, walk

_IDS = 1024
# Values of a program's tile, and rows that are searched by one.
_TILE, _MAX_TILE_ROWS, _SEARCHED_ROWS, _MAX_COLUMNS = 2048, 128, 128, 1024
_EXACT = {"enable_fp_fusion": False}
# A load decodes on many threads. Compiling a kernel and interpreting one are not made for that.
_LAUNCHING = threading.RLock()


@dataclass(frozen=True)
class Source:
    """Rows of a table.

    Attributes
    ----------
    values
        (rows, dim), each row in one piece.
    ids
        int64 (n,): the rows to take; None for all. Kernels take those on the same device, `part` any.
    """

    values: torch.Tensor
    ids: torch.Tensor | None

    @property
    def count(self) -> int:
        """How many rows are taken."""
        return len(self.values) if self.ids is None else len(self.ids)

    @property
    def dim(self) -> int:
        """Values of a row."""
        return int(self.values.shape[1])

    def part(self, begin: int, end: int) -> Source:
        """Some of these rows, whose ids may be in host memory."""
        if self.ids is None:
            return Source(self.values[begin:end], None)
        return Source(self.values, self.ids[begin:end].to(self.values.device))

    @property
    def place(self) -> tuple[Any, ...]:
        """What each kernel takes first."""
        values, ids = _bits_of(self.values), self.ids
        return values, values if ids is None else ids, self.count, values.stride(0)

    @property
    def kinds(self) -> dict[str, bool]:
        """What each kernel is compiled for."""
        return {"all_rows": self.ids is None, "as_bfloat16": self.values.dtype is torch.bfloat16}


def _bits_of(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int16) if values.dtype is torch.bfloat16 else values


def _tile(columns: int) -> dict[str, int]:
    block = min(triton.next_power_of_2(columns), _MAX_COLUMNS)
    return {"rows": min(max(_TILE // block, 1), _MAX_TILE_ROWS), "block": block}


def _run(kernel: Any, count: int, share: int, *arguments: Any, **options: Any) -> None:
    """Launch a kernel on the stream that is current, for `count` rows, of which each program takes a share."""
    if count:
        with torch.cuda.device_of(arguments[0]), _LAUNCHING:
            kernel[(triton.cdiv(count, share),)](*arguments, **options, **_EXACT)


def flag(words: torch.Tensor, rows: int, ids: torch.Tensor, outside: torch.Tensor) -> None:
    """Set the bits of flat `ids` in `words`, int32; set `outside`, int32 (1,), if one is not a row."""
    count = ids.numel()
    _run(flagging.flag_rows, count, _IDS, ids, count, rows, words, outside, block=_IDS)


def flag_bags(
    words: torch.Tensor,
    first_words: torch.Tensor,
    rows: torch.Tensor,
    ids: torch.Tensor,
    offsets: torch.Tensor,
    outside: torch.Tensor,
) -> None:
    """Set the bits of the ids of many tables; see `flagging.flag_bags`. Each table has as many bags."""
    tables, count = len(rows), ids.numel()
    batch, halvings = (offsets.numel() - 1) // tables, (tables - 1).bit_length()
    arguments = (ids, count, offsets, tables, batch, rows, words, first_words, outside)
    _run(flagging.flag_bags, count, _IDS, *arguments, halvings=halvings, block=_IDS)


def quantize_ranges(
    source: Source, bits: int, is_symmetric: bool, overflow: float, out: Sequence[torch.Tensor]
) -> None:
    """Quantize rows over their ranges. `out` are float32 and float16 (2, n), uint8 (n,) and (n, bytes a row)."""
    tile = _tile(source.dim)
    options = {"dim": source.dim, "bits": bits, "is_symmetric": is_symmetric, **tile, **source.kinds}
    _run(ranges.encode_ranges, source.count, tile["rows"], *source.place, overflow, *out, **options)


def quantize_searched(
    source: Source, bits: int, normal_step: float, overflow: float, out: Sequence[torch.Tensor]
) -> None:
    """Quantize rows with the parameters that the search finds. `out` is that of `quantize_ranges`."""
    table = _trials(source.values.device)
    arguments = (*source.place, overflow, normal_step, table, *out[:3])
    options = {"trial_count": len(table), **_lanes(source, bits)}
    _run(search.search_lines, source.count, _SEARCHED_ROWS, *arguments, **options)
    _encode(source, bits, out)


def quantize_walked(
    source: Source, bits: int, bins: int, steps: int, overflow: float, out: Sequence[torch.Tensor]
) -> None:
    """Quantize rows over the ranges that the paper's walk leaves. `out` is that of `quantize_ranges`."""
    arguments = (*source.place, overflow, *out[:3])
    options = {"bins": bins, "steps": steps, **_lanes(source, bits)}
    _run(walk.walk_ranges, source.count, _SEARCHED_ROWS, *arguments, **options)
    _encode(source, bits, out)


def _lanes(source: Source, bits: int) -> dict[str, int]:
    block = min(_TILE // _SEARCHED_ROWS, triton.next_power_of_2(source.dim))
    return {"dim": source.dim, "bits": bits, "rows": _SEARCHED_ROWS, "block": block, **source.kinds}


def _encode(source: Source, bits: int, out: Sequence[torch.Tensor]) -> None:
    tile = _tile((source.dim * bits + 7) // 8)
    options = {"dim": source.dim, "bits": bits, **tile, **source.kinds}
    _run(codes.encode_given, source.count, tile["rows"], *source.place, out[0], out[3], **options)


@cache
def _trials(device: torch.device) -> torch.Tensor:
    return torch.from_numpy(trials()).to(device)


def quantize_lattice(source: Source, step: float, limit: int, found: torch.Tensor, raw: torch.Tensor) -> None:
    """Write the codes of rows on one step to `found`, int16 (n, dim), and mark in `raw`, uint8, rows that have none."""
    tile = _tile(source.dim)
    arguments = (*source.place, step, limit, found, raw)
    _run(
        lattice.encode_lattice, source.count, tile["rows"], *arguments, dim=source.dim, **tile, **source.kinds
    )


def quantize_floating(
    source: Source, shift: int, least: int, most: int, found: torch.Tensor, raw: torch.Tensor
) -> None:
    """Write the codes of rows on a floating grid; `found` and `raw` are those of `quantize_lattice`.

    Of a float32 the lowest `shift` bits are left out. Magnitudes other than 0 are from `least` to `most`.
    """
    tile = _tile(source.dim)
    arguments = (*source.place, least, most, found, raw)
    options = {"dim": source.dim, "shift": shift, **tile, **source.kinds}
    _run(lattice.encode_floating, source.count, tile["rows"], *arguments, **options)


def sum_squares(values: torch.Tensor, block_rows: int, sums: torch.Tensor) -> None:
    """Write the sums of squares of each block of rows of a table to `sums`, float64 (blocks, lanes)."""
    (count, dim), stride = values.shape, values.stride(0)
    options = {"dim": dim, "rows": block_rows, "lanes": sums.shape[1], "in_one_piece": stride == dim}
    arguments = (_bits_of(values), count, stride, sums)
    is_bfloat16 = values.dtype is torch.bfloat16
    _run(lattice.sum_squares, count, block_rows, *arguments, **options, as_bfloat16=is_bfloat16)


def decode_uniform(
    packed: torch.Tensor,
    parameters: torch.Tensor,
    bits: int,
    is_symmetric: bool,
    ids: torch.Tensor,
    target: torch.Tensor,
) -> None:
    """Write rows `ids` of `target`, (rows, dim), from packed codes (n, bytes a row)."""
    dim, count, values = int(target.shape[1]), len(ids), _bits_of(target)
    tile, as_bfloat16 = _tile(dim), target.dtype is torch.bfloat16
    arguments = (packed, parameters, ids, count, values.stride(0), values)
    options = {"dim": dim, "bits": bits, "is_symmetric": is_symmetric, **tile, "as_bfloat16": as_bfloat16}
    _run(decode.decode_rows, count, tile["rows"], *arguments, **options)


def decode_integers(
    found: torch.Tensor, step: float, shift: int, ids: torch.Tensor, target: torch.Tensor
) -> None:
    """Write rows `ids` of `target`, (rows, dim), from their codes, int16 (n, dim), on one step.

    A `shift` other than 0 is that of `quantize_floating`, and codes are on a floating grid.
    """
    dim, count, values = int(target.shape[1]), len(ids), _bits_of(target)
    tile, as_bfloat16 = _tile(dim), target.dtype is torch.bfloat16
    arguments = (found, ids, count, values.stride(0), step, values)
    options = {"dim": dim, "shift": shift, **tile, "as_bfloat16": as_bfloat16}
    _run(decode.decode_integers, count, tile["rows"], *arguments, **options)
