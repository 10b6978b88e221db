"""A payload whose codes are written in place.

CPython has no public way to make a `bytes` object without filling it first. Filling new memory takes milliseconds
for a large chunk, and Python's lock is held meanwhile: training would stand still. The C interface allows to write to
a new `bytes` object until other code has seen it, and this module does that. A view of a numpy array would need none
of this, but it is no `bytes`: it can't be pickled, hashed or joined to other bytes.
"""

from __future__ import annotations

import ctypes

import numpy as np

_new_bytes = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_char_p, ctypes.c_ssize_t)(
    ("PyBytes_FromStringAndSize", ctypes.pythonapi)
)
_address = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object)(("PyBytes_AsString", ctypes.pythonapi))
_memory_view = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)
_PYBUF_WRITE = 0x200


class Draft:
    """The bytes of a payload of one segment, before they are complete.

    `head_bytes`: bytes before the codes: the head, and the segment's parameters.

    `codes`: uint8 (count, width): those of the rows, to be written in place.
    """

    def __init__(self, head_bytes: int, count: int, width: int) -> None:
        nbytes = head_bytes + count * width
        self._payload: bytes = _new_bytes(None, nbytes)
        # The view is made by address: a ctypes array would need a new type for every size.
        self._view = np.frombuffer(_memory_view(_address(self._payload), nbytes, _PYBUF_WRITE), np.uint8)
        self.codes = self._view[head_bytes:].reshape(count, width)

    def finish(self, head: bytes) -> bytes:
        """Return the payload, whose first bytes are `head`. Nobody may write to `codes` afterwards."""
        self._view[: len(head)] = np.frombuffer(head, np.uint8)
        del self.codes, self._view
        return self._payload
