"""Notices that a folder is on another filesystem than before: where a mount is lost, a folder is left to write to."""

from __future__ import annotations

import errno
import os


class LostFolderError(OSError):
    """A folder is on another filesystem, without what was in it."""


class FolderWatch:
    """Tells a mount that was lost from one that was made again.

    Parameters
    ----------
    folder
        It need not exist yet.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._known = ""
        self._device = self._look()

    def note(self, key: str) -> None:
        """Keep in mind that there is a file with this path in the folder."""
        self._known = key

    def check(self) -> None:
        """Look whether the folder, or the place where it would be made, is on the filesystem on which it was.

        What was mounted anew may have another number, but it has the files that were there.

        Raises
        ------
        LostFolderError
            It is on another filesystem, without a file that was there.
        """
        device, known = self._look(), self._known
        if device == self._device:
            return
        if known and not os.path.exists(os.path.join(self._folder, known)):  # noqa: PTH110, PTH118 - Path takes twice as long
            raise LostFolderError(
                errno.ESTALE, f"the folder is on another filesystem than before, and {known!r} is not there"
            )
        self._device = device

    def _look(self) -> int:
        place = self._folder
        while True:
            try:
                return os.stat(place).st_dev  # noqa: PTH116 - as above
            except FileNotFoundError:
                place = os.path.dirname(place)  # noqa: PTH120 - as above
