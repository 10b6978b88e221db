"""What is aimed at on a GPU. What has not been measured stays open."""

from __future__ import annotations

from benchmarks.codec_bench.target import Target

SEARCHED = "gather and quantize, adaptive 4 bits: share of a copy's pace"
RANGED = "gather and quantize, asymmetric 8 bits: share of a copy's pace"
DECODE = "decode: share of a copy's pace"
STALL, STALL_OF_FEW = "stall: milliseconds, 25% of the rows", "stall: milliseconds, 1% of the rows"
STALL_SHARE = "stall: share of DCP async_save's, 25% of the rows"
FLAGGING, FLAG_BITS = "flagging: share of a DLRM step", "flagging: bits a row"
PACE = "training's pace while a save is copied and written"
RESTORE = "restore: share of the slower of bus and host memory"

# The least that counts; of those that `_AT_MOST` has, the most.
AIMS = {
    SEARCHED: 0.3,
    RANGED: 0.6,
    DECODE: 0.6,
    STALL: 100.0,
    STALL_OF_FEW: 10.0,
    STALL_SHARE: 1 / 50,
    FLAGGING: 0.01,
    FLAG_BITS: 1.01,
    PACE: 0.97,
    RESTORE: 0.5,
}
_AT_MOST = {STALL, STALL_OF_FEW, STALL_SHARE, FLAGGING, FLAG_BITS}


def is_at_most(name: str) -> bool:
    """Whether an aim is the most that counts."""
    return name in _AT_MOST


def target(name: str, measured: float, where: str) -> Target:
    """A figure beside its aim."""
    return Target(name, AIMS[name], measured, where, at_most=is_at_most(name))
