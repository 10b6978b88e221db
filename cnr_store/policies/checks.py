"""Checks of numbers that callers pass (standard library only)."""

from __future__ import annotations

import math
import operator
from contextlib import suppress
from numbers import Real
from typing import Any

from cnr_store.errors import OptionError

MOST = 1 << 62


def amount(name: str, value: Any, most: float = math.inf) -> float:
    """A finite number of at least 0 and at most `most`, of any real type.

    Raises
    ------
    OptionError
        Naming it.
    """
    if not isinstance(value, bool) and isinstance(value, Real):
        with suppress(OverflowError):  # an integer beyond all floats
            found = float(value)
            if 0 <= found <= most and found < math.inf:
                return found
    bound = "" if most == math.inf else f" and at most {most:g}"
    raise OptionError(f"{name}={_shown(value)}; give a number of at least 0{bound}")


def whole(name: str, value: Any, least: int = 0) -> int:
    """An integer of at least `least` and at most 2**62, of any integer type.

    Raises
    ------
    OptionError
        Naming it.
    """
    if not isinstance(value, bool):
        with suppress(TypeError):
            found = operator.index(value)
            if least <= found <= MOST:
                return found
    raise OptionError(f"{name}={_shown(value)}; give an integer of at least {least} and at most 2**62")


def _shown(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > 256:
        return f"(an integer of {value.bit_length()} bits)"  # Python refuses to print those of 4,300 digits
    return repr(value)
