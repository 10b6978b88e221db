"""Options that belong together, and what tells where an option stands that was given elsewhere.

They are checked when they are made, but for what needs torch, a model or ranks.
"""

from __future__ import annotations

import ast
import difflib
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial, wraps
from typing import Any, Literal, NoReturn, ParamSpec, TypeVar, dataclass_transform, get_args

from cnr_store.errors import OptionError
from cnr_store.policies.checks import integer, number
from cnr_store.policies.policy import MAX_CHAIN
from cnr_store.policies.widths import ExpectedRestores

Overlap = Literal["wait", "skip"]
OnFailure = Literal["raise", "log"]
Unloaded = Literal["warn", "raise"]
KeepBest = tuple[str, Literal["max", "min"], int]
"""A figure of the metadata, ``"max"`` or ``"min"``, and how many versions."""

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Group = TypeVar("Group")
_PLACES: dict[str, str] = {}
"""By option that stands in a group, the option that takes the group: `workers` is one of `limits`."""
_SHOWN = 60


def own_keywords(
    passes_to: Callable[..., object] | None = None, also: Iterable[str] = ()
) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Refuse keywords that neither a function has nor what it `passes_to`, and name what is right.

    `also`: further keywords that it takes.
    """

    def decorate(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        own = inspect.signature(function).parameters
        given = {**own, **(inspect.signature(passes_to).parameters if passes_to else {})}
        known = {name for name, one in given.items() if one.kind is not one.VAR_KEYWORD}.union(also) - {
            "self"
        }
        name = function.__qualname__.removesuffix(".__init__")

        @wraps(function)
        def checked(*arguments: Arguments.args, **named: Arguments.kwargs) -> Result:
            for each in named.keys() - known:
                _refuse(name, each, named[each], known)
            return function(*arguments, **named)

        return checked

    return decorate


def _refuse(function: str, name: str, value: object, known: set[str]) -> NoReturn:
    """Raise the `OptionError` of a keyword that a function does not have."""
    groups = known.intersection(_PLACES.values()) or _PLACES.values()
    places = {option: group for option, group in _PLACES.items() if group in groups and option not in known}
    near = difflib.get_close_matches(name, sorted({*known, *places}), 1)
    if name in places:
        right = f": give {_as_code(name, places[name], value)}"
    elif near:
        right = f": did you mean {_as_code(near[0], places.get(near[0]))}?"
    else:
        right = f"; it has {', '.join(sorted(known))}"
    raise OptionError(f"{function} has no option {name}{right}")


def _as_code(option: str, group: str | None, value: object = ...) -> str:
    """An option as it is typed, in its group. What can't be typed as it is shown is left open."""
    text = "..."
    with suppress(ValueError, SyntaxError):
        ast.literal_eval(repr(value)[:_SHOWN])
        text = "..." if value is ... else repr(value)
    return f"{option}={text}" if group is None else f"{group}=cnr_store.{group.capitalize()}({option}={text})"


@dataclass_transform(frozen_default=True, kw_only_default=True)
def _group(made: type[Group]) -> type[Group]:
    """Make a class a group of options: each has its place in it, goes by a keyword, and is checked."""
    _PLACES.update(dict.fromkeys(made.__annotations__, made.__name__.lower()))
    made.__post_init__ = _check  # type: ignore[attr-defined]
    made = dataclass(frozen=True, kw_only=True)(made)
    made.__init__ = own_keywords()(made.__init__)  # type: ignore[method-assign]
    return made


def _check(group: Any) -> None:
    for each in fields(group):
        value = getattr(group, each.name)
        if each.name in _CHECKS and (value is not None or "None" not in str(each.type)):
            name = f"{_PLACES[each.name]}.{each.name}"
            object.__setattr__(group, each.name, _CHECKS[each.name](name, value))


def given_group(kind: type[Group], value: Group) -> Group:
    """The group of options that a caller gave."""
    if not isinstance(value, kind):
        raise OptionError(f"{kind.__name__.lower()}={value!r}: give cnr_store.{kind.__name__}(...)")
    return value


def check_choice(name: str, value: object, choices: Any) -> Any:
    """One of the words of a `Literal`."""
    if value not in get_args(choices):
        raise OptionError(f"{name}={value!r}: give {' or '.join(map(repr, get_args(choices)))}")
    return value


def check_best(name: str, value: Any) -> Any:
    """A figure, which of it is best, and how many versions."""
    fits = isinstance(value, tuple | list) and len(value) == 3
    figure, mode, count = best = tuple(value) if fits else (None, None, None)
    is_count = isinstance(count, int) and not isinstance(count, bool) and count >= 1
    if not (isinstance(figure, str) and figure and mode in ("max", "min") and is_count):
        raise OptionError(
            f"{name}={value!r}: give the name of a figure in the metadata, 'max' or 'min', and how many versions, "
            "such as ('auc', 'max', 3); or None"
        )
    return best


def _check_rate(name: str, value: object) -> float:
    if (rate := number(name, value)) > 0:
        return rate
    raise OptionError(f"{name}={value!r}: give a number above 0, or None for no limit")


def _check_flag(name: str, value: object) -> bool:
    if value is True or value is False:
        return value
    raise OptionError(f"{name}={value!r}: give True or False")


_CHECKS: dict[str, Callable[[str, Any], object]] = {
    **dict.fromkeys(("keep_every", "max_chain", "max_failures", "workers"), partial(integer, minimum=1)),
    **dict.fromkeys(("retry_seconds", "timeout_seconds", "restores_per_save"), number),
    "snapshot_bytes": integer,
    "keep_best": check_best,
    "max_write_bytes_per_second": _check_rate,
    "audit": lambda name, value: (
        value if value is True or value is False or value == "all" else integer(name, value)
    ),
    "exact_parents": _check_flag,
    "on_failure": partial(check_choice, choices=OnFailure),
    "overlap": partial(check_choice, choices=Overlap),
    "unloaded": partial(check_choice, choices=Unloaded),
    "expected_restores": lambda _, value: ExpectedRestores.of(value),
}


@_group
class Retention:
    """Which versions stay beside those of ``keep_last``, and how many one of them may need.

    Attributes
    ----------
    keep_every, keep_best
        As ``keep_last`` of `Checkpointer`: keep one version of every so many steps, and those whose metadata has the
        best figure, such as ``("auc", "max", 3)``. If all three are None, every version is kept.
    max_chain
        After a commit, in the background, fold the version as `cnr_store.compact` does if reading it touches more
        versions than this. None folds nothing. A failure is only logged. Under ``consecutive`` such a fold comes every
        so many saves. ``auto`` makes no longer chains. Under ``full`` a version touches no other, and under
        ``one-shot`` and ``intermittent`` only the versions in which its tables were last whole.
    """

    keep_every: int | None = None
    keep_best: KeepBest | None = None
    max_chain: int | None = MAX_CHAIN


@_group
class Failures:
    """What a save that fails means for training, and how long storage and other ranks are waited for.

    Attributes
    ----------
    on_failure
        What the next `save` does about one that failed in the background, and whose result nobody asked for: ``raise``
        its error, or go on with the rows of both (``log``). Each failure is logged. `close` raises that of the last
        save in either case, since no other save has its rows. ``log`` never hides a `SupersededError`, `StateError` or
        `TrackingError`.
    max_failures
        With ``on_failure="log"``, `save` raises the error after so many failed saves in a row.
    retry_seconds
        How long an operation of a save is repeated that the network or a busy server failed, and no save that fails for
        it (`OutageError`) is counted or raised by the next one. So long `load`, `close` and, by `Limits.overlap`, saves
        wait; a preemption, an exception and the end of the process have it tried once more, at once. 0 repeats nothing.
    timeout_seconds
        How long a rank that does not come, or makes no progress, is waited for.
    """

    on_failure: OnFailure = "raise"
    max_failures: int = 3
    retry_seconds: float = 300.0
    timeout_seconds: float = 600.0


@_group
class Limits:
    """What saves may take of the machine, the network and training.

    Attributes
    ----------
    workers
        Threads that encode. Storage is written and read in other threads. Rows beyond `snapshot_bytes`, for which
        training waits, are encoded by as many threads as torch computes with, if these are more.
    snapshot_bytes
        Host memory for the rows of a snapshot. Rows that don't fit are encoded before `save` returns. A container's
        limit is not asked for.
    max_write_bytes_per_second
        How fast saves write in the background. `close`, a preemption and the end of the process lift it, and it does
        not hold for rows that are encoded before `save` returns. None sets no limit.
    overlap
        What a save does while another is still being written, perhaps as storage fails: ``wait``, or ``skip`` itself.
    exact_parents
        Whether lossless rows of float32 are kept in memory as they are stored, 4 bytes a value, so that deltas hold
        their differences, in fewer bytes. `explain` says where it does nothing.
    """

    workers: int = 2
    snapshot_bytes: int = 2 << 30
    max_write_bytes_per_second: float | None = None
    overlap: Overlap = "wait"
    exact_parents: bool = False


@_group
class Tracking:
    """Which rows count as changed, and what versions are without.

    Attributes
    ----------
    audit
        Whether each save checks, by samples of 1 MiB or so many bytes, that rows believed unchanged are unchanged.
        ``all`` compares every row with what is stored, writes those that differ, and logs which were not tracked.
    trusted_optimizers
        Optimizer classes of your own whose steps change no row without a gradient. Tables under other classes that are
        unknown here are compared.
    exclude
        Names, or patterns of names, of tables and of other entries of the state dict that versions are without, and
        that a load leaves as they are in the model, as what optimizers keep for them.
    """

    audit: bool | int | Literal["all"] = True
    trusted_optimizers: Collection[type] = ()
    exclude: str | Sequence[str] = ()


@_group
class Job:
    """The job that trains: its ranks, its random numbers, and the restores to expect.

    Attributes
    ----------
    group
        The ranks that train this model, as a process group of torch.distributed; by default all of the job. Every one
        of them makes a checkpointer and calls its methods, in the same order.
    rng
        Whether the global random number generators are saved and restored.
    unloaded
        What the first save does if the store has versions and none was loaded: ``warn``, or ``raise`` `OptionError`.
    restores_per_save
        Restores to expect between two saves. ``policy="auto"`` weighs the cost of reading by them.
    expected_restores
        Failures per node and hour, nodes and hours that the run is planned for, as `ExpectedRestores` or a mapping with
        its fields. They choose the bits, and not a budget.
    """

    group: object = None
    rng: bool = True
    unloaded: Unloaded = "warn"
    restores_per_save: float = 0.1
    expected_restores: ExpectedRestores | Mapping[str, Any] | None = None
