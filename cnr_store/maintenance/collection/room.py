"""What to do about a full store: which versions `gc` could remove."""

from __future__ import annotations

import shlex
from contextlib import suppress

from cnr_backends import Backend, BackendError
from cnr_store.catalog.catalog import Catalog
from cnr_store.errors import CheckpointError
from cnr_store.maintenance.collection.retention import Retention
from cnr_store.maintenance.collection.rules import Rules


def room_advice(backend: Backend) -> str:
    """The command that makes room in a full store for a version like its largest, and what it removes.

    It keeps the newer half of the versions, or of these the newer half, and so on. "" if the store can't be read.
    """
    with suppress(BackendError, CheckpointError):
        records = Catalog(backend).oldest_first()
        keep, wanted = len(records), max((record.nbytes for record in records), default=0)
        while True:
            keep = max(1, keep // 2)
            found = Retention(backend, Rules(keep_last=keep)).run(dry_run=True)
            if found.freed_bytes >= wanted or keep == 1:
                break
        if found.freed_bytes <= 0:
            return (
                "Nothing of this store can be removed: make room elsewhere, or give the store another place"
            )
        removed = found.removed
        which = f", from {removed[0]} to {removed[-1]}" if removed else ""
        return (
            f"`cnr gc {shlex.quote(backend.url)} --keep-last {keep}` frees {found.freed_bytes:,} bytes: it removes "
            f"{len(removed)} of {len(records)} versions{which}; with --dry-run it only shows them"
        )
    return ""
