"""What relative codes should reach, and whether they do: the mean of all seeds, whose spread stands beside."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.codec_bench.targets import Target
from benchmarks.relative_bench.budget import LOSSLESS
from benchmarks.relative_bench.exact import PARENTS, WITHOUT_PARENTS

Line = Mapping[str, Any]
_MOST_LOST = {"lattice 0.35": (1, 0.01), "lattice 0.2": (5, 0.012), "lattice 0.1": (11, 0.01)}
_LEAST_COUNTED = {"lattice 1.5": (45, 13), "lattice 0.2": (17, 5)}
_MOST_OF_LOADING = {"whole": 0.6, "8 deltas": 0.9}
# An index and a chunk of the baseline and of eight deltas.
_MOST_REQUESTS, _MOST_MILLISECONDS, _MOST_CODES = 18, 10, 0.25

_STUDENT_90 = {2: 6.31, 3: 2.92, 4: 2.35, 5: 2.13, 6: 2.02, 7: 1.94, 8: 1.89}
"""By how many standard errors the mean of so many seeds is off at most, with 90 %."""


def targets(lines: Sequence[Line]) -> Iterator[Target]:
    """All that the lines decide."""
    for part, judge in _JUDGES.items():
        for where in sorted({line["where"] for line in lines if line["part"] == part}):
            yield from judge(
                where, [line for line in lines if (line["part"], line["where"]) == (part, where)]
            )
    yield from _at_equal_loss(lines)


def _target(name: str, wanted: float, found: Sequence[float], where: str, *, at_most: bool = False) -> Target:
    seeds = f"{len(found)} seeds, ± {np.std(found):.2g}" if len(found) > 1 else "1 seed"
    return Target(f"relative: {name}", wanted, float(np.mean(found)), f"{where}; {seeds}", at_most=at_most)


def _volumes(where: str, lines: Sequence[Line]) -> Iterator[Target]:
    ratios = [
        of(line, "adaptive 4", "weights_bytes") / of(line, "as adaptive 4", "weights_bytes") for line in lines
    ]
    yield _target("times fewer bytes of deltas at adaptive 4's error", 2.9, ratios, where)
    zstd = [_coder(line, 0.35, "zstd 19") / _coder(line, 0.35, "ours") for line in lines]
    yield _target("times fewer bytes than zstd 19 on the same integers", 1 / 0.92, zstd, where)
    name = "lattice 0.35, m3"
    if any(each["setting"] == name for each in lines[0]["lines"]):
        state = [of(line, "lattice 0.35", "slots_bytes") / of(line, name, "slots_bytes") for line in lines]
        yield _target("times fewer bytes of state, m3", 10, state, where)


def _losses(where: str, lines: Sequence[Line]) -> Iterator[Target]:
    restores = lines[0]["lines"][0]["restores"]
    for setting, (count, most) in _MOST_LOST.items():
        if count == restores:
            yield _target(f"log loss lost in %, {setting}", most, _lost(lines, setting), where, at_most=True)
    changes = [abs(each) for each in _lost(lines, "lossless, m3")]
    yield _target("change of log loss in %, state m3", 0.001, changes, where, at_most=True)


def _counted(where: str, lines: Sequence[Line]) -> Iterator[Target]:
    for setting, (written, kept) in _LEAST_COUNTED.items():
        for name, least in (("written", written), ("kept", kept)):
            found = [of(line, setting, f"{name}_times_less") for line in lines]
            yield _target(f"times less {name} than torch.save, {setting}", least, found, where)
    if lines[0]["losses"]:
        lost = [[each["lost_percent"] for each in line["losses"]] for line in lines]
        ratios = [coarse / max(adaptive, 1e-9) for adaptive, coarse, _ in lost]
        yield _target("share of adaptive 2's log loss lost, lattice 1.5", 1, ratios, where, at_most=True)


def _movielens(where: str, lines: Sequence[Line]) -> Iterator[Target]:
    yield from _volumes(where, lines)
    found = [
        line["torch_save_bytes"] * line["saves"] / of(line, "lattice 0.35, m3", "total_bytes")
        for line in lines
    ]
    yield _target("times less written than torch.save, lattice 0.35, m3", 20, found, where)


def _parents(where: str, lines: Sequence[Line]) -> Iterator[Target]:
    sizes = [
        [of(line, name, "weights_bytes") + of(line, name, "slots_bytes") for line in lines]
        for name in (PARENTS, WITHOUT_PARENTS)
    ]
    shares = [with_parents / without for with_parents, without in zip(*sizes, strict=True)]
    yield _target(
        "bytes of lossless deltas, exact parents: of those without", 0.8, shares, where, at_most=True
    )


def _budget(where: str, lines: Sequence[Line]) -> Iterator[Target]:
    """Of each number of restores and factor of costs: the mean of what is lost; 0 if the aim is in the noise.

    That is: if the mean misses it, but its interval of 90 % has what lossless runs lose.
    """
    found: dict[tuple[str, int, float], list[float]] = {}
    for each in (each for line in lines for each in line["lines"]):
        key = each["setting"], each["restores"], each["cost_factor"]
        found.setdefault(key, []).append(each["lost_percent"])
    most, exact = max(
        (restores, lost) for (setting, restores, _), lost in found.items() if setting == LOSSLESS
    )
    lossless = float(np.mean(exact))
    for (setting, restores, factor), lost in found.items():
        if setting == LOSSLESS:
            continue
        mean, low, high = _interval(lost)
        said = f"{where}; {len(lost)} seeds, mean {mean:.4f}, with 90 % {low:.4f} to {high:.4f}"
        said += f"; factor {factor:g}; lossless, {most} restores: {lossless:.4f}"
        name = f"relative: log loss lost in %, {setting}, {restores} restores"
        is_noise = low <= lossless <= high < math.inf
        yield Target(name, 0.01, 0.0 if mean > 0.01 and is_noise else mean, said, at_most=True)


def _interval(found: Sequence[float]) -> tuple[float, float, float]:
    """The mean of seeds, and between which numbers it is with 90 %."""
    mean, spread = float(np.mean(found)), float(np.std(found)) / math.sqrt(max(len(found) - 1, 1))
    half = _STUDENT_90[len(found)] * spread if len(found) in _STUDENT_90 else math.inf
    return mean, mean - half, mean + half


def _links(where: str, lines: Sequence[Line]) -> Iterator[Target]:
    if where == "restores":
        for what, most in _MOST_OF_LOADING.items():
            for key, name in (
                ("of_torch_load", "time"),
                ("processor_of_torch_load", "time of the processor"),
            ):
                found = [of(line, f"lattice 0.1, m3, {what}", key) for line in lines]
                yield _target(f"restore, {what}: of torch.load's {name}", most, found, where, at_most=True)
        return
    aims = {
        "requests_of_shards": ("requests of indexes and chunks", _MOST_REQUESTS),
        "milliseconds": ("milliseconds of the processor", _MOST_MILLISECONDS),
        "code_bytes_share": ("codes in memory, of the table", _MOST_CODES),
    }
    for key, (name, most) in aims.items():
        found = [of(line, "lattice 0.35", key) for line in lines]
        yield _target(name, most, found, where, at_most=True)


def _at_equal_loss(lines: Sequence[Line]) -> Iterator[Target]:
    """Bytes of the coarsest lattice that loses no more than adaptive 4 with five restores."""
    losses = [line for line in lines if line["part"] == "losses" and line["lines"][0]["restores"] == 5]
    where = "Zipf 1.05, Adagrad"
    found = [line for line in lines if (line["part"], line["where"]) == ("volumes", where)]
    if not losses or not found:
        return
    most = np.mean(_lost(losses, "adaptive 4"))
    for setting in ("lattice 0.5", "lattice 0.35", "lattice 0.2"):
        if np.mean(_lost(losses, setting)) <= most:
            ratios = [
                of(line, "adaptive 4", "weights_bytes") / of(line, setting, "weights_bytes") for line in found
            ]
            name = f"times fewer bytes of deltas at adaptive 4's loss, 5 restores ({setting})"
            yield _target(name, 3.8, ratios, where)
            return


def of(line: Line, setting: str, key: str) -> float:
    """A figure of one setting."""
    (found,) = (each[key] for each in line["lines"] if each["setting"] == setting)
    return float(found)


def _coder(line: Line, share: float, coder: str) -> float:
    (found,) = (
        each["bits_a_value"] for each in line["coders"] if (each["rms_step"], each["coder"]) == (share, coder)
    )
    return float(found)


def _lost(lines: Sequence[Line], setting: str) -> list[float]:
    return [of(line, setting, "lost_percent") for line in lines]


_JUDGES: Mapping[str, Callable[[str, Sequence[Line]], Iterator[Target]]] = {
    "volumes": _volumes,
    "losses": _losses,
    "counted": _counted,
    "movielens": _movielens,
    "parents": _parents,
    "budget": _budget,
    "links": _links,
}
