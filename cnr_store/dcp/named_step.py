"""The steps that callers name for versions, each kept for its own save."""

from __future__ import annotations

import threading


class NamedStep(threading.local):
    """The step that a `checkpoint_id` names.

    DCP makes all calls of a save in one thread, so another save that is called for meanwhile does not change its step.
    """

    # next, now: of the save that begins next, and of the one that has begun. None if none was named.
    next: int | None = None
    now: int | None = None

    def begin(self) -> None:
        """Take the step for a save, and for no later one, whatever becomes of it."""
        self.now, self.next = self.next, None
