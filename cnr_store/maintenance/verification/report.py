"""The report of `verify`: plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """Something that is wrong, or may be.

    Attributes
    ----------
    what
        The message: what is wrong, where, and what to do.
    version
        The version concerned, None for objects of the store as a whole.
    key
        The object concerned, where it is known.
    path, rows
        The array concerned, and its first and last row concerned, where known.
    row_count
        How many rows it concerns, at most: those that what is damaged may hold. 0 where it concerns none, or where
        nothing tells which.
    versions
        Ids of the versions that can't be restored because of it, oldest first: those whose chains it lies in, unless
        newer versions hold all of these rows.
    """

    what: str
    version: str | None = None
    key: str | None = None
    path: str | None = None
    rows: tuple[int, int] | None = None
    row_count: int = 0
    versions: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.what


@dataclass(frozen=True)
class Leftovers:
    """Objects that no version uses: of saves or folds that did not end, or put there by other programs.

    Attributes
    ----------
    place
        The folder they lie in, such as ``versions/ID``.
    objects, nbytes
        How many there are, and their bytes.
    example
        Key of one of them.
    """

    place: str
    objects: int
    nbytes: int
    example: str


@dataclass(frozen=True)
class VerifyReport:
    """The state of a store, or of one version with everything that it depends on.

    Attributes
    ----------
    deep
        Whether every byte was read. Otherwise only existence and sizes of the objects were compared.
    versions
        Ids of the versions checked, oldest first.
    restorable
        Ids of the versions that can be restored whole, as far as was checked.
    problems
        Damage: every object of a version that is damaged or lost.
    suspicious
        Possible losses: above all attempts that lack little more than their commit record.
    leftovers
        Objects that take room and that no version needs, such as those of saves that crashed or still run.
    voids
        Ids of aborted attempts.
    objects, nbytes
        Objects of the versions checked, and their bytes, as their records say.
    """

    deep: bool
    versions: tuple[str, ...]
    restorable: tuple[str, ...]
    problems: tuple[Finding, ...]
    suspicious: tuple[Finding, ...]
    leftovers: tuple[Leftovers, ...]
    voids: tuple[str, ...]
    objects: int
    nbytes: int

    @property
    def ok(self) -> bool:
        """Whether nothing is damaged."""
        return not self.problems


def find_leftovers(folder: str, listed: Mapping[str, int]) -> Leftovers | None:
    """What remains of a folder's listing, sizes by key, without the objects that are known; None if nothing does."""
    return Leftovers(folder, len(listed), sum(listed.values()), min(listed)) if listed else None
