"""The ranks that write one version together, as the writer of each sees them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Self

from cnr_store import errors
from cnr_store.errors import CheckpointError, OutageError, RanksError, SaveError
from cnr_store.ranks.group import Alone, Document, Group, LostRankError, Piece
from cnr_store.ranks.protocol import SaveRound


class Team(SaveRound):
    """One save of all ranks of a group, as the writer of each sees it. The first rank leads: it claims and commits.

    `group`: the ranks.
    `number`: which save of the group it is, the same on all ranks.
    """

    def __init__(self, group: Group, number: int) -> None:
        super().__init__(group.keyvalue, group.rank, group.world, number, group.timeout_seconds)
        self.group, self._number = group, number

    @classmethod
    def alone(cls) -> Self:
        """A team of this process."""
        return cls(Alone(), 0)

    def exchange(
        self, messages: Mapping[int, Sequence[Piece]], expected: Collection[int]
    ) -> Mapping[int, memoryview]:
        """Send each rank its message, and return those of the ranks expected."""
        self.beat("exchange")
        try:
            return self.group.exchange(messages, expected, self._number, lambda: self.beat("exchange"))
        except LostRankError as error:
            self.lose(error.rank, str(error))
            raise

    def give_up(self, error: BaseException, *, is_excused: bool = False) -> None:
        """Tell the other ranks that this one can't go on, so that none waits for it.

        If an outage has it excused, the failure is an `OutageError` on all ranks.
        """
        kind = type(error).__name__
        self.fail(self.phase, f"{kind}: {error}", OutageError.__name__ if is_excused else kind)

    def told(self, error: Exception, describe: Callable[[str], str]) -> CheckpointError:
        """What the caller of this rank is told of an error: on all ranks one of the same class.

        `describe`: makes a message of what failed, on which rank and in which phase.
        """
        if isinstance(error, CheckpointError) and not isinstance(error, RanksError):
            return error
        kind, text = self.failure
        cause = str(error) if self.world == 1 else text or str(error)
        return error_from({"error": kind, "text": describe(cause)})


def error_document(error: BaseException) -> Document:
    """An error for the other ranks."""
    return {"error": type(error).__name__, "text": str(error)}


def error_from(doc: Document, otherwise: type[CheckpointError] = SaveError) -> CheckpointError:
    """The error that another rank met, of the same class if that is one of this package."""
    kind = getattr(errors, str(doc.get("error")), None)
    if not (isinstance(kind, type) and issubclass(kind, CheckpointError)) or kind is RanksError:
        kind = otherwise
    return kind(str(doc.get("text")))
