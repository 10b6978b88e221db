"""A backend whose keys meet when case-folded, as on the disks of macOS and Windows."""

from __future__ import annotations

import re
import threading

from cnr_backends.backend import Backend
from cnr_backends.wrapper import WrapperBackend

_DEVICE = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", re.IGNORECASE)


class FoldingBackend(WrapperBackend):
    """Passes every operation on to another backend, under the first of all spellings that a key was written in.

    Two keys meet if their segments are equal once case is folded and dots and spaces at their ends are dropped.
    Objects whose keys meet are one object, and folders one folder. Names that Windows keeps for devices (``CON``,
    ``nul.txt``) can't be written.

    Parameters
    ----------
    inner
        The backend that stores the objects.
    """

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self._spelled = {"": ""}
        self._lock = threading.Lock()

    def _place(self, operation: str, key: str) -> str:
        """The key as it was spelled first; a written one is remembered, although nothing lies there yet."""
        new = operation in ("put", "create")
        for segment in key.split("/") if new else ():
            if _DEVICE.fullmatch(segment):
                raise OSError(f"{segment} is a device")
        with self._lock:
            folded = spelled = ""
            for segment in filter(None, key.split("/")):
                folder, folded = spelled, f"{folded}/{_fold(segment)}"
                if folded not in self._spelled:
                    names = {_fold(name): name for name in self.inner.list_names(folder)}
                    name = names.get(_fold(segment), segment)
                    spelled = f"{folder}/{name}" if folder else name
                    if new or _fold(segment) in names:
                        self._spelled[folded] = spelled
                else:
                    spelled = self._spelled[folded]
            return spelled


def _fold(segment: str) -> str:
    return segment.rstrip(". ").casefold()
