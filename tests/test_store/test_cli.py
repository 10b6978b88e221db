"""The command `cnr`: what it prints, and how it fails."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from cnr_store.cli import main

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # as if it were not installed
from cnr_store.cli import main
main(sys.argv[1:])
"""


def cnr(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit status, standard output and standard error."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    out, err = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, out, err


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store with two versions."""
    torch = pytest.importorskip("torch")
    import cnr_store

    url = str(tmp_path_factory.mktemp("stores") / "store")
    model = torch.nn.Sequential(torch.nn.EmbeddingBag(1000, 16, sparse=True), torch.nn.Linear(16, 1))
    optimizer = torch.optim.Adagrad(model.parameters())
    with cnr_store.Checkpointer(url, model, optimizer) as checkpointer:
        checkpointer.save(1, metadata={"name": "[red]first"}).result()
        checkpointer.touch("0", [3, 5])
        checkpointer.save(2).result()
    return url


def test_ls_lists_versions_oldest_first(capsys: pytest.CaptureFixture[str], store: str) -> None:
    status, out, _ = cnr(capsys, "ls", store)
    lines = out.splitlines()
    assert status == 0
    assert lines[0].split() == ["id", "step", "kind", "rows", "bytes", "previous", "time"]
    assert [line.split()[1:4] for line in lines[1:]] == [["1", "baseline", "1,000"], ["2", "delta", "2"]]
    first, second = (line.split()[0] for line in lines[1:])
    assert lines[1].split()[5] == "-"
    assert lines[2].split()[5] == first
    assert first < second


def test_ls_json_is_what_versions_returns(capsys: pytest.CaptureFixture[str], store: str) -> None:
    from cnr_store.reading.access import versions

    status, out, _ = cnr(capsys, "ls", store, "--json")
    names = ("id", "step", "kind", "rows", "bytes", "previous", "time", "metadata")
    assert status == 0
    assert json.loads(out) == [{name: getattr(info, name) for name in names} for info in versions(store)]


def test_info_shows_a_version_by_id_step_or_latest(capsys: pytest.CaptureFixture[str], store: str) -> None:
    status, out, _ = cnr(capsys, "info", store, "1")
    assert status == 0
    assert "[red]first" in out
    assert "tables/0/weight" in out
    _, latest, _ = cnr(capsys, "info", store, "--json")
    doc = json.loads(latest)
    assert doc["step"] == 2
    assert doc["arrays"]["tables/0/weight"]["rows"] == 2
    assert json.loads(cnr(capsys, "info", store, doc["id"], "--json")[1]) == doc


def test_the_release_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = cnr(capsys, "--version")
    assert (status, out) == (0, f"cnr {version('cnr-store')}\n")


def test_an_empty_place_lists_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, out, err = cnr(capsys, "ls", str(tmp_path))
    assert (status, out) == (0, "")
    assert "no committed version" in err
    assert cnr(capsys, "ls", str(tmp_path), "--json")[:2] == (0, "[]\n")


def test_an_error_of_ours_is_one_line_and_status_1(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, store: str
) -> None:
    (tmp_path / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group", "attributes": {}}')
    (tmp_path / "file").write_text("")
    for arguments in (
        ("ls", str(tmp_path)),
        ("ls", "nosuch://place"),
        ("ls", str(tmp_path / "file")),
        ("info", str(tmp_path / "empty")),
        ("info", store, "77"),
        ("info", store, "[bold]"),
        ("demo", "--data", str(tmp_path)),
    ):
        status, out, err = cnr(capsys, *arguments)
        assert (status, out) == (1, ""), arguments
        assert err.startswith("cnr: ")
        assert err.count("\n") == 1
        assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ls",), "Missing argument"),
        (("nothing",), "No such command"),
        (("ls", "x", "--storage-options", "{"), "not JSON"),
        (("ls", "x", "--storage-options", "[1]"), "JSON object"),
        (("demo", "--policy", "often"), "policy 'often' is not one of"),
        (("demo", "--bits", "5"), "bits 5"),
        (("demo", "--bits", "few"), "bits 'few'"),
        (("demo", "--every", "0"), "--every"),
        (("demo", "--steps", "many"), "--steps"),
    ],
)
def test_wrong_usage_is_status_2(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    status, _, err = cnr(capsys, *arguments)
    assert status == 2
    assert message in err


def test_listing_needs_no_torch_and_the_demo_says_that_it_does(store: str) -> None:
    listed = _without_torch("ls", store)
    assert listed.returncode == 0, listed.stderr
    assert "baseline" in listed.stdout
    assert _without_torch("info", store).returncode == 0
    demo = _without_torch("demo")
    assert demo.returncode == 1
    assert demo.stderr == "cnr: the demo needs torch: pip install 'cnr-store[demo]'\n"


def _without_torch(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT_TORCH, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)
