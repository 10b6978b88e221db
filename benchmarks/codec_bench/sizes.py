"""How much is measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """Bytes of the rows that are encoded at once, rounds in which all contenders take turns, and rows for those
    that take milliseconds a row.

    `in_cache_bytes` leave room in a core's L2 for codes beside them; `out_of_cache_bytes` exceed L3.
    """

    in_cache_bytes: int = 512 << 10
    out_of_cache_bytes: int = 48 << 20
    rounds: int = 5
    slow_rows: int = 100
    error_rows: int = 4_000
    zarr_bytes: int = 128 << 20
    zarr_chunk_bytes: tuple[int, ...] = (4 << 20, 8 << 20, 16 << 20)
    training_epochs: int = 3


FULL = Sizes()
QUICK = Sizes(
    in_cache_bytes=128 << 10,
    out_of_cache_bytes=4 << 20,
    rounds=2,
    slow_rows=16,
    error_rows=500,
    zarr_bytes=16 << 20,
    zarr_chunk_bytes=(4 << 20,),
    training_epochs=1,
)
