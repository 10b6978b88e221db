"""What `verify` found: plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """Something that is wrong, or may be.

    Attributes
    ----------
    what
        For people: what is wrong, where, and what to do.
    version
        The version concerned, None for objects of the store as a whole.
    key
        The object concerned, where it is known.
    path, rows
        Array of the version, and its first and last row concerned, where known.
    """

    what: str
    version: str | None = None
    key: str | None = None
    path: str | None = None
    rows: tuple[int, int] | None = None

    def __str__(self) -> str:
        return self.what


@dataclass(frozen=True)
class Leftovers:
    """Objects that no version knows: of saves or folds that never came to an end, or put there by others.

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
    """What a store, or one version with all that it leans on, was found to be.

    Attributes
    ----------
    deep
        Whether every byte was read, or only the objects' existence and sizes compared.
    versions
        Ids of the versions checked, oldest first.
    restorable
        Those of them that can be restored as a whole, as far as was looked.
    problems
        What is damaged. Every damage of data, and every object of a version that is lost.
    suspicious
        What may be a loss, or nothing: above all attempts that lack little more than their commit record.
    leftovers
        What takes room and is needed by no version, such as the objects of saves that crashed or still run.
    voids
        Ids of attempts that were given up.
    objects, nbytes
        Objects that versions consist of, and their bytes, as their records say.
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
