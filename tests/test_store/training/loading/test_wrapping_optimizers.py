"""Optimizers around other ones, and several over one table: their state comes back, and training goes on alike."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import zarr
from torch import nn
from torch.optim import SGD, Adagrad, Adam, Optimizer, SparseAdam

import cnr_store
from cnr_store.errors import ModelMismatchError, OptionError, StateError, UnsupportedModelError

ROWS = 64
Make = Callable[[nn.ModuleDict], list[Optimizer]]


class Slow(Optimizer):
    """Lookahead: slow weights as state, and the state of the inner optimizer under a name of its own."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner, self.param_groups = inner, inner.param_groups
        self.steps = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "inner": self.inner.state_dict(), "steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        self.inner.load_state_dict(state_dict["inner"])
        self.param_groups, self.steps = self.inner.param_groups, state_dict["steps"]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.advance()

    @torch.no_grad()
    def advance(self) -> None:
        for parameter in (each for group in self.param_groups for each in group["params"]):
            self.state[parameter].setdefault("slow", parameter.clone())
        self.inner.step()
        self.steps += 1
        for parameter, kept in self.state.items() if self.steps % 2 == 0 else ():
            parameter.copy_(kept["slow"].lerp_(parameter, 0.5))


class Masked(Optimizer):
    """Its state dict is in no form of torch's."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {})
        self.param_groups = inner.param_groups

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": self.inner.state_dict(), "masked": {}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict["optimizer"])

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step(closure)


class Fast(Optimizer):
    """As in packages of optimizers: its state dict has groups, no ``state``; and ``Optimizer.__init__`` never ran."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner, self.param_groups, self.defaults = inner, inner.param_groups, inner.defaults
        self.state, self.steps = defaultdict(dict), 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        Slow.advance(self)  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, Any]:
        inner, numbers = self.inner.state_dict(), itertools.count()
        every = [each for group in self.param_groups for each in group["params"]]
        slow = {number: self.state[each] for number, each in zip(numbers, every, strict=False)}
        return {
            "fast_state": inner["state"],
            "slow_state": slow,
            "param_groups": inner["param_groups"],
            "n": self.steps,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        groups = state_dict["param_groups"]
        self.inner.load_state_dict({"state": state_dict["fast_state"], "param_groups": groups})
        self.param_groups, self.steps = self.inner.param_groups, state_dict["n"]
        every = [each for group in self.param_groups for each in group["params"]]
        self.state = defaultdict(
            dict, {every[number]: kept for number, kept in state_dict["slow_state"].items()}
        )


class Sharp(Optimizer):
    """As SAM: around a base whose groups it shares, and whose state its own state dict leaves out."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"rho": 0.05})
        self.base = SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base.param_groups

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.base.param_groups = self.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in (each for group in self.param_groups for each in group["params"]):
            self.state[parameter]["old"] = parameter.detach() + 1
        self.base.step()


def sharp(model: nn.ModuleDict) -> list[Optimizer]:
    outer = Sharp(model.parameters())
    return [outer, outer.base]


def by_heads(kind: Any, **options: Any) -> Make:
    """An optimizer for each head, both over the table."""

    def make(model: nn.ModuleDict) -> list[Optimizer]:
        table = [*model["users"].parameters()]
        rates = {"a": 0.1, "b": 0.02}
        return [kind([*table, *model[head].parameters()], lr=rate, **options) for head, rate in rates.items()]

    return make


class Job:
    """A model whose heads are trained in turns, each by the optimizer at its place, or by the first."""

    def __init__(self, make: Make, sparse: bool = False) -> None:
        torch.manual_seed(len(str(make)))
        heads = {head: nn.Linear(4, 1) for head in "ab"}
        self.model = nn.ModuleDict({"users": nn.Embedding(ROWS, 4, sparse=sparse), **heads})
        self.optimizers = make(self.model)

    def train(self, step: int, head: int | None = None) -> None:
        place = step % 2 if head is None else head
        in_turns = isinstance(self.optimizers[0], Adagrad | Adam | SparseAdam)
        optimizer = self.optimizers[place % len(self.optimizers) if in_turns else 0]
        self.model.zero_grad()
        ids = torch.arange(step, step + 5) % ROWS
        self.model["ab"[place]](self.model["users"](ids)).square().sum().backward()
        optimizer.step()

    @property
    def content(self) -> list[torch.Tensor]:
        states = [each.state_dict() for each in self.optimizers]
        return [each.clone() for each in tensors((self.model.state_dict(), states))]

    def checkpointer(self, url: Path, **options: Any) -> cnr_store.Checkpointer:
        return cnr_store.Checkpointer(url, self.model, self.optimizers, bits=32, **options)

    def save(self, url: Path) -> None:
        with self.checkpointer(url) as checkpointer:
            checkpointer.save(1).result()


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """All in a state, in the order of keys: that of entries is the order of the first steps."""
    if torch.is_tensor(value):
        yield value
    if isinstance(value, dict):
        value = [value[key] for key in sorted(value, key=str)]
    for each in value if isinstance(value, list | tuple) else ():
        yield from tensors(each)


def slots_of(url: Path) -> set[str]:
    """Segments of the arrays of the table, in the newest version."""
    group = cnr_store.open(url)["tables/users"]
    assert isinstance(group, zarr.Group)
    return {*group}


def assert_same(job: Job, expected: Sequence[torch.Tensor]) -> None:
    content = job.content
    assert len(content) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(content, expected, strict=True))


def assert_goes_on(url: Path, job: Job, make: Make, version: Any = "latest") -> Job:
    """Train `job` on, and another one from the version; then both are alike."""
    other = Job(make)
    other.train(50)
    with other.checkpointer(url) as checkpointer:
        checkpointer.load(version)
    assert_same(other, job.content)
    for step in range(9, 13):
        job.train(step)
        other.train(step)
    assert_same(other, job.content)
    return other


WRAPPED: dict[str, Make] = {
    "slow adagrad": lambda model: [Slow(Adagrad(model.parameters()))],
    "slow adam": lambda model: [Slow(Adam(model.parameters()))],
    "slow and inner": lambda model: [
        outer := Slow(SGD(model.parameters(), lr=0.1, momentum=0.9)),
        outer.inner,
    ],
    "masked": lambda model: [Masked(Adam(model.parameters()))],
    "fast": lambda model: [Fast(Adam(model.parameters()))],
    "sharp": sharp,
}


@pytest.mark.parametrize("make", WRAPPED.values(), ids=WRAPPED)
def test_what_a_wrapper_saves_comes_back_without_a_warning(
    tmp_path: Path, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(make)
    with job.checkpointer(tmp_path) as checkpointer:
        for step in (1, 2, 3):
            job.train(step)
            checkpointer.save(step).result()
    assert "in no version" not in caplog.text
    assert_goes_on(tmp_path, job, make)


def test_the_way_out_of_a_warning_about_inner_state_is_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(sharp)
    optimizers, job.optimizers = job.optimizers, job.optimizers[:1]
    with job.checkpointer(tmp_path / "a") as checkpointer:
        for step in (1, 2):
            job.train(step)
            checkpointer.save(step).result()
    said = [line for line in caplog.messages if "in no version" in line]
    assert said == [
        "5 parameters of the model are updated by SGD, whose state is in no version; give all optimizers that train: "
        "Checkpointer(url, model, optimizer)"
    ]
    job.optimizers = optimizers
    job.save(tmp_path / "b")
    other = assert_goes_on(tmp_path / "b", job, sharp)
    other.optimizers[0].param_groups[0]["lr"] = 0.5  # as a scheduler does
    assert other.optimizers[1].param_groups[0]["lr"] == 0.5


def test_state_without_names_fits_no_other_order(tmp_path: Path) -> None:
    for number, wrapper in enumerate((Slow, Masked)):
        url = tmp_path / str(number)

        def make(model: nn.ModuleDict, wrapper: Any = wrapper) -> list[Optimizer]:
            return [wrapper(Adam(model.parameters()))]

        def turned(model: nn.ModuleDict, wrapper: Any = wrapper) -> list[Optimizer]:
            return [wrapper(Adam([*model.parameters()][::-1]))]

        job, other = Job(make), Job(turned)
        job.train(1)
        other.train(2)
        job.save(url)
        kept = other.optimizers[0].inner.state_dict()["state"]  # type: ignore[attr-defined]
        with other.checkpointer(url) as checkpointer:
            with pytest.raises(
                ModelMismatchError, match=rf"optimizer 0 \({wrapper.__name__}\) in .* in order"
            ):
                checkpointer.load()
            restored = checkpointer.load(strict="ignore")
        assert restored.missing == ("state of optimizer 0 that names no parameters",)
        now = other.optimizers[0].inner.state_dict()["state"]  # type: ignore[attr-defined]
        assert all(torch.equal(one, two) for one, two in zip(tensors(now), tensors(kept), strict=True))


def test_state_by_addresses_is_refused(tmp_path: Path) -> None:
    class ByAddress(Masked):
        def state_dict(self) -> dict[str, Any]:
            every = (each for group in self.param_groups for each in group["params"])
            return {"slow": [{id(each): 1.0 for each in every}]}

    job = Job(lambda model: [ByAddress(Adagrad(model.parameters()))])
    with (
        job.checkpointer(tmp_path) as checkpointer,
        pytest.raises(StateError, match="ByAddress has the address"),
    ):
        checkpointer.save(1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "policy"),
    [
        *((Adagrad, each) for each in ("full", "one-shot", "consecutive", "intermittent")),
        (Adam, "intermittent"),
    ],
)
def test_two_optimizers_of_one_table(tmp_path: Path, kind: Any, policy: str) -> None:
    make = by_heads(kind)
    job = Job(make)
    saved = []
    with job.checkpointer(tmp_path, policy=policy) as checkpointer:
        for step in (2, 7, 12, 18):
            job.train(step)
            saved.append((checkpointer.save(step).result(), job.content))
    if policy == "consecutive":
        assert [version.rows for version, _ in saved] == [ROWS, 5, 5, 5]  # moved by the one, or by the other
    for version, content in saved:
        other = Job(make)
        with other.checkpointer(tmp_path) as checkpointer:
            checkpointer.load(version)
        assert_same(other, content)
    assert_goes_on(tmp_path, job, make)
    slots = (
        {"sum", "sum%401"} if kind is Adagrad else {"exp_avg", "exp_avg%401", "exp_avg_sq", "exp_avg_sq%401"}
    )
    assert slots_of(tmp_path) == {"weight", *slots}


@pytest.mark.slow
@pytest.mark.parametrize("resumes", [False, True])
def test_state_keeps_its_name_when_another_optimizer_gets_some(tmp_path: Path, resumes: bool) -> None:
    def make(model: nn.ModuleDict) -> list[Optimizer]:
        return [SparseAdam(model["users"].parameters(), lr=rate) for rate in (0.1, 0.02)]

    job = Job(make, sparse=True)
    contents = []
    checkpointer = job.checkpointer(tmp_path, policy="consecutive")
    for step, place in ((1, 1), (7, 0), (13, 1), (19, 0)):
        job.train(step, place)
        version = checkpointer.save(step).result()
        contents.append(job.content)
        if resumes:
            checkpointer.close()
            job = Job(make, sparse=True)
            checkpointer = job.checkpointer(tmp_path, policy="consecutive")
            checkpointer.load()
    checkpointer.close()
    assert version.rows == 5
    assert {"exp_avg", "exp_avg%400"} < slots_of(tmp_path)
    for step, content in zip((1, 7, 13, 19), contents, strict=True):
        other = Job(make, sparse=True)
        with other.checkpointer(tmp_path) as reader:
            reader.load(step)
        assert_same(other, content)


def test_names_follow_the_version_loaded(tmp_path: Path) -> None:
    def make(model: nn.ModuleDict) -> list[Optimizer]:
        return [SparseAdam(model["users"].parameters(), lr=rate) for rate in (0.1, 0.02)]

    job, other = Job(make, sparse=True), Job(make, sparse=True)
    with job.checkpointer(tmp_path / "a", policy="consecutive") as checkpointer:
        for step, place in ((1, 1), (2, 0)):
            job.train(step, place)
            checkpointer.save(step).result()
    other.train(1, 0)  # so that this one calls the first one's state exp_avg, before it loads
    other.train(1, 1)
    with other.checkpointer(tmp_path / "a", policy="consecutive") as checkpointer:
        checkpointer.explain()
        checkpointer.load()
        other.train(9, 1)
        assert checkpointer.save(9).result().rows == 5
        checkpointer.load()
        expected = other.content
    last = Job(make, sparse=True)
    with last.checkpointer(tmp_path / "a") as checkpointer:
        checkpointer.load()
    assert_same(last, expected)


def test_state_with_a_name_of_ours_is_refused(tmp_path: Path) -> None:
    job = Job(lambda model: [Adagrad(model.parameters())])
    parameter = job.optimizers[0].param_groups[0]["params"][0]
    job.optimizers[0].state[parameter]["sum@1"] = torch.zeros(ROWS)
    with job.checkpointer(tmp_path) as checkpointer, pytest.raises(UnsupportedModelError, match="without @"):
        checkpointer.save(1)


def test_one_optimizer_given_twice_is_refused(tmp_path: Path) -> None:
    job = Job(lambda model: [Adagrad(model.parameters())] * 2)
    with pytest.raises(StateError, match="two optimizers given have one state, of Adagrad"):
        job.checkpointer(tmp_path)


def test_copies_of_parameters_go_into_the_state_of_the_caller(tmp_path: Path) -> None:
    def copied(model: nn.ModuleDict) -> list[Optimizer]:
        return [Adam([each.detach().double().requires_grad_() for each in model.parameters()])]

    job = Job(copied)
    with pytest.raises(UnsupportedModelError, match=r"is not in the model, .* in `state=` instead"):
        job.checkpointer(tmp_path)
    for parameter in job.optimizers[0].param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    job.optimizers[0].step()
    other = Job(copied)
    for each in (job, other):
        with cnr_store.Checkpointer(
            tmp_path, each.model, state={"masters": each.optimizers[0]}, bits=32
        ) as checkpointer:
            checkpointer.save(1).result() if each is job else checkpointer.load()
    assert_same(other, job.content)


class Counted(Masked):
    """Its state dict is torch's, and a list besides."""

    def state_dict(self) -> dict[str, Any]:
        return {**self.inner.state_dict(), "averages": [1.0]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})


@pytest.mark.parametrize("wrapper", [Masked, Counted, Slow])
def test_what_is_excluded_may_not_be_in_state_without_names(tmp_path: Path, wrapper: Any) -> None:
    def make(model: nn.ModuleDict) -> list[Optimizer]:
        return [wrapper(Adam(model.parameters()))]

    def without(model: nn.ModuleDict) -> list[Optimizer]:
        return [wrapper(Adam([*model["a"].parameters(), *model["b"].parameters()]))]

    said = rf"exclude leaves 'users.weight' out, but state of optimizer 0 \({wrapper.__name__}\)"
    with pytest.raises(OptionError, match=said):
        Job(make).checkpointer(tmp_path, tracking=cnr_store.Tracking(exclude="users"))
    job, other = Job(without), Job(without)
    job.train(1)
    for each in (job, other):  # as the message advises
        with each.checkpointer(tmp_path, tracking=cnr_store.Tracking(exclude="users")) as checkpointer:
            checkpointer.save(1).result() if each is job else checkpointer.load()
    content, expected = other.optimizers[0].state_dict(), job.optimizers[0].state_dict()
    assert all(map(torch.equal, tensors(content), tensors(expected)))


@pytest.mark.parametrize("form", [dict, list])
def test_a_state_dict_that_contains_itself_is_refused(tmp_path: Path, form: Any) -> None:
    class Endless(Masked):
        def state_dict(self) -> dict[str, Any]:
            me: Any = {} if form is dict else [None]
            me["me" if form is dict else 0] = me
            return {**self.inner.state_dict(), "me": me}

    job = Job(lambda model: [Endless(Adam(model.parameters()))])
    job.train(1)
    with (
        job.checkpointer(tmp_path) as checkpointer,
        pytest.raises(StateError, match=r"\['more'\]\['me'\].*contains itself"),
    ):
        checkpointer.save(1)


def kept_whole(wrapper: Any) -> Make:
    return lambda model: [wrapper(Adam(model.parameters()))]


def hooked(model: nn.ModuleDict) -> list[Optimizer]:
    """torch's own, with hooks that change the form of its state dict."""
    optimizer = Adam(model.parameters())
    optimizer.register_state_dict_post_hook(lambda _, state: {"wrapped": state})
    optimizer.register_load_state_dict_pre_hook(lambda _, state: state.get("wrapped", state))
    return [optimizer]


WHOLE = {"masked": kept_whole(Masked), "fast": kept_whole(Fast), "hooked": hooked}


@pytest.mark.parametrize("chosen", [{"tables": "users"}, {"rows": [1]}, {"tensors": "a.*"}], ids=str)
@pytest.mark.parametrize("make", WHOLE.values(), ids=WHOLE)
def test_a_part_is_loaded_beside_an_optimizer_kept_whole(tmp_path: Path, make: Make, chosen: Any) -> None:
    job, other = Job(make), Job(make)
    job.train(1)
    job.save(tmp_path)
    for step in (2, 3):
        other.train(step)
    kept = [each.clone() for each in tensors(other.optimizers[0].state_dict())]
    with other.checkpointer(tmp_path) as checkpointer:
        restored = checkpointer.load(**chosen)
    assert restored.missing == ("state of optimizer 0 that names no parameters",)
    assert all(map(torch.equal, tensors(other.optimizers[0].state_dict()), kept))
    name, rows = ("a.weight", slice(None)) if "tensors" in chosen else ("users.weight", slice(1, 2))
    assert torch.equal(other.model.state_dict()[name][rows], job.model.state_dict()[name][rows])


def test_no_part_is_loaded_of_state_in_another_form(tmp_path: Path) -> None:
    job, other = Job(lambda model: [Adam(model.parameters())]), Job(hooked)
    job.train(1)
    other.train(2)
    job.save(tmp_path)
    content = other.content
    with (
        other.checkpointer(tmp_path) as checkpointer,
        pytest.raises(ModelMismatchError, match=r"optimizer 0 \(Adam\) is in another form"),
    ):
        checkpointer.load(tables="users")
    assert_same(other, content)


def test_hooks_may_change_the_form_of_a_state_dict(tmp_path: Path) -> None:
    job = Job(hooked)
    job.train(1)
    job.save(tmp_path)
    assert_goes_on(tmp_path, job, hooked)


@pytest.mark.parametrize("returned", [None, [], ({},)])
def test_a_state_dict_that_is_no_dictionary_is_refused_when_made(tmp_path: Path, returned: Any) -> None:
    class Odd(Masked):
        def state_dict(self) -> Any:
            return returned

    kind = type(returned).__name__
    with pytest.raises(StateError, match=f"the state_dict of Odd returned a {kind}; let it"):
        Job(kept_whole(Odd)).checkpointer(tmp_path)


@pytest.mark.parametrize("group", [{"lr": 1}, ["lr"], {"params": None}])
def test_groups_without_parameters_are_kept_whole(tmp_path: Path, group: Any) -> None:
    class Bare(Masked):
        def state_dict(self) -> Any:
            return {"state": {}, "param_groups": [group], "optimizer": self.inner.state_dict()}

    job = Job(kept_whole(Bare))
    job.train(1)
    job.save(tmp_path)
    assert_goes_on(tmp_path, job, kept_whole(Bare))


class OneCount(Optimizer):
    """Its parameters have one count, as the same tensor; and it may be not a number."""

    def __init__(self, params: Any, first: float = 0.0) -> None:
        super().__init__(params, {"lr": 0.1})
        self.first = first

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        every = [each for group in self.param_groups for each in group["params"] if each.grad is not None]
        if not self.state:
            count, bound = torch.zeros(2, dtype=torch.int32), torch.tensor(self.first)
            self.state.update(
                {each: {"step": count, "own": torch.zeros(2), "bound": bound} for each in every}
            )
        self.state[every[0]]["step"] += 1
        for each in every:
            each.sub_(each.grad, alpha=0.1 / float(self.state[each]["step"][0]))


@pytest.mark.parametrize("first", [0.0, float("nan")])
@pytest.mark.parametrize("strict", ["raise", "ignore"])
def test_parameters_share_tensors_of_state_as_before(tmp_path: Path, strict: Any, first: float) -> None:
    def make(model: nn.ModuleDict) -> list[Optimizer]:
        return [OneCount([*model["users"].parameters(), *model["a"].parameters()], first)]

    def divided(model: nn.ModuleDict) -> list[Optimizer]:
        return [OneCount([{"params": part.parameters()} for part in (model["users"], model["a"])], first)]

    job, other = Job(make), Job(make if strict == "raise" else divided)
    for step in (2, 4):
        job.train(step)
    job.save(tmp_path)
    with other.checkpointer(tmp_path) as checkpointer:
        checkpointer.load(strict=strict)
    for step in (6, 8):
        job.train(step)
        other.train(step)
    assert all(map(torch.equal, other.model.state_dict().values(), job.model.state_dict().values()))
    values = other.optimizers[0].state.values()
    assert [len({id(value[key]) for value in values}) for key in ("step", "bound", "own")] == [1, 1, 3]


def test_state_that_optimizers_in_another_order_lose_is_named(tmp_path: Path) -> None:
    def make(model: nn.ModuleDict) -> list[Optimizer]:
        return [Adam(model["users"].parameters()), Adam(model["a"].parameters())]

    def turned(model: nn.ModuleDict) -> list[Optimizer]:
        return make(model)[::-1]

    def frozen(model: nn.ModuleDict) -> list[Optimizer]:
        return make(model)[1:]

    job = Job(make)
    job.train(2)
    job.optimizers[1].step()
    job.save(tmp_path)
    table, *tops = (f"state of {name!r} in optimizer {{}}" for name in ("users.weight", "a.bias", "a.weight"))
    with Job(turned).checkpointer(tmp_path) as checkpointer:
        with pytest.raises(
            ModelMismatchError, match=r"only in the model: state of 'users.weight' in optimizer 1"
        ):
            checkpointer.load(tables="users")
        restored = checkpointer.load(strict="ignore")
    lost = {table.format(1), *(top.format(0) for top in tops)}
    assert {*restored.missing} == {"settings of optimizer 0", "settings of optimizer 1", *lost}
    assert {*restored.unexpected} == {table.format(0), *(top.format(1) for top in tops)}
    with Job(frozen).checkpointer(tmp_path) as checkpointer:
        restored = checkpointer.load(strict="ignore")
    assert {*restored.unexpected} == {table.format(0), "state of optimizer 1"}
