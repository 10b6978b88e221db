"""Lightning's checkpoints as versions of a store: a small marker stands where Lightning looks for a file."""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter, OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import torch

import cnr_store
from cnr_backends import open_backend
from cnr_store.catalog.catalog import Url
from cnr_store.errors import ModelMismatchError, StateError
from cnr_store.format.state import encode_state
from cnr_store.integrations.lightning_package import CheckpointIO, callbacks
from cnr_store.integrations.metrics import figures
from cnr_store.training.model.object_state import tensor_leaf
from cnr_store.training.model.rng_state import rng_state, set_rng_state
from cnr_store.training.model.tensors import dtype_named

log = logging.getLogger("cnr_store")

REMARKS = "cnr_store"
"""The key, beside Lightning's, of what a fit that resumes needs besides."""

_STATE = "lightning"

LIVE, TENSOR = "cnr_store.live", "cnr_store.tensor"
"""The keys of what stands for a tensor of the model itself, and of what stands for another tensor."""

_MARK = "cnr_store"
_OF_FINDERS = (".lr_find_", ".scale_batch_size_")
"""How the files begin to which Lightning's finders go back."""


class StoreIO(CheckpointIO):
    """The plugin by which a trainer's checkpoints become versions, while a fit is saved. It leaves the rest to another.

    Parameters
    ----------
    trainer
        The trainer, whose plugin this one replaces.
    url, options
        As for `Checkpointer`.

    Attributes
    ----------
    metrics
        Those of the fit.
    saved_step
        The newest step saved or loaded.
    version, checkpoint
        Which version Lightning was given, and what it got of it, until training starts.
    remarks
        What is stored beside Lightning's checkpoint, for the fit that resumes.
    validates
        Whether a validation follows what is saved now.
    """

    def __init__(self, trainer: Any, url: Url, options: Mapping[str, Any]) -> None:
        self._trainer, self._url, self._options = trainer, url, options
        self._storage = dict(options.get("storage_options") or {})
        self._place = open_backend(url, storage_options=self._storage).url
        self._other, trainer.strategy.checkpoint_io = trainer.strategy.checkpoint_io, self
        self._kept = _Kept()
        self._under_way: list[tuple[cnr_store.PendingSave, str | None]] = []  # with the marker of each
        self._told: set[str] = set()
        self.checkpointer: cnr_store.Checkpointer | None = None
        self.version: str | None = None
        self.checkpoint: dict[str, Any] = {}
        self.remarks: dict[str, Any] = {}
        self.validates = False
        self._optimizer_states: list[Any] = []

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        of_finder = str(path).replace("\\", "/").rpartition("/")[2].startswith(_OF_FINDERS)
        if of_finder or self.checkpointer is None:
            self._other.save_checkpoint(checkpoint, path, storage_options)
        else:
            self.store(checkpoint, marker=str(path), overlap="wait")

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        version = _marked(path, self._place)
        return (
            self._other.load_checkpoint(path, *args, **kwargs) if version is None else self.restored(version)
        )

    def remove_checkpoint(self, path: Any) -> None:
        self._under_way = [(one, None if marker == str(path) else marker) for one, marker in self._under_way]
        cnr_store.untag(self._url, _tag_of(str(path)), **self._storage)
        self._other.remove_checkpoint(path)

    def teardown(self) -> None:
        self._other.teardown()

    def begin(self) -> dict[str, Any] | None:
        """Make the checkpointer, and fill the model and the optimizers, if Lightning was given a version.

        Returns the random numbers of that version, if it has some.
        """
        trainer, self.metrics = self._trainer, LoggedMetrics(self._trainer)
        self.saved_step: int | None = None
        state = {**(self._options.get("state") or {}), _STATE: self._kept}
        self.checkpointer = cnr_store.Checkpointer(
            self._url, trainer.lightning_module, trainer.optimizers, **{**self._options, "state": state}
        )
        if self.version is None:
            return None
        own = rng_state()  # loaders are made from what the program has set, as at its first start
        self.saved_step = self.checkpointer.load(self.version).step
        loaded = rng_state()
        set_rng_state(own)
        # Lightning loads the rest behind the hooks of the module, which may set rates. Finders drop it.
        self._optimizer_states += [one.state_dict() for one in trainer.optimizers]
        trainer._checkpoint_connector._loaded_checkpoint = self.checkpoint
        return loaded if self._options.get("job", cnr_store.Job()).rng else None

    def check(self) -> None:
        """Refuse what can't be stored, by its path."""
        checkpoint = self._pack(self._trainer._checkpoint_connector.dump_checkpoint(False))
        encode_state(checkpoint, beside=lambda path, _: path, as_leaf=tensor_leaf)

    def store(
        self,
        checkpoint: dict[str, Any],
        marker: str | None = None,
        with_metrics: bool = True,
        **how: Any,
    ) -> bool:
        """Save a checkpoint of Lightning's, with what `how` tells `Checkpointer.save`; whether it was not skipped."""
        assert self.checkpointer is not None
        step, self._kept.value = self._trainer.global_step, self._pack(checkpoint)
        metrics = self.metrics.of_this_step() if with_metrics else {}
        # Lightning counts an epoch as soon as it has ended, and what is saved then is still of it.
        epoch = max(0, self._trainer.fit_loop.epoch_progress.current.ready - 1)
        for earlier, earlier_marker in self._under_way:
            if earlier_marker is not None:  # it has its tag before retention looks at it
                earlier.settled.wait()
        self.note_saved()
        pending = self.checkpointer.save(step, metadata={**metrics, "epoch": epoch}, **how)
        if not pending.skipped:
            self.saved_step = step
            self._under_way.append((pending, marker))
        return not pending.skipped

    def _pack(self, checkpoint: dict[str, Any]) -> Any:
        """What is stored of a checkpoint: all but tables, tensors and optimizers, which are saved anyway."""
        module = self._trainer.lightning_module
        ours = {**self.remarks, "metrics": self.metrics.all()}
        kept = {**checkpoint, REMARKS: ours | ({"cut_off": True} if self.validates else {})}
        if "optimizer_states" in kept:
            kept["optimizer_states"] = []
        for one in (module, getattr(self._trainer, "datamodule", None)):
            if one is not None and one.hparams:
                kept.pop(one.CHECKPOINT_HYPER_PARAMS_TYPE, None)
                name = one.CHECKPOINT_HYPER_PARAMS_KEY
                kept[name] = self._storable(dict(kept.get(name, {})))
        return pack(kept, live_tensors(module))

    def _storable(self, hyperparameters: dict[str, Any]) -> dict[str, Any]:
        kept = {}
        for name, value in hyperparameters.items():
            try:
                encode_state(value, beside=lambda path, _: path, as_leaf=tensor_leaf)
                kept[name] = value
            except StateError:
                self.tell(
                    f"versions are without the hyperparameter {name}: a {type(value).__name__} can't be stored"
                )
        return kept

    def restored(self, version: str) -> dict[str, Any]:
        """A checkpoint for Lightning, with the tensors of the module. `begin` fills them, or this, if none trains."""
        module, state = (
            self._trainer.lightning_module,
            cnr_store.state_of(self._url, version, **self._storage),
        )
        self.version = state["version"].id
        if _STATE not in state["state"]:
            raise ModelMismatchError(
                f"version {self.version} of {self._place} was saved by something else than CnrCheckpoint, so "
                "Lightning can't go on with it: load its weights by cnr_store.load"
            )
        self.checkpoint = unpack(state["state"][_STATE], module.state_dict())
        self._optimizer_states = self.checkpoint.get("optimizer_states", [])
        if self._trainer.state.fn != "fit":
            cnr_store.load(self._url, module, version=self.version, storage_options=self._storage)
        return self.checkpoint

    def note_saved(self) -> None:
        """Log the figures of saves that have ended, and write markers: loggers are for this thread alone."""
        ended = [one for one in self._under_way if one[0].done()]
        self._under_way = [one for one in self._under_way if one not in ended]
        for pending, marker in ended:
            for logger in self._trainer.loggers:
                logger.log_metrics(figures(pending), step=pending.step)
            if pending.stats is None:  # it failed
                continue
            if marker is not None:
                version = pending.result().id
                cnr_store.tag(self._url, _tag_of(marker), version, **self._storage)
                _write_marker(marker, self._place, version)
            for one in self._trainer.checkpoint_callbacks:
                if isinstance(one, callbacks.ModelCheckpoint) and one.dirpath:
                    name = f"{one.CHECKPOINT_NAME_LAST}{one.FILE_EXTENSION}"
                    _write_marker(str(Path(one.dirpath) / name), self._place, "latest")

    def tell(self, text: str) -> None:
        """Log a warning, once."""
        if text not in self._told:
            self._told.add(text)
            log.warning("%s", text)

    def forget(self) -> None:
        """Hold nothing of a checkpoint any more."""
        self.version, self.checkpoint, self._optimizer_states = None, {}, []

    def close(self) -> None:
        """Wait for the save under way, and stop tracking."""
        self.forget()
        checkpointer, self.checkpointer = self.checkpointer, None
        if checkpointer is not None:
            try:
                checkpointer.close()
            finally:
                self.note_saved()


class LoggedMetrics:
    """The metrics of one number that a trainer holds, and the step at which each was logged.

    A trainer keeps a metric until it is logged anew, also while the weights change.

    Parameters
    ----------
    trainer
        Whose metrics they are.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._logged: dict[str, tuple[torch.Tensor, int]] = {}

    def restore(self, metrics: Mapping[str, float]) -> None:
        """Give the trainer those of a version, of which a scheduler may ask before new ones come."""
        self._trainer.callback_metrics.update({name: torch.tensor(one) for name, one in metrics.items()})
        self.note()
        self._logged = {name: (value, -1) for name, (value, _) in self._logged.items()}

    def note(self) -> set[str]:
        """Note those that were logged since the last call, as of the trainer's step, and return their names."""
        new = set()
        for name, value in self._trainer.callback_metrics.items():
            known = self._logged.get(name)
            # Each read makes another tensor over the same memory, and what is held is not used for a new value.
            if known is None or known[0].data_ptr() != value.data_ptr():
                self._logged[name] = value, self._trainer.global_step
                new.add(name)
        return new

    def all(self) -> dict[str, float]:
        """Those that the trainer holds."""
        return {name: float(one) for name, one in self._trainer.callback_metrics.items() if one.numel() == 1}

    def of_this_step(self) -> dict[str, float]:
        """Those that were logged at the trainer's step."""
        self.note()
        step = self._trainer.global_step
        return {name: value for name, value in self.all().items() if self._logged[name][1] == step}


class _Kept:
    """What Lightning keeps of a fit, as it is saved. It is loaded before the model, by `cnr_store.state_of`."""

    value: Any = None

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, state: Any) -> None:
        pass


def _marked(path: Any, url: str) -> str | None:
    """The version that a marker of this store names, None of any other file."""
    try:
        with fsspec.open(str(path), "rb") as file:
            data = file.read(1 << 16)
        document = json.loads(data) if data.startswith(b"{") else {}
    except (OSError, ValueError):  # the other plugin says what is wrong
        return None
    return document.get("version") if document.get(_MARK) == url else None


def _write_marker(path: str, url: str, version: str) -> None:
    """Make a file that stands for a version."""
    filesystem, place = fsspec.url_to_fs(path)
    filesystem.makedirs(filesystem._parent(place), exist_ok=True)
    filesystem.pipe_file(place, json.dumps({_MARK: url, "version": version}).encode())


def _tag_of(path: str) -> str:
    """The tag that keeps the version for which a marker stands."""
    return f"lightning-{hashlib.sha256(path.encode()).hexdigest()[:16]}"


def pack(value: Any, live: Mapping[Any, str]) -> Any:
    """A checkpoint as a state that holds no tensor of the model's own, and says which tensors are torch's.

    `live`: from `live_tensors`.
    """
    if isinstance(value, torch.Tensor):
        if name := live.get(_place(value)):
            return {LIVE: name}
        return {TENSOR: value, "dtype": str(value.dtype).removeprefix("torch.")}
    if type(value) in (list, tuple):
        return type(value)(pack(item, live) for item in value)
    if type(value) in (dict, OrderedDict):
        return {key: pack(item, live) for key, item in value.items()}
    return value


def unpack(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The checkpoint again, with `tensors`, by name, where it held the model's own.

    Entries of mappings are left out for a tensor that the model lacks; in a sequence it is a `ModelMismatchError`.
    """
    if isinstance(value, dict):
        if value.keys() == {LIVE}:
            if value[LIVE] not in tensors:
                raise ModelMismatchError(
                    f"the version holds state with {value[LIVE]!r}, which the model lacks"
                )
            return tensors[value[LIVE]]
        if value.keys() == {TENSOR, "dtype"}:
            return torch.from_numpy(np.array(value[TENSOR])).view(dtype_named(value["dtype"]))
        if isinstance(value, Counter):
            return value
        lost = [
            key
            for key, item in value.items()
            if isinstance(item, dict) and item.get(LIVE, "") not in {"", *tensors}
        ]
        return {key: unpack(item, tensors) for key, item in value.items() if key not in lost}
    if type(value) in (list, tuple):
        return type(value)(unpack(item, tensors) for item in value)
    return value


def live_tensors(module: torch.nn.Module) -> dict[Any, str]:
    """The names of a module's parameters and buffers, by where they lie."""
    state = module.state_dict()
    tensors = {name: one for name, one in state.items() if isinstance(one, torch.Tensor) and one.numel()}
    return {_place(one): name for name, one in tensors.items()}


def _place(tensor: torch.Tensor) -> Any:
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return None
    return tensor.data_ptr(), tensor.dtype, tensor.device, tuple(tensor.shape), tensor.stride()
