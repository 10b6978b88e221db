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
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

_READS = frozenset({"get", "get_range", "get_suffix", "size"})
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
_NETWORK = frozenset(
    {
        *(errno.ETIMEDOUT, errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED, errno.EPIPE),
        *(errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETRESET, errno.ENETDOWN),
    }
)
_NETWORK_TYPES = frozenset(
    {
        *("TimeoutError", "ConnectionError"),  # of Python, botocore and requests
        *("HTTPClientError", "ClientConnectionError", "ClientPayloadError"),  # botocore, aiohttp
        *("ServiceRequestError", "ServiceResponseError"),  # azure
    }
)
"""Names of classes: drivers raise exceptions of their own, and this package imports no driver."""
_BUSY_STATUS = frozenset({408, 429, 500, 502, 503, 504})
_BUSY_CODES = frozenset({"SlowDown", "RequestTimeout", "Throttling", "ServiceUnavailable", "InternalError"})


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
    """An operation failed. An object that was being written may be stored or not.

    Attributes
    ----------
    transient
        Whether the network or a busy server failed, so that the same operation may succeed in a while.
    """

    transient = False


class StorageFullError(StorageError):
    """There is no space left, or the quota is used up."""


class ObjectTooShortError(StorageError):
    """An object ends before the requested bytes."""


def storage_error(error: Exception, advice: str, *, operation: str, key: str, url: str) -> StorageError:
    """Return the StorageError for a failure of the underlying system. Its message ends with `advice`."""
    kind = StorageError
    code = getattr(error, "errno", None)
    if code in _NO_SPACE:
        kind = StorageFullError
        advice = "free some space, then try again"
    reason = f"{type(error).__name__}: {error}"
    if isinstance(error, NotImplementedError) and not str(error):
        reason, advice = (
            "this kind of storage can't",
            "copy the store to a folder or a bucket, and do it there",
        )
    failure = kind(
        f"{operation} of {key!r} failed in {url} ({reason}); {advice}",
        operation=operation,
        key=key,
        url=url,
    )
    failure.errno = code
    failure.transient = kind is StorageError and _is_transient(error)
    return failure


class Guarded:
    """The part of every backend that raises failures of the underlying system as errors of this distribution."""

    url: str

    _failures: ClassVar[tuple[type[Exception], ...]] = (OSError,)
    """What the methods that begin with an underscore raise when the underlying system fails."""

    def _is_missing(self, error: Exception) -> bool:
        """Whether a failed read means that there is no such object. A folder is not an object."""
        return isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError)

    def _advice(self, error: Exception) -> str:
        """Return what to do about `error`, as the end of a message. No server answered that it is busy."""
        return "check the storage and its permissions, then try again"

    def _ending(self, error: Exception) -> str:
        """Return the end of the message about any `error`."""
        if _answered_busy(error):
            return "the server is busy or failed: try again in a while"
        return self._advice(error)

    @contextmanager
    def _guard(self, operation: str, key: str) -> Iterator[None]:
        try:
            yield
        except BackendError:
            raise
        except self._failures as error:
            raise self._translated(error, operation, key) from error

    def _translated(self, error: Exception, operation: str, key: str) -> BackendError:
        if operation in _READS and self._is_missing(error):
            return ObjectNotFoundError(
                f"no object {key!r} in {self.url}", operation=operation, key=key, url=self.url
            )
        return storage_error(error, self._ending(error), operation=operation, key=key, url=self.url)


def _is_transient(error: BaseException | None) -> bool:
    """Whether the network or a busy server caused `error`."""
    if (is_busy := _answered_busy(error)) is not None:
        return is_busy
    while error is not None:
        names = {each.__name__ for each in type(error).__mro__}
        if names & _NETWORK_TYPES or getattr(error, "errno", None) in _NETWORK:
            return True
        error = error.__cause__
    return False


def _answered_busy(error: BaseException | None) -> bool | None:
    """Whether a server answered that it is busy or failed; None if none answered."""
    status, code = server_answer(error)
    return None if status is None else status in _BUSY_STATUS or code in _BUSY_CODES


def server_answer(error: BaseException | None) -> tuple[int | None, str]:
    """The HTTP status and the code that a server answered with; (None, "") if none answered.

    Drivers keep a server's answer in one of the causes of their errors.
    """
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):  # botocore
            code = str(response.get("Error", {}).get("Code", ""))
            return response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0), code
        for name in ("status", "status_code", "code"):  # aiohttp, azure, gcsfs
            if isinstance(status := getattr(error, name, None), int):
                return status, ""
        error = error.__cause__
    return None, ""
