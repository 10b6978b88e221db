"""What the codecs should reach, and whether they do: the least of the ratios measured counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from benchmarks.codec_bench.contenders import (
    ADAPTIVE_2,
    ADAPTIVE_4,
    ASYMMETRIC_8,
    KMEANS_4,
    SKLEARN_4,
    TORCH_2,
    TORCH_4,
    TORCH_8,
    Contender,
)
from benchmarks.codec_bench.scaling import ZarrShare
from benchmarks.codec_bench.table import Line
from benchmarks.codec_bench.target import Target

# A call of a codec through Python, rows in the cache: its checks and its memory count, and torch's do.
_CALLS = 0.9
# Errors are computed from rows of float32 sums: equal ones may differ in their last digits.
_ERROR_SLACK = 1 + 1e-6


def against_peers(lines: Sequence[Line]) -> Iterator[Target]:
    """The targets that the table's lines decide."""
    yield _encode("adaptive, 4 bits: times torch's encoding", 40, lines, ADAPTIVE_4, TORCH_4)
    yield _encode("adaptive, 2 bits: times torch's encoding", 50, lines, ADAPTIVE_2, TORCH_2)
    # With as many codes as values there is nothing to choose, and our codebooks are rounded.
    wide = [line for line in lines if line.dim > 16]
    yield _encode("k-means, 4 bits: times scikit-learn's encoding", 300, wide, KMEANS_4, SKLEARN_4)
    yield _pace(
        "asymmetric, 8 bits: times torch's encoding", _CALLS, "encode_gb_s", lines, ASYMMETRIC_8, TORCH_8
    )
    for us, peer in ((ASYMMETRIC_8, TORCH_8), (ADAPTIVE_4, TORCH_4), (ADAPTIVE_2, TORCH_2)):
        yield _pace(f"{us.bits} bits: times torch's decoding", _CALLS, "decode_gb_s", lines, us, peer)


def of_scaling(zarr_shares: dict[str, ZarrShare], threads: dict[str, float] | None) -> Iterator[Target]:
    """The targets of Zarr and threads."""
    for way in ("encode", "decode"):
        found = {name: share for name, share in zarr_shares.items() if name.startswith(way)}
        at, worst = min(found.items(), key=lambda each: each[1].with_codec)
        where = f"at worst: {at}; Zarr alone, with plain bytes, reaches {worst.plain_bytes:.2f}"
        yield Target(f"through Zarr: share of the bare codec's pace, {way}", 0.7, worst.with_codec, where)
    if threads is not None:
        way = min(threads, key=lambda each: threads[each])
        yield Target("two threads: times one thread's pace", 1.8, threads[way], way)


def _pairs(lines: Sequence[Line], us: Contender, peer: Contender) -> list[tuple[Line, Line]]:
    def of(contender: Contender) -> dict[tuple[str, int, str], Line]:
        wanted = (contender.name, contender.bits)
        return {(x.rows, x.dim, x.size): x for x in lines if (x.contender, x.bits) == wanted}

    found, others = of(us), of(peer)
    return [(found[place], others[place]) for place in found if place in others]


def _pace(
    name: str, wanted: float, pace: str, lines: Sequence[Line], us: Contender, peer: Contender
) -> Target:
    ratios = [(getattr(a, pace) / getattr(b, pace), a) for a, b in _pairs(lines, us, peer)]
    ratio, worst = min(ratios, key=lambda each: each[0])
    return Target(name, wanted, ratio, f"at worst: {worst.rows}, dim {worst.dim}, {worst.size}")


def _encode(name: str, wanted: float, lines: Sequence[Line], us: Contender, peer: Contender) -> Target:
    target = _pace(name, wanted, "encode_gb_s", lines, us, peer)
    sound = all(
        a.first_rows_l2_error <= b.first_rows_l2_error * _ERROR_SLACK
        if peer.slow
        else a.mean_l2_error <= b.mean_l2_error * _ERROR_SLACK
        for a, b in _pairs(lines, us, peer)
    )
    return replace(target, no_worse_error=sound)
