"""The optimizers of FBGEMM, which change rows in the backward pass of a lookup."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cnr_store.errors import UnsupportedModelError

_SLOTS = {
    "sgd": {},
    "exact_sgd": {},
    "exact_adagrad": {"momentum1": False},
    "row_wise_adagrad": {"momentum1": True},
    "exact_row_wise_adagrad": {"momentum1": True},
    "adam": {"momentum1": False, "exp_avg_sq": False},
    "partial_row_wise_adam": {"momentum1": False, "exp_avg_sq": True},
    "lamb": {"momentum1": False, "exp_avg_sq": False},
    "partial_row_wise_lamb": {"momentum1": False, "exp_avg_sq": True},
    "ensemble_row_wise_adagrad": {"momentum1": True, "sparse_ema": False},
    "ema_in_place_row_wise_adagrad": {"momentum1": True},
}
"""State of each optimizer by name, and whether it is one number a row."""

_UNCOUNTED = {"sgd", "exact_sgd", "exact_adagrad", "row_wise_adagrad", "exact_row_wise_adagrad"}
"""Of these the number of lookups changes what a step does only where they keep ``prev_iter``."""

_AVERAGING = {"ensemble_row_wise_adagrad", "ema_in_place_row_wise_adagrad"}
"""Every so many lookups these change all rows."""


@dataclass(frozen=True)
class FusedOptimizer:
    """What changes a table's rows in the backward pass."""

    kind: str  # FBGEMM's name of it: ``"exact_row_wise_adagrad"``
    slots: Mapping[str, bool]  # its state that follows rows, by name, and whether that is one number a row

    @classmethod
    def of(cls, fused_params: Mapping[str, Any], table: str) -> FusedOptimizer:
        """The optimizer that TorchRec's `fused_params` ask for.

        `fused_params`: of the table.
        `table`: what errors call the table.
        """
        kind = str(getattr(fused_params.get("optimizer"), "value", "exact_sgd"))
        if kind not in _SLOTS:
            raise UnsupportedModelError(
                f"table {table!r} has the fused optimizer {kind!r}, which is not known; "
                f"use one of {', '.join(sorted(_SLOTS))}"
            )
        slots = dict(_SLOTS[kind])
        decay = getattr(fused_params.get("weight_decay_mode"), "name", "NONE")
        if kind == "exact_row_wise_adagrad" and decay in ("COUNTER", "COWCLIP", "DECOUPLE_GLOBAL"):
            slots["prev_iter"] = True
            if decay != "DECOUPLE_GLOBAL":
                slots["row_counter"] = True
        if kind == "adam" and getattr(
            fused_params.get("extra_optimizer_config"), "use_rowwise_bias_correction", False
        ):
            slots["row_counter"] = True
        return cls(kind, slots)

    def moves_untouched_rows(self) -> str | None:
        """Why rows may change that were not looked up with gradients. None if none does.

        Weight decay, momentum, counters and stochastic rounding touch the rows of a backward pass only: FBGEMM makes up
        for the steps that a row missed when it is looked up next.
        """
        if self.kind in _AVERAGING:
            return f"the optimizer {self.kind} averages all rows every so many lookups"
        return None

    def settings(self, kernel: Any) -> dict[str, float]:
        """The numbers that go on with training, of a kernel of TorchRec.

        ``lr`` is that of the optimizer's group, which may be newer than the kernel's own. ``iter`` counts lookups.
        """
        (group,) = kernel.fused_optimizer.param_groups
        module = kernel.emb_module
        settings: dict[str, float] = {"lr": float(group["lr"])}
        if "prev_iter" in self.slots or self.kind not in _UNCOUNTED:
            settings["iter"] = int(module.iter.item())
        if "row_counter" in self.slots and "prev_iter" in self.slots:
            settings["max_counter"] = float(module.max_counter.item())
        return settings

    @staticmethod
    def assign(kernel: Any, settings: Mapping[str, float]) -> None:
        """Have a kernel of TorchRec use what `settings` returned.

        `kernel`: holds shards of the table.
        `settings`: a name that is missing stays as it is.
        """
        optimizer, module = kernel.fused_optimizer, kernel.emb_module
        if "lr" in settings:
            (group,) = optimizer.param_groups
            group["lr"] = settings["lr"]
            optimizer.step()  # tells the kernel, and does nothing else
        if "iter" in settings:
            module.iter.fill_(int(settings["iter"]))
            module.iter_cpu.fill_(int(settings["iter"]))
        if "max_counter" in settings:
            module.max_counter.fill_(settings["max_counter"])
