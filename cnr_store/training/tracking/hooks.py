"""Hooks on steps of optimizers and on modules that look up rows: they flag the ids of lookups, in compiled code too.

A module's hooks become part of the graph when the module is compiled. There, the hook after a lookup is one operator
without a result, which the compiler neither inspects nor removes nor breaks the graph for. When it runs, it calls the
hooks that the module has by then, so a tracker that is newer than the compiled code sees the lookup too.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import FrameType
from typing import Any, Protocol, TypeVarTuple

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from cnr_store.training.distributed.torchrec import ShardedModule
from cnr_store.training.distributed.torchrec_lookups import CopiedHook, Hook, LookupHooks
from cnr_store.training.distributed.torchrec_optimizers import passes_steps_on
from cnr_store.training.model.tables import DTensorTable, Lookup
from cnr_store.training.tracking.bitmap import mark_at
from cnr_store.training.tracking.table_tracker import LOADED, OUTSIDE, STATE_OUTSIDE, TableTracker
from cnr_store.training.tracking.version_counter import VersionCounter

_STEP = "profile_hook_step.<locals>.wrapper"
"""torch's function around each step, which calls its hooks."""

Given = TypeVarTuple("Given")
Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]


def outside_graphs(function: Callable[[*Given], None]) -> Callable[[*Given], None]:
    """Have compiled code break its graph to call `function`, which the compiler can't trace through."""
    uncompiled: Callable[[*Given], None] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]

    @functools.wraps(function)
    def call(*args: *Given) -> None:
        # Eager code is spared torch's wrapper, which takes longer than a small table's hook.
        (uncompiled if torch.compiler.is_compiling() else function)(*args)

    return call


class StepListener(Protocol):
    """Is called around each step."""

    def before_step(self, optimizer: Optimizer, has_closure: bool = False) -> None:
        """Called before the step's own hooks and its update. A closure may make gradients within the step."""

    def after_step(self, optimizer: Optimizer, has_closure: bool = False) -> None:
        """Called right after the update."""


_listeners: weakref.WeakSet[StepListener] = weakref.WeakSet()


def add_step_listener(listener: StepListener) -> None:
    """Call `listener` around every step of every optimizer, while it lives and until `remove_step_listener`."""
    _hook_steps()
    _listeners.add(listener)


def remove_step_listener(listener: StepListener) -> None:
    """Call `listener` no more."""
    _listeners.discard(listener)


@functools.cache
def _hook_steps() -> None:
    # Once and for good: torch fails if these hooks are added or removed while it calls them, and a listener may be
    # collected at any time.
    register_optimizer_step_pre_hook(_before_step)


@outside_graphs
def _before_step(optimizer: Optimizer, args: Args, kwargs: Kwargs) -> None:
    listeners = [] if passes_steps_on(optimizer) else list(_listeners)
    if listeners:
        _put_after_step_first(optimizer)
    for listener in listeners:
        listener.before_step(optimizer, _has_closure(optimizer, args, kwargs))


@outside_graphs
def _after_step(optimizer: Optimizer, args: Args, kwargs: Kwargs) -> None:
    for listener in list(_listeners):
        listener.after_step(optimizer, _has_closure(optimizer, args, kwargs))


def _has_closure(optimizer: Optimizer, args: Args, kwargs: Kwargs) -> bool:
    """Whether a step was given something to call: torch counts the optimizer itself among its arguments."""
    return any(callable(each) and each is not optimizer for each in (*args, *kwargs.values()))


def is_in_step(optimizer: Optimizer) -> bool:
    """Whether a step of `optimizer` that has just begun is part of another one, which a class calls by ``super()``.

    torch calls the hooks of a class's step, and those of the class beneath it once that one has had an object.
    """
    frame: FrameType | None = sys._getframe()
    steps = 0
    while frame is not None and steps < 2:
        if frame.f_code.co_qualname.endswith(_STEP) and frame.f_locals.get("self") is optimizer:
            steps += 1
        frame = frame.f_back
    return steps == 2


def _put_after_step_first(optimizer: Optimizer) -> None:
    """Have `_after_step` called right after the update, because hooks of others may raise or change gradients.

    It becomes the first of the optimizer's own hooks, which torch calls before those of all optimizers. Another hook
    may be put first at any time, so each step looks again.
    """
    hooks = optimizer._optimizer_step_post_hooks
    if next(iter(hooks.values()), None) is not _after_step:
        others = {key: hook for key, hook in hooks.items() if hook is not _after_step}
        hooks.clear()
        optimizer.register_step_post_hook(_after_step)
        hooks.update(others)


_FORWARDS = (nn.Embedding.forward, nn.EmbeddingBag.forward)
# A captured CUDA graph replays kernels only, and would skip the operator. Releases of torch without this tag capture
# no graph with a tensor of the host in it, such as `_AfterLookup._order`.
_TAGS = [getattr(torch.Tag, name) for name in ("cudagraph_unsafe",) if hasattr(torch.Tag, name)]

# Exported programs must run where this package is not installed, so they get no hooks. Releases of torch without
# `is_exporting` are answered by `bool()`, which is False.
_is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", bool)

_is_tracing: Callable[[], bool] = torch._C._is_tracing
# Each lookup asks these: by their names here they are found sooner than through modules.
_is_compiling, _is_grad_enabled, _INT64 = torch.compiler.is_compiling, torch.is_grad_enabled, torch.int64

_modules: weakref.WeakValueDictionary[int, Lookup] = weakref.WeakValueDictionary()


def hook_lookups(module: Lookup, tracker: TableTracker, hooks: ExitStack) -> None:
    """Tell `tracker` which rows `module` looks up, and that a state dict was loaded into it.

    `hooks` removes the hooks when it is closed, also those that are added later.
    """
    after = _AfterLookup(module, tracker, hooks)
    if module.max_norm is not None:
        after.check_before()
    hooks.callback(module.register_forward_hook(after, with_kwargs=True).remove)
    note_load = Hook(lambda *_: tracker.make_whole(LOADED))
    after_load = module.register_load_state_dict_post_hook(note_load)  # type: ignore[no-untyped-call]
    hooks.callback(after_load.remove)


class _TableHook:
    """A hook of one module for one table tracker.

    A copy of a model (for averaging, say) copies its hooks; the copied ones do nothing.
    """

    __slots__ = ("_tracker",)

    def __init__(self, tracker: TableTracker) -> None:
        self._tracker = tracker

    def __reduce__(self) -> tuple[type[CopiedHook], tuple[()]]:
        return CopiedHook, ()


class _BeforeLookup(_TableHook):
    """Looks for changes from elsewhere before a lookup with ``max_norm``, which changes rows itself."""

    __slots__ = ()

    def __call__(self, module: Lookup, *_: object) -> None:
        if module.max_norm is not None and not _is_exporting():
            _check_max_norm(self._tracker)


class _AfterLookup(_TableHook):
    __slots__ = ("_checks_before", "_hooks", "_module", "_order")

    def __init__(self, module: Lookup, tracker: TableTracker, hooks: ExitStack) -> None:
        super().__init__(tracker)
        self._module, self._hooks = module, hooks
        self._checks_before = False
        # The operator in compiled code claims to change this tensor, so that it is kept, and in its place.
        self._order = torch.zeros(1, dtype=torch.uint8, device="cpu")
        _modules[id(module)] = module

    def check_before(self) -> None:
        """Check the table before each lookup too, because lookups with ``max_norm`` change rows."""
        self._checks_before = True
        self._hooks.callback(self._module.register_forward_pre_hook(_BeforeLookup(self._tracker)).remove)

    def __call__(
        self, module: Lookup, args: tuple[Any, ...], kwargs: Mapping[str, Any], _output: object
    ) -> None:
        if not _is_compiling() and args and self._mark_plain(module, args[0]):
            return
        renorms = module.max_norm is not None
        if not (renorms or torch.is_grad_enabled()):
            return
        ids = args[0] if args else kwargs.get("input")
        if not isinstance(ids, torch.Tensor):
            ids = None
        elif ids.is_nested:  # ragged: neither the operator nor numpy takes them
            ids = ids.values()
        if module._parameters.get("weight") is not self._tracker.table.parameter:
            ids = None
        if not torch.compiler.is_compiling():
            self.flag(module, ids, renorms)
        elif _is_exporting():
            return
        elif renorms:
            _flag_after_max_norm(self, module, ids, renorms)
        else:
            torch.ops.cnr_store.looked_up(self._order, ids, id(module))

    def _mark_plain(self, module: Lookup, ids: object) -> bool:
        """Flag rows in the way that nearly all lookups go; False, and not all may be flagged, if this is another one.

        A model has many tables and each step looks up rows of all, so nothing is called that need not be, and no object
        is looked at that need not be: after a step, all of them are out of the processor's caches.
        """
        tracker = self._tracker
        place = tracker.place or tracker.find_place()
        if (
            place is not None
            and type(ids) is torch.Tensor
            and ids.dtype is _INT64
            and module.max_norm is None
            and type(module).forward in _FORWARDS
            and "forward" not in module.__dict__
            and module._parameters.get("weight") is place[0]
            and _is_grad_enabled()
            and not _is_tracing()
            and ids.is_cpu
            and ids.is_contiguous()
        ):
            try:
                address, count = ids.data_ptr(), ids.numel()
            except RuntimeError:  # torch's, for a tensor without values
                return False
            return address != 0 and mark_at(place[1], place[2], address, count) < 0
        return False

    def flag(self, module: Lookup, ids: torch.Tensor | None, renorms: bool = False) -> None:
        """Flag the rows `ids` that `module` looked up.

        `ids`: None if they are no rows of the table: the module was not called with a tensor, or had another weight.
        `renorms`: whether the lookup itself changed rows, because the module has a ``max_norm``.
        """
        tracker = self._tracker
        if renorms and not self._checks_before:
            tracker.make_whole("max_norm of a module that looks up its rows was set after tracking began")
            self.check_before()
        if (reason := _unknown_rows(tracker, module, ids)) and (renorms or not tracker.has_optimizer):
            # Where a given optimizer owns the table, its steps flag what they change.
            tracker.make_whole(reason)
        if renorms:
            if tracker.changes > 1:  # torch counts one for the lookup; hooks of others may have made the rest
                tracker.make_whole(OUTSIDE)
            tracker.acknowledge()


def _unknown_rows(tracker: TableTracker, module: Lookup, ids: torch.Tensor | None) -> str | None:
    """Flag the rows `ids`, or return why the rows that were looked up are not known."""
    if type(module).forward not in _FORWARDS or "forward" in module.__dict__:
        return f"{type(module).__name__} has a forward of its own, so the rows that it looks up are not known"
    if isinstance(tracker.table, DTensorTable):
        return (
            "ranks share its rows, so none sees all lookups; give Checkpointer the optimizer that trains it"
        )
    if ids is None:
        return "rows of another tensor were looked up in its place"
    try:
        if not _is_tracing():
            tracker.mark(ids)
            return None
    except RuntimeError:  # torch's, for a tensor without values
        pass
    return "ids without values were looked up, as in torch.jit.trace, torch.func.vmap or a fake tensor mode"


def _looked_up(order: torch.Tensor, ids: torch.Tensor | None, module_id: int) -> None:
    """Call the hooks of the module with this id, in which compiled code looked up `ids`."""
    module = _modules.get(module_id)
    if module is not None:
        for hook in list(module._forward_hooks.values()):
            if isinstance(hook, _AfterLookup):
                hook.flag(module, ids)


# Not `torch.library.custom_op`: that counts a change of `order` at each call, which activation checkpointing, when it
# computes the activations again, takes for an error. Nothing reads `order`.
torch.library.define(
    "cnr_store::looked_up", "(Tensor(a!) order, Tensor? ids, int module_id) -> ()", tags=_TAGS
)
torch.library.impl("cnr_store::looked_up", "default", _looked_up)
torch.library.register_fake("cnr_store::looked_up", lambda *_: None)  # compiling looks nothing up
if hasattr(torch.library, "register_vmap"):  # from torch 2.5 on
    # One call for the ids of all calls that `torch.func.vmap` makes one of.
    torch.library.register_vmap(
        "cnr_store::looked_up", lambda _info, _dims, *args: (torch.ops.cnr_store.looked_up(*args), None)
    )


# A lookup with max_norm changes the table between its two hooks. These must see the counter right before and after
# it, so compiled code breaks its graph for them.


@outside_graphs
def _check_max_norm(tracker: TableTracker) -> None:
    if tracker.changes:
        tracker.make_whole(OUTSIDE)


_flag_after_max_norm: Callable[..., None] = torch.compiler.disable(_AfterLookup.flag)  # type: ignore[no-untyped-call]


class ShardedLookups:
    """The hooks on TorchRec's modules. They keep no `Tracker` alive.

    `modules`: TorchRec's.
    `trackers`: of their tables, among others.
    `hooks`: removes the hooks when it is closed.
    """

    def __init__(
        self, modules: Sequence[ShardedModule], trackers: Sequence[TableTracker], hooks: ExitStack
    ) -> None:
        self._trackers = {tracker.table.key: tracker for tracker in trackers} if modules else {}
        self._hooks = [LookupHooks(module, self._mark) for module in modules]
        for each in self._hooks:
            hooks.callback(each.remove)
        self._slots = {
            table.name: [piece.tensor for slot in table.slots.values() for piece in slot.pieces]
            for module in modules
            for table in module.tables
        }
        self._counters: dict[str, list[VersionCounter]] = {}
        self.acknowledge()

    def check(self) -> None:
        """Make tables whole whose lookups may not have been seen. Call it before the rows flagged are taken."""
        for hooks in self._hooks:
            reason = hooks.check()
            for table in hooks.sharded.tables if reason else ():
                self._trackers[table.name].make_whole(str(reason))

        for name, tensors in self._slots.items():
            # FBGEMM changes state without counting: what torch counts was changed by someone else.
            if any(map(VersionCounter.count_changes, self._counters[name], tensors)):
                self._trackers[name].make_whole(STATE_OUTSIDE)
                self.acknowledge(name)

    def acknowledge(self, key: str | None = None) -> None:
        """Take every change so far of what is kept for the rows of a table, or of all, as flagged."""
        for name in self._slots if key is None else self._slots.keys() & {key}:
            self._counters[name] = list(map(VersionCounter, self._slots[name]))

    def _mark(self, key: str, _first_row: int, rows: torch.Tensor) -> None:
        self._trackers[key].mark(rows)
