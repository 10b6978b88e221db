"""Opening a table and reading ten random rows: time, requests and bytes, by the size of the table."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.reading_bench.huge import Huge
from benchmarks.reading_bench.peers import PEERS, Peer, Place
from benchmarks.reading_bench.relay import Relay


@dataclass(frozen=True)
class FewRows:
    """One reader on one table: the best time, and what it asked of an S3 server (nobody counts on a folder)."""

    place: str
    reader: str
    table_rows: int
    seconds: float
    requests: int | None
    bytes: int | None

    HEAD = "place      table rows  reader                      ms  requests        kB"

    def show(self) -> str:
        asked = f"{self.requests:9d} {(self.bytes or 0) / 1e3:9.0f}" if self.requests is not None else ""
        return f"{self.place:9} {self.table_rows:11.0e}  {self.reader:23} {self.seconds * 1e3:7.1f} {asked}"


def measure(name: str, place: Place, sizes: list[int], rounds: int, relay: Relay | None) -> Iterator[FewRows]:
    """Every peer on a table of each size. Tables are written directly, and read through the relay."""
    for rows in sizes:
        table = Huge.of(rows)
        places = {}
        for number, peer in enumerate(PEERS):
            written = places[peer.name] = place.below(f"{rows}-{number}")
            peer.write(written, table)
        for peer in PEERS:
            yield _measure(name, places[peer.name], peer, table, rounds, relay)


def _measure(name: str, written: Place, peer: Peer, table: Huge, rounds: int, relay: Relay | None) -> FewRows:
    place = written if relay is None else written.at(f"http://127.0.0.1:{relay.port}")
    best, requests, nbytes = float("inf"), None, None
    for _ in range(rounds + 1):  # the first may compile and import
        if relay is not None:
            relay.reset()
        began = time.perf_counter()
        found = peer.read(place, table.sample)
        seconds = time.perf_counter() - began
        if relay is not None:
            requests, nbytes = relay.requests, relay.nbytes
        assert np.isfinite(found).all()
        best = min(best, seconds)
    return FewRows(name, peer.name, table.rows, best, requests, nbytes)
