"""Which data loaders a fit can resume with, and their order then."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from cnr_store.errors import OptionError
from cnr_store.training.data.loader_replay import length_of
from cnr_store.training.data.tracked_reader import TrackedReader
from cnr_store.training.loading.reader_states import warn_of_move, warn_of_skipping

log = logging.getLogger("cnr_store")


def check_loaders(loaders: Any) -> None:
    """Refuse readers that Lightning would read ahead of, and warn about other loaders that it reads ahead of.

    Raises
    ------
    OptionError
        There is a `TrackedReader` among them.
    """
    for loader in flat(loaders):
        if isinstance(loader, TrackedReader):
            raise OptionError(
                "a TrackedReader counts a batch as trained once it is read, and Lightning takes batches ahead, so a "
                "resumed fit would skip samples: give the trainer torchdata's StatefulDataLoader"
            )
        if callable(getattr(loader, "state_dict", None)) and length_of(loader) is None:
            log.warning(
                "a %s has no length, so Lightning takes one batch ahead, and a fit resumed within an epoch skips one "
                "batch: give its dataset a __len__",
                type(loader).__name__,
            )


def position_loaders(loop: Any) -> list[Any]:
    """Let loaders that exist already go on as loaded: `estimated_stepping_batches` and finders make them early.

    Lightning gives loaders their state only when it makes them, which it may be about to do anew.

    Returns
    -------
    The states with which the loaders go on; none at the end of an epoch.
    """
    states = list(loop._combined_loader_states_to_load) if loop.restarting else []
    for state in states:
        warn_of_skipping(state)
    if states and loop._combined_loader is not None and not loop._should_reload_train_dl:
        loop._load_combined_loader_states()
        iter(loop._data_fetcher)
    return states


def warn_of_moved_loaders(loop: Any, states: Sequence[Any]) -> None:
    """Warn if loaders do not go on with the states that `position_loaders` returned."""
    for state, now in zip(states, loop._combined_loader._state_dicts() if states else (), strict=False):
        warn_of_move(state, now)


def draw_again(trainer: Any, is_epoch_end: bool) -> None:
    """Let the loaders draw their order with the random numbers that are set now, unless they go on with an order.

    Otherwise the next epoch would draw the same order once more: Lightning makes the iterators before training starts.
    """
    loaders = list(flat(trainer.train_dataloader))
    if is_epoch_end:
        for loader in loaders:
            # torchdata's samplers take a seed when they are made, in many programs always the same.
            generator = getattr(getattr(loader, "sampler", None), "generator", None)
            if generator is not None and getattr(loader, "generator", None) is None:
                generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
        # Lightning then makes the iterators itself, behind the hooks that start an epoch: these may draw, too.
        trainer.fit_loop._resuming_from_checkpoint = False
    elif not any(callable(getattr(loader, "state_dict", None)) for loader in loaders):
        iter(trainer.fit_loop._data_fetcher)


def flat(loaders: Any) -> Iterator[Any]:
    """Loaders in lists, dicts and Lightning's CombinedLoader, nested in any way."""
    parts = getattr(loaders, "flattened", loaders)
    if isinstance(parts, Mapping):
        parts = list(parts.values())
    if isinstance(parts, list | tuple):
        for part in parts:
            yield from flat(part)
    else:
        yield loaders
