"""A minute of benchmarks: `python benchmarks/smoke.py [--record] [--out FOLDER]`.

Each figure is a ratio to a peer that runs in turns with us, so that it depends little on the machine. The command fails
where a ratio is below half of the one on record, in `benchmarks/results/smoke.json`. `--record` measures three times
and puts the least of each there: on a busy machine a ratio falls to a half by itself.
It finds what became slow by a mistake. What the figures are worth, the other benchmarks say.
"""

import sys
from pathlib import Path

# As a script this folder would come first on the path, and hide the standard library's `codecs`.
sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse  # noqa: E402  # after the path is set
import json  # noqa: E402
import tempfile  # noqa: E402
import warnings  # noqa: E402
from collections.abc import Callable, Iterator, Mapping  # noqa: E402
from io import BytesIO  # noqa: E402

import torch  # noqa: E402
from fsspec.implementations.memory import MemoryFileSystem  # noqa: E402
from torch import nn  # noqa: E402

import cnr_store  # noqa: E402
from benchmarks import tracking  # noqa: E402
from benchmarks.codec_bench.contenders import (  # noqa: E402
    ADAPTIVE_4,
    ASYMMETRIC_8,
    TORCH_4,
    TORCH_8,
    Contender,
)
from benchmarks.codec_bench.machine import describe, pinned  # noqa: E402
from benchmarks.codec_bench.rows import Rows, drawn  # noqa: E402
from benchmarks.codec_bench.timing import race  # noqa: E402
from benchmarks.saving_bench import stall  # noqa: E402

_RECORD = Path(__file__).parent / "results" / "smoke.json"
_ROWS, _DIM, _ROUNDS = 1 << 17, 64, 5
_WORSE, _TRIES = 0.5, 3
_IN_MEMORY = "memory://cnr-smoke"


def of_codecs(_: Path) -> Iterator[tuple[str, float]]:
    """Paces of one thread in the cache, over torch's."""
    rows = drawn("normal", 1 << 12, _DIM)
    for us, peer in ((ADAPTIVE_4, TORCH_4), (ASYMMETRIC_8, TORCH_8)):
        for way in ("encode", "decode"):
            with pinned(1):
                seconds = race({each.name: _call(each, way, rows) for each in (us, peer)}, _ROUNDS)
            yield f"{us.bits} bits: {way}, of torch's pace", seconds[peer.name] / seconds[us.name]


def _call(contender: Contender, way: str, rows: Rows) -> Callable[[], object]:
    given = rows if way == "encode" else contender.encode(rows)
    return lambda: getattr(contender, way)(given)


def of_storage(folder: Path) -> Iterator[tuple[str, float]]:
    """Paces of a whole model into memory and from a local disk, over torch's.

    On a disk a save would be timed by its syncs, which torch.save leaves out: a busy disk makes them ten times slower.
    """
    model = nn.Module()
    model.table = nn.Embedding(_ROWS, _DIM, sparse=True)
    ours, whole = folder / "ours", folder / "model.pt"
    cnr_store.save(ours, model)
    torch.save(model.state_dict(), whole)
    saving = race(
        {
            "ours": lambda: _save_into_memory(model),
            "torch": lambda: torch.save(model.state_dict(), BytesIO()),
        },
        _ROUNDS,
    )
    yield "save of a whole model into memory, of torch.save's pace", saving["torch"] / saving["ours"]
    loading = race(
        {
            "ours": lambda: cnr_store.load(ours, model),
            "torch": lambda: model.load_state_dict(torch.load(whole)),
        },
        _ROUNDS,
    )
    yield "load of a whole model, of torch.load's pace", loading["torch"] / loading["ours"]


def _save_into_memory(model: nn.Module) -> None:
    cnr_store.save(_IN_MEMORY, model)
    MemoryFileSystem().rm(_IN_MEMORY, recursive=True)


def of_stalls(folder: Path) -> Iterator[tuple[str, float]]:
    """How many times shorter than DCP's a save holds training."""
    for target in stall.targets(stall.measure("sgd", 2, _ROWS, 3, folder)):
        yield f"{target.name}, {target.where}", target.measured


def of_tracking(_: Path) -> Iterator[tuple[str, float]]:
    """A step without hooks, of one with them: a thousand tables."""
    line = tracking.measure(tracking.of_small_tables(), 4)
    yield "tracking: a plain step's time, of a tracked one's", 1 / (1 + line.share)


def measure(floors: Mapping[str, float]) -> dict[str, float]:
    """Every ratio, the best of up to three measurements: another one follows where one is below its floor."""
    best: dict[str, float] = {}
    for part in _PARTS:
        for _ in range(_TRIES):
            found = _once(part)
            best |= {name: max(ratio, best.get(name, 0)) for name, ratio in found.items()}
            if all(best[name] >= floors[name] for name in found if name in floors):
                break
    return best


def least() -> dict[str, float]:
    """Every ratio, the least of three measurements."""
    rounds = [{name: ratio for part in _PARTS for name, ratio in _once(part).items()} for _ in range(_TRIES)]
    return {name: min(found[name] for found in rounds) for name in rounds[0]}


def _once(part: Callable[[Path], Iterator[tuple[str, float]]]) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="cnr-smoke-") as folder:
        return dict(part(Path(folder)))


_PARTS = (of_codecs, of_storage, of_stalls, of_tracking)


def main() -> int:
    parser = argparse.ArgumentParser(description="A minute of benchmarks, held against the last record.")
    parser.add_argument("--record", action="store_true", help="put today's ratios on record")
    parser.add_argument(
        "--out", type=Path, help="folder to write smoke.json to, which need not be the record's"
    )
    options = parser.parse_args()
    record: dict[str, float] = (
        json.loads(_RECORD.read_text(encoding="utf-8"))["ratios"] if _RECORD.exists() else {}
    )
    floors = {} if options.record else {name: _WORSE * ratio for name, ratio in record.items()}
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "torch.distributed is disabled|Sparse invariant checks", UserWarning)
    found = least() if options.record else measure(floors)
    worse = [name for name, ratio in found.items() if ratio < floors.get(name, 0)]
    for name, ratio in found.items():
        verdict = "WORSE" if name in worse else ""
        print(f"{verdict:6}{name:76} {ratio:8.2f}  on record {record.get(name, float('nan')):8.2f}")
    missing = sorted(set(record) - set(found))
    document = json.dumps({**describe(), "ratios": found}, indent=1) + "\n"
    paths = [_RECORD] if options.record else []
    for path in [*paths, *([] if options.out is None else [options.out / _RECORD.name])]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(document, encoding="utf-8")
    if missing and not options.record:
        print(
            f"On record but not measured: {', '.join(missing)}. Run with --record if they are gone on purpose."
        )
    return 1 if worse or (missing and not options.record) else 0


if __name__ == "__main__":
    sys.exit(main())
