"""Hooks of ``load_state_dict`` and loaders of modules run on a load as torch runs them."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import cnr_store
from cnr_store import Checkpointer, ModelMismatchError

ROWS = 300


class Noted(nn.Module):
    """Writes down what a load runs of it, with what it then holds."""

    def __init__(self, name: str, notes: list[str], **children: nn.Module) -> None:
        super().__init__()
        self.name, self.notes = name, notes
        self.weight = nn.Parameter(torch.randn(2))
        for child, module in children.items():
            self.add_module(child, module)
        hooked: Any = self
        hooked.register_load_state_dict_pre_hook(lambda *_: self.note("pre"))
        hooked.register_load_state_dict_post_hook(lambda *_: self.note("post"))

    def note(self, what: str) -> None:
        self.notes.append(f"{self.name} {what} {self.weight.tolist()}")

    def get_extra_state(self) -> str:
        return self.name

    def set_extra_state(self, state: str) -> None:
        self.note(f"extra {state}")

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        self.note(f"loader {sorted(state)} {prefix!r}")
        super()._load_from_state_dict(state, prefix, *rest)
        self.note("loaded")


def noted(notes: list[str]) -> Noted:
    torch.manual_seed(len(notes))
    inner = Noted("inner", notes, top=nn.Linear(2, 2), users=nn.Embedding(ROWS, 2))
    return Noted("outer", notes, first=inner, last=Noted("last", notes))


@pytest.mark.parametrize("wrap", [lambda model: model, nn.DataParallel])
def test_all_run_in_the_order_of_torch(tmp_path: Path, wrap: Callable[[nn.Module], nn.Module]) -> None:
    expected: list[str] = []
    found: list[str] = []
    torch.manual_seed(9)
    saved = wrap(noted([]))
    cnr_store.save(tmp_path, saved)
    plain, loaded = wrap(noted(expected)), wrap(noted(found))
    plain.load_state_dict(saved.state_dict())
    with Checkpointer(tmp_path, loaded) as checkpointer:
        checkpointer.load()
        assert checkpointer.save(2).result().kind == "delta"
    assert found == expected
    assert len(expected) == 15
    for name, values in saved.state_dict().items():
        if isinstance(values, torch.Tensor):
            assert torch.equal(loaded.state_dict()[name], values), name


class Bank(nn.Module):
    """Buffers that take the shape that is stored, one of them from nothing, and a list of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.empty(0))
        self.register_buffer("late", None)
        self.seen: list[torch.Tensor] = []

    def _save_to_state_dict(self, state: dict[str, Any], prefix: str, keep: bool) -> None:
        super()._save_to_state_dict(state, prefix, keep)
        state[prefix + "seen"] = self.seen

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        self.seen = state.pop(prefix + "seen")
        self.kept = torch.empty_like(state[prefix + "kept"])
        if prefix + "late" in state:
            self.late = torch.empty_like(state[prefix + "late"])
        super()._load_from_state_dict(state, prefix, *rest)


class Model(nn.Module):
    def __init__(self, width: int = 2, **more: nn.Module) -> None:
        super().__init__()
        self.users = nn.Embedding(ROWS, 4)
        self.top = nn.Linear(4, width)
        for name, module in more.items():
            self.add_module(name, module)


class Owner(nn.Module):
    """A loader of its own that does nothing else than to load, and plain modules below."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, module in children.items():
            self.add_module(name, module)

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)


def hooked(**children: nn.Module) -> Any:
    module: Any = nn.ModuleDict(children)
    module.register_load_state_dict_pre_hook(lambda *_: None)
    return module


def plain_parts() -> dict[str, nn.Module]:
    return {"first": nn.Linear(4, 4), "deep": nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))}


@pytest.mark.parametrize(
    "build",
    [
        lambda: Model(part=hooked(**plain_parts())),
        lambda: Model(part=Owner(**plain_parts())),
        lambda: hooked(users=nn.Embedding(ROWS, 4), **plain_parts()),
        lambda: Model(part=nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))),
    ],
)
def test_plain_modules_below_one_with_code_of_its_own_are_loaded(
    tmp_path: Path, build: Callable[[], nn.Module]
) -> None:
    saved, model = build(), build()
    cnr_store.save(tmp_path, saved, bits=32)
    with Checkpointer(tmp_path, model) as checkpointer:
        checkpointer.load()
        assert checkpointer.save(2).result().rows == 0
    for name, values in saved.state_dict().items():
        assert torch.equal(model.state_dict()[name], values), name


@pytest.mark.parametrize("container", [hooked, Owner])
@pytest.mark.parametrize(
    ("stored", "present", "told"),
    [
        ({}, {"more": nn.Linear(4, 4)}, "a module lacks 'part.more.weight'"),
        ({"same": nn.Linear(4, 4, bias=False)}, {"same": nn.Linear(4, 4)}, "a module lacks 'part.same.bias'"),
        ({"same": nn.Linear(4, 4)}, {"same": nn.Linear(4, 4, bias=False)}, "no module took 'part.same.bias'"),
        ({"more": nn.Linear(4, 4)}, {}, "no module took 'part.more.weight'"),
        ({"more": nn.Linear(4, 4)}, {"more": nn.ReLU()}, "no module took 'part.more.weight'"),
    ],
)
def test_names_that_differ_below_one_with_code_of_its_own_are_refused(
    tmp_path: Path,
    container: Callable[..., nn.Module],
    stored: dict[str, nn.Module],
    present: dict[str, nn.Module],
    told: str,
) -> None:
    cnr_store.save(tmp_path, Model(part=container(**plain_parts(), **stored)))
    with pytest.raises(ModelMismatchError, match=re.escape(told)):
        cnr_store.load(tmp_path, Model(part=container(**plain_parts(), **present)))


@pytest.mark.parametrize("strict", ["raise", "ignore"])
def test_a_module_takes_its_entries_in_the_shape_they_have(tmp_path: Path, strict: Any) -> None:
    model, fresh = Model(bank=Bank()), Model(bank=Bank())
    bank: Any = model.bank
    bank.kept, bank.late, bank.seen = torch.rand(5, 2), torch.rand(3), [torch.rand(2), torch.arange(5000)]
    cnr_store.save(tmp_path, model, bits=32)
    cnr_store.load(tmp_path, fresh, strict=strict)
    found: Any = fresh.bank
    assert torch.equal(found.kept, bank.kept)
    assert torch.equal(found.late, bank.late)
    assert [each.tolist() for each in found.seen] == [each.tolist() for each in bank.seen]


def test_other_shapes_are_refused_before_anything_changes(tmp_path: Path) -> None:
    model, other = Model(bank=Bank()), Model(width=3, bank=Bank())
    cnr_store.save(tmp_path, model)
    before = {name: str(value) for name, value in other.state_dict().items()}
    with pytest.raises(ModelMismatchError, match=r"'top\.bias' is 3 in the model and 2"):
        cnr_store.load(tmp_path, other)
    assert {name: str(value) for name, value in other.state_dict().items()} == before


def test_extra_state_that_the_version_lacks_is_refused_behind_a_hook_too(tmp_path: Path) -> None:
    model = Model(part=Noted("part", []))
    plain: Any = Model(part=nn.Module())
    plain.part.weight = nn.Parameter(torch.zeros(2))
    cnr_store.save(tmp_path, plain)
    with pytest.raises(ModelMismatchError, match=r"a module lacks 'part\._extra_state'.*partly overwritten"):
        cnr_store.load(tmp_path, model)


def test_what_no_module_takes_is_refused_at_the_save(tmp_path: Path) -> None:
    model: Any = Model()
    model.register_state_dict_post_hook(lambda _module, state, _prefix, _: state.update(epoch=3))
    with pytest.raises(cnr_store.UnsupportedModelError, match=r"'epoch'.*get_extra_state"):
        cnr_store.save(tmp_path, model)


def test_a_hook_may_rename_and_change_what_is_no_table(tmp_path: Path) -> None:
    def move(_module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        state[prefix + "top.weight"] = state.pop(prefix + "old.weight") * 2
        state[prefix + "top.bias"] = state.pop(prefix + "old.bias")

    saved = Model()
    saved.old = saved._modules.pop("top")  # type: ignore[assignment]
    cnr_store.save(tmp_path, saved)
    model: Any = Model()
    model.register_load_state_dict_pre_hook(move)
    with Checkpointer(tmp_path, model) as checkpointer:
        checkpointer.load()
        assert checkpointer.save(2).result().kind == "delta"
    assert torch.equal(model.top.weight, 2 * saved.get_parameter("old.weight"))


def rename(state: dict[str, Any]) -> None:
    state["people.weight"] = state.pop("users.weight")


def swap(state: dict[str, Any]) -> None:
    state["users.weight"], state["items.weight"] = state["items.weight"], state["users.weight"]


@pytest.mark.parametrize("move", [rename, swap])
@pytest.mark.parametrize("strict", ["raise", "ignore"])
def test_a_hook_that_moves_a_table_is_refused_by_name(tmp_path: Path, move: Any, strict: Any) -> None:
    model: Any = Model(items=nn.Embedding(ROWS, 4))
    model.register_load_state_dict_pre_hook(lambda _module, state, *_: move(state))
    cnr_store.save(tmp_path, model)
    with pytest.raises(ModelMismatchError, match=r"table 'users', 'users\.weight', another key"):
        cnr_store.load(tmp_path, model, strict=strict)


def raise_error(*_: object) -> None:
    raise ValueError("no cache")


def return_value(*_: object) -> int:
    return 1


@pytest.mark.parametrize(("hook", "kind"), [(raise_error, ValueError), (return_value, AssertionError)])
def test_an_error_in_a_hook_says_that_the_model_is_partly_overwritten(
    tmp_path: Path, hook: Any, kind: type[Exception]
) -> None:
    model = Model(bank=Bank())
    cnr_store.save(tmp_path, model)
    hooked: Any = model.bank
    hooked.register_load_state_dict_post_hook(hook)
    with pytest.raises(ModelMismatchError, match=r"module 'bank' \(Bank\).*partly overwritten") as caught:
        cnr_store.load(tmp_path, model)
    assert type(caught.value.__cause__) is kind


class Doubled(nn.Embedding):
    """A table whose loader changes a row."""

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        with torch.no_grad():
            self.weight[7] *= 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_a_loader_changes_are_in_the_next_save(tmp_path: Path, dtype: torch.dtype) -> None:
    model = Model(words=Doubled(ROWS, 4, dtype=dtype))
    with Checkpointer(tmp_path, model, policy="consecutive", bits=32) as checkpointer:
        checkpointer.save(1).result()
        checkpointer.load()
        version = checkpointer.save(2).result()
        assert (version.kind, version.rows) == ("delta", 1)
    other = Model(words=nn.Embedding(ROWS, 4, dtype=dtype))
    cnr_store.load(tmp_path, other)
    assert torch.equal(other.get_parameter("words.weight"), model.get_parameter("words.weight"))


class Own(Model):
    """A model with a ``load_state_dict`` of its own."""

    def load_state_dict(self, *args: Any, **options: Any) -> Any:
        found = super().load_state_dict(*args, **options)
        self.norm = self.users.weight.norm().item()
        return found


@pytest.mark.parametrize("options", [{}, {"tables": "users"}])
def test_a_models_own_load_state_dict_is_called(tmp_path: Path, options: Any) -> None:
    saved, model = Model(), Own()
    cnr_store.save(tmp_path, saved, bits=32)
    with Checkpointer(tmp_path, model) as checkpointer:
        checkpointer.load(**options)
        assert checkpointer.save(2).result().rows == 0
    assert model.norm == saved.users.weight.norm().item()


def test_a_partial_load_runs_hooks_and_leaves_what_was_not_chosen(tmp_path: Path) -> None:
    notes: list[str] = []
    model: Any = Model(some=Noted("some", notes), bank=Bank())
    cnr_store.save(tmp_path, model)
    seen = model.bank.seen = [torch.rand(3)]
    notes.clear()
    cnr_store.load(tmp_path, model, tables="users")
    assert [note.split()[1] for note in notes] == ["loader", "pre", "loaded", "post"]
    assert model.bank.seen is seen


def scale(module: nn.Module, name: str) -> None:
    module.get_parameter(name).data.mul_(2)


class Scaled(Model):
    """Hooks that change what they find, before and after, and a swap in ``load_state_dict``."""

    def __init__(self, below: bool = False) -> None:
        super().__init__(items=nn.Embedding(ROWS, 4), other=nn.Linear(4, 2))
        hooked: Any = self.other if below else self
        name = "weight" if below else "other.weight"
        hooked.register_load_state_dict_pre_hook(
            lambda _module, state, prefix, *_: state.update({prefix + name: state[prefix + name] * 2})
        )
        hooked.register_load_state_dict_post_hook(lambda module, _: scale(module, name))


@pytest.mark.parametrize("below", [False, True])
@pytest.mark.parametrize(
    ("options", "changed"),
    [
        ({"tables": "users"}, {"users.weight"}),
        ({"rows": {"users": [3]}, "tables": "users"}, {"users.weight"}),
        ({"tables": (), "tensors": "top.*"}, {"top.weight", "top.bias"}),
    ],
)
def test_hooks_of_a_partial_load_change_nothing_else(
    tmp_path: Path, below: bool, options: Any, changed: set[str]
) -> None:
    model = Scaled(below)
    cnr_store.save(tmp_path, Scaled(), bits=32)
    before = copy.deepcopy(model.state_dict())
    cnr_store.load(tmp_path, model, **options)
    now = model.state_dict()
    assert {name for name in now if not torch.equal(now[name], before[name])} == changed


def test_hooks_change_nothing_that_versions_are_without(tmp_path: Path) -> None:
    saved, model = Scaled(), Scaled()
    for each in (saved, model):
        each.register_buffer("sparse", torch.eye(3).to_sparse())
    before = model.other.weight.tolist()  # type: ignore[union-attr, operator]
    cnr_store.save(tmp_path, saved, tracking=cnr_store.Tracking(exclude=("other.*", "sparse")))
    with Checkpointer(
        tmp_path, model, tracking=cnr_store.Tracking(exclude=("other.*", "sparse"))
    ) as checkpointer:
        checkpointer.load()
    assert model.other.weight.tolist() == before  # type: ignore[union-attr, operator]


@pytest.mark.parametrize("options", [{"tables": "users"}, {"rows": {"words": [1]}, "tables": "words"}])
def test_a_loader_that_changes_rows_not_chosen_is_refused(tmp_path: Path, options: Any) -> None:
    model = Model(words=Doubled(ROWS, 4))
    cnr_store.save(tmp_path, model)
    with pytest.raises(ModelMismatchError, match=r"changed rows of table 'words' that are not loaded"):
        cnr_store.load(tmp_path, model, **options)


class Swapped(Model):
    """Exchanges two entries in a ``load_state_dict`` of its own."""

    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__(first=kind(ROWS, 4), second=kind(ROWS, 4))

    def load_state_dict(self, *args: Any, **options: Any) -> Any:
        state, one, other = {**args[0]}, "first.weight", "second.weight"
        state[one], state[other] = state[other], state[one].detach()
        return super().load_state_dict(state, *args[1:], **options)


def test_a_models_own_load_state_dict_may_exchange_dense_entries(tmp_path: Path) -> None:
    saved, model, expected = Swapped(nn.Linear), Swapped(nn.Linear), Swapped(nn.Linear)
    cnr_store.save(tmp_path, saved, bits=32)
    cnr_store.load(tmp_path, model)
    expected.load_state_dict(saved.state_dict())
    for name, values in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], values), name


def test_a_models_own_load_state_dict_that_exchanges_tables_is_refused(tmp_path: Path) -> None:
    model = Swapped(nn.Embedding)
    cnr_store.save(tmp_path, model)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ModelMismatchError, match=r"table 'first', 'first\.weight', another key"):
        cnr_store.load(tmp_path, model)
    assert torch.equal(model.state_dict()["second.weight"], before["second.weight"])
    assert not any(module._load_state_dict_pre_hooks for module in model.modules())


def test_a_tied_tensor_reaches_a_module_with_a_loader(tmp_path: Path) -> None:
    def build() -> Any:
        model: Any = Model(again=nn.Linear(4, 2))
        model.again.weight = model.top.weight
        model.again.register_load_state_dict_post_hook(
            lambda module, _: setattr(module, "sum", module.weight.sum().item())
        )
        model.top.register_load_state_dict_pre_hook(lambda *_: None)
        return model

    saved, model = build(), build()
    cnr_store.save(tmp_path, saved)
    cnr_store.load(tmp_path, model)
    assert model.again.sum == saved.top.weight.sum().item()
    assert model.again.weight is model.top.weight


def test_hooks_run_when_an_update_is_applied(tmp_path: Path) -> None:
    saved, served = Own(), Own()
    cnr_store.save(tmp_path, saved, bits=32)
    for update in cnr_store.follow(tmp_path):
        update.apply(served)
    assert served.norm == saved.users.weight.norm().item()


def twice(module: nn.Module, entry: str) -> nn.Module:
    hooked: Any = module
    hooked.register_load_state_dict_pre_hook(
        lambda _module, state, prefix, *_: state.update({prefix + entry: state[prefix + entry] * 2})
    )
    return module


class Counted(nn.Module):
    """Has the entry of a table changed by a hook after the load."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(ROWS, 4)
        hooked: Any = self
        hooked.register_load_state_dict_post_hook(lambda module, _: module.add())

    def add(self) -> None:
        with torch.no_grad():
            self.rows.weight.add_(1)


def updated(url: Path, build: Callable[[], Any]) -> tuple[nn.Module, nn.Module]:
    """A model that had one version and applied the next, and one that was loaded from that."""
    saved, served, loaded = build(), build(), build()
    with Checkpointer(url, saved, bits=32, policy="one-shot") as checkpointer:
        checkpointer.save(1).result()
        held = cnr_store.load(url, served).version
        if hasattr(saved, "bank"):
            saved.bank.kept = torch.rand(5, 2)
        with torch.no_grad():
            saved.users.weight[3] += 1
        checkpointer.touch("users", [3])
        checkpointer.save(2).result()
    cnr_store.load(url, loaded)
    for update in cnr_store.follow(url, since=held):
        update.apply(served)
    return served, loaded


class Kept(Bank):
    """A buffer that takes the shape that is stored."""

    def _save_to_state_dict(self, *args: Any) -> None:
        nn.Module._save_to_state_dict(self, *args)

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state | {prefix + "seen": []}, prefix, *rest)


@pytest.mark.parametrize(
    "build",
    [
        lambda: Model(part=twice(nn.Linear(4, 4), "weight")),
        lambda: Model(part=twice(nn.Sequential(nn.Linear(4, 4)), "0.weight")),
        lambda: Model(bank=Kept()),
        lambda: Model(part=hooked(**plain_parts())),
    ],
)
def test_an_update_gives_modules_what_a_load_does(tmp_path: Path, build: Callable[[], Any]) -> None:
    served, loaded = updated(tmp_path, build)
    for name, values in loaded.state_dict().items():
        assert torch.equal(served.state_dict()[name], values), name


@pytest.mark.parametrize(
    "build",
    [
        lambda: Model(part=twice(nn.ModuleDict({"rows": nn.Embedding(ROWS, 4)}), "rows.weight")),
        lambda: Model(part=Counted()),
        lambda: Model(part=Doubled(ROWS, 4)),
    ],
)
def test_an_update_is_refused_where_a_hook_changes_rows(tmp_path: Path, build: Callable[[], Any]) -> None:
    with pytest.raises(ModelMismatchError, match=r"changed rows of table 'part.*load the whole version"):
        updated(tmp_path, build)


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(3))
        self.told: Any = None

    def _load_from_state_dict(self, *args: Any) -> None:
        self.told = args[2].get("version")
        super()._load_from_state_dict(*args)


class Second(First):
    _version = 2


@pytest.mark.parametrize("kind", [Model, Own])
@pytest.mark.parametrize("wrap", [lambda model: model, nn.DataParallel])
@pytest.mark.parametrize(("saved", "told"), [(First, 1), (Second, 2)])
def test_modules_are_told_the_version_that_was_saved(
    tmp_path: Path, kind: Any, wrap: Any, saved: type[First], told: int
) -> None:
    part = Second()
    cnr_store.save(tmp_path, wrap(kind(part=saved())))
    cnr_store.load(tmp_path, kind(part=part))
    assert part.told == told
    served = kind(part=part)
    part.told = None
    for update in cnr_store.follow(tmp_path):
        update.apply(served)
    assert part.told == told


class Told(nn.Module):
    """Writes to its metadata in a hook of ``state_dict``, and reads it there in a load."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(900, 8)
        self.top = nn.Linear(8, 1)
        hooked: Any = self
        hooked.register_state_dict_post_hook(self._tell)

    @staticmethod
    def _tell(module: nn.Module, state: Any, prefix: str, metadata: dict[str, Any]) -> None:
        metadata["layout"] = "rows"

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *more: Any) -> None:
        assert metadata["layout"] == "rows"
        super()._load_from_state_dict(state, prefix, metadata, *more)


def test_modules_find_what_hooks_wrote_to_their_metadata(tmp_path: Path) -> None:
    model, other = Told(), Told()
    cnr_store.save(tmp_path, model, bits=32)
    cnr_store.load(tmp_path, other)
    assert torch.equal(model.top.weight, other.top.weight)


def test_modules_of_inference_mode_are_loaded(tmp_path: Path) -> None:
    def build() -> nn.ModuleDict:
        top = nn.utils.parametrizations.weight_norm(nn.Linear(8, 1))
        return nn.ModuleDict({"users": nn.Embedding(900, 8), "top": top})

    model = build()
    cnr_store.save(tmp_path, model, bits=32)
    with torch.inference_mode():
        other = build()
    cnr_store.load(tmp_path, other)
    for (name, value), found in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(value, found), name


class Emptied(Model):
    """Makes a buffer anew after each load."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.register_buffer("cache", torch.ones(3, 4))
        hooked: Any = self
        hooked.register_load_state_dict_post_hook(lambda module, keys: module._reset(rows))

    def _reset(self, rows: int) -> None:
        self.cache = torch.zeros(rows, 4)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_partial_load_puts_back_what_a_hook_made_anew_or_says_so(tmp_path: Path, rows: int) -> None:
    cnr_store.save(tmp_path, Emptied(rows), bits=32)
    model = Emptied(rows)
    with Checkpointer(tmp_path, model) as checkpointer:
        if rows == 3:
            checkpointer.load(tables=["users"], tensors=[])
            assert torch.equal(model.cache, torch.ones(3, 4))
        else:
            with pytest.raises(ModelMismatchError, match=r"replaced 'cache'.*partly overwritten"):
                checkpointer.load(tables=["users"], tensors=[])
