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
CODECS, GRIDS = "codecs/src/cnr_codecs", "tests/test_codecs/lattice"

MUTANTS = [
    Mutant(
        "a payload of another place is refused",
        "cnr_store/chains/written_link.py",
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
        "        else:\n            self.tracker.restore(taken.dirty)\n        # The next",
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
        "or (self.changes > 0 and OUTSIDE)",
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
        "cnr_store/writing/commit.py",
        "    backend.create(record.key(), data)",
        "    backend.put(record.key(), data)",
        f"{STORE}/writing/test_faults.py",
    ),
    Mutant(
        "a writer looks for newer claims before it commits",
        "cnr_store/writing/writer.py",
        "                fencing.check_may_commit(self._backend, claim, record.needs)\n                sent",
        "                sent",
        f"{STORE}/catalog/test_writers.py",
    ),
    Mutant(
        "a delta never depends on what carries a tombstone",
        "cnr_store/catalog/fencing.py",
        "    tombstoned = list_tombstoned(backend)\n    workers",
        "    tombstoned = frozenset[str]()\n    workers",
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
        f"{STORE}/maintenance/test_pins.py",
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
        "backends/src/cnr_backends/files.py",
        '            sync(file.fileno(), "files")\n',
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
        "    if long.max_excess_bytes(costs.keep_last) > 0:",
        "    if False:",
        f"{STORE}/policies",
    ),
    Mutant(
        "auto counts what deltas older than its window kept",
        "cnr_store/policies/past.py",
        "            excess.append(self.older_excess_bytes)",
        "            pass",
        f"{STORE}/policies",
    ),
    Mutant(
        "a stale job can't claim the store",
        "cnr_store/catalog/fencing.py",
        '            raise _stale(backend, f"writer {claim} claimed the store")',
        "            pass",
        f"{STORE}/catalog",
    ),
    Mutant(
        "a job can't claim the store after a version that it did not see",
        "cnr_store/catalog/fencing.py",
        '            raise _stale(backend, f"version {newer} was committed")',
        "            pass",
        f"{STORE}/catalog",
    ),
    Mutant(
        "a job removes no version that it did not see",
        "cnr_store/maintenance/collection/rules.py",
        '[(version, "of another job") for version in not_seen]',
        "[]",
        f"{STORE}/catalog {STORE}/maintenance/test_retention.py {STORE}/maintenance/test_retention_writers.py",
    ),
    Mutant(
        "nothing of an attempt of unknown outcome is removed",
        "cnr_store/writing/writer.py",
        "            self.renew(previous)\n            return f",
        "            self.renew(previous)\n            remove_attempt(self._backend, 1, version)\n            return f",
        f"{STORE}/writing {STORE}/maintenance",
    ),
    Mutant(
        "a failed save makes room",
        "cnr_store/writing/writer.py",
        "left = remove_attempt(self._backend, self._workers, version)",
        "left = ''",
        f"{STORE}/maintenance/test_full_disk.py",
    ),
    Mutant(
        "a table in shared memory is whole",
        "cnr_store/training/tracking/table_tracker.py",
        'tensor.device.type == "cpu" and local_of(tensor).untyped_storage().is_shared()',
        "False and tensor.is_shared()",
        f"{STORE}/training/tracking/test_moved_rows.py",
    ),
    Mutant(
        "a salvaged model is saved whole",
        "cnr_store/training/resumption.py",
        "lineage = before.alone() if restore.is_damaged else self._lineage(record, before)",
        "lineage = self._lineage(record, before)",
        f"{STORE}/training/loading/test_salvage.py",
    ),
    Mutant(
        "a damaged payload's head is proven before its rows are believed",
        "codecs/src/cnr_codecs/payload/head.py",
        "    if CHECKSUM.unpack_from(buffer.data, len(head))[0] != google_crc32c.value(head):",
        "    if False:",
        "tests/test_codecs/test_payload.py",
    ),
    Mutant(
        "intermittent is full when the paper's inequality says so",
        "cnr_store/policies/policy.py",
        "sums.total_bytes <= (sums.deltas + 1) * sums.last_bytes",
        "sums.total_bytes <= sums.deltas * sums.last_bytes",
        f"{STORE}/policies",
    ),
    Mutant(
        "a rank votes only if it sees the store",
        "cnr_store/writing/writer.py",
        "self._check_shared(version, again=True)",
        "self._check_shared(version)",
        f"{STORE}/ranks/test_one_place.py",
    ),
    Mutant(
        "nothing is written below a mount that was lost",
        "backends/src/cnr_backends/files.py",
        "if not known or not os.path.exists",
        "if known and os.path.exists",
        "tests/test_backends/test_mounts.py",
    ),
    Mutant(
        "tables of one kernel have one rate",
        "cnr_store/training/loading/fused_fit.py",
        "if len({*rates.values()}) > 1:",
        "if False:",
        f"{STORE}/ranks/test_fused_elsewhere.py",
    ),
    Mutant(
        "a commit whose last sync failed is synced again",
        "cnr_store/writing/commit.py",
        "            direct.confirm(key)  # what failed may have been the sync behind it\n",
        "            pass\n",
        f"{STORE}/writing/test_failed_syncs.py",
    ),
    Mutant(
        "state that moves to another optimizer is not rounded",
        "cnr_store/training/loading/moved_tables.py",
        "torch.promote_types(slot.dtype, dtype_named(entry.element)) == slot.dtype",
        "True",
        f"{STORE}/training/distributed/test_moved_tables.py",
    ),
    Mutant(
        "codes of a floating grid end below the exponents that leave no room to round",
        f"{CODECS}/payload/coded.py",
        "return _LEAST_EXPONENT << mantissa, (end << mantissa) - 1",
        "return _LEAST_EXPONENT << mantissa, end << mantissa",
        f"{GRIDS}/test_floating.py",
    ),
    Mutant(
        "codes of a floating grid begin at the least normal number",
        f"{CODECS}/payload/coded.py",
        "return _LEAST_EXPONENT << mantissa, (end",
        "return 0 << mantissa, (end",
        f"{GRIDS}/test_floating.py {GRIDS}/test_relative_floating.py",
    ),
    Mutant(
        "float16 rows have no code that decodes to infinity",
        f"{CODECS}/payload/coded.py",
        "_END_OF_FLOAT16 = 127 + 16",
        "_END_OF_FLOAT16 = 127 + 17",
        f"{GRIDS}/test_floating.py",
    ),
    Mutant(
        "a row with a code beyond the limit is stored as it is",
        f"{CODECS}/kernels/lattice.py",
        "has_none = most > limit or",
        "has_none = most > limit + 1 or",
        f"{GRIDS}/test_lattice.py",
    ),
    Mutant(
        "a row that would become zero is not",
        f"{CODECS}/kernels/lattice.py",
        "or (most == 0 and size > 0)",
        "or (most == 0 and size > 1)",
        f"{GRIDS}/test_lattice.py",
    ),
    Mutant(
        "rows of 16 bits have codes that their values give again",
        f"{CODECS}/lattice/lattice.py",
        "_MAX_CODE_OF_16_BITS = 127",
        "_MAX_CODE_OF_16_BITS = 511",
        f"{GRIDS}/test_lattice.py",
    ),
    Mutant(
        "packed codes beyond the most are refused",
        f"{CODECS}/payload/packed.py",
        "if int(zigzag.max()) > 2 * most:",
        "if int(zigzag.max()) > 4 * most:",
        GRIDS,
    ),
    Mutant(
        "sums beyond a code are refused",
        f"{CODECS}/payload/pending.py",
        "        if most > MAX_CODE:",
        "        if most > 2 * MAX_CODE:",
        GRIDS,
    ),
    Mutant(
        "sums that are no codes of a floating grid are refused",
        f"{CODECS}/payload/pending.py",
        "((sizes < least) | (sizes > most))",
        "(sizes > most)",
        GRIDS,
    ),
    Mutant(
        "a checksum proves the codes of a whole segment",
        f"{CODECS}/payload/lattice.py",
        "    if is_whole:\n",
        "    if False:\n",
        GRIDS,
    ),
    Mutant(
        "a fold proves the codes that it takes",
        f"{CODECS}/payload/coded.py",
        "        self.prove(check)\n        return codes",
        "        return codes",
        GRIDS,
    ),
    Mutant(
        "a checksum goes over every block",
        f"{CODECS}/payload/lattice.py",
        "check = checksum(check, codes)",
        "check = checksum(0, codes)",
        GRIDS,
    ),
    Mutant(
        "relative rows are proven once they are composed",
        f"{CODECS}/payload/pending.py",
        "            if not is_right:",
        "            if is_right is None:",
        GRIDS,
    ),
    Mutant(
        "a relative segment that is read in part proves nothing",
        f"{CODECS}/payload/pending.py",
        "            if len(inside) < len(places) or (need[inside] != 1).any():\n                return\n",
        "            if len(inside) < len(places):\n                return\n",
        GRIDS,
    ),
    Mutant(
        "a few huge rows do not widen a step",
        f"{CODECS}/lattice/steps.py",
        "(int(total[-1]) + 1) // 2",
        "int(total[-1])",
        f"{GRIDS}/test_lattice.py",
    ),
    Mutant(
        "zeros do not count in a scale",
        f"{CODECS}/kernels/lattice.py",
        "if size != 0 and size < np.uint32(0x7F800000)",
        "if size < np.uint32(0x7F800000)",
        f"{GRIDS}/test_lattice.py",
    ),
    Mutant(
        "what is not finite does not count in a scale",
        f"{CODECS}/kernels/lattice.py",
        "if size != 0 and size < np.uint32(0x7F800000)",
        "if size != 0",
        f"{GRIDS}/test_lattice.py",
    ),
    Mutant(
        "a step has 8 significant bits",
        f"{CODECS}/lattice/steps.py",
        "round(math.ldexp(mantissa, STEP_BITS)), exponent - STEP_BITS",
        "round(math.ldexp(mantissa, 9)), exponent - 9",
        f"{GRIDS}/test_lattice.py",
    ),
    Mutant(
        "rows below a step are on finer ones",
        f"{CODECS}/lattice/segments.py",
        'if grid.step and element.name == "float32":',
        "if False:",
        f"{GRIDS}/test_lattice.py",
    ),
    Mutant(
        "a finer step leaves codes of some size",
        f"{CODECS}/lattice/segments.py",
        "-(-(3 - exponents) // 4)",
        "-(-(0 - exponents) // 4)",
        f"{GRIDS}/test_lattice.py",
    ),
    Mutant(
        "subnormal values without signs do not become 0",
        f"{CODECS}/kernels/lattice.py",
        "small = 0 if signs >> top else least",
        "small = 0",
        f"{GRIDS}/test_floating.py",
    ),
    Mutant(
        "subnormal values of rows with signs become 0",
        f"{CODECS}/kernels/lattice.py",
        "small = 0 if signs >> top else least",
        "small = least",
        f"{GRIDS}/test_floating.py",
    ),
    Mutant(
        "rows that fill a line are none",
        f"{CODECS}/payload/coded.py",
        "        rows[places >= self.count] = NO_ROW\n",
        "",
        GRIDS,
    ),
    Mutant(
        "rows that fill a line are not composed",
        f"{CODECS}/payload/pending.py",
        "is_row, check = stored != NO_ROW, 0",
        "is_row, check = stored != 0, 0",
        GRIDS,
    ),
    Mutant(
        "a block ends with its width",
        f"{CODECS}/payload/packed.py",
        "min(begin + lines, edges[width + 1])",
        "begin + lines",
        f"{GRIDS}/test_packed.py",
    ),
    Mutant(
        "a line is as wide as its greatest code",
        f"{CODECS}/kernels/lattice.py",
        "(most > 14)",
        "(most > 15)",
        f"{GRIDS}/test_packed.py",
    ),
    Mutant(
        "a line of a byte a code has no wider code",
        f"{CODECS}/kernels/lattice.py",
        "(most > 0xFF)",
        "(most > 0x100)",
        f"{GRIDS}/test_packed.py",
    ),
    Mutant(
        "four codes a byte are of up to 1",
        f"{CODECS}/kernels/lattice.py",
        "(most > 2)",
        "(most > 3)",
        f"{GRIDS}/test_packed.py",
    ),
    Mutant(
        "a frame of another size is refused before it is unpacked",
        f"{CODECS}/payload/frames.py",
        "if claimed != size if size is not None else not 1 <= claimed <= most:",
        "if claimed < 0:",
        f"{GRIDS}/test_packed.py",
    ),
    Mutant(
        "differences of two grids are not added",
        f"{CODECS}/kernels/lattice.py",
        "        elif grids[base + row] != grid:\n            return -1\n        else:",
        "        else:",
        GRIDS,
    ),
    Mutant(
        "differences are not added to codes of another grid",
        f"{CODECS}/kernels/lattice.py",
        "        if grids[base + row] != grid:\n            return -1\n        source",
        "        source",
        GRIDS,
    ),
    Mutant(
        "a fold adds no differences to codes of another grid",
        f"{CODECS}/payload/pending.py",
        "-1 if (self.grids[rows] != self.known_number(grid)).any() else most",
        "most",
        GRIDS,
    ),
    Mutant(
        "a fold holds no relative rows",
        f"{CODECS}/payload/moving.py",
        "pending)\n            continue",
        "pending)",
        f"{GRIDS} {STORE}/chains/test_relative.py",
    ),
    Mutant(
        "rows are relative to what their base has, no other version",
        "cnr_store/writing/row_codes.py",
        "return version is not None and (self.version, ",
        "return version is not None and (version, ",
        f"{STORE}/chains/test_relative.py",
    ),
    Mutant(
        "rows are relative to codes on their own grid",
        "cnr_store/writing/row_codes.py",
        "own is not None and known.grid == grid_of(own)",
        "own is not None",
        f"{STORE}/chains/test_relative.py",
    ),
]
