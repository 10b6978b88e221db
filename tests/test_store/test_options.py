"""Options: in groups, and none that is misspelled, or stands where it stood before, is passed over."""

from __future__ import annotations

import ast
import difflib
import inspect
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import fsspec
import pytest
from torch import nn

import cnr_store
from cnr_backends import OpenError
from cnr_store import Checkpointer, OptionError, dcp

GROUPS: dict[str, Any] = {
    "retention": cnr_store.Retention,
    "failures": cnr_store.Failures,
    "limits": cnr_store.Limits,
    "tracking": cnr_store.Tracking,
    "job": cnr_store.Job,
}
BY_GROUP = [(group, each.name) for group, kind in GROUPS.items() for each in fields(kind)]


def model() -> nn.Module:
    return nn.Embedding(8, 2)


DOORS: dict[str, Callable[..., Any]] = {
    "Checkpointer": lambda **given: Checkpointer("memory://options", model(), **given),
    "save": lambda **given: cnr_store.save("memory://options", model(), **given),
    "load": lambda **given: cnr_store.load("memory://options", model(), **given),
}
"""What takes all options."""


def test_groups_are_as_they_are_by_default() -> None:
    given = inspect.signature(Checkpointer).parameters
    assert len(given) == 17
    for name, kind in GROUPS.items():
        assert given[name].default == kind()


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(("group", "option"), BY_GROUP)
def test_an_option_given_flat_is_told_its_place(door: str, group: str, option: str) -> None:
    with pytest.raises(OptionError) as caught:
        DOORS[door](**{option: 3})
    wanted = f"{group}=cnr_store.{GROUPS[group].__name__}({option}=3)"
    assert str(caught.value) == f"{door} has no option {option}: give {wanted}"
    ast.parse(f"f({wanted})")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"polcy": "full"}, "did you mean policy=...?"),
        ({"keep_lst": 3}, "did you mean keep_last=...?"),
        ({"Bits": 4}, "did you mean bits=...?"),
        ({"trusted_optimizer": []}, "did you mean tracking=cnr_store.Tracking(trusted_optimizers=...)?"),
        ({"timeout_secs": 3}, "did you mean failures=cnr_store.Failures(timeout_seconds=...)?"),
        ({"xyz": 1}, "; it has "),
        ({"trusted_optimizers": [nn.Module]}, "give tracking=cnr_store.Tracking(trusted_optimizers=...)"),
    ],
)
@pytest.mark.parametrize("door", DOORS)
def test_a_wrong_keyword_is_told_the_nearest(door: str, given: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=re.escape(said)):
        DOORS[door](**given)


def test_what_is_given_once_is_told_of_both_its_parts() -> None:
    for door, word, meant in (("save", "metdata", "metadata"), ("load", "sctrict", "strict")):
        with pytest.raises(OptionError, match=rf"{door} has no option {word}: did you mean {meant}="):
            DOORS[door](**{word: None})


def test_groups_refuse_what_is_out_of_place_or_range() -> None:
    wrong: list[tuple[str, dict[str, Any], str]] = [
        ("limits", {"wrokers": 1}, "Limits has no option wrokers: did you mean workers=...?"),
        ("limits", {"on_failure": "log"}, "give failures=cnr_store.Failures(on_failure='log')"),
        (
            "limits",
            {"max_write_bytes_per_second": 0},
            "limits.max_write_bytes_per_second=0: give a number above",
        ),
        ("limits", {"overlap": "queue"}, "limits.overlap='queue': give 'wait' or 'skip'"),
        ("failures", {"on_failure": None}, "failures.on_failure=None: give 'raise' or 'log'"),
        ("failures", {"timeout_seconds": -1}, "failures.timeout_seconds=-1; give a number of at least 0"),
        ("retention", {"keep_best": ("auc",)}, "retention.keep_best=('auc',): give the name of a figure"),
        ("limits", {"workers": None}, "limits.workers=None: give an integer of at least 1"),
        ("failures", {"retry_seconds": None}, "failures.retry_seconds=None; give a number of at least 0"),
        ("retention", {"max_chain": 0}, "retention.max_chain=0: give an integer of at least 1"),
        ("tracking", {"audit": "some"}, "tracking.audit='some': give an integer"),
        ("job", {"unloaded": "ask"}, "job.unloaded='ask': give 'warn' or 'raise'"),
    ]
    for group, given, said in wrong:
        with pytest.raises(OptionError, match=re.escape(said)):
            GROUPS[group](**given)
    nothing = cnr_store.Retention(keep_every=None, keep_best=None, max_chain=None)
    assert (nothing.keep_every, nothing.keep_best, nothing.max_chain) == (None, None, None)
    assert cnr_store.Limits(max_write_bytes_per_second=None) == cnr_store.Limits()
    for other in (None, {"workers": 2}, cnr_store.Job()):
        with pytest.raises(OptionError, match=r"limits=.*: give cnr_store\.Limits\(\.\.\.\)"):
            DOORS["Checkpointer"](limits=other)


PASSES_ON = {
    name: value
    for name, value in [
        *((name, getattr(cnr_store, name)) for name in cnr_store.__all__),
        ("Reader", dcp.Reader),
    ]
    if callable(value)
    and not (inspect.isclass(value) and issubclass(value, Exception | tuple))
    and "storage_options" in inspect.signature(value).parameters
    and inspect.signature(value).parameters["storage_options"].kind is inspect.Parameter.VAR_KEYWORD
}
"""Functions that hand keywords on to the filesystem."""


def swapped(word: str) -> str:
    """A word with two of its letters in the other order."""
    at = next(at for at in range(len(word) - 2, -1, -1) if word[at] != word[at + 1])
    return word[:at] + word[at + 1] + word[at] + word[at + 2 :]


@pytest.mark.parametrize("function", PASSES_ON)
def test_no_misspelled_keyword_becomes_an_option_of_the_filesystem(function: str, tmp_path: Path) -> None:
    parameters = inspect.signature(PASSES_ON[function]).parameters.values()
    needed: dict[str, Any] = {each.name: "x" for each in parameters if each.default is each.empty}
    needed |= {"url": str(tmp_path / "store")}
    needed.pop("storage_options")
    for each in parameters:
        if each.default is not each.empty:
            with pytest.raises((OpenError, OptionError), match="did you mean"):
                PASSES_ON[function](**needed, **{swapped(each.name): 1})


@pytest.mark.slow
def test_no_option_of_a_filesystem_is_taken_for_a_misspelled_keyword() -> None:
    """`open_backend` compares them with the keywords of the function that was called."""
    ours = {name for one in PASSES_ON.values() for name in inspect.signature(one).parameters}
    theirs = set[str]()
    for protocol in ("s3", "gs", "abfs", "http", "ftp", "sftp", "hf", "zip", "simplecache", "reference"):
        try:
            theirs |= inspect.signature(fsspec.get_filesystem_class(protocol).__init__).parameters.keys()
        except ImportError:
            continue
    assert {"anon", "endpoint_url", "client_kwargs", "fo"} <= theirs
    near = {name: difflib.get_close_matches(name, ours, 1, 0.8) for name in theirs - ours}
    assert {name: found for name, found in near.items() if found} == {}
