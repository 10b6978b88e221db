"""The error tree of this distribution, grouped by what a handler would do.

BackendError
├── OpenError (ValueError)                 fix the URL, the options or the installation
├── KeyNameError (ValueError)              fix the caller: no backend takes this key
├── ArgumentError (ValueError)             fix the caller: another argument makes no sense
├── ObjectNotFoundError (FileNotFoundError)   decide what absence means
├── ObjectExistsError (FileExistsError)       somebody else was first
├── ShardError (ValueError)                the stored bytes are damaged: restore them from elsewhere
└── StorageError (OSError)                 retry later, or repair the storage
    ├── StorageFullError                   free some space
    └── ObjectTooShortError                the stored bytes are damaged
"""

from __future__ import annotations


class BackendError(Exception):
    """Root of every error raised by ``cnr_backends``.

    Attributes
    ----------
    operation : str
        The operation that failed ("put", "get", ...), or "".
    key : str
        The key concerned, or "".
    url : str
        The backend's URL without secrets, or "".
    """

    def __init__(self, message: str, *, operation: str = "", key: str = "", url: str = "") -> None:
        super().__init__(message)
        self.operation = operation
        self.key = key
        self.url = url


class OpenError(BackendError, ValueError):
    """A URL, path or store that can't be opened."""


class KeyNameError(BackendError, ValueError):
    """A key that breaks the rules for keys."""


class ArgumentError(BackendError, ValueError):
    """An argument, other than a key, that makes no sense."""


class ObjectNotFoundError(BackendError, FileNotFoundError):
    """There is no object with that key."""


class ObjectExistsError(BackendError, FileExistsError):
    """An exclusive create found an object that somebody else wrote."""


class ShardError(BackendError, ValueError):
    """A shard object, its index or one of its chunks is not sound."""


class StorageError(BackendError, OSError):
    """An operation failed. What was being written may or may not have arrived."""


class StorageFullError(StorageError):
    """There is no space left, or the quota is used up."""


class ObjectTooShortError(StorageError):
    """An object ends before the bytes that were asked for."""
