"""Calls behind hooks: of a LightningModule, which Lightning runs after those of all callbacks, and of callbacks."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import Any

from cnr_store.integrations.lightning_package import LightningModule, Trainer, callbacks

_Call = Callable[[Trainer, LightningModule], None]


class LastHooks(callbacks.Checkpoint):
    """A callback behind all others: Lightning runs a `Checkpoint` behind those that monitor metrics, too.

    `CnrCheckpoint` itself is none, because a trainer with ``enable_checkpointing=False`` refuses it.

    Parameters
    ----------
    on_fit_start, on_train_epoch_end
        Called as these hooks.
    """

    def __init__(self, on_fit_start: _Call, on_train_epoch_end: _Call) -> None:
        self._calls = on_fit_start, on_train_epoch_end

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._calls[0](trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._calls[1](trainer, pl_module)


def last_hook_of_validation(module: LightningModule) -> str:
    """The last hook of a module that Lightning calls in a validation. It calls that of the mode only if it is there."""
    own = "on_validation_model_train"
    return own if getattr(type(module), own) is not getattr(LightningModule, own) else "on_validation_end"


def _nothing() -> None:
    return


class HookBehind:
    """Takes the place of a module's hook: runs it, and then calls `after`.

    Parameters
    ----------
    module, name
        The hook is this attribute of the module.
    after
        Called without arguments. If the hook raises, it is not called.
    """

    def __init__(self, module: Any, name: str, after: Callable[[], None]) -> None:
        self._module, self._name, self._after = module, name, after
        self._own = vars(module).get(name)  # a hook that is not the class's
        self._hook = getattr(module, name)
        update_wrapper(self, self._hook, updated=())
        setattr(module, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self._hook(*args, **kwargs)
        self._after()
        return result

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, str]]:
        # A copy of the module, made in training by others, has the hook of its class.
        return getattr, (self._module, self._name)

    def remove(self) -> None:
        """Give the module its hook back, and call nothing any more where another one took this one's place."""
        self._after = _nothing
        if vars(self._module).get(self._name) is not self:
            return
        delattr(self._module, self._name)
        if self._own is not None:
            setattr(self._module, self._name, self._own)
