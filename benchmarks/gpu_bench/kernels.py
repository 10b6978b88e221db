"""The pace of the kernels that quantize and decode, beside a plain copy on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.codec_bench.target import Target
from benchmarks.gpu_bench import aims
from benchmarks.gpu_bench.place import Place
from cnr_codecs import FloatingRows, LatticeRows, RowCodec, UniformRows, lattice_step
from cnr_codecs.payload.coded import MANTISSA_BITS
from cnr_store.training.devices.encode import quantize
from cnr_store.training.devices.support import kernels_on

_CODECS: dict[str, RowCodec] = {
    "adaptive, 4 bits": UniformRows("adaptive", 4),
    "adaptive, 2 bits": UniformRows("adaptive", 2),
    "asymmetric, 8 bits": UniformRows("asymmetric", 8),
    "asymmetric, 4 bits": UniformRows("asymmetric", 4),
    "lattice": LatticeRows(step=lattice_step(0.35)),
    "floating, 3 bits": FloatingRows(3),
}
_DECODED = ("asymmetric, 8 bits", "asymmetric, 4 bits", "lattice", "floating, 3 bits")
_CHANGED = 0.25
HEAD = "dim  what                                  of GB    GB/s  of a copy's"
Line = dict[str, Any]


def measure(place: Place, _: Path) -> dict[str, Any]:
    """Bytes of float32 rows that are read (decoding: written) a second, beside those that a plain copy reads."""
    place.show(HEAD)
    lines: list[Line] = []
    for dim in place.sizes.kernel_dims:
        values = torch.randn(place.sizes.kernel_rows, dim, device=place.device)
        copied = torch.empty_like(values)
        nbytes = dict[str, int]()
        runs = dict(_runs(place, values, copied, nbytes))
        seconds = place.each_seconds(runs)
        pace = {name: nbytes[name] / sorted(each)[len(each) // 2] for name, each in seconds.items()}
        for name, each in pace.items():
            lines.append(
                {"dim": dim, "what": name, "nbytes": nbytes[name], "bytes_per_second": each}
                | {"of_copy": each / pace["copy"]}
            )
            place.show(_show(lines[-1]))
        del values, copied, runs
    return {"lines": lines, "targets": [each.to_json() for each in _targets(lines)]}


def _runs(
    place: Place, values: torch.Tensor, copied: torch.Tensor, nbytes: dict[str, int]
) -> Iterator[tuple[str, Callable[[], object]]]:
    rows, dim = values.shape
    chosen = torch.rand(rows, device=place.device) < _CHANGED
    ids, kernels = chosen.nonzero()[:, 0], kernels_on(place.device)
    gathered = copied[: len(ids)]
    nbytes |= {"copy": values.nbytes, "gather": gathered.nbytes}
    yield "copy", lambda: copied.copy_(values)
    yield "gather", lambda: torch.index_select(values, 0, ids, out=gathered)
    for name, codec in _CODECS.items():
        for which, own in (("all rows", None), ("rows that changed", ids)):
            nbytes[f"{name}, {which}"] = (rows if own is None else len(ids)) * dim * values.element_size()
            source = kernels.Source(values, own)
            yield f"{name}, {which}", lambda codec=codec, source=source: quantize(codec, source)
    every = torch.arange(rows, device=place.device)
    for name in _DECODED:
        codec, source = _CODECS[name], kernels.Source(values, None)
        nbytes[f"decode, {name}"] = values.nbytes
        yield f"decode, {name}", _decoding(kernels, codec, quantize(codec, source), every, copied)


def _decoding(
    kernels: Any,
    codec: RowCodec,
    quantized: tuple[torch.Tensor, ...],
    ids: torch.Tensor,
    target: torch.Tensor,
) -> Callable[[], object]:
    if isinstance(codec, UniformRows):
        floats, _, _, packed = quantized
        return lambda: kernels.decode_uniform(packed, floats, codec.bits, False, ids, target)
    assert isinstance(codec, LatticeRows | FloatingRows)
    if isinstance(codec, FloatingRows):
        step, shift = 0.0, MANTISSA_BITS - codec.mantissa_bits
    else:
        assert codec.step is not None
        step, shift = codec.step, 0
    return lambda: kernels.decode_integers(quantized[0], step, shift, ids, target)


def _show(line: Line) -> str:
    return (
        f"{line['dim']:3d}  {line['what']:36} {line['nbytes'] / 1e9:6.2f} {line['bytes_per_second'] / 1e9:7.1f} "
        f"{line['of_copy']:12.1%}"
    )


def _targets(lines: list[Line]) -> Iterator[Target]:
    """The worst of both widths counts, of all rows and of those that changed."""
    begins = {
        aims.SEARCHED: "adaptive, 4 bits",
        aims.RANGED: "asymmetric, 8 bits",
        aims.DECODE: "decode",
    }
    for name, begin in begins.items():
        worst = min(
            (line for line in lines if line["what"].startswith(begin)), key=lambda each: each["of_copy"]
        )
        yield aims.target(name, worst["of_copy"], f"at worst: dim {worst['dim']}, {worst['what']}")
