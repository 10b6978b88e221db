"""Benchmark of tables on a GPU: `python benchmarks/gpu.py [--quick] [--only PART] [--interpreted] [--out FOLDER]`."""

import os
import sys
from pathlib import Path

# Triton asks when it is imported.
if "--interpreted" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"
# As a script this folder would come first on the path, and hide the standard library's `codecs`.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.gpu_bench.main import main  # noqa: E402  # found on the path set above

if __name__ == "__main__":
    sys.exit(main())
