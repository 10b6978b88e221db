"""Every error this package raises, by what the caller can do about it.

::

    CheckpointError
    ├── reading: choose another version, or repair the store
    │   ├── EmptyStoreError       (LookupError)   nothing was ever committed here
    │   ├── VersionNotFoundError  (KeyError)      no such version, step or array
    │   ├── FormatError           (ValueError)    not a checkpoint store, or a newer format
    │   └── CorruptionError       (OSError)       an object is lost, cut, swapped or altered
    ├── ranks: call the same on every rank, or restart the job
    │   └── RanksError            (RuntimeError)  ranks disagree, or some failed or did not answer
    ├── writing: training goes on, nothing that was committed is harmed
    │   ├── SaveError             (OSError)       a save failed; its rows stay dirty
    │   │   ├── SkippedError                      another save was under way; the next save has its rows
    │   │   ├── OutageError                       storage did not answer for a while; the next save has its rows
    │   │   ├── BaseLostError                     what it depends on is gone; the next save is whole
    │   │   └── TrackingError                     rows changed untracked; the next save has their table whole
    │   ├── SupersededError       (RuntimeError)  a newer writer owns the store: stop this one
    │   ├── BusyError             (RuntimeError)  the checkpointer was called from within its own call
    │   └── ClosedError           (ValueError)    the checkpointer was closed
    └── arguments: change the call or the model
        ├── OptionError           (ValueError)    a policy, width, pattern or number out of range
        ├── ReadOnlyError         (PermissionError, ValueError)  a version can't be written into
        ├── ModelMismatchError    (ValueError)    the model does not fit what is stored
        ├── UnsupportedModelError (ValueError)    a model that can't be checkpointed
        └── StateError            (TypeError)     a state that can't be written exactly

Storage and payload errors of the layers below (`cnr_backends.BackendError`, `cnr_codecs.CodecError`) come
as the ``__cause__`` of one of these where a version, table or row can be named.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from contextvars import ContextVar

for_shell: ContextVar[bool] = ContextVar("for_shell", default=False)
"""Whether messages name options as the command line does."""
_SHELL_NAMES = {"tables": "table", "stall_seconds": "stall-ms", "failure_seconds": "failure-hours"}


def option(name: str, value: object = True) -> str:
    """An option as the reader of a message types it: ``key='model'``, or ``--key model`` in the shell."""
    if not for_shell.get():
        return f"{name}={value!r}"
    word = f"--{_SHELL_NAMES.get(name, name).replace('_', '-')}"
    values = value if isinstance(value, list) else [value]
    return word if value is True else " ".join(f"{word} {shlex.quote(str(each))}" for each in values)


def listed(names: Iterable[object], most: int = 5) -> str:
    """Names in a message: the first `most`, and how many more there are."""
    shown = [*map(str, names)]
    return ", ".join(shown[:most]) + (f" and {len(shown) - most:,} more" if len(shown) > most else "")


class CheckpointError(Exception):
    """Root of this package's errors."""


class EmptyStoreError(CheckpointError, LookupError):
    """The store holds no committed version."""


class VersionNotFoundError(CheckpointError, KeyError):
    """No committed version, step or array of that name."""

    # KeyError would print the message's repr.
    __str__ = Exception.__str__


class FormatError(CheckpointError, ValueError):
    """The URL holds something else than a checkpoint store, or what needs a newer reader."""


class CorruptionError(CheckpointError, OSError):
    """An object of a committed version is lost, cut, swapped or altered."""


class RanksError(CheckpointError, RuntimeError):
    """The ranks of a job disagree, or some of them failed or did not answer. Every rank that called raises it."""


class SaveError(CheckpointError, OSError):
    """A save failed. The newest committed version is untouched and no changed row is forgotten."""


class SkippedError(SaveError):
    """A save was skipped because another was under way, as ``overlap="skip"`` asks. The next save has its rows."""


class OutageError(SaveError):
    """Storage did not answer a save, or was too busy, for less than ``retry_seconds``. The next save has its rows."""


class BaseLostError(SaveError):
    """The store, or a version that the save depends on, was removed. The next save is whole."""


class TrackingError(SaveError):
    """Rows of a table changed without being tracked. Nothing was written; the next save has the table whole."""


class BusyError(CheckpointError, RuntimeError):
    """The checkpointer was called from within one of its own calls, such as by a signal handler."""


class SupersededError(CheckpointError, RuntimeError):
    """A newer writer has claimed the store. This one may not commit any more."""


class ClosedError(CheckpointError, ValueError):
    """The checkpointer was used after it was closed."""


class OptionError(CheckpointError, ValueError):
    """An option is out of range or contradicts another."""


class ReadOnlyError(CheckpointError, PermissionError, ValueError):
    """Something tried to write into a version, or into a view of one. Versions never change."""


class ModelMismatchError(CheckpointError, ValueError):
    """Names, rows, dims or types of the model differ from what is stored."""


class UnsupportedModelError(CheckpointError, ValueError):
    """A part of the model can't be checkpointed."""


class StateError(CheckpointError, TypeError):
    """A state holds a value that strict JSON with tags can't store exactly."""
