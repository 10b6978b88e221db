"""What a backend does when its storage fills up, or fails in the middle of a write."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from cnr_backends.errors import StorageFullError

Result = TypeVar("Result")


class Room:
    """The part of every backend that holds room back for small objects, and minds folders and syncs.

    Here it does nothing, as on object stores.

    A backend that passes operations on to another one passes these on as well.
    """

    def hold_reserve(self) -> None:
        """Hold some room back, if the storage can fill up and has room. A failure is no error."""
        return

    def shrink_reserve(self) -> bool:
        """Give up a part of the room that is held back. Return whether there was any."""
        return False

    def prepare(self, key: str) -> None:
        """Make the folder of an object that will be put, which then takes less time. A failure is no error.

        Parameters
        ----------
        key
            Of the object.
        """
        return

    def sweep(self, prefix: str) -> None:
        """Remove what crashed writers left below ``prefix/`` that is no object: temporary files, empty folders.

        Parameters
        ----------
        prefix
            A folder that nobody writes to any more. Its objects are left as they are.
        """
        return

    def confirm(self, key: str) -> None:
        """Make an object durable that is there although its write has failed, as where only the last sync did.

        Parameters
        ----------
        key
            Of the object.

        Raises
        ------
        StorageError
            It may be lost in a crash.
        """
        return

    def with_reserve(self, write: Callable[[], Result]) -> Result:
        """Return ``write()``. While the storage is full, give up some of the reserve and try again.

        Parameters
        ----------
        write
            Writes a small object.

        Raises
        ------
        StorageFullError
            There is no room without the reserve either.
        """
        while True:
            try:
                return write()
            except StorageFullError:
                if not self.shrink_reserve():
                    raise
