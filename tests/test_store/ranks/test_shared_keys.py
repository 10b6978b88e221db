"""The keys of a store of torch.distributed: of any size, and no rank hangs on a store that does."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]  # public, if its types do not say so
    FileStore,
    HashStore,
    TCPStore,
)

from cnr_store import RanksError
from cnr_store.training.distributed.torch_group import TorchKeyValue
from tests.test_store.ranks.support.rank_processes import reach, run_ranks

LIMIT = timedelta(seconds=30)


@pytest.fixture(params=["tcp", "file", "hash"])
def keys(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TorchKeyValue]:
    stores = {
        "tcp": lambda: TCPStore("127.0.0.1", 0, None, True, LIMIT, wait_for_workers=False),
        "file": lambda: FileStore(str(tmp_path / "store"), -1),
        "hash": HashStore,
    }
    found = TorchKeyValue(stores[request.param](), "test/", 30)
    yield found
    found.close()


def test_keys_do_what_they_say(keys: TorchKeyValue) -> None:
    assert keys.get("a") is None
    keys.set("a", b"\0\xff")
    assert keys.get("a") == b"\0\xff"
    keys.set("a", b"")
    assert keys.get("a") == b""
    assert keys.compare_set("a", b"second") == b""
    assert keys.compare_set("b", b"first") == b"first"
    assert keys.compare_set("b", b"second") == b"first"
    keys.delete("b")
    keys.delete("b")
    assert keys.get("b") is None


def test_many_values_are_read_at_once(keys: TorchKeyValue) -> None:
    names = [f"key{number}" for number in range(600)]
    for name in names[:-1]:
        keys.set(name, name.encode())
    assert keys.get_all(names) is None
    keys.set(names[-1], bytes(5 << 20))
    assert keys.get_all(names) == [*(name.encode() for name in names[:-1]), bytes(5 << 20)]
    assert keys.get_all([]) == []


def test_values_may_be_large(keys: TorchKeyValue) -> None:
    """TCPStore ends the connection over one of more than 8 MiB."""
    large = bytes(range(256)) * (36 << 10)
    keys.set("a", large)
    assert keys.get("a") == large
    assert keys.compare_set("b", large) == large
    assert keys.compare_set("b", b"second") == large


def test_nothing_is_left_of_a_large_value(keys: TorchKeyValue) -> None:
    keys.set("before", b"value")
    before = keys._store.num_keys()
    for _ in range(2):
        keys.set("a", bytes(9 << 20))
    keys.compare_set("a", bytes(9 << 20))
    keys.compare_set("b", bytes(9 << 20))
    keys.delete("a")
    keys.delete("b")
    assert keys._store.num_keys() == before


def test_a_large_value_may_be_removed_while_it_is_read(keys: TorchKeyValue) -> None:
    keys.set("a", bytes(9 << 20))
    value = keys._store.get("a")
    keys.delete("a")
    keys._store.set("a", value.decode())
    assert keys.get("a") is None
    assert keys.get_all(["a"]) is None
    with pytest.raises(RanksError, match="a was removed while it was read"):
        keys.compare_set("a", b"value")


def ask_a_store(port_file: str) -> Any:
    """Rank 0 hosts a store and is then stopped or killed; rank 1 asks it."""
    path = Path(port_file)
    if dist.get_rank() == 0:
        host = TCPStore("127.0.0.1", 0, None, True, LIMIT, wait_for_workers=False)
        path.with_suffix(".part").write_text(str(host.port))
        path.with_suffix(".part").rename(path)
        dist.barrier()
        dist.barrier()
        reach("end")
        return None
    dist.barrier()
    keys = TorchKeyValue(TCPStore("127.0.0.1", int(path.read_text()), None, False, LIMIT), "test/", 1)
    keys.set("a", b"value")
    dist.barrier()
    reach("asking")
    start = time.monotonic()
    with pytest.raises(RanksError, match="the store of the process group did not answer") as caught:
        while True:
            keys.get("a")
    return str(caught.value), time.monotonic() - start


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_store_that_ends_or_hangs_is_an_error(tmp_path: Path, number: int) -> None:
    signals = {(0, "end"): [(0, number)]}
    host, asking = run_ranks(2, ask_a_store, str(tmp_path / "port"), signals=signals)
    assert host.signal == signal.SIGKILL
    assert asking.where == ""
    assert asking.value[1] < 10
