"""What the documentation shows is true: its bytes decode, and its programs run."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from torch import nn

import cnr_codecs
import cnr_store
from cnr_backends import build_shard, check_chunk, open_backend, parse_index
from cnr_store.format import layout
from cnr_store.format.record_document import decode_record
from cnr_store.policies.policy import PolicyName
from cnr_store.training.saving.snapshot import StagedRows
from cnr_store.writing.plan import Plan, RowsWrite
from cnr_store.writing.writer import Writer
from tests.paths import ROOT
from tests.s3_server import S3Server

FORMAT = (ROOT / "docs" / "format.md").read_text()
VERSION, PATH = "000002-0123abcd.00000007", "tables/items/weight"
WRITTEN = {1: (0, 0.50018311, 1.50054932), 4: (-1, 0.00036621, 2.00109863), 6: (1, np.inf, -3)}
Reader = dict[str, Any]
"""The names that the reader of docs/format.md defines."""


def block(title: str) -> str:
    found = re.findall(rf'^```\w+ title="{title}"\n(.*?)^```', FORMAT, re.DOTALL | re.MULTILINE)
    assert len(found) == 1, f"{len(found)} blocks of docs/format.md are called {title}"
    return str(found[0])


def hex_block(title: str) -> bytes:
    """The bytes that a block's lines begin with; what follows three spaces is a comment."""
    pattern = re.compile(r"(?:[0-9a-f]{2} {1,2})*[0-9a-f]{2}(?= {3}|$)")
    lines = [pattern.match(line) for line in block(title).splitlines()]
    return b"".join(bytes.fromhex(line[0]) for line in lines if line)


@pytest.fixture(scope="module")
def reader() -> Reader:
    """The names of the reader that the format's page ends with; nothing in it is ours."""
    names: Reader = {}
    program = block("reader")
    assert "import cnr" not in program
    exec(compile(program, "docs/format.md", "exec"), names)
    return names


# The worked example


def test_the_payload_of_the_example_decodes_to_the_rows_beside_it() -> None:
    payload = cnr_codecs.parse(hex_block("payload"))
    assert payload.seal == layout.seal(VERSION, PATH, 0, 0)
    assert cnr_codecs.present_rows(payload).tolist() == list(WRITTEN)
    out = np.zeros((8, 3), np.float32)
    cnr_codecs.decode_into(payload, out, np.ones(8, np.uint8))
    for row, values in WRITTEN.items():
        np.testing.assert_allclose(out[row], np.array(values, np.float32), rtol=0, atol=5e-9)


def test_the_reader_of_the_page_decodes_the_example(reader: Reader) -> None:
    seal = layout.seal(VERSION, PATH, 0, 0)
    found = list(reader["segments"](hex_block("payload"), seal, 8, 3, "float32"))
    rows = {int(row): values[i] for ids, values in found for i, row in enumerate(ids)}
    assert sorted(rows) == list(WRITTEN)
    for row, values in WRITTEN.items():
        np.testing.assert_allclose(rows[row], np.array(values, np.float32), rtol=0, atol=5e-9)


def test_the_head_of_the_example_is_as_its_comments_say() -> None:
    data, seal = hex_block("payload"), layout.seal(VERSION, PATH, 0, 0)
    assert cnr_codecs.rows_written(data[:66], seal=seal).tolist() == list(WRITTEN)
    with pytest.raises(cnr_codecs.PayloadError, match="cut off"):
        cnr_codecs.rows_written(data[:65], seal=seal)


@pytest.mark.parametrize(
    "codec", [cnr_codecs.UniformRows(), cnr_codecs.KMeansRows(2), cnr_codecs.LosslessRows()]
)
def test_the_reader_of_the_page_reads_uniform_codes_codebooks_and_raw_rows(
    reader: Reader, codec: cnr_codecs.RowCodec
) -> None:
    values = np.random.default_rng(2).normal(size=(50, 24)).astype(np.float32)
    values[::7], values[::11] = values[::7] + 1e6, np.inf
    data = codec.encode_rows(values, np.arange(0, 100, 2), 120, element="float32", seal=9)
    out = np.zeros((120, 24), np.float32)
    cnr_codecs.decode_into(cnr_codecs.parse(data), out, np.ones(120, np.uint8))
    for rows, found in reader["segments"](data, 9, 120, 24, "float32"):
        np.testing.assert_array_equal(found, out[rows])


@pytest.mark.parametrize("element", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("dim", "rms_step"), [(1, 0.1), (5, 0.01), (24, 0.35), (3, 0.001), (7, 2)])
def test_the_reader_of_the_page_reads_lattices(
    reader: Reader, dim: int, rms_step: float, element: str
) -> None:
    values = np.random.default_rng(2).normal(size=(50, dim)).astype(cnr_codecs.array_dtype(element))
    if element == "bfloat16":
        values = (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    values[::7], values[::11] = 0, np.inf
    codec, rows = cnr_codecs.LatticeRows(rms_step), np.arange(0, 500, 10)
    data = codec.encode_rows(values, rows, 50_000, element=element, seal=9)
    assert {segment.row_set.kind for segment in cnr_codecs.parse(data).segments} >= {
        cnr_codecs.RowSetKind.GAPS
    }
    out = np.zeros((50_000, dim), cnr_codecs.array_dtype(element))
    cnr_codecs.decode_into(cnr_codecs.parse(data), out, np.ones(50_000, np.uint8))
    found = list(reader["segments"](data, 9, 50_000, dim, element))
    assert sorted(row for ids, _ in found for row in ids.tolist()) == rows.tolist()
    for ids, held in found:
        np.testing.assert_array_equal(held, out[ids])


@pytest.mark.parametrize("element", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize(("dim", "mantissa", "sign"), [(1, 3, 1), (5, 7, -1), (24, 1, 1)])
def test_the_reader_of_the_page_reads_floating_grids(
    reader: Reader, dim: int, mantissa: int, sign: int, element: str
) -> None:
    values = np.random.default_rng(2).normal(size=(3000, dim)).astype(cnr_codecs.array_dtype(element))
    if element == "bfloat16":
        values = (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    values = np.maximum(values, 0) if sign > 0 else values
    values[::7], values[::11] = 0, np.inf
    data = cnr_codecs.FloatingRows(mantissa).encode_rows(values, None, 3000, element=element, seal=9)
    out = np.zeros((3000, dim), values.dtype)
    cnr_codecs.decode_into(cnr_codecs.parse(data), out, np.ones(3000, np.uint8))
    found = list(reader["segments"](data, 9, 3000, dim, element))
    assert sum(len(ids) for ids, _ in found) == 3000
    for ids, held in found:
        assert held.dtype == out.dtype
        np.testing.assert_array_equal(held, out[ids])


def test_the_codec_writes_the_payload_of_the_example() -> None:
    rows = np.array([(0, 0.5, 1.5), (-1, 0, 2), (1, np.inf, -3)], np.float32)
    codec = cnr_codecs.UniformRows("asymmetric", 4)
    seal = layout.seal(VERSION, PATH, 0, 0)
    data = codec.encode_rows(rows, np.array(list(WRITTEN)), 8, element="float32", seal=seal)
    assert data == hex_block("payload")


def test_the_shard_of_the_example_is_sound() -> None:
    payload, rest = hex_block("payload"), hex_block("shard")
    assert b"".join(map(bytes, build_shard([payload, None]))) == payload + rest
    index = parse_index(rest[-36:], 2, len(payload + rest))
    assert index.present.tolist() == [True, False]
    assert check_chunk((payload + rest)[: index.lengths[0]]) == payload
    assert f"tail, {index.crc}" in block("shard")


def test_the_records_of_the_example_are_proved(reader: Reader, tmp_path: Path) -> None:
    record = decode_record(block("record").rstrip("\n").encode(), VERSION)
    assert record is not None
    assert (record.step, record.previous, record.metadata) == (
        600,
        "000002-0123abcd.00000006",
        {"loss": 0.25},
    )
    assert decode_record(block("void").rstrip("\n").encode(), VERSION) is None
    place = tmp_path / "versions" / VERSION / "zarr.json"
    place.parent.mkdir(parents=True)
    place.write_text(block("record").rstrip("\n"))
    assert reader["record"](tmp_path, VERSION)[0]["step"] == 600
    place.write_text(block("void").rstrip("\n"))
    assert reader["record"](tmp_path, VERSION) is None


# The reader against the store


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype, users: int = 5000) -> None:
        super().__init__()
        self.users = nn.Embedding(users, 12, sparse=True, dtype=dtype)
        self.items = nn.Embedding(9, 3, sparse=True, dtype=dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.users(ids).float().sum() + (self.items(ids % 9).float() ** 2).sum()
        return loss


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["full", "one-shot", "consecutive", "intermittent"])
@pytest.mark.parametrize(
    ("bits", "dtype"),
    [(2, torch.float32), (3, torch.float16), (8, torch.bfloat16), (32, torch.bfloat16), (4, torch.float32)],
)
def test_the_reader_of_the_page_reads_every_version(
    reader: Reader, tmp_path: Path, policy: PolicyName, bits: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model = Model(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with cnr_store.Checkpointer(tmp_path, model, optimizer, policy=policy, bits=bits) as checkpointer:
        for step in range(4):
            optimizer.zero_grad()
            model(torch.randint(5000, (300,))).backward()
            optimizer.step()
            checkpointer.save(step).result()
    for info in cnr_store.versions(tmp_path):
        expected = cnr_store.state_dict(tmp_path, info)
        for name, values in expected.items():
            found = reader["read_rows"](tmp_path, info.id, f"tables/{name.removesuffix('.weight')}/weight")
            assert found.dtype == values.dtype
            np.testing.assert_array_equal(found, values)
    if cnr_store.compact(tmp_path).outcome == "folded":
        for older in cnr_store.versions(tmp_path)[:-1]:
            shutil.rmtree(tmp_path / "versions" / older.id)
        for name, values in cnr_store.state_dict(tmp_path).items():
            found = reader["read_rows"](tmp_path, info.id, f"tables/{name.removesuffix('.weight')}/weight")
            np.testing.assert_array_equal(found, values)


@pytest.mark.slow
@pytest.mark.each_by_day
@pytest.mark.parametrize(
    "codec",
    [
        {"id": "cnr_uniform", "scheme": "symmetric", "bits": 5},
        {"id": "cnr_kmeans", "bits": 1},
        {"id": "cnr_kmeans", "bits": 2, "group": "cluster"},
        {"id": "cnr_kmeans", "bits": 3, "group": "block", "block_rows": 20},
    ],
)
def test_the_reader_of_the_page_reads_rows_of_every_codec_and_row_state(
    reader: Reader, tmp_path: Path, codec: dict[str, str | int]
) -> None:
    model = Model(torch.float32, users=60_000)  # several chunks a shard
    optimizer = torch.optim.Adagrad(model.parameters())
    model(torch.arange(50)).backward()
    optimizer.step()
    info = cnr_store.save(tmp_path, model, optimizer, codec=codec)
    expected = cnr_store.open(tmp_path)
    for path in ("tables/users/weight", "tables/users/sum"):
        array = expected[path]
        assert isinstance(array, zarr.Array)
        np.testing.assert_array_equal(reader["read_rows"](tmp_path, info.id, path), array[:])


def test_the_reader_of_the_page_reads_versions_of_many_ranks(reader: Reader, tmp_path: Path) -> None:
    writer = Writer(open_backend(tmp_path / "store"), workers=1)
    values = np.arange(600, dtype=np.float32).reshape(100, 6)
    rows = [
        RowsWrite(
            path, taken.shape, "float32", None, None, StagedRows(taken), cnr_codecs.LosslessRows(), (), edges
        )
        for path, taken, edges in (
            ("tables/items/weight", values, ()),
            ("tables/items/momentum1", values[:, :2].copy(), (0, 4, 6)),
        )
    ]
    parts = {rank: {"reader": rank, "rng": None} for rank in range(2)}
    version = writer.write(Plan(1, None, rows, [], {}, {"policy": "full"}, state_parts=parts)).id
    for path, columns in (("tables/items/weight", 6), ("tables/items/momentum1", 2)):
        assert np.array_equal(reader["read_rows"](tmp_path / "store", version, path), values[:, :columns])


def test_the_manifest_of_a_store_is_as_the_page_shows_it(tmp_path: Path) -> None:
    info = cnr_store.save(tmp_path, Model(torch.float32))
    manifest = json.loads(zlib.decompress((tmp_path / "versions" / info.id / "manifest").read_bytes()))
    shown = json.loads(re.findall(r"```json\n(.*?)```", FORMAT, re.DOTALL)[0])
    assert list(manifest) == list(shown)
    for lists in itertools.chain(manifest["arrays"].values(), shown["arrays"].values()):
        assert list(lists) == ["index", "bytes", "tail"]
        assert len({len(values) for values in lists.values()}) == 1


# Programs


def pages_with_programs() -> list[str]:
    """README, and every page that shows Python. The reader of docs/format.md is run by the tests above."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [
        str(page.relative_to(ROOT))
        for page in pages
        if re.search(r"^```python\n", page.read_text(), re.MULTILINE)
    ]


NEEDED = {"docs/how-to/arrow.md": ["pyarrow", "duckdb", "faiss"]}
"""Libraries that a page is about, and that its programs import."""

PROGRAMS = r"^```(python|bash)\n(.*?)^```"
"""The language and the text of each block that is run."""


def run_programs(page: str, programs: list[tuple[str, str]], capsys: pytest.CaptureFixture[str]) -> None:
    """Run a page's programs in one process, and compare what they print with what the page shows."""
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    for number, (language, program) in enumerate(programs):
        if language == "bash":
            run_in_a_shell(program)
        else:
            exec(compile(program, f"{page}, program {number}", "exec"), names)
    printed = capsys.readouterr().out.splitlines()
    shown = re.findall(r"#-> (.*)", "".join(program for _, program in programs))
    assert shown
    assert [line for line in printed if line in shown] == shown


def run_in_a_shell(program: str) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-e"],
        input=program,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.each_by_day
@pytest.mark.parametrize("page", pages_with_programs())
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # which DCP says of one process
@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning")  # Lightning makes them
@pytest.mark.filterwarnings("ignore:.*does not have many workers.*")  # which is meant
def test_the_programs_of_a_page_run_one_after_the_other(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Blocks marked `python` and `bash`. What needs a cloud, a cluster or a checkout is marked `text` or `sh`."""
    for library in NEEDED.get(page, ()):
        pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    run_programs(page, re.findall(PROGRAMS, (ROOT / page).read_text(), re.DOTALL | re.MULTILINE), capsys)


@pytest.mark.server
def test_the_programs_on_s3_run_on_a_real_server(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Blocks called `on S3`: they find the server in the environment, as the page says."""
    options = s3_server.storage_options
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", options["key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", options["secret"])
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", options["endpoint_url"])
    page = "docs/how-to/s3.md"
    text = (ROOT / page).read_text().replace("s3://bucket/", s3_server.url("docs/"))
    on_s3 = PROGRAMS.replace(r"\n", r' title="on S3"\n', 1)
    run_programs(page, re.findall(on_s3, text, re.DOTALL | re.MULTILINE), capsys)


def test_every_link_between_pages_leads_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", prose):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.nightly
def test_readme_can_be_tried_from_nothing() -> None:
    """But for the installation, which needs the network."""
    command = [sys.executable, str(ROOT / "tools" / "try_readme.py"), sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "30 30\n" in done.stdout
    assert re.search(r"^-- train, resume and look: \d+ s$", done.stdout, re.MULTILINE)
