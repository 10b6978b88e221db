"""Values that no field of a document may have."""

from __future__ import annotations

from collections.abc import Callable

from tests.test_store.support.tampering import ABSENT, HUGE, Forgery

Forge = Callable[[], Forgery]
NO_LIST = [ABSENT, None, {}, "x", 5, [1], [[]]]
NO_NUMBER = [ABSENT, None, [], "x", -1, 1.5, True, HUGE]
NO_OBJECT = [ABSENT, None, [], "x", 5]
NO_SHAPE = [ABSENT, None, 5, [], [5], "x", {}, [1 << 40, 16], [1, HUGE]]
NO_MEMBER = [ABSENT, None, 5, [], [5], "x", {}]
