"""`cnr cat`, `du` and `import`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import cnr_store
from tests.test_store.cli.command import cnr


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two versions of a table with state, and a dense layer; the older one is tagged."""
    url = str(tmp_path_factory.mktemp("stores") / "store")
    model = torch.nn.Sequential(torch.nn.EmbeddingBag(1000, 4, sparse=True), torch.nn.Linear(4, 1))
    optimizer = torch.optim.Adagrad(model.parameters())
    with cnr_store.Checkpointer(url, model, optimizer, bits=32) as checkpointer:
        checkpointer.save(10).result()
        checkpointer.touch("0", [3, 5])
        with torch.no_grad():
            model.get_parameter("0.weight")[3] = torch.tensor([1.5, -2.0, 0.25, 1e-9])
        checkpointer.save(20).result()
    cnr_store.tag(url, "first", 10)
    return url


def test_cat_prints_rows(capsys: pytest.CaptureFixture[str], store: str) -> None:
    status, out, _ = cnr(capsys, "cat", store, "0", "--rows", "3")
    assert status == 0
    assert out == "0 of step 20: 1,000 × 4\n3: [ 1.5e+00 -2.0e+00  2.5e-01  1.0e-09]\n"


@pytest.mark.parametrize(
    ("wanted", "ids"),
    [
        ("5:8", [5, 6, 7]),
        ("998:", [998, 999]),
        (":2", [0, 1]),
        ("7, 3,997:2000", [7, 3, 997, 998, 999]),
        ("4,4", [4, 4]),
        ("9:3", []),
    ],
)
def test_cat_prints_the_rows_asked_for(
    capsys: pytest.CaptureFixture[str], store: str, wanted: str, ids: list[int]
) -> None:
    status, out, _ = cnr(capsys, "cat", store, "0.weight", "--rows", wanted, "--version", "first", "--json")
    doc = json.loads(out)
    assert (status, doc["rows"]) == (0, ids)
    whole = cnr_store.state_dict(store, 10)["0.weight"]
    np.testing.assert_array_equal(np.array(doc["values"], np.float32).reshape(len(ids), 4), whole[ids])


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("o.weight",), 1, "0.weight"),
        (("0", "--rows", "1000"), 1, "has no row 1000"),
        (("0", "--rows", "a"), 2, "give row numbers"),
        (("0", "--rows", "-1"), 2, "give row numbers"),
        (("0", "--rows", "1:2:3"), 2, "give row numbers"),
        (("0", "--version", "17"), 1, "(nearest: 10 and 20);"),
        (("0", "--version", "21"), 1, "(nearest: 20);"),
        (("0", "--version", "fist"), 1, "a tag (first)"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_cat_says_what_there_is(
    capsys: pytest.CaptureFixture[str], store: str, arguments: tuple[str, ...], status: int, message: str
) -> None:
    found, out, err = cnr(capsys, "cat", store, *arguments)
    assert (found, out) == (status, "")
    assert message in " ".join(err.replace("│", "").split())


def test_cat_of_state_and_dense_tensors(capsys: pytest.CaptureFixture[str], store: str) -> None:
    values = {
        name: cnr(capsys, "cat", store, name)[1].splitlines() for name in ("0/sum", "1.weight", "1.bias")
    }
    assert {name: len(lines) for name, lines in values.items()} == {"0/sum": 11, "1.weight": 2, "1.bias": 2}
    assert values["0/sum"][1] == "0: [0. 0. 0. 0.]"


def test_cat_of_one_number(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    model.register_buffer("count", torch.tensor(2.5))
    with cnr_store.Checkpointer(tmp_path, model, None) as checkpointer:
        checkpointer.save(7).result()
    assert cnr(capsys, "cat", str(tmp_path), "count") == (0, "count of step 7: 2.5\n", "")
    assert json.loads(cnr(capsys, "cat", str(tmp_path), "count", "--json")[1])["values"] == 2.5


def test_du_adds_up_to_the_folder(capsys: pytest.CaptureFixture[str], store: str) -> None:
    status, out, _ = cnr(capsys, "du", store, "--json")
    doc = json.loads(out)
    sizes = [path.stat().st_size for path in Path(store).rglob("*") if path.is_file()]
    assert status == 0
    assert doc["objects"]["all"] == {"objects": len(sizes), "bytes": sum(sizes)}
    assert doc["objects"]["versions"]["bytes"] == sum(info.bytes for info in cnr_store.versions(store))
    assert next(iter(doc["arrays"])) == "tables/0/weight"
    assert "versions" in cnr(capsys, "du", store)[1]


def test_du_tells_unfinished_saves_and_folds(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    model = torch.nn.EmbeddingBag(100, 4, sparse=True)
    with cnr_store.Checkpointer(url, model, None) as checkpointer:
        version = checkpointer.save(1).result().id
        checkpointer.touch("weight", [1])
        checkpointer.save(2).result()
    cnr_store.compact(url)
    left = Path(url, "versions", version[:-1] + "9", "c")
    left.mkdir(parents=True)
    (left / "0").write_bytes(bytes(77))
    objects = json.loads(cnr(capsys, "du", url, "--json")[1])["objects"]
    assert objects["unfinished saves"] == {"objects": 1, "bytes": 77}
    assert objects["folds"]["bytes"] > 0
    assert "removed versions" not in objects
    cnr_store.gc(url, keep_last=1)
    objects = json.loads(cnr(capsys, "du", url, "--json")[1])["objects"]
    marks = [path for path in Path(url).rglob(f"{version}/*") if path.is_file()]
    sizes = sum(path.stat().st_size for path in marks)
    assert objects["removed versions"] == {"objects": len(marks), "bytes": sizes}
    only, totals = (
        json.loads(cnr(capsys, "ls", url, "--json")[1])[0],
        cnr(capsys, "ls", url)[1].splitlines()[-1],
    )
    assert only["fold_bytes"] > 0
    share = only["full_bytes"] / (only["bytes"] + only["fold_bytes"])
    assert f", {share:.1f}x less than" in totals


def test_du_of_no_store(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, _, err = cnr(capsys, "du", str(tmp_path))
    assert status == 1
    assert "holds no store: check the URL" in err


def test_import_stores_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    table = torch.randn(50, 4)
    torch.save({"model": {"users.weight": table}}, tmp_path / "model.pt")
    options = ("--key", "model", "--table", "users", "--step", "7", "--bits", "32")
    status, out, _ = cnr(capsys, "import", str(tmp_path / "model.pt"), str(tmp_path / "store"), *options)
    assert status == 0
    assert "(step 7): 50 rows" in out
    np.testing.assert_array_equal(cnr_store.rows(tmp_path / "store", "users", range(50)), table.numpy())


def test_import_says_what_became_a_table_and_what_not(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    torch.save({"users.weight": torch.zeros(500, 4), "big.weight": torch.zeros(10_000, 2)}, tmp_path / "7.pt")
    status, out, _ = cnr(capsys, "import", str(tmp_path / "7.pt"), str(tmp_path / "store"))
    assert status == 0
    assert "(step 7): 10,000 rows" in out
    assert "tables: big (10,000 x 2); whole: users.weight (500 x 4)" in out
    assert caplog.messages[0].endswith("--table big --table users")


def test_import_of_no_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, _, err = cnr(capsys, "import", str(tmp_path / "model.pt"), str(tmp_path / "store"))
    assert status == 1
    assert "model.pt" in err


def test_gc_keeps_the_best(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    with cnr_store.Checkpointer(url, torch.nn.EmbeddingBag(10, 2), None, policy="full") as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, metadata={"a:b": -step}).result()
    status, out, _ = cnr(capsys, "gc", url, "--keep-best", "a:b:max:1")
    assert status == 0
    assert "a:b is -1" in out
    assert [info.step for info in cnr_store.versions(url)] == [1, 3]


@pytest.mark.parametrize("rule", ["auc", "auc:max", "auc:best:3", "auc:max:0", "auc:max:x", ":max:1"])
def test_gc_says_how_to_ask_for_the_best(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, rule: str
) -> None:
    status, _, err = cnr(capsys, "gc", str(tmp_path), "--keep-best", rule)
    assert status == 2
    assert "auc:max:3" in err


def test_info_says_what_restores_spent_of_a_budget(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with cnr_store.Checkpointer(tmp_path, torch.nn.Embedding(100, 64), budget=0.01) as checkpointer:
        checkpointer.save(1)
        checkpointer.load()
        checkpointer.save(2)
    _, told, _ = cnr(capsys, "info", str(tmp_path))
    assert "restores  1, which cost at most 0.001 % of the loss\n" in told
    said = "0.01 % of the loss, 0.001 % spent: steps of 0.0707 of a table's scale"
    assert f"budget    {said}\n" in told
    doc = json.loads(cnr(capsys, "info", str(tmp_path), "--json")[1])
    assert doc["spent"] == pytest.approx(0.001)


def test_info_says_that_a_delta_became_whole(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with cnr_store.Checkpointer(tmp_path, torch.nn.EmbeddingBag(100, 4, sparse=True)) as checkpointer:
        for step, rows in ((1, []), (2, [1]), (3, range(100))):
            checkpointer.touch("weight", rows)
            checkpointer.save(step).result()
    told = [cnr(capsys, "info", str(tmp_path), step)[1] for step in ("1", "2", "3")]
    reasons = ("nothing to build on", "changed since the baseline", "every table is whole")
    assert [f"intermittent: {reason}\n" in text for reason, text in zip(reasons, told, strict=True)] == [
        True
    ] * 3
