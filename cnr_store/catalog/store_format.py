"""Whether a backend holds a store, and of which format."""

from __future__ import annotations

import logging

from cnr_backends import Backend, ObjectNotFoundError
from cnr_store.errors import FormatError
from cnr_store.format import layout
from cnr_store.format.state import loads
from cnr_store.format.validate import member, shown

log = logging.getLogger("cnr_store")
_ZARR_2_NODES = frozenset({".zgroup", ".zarray", ".zmetadata"})


def check_format(backend: Backend) -> bool:
    """See `cnr_store.catalog.catalog.Catalog.check_format`."""
    try:
        doc = loads(backend.get(layout.ROOT_KEY), f"{backend.url}/{layout.ROOT_KEY}")
    except ObjectNotFoundError:
        _refuse_older_zarr(backend)
        return False
    except FormatError as error:
        raise FormatError(f"{error}; restore that object, or choose another URL") from error
    cnr = member(member(doc, "attributes"), "cnr")
    number = member(cnr, "format")
    if number is None:
        raise FormatError(
            f"{backend.url} holds a Zarr hierarchy that is not a checkpoint store ({layout.ROOT_KEY} has "
            "no attributes.cnr); choose another URL"
        )
    if "id" in cnr:
        raise FormatError(f"{backend.url} is one version of a store; give the URL of the store above it")
    if number != layout.FORMAT:
        raise FormatError(
            f"{backend.url} holds format {shown(number)}; this release reads format {layout.FORMAT}: "
            "install a newer cnr-store"
        )
    return True


def tell_of_no_store(url: str) -> None:
    """Say in the log that a place holds nothing, to whom got an empty answer for it."""
    log.warning("%s holds no store: check the URL, if something was saved there", url)


def _refuse_older_zarr(backend: Backend) -> None:
    # A hierarchy of Zarr version 2 has no object that version 3 looks for, so it would seem empty.
    nodes = sorted(_ZARR_2_NODES.intersection(backend.list_names("")))
    if nodes:
        raise FormatError(
            f"{backend.url} holds a Zarr hierarchy of version 2 ({', '.join(nodes)}), not a checkpoint "
            "store; choose another URL"
        )
