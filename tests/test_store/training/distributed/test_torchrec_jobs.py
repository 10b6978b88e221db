"""What a checkpointer makes of TorchRec's models and optimizers, in one process. Needs TorchRec."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import cnr_store
from tests.test_store.support.distributed.ranks import group

pytest.importorskip("torchrec")
pytest.importorskip("fbgemm_gpu")

pytestmark = pytest.mark.filterwarnings("ignore")  # TorchRec's own

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchrec import EmbeddingBagConfig
    from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
    from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
    from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
    from torchrec.optim.optimizers import in_backward_optimizer_filter
    from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

    from tests.test_store.ranks.support import torchrec_life
    from tests.test_store.ranks.support.torchrec_life import Job


@pytest.fixture(autouse=True)
def alone(tmp_path: Path) -> Iterator[None]:
    with group(str(tmp_path / "keys"), 0, 1):
        yield


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "store")


def checkpointer_of(job: Job, url: str, optimizers: Any = None) -> cnr_store.Checkpointer:
    given = [job.dmp.fused_optimizer, job.dense] if optimizers is None else optimizers
    return cnr_store.Checkpointer(url, job.dmp, given, bits=32, policy="consecutive")


def rows_of(job: Job) -> torch.Tensor:
    _, pieces = job.arrays()["ebc.embedding_bags.A.weight"]
    return torch.cat([piece.tensor.flatten() for piece in pieces])


def test_tables_that_were_sharded_anew_are_refused(url: str) -> None:
    job = Job("tt", "EXACT_ROWWISE_ADAGRAD")
    module = job.dmp.module.ebc
    with checkpointer_of(job, url) as checkpointer:
        job.train(1)
        checkpointer.save(1).result()
        module._lookups.clear()  # as DistributedModelParallel.reshard does, which one rank alone can't call
        module._create_lookups()
        for call in (lambda: checkpointer.save(2), checkpointer.load):
            with pytest.raises(
                cnr_store.ModelMismatchError, match=r"'ebc' lie in other memory .* make a new"
            ):
                call()


@pytest.mark.parametrize("sharding", ["r", "c", "t"])
def test_state_of_tables_under_the_dense_kernel_is_refused(
    url: str, sharding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torchrec_life, "FUSED", "dense")
    job = Job(sharding, "EXACT_ROWWISE_ADAGRAD")
    told = "'ebc.embedding_bags.A.weight' is sharded with the compute kernel 'dense'.* fused kernel"
    with pytest.raises(cnr_store.UnsupportedModelError, match=f"{told}.*") as refused:
        checkpointer_of(job, url)
    assert "Adagrad keeps state" in str(refused.value)
    job.dense = torch.optim.Adam(job.dmp.parameters())  # type: ignore[assignment]  # of which state comes later
    with checkpointer_of(job, url) as checkpointer:
        job.train(1)
        with pytest.raises(cnr_store.UnsupportedModelError, match=told):
            checkpointer.save(1)
    job.dense = torch.optim.SGD(job.dmp.parameters(), lr=0.1)  # type: ignore[assignment]
    with checkpointer_of(job, url) as checkpointer:
        job.train(2)
        checkpointer.save(2).result()
        expected = rows_of(job)
        job.train(3)
        checkpointer.load()
    assert torch.equal(rows_of(job), expected)


def test_fused_optimizers_of_modules_that_are_not_sharded_are_refused(url: str) -> None:
    module = FusedEmbeddingBagCollection(
        tables=[EmbeddingBagConfig(name="A", embedding_dim=8, num_embeddings=30, feature_names=["a"])],
        optimizer_type=torch.optim.Adagrad,
        optimizer_kwargs={"lr": 0.3},
        device=torch.device("cpu"),
    )
    with pytest.raises(cnr_store.UnsupportedModelError, match="which is no table that TorchRec shards"):
        cnr_store.Checkpointer(url, module, module.fused_optimizer())


def test_a_fused_optimizer_that_was_left_out_is_told(url: str, caplog: pytest.LogCaptureFixture) -> None:
    job = Job("rtd", "EXACT_ROWWISE_ADAGRAD")
    checkpointer_of(job, url).close()
    assert "was not given" not in caplog.text
    checkpointer_of(job, url, job.dense).close()
    assert "table 'ebc.embedding_bags.A' and 1 more was not given, so its state is not saved" in caplog.text


def wrapped(job: Job) -> tuple[KeyedOptimizerWrapper, CombinedOptimizer]:
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(job.dmp.named_parameters())),
        lambda given: torch.optim.Adagrad(given, lr=0.1),
    )
    clipped = GradientClippingOptimizer(dense, clipping=GradientClipping.NORM, max_gradient=1.0)
    return dense, CombinedOptimizer([job.dmp.fused_optimizer, clipped])


@pytest.mark.slow
def test_the_usual_loop_steps_with_wrappers(url: str) -> None:
    job = Job("rtcd", "EXACT_ROWWISE_ADAGRAD")
    dense, combined = wrapped(job)
    job.dense = combined
    kinds = []
    with checkpointer_of(job, url, combined) as checkpointer:
        for step in range(1, 4):
            job.train(step)
            job.dmp.fused_optimizer.step()
            whole = [each.name for each in checkpointer.explain() if each.whole]
            kinds.append(checkpointer.save(step).result().kind)
    assert whole == []
    assert kinds[-1] == "delta"
    job.dense = dense._optimizer
    expected = job.gathered()
    job.dense = combined
    with checkpointer_of(job, url, combined) as checkpointer:
        job.train(9)
        checkpointer.load()
    job.dense = dense._optimizer
    assert all(torch.equal(value, expected[name]) for name, value in job.gathered().items())


def test_rates_set_on_a_wrapper_reach_training_after_a_load(url: str) -> None:
    job = Job("rd", "EXACT_ROWWISE_ADAGRAD")
    dense, combined = wrapped(job)
    with checkpointer_of(job, url, combined) as checkpointer:
        job.dense = combined
        job.train(1)
        checkpointer.save(1).result()
        checkpointer.load()
    for settings in combined.param_groups:
        settings["lr"] = 0.5
    assert [each["lr"] for each in dense._optimizer.param_groups] == [0.5]
    assert dense.state is dense._optimizer.state


@pytest.mark.parametrize("sharding", ["r", "c", "t"])
@pytest.mark.parametrize("how", ["loaded", "touched"])
def test_momentum_changed_by_hand_is_saved(url: str, sharding: str, how: str) -> None:
    job = Job(sharding, "EXACT_ROWWISE_ADAGRAD")
    with checkpointer_of(job, url) as checkpointer:
        job.train(1)
        checkpointer.save(1).result()
        job.train(2)
        assert not any(each.whole for each in checkpointer.explain())
        state = copy.deepcopy(job.dmp.fused_optimizer.state_dict())
        for slots in state["state"].values():
            for slot in slots.values():
                for shard in slot.local_shards():
                    shard.tensor[11:14] += 3
        job.dmp.fused_optimizer.load_state_dict(state)
        if how == "touched":
            checkpointer.touch("ebc.embedding_bags.A", range(11, 14))
        assert any(each.whole for each in checkpointer.explain()) == (how == "loaded")
        expected = job.gathered()
        checkpointer.save(2).result()
        checkpointer.load()
        assert not any(each.whole for each in checkpointer.explain())
        job.train(3)
        checkpointer.load(2)
    assert all(torch.equal(value, expected[name]) for name, value in job.gathered().items())


@pytest.mark.parametrize("around", ["fused", "dense"])
def test_warmup_that_is_kept_as_state_is_refused(url: str, around: str) -> None:
    job = Job("rd", "EXACT_ROWWISE_ADAGRAD")
    inner = job.dmp.fused_optimizer if around == "fused" else wrapped(job)[0]
    stages = [WarmupStage(policy=WarmupPolicy.LINEAR, max_iters=5, value=0.1)]
    with pytest.raises(cnr_store.UnsupportedModelError, match=r"a WarmupOptimizer .* scheduler"):
        checkpointer_of(job, url, [WarmupOptimizer(inner, stages)])


def bits(arrays: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: value.numpy().tobytes() for name, value in arrays.items()}


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [("c", "t"), ("r", "c"), ("q", "c")])
def test_numbers_a_row_of_other_column_shards_are_refused_or_left_out(
    url: str, before: str, after: str
) -> None:
    job = Job(f"{before}cd", "EXACT_ROWWISE_ADAGRAD")
    with checkpointer_of(job, url) as checkpointer:
        job.train(1)
        checkpointer.save(1).result()
    saved = bits(job.gathered())
    job = Job(f"{after}cd", "EXACT_ROWWISE_ADAGRAD")
    with checkpointer_of(job, url) as checkpointer:
        job.train(2)
        own = bits(job.gathered())
        begins = {"c": [0, 8], "q": [0, 4, 8, 12], "r": [0], "t": [0]}
        told = f"{begins[after]}, and had some that began at {begins[before]} in version 0"
        for choice in ({}, {"tables": "*.A"}):
            with pytest.raises(cnr_store.ModelMismatchError, match=re.escape(told)) as refused:
                checkpointer.load(**choice)  # type: ignore[arg-type]
            assert "table 'ebc.embedding_bags.A' has column shards" in str(refused.value)
            assert "embedding_bags.B" not in str(refused.value)
            assert bits(job.gathered()) == own
        assert checkpointer.load(strict="ignore").missing == ("ebc.embedding_bags.A/momentum1",)
        slot = "ebc.embedding_bags.A.weight/momentum1"
        assert bits(job.gathered()) == saved | {slot: own[slot]}
        job.train(3)
        checkpointer.save(3).result()
        expected = bits(job.gathered())
        job.train(4)
        checkpointer.load()
    assert bits(job.gathered()) == expected


@pytest.mark.parametrize(
    ("before", "after"), [("ADAGRAD", "ROWWISE_ADAGRAD"), ("SGD", "ADAGRAD"), ("ADAGRAD", "SGD")]
)
def test_what_another_fused_optimizer_kept_is_refused_or_left_out(url: str, before: str, after: str) -> None:
    job = Job("rcd", f"EXACT_{before}")
    with checkpointer_of(job, url) as checkpointer:
        job.train(1)
        checkpointer.save(1).result()
    saved = bits(job.gathered())
    job = Job("rcd", f"EXACT_{after}")
    with checkpointer_of(job, url) as checkpointer:
        job.train(2)
        own = bits(job.gathered())
        told = r"table 'ebc\.embedding_bags\.B': .* another optimizer"
        with pytest.raises(cnr_store.ModelMismatchError, match=told):
            checkpointer.load()
        assert bits(job.gathered()) == own
        checkpointer.load(strict="ignore")
    kept = {name: value for name, value in own.items() if name.endswith("/momentum1")}
    found = bits(job.gathered())
    assert found == {name: saved[name] for name in found.keys() - kept.keys()} | kept
