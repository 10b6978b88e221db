"""Storage that is held up or fails where a test wants it to."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fsspec.implementations.memory import MemoryFileSystem

from cnr_backends.testing.faulty import Decide, Fault
from tests.nightly import NIGHT, of_today

_RECORD = re.compile(r"versions/[0-9]{6}-[0-9a-f]{8}\.[0-9]{8}/zarr\.json")
_CHANGES = ("put", "create", "delete")
_PATIENCE_SECONDS = 60
_NUMBERS = re.compile(r"[0-9a-f]{8}|[0-9]+")


@dataclass
class Spoil:
    """One fault of a save.

    Attributes
    ----------
    where
        Which operation: its number from 0, or a part of its key (``record`` stands for the commit record's).
    kind
        ``before``, ``after`` or ``full``, as `FaultyBackend` knows them.
    then
        What befalls every later operation; None if storage is sound again.
    operation, key
        The operation that was hit; "" before it is.
    while_saving
        Whether it was hit before `save` had returned.
    """

    where: int | str
    kind: Fault
    then: Fault = None
    operation: str = ""
    key: str = ""
    while_saving: bool = False
    _count: int = 0

    def __call__(self, operation: str, key: str) -> Fault:
        if self.struck:
            return self.then
        self._count += 1
        if not self._here(key):
            return None
        self.operation, self.key = operation, key
        return self.kind

    def _here(self, key: str) -> bool:
        if isinstance(self.where, int):
            return self._count - 1 == self.where
        return _is_record(key) if self.where == "record" else self.where in key

    @property
    def struck(self) -> bool:
        return self.operation != ""

    @property
    def committed(self) -> bool:
        """Whether only the answer to the commit was lost."""
        return self.operation == "create" and self.kind == "after" and _is_record(self.key)

    @property
    def unknown(self) -> bool:
        """Whether the version exists although its writer can't know."""
        return self.committed and self.then is not None

    @property
    def asked_early(self) -> bool:
        """Whether it was a read, or a group's document, that the save makes before it is planned, and again later."""
        is_made_again = self.operation not in _CHANGES or self.key in ("zarr.json", "versions/zarr.json")
        return self.while_saving and self.then is None and is_made_again

    @property
    def fatal(self) -> bool:
        """Whether the save must fail: it was hit, and not just after it was complete."""
        return self.struck and not self.asked_early and (not self.committed or self.then is not None)


def _is_record(key: str) -> bool:
    return _RECORD.fullmatch(key) is not None


def fault_at(number: int, kind: Fault, then: Fault = None) -> Decide:
    """A fault of one storage operation, counted from 0, and what befalls every later one."""
    return lambda _operation, _key, index: kind if index == number else (then if index > number else None)


def to_strike(log: Sequence[tuple[str, str]]) -> list[int]:
    """Which operations of a log to strike: one of each sort, on each day another; at night all.

    Of one sort are those of one name on objects of one room and of one name but for its numbers.
    """
    if NIGHT:
        return list(range(len(log)))
    sorts: dict[tuple[str, ...], list[int]] = {}
    for number, (operation, key) in enumerate(log):
        room, name = key.partition("/")[0], key.rpartition("/")[2]
        sorts.setdefault((operation, room, _NUMBERS.sub("", name)), []).append(number)
    return sorted(number for found in sorts.values() for number in of_today(found, 1))


class Weather:
    """What befalls the operations of a `FaultyBackend`; it can be changed at any time."""

    def __init__(self) -> None:
        self._spoil: Callable[[str, str], Fault] | None = None
        self._is_saving = False
        self._open = threading.Event()
        self._open.set()
        self._lock = threading.Lock()

    def change(self, spoil: Callable[[str, str], Fault] | None, hold: bool = False) -> None:
        """From here on operations, by name and key, are spoiled like this; held ones wait for `release`."""
        self._spoil, self._is_saving = spoil, spoil is not None
        if hold:
            self._open.clear()
        else:
            self._open.set()

    def returned(self) -> None:
        """`save` has returned."""
        self._is_saving = False

    def release(self) -> None:
        self._open.set()

    def __call__(self, operation: str, key: str, _: int) -> Fault:
        # The first save after a load claims the store, and looks for what it depends on, while training waits.
        waits = operation == "put" or (
            operation in _CHANGES and threading.current_thread() is not threading.main_thread()
        )
        if waits and not self._open.wait(_PATIENCE_SECONDS):
            return "before"
        with self._lock:
            if self._spoil is None:
                return None
            was_struck = getattr(self._spoil, "struck", True)
            fault = self._spoil(operation, key)
            if isinstance(self._spoil, Spoil) and self._spoil.struck and not was_struck:
                self._spoil.while_saving = self._is_saving or not self._open.is_set()
            return fault


def forget(url: str) -> None:
    """Remove everything under a ``memory://`` URL; listings there take as long as there are objects anywhere."""
    prefix = f"{MemoryFileSystem._strip_protocol(url)}/"
    for key in [key for key in MemoryFileSystem.store if key.startswith(prefix)]:
        del MemoryFileSystem.store[key]
