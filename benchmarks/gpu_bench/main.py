"""The command: measures part by part, prints, and writes JSON after each part."""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_bench import flagging, kernels, pace, restoring, stall, tests
from benchmarks.gpu_bench.place import Place, open_place

_RESULTS = Path(__file__).parents[1] / "results"
PARTS: dict[str, Callable[[Place, Path], dict[str, Any]]] = {
    "kernels": kernels.measure,
    "flagging": flagging.measure,
    "stall": stall.measure,
    "pace": pace.measure,
    "restoring": restoring.measure,
    "tests": tests.measure,
}


def main() -> int:
    """Parse the command line and run. What is returned is the exit status."""
    parser = argparse.ArgumentParser(
        description="Tables on a GPU: its tests, kernels, saves and loads, beside peers. A part of it that fails "
        "leaves the others to run."
    )
    parser.add_argument("--quick", action="store_true", help="small sizes: to see that it runs")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on the CPU; writes nothing")
    parser.add_argument(
        "--only", choices=PARTS, action="append", help="this part; the others stay as they are"
    )
    parser.add_argument("--out", type=Path, default=_RESULTS, help="folder of gpu.json")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "torch.distributed is disabled|Sparse invariant checks", UserWarning)
    return _run(options.only or list(PARTS), options.quick, options.tiny, options.out / "gpu.json")


def _run(parts: Sequence[str], is_quick: bool, is_tiny: bool, path: Path) -> int:
    failed = []
    with open_place(is_quick, is_tiny) as place:
        if place is None:
            print("no CUDA device: nothing measured")
            return 0
        if place.is_timed:
            print(json.dumps(place.describe()), flush=True)
        for name in parts:
            print(f"--- {name}", flush=True)
            try:
                with tempfile.TemporaryDirectory(prefix="cnr-gpu-") as folder:
                    found = PARTS[name](place, Path(folder))
            except Exception:  # noqa: BLE001 - a machine is lent for minutes: the other parts are measured
                traceback.print_exc()
                failed.append(name)
                continue
            gc.collect()
            torch.cuda.empty_cache()
            if place.is_timed:
                _note(path, name, {**place.describe(), "is_quick": is_quick, **found})
    if failed:
        print(f"failed: {', '.join(failed)}")
    elif is_tiny:
        print("every part ran; nothing is written of the CPU")
    return int(bool(failed))


def _note(path: Path, name: str, found: dict[str, Any]) -> None:
    document = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    document[name] = found
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    for target in found.get("targets", ()):
        verdict = "met" if target["met"] else "NOT MET"
        print(
            f"{verdict:8} {target['name']}: {target['measured']:.3g} of {target['wanted']:g} ({target['where']})"
        )
