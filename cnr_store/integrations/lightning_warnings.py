"""What a Lightning fit has that is not saved, or that may not continue as without an interruption."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from inspect import unwrap
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from cnr_store.integrations.lightning_averages import averaging, normalizes
from cnr_store.integrations.lightning_loaders import flat
from cnr_store.integrations.lightning_package import KNOWN_MODULES, LightningModule

log = logging.getLogger("cnr_store")

_BATCHES_TO_STEP = 1000
_LOADERS = ("torch.utils.data.", "torchdata.")
_SAMPLERS = ("RandomSampler", "SequentialSampler")


def warn_of_no_steps(trainer: Any) -> None:
    """Warn once if no batch of an epoch, or of many, took a step that Lightning counts."""
    batches = trainer.fit_loop.total_batch_idx + 1
    if trainer.global_step == 0 and (batches == _BATCHES_TO_STEP or trainer.is_last_batch):
        log.warning(
            "%d batches were trained without an optimizer step that Lightning counts, so nothing is saved before "
            "the end: with manual optimization, step the optimizers of self.optimizers()",
            batches,
        )


def warn_of_parts(trainer: Any) -> None:
    """Warn if a resumed fit has parts that only Lightning brings back, so far as its own checkpoints do."""
    if parts := [*_parts_of_loop(trainer), *_parts_of_loaders(trainer)]:
        log.warning(
            "the weights and states are those of step %d. But the batches and steps that follow may not be those of a "
            "fit without an interruption, as with Lightning's own checkpoints, because of %s",
            trainer.global_step,
            ", ".join(parts),
        )


def warn_of_early_hooks(trainer: Any) -> None:
    """Warn of callbacks of the user's own that act before a version is loaded, where Lightning's files are loaded."""
    hooks = [
        (type(one).__name__, getattr(unwrap(one.on_fit_start), "__module__", "")) for one in trainer.callbacks
    ]
    if early := [name for name, module in hooks if not f"{module}.".startswith(KNOWN_MODULES)]:
        log.warning(
            "on_fit_start of %s ran before the version was loaded: it found the module and the optimizers as the "
            "program made them, and what it set in them is replaced",
            ", ".join(early),
        )


def _parts_of_loop(trainer: Any) -> Iterator[str]:
    module = trainer.lightning_module
    if not module.automatic_optimization:
        yield "manual optimization (gradients are not saved)"
    hook = getattr(unwrap(module.on_train_batch_start), "__func__", None)
    if hook is not LightningModule.on_train_batch_start:
        yield "the hook on_train_batch_start, which may skip batches"
    if trainer.reload_dataloaders_every_n_epochs:
        yield "reload_dataloaders_every_n_epochs, which counts from the resume"


def _parts_of_loaders(trainer: Any) -> Iterator[str]:
    loaders = list(flat(trainer.train_dataloader))
    if len(loaders) > 1:
        yield "several loaders in one"
    for loader in loaders:
        name = type(loader).__name__
        if not (isinstance(loader, DataLoader) and type(loader).__module__.startswith(_LOADERS)):
            yield f"the loader {name}, which is not PyTorch's or torchdata's"
        elif isinstance(loader.dataset, IterableDataset):
            yield f"the iterable dataset of the {name}"
        elif loader.generator is not None:
            yield f"the generator= of the {name}, which is not saved"
        elif not _draws_from_global_numbers(loader):
            yield f"the sampler of the {name}"


def _draws_from_global_numbers(loader: Any) -> bool:
    """Whether the loader draws its order from the global random numbers alone, or always gives the same."""
    kind = type(loader.sampler)  # torchdata's is no child of PyTorch's
    has_own_batches = loader.batch_size is None and loader.batch_sampler is not None
    return not has_own_batches and kind.__module__.startswith(_LOADERS) and kind.__name__ in _SAMPLERS


def warn_of_rest(trainer: Any, stored: Mapping[str, Any]) -> None:
    """Warn of callbacks that do not go on with what a version holds, as `TrainerState` stores it."""
    states, present = stored["states"], {one.state_key: one for one in trainer.callbacks}
    if anew := [name for name, one in present.items() if name not in states and one.state_dict()]:
        log.warning("the version holds no state of %s: they begin anew", ", ".join(anew))
    if lost := [name for name in states if name not in present]:
        log.warning(
            "the version holds the state of %s, which this trainer lacks: its next version won't",
            ", ".join(lost),
        )
    if stored["left_out"]:
        log.warning("%s could not be stored and begin anew", ", ".join(stored["left_out"]))
    if stored["averaged_by"]:
        log.warning(
            "the version is the end of a fit, where %s put the average into the model: training continues from the "
            "average, not from the weights that were trained",
            ", ".join(stored["averaged_by"]),
        )
    elif trainer.fit_loop.done and (left := [one for one in averaging(trainer) if not normalizes(one)]):
        log.warning(
            "the fit was cut off between its last step and its end, and Lightning trains no more: %s will not put "
            "the average into the model",
            ", ".join(one.state_key for one in left),
        )
