"""Checks what a store holds beside its versions: the root, writers' claims, and attempts without a record."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cnr_backends import Backend, ObjectNotFoundError
from cnr_store.catalog.catalog import Catalog
from cnr_store.catalog.claims import ClaimRecord, decode_claim, list_claims, store_id
from cnr_store.errors import FormatError
from cnr_store.format import layout, validate
from cnr_store.format.arrays import Doc, group_document
from cnr_store.format.state import loads
from cnr_store.maintenance.verification.inspect_version import STATE
from cnr_store.maintenance.verification.report import Finding, Leftovers, find_leftovers


def check_root(catalog: Catalog) -> tuple[bool, list[Finding]]:
    """Whether readers recognize the store, and what is wrong with the groups above its versions."""
    store = store_id(catalog.backend)
    # Older releases gave a store no text of its own.
    cnr = {"format": layout.FORMAT} | ({"store": store} if store != "-" else {})
    expected = {
        f"{layout.VERSIONS}/{layout.NODE}": group_document(),
        layout.ROOT_KEY: group_document({"cnr": cnr}),
    }
    opens, findings = True, []
    try:
        catalog.check_format()
    except FormatError as error:
        opens = False
        what = f"{error}. Until {layout.ROOT_KEY} is restored, or removed, no version can be opened"
        findings.append(Finding(what, key=layout.ROOT_KEY))
        del expected[layout.ROOT_KEY]
    for key, doc in expected.items():
        findings += _check_group(catalog.backend, key, doc)
    return opens, findings


def _check_group(backend: Backend, key: str, doc: Doc) -> Iterator[Finding]:
    try:
        sound = loads(backend.get(key), key) == doc
    except (ObjectNotFoundError, FormatError):
        sound = False
    if not sound:
        yield Finding(
            f"{backend.url}: {key} is lost or altered; plain Zarr readers need it, this library does not",
            key=key,
        )


def check_claims(backend: Backend, newest: str) -> Iterator[Finding]:
    """Whether claims can be read: they say what their writers depend on, and retention must know that.

    The claim of the `newest` version, or a newer one, must be there. Older ones may have been deleted by retention.
    """
    names = list_claims(backend)
    attempt = layout.VersionId.parse(newest)
    # A claim of an older release has its token in its name.
    if attempt is not None and max(names, default="") < layout.claim_name(attempt.claim.generation):
        key = layout.writer_key(layout.claim_name(attempt.claim.generation))
        what = f"{backend.url}: {key} is lost; if the writer of {newest} still runs, its next save will fail once"
        yield Finding(what, key=key)
    for name in names:
        key, claim = layout.writer_key(name), None
        try:
            claim = decode_claim(backend.get(key), name)
        except ObjectNotFoundError:  # deleted meanwhile
            continue
        except ValueError as error:  # FormatError is one
            yield Finding(f"{backend.url}: the claim {key} is damaged: {error}", key=key)
        yield from _check_mark(backend, claim, layout.writer_key(name, layout.CLOSED))


def _check_mark(backend: Backend, claim: ClaimRecord | None, key: str) -> Iterator[Finding]:
    try:
        mark = validate.proven(loads(backend.get(key), key), dict, "it")
        if mark.keys() != {"token", "time"} or (claim is not None and mark["token"] != claim.id.token):
            raise ValueError("it is another claim's")
        validate.proven(mark["time"], validate.Time, "time")
    except ObjectNotFoundError:  # its run is open
        return
    except ValueError as error:  # FormatError is one
        yield Finding(
            f"{backend.url}: {key}, which says that a run is over, is damaged ({error}), so the run may count as open",
            key=key,
        )


@dataclass(frozen=True)
class Attempt:
    """An id without a commit record: its save was aborted, did not end, or its record is missing.

    Attributes
    ----------
    void
        Whether a void record says that it was aborted.
    staged
        Whether its manifest or its state is there, which a save writes after all data.
    left
        Its objects; None if it has none.
    """

    id: str
    void: bool
    staged: bool
    left: Leftovers | None

    @classmethod
    def from_listing(cls, version: str, listed: dict[str, int]) -> Attempt:
        """The attempt whose folder holds these objects, sizes by key. The record's is removed from them."""
        void = listed.pop(layout.record_key(version), None) is not None
        staged = any(layout.version_key(version, name) in listed for name in ("manifest", STATE))
        return cls(version, void, staged, find_leftovers(layout.version_key(version), listed))

    def finding(self, url: str, named_by: str | None) -> Finding:
        """The loss, sure or possible, of an attempt's record. For attempts that neither void nor tombstone explains."""
        key, home = layout.record_key(self.id), f"version {self.id} of {url}"
        if named_by is not None:
            what = f"{home}: {key} is lost; it was committed, for {named_by} refers to it"
        else:
            what = (
                f"{home}: {key} is missing while what a save writes after all its data is there: it is lost, or its "
                "writer is about to commit, or died then. Without it the version before is the latest"
            )
        return Finding(what, self.id, key)
