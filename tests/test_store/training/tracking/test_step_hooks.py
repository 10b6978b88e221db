"""Hooks of others around a step can't hide what the step changed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.test_store.support.tracked_table import TRUSTED, Bench

Hook = Callable[[Optimizer, Any, Any], None]
DENSE = [kind for kind in TRUSTED if "sparse" not in kind]


def zeroes(optimizer: Optimizer, *_: object) -> None:
    optimizer.zero_grad(set_to_none=False)


def drops(optimizer: Optimizer, *_: object) -> None:
    optimizer.zero_grad()


def fails(*_: object) -> None:
    raise RuntimeError("a hook of the user's")


@contextmanager
def everywhere(hook: Hook) -> Iterator[None]:
    handle = register_optimizer_step_post_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def row_waiting_for_its_step(bench: Bench) -> None:
    """Its lookup was saved long ago."""
    bench.forward(7).backward()
    for _ in range(3):
        bench.swap()


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("hook", [zeroes, drops, fails])
@pytest.mark.parametrize("kind", DENSE)
def test_a_hook_after_the_step_hides_no_row(kind: str, hook: Hook, given: bool) -> None:
    bench = Bench(kind, given=given)
    bench.train(1)
    bench.optimizer.register_step_post_hook(hook)
    row_waiting_for_its_step(bench)
    with suppress(RuntimeError):
        bench.step()
    assert bench.swap() == [7]


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("kind", ["sgd", "adagrad"])
def test_hooks_after_the_steps_of_all_optimizers_hide_no_row(kind: str, given: bool) -> None:
    with everywhere(zeroes):
        bench = Bench(kind, given=given)
        row_waiting_for_its_step(bench)
        bench.step()
        assert bench.swap() == [7]


@pytest.mark.parametrize("kind", ["sgd", "adagrad"])
def test_a_hook_that_was_put_first_later_hides_no_row(kind: str) -> None:
    bench = Bench(kind)
    bench.train(1)
    handle = bench.optimizer.register_step_post_hook(zeroes)
    hooks = bench.optimizer._optimizer_step_post_hooks
    assert isinstance(hooks, OrderedDict)
    hooks.move_to_end(handle.id, last=False)
    row_waiting_for_its_step(bench)
    bench.step()
    assert bench.swap() == [7]


@pytest.mark.parametrize("kind", DENSE)
def test_a_save_in_a_hook_after_the_step_has_its_rows(kind: str) -> None:
    bench = Bench(kind)
    row_waiting_for_its_step(bench)
    saved: list[list[int]] = []
    bench.optimizer.register_step_post_hook(lambda *_: saved.append(bench.swap()))
    bench.step()
    assert saved == [[7]]
    assert bench.swap() == []


@pytest.mark.parametrize("kind", DENSE)
def test_a_save_within_a_step_forgets_nothing(kind: str) -> None:
    bench = Bench(kind)

    def closure() -> float:
        bench.optimizer.zero_grad()
        bench.forward(5).backward()
        bench.swap()
        return 0.0

    bench.optimizer.register_step_post_hook(zeroes)
    bench.optimizer.step(closure)
    assert bench.swap() == [5]


def test_a_step_keeps_the_hooks_of_others_in_their_order() -> None:
    bench = Bench()
    seen: list[str] = []
    bench.optimizer.register_step_post_hook(lambda *_: seen.append("first"))
    removed = bench.optimizer.register_step_post_hook(lambda *_: seen.append("removed"))
    bench.optimizer.register_step_post_hook(lambda *_: seen.append("second"))
    bench.train(1)
    removed.remove()
    bench.train(2)
    assert seen == ["first", "removed", "second", "first", "second"]
    assert bench.swap() == [1, 2]
