"""What lies in a store beside its versions: the root, writers' claims, and attempts that no record completed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cnr_backends import Backend, ObjectNotFoundError
from cnr_store.catalog.catalog import Catalog
from cnr_store.errors import FormatError
from cnr_store.format import layout, validate
from cnr_store.format.arrays import Doc, group_document
from cnr_store.format.layout import ClaimId
from cnr_store.format.state import loads
from cnr_store.maintenance.verification.inspect_version import STATE, leftovers
from cnr_store.maintenance.verification.report import Finding, Leftovers


def check_root(catalog: Catalog) -> tuple[bool, list[Finding]]:
    """Whether readers take the place for a store, and what is wrong with the groups above its versions."""
    backend, opens, findings = catalog.backend, True, []
    try:
        catalog.check_format()
    except FormatError as error:
        opens = False
        what = f"{error}. Until {layout.ROOT_KEY} is restored, or removed, no version can be opened"
        findings.append(Finding(what, key=layout.ROOT_KEY))
    expected = {
        f"{layout.VERSIONS}/{layout.NODE}": group_document(),
        layout.ROOT_KEY: group_document({"cnr": {"format": layout.FORMAT}}),
    }
    for key, doc in expected.items():
        if opens or key != layout.ROOT_KEY:
            findings += _check_group(backend, key, doc)
    return opens, findings


def _check_group(backend: Backend, key: str, doc: Doc) -> Iterator[Finding]:
    try:
        sound = loads(backend.get(key), key) == doc
    except (ObjectNotFoundError, FormatError):
        sound = False
    if not sound:
        what = f"{backend.url}: {key} is lost or altered; plain Zarr readers need it, this library does not"
        yield Finding(what, key=key)


def check_claims(backend: Backend, newest: str) -> Iterator[Finding]:
    """Claims say what their writers lean on, so whoever deletes versions must be able to read them.

    The claim of the `newest` version, or a newer one, must be there: older ones may have been tidied up.
    """
    claims = {claim for name in backend.list_names(layout.WRITERS) if (claim := ClaimId.parse(name))}
    attempt = layout.VersionId.parse(newest)
    if attempt is not None and max(claims, default=ClaimId(0, "")) < attempt.claim:
        key = layout.writer_key(attempt.claim)
        what = f"{backend.url}: {key} is lost; if the writer of {newest} still runs, its next save will fail once"
        yield Finding(what, key=key)
    for claim in sorted(claims):
        key = layout.writer_key(claim)
        try:
            doc = validate.members(loads(backend.get(key), key), "the claim")
            if (doc["generation"], doc["token"]) != (claim.generation, claim.token):
                raise ValueError("it is another one's")
            if doc["base"] is not None:
                validate.version(doc["base"], "base")
            validate.seconds(doc["time"], "time")
        except ObjectNotFoundError:  # removed meanwhile
            continue
        except (KeyError, ValueError) as error:  # FormatError is one
            yield Finding(f"{backend.url}: the claim {key} is damaged: {error}", key=key)


@dataclass(frozen=True)
class Attempt:
    """An id without a commit record: void, never completed, or robbed of its record.

    Attributes
    ----------
    void
        Whether it was given up.
    staged
        Whether its manifest or its state is there, which a save puts behind all its data.
    left
        Its objects; None without any.
    """

    id: str
    void: bool
    staged: bool
    left: Leftovers | None

    @classmethod
    def of(cls, backend: Backend, version: str) -> Attempt:
        place = layout.version_key(version)
        listed = dict(backend.list_keys(place))
        void = listed.pop(layout.record_key(version), None) is not None
        staged = any(layout.version_key(version, name) in listed for name in ("manifest", STATE))
        return cls(version, void, staged, leftovers(place, listed))

    def finding(self, url: str, named_by: str | None) -> Finding:
        """What to think of an attempt that was staged or is named, is not void, and that no tombstone explains."""
        key, home = layout.record_key(self.id), f"version {self.id} of {url}"
        if named_by is not None:
            what = f"{home}: {key} is lost; it was committed, for {named_by} refers to it"
        else:
            what = (
                f"{home}: {key} is missing while what a save puts behind all its data is there: it is lost, or its "
                "writer is about to commit or died then. Without it the version before is the latest"
            )
        return Finding(what, self.id, key)
