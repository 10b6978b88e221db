"""Figures of saves reach whatever draws curves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cnr_store
from cnr_backends import open_backend
from cnr_backends.testing import FaultyBackend
from cnr_store import Checkpointer, OptionError, SaveError
from cnr_store.integrations.metrics import log_to


class SummaryWriter:
    """As TensorBoard's."""

    def __init__(self) -> None:
        self.found: dict[int, dict[str, float]] = {}

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> None:
        assert global_step is not None
        self.found.setdefault(global_step, {})[tag] = scalar_value


class Run:
    """As of Weights & Biases."""

    def __init__(self) -> None:
        self.found: dict[int, dict[str, float]] = {}

    def log(self, data: dict[str, Any], step: int | None = None) -> None:
        assert step is not None
        self.found[step] = data


class Mlflow:
    """As MLflow, and as Lightning's loggers."""

    def __init__(self) -> None:
        self.found: dict[int, dict[str, float]] = {}

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert step is not None
        self.found[step] = metrics


@pytest.mark.parametrize("kind", [SummaryWriter, Run, Mlflow])
def test_each_save_is_logged(kind: Any) -> None:
    writer = kind()
    model = torch.nn.EmbeddingBag(100, 4, sparse=True)
    with Checkpointer("memory://metrics", model, None, on_done=log_to(writer, "cnr/")) as checkpointer:
        first = checkpointer.save(3).result()
        checkpointer.touch("weight", [4])
        second = checkpointer.save(5).result()
    assert [writer.found[step]["cnr/bytes"] for step in (3, 5)] == [first.bytes, second.bytes]
    assert [writer.found[step]["cnr/rows"] for step in (3, 5)] == [100, 1]
    assert all(0 < figures["cnr/seconds_stalled"] < 600 for figures in writer.found.values())


def test_a_meter_of_opentelemetry_counts_and_measures() -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.metrics")
    export = pytest.importorskip("opentelemetry.sdk.metrics.export")
    reader = export.InMemoryMetricReader()
    provider = sdk.MeterProvider([reader])
    log = log_to(provider.get_meter("training"))
    model = torch.nn.EmbeddingBag(100, 4, sparse=True)
    with Checkpointer("memory://measured", model, None, on_done=log) as checkpointer:
        first = checkpointer.save(3).result()
        checkpointer.touch("weight", [4])
        second = checkpointer.save(5).result()
    backend = FaultyBackend(
        open_backend("memory://measured-failure"),
        lambda operation, key, _: "before" if key.endswith("manifest") else None,
    )
    with (
        pytest.raises(SaveError),
        Checkpointer(
            backend, model, None, on_done=log, failures=cnr_store.Failures(retry_seconds=0)
        ) as failing,
    ):
        failing.save(3).result()
    [scope] = reader.get_metrics_data().resource_metrics[0].scope_metrics
    provider.shutdown()
    found = {metric.name: (metric.unit, *metric.data.data_points) for metric in scope.metrics}
    assert {
        name: (unit, point.value) for name, (unit, point) in found.items() if hasattr(point, "value")
    } == {
        "checkpoint/bytes": ("By", first.bytes + second.bytes),
        "checkpoint/rows": ("{row}", 101),
        "checkpoint/fold_bytes": ("By", 0),
        "checkpoint/failed": ("{save}", 1),
    }
    for name, unit in (("share_of_full", "1"), ("seconds_stalled", "s"), ("seconds_writing", "s")):
        its_unit, point = found[f"checkpoint/{name}"]
        assert (its_unit, point.count) == (unit, 2)
        assert 0 < point.sum < 600
        assert point.explicit_bounds[0] == 0.001


def test_a_failed_save_is_logged() -> None:
    run = Run()
    backend = FaultyBackend(
        open_backend("memory://failed"),
        lambda operation, key, _: "before" if key.endswith("manifest") else None,
    )
    model = torch.nn.EmbeddingBag(100, 4, sparse=True)
    checkpointer = Checkpointer(
        backend, model, None, on_done=log_to(run), failures=cnr_store.Failures(retry_seconds=0)
    )
    with pytest.raises(SaveError):
        checkpointer.save(3).result()
    checkpointer.close()
    assert run.found == {3: {"checkpoint/failed": 1.0}}


def test_something_else_is_refused() -> None:
    with pytest.raises(OptionError, match="a dict has none of add_scalar"):
        log_to({})
