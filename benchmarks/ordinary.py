"""Benchmark of ordinary scripts: `python benchmarks/ordinary.py [--quick]`."""

import sys
from pathlib import Path

# As a script this folder would come first on the path, and hide the standard library's `codecs`.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.ordinary_bench.main import main  # noqa: E402  # found on the path set above

if __name__ == "__main__":
    main()
