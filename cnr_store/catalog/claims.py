"""Claims: each run's right to write, as an object of the store.

A claim is the object ``writers/NUMBER``, created exclusively, so each number is one writer's. `fencing` says who may
create which, and who may commit.

A claim also announces what its writer depends on: the version named as its base until its first commit, then its
newest version and what that one needs. Retention keeps those, until the claim is closed or ended.
"""

from __future__ import annotations

import logging
import os
import platform
import secrets
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from cnr_backends import Backend, ObjectExistsError, ObjectNotFoundError
from cnr_store.catalog.objects import list_marked, read_object
from cnr_store.errors import CorruptionError, FormatError, SaveError, SupersededError
from cnr_store.format import layout
from cnr_store.format.arrays import Doc, document_bytes, group_document
from cnr_store.format.layout import ClaimId, VersionId
from cnr_store.format.state import dumps, loads
from cnr_store.format.validate import Time, VersionText, member, proven, shown
from cnr_store.policies.checks import Natural

log = logging.getLogger("cnr_store")

# What this process has claimed: its id and the token. A fork is another process.
_claimed: set[tuple[int, str]] = set()


@dataclass
class Claim:
    """One run's right to write. It gives out attempt numbers, each once."""

    id: ClaimId
    _next: int = field(default=1, repr=False)

    def next_version(self) -> str:
        """The id for one attempt at a version. No id is given twice, whatever becomes of the attempt."""
        version = VersionId(self.id, self._next)
        self._next += 1
        return str(version)


@dataclass(frozen=True)
class ClaimRecord:
    """What a claim's object says."""

    id: ClaimId
    base: VersionText | None  # the version that its writer started from, None if it started anew
    time: Time  # when it was made, in seconds since 1970
    host: str  # host, pid: who made it
    pid: Natural
    ends: Natural | None  # the number of the claim that it ends, if it does nothing else
    closed: bool = False  # whether its writer said that it is done

    @property
    def is_over(self) -> bool:
        """Whether nobody writes under it any more, so that it holds nothing."""
        return self.closed or self.ends is not None

    def __str__(self) -> str:
        return f"{self.id} (process {self.pid} on {shown(self.host)})"


def is_own(claim: ClaimId) -> bool:
    """Whether this process made a claim."""
    return (os.getpid(), claim.token) in _claimed


def is_own_version(version: str) -> bool:
    """Whether this process made the claim of a version."""
    attempt = VersionId.parse(version)
    return attempt is not None and is_own(attempt.claim)


def create_claim(backend: Backend, claim: ClaimId, base: str | None, ends: int | None = None) -> bool:
    """Create a claim, and the store if there is none. False if another writer has the number."""
    name = layout.claim_name(claim.generation)
    if claim.generation > layout.MAX_GENERATION:
        last = max(list_claims(backend), default=layout.claim_name(layout.MAX_GENERATION))
        raise SaveError(
            f"{backend.url}: {last} uses the last generation number; if no writer of this store made it, remove "
            f"{layout.writer_key(last)}"
        )
    try:
        now: float = proven(time.time(), Time, "the time of this machine's clock")
    except ValueError as error:
        raise SaveError(f"nothing can be saved to {backend.url}: {error}; set the clock") from error
    root = group_document(
        {"cnr": {"format": layout.FORMAT, "store": layout.store_text(secrets.token_hex(4))}}
    )
    for key, node in ((layout.ROOT_KEY, root), (f"{layout.VERSIONS}/{layout.NODE}", group_document())):
        with suppress(ObjectExistsError):
            backend.create(key, document_bytes(node))
    doc = {"generation": claim.generation, "token": claim.token, "base": base, "time": now}
    host = platform.node().encode(errors="backslashreplace").decode()  # its bytes may be no UTF-8
    doc |= {"host": host, "pid": os.getpid(), "ends": ends}
    _claimed.add((os.getpid(), claim.token))  # before: it may be created although the response is lost
    with suppress(ObjectExistsError):
        backend.with_reserve(lambda: backend.create(layout.writer_key(name), dumps(doc)))
        if backend.atomic_create:
            return True
    try:
        return read_claim(backend, name).id == claim
    except CorruptionError:
        return False


def end_run(backend: Backend, newest: ClaimRecord) -> None:
    """Make a claim that only ends the newest one: its writer can't commit any more, and it holds nothing."""
    ended = newest.id.generation
    if not create_claim(backend, ClaimId(ended + 1, secrets.token_hex(4)), None, ends=ended):
        raise SupersededError(
            f"{backend.url}: another writer has claimed the store since {newest}, so no run was ended; look which "
            "job it is, then try again"
        )
    backend.hold_reserve()


def close(backend: Backend, claim: ClaimId) -> None:
    """Mark a claim closed. Its writer is done: nothing is kept for it. A failure is only logged.

    Where the claim is another's or gone, the store was removed or made anew, and nothing is written.
    """
    name = layout.claim_name(claim.generation)
    try:
        if decode_claim(backend.get(layout.writer_key(name)), name).id == claim:
            backend.put(
                layout.writer_key(name, layout.CLOSED), dumps({"token": claim.token, "time": time.time()})
            )
    except ObjectNotFoundError:
        log.debug("claim %s is gone, so it was not marked closed", claim)
    except Exception as error:  # noqa: BLE001 - its saves are done, and the mark only spares space
        log.warning(
            "claim %s could not be marked closed, so retention still keeps what this run needed: %s",
            claim,
            error,
        )


def check_no_live_writer(backend: Backend) -> None:
    """Refuse to write beside a job that is or may be live."""
    newest = newest_claim(backend)
    if newest is not None and not newest.is_over:
        raise SupersededError(
            f"{backend.url}: writer {newest} has not closed its claim, as a Checkpointer does at its end, so it may "
            "still train and save. Wait until that job has ended, or stop it; if it died, end its run with "
            f"`cnr gc --end-run {backend.url}`. Then try again"
        )


def store_id(backend: Backend) -> str:
    """What tells a store from one that was made anew at its place.

    "" where there is none; "-" where the text was altered.
    """
    try:
        data = backend.get(layout.ROOT_KEY)
    except ObjectNotFoundError:
        return ""
    try:
        found = member(member(member(loads(data, "it"), "attributes"), "cnr"), "store")
    except FormatError:
        return "-"  # whoever opens it says what is wrong
    return found if isinstance(found, str) and found == layout.store_text(found[:8]) else "-"


def list_tombstoned(backend: Backend) -> frozenset[str]:
    """Versions that carry a tombstone: they are deleted, or may be at any moment."""
    return list_marked(backend, layout.TOMBSTONES)


def list_claims(backend: Backend) -> list[str]:
    """Names of all claims on the store, oldest first."""
    return _claim_names(backend.list_names(layout.WRITERS))


def newest_claim(backend: Backend) -> ClaimRecord | None:
    """The newest claim, None if nobody ever wrote."""
    names = backend.list_names(layout.WRITERS)
    claims = _claim_names(names)
    if not claims:
        return None
    newest = read_claim(backend, claims[-1])
    if f"{claims[-1]}{layout.CLOSED}" not in names:
        return newest
    with suppress(ObjectNotFoundError, FormatError):  # a mark that can't be read closes nothing
        mark = loads(backend.get(layout.writer_key(claims[-1], layout.CLOSED)), "the mark of a claim")
        return replace(newest, closed=member(mark, "token") == newest.id.token)
    return newest


def read_claim(backend: Backend, name: str) -> ClaimRecord:
    """What the claim of this name says. `CorruptionError` if it is lost, or malformed."""
    key = layout.writer_key(name)
    try:
        return decode_claim(read_object(backend, key, f"writer {name}"), name)
    except ValueError as error:  # FormatError is one
        raise CorruptionError(
            f"{backend.url}: {key} is malformed ({error}); if its writer has ended, remove it"
        ) from error


def decode_claim(data: bytes, name: str) -> ClaimRecord:
    """A claim from the bytes of its object. `ValueError` if it is malformed, or another claim's."""
    doc: Doc = proven(loads(data, "it"), Doc, "it")
    claim = ClaimId(int(name), proven(doc.get("token"), str, "token"))
    if doc.get("generation") != claim.generation or ClaimId.parse(str(claim)) is None:
        raise ValueError("it belongs to another claim")
    found: ClaimRecord = proven({**doc, "id": claim, "closed": False}, ClaimRecord, "it")
    return found


def _claim_names(names: Iterable[str]) -> list[str]:
    return sorted(filter(layout.is_claim, names))
