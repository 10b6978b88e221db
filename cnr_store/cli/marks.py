"""`cnr pin`, `unpin`, `tag` and `untag`: versions that stay, and their names."""

from __future__ import annotations

from typing import Annotated

import typer

from cnr_store.cli.facts import open_store
from cnr_store.cli.options import AsJson, StorageOptions, Url, VersionName, parse_options, parse_version
from cnr_store.cli.output import print_json, print_line, say
from cnr_store.format.layout import is_tag
from cnr_store.maintenance.collection import pins, tags

TagName = Annotated[str, typer.Argument(metavar="NAME", help="1 to 100 characters of a-z, 0-9, _, . and -.")]
Reason = Annotated[str | None, typer.Option(metavar="TEXT", help="The reason, in one line; cnr ls shows it.")]


def pin(
    url: Url,
    version: VersionName = "latest",
    reason: Reason = None,
    options: StorageOptions = "{}",
    as_json: AsJson = False,
) -> None:
    """Keep a version regardless of the rules of retention."""
    pinned = pins.pin(url, parse_version(version), reason=reason, **parse_options(options))
    _print_done(f"{pinned}: pinned", as_json, version=pinned, pinned=True, reason=reason)


def unpin(url: Url, version: VersionName, options: StorageOptions = "{}", as_json: AsJson = False) -> None:
    """Let the rules of retention remove a pinned version again."""
    unpinned = pins.unpin(url, parse_version(version), **parse_options(options))
    _print_done(f"{unpinned}: not pinned any more", as_json, version=unpinned, pinned=False)


def tag(
    url: Url,
    name: TagName,
    version: VersionName = "latest",
    options: StorageOptions = "{}",
    as_json: AsJson = False,
) -> None:
    """Give a version a name, and keep it regardless of the rules of retention. An existing name is moved.

    NAME and VERSION may also stand the other way round where only one of them can be a name.
    """
    if not is_tag(name) and is_tag(version):
        name, version = version, name
        say(f"cnr: took {name} for NAME and {version} for VERSION")
    tagged = tags.tag(url, name, parse_version(version), **parse_options(options))
    _print_done(f"{tagged}: tagged {name}", as_json, version=tagged, tag=name)


def untag(url: Url, name: TagName, options: StorageOptions = "{}", as_json: AsJson = False) -> None:
    """Remove a tag. The rules of retention may then remove the version."""
    tags.untag(open_store(url, parse_options(options)).backend, name)
    _print_done(f"{name}: no tag any more", as_json, version=None, tag=name)


def _print_done(text: str, as_json: bool, **document: object) -> None:
    if as_json:
        print_json(document)
    else:
        print_line(text)
