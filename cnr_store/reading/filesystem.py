"""A version as files, for programs that open fsspec URLs: ``cnr://tables/NAME/weight::s3://bucket/run``."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, ClassVar, Never

from fsspec.spec import AbstractBufferedFile, AbstractFileSystem, make_instance
from zarr.abc.store import Store

from cnr_backends import StorageError
from cnr_store.catalog.catalog import Version
from cnr_store.errors import OptionError, ReadOnlyError, VersionNotFoundError
from cnr_store.reading.opening import view
from cnr_store.reading.overlay import Overlay


class CnrFileSystem(AbstractFileSystem):  # type: ignore[misc]  # fsspec ships no types
    """Read-only filesystem of one version, seen as plain Zarr.

    ``fsspec.url_to_fs("cnr://PATH::URL", version=..., s3={...})`` makes one: the store is at ``URL``, and its
    options stand under its protocol, as in all chained URLs. "latest" is resolved at that moment.

    `fo`: where the store is: a URL, a path or a Zarr store; or the result of `cnr_store.view`.
    `target_protocol`, `target_options`: protocol of `fo`, if it is a bare path, and storage options.
    `version`: an id, a step, a `VersionInfo`, or "latest".
    """

    protocol: ClassVar[str] = "cnr"
    # An instance stays at its version, while "latest" may be another version next time.
    cachable = False

    def __init__(
        self,
        fo: str | Store = "",
        target_protocol: str | None = None,
        target_options: dict[str, Any] | None = None,
        version: Version = "latest",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.store = fo if isinstance(fo, Overlay) else _open(fo, target_protocol, target_options, version)

    def __reduce__(self) -> tuple[Callable[..., CnrFileSystem], tuple[Any, ...]]:
        return make_instance, (type(self), (self.store,), {})

    @property
    def fsid(self) -> str:
        """The version, and where its store is."""
        return str(self.store)

    @property
    def _fs_token(self) -> str:
        return hashlib.sha256(self.fsid.encode()).hexdigest()

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        # All paths but the root begin with a slash, because zarr cuts the root and a slash off the names below it.
        bare = super()._strip_protocol(path)
        return bare if isinstance(bare, list) else f"/{key}" if (key := bare.strip("/")) else ""

    def _key(self, path: str) -> str:
        return str(self._strip_protocol(path))[1:]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Name, size in bytes and type of an object or a folder."""
        name, key = self._strip_protocol(path), self._key(path)
        if not key or next(iter(self.store.names(key)), None) is not None:
            return {"name": name, "size": 0, "type": "directory"}
        return {"name": name, "size": self.store.require(key, "get"), "type": "file"}

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """The objects and folders immediately under a folder, or the object itself."""
        info = self.info(path)
        name = info["name"]
        if info["type"] == "file":
            return [info] if detail else [name]
        children = [f"{name}/{child}" for child in self.store.names(self._key(path))]
        return [self.info(child) for child in children] if detail else children

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        """Bytes of an object, or a slice of them. Only the rows of the slice are fetched and decoded."""
        key = self._key(path)
        try:
            first, last, _step = slice(start, end).indices(self.store.require(key, "get"))
            return bytes(self.store.read(key, first, max(first, last)))
        except VersionNotFoundError as error:  # a KeyError, of which mappings make an object that never was
            raise StorageError(str(error)) from error

    def ukey(self, path: str) -> str:
        """Key for caches. It differs where the version, or the shape of its chunks, differs."""
        text = f"{self.fsid}\n{self.store.fingerprint(self._key(path))}"
        return hashlib.sha256(text.encode()).hexdigest()

    def _open(self, path: str, mode: str = "rb", **options: Any) -> _File:
        if mode != "rb":
            self._refuse(path)
        return _File(self, path, mode, **options)

    def _refuse(self, path: Any, *_: Any, **__: Any) -> Never:
        raise ReadOnlyError(f"{path}: versions never change; save a new one instead")

    mkdir = makedirs = rmdir = rm = rm_file = _rm = cp_file = mv = _refuse


class _File(AbstractBufferedFile):  # type: ignore[misc]  # fsspec ships no types
    """An object, read block by block."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        return bytes(self.fs.cat_file(self.path, start, end))


def _open(
    place: str | Store, protocol: str | None, options: dict[str, Any] | None, version: Version
) -> Overlay:
    if not place:
        raise OptionError("cnr:// needs the URL of a store: give it, too, as in cnr://::s3://bucket/run")
    bare = isinstance(place, str) and protocol is not None and "://" not in place
    url = f"{protocol}://{place}" if bare else place
    return view(url, version, **(options or {}))
