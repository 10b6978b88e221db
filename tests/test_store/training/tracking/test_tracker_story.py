"""Any actions on a table: rows that changed since they were saved are flagged."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cnr_store.training.model.optimizer_state import row_slots
from tests.nightly import histories
from tests.test_store.support.tracked_table import ROWS, TRUSTED, Bench, listed

ROW_IDS = st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=4)
NO_IDS: st.SearchStrategy[list[int]] = st.just([])
ACTIONS = st.one_of(
    st.tuples(st.just("forward"), ROW_IDS),
    st.tuples(st.just("update"), NO_IDS),
    st.tuples(st.just("save"), NO_IDS),
    st.tuples(st.sampled_from(["evaluate", "functional", "write"]), ROW_IDS),
    st.tuples(st.sampled_from(["step", "fail", "decay", "reload"]), NO_IDS),
    st.tuples(st.just("write_slot"), ROW_IDS),
)


class Story(Bench):
    """Actions on a bench, beside a plain copy of what was saved."""

    def __init__(self, kind: str, given: bool, max_norm: float | None) -> None:
        super().__init__(kind, given, max_norm=max_norm)
        self.given = given
        self.losses: list[Any] = []
        self.saved = self.now()

    def now(self) -> dict[str, torch.Tensor]:
        """Copies of all that is saved by rows."""
        slots = row_slots(self.optimizer, self.table.weight) if self.given else {}
        return {key: value.detach().clone() for key, value in {"": self.table.weight, **slots}.items()}

    def tell(self, action: str, rows: list[int]) -> None:
        if action == "forward":
            self.losses.append(self.forward(*rows))
        elif action == "evaluate":
            with torch.no_grad():
                self.forward(*rows)
        elif action == "functional":
            self.functional(*rows).backward()
        elif action == "write":
            self.write(rows[0])
        elif action == "update" and self.losses:
            self.losses.pop(0).backward()
            self.step()
        elif action == "step":
            self.optimizer.step()
        elif action == "decay":
            self.change_decay()
        elif action == "reload":
            self.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        elif action == "write_slot":
            for slot in row_slots(self.optimizer, self.table.weight).values():
                slot[rows[0]] += 1
        elif action in ("save", "fail"):
            self.save(fails=action == "fail")

    def change_decay(self) -> None:
        group = self.optimizer.param_groups[0]
        if "weight_decay" in group and not self.table.sparse:
            group["weight_decay"] = 0.1 - group["weight_decay"]

    def save(self, fails: bool) -> None:
        flagged = self.tracker.swap()
        now = self.now()
        for key in now.keys() & self.saved.keys():  # a slot that was never saved is saved whole
            changed = np.flatnonzero((self.saved[key] != now[key]).any(dim=1).numpy())
            assert {*changed.tolist()} <= {*listed(flagged["t"])}
        if fails:
            self.tracker.restore(flagged)
        else:
            self.saved = now


@pytest.mark.slow
@settings(deadline=None, max_examples=histories(200))
@given(
    st.sampled_from([*TRUSTED]), st.booleans(), st.sampled_from([None, 0.05]), st.lists(ACTIONS, max_size=25)
)
def test_rows_that_changed_since_they_were_saved_are_flagged(
    kind: str, given_optimizer: bool, max_norm: float | None, actions: list[tuple[str, list[int]]]
) -> None:
    story = Story(kind, given_optimizer, max_norm)
    for action, rows in actions:
        story.tell(action, rows)
    story.save(fails=False)
