"""Hooks on the modules that look rows up. They flag the ids of each lookup, also of those in compiled code.

Compiled code has the hooks that a module had when it was compiled, as part of the graph. What they do there is one
operator without a result, which the compiler neither looks into nor leaves out nor breaks the graph for. When it
runs, it asks the module for its present hooks: a tracker that is newer than the compiled code is told, too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from cnr_store.training.model.tables import Lookup
from cnr_store.training.tracking.step_hooks import Handle, Local
from cnr_store.training.tracking.table_tracker import OUTSIDE, TableTracker

_FORWARDS = (nn.Embedding.forward, nn.EmbeddingBag.forward)
# A captured CUDA graph replays kernels, and would leave the operator out; releases without this tag capture none
# beside tensors of the host, such as `_AfterLookup._order`.
_TAGS = [getattr(torch.Tag, name) for name in ("cudagraph_unsafe",) if hasattr(torch.Tag, name)]

# An exported program is no training job's, and must run where this package is not. `bool()`, False, answers for
# releases of torch that can't tell.
_is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", bool)

_is_tracing: Callable[[], bool] = torch.jit._trace.is_tracing

_modules: weakref.WeakValueDictionary[int, Lookup] = weakref.WeakValueDictionary()


def hook_lookups(module: Lookup, watch: TableTracker, handles: list[Handle]) -> None:
    """Tell `watch` of the rows that `module` looks up from now on, and of state dicts loaded into it.

    `handles` are those of the hooks, also of such as must be added later.
    """
    register_loaded: Callable[..., Handle] = module.register_load_state_dict_post_hook
    after = _AfterLookup(module, watch, handles)
    if module.max_norm is not None:
        after.check_before()
    handles += [
        module.register_forward_hook(after, with_kwargs=True),
        register_loaded(_AfterLoad(watch)),
    ]


class _AfterLoad(Local):
    __slots__ = ("_watch",)

    def __init__(self, watch: TableTracker) -> None:
        self._watch = watch

    def __call__(self, *_: object) -> None:
        self._watch.make_whole("a state dict was loaded into it")


class _BeforeLookup(Local):
    """Sees what changed before a lookup with ``max_norm``, which changes rows itself."""

    __slots__ = ("_watch",)

    def __init__(self, watch: TableTracker) -> None:
        self._watch = watch

    def __call__(self, module: Lookup, *_: object) -> None:
        if module.max_norm is not None:
            if not torch.compiler.is_compiling():
                _check_max_norm(self._watch)
            elif not _is_exporting():
                _before_max_norm(self._watch)


class _AfterLookup(Local):
    __slots__ = ("_checked", "_handles", "_module", "_order", "_watch")

    def __init__(self, module: Lookup, watch: TableTracker, handles: list[Handle]) -> None:
        self._module, self._watch, self._handles = module, watch, handles
        self._checked = False
        # What the operator in compiled code claims to change, so that it is kept and stays in order.
        self._order = torch.zeros(1, dtype=torch.uint8, device="cpu")
        _modules[id(module)] = module

    def check_before(self) -> None:
        """Look at the table before lookups as well, since they change rows themselves."""
        self._checked = True
        self._handles.append(self._module.register_forward_pre_hook(_BeforeLookup(self._watch)))

    def __call__(
        self, module: Lookup, args: tuple[Any, ...], kwargs: Mapping[str, Any], _output: object
    ) -> None:
        renorms = module.max_norm is not None
        if not (renorms or torch.is_grad_enabled()):
            return
        ids = args[0] if args else kwargs["input"]
        own = module._parameters.get("weight") is self._watch.table.parameter
        if not torch.compiler.is_compiling():
            self.note(module, ids, own, renorms)
        elif _is_exporting():
            return
        elif renorms:
            _after_max_norm(self, module, ids, own)
        else:
            plain = ids.values() if ids.is_nested else ids
            torch.ops.cnr_store.looked_up(self._order, plain, id(module), own)

    def note(self, module: Lookup, ids: torch.Tensor, own: bool, renorms: bool = False) -> None:
        """Flag the rows `ids`, and account for what this lookup changed itself where it `renorms`.

        `own` tells whether they were looked up in the module's own parameter.
        """
        watch = self._watch
        if renorms and not self._checked:
            watch.make_whole("max_norm of a module that looks rows up was set meanwhile")
            self.check_before()
        if not own:
            watch.make_whole("a module looked up another tensor in its place")
        elif type(module).forward not in _FORWARDS or "forward" in module.__dict__:
            # Its ids need not be rows. Steps still flag what they change; nothing else would.
            if renorms or not watch.owned:
                kind = type(module).__name__
                watch.make_whole(f"{kind} has a forward of its own, so its rows are not known")
        else:
            _mark(watch, ids)
        if renorms:
            watch.account()


def _mark(watch: TableTracker, ids: torch.Tensor) -> None:
    try:
        if not _is_tracing():
            watch.mark(ids)
            return
    except RuntimeError:
        if ids.is_nested:
            watch.mark(ids.values())
            return
    # While a function is traced or transformed, ids have no values. Steps still flag what they change.
    if not watch.owned:
        watch.make_whole("ids were looked up that can't be read, as in a trace or within torch.func.vmap")


def _looked_up(order: torch.Tensor, ids: torch.Tensor, module: int, own: bool) -> None:
    """Tell the hooks of the module with this id of the rows that compiled code looked up in it."""
    found = _modules.get(module)
    if found is not None:
        for hook in list(found._forward_hooks.values()):
            if isinstance(hook, _AfterLookup):
                hook.note(found, ids, own)


def _looked_up_by_the_compiler(order: torch.Tensor, ids: torch.Tensor, module: int, own: bool) -> None:
    """While code is compiled nothing is looked up."""


def _looked_up_at_once(
    _info: object, _dims: object, order: torch.Tensor, ids: torch.Tensor, module: int, own: bool
) -> tuple[None, None]:
    """Within ``torch.func.vmap``: the ids of all of its calls."""
    torch.ops.cnr_store.looked_up(order, ids, module, own)
    return None, None


# Not `torch.library.custom_op`: that counts a change of `order` at each call, which activations that are computed
# again take for a mistake. Nothing reads it.
torch.library.define(
    "cnr_store::looked_up", "(Tensor(a!) order, Tensor ids, int module, bool own) -> ()", tags=_TAGS
)
torch.library.impl("cnr_store::looked_up", "default", _looked_up)
torch.library.register_fake("cnr_store::looked_up", _looked_up_by_the_compiler)
if hasattr(torch.library, "register_vmap"):  # from 2.5 on
    torch.library.register_vmap("cnr_store::looked_up", _looked_up_at_once)


def _check_max_norm(watch: TableTracker) -> None:
    if watch.changed_elsewhere:
        watch.make_whole(OUTSIDE)


def _note_max_norm(hook: _AfterLookup, module: Lookup, ids: torch.Tensor, own: bool) -> None:
    hook.note(module, ids, own, renorms=True)


# Such a lookup changes the table between the two hooks. They must see when, so compiled code is left here.
_before_max_norm: Callable[..., None] = torch.compiler.disable(_check_max_norm)  # type: ignore[no-untyped-call]
_after_max_norm: Callable[..., None] = torch.compiler.disable(_note_max_norm)  # type: ignore[no-untyped-call]
