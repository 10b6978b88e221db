"""Codes in memory that are not those stored: found where a delta reads some of its rows' parents back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cnr_store
from cnr_backends import open_backend
from cnr_store.catalog.catalog import Catalog
from cnr_store.chains.array_reader import ArrayReader
from cnr_store.errors import CorruptionError
from tests.test_store.chains.test_lattice import PATH, ROWS, Job, held
from tests.test_store.chains.test_relative import RELATIVE, no_findings, relative_rows, spoil


def known_codes(checkpointer: cnr_store.Checkpointer) -> np.ndarray[Any, Any]:
    """The memory that holds the codes of the last version."""
    checkpointer._saves.finish_latest()
    known = checkpointer._saves.planner._code_cache._known[PATH]
    assert known.codes is not None
    return known.codes


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if "absolute" in each.getMessage()]


@pytest.mark.parametrize("policy", ["consecutive", "one-shot"])
def test_other_codes_are_told_once_and_the_table_is_absolute_once(
    tmp_path: Path, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(tmp_path, RELATIVE, policy=policy)
    with job.checkpointer() as checkpointer:
        first = job.save(checkpointer)
        job.train(1)
        assert relative_rows(tmp_path, job.save(checkpointer)) == 100
        known_codes(checkpointer)[:, 3] += 1
        job.train(1)
        second = job.save(checkpointer)
        (told,) = warnings_of(caplog)
        assert PATH in told
        assert "has other codes of" in told
        assert (second if policy == "consecutive" else first)[:6] in told
        assert relative_rows(tmp_path, second) == 0
        job.train(1)
        assert relative_rows(tmp_path, job.save(checkpointer)) == (100 if policy == "consecutive" else 0)
        job.save(checkpointer, full=True)
        job.train(2)
        assert relative_rows(tmp_path, job.save(checkpointer)) == 100
    assert len(warnings_of(caplog)) == 1
    for version, expected in job.expected.items():
        np.testing.assert_array_equal(held(tmp_path, version), expected)
    no_findings(tmp_path)


def test_the_codes_of_another_version_are_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As a mistake in what belongs to which version would give; a few rows are read of many."""
    job = Job(tmp_path, RELATIVE, policy="consecutive")
    with job.checkpointer() as checkpointer:
        job.save(checkpointer)
        older = known_codes(checkpointer).copy()
        job.train(1)
        job.save(checkpointer)
        known_codes(checkpointer)[:] = older
        job.train(1)
        last = job.save(checkpointer)
    assert len(warnings_of(caplog)) == 1
    np.testing.assert_array_equal(held(tmp_path, last), job.expected[last])
    no_findings(tmp_path)


def test_over_a_base_that_is_damaged_rows_are_absolute(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """So they can be read, and what they were before can not."""
    job = Job(tmp_path, RELATIVE, policy="consecutive")
    with job.checkpointer() as checkpointer:
        job.save(checkpointer)
        job.train(1)
        second = job.save(checkpointer)
        spoil(tmp_path, second)
        job.train(1)
        third = job.save(checkpointer)
    (told,) = warnings_of(caplog)
    assert "can't be read back" in told
    with pytest.raises(CorruptionError):
        held(tmp_path, second)
    changed = (job.expected[third] != job.expected[second]).any(axis=1)
    catalog = Catalog(open_backend(tmp_path))
    reader = ArrayReader(catalog, catalog.record(third), PATH)
    reader.read(0, found := reader.new_rows(ROWS), changed.astype(np.uint8))
    np.testing.assert_array_equal(found[changed], job.expected[third][changed])


def test_few_rows_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, before = [], ArrayReader.read

    def note(self: ArrayReader, first_row: int, out: Any, need: Any = None, **more: Any) -> Any:
        read.append(len(out) if need is None else int((need != 0).sum()))
        return before(self, first_row, out, need, **more)

    monkeypatch.setattr(ArrayReader, "read", note)
    job = Job(tmp_path, RELATIVE, policy="consecutive")
    with job.checkpointer() as checkpointer:
        job.save(checkpointer)
        assert not read
        for seed in range(3):
            job.train(seed)
            assert relative_rows(tmp_path, job.save(checkpointer)) == 100
            assert 8 <= sum(read) <= 64
            read.clear()
    no_findings(tmp_path)
