"""Do what README says in an environment of its own, and say how long each step took.

    python tools/try_readme.py [INTERPRETER]

With an interpreter that has the package, nothing is installed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RUN = "import subprocess\nsubprocess.run(['bash', '-e'], input={program!r}, text=True, check=True)\n"
"""A shell block within the Python program that the other blocks make, since these go on from one another."""


def timed(what: str, command: list[str], cwd: Path, path: Path) -> None:
    began = time.perf_counter()
    environment = {**os.environ, "PATH": f"{path}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(command, cwd=cwd, env=environment, check=True)
    print(f"-- {what}: {time.perf_counter() - began:.0f} s", flush=True)


def main(interpreter: str | None = None) -> None:
    """Install as README says, unless there is an interpreter, and run its blocks in an empty folder."""
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"^```(python|bash|sh)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    install = next(program for language, program in blocks if language == "sh" and "pip install" in program)
    programs = [
        program if language == "python" else RUN.format(program=program)
        for language, program in blocks
        if language != "sh"
    ]
    with tempfile.TemporaryDirectory() as folder:
        scripts = Path(interpreter).parent if interpreter else Path(folder, "venv", "bin")
        if interpreter is None:
            timed("environment", [sys.executable, "-m", "venv", str(scripts.parent)], ROOT, scripts)
            timed("install", ["bash", "-ec", install], ROOT, scripts)
        python = interpreter or str(scripts / "python")
        timed("train, resume and look", [python, "-c", "\n".join(programs)], Path(folder), scripts)


if __name__ == "__main__":
    main(*sys.argv[1:2])
