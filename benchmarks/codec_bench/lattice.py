"""The lattice beside adaptive codes: bytes at equal error, size against entropy, and pace."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.codec_bench import zeros
from benchmarks.codec_bench.machine import describe, pinned
from benchmarks.codec_bench.rows import Rows, drawn, trained
from benchmarks.codec_bench.targets import Target
from cnr_codecs import LatticeRows, RowCodec, UniformRows, decode_into, lattice_step, parse
from cnr_codecs.lattice.steps import median_scale, scale_counts
from cnr_codecs.payload.coded import MAX_CODE

_RESULTS = Path(__file__).parents[1] / "results"
_WIDTHS = (2, 3, 4, 8)
_RMS_STEPS = (0.35, 0.2, 0.1, 0.05)
_ROUNDS = 15
_MOST_BITS, _MOST_OVER_ENTROPY, _LEAST_GB_S = 4.0, 1.05, {"encode": 0.9, "decode": 1.1}


def targets(
    sizes: Sequence[Mapping[str, Any]], paces: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]
) -> Iterator[Target]:
    """Bits a value at the error of adaptive codes of 4 bits; bytes over entropy; GB/s of float32 by one thread; and the
    share of rows that become zero.
    """
    for line in sizes:
        if line["adaptive"] == 4 and line["rows"].startswith("normal"):
            name = "lattice: bits a value at the error of adaptive 4"
            yield Target(name, _MOST_BITS, line["lattice_bits"], line["rows"], at_most=True)
    worst = max(sizes, key=lambda line: line["over_entropy"])
    over, where = worst["over_entropy"], f"at worst: {worst['rows']}, of adaptive {worst['adaptive']}"
    yield Target("lattice: bytes over entropy", _MOST_OVER_ENTROPY, over, where, at_most=True)
    for line in paces:
        if line["codec"] == f"lattice {_RMS_STEPS[0]}":
            for way, least in _LEAST_GB_S.items():
                yield Target(f"lattice: GB/s, {way}", least, line[way], f"dim {line['dim']}, {line['codec']}")
    for rows in dict.fromkeys(line["rows"] for line in saved):
        most = max(line["became_zero"] for line in saved if line["rows"] == rows)
        where = f"{rows}, at most {max(line['steps'] for line in saved):,} steps" if "Adam" in rows else rows
        yield Target("lattice: share of rows that become zero", 0, most, where, at_most=True)


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description="Bytes and pace of the lattice beside adaptive codes.")
    parser.add_argument("--quick", action="store_true", help="small sizes: to see that it runs")
    parser.add_argument(
        "--zeros", action="store_true", help="rows that become zero alone; keep what is on record"
    )
    parser.add_argument("--out", type=Path, default=_RESULTS, help="folder of lattice.json")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "lattice.json"
    document = json.loads(path.read_text(encoding="utf-8")) if options.zeros else _paced(options.quick)
    rows, steps = (2_000, zeros.STEPS[:1]) if options.quick else (20_000, zeros.STEPS)
    document["zeros"] = list(zeros.lines(rows, steps))
    found = list(targets(document["sizes"], document["paces"], document["zeros"]))
    print(*found, sep="\n")
    document["targets"] = [target.to_json() for target in found]
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _paced(is_quick: bool) -> dict[str, Any]:
    """Sizes and paces, and what they were measured on."""
    values = 1 << 17 if is_quick else 1 << 22
    tables, missing = trained(1 if is_quick else 3)
    if missing:
        print(f"Tables trained on MovieLens are left out: {missing}")
    tables = {f"normal, dim {dim}": drawn("normal", values // dim, dim) for dim in (32, 64)} | tables
    sizes = [line for name, rows in tables.items() for line in _sizes(name, rows)]
    with pinned(1):
        paces = [line for dim in (32, 64) for line in _paces(dim, values)]
    moved = _moved(values)
    return {**describe(), "left_out": missing, "sizes": sizes, "paces": paces, "relative": moved}


def _sizes(name: str, rows: Rows) -> list[dict[str, Any]]:
    """Bits a value at the mean l2 error of adaptive codes of each width."""
    lines = []
    for width in _WIDTHS:
        bits, error = _measured(UniformRows("adaptive", width), rows)
        share = _share_with_error(rows, error)
        own_bits, own_error = _measured(LatticeRows(share), rows)
        line = {
            "rows": name,
            "values": rows.size,
            "adaptive": width,
            "adaptive_bits": bits,
            "mean_l2_error": error,
            "rms_step": share,
            "lattice_bits": own_bits,
            "lattice_error": own_error,
            "over_entropy": _over_entropy(LatticeRows(share), rows),
        }
        print(
            f"{name:26} adaptive {width}: {bits:.2f} bits; lattice {share:.4f}: {own_bits:.2f} bits, "
            f"{line['over_entropy']:.4f} of its entropy",
            flush=True,
        )
        lines.append(line)
    return lines


def _moved(values: int) -> list[dict[str, Any]]:
    """Bits a value of rows that moved between saves, at the mean l2 error of adaptive codes of 4 bits.

    The rows are normal, and moved by a share of their own spread: 5 % of all, chosen at random.
    """
    rows, random = drawn("normal", values // 32, 32), np.random.default_rng(20261122)
    ids = np.flatnonzero(random.random(len(rows)) < 0.05)
    share = _share_with_error(rows, _measured(UniformRows("adaptive", 4), rows)[1])
    step = lattice_step(share * median_scale(scale_counts(rows)))
    codec, codes, lines = LatticeRows(share, step), np.rint(rows[ids] / step).astype(np.int16), []
    for moved in (0.02, 0.1, 0.3, 1.0):
        newer = rows[ids] + random.normal(0, moved * rows.std(), (len(ids), 32)).astype(np.float32)
        known = np.ones(len(ids), np.bool_)
        encoded = {
            "adaptive": UniformRows("adaptive", 4).encode_rows(newer, ids, len(rows), element="float32"),
            "absolute": codec.encode_rows(newer, ids, len(rows), element="float32"),
            "relative": codec.encode_over(newer, ids, len(rows), codes, known, element="float32")[0],
        }
        line = {f"{name}_bits": len(data) * 8 / newer.size for name, data in encoded.items()}
        print(
            f"moved by {moved:4} of their spread: {', '.join(f'{name} {size:.2f}' for name, size in line.items())}"
        )
        lines.append({"moved": moved, "rms_step": share, "step": step, **line})
    return lines


def _measured(codec: RowCodec, rows: Rows) -> tuple[float, float]:
    """Bits a value, and the mean of ||x - x'||."""
    data = codec.encode_rows(rows, None, len(rows), element="float32")
    decoded = np.empty_like(rows)
    decode_into(parse(data, max_decoded_bytes=rows.nbytes), decoded, np.ones(len(rows), np.uint8))
    error = np.linalg.norm(decoded.astype(np.float64) - rows, axis=1).mean()
    return len(data) * 8 / rows.size, float(error)


def _share_with_error(rows: Rows, error: float) -> float:
    """The greatest `rms_step` whose mean error is no larger, to 8 bits."""
    low, high = 1e-3, 8.0
    for _ in range(16):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if _measured(LatticeRows(middle), rows)[1] <= error else (low, middle)
    return low


def _over_entropy(codec: LatticeRows, rows: Rows) -> float:
    """Bytes of all coded lines over the entropy of their classes, and of their codes by the class of the line."""
    data = codec.encode_rows(rows, None, len(rows), element="float32")
    held, bits = 0, 0.0
    for each in parse(data, max_decoded_bytes=rows.nbytes).segments:
        if each.coded is None:
            continue
        lines = each.coded.lines
        classes = lines.classes
        codes = lines.decode(MAX_CODE)
        bits += _entropy(classes) + sum(_entropy(codes[classes == kind]) for kind in np.unique(classes))
        held += len(lines.data)
    return held * 8 / bits


def _entropy(values: Any) -> float:
    """Of all of them, in bits."""
    counts = np.unique(values, return_counts=True)[1]
    return float((counts * np.log2(counts.sum() / counts)).sum())


def _paces(dim: int, values: int) -> list[dict[str, Any]]:
    """GB/s of float32 by one thread, into memory that is there already."""
    rows = drawn("normal", values // dim, dim)
    rms = median_scale(scale_counts(rows))
    codecs: dict[str, RowCodec] = {f"adaptive {width}": UniformRows("adaptive", width) for width in _WIDTHS}
    codecs |= {f"lattice {share}": LatticeRows(share, lattice_step(share * rms)) for share in _RMS_STEPS}
    out, need = np.empty_like(rows), np.ones(len(rows), np.uint8)
    runs: dict[tuple[str, str], Callable[[], Any]] = {}
    for name, codec in codecs.items():
        data = codec.encode_rows(rows, None, len(rows), element="float32")

        def encode(codec: RowCodec = codec) -> None:
            codec.encode_rows(rows, None, len(rows), element="float32")

        def decode(data: bytes = data) -> None:
            need[:] = 1
            decode_into(parse(data, max_decoded_bytes=rows.nbytes), out, need)

        runs |= {(name, "encode"): encode, (name, "decode"): decode}
    seconds = _race(runs)
    lines = []
    for name in codecs:
        paces = {way: rows.nbytes / seconds[name, way] / 1e9 for way in ("encode", "decode")}
        print(
            f"dim {dim} {name:14} encode {paces['encode']:.2f} GB/s, decode {paces['decode']:.2f} GB/s",
            flush=True,
        )
        lines.append({"codec": name, "dim": dim, **paces})
    return lines


def _race(runs: dict[tuple[str, str], Callable[[], Any]]) -> dict[tuple[str, str], float]:
    """The least time of the processor that a call of each took, which took turns. Other processes' time is left out,
    but not what they leave of the caches and of the core that two hyperthreads share.
    """
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(_ROUNDS):
        for name, run in runs.items():
            began = time.thread_time()
            run()
            best[name] = min(best[name], time.thread_time() - began)
    return best
