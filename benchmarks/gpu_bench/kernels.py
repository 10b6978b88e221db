"""The pace of quantizing and decoding on the device, beside a plain copy there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.codec_bench.target import Target
from benchmarks.gpu_bench import aims
from benchmarks.gpu_bench.place import Place
from cnr_codecs import FloatingRows, LatticeRows, UniformRows, lattice_step
from cnr_store.training.devices.arithmetic import Codec, grid_values, quantize, rows_together, uniform_values

_CODECS: dict[str, Codec] = {
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
    ids = chosen.nonzero()[:, 0]
    gathered = copied[: len(ids)]
    nbytes |= {"copy": values.nbytes, "gather": gathered.nbytes}
    yield "copy", lambda: copied.copy_(values)
    yield "gather", lambda: torch.index_select(values, 0, ids, out=gathered)
    for name, codec in _CODECS.items():
        for which, own in (("all rows", None), ("rows that changed", ids)):
            nbytes[f"{name}, {which}"] = (rows if own is None else len(ids)) * dim * values.element_size()
            yield f"{name}, {which}", lambda codec=codec, own=own: _quantize(codec, values, own)
    for name in _DECODED:
        nbytes[f"decode, {name}"] = values.nbytes
        yield f"decode, {name}", _decoding(_CODECS[name], values, copied)


def _quantize(codec: Codec, values: torch.Tensor, ids: torch.Tensor | None) -> None:
    together = rows_together(values.shape[1])
    for first in range(0, len(values if ids is None else ids), together):
        own = slice(first, first + together)
        quantize(codec, values[own] if ids is None else values.index_select(0, ids[own]))


def _decoding(codec: Codec, values: torch.Tensor, target: torch.Tensor) -> Callable[[], object]:
    """Decodes what the first rows become, over and over."""
    dim = values.shape[1]
    together = rows_together(dim)
    _, *made = quantize(codec, values[:together])

    def run() -> None:
        for first in range(0, len(target), together):
            rows = target[first : first + together]
            held = [each[: len(rows)] for each in made]
            if isinstance(codec, UniformRows):
                rows.copy_(uniform_values(held[1], held[0].T, codec.bits, dim))
            else:
                is_floating = isinstance(codec, FloatingRows)
                grid = (codec.mantissa_bits, 0.0) if is_floating else (0, codec.step)
                rows.copy_(grid_values(held[0], *grid))

    return run


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
