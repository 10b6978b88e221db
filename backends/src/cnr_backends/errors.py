"""The errors of cnr_backends, grouped by what a caller does about them.

BackendError
├── OpenError (ValueError)                 fix the URL, the options or the installation
├── KeyNameError (ValueError)              fix the caller: no backend takes this key
├── ArgumentError (ValueError)             fix the caller: another argument is out of range
├── ObjectNotFoundError (FileNotFoundError)   decide what absence means
├── ObjectExistsError (FileExistsError)       another writer was first
├── ShardError (ValueError)                the stored bytes are damaged: restore them from elsewhere
└── StorageError (OSError)                 retry later, or repair the storage
    ├── StorageFullError                   free some space
    └── ObjectTooShortError                the stored bytes are damaged
"""

from __future__ import annotations

import errno

_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})


class BackendError(Exception):
    """Base of the errors that this package raises.

    Attributes
    ----------
    operation
        The operation that failed ("put", "get", ...), or "".
    key
        The key of the object, or "".
    url
        The backend's URL without secrets, or "".
    """

    def __init__(self, message: str, *, operation: str = "", key: str = "", url: str = "") -> None:
        super().__init__(message)
        self.operation = operation
        self.key = key
        self.url = url


class OpenError(BackendError, ValueError):
    """A URL, path or store can't be opened."""


class KeyNameError(BackendError, ValueError):
    """A key breaks the rules for keys."""


class ArgumentError(BackendError, ValueError):
    """An argument other than a key is out of range."""


class ObjectNotFoundError(BackendError, FileNotFoundError):
    """There is no object with that key."""


class ObjectExistsError(BackendError, FileExistsError):
    """An exclusive create found an object of another writer."""


class ShardError(BackendError, ValueError):
    """A shard, its index or one of its chunks is damaged."""


class StorageError(BackendError, OSError):
    """An operation failed. An object that was being written may be stored or not."""


class StorageFullError(StorageError):
    """There is no space left, or the quota is used up."""


class ObjectTooShortError(StorageError):
    """An object ends before the requested bytes."""


def storage_error(error: Exception, advice: str, *, operation: str, key: str, url: str) -> StorageError:
    """Return the StorageError for a failure of the underlying system. Its message ends with `advice`."""
    kind = StorageError
    code = getattr(error, "errno", None)
    if code in _NO_SPACE:
        kind, advice = StorageFullError, "free some space, then try again"
    failure = kind(
        f"{operation} of {key!r} failed in {url} ({type(error).__name__}: {error}); {advice}",
        operation=operation,
        key=key,
        url=url,
    )
    failure.errno = code
    return failure
