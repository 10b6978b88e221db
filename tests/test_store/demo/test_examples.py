"""The examples run, and are resumed, as they stand."""

from __future__ import annotations

import importlib.util
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import cnr_store
from tests.paths import ROOT

EXAMPLES = ROOT / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RUN_CELLS = """
import ast, json, sys

names = {}
for number, cell in enumerate(json.load(open(sys.argv[1]))["cells"]):
    if cell["cell_type"] == "code":
        assert cell["outputs"] == [] and cell["execution_count"] is None, "commit the notebook without outputs"
        tree = ast.parse("".join(cell["source"]))
        shown = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, f"cell {number}", "exec"), names)
        if shown is not None:
            value = eval(compile(ast.Expression(shown.value), f"cell {number}", "eval"), names)
            print(number, value._repr_html_() if hasattr(value, "_repr_html_") else repr(value))
print("state_dict", sorted(names["values"]), "norm", float(names["norms"].mean()) > 0)
"""
"""Runs a notebook as Jupyter would: cell by cell, and shows what a cell ends with."""


@pytest.mark.slow
def test_the_notebook_reads_a_store_in_every_way(tmp_path: Path) -> None:
    notebook = EXAMPLES / "read_from_anywhere.ipynb"
    command = [sys.executable, "-W", "error", "-c", RUN_CELLS, str(notebook)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("state_dict ['users.weight'] norm True\n")


@pytest.mark.slow
def test_plain_torch_goes_on_where_it_stopped(tmp_path: Path) -> None:
    url, main = str(tmp_path / "store"), example("plain_torch").main
    assert main(url, 30) == 0
    assert main(url, 40) == 20
    assert main(url, 40) == 40
    assert [version.step for version in cnr_store.versions(url)] == [20, 40]
    assert cnr_store.versions(url)[-1].kind == "delta"


def _ratings(folder: Path) -> None:
    """A made-up data set in the format of the real one."""
    draw = np.random.default_rng(5)
    users = [f"{user}\t{draw.integers(10, 60)}\tM\tartist\t12345" for user in range(40)]
    items = [f"{item}\tTitle\t{1990 + item % 9}\tDrama Comedy" for item in range(60)]
    ratings = [
        f"{draw.integers(40)}\t{draw.integers(60)}\t{draw.integers(1, 6)}\t{1000 * k}" for k in range(900)
    ]
    for name, lines in (("user", users), ("item", items), ("inter", ratings)):
        (folder / f"ml-100k.{name}").write_text("\n".join(["header", *lines]) + "\n")


@pytest.mark.slow
def test_movielens_ranks_alike_from_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _ratings(tmp_path)
    monkeypatch.setenv("CNR_DATA", str(tmp_path))
    url = str(tmp_path / "store")
    trained, loaded = example("movielens_adagrad").main(url, 30)
    assert abs(trained - loaded) < 0.2
    assert [version.step for version in cnr_store.versions(url)] == [30]
    example("movielens_adagrad").main(url, 35)
    assert [version.step for version in cnr_store.versions(url)] == [30, 35]
    assert cnr_store.versions(url)[-1].kind == "delta"


@pytest.mark.parametrize("name", ["plain_torch", "movielens_adagrad"])
def test_an_example_without_arguments_tells_its_usage(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script = str(EXAMPLES / f"{name}.py")
    monkeypatch.setattr(sys, "argv", [script])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(script, run_name="__main__")
    assert ended.value.code == f"usage: python {script} STORE [STEPS]"  # on standard error, with status 1


def _start_ranks(world: int, url: str, steps: int, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world), "--standalone"),
            *(str(EXAMPLES / "torchrec_dlrm.py"), url, str(steps)),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "CNR_DATA": str(folder),
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
    )


@pytest.mark.nightly
@pytest.mark.skipif(importlib.util.find_spec("torchrec") is None, reason="needs TorchRec")
def test_sharded_tables_go_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    _ratings(tmp_path)
    url = str(tmp_path / "store")
    running = _start_ranks(2, url, 100_000, tmp_path)
    try:
        while len(cnr_store.versions(url)) < 2:
            assert running.poll() is None, running.communicate()
            time.sleep(0.2)
    finally:
        os.killpg(running.pid, signal.SIGKILL)
        running.communicate()
    stood = cnr_store.versions(url)[-1].step
    out, err = (ended := _start_ranks(3, url, stood + 30, tmp_path)).communicate(timeout=300)
    assert ended.returncode == 0, err
    resumed = int(out.split("go on from step ")[1].split()[0])
    assert resumed >= stood
    last = cnr_store.versions(url)[-1]
    assert (last.step, last.kind) == (max(stood + 30, resumed), "delta")
