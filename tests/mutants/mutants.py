"""Guarantees, each broken in one line of source, with the tests that must notice."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """One line that is broken.

    Attributes
    ----------
    guarantee
        What users rely on, and what the broken line holds.
    file
        The source, from the root of the project.
    line, broken
        A text that occurs once in the file, and what takes its place.
    tests
        What must fail: arguments for pytest.
    """

    guarantee: str
    file: str
    line: str
    broken: str
    tests: str


STORE = "tests/test_store"

MUTANTS = [
    Mutant(
        "a payload of another place is refused",
        "cnr_store/chains/link.py",
        "if payload.seal != self.record.seal(self.path, chunk.row, chunk.column):",
        "if False:",
        f"{STORE}/chains/test_damage.py",
    ),
    Mutant(
        "a row that no link holds is an error",
        "cnr_store/chains/array_reader.py",
        "        if need.any():\n            lost",
        "        if need.all():\n            lost",
        f"{STORE}/chains/test_damage.py {STORE}/format/test_hostile.py",
    ),
    Mutant(
        "a record whose digest differs is refused",
        "cnr_store/format/record_document.py",
        "if hashlib.sha256(blank).hexdigest() != digest:",
        "if not digest:",
        f"{STORE}/format/test_record.py {STORE}/format/test_spoiled_documents.py",
    ),
    Mutant(
        "an unknown required feature is refused",
        "cnr_store/format/record_document.py",
        "        if not unknown:",
        "        if True:",
        f"{STORE}/format/test_record.py",
    ),
    Mutant(
        "a manifest that is not the record's is refused",
        "cnr_store/catalog/catalog.py",
        "if hashlib.sha256(data).hexdigest() != sha256:",
        "if not sha256:",
        f"{STORE}/chains/test_damage.py",
    ),
    Mutant(
        "rows of a failed save stay dirty",
        "cnr_store/training/saving/save_queue.py",
        "        else:\n            self.tracker.restore(dirty)\n        # The next",
        "        # The next",
        f"{STORE}/training/saving/test_failing_saves.py {STORE}/writing/test_faults.py",
    ),
    Mutant(
        "rows of an interrupted save stay dirty",
        "cnr_store/training/saving/save_queue.py",
        "                self.tracker.restore(snapshot.dirty)\n                self._pending = None",
        "                self._pending = None",
        f"{STORE}/training/saving/test_overlap_interrupts.py",
    ),
    Mutant(
        "a row looked up may be updated in the next interval",
        "cnr_store/training/tracking/table_tracker.py",
        "self.carried_over = flagged if carry_over else empty_bitmap(rows)",
        "self.carried_over = empty_bitmap(rows)",
        f"{STORE}/training/tracking/test_tracker.py {STORE}/training/tracking/test_tracker_holes.py",
    ),
    Mutant(
        "a table changed outside of steps and lookups is whole",
        "cnr_store/training/tracking/table_tracker.py",
        "or (self.changed_elsewhere and OUTSIDE)",
        "or (False and OUTSIDE)",
        f"{STORE}/training/tracking",
    ),
    Mutant(
        "optimizer state changed by hand makes its table whole",
        "cnr_store/training/tracking/table_tracker.py",
        "or (self._most_slot_changes > 0 and STATE_OUTSIDE)",
        "or (False and STATE_OUTSIDE)",
        f"{STORE}/training/tracking",
    ),
    Mutant(
        "a commit record is created, never put",
        "cnr_store/writing/writer.py",
        "    backend.create(record.key(), data)",
        "    backend.put(record.key(), data)",
        f"{STORE}/writing/test_faults.py",
    ),
    Mutant(
        "a writer looks for newer claims before it commits",
        "cnr_store/writing/writer.py",
        "            claims.check_may_commit(self._backend, claim, plan.needs)\n",
        "",
        f"{STORE}/catalog/test_writers.py",
    ),
    Mutant(
        "a delta never depends on what carries a tombstone",
        "cnr_store/catalog/claims.py",
        "    tombstoned = list_tombstoned(backend)\n    present",
        "    tombstoned = frozenset[str]()\n    present",
        f"{STORE}/maintenance",
    ),
    Mutant(
        "what a kept version depends on is kept",
        "cnr_store/maintenance/collection/rules.py",
        '            kept[version] = f"needed by {above}"\n            todo.append(version)',
        '            kept[version] = f"needed by {above}"',
        f"{STORE}/maintenance/test_retention.py",
    ),
    Mutant(
        "pinned versions are kept",
        "cnr_store/maintenance/collection/rules.py",
        '[(version, "pinned") for version in sorted(snapshot.pinned)]',
        "[]",
        f"{STORE}/maintenance/test_retention.py",
    ),
    Mutant(
        "versions that came while tombstones were put are kept",
        "cnr_store/maintenance/collection/rules.py",
        '[(version, "came meanwhile") for version in sorted(committed_since)]',
        "[]",
        f"{STORE}/maintenance {STORE}/stateful/test_retention_histories.py",
    ),
    Mutant(
        "versions go newest first, so that none is left without what it depends on",
        "cnr_store/maintenance/collection/deletion.py",
        "for version in sorted(versions, reverse=True):",
        "for version in sorted(versions):",
        f"{STORE}/maintenance/test_gc_faults.py",
    ),
    Mutant(
        "a file is synced before it gets its name",
        "backends/src/cnr_backends/local.py",
        "            os.fsync(file.fileno())\n",
        "",
        "tests/test_backends/test_local.py",
    ),
    Mutant(
        "a load that found damage makes the next save whole",
        "cnr_store/training/resumption.py",
        "            self.saves.planner.drop_bases()  # what is damaged may lie under the next delta\n",
        "",
        f"{STORE}/training/loading",
    ),
    Mutant(
        "auto never keeps more than intermittent does",
        "cnr_store/policies/policy.py",
        "return [*paid, 2 * everything][:keep_last]",
        "return [*paid, everything][:keep_last]",
        f"{STORE}/policies",
    ),
    Mutant(
        "intermittent is full when the paper's inequality says so",
        "cnr_store/policies/policy.py",
        "sum(sizes_bytes) <= (len(differentials) + 1) * differentials[-1]",
        "sum(sizes_bytes) < (len(differentials) + 0) * differentials[-1]",
        f"{STORE}/policies",
    ),
]
