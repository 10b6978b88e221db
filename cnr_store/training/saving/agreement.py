"""What all ranks of a job have to agree on before a save begins: one look at each other, before anything is taken.

A rank that can't begin tells the others, so that none begins. Every difference between ranks is the same error on all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from cnr_store.errors import CheckpointError, SaveError
from cnr_store.format.layout import dense_path
from cnr_store.format.state import dumps
from cnr_store.ranks.decisions import error_document, error_from, named
from cnr_store.ranks.group import Document, Group, Judge
from cnr_store.ranks.owners import few_owners, split_by_size
from cnr_store.training.saving.snapshot import Snapshot
from cnr_store.writing.plan import DenseWrite, placeholder

T = TypeVar("T")
_SHOWN = 5
_Failed = Sequence[tuple[int, Document]]
"""Ranks, and what of their errors is told."""
_STATE, _OPTIM = dense_path("state", ""), dense_path("optim", "")


def _not_started(phase: str, failed: _Failed) -> SaveError:
    texts = "; ".join(f"rank {rank}: {doc['error']}: {doc['text']}" for rank, doc in failed)
    return SaveError(f"{phase}: not started on any rank, because it failed on at least one. {texts}")


def together(
    group: Group,
    phase: str,
    prepare: Callable[[], T],
    say: Callable[[T], Document],
    progress: Callable[[], int],
    merge: Judge,
    refusal: Callable[[str, _Failed], CheckpointError] = _not_started,
) -> tuple[T, Document]:
    """Prepare on all ranks, and make one document of what they say. What fails on one rank fails on all.

    `prepare`: what may fail on a rank.
    `say`: the rank's document, once it is prepared.
    `progress`: gives another number whenever something was prepared: the other ranks wait as long as that goes on.
    `merge`: makes one document of those of all ranks. The first rank alone has them all: what each of a thousand ranks
    says must not travel to each of them.
    `refusal`: makes the error of ranks on which nothing failed, of the phase and some of those that did.

    Returns: What was prepared here, and the merged document.
    """
    failure: Exception | None = None
    prepared: T | None = None
    said: Document = {}
    try:
        with group.working(phase, progress):
            prepared = prepare()
            said = say(prepared)
    except Exception as error:
        if group.world == 1:
            raise
        failure, said = error, error_document(error)
    except BaseException as error:  # an interrupt
        group.refuse(phase, type(error).__name__)
        raise

    def judge(documents: list[Document]) -> Document:
        failed = [(rank, doc) for rank, doc in enumerate(documents) if "error" in doc]
        return {"failed": failed[:_SHOWN]} if failed else merge(documents)

    merged = group.decide(phase, said, judge)
    if failure is not None:
        raise failure
    if "failed" in merged:
        raise refusal(phase, merged["failed"])
    return prepared, merged  # type: ignore[return-value]  # there was no failure


def on_all(group: Group, phase: str, work: Callable[[], T], progress: Callable[[], int]) -> T:
    """Do something on all ranks, which fails on all as it fails on the first. `progress`: as for `together`."""

    def refusal(phase: str, failed: _Failed) -> CheckpointError:
        (rank, doc), *_ = failed
        return error_from({**doc, "text": f"{phase}: rank {rank}: {doc['text']}"})

    return together(group, phase, work, lambda _: {}, progress, lambda _: {}, refusal)[0]


def compare_together(
    group: Group,
    phase: str,
    paths: Sequence[str],
    compare: Callable[[], dict[str, T]],
    progress: Callable[[], int],
) -> dict[str, T]:
    """Compare arrays on all ranks; what is found of those of which every rank knows what is stored.

    `paths`: those that may be compared, the same on all ranks.
    `compare`: gives what is found by path, without those of which this rank knows nothing.
    `progress`: as for `together`.
    """

    def say(found: Mapping[str, T]) -> Document:
        return {"known": "".join("01"[path in found] for path in paths)}

    def merge(said: list[Document]) -> Document:
        return {"known": "".join(map(min, zip(*(doc["known"] for doc in said), strict=True)))}

    found, agreed = together(group, phase, compare, say, progress, merge)
    return {path: found[path] for path, known in zip(paths, agreed["known"], strict=True) if known == "1"}


def check_alike(
    phase: str,
    documents: Sequence[Document],
    names: Sequence[str],
    kind: type[CheckpointError] = SaveError,
) -> None:
    """Check that all ranks say the same under these names.

    `kind`: what to raise otherwise, naming what differs, and what the ranks say.
    """
    for name in names:
        by_value: dict[Any, list[int]] = {}
        for rank, doc in enumerate(documents):
            by_value.setdefault(doc.get(name), []).append(rank)
        if len(by_value) > 1:
            said = "; ".join(
                f"{value!r} on {named(ranks)}" for value, ranks in list(by_value.items())[:_SHOWN]
            )
            raise kind(f"{phase}: {name} differs between ranks: {said}. Give all ranks the same")


def dense_digests(dense: Sequence[DenseWrite]) -> dict[str, str]:
    """What the dense arrays of the model and of optimizers are called, and how they are shaped, as one digest each.

    Those of objects may differ between ranks: the first rank's are saved.
    """
    listed: dict[str, list[Any]] = {"dense tensors of the model": [], "dense state of optimizers": []}
    for write in dense:
        if write.path.startswith(_STATE):
            continue
        kind = "dense state of optimizers" if write.path.startswith(_OPTIM) else "dense tensors of the model"
        listed[kind].append(
            [
                *(write.path, list(write.values.shape), write.values.dtype.str, write.torch_dtype),
                write.pieces is not None,
            ]
        )
    return {kind: hashlib.sha256(dumps(each)).hexdigest() for kind, each in listed.items()}


def check_dense(phase: str, documents: Sequence[Document]) -> None:
    """Check that all ranks have dense arrays of the same names, shapes and types."""
    first = documents[0]["dense"] or {}
    for kind, digest in first.items():
        differing = [rank for rank, doc in enumerate(documents) if doc["dense"][kind] != digest]
        if differing:
            raise SaveError(
                f"{phase}: {kind} have other names, shapes or types on {named(differing)} than on rank 0. Give all "
                "ranks the same model and optimizers"
            )


def divide_dense(snapshot: Snapshot, group: Group) -> None:
    """Leave each dense array to one rank, and free the copies of all others here.

    Parameters and the state of optimizers are alike on all ranks. Buffers and objects may not be: they are the first
    rank's, all of them, because no rank ever had a mix.
    """
    if group.world == 1:
        return
    shared = [
        position
        for position, write in enumerate(snapshot.dense)
        if write.path.startswith(_OPTIM) or write.path in snapshot.parameters
    ]
    sizes = [snapshot.dense[position].values.nbytes for position in shared]
    in_pieces = any(snapshot.dense[position].pieces is not None for position in shared)
    ranks = few_owners(sum(sizes), group.world) if in_pieces else range(group.world)
    owner_of = dict(zip(shared, split_by_size(sizes, ranks), strict=True))
    for position, write in enumerate(snapshot.dense):
        owner = owner_of.get(position, 0)
        if owner != group.rank:
            values = placeholder(write.values.shape, write.values.dtype)
            snapshot.dense[position] = replace(write, values=values, is_here=False, owner=owner)
        else:
            snapshot.dense[position] = replace(write, owner=owner)
