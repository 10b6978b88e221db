"""A model of every element type that trains by rows, and what each of its versions must hold, computed by numpy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from cnr_codecs import element_of
from cnr_codecs.elements import element_named, round_to_bfloat16
from cnr_store import Checkpointer, VersionInfo
from cnr_store.format.layout import dense_path, slot_path
from tests.test_codecs.references import uniform as reference

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]
Flags = np.ndarray[Any, np.dtype[np.bool_]]

# All but `tiny` take at least 16 KiB, so they are quantized; rows of `thin` are exact where parameters cost too much.
TABLES: dict[str, tuple[int, int, torch.dtype]] = {
    "wide": (700, 16, torch.float32),
    "adam": (520, 17, torch.float32),
    "f16": (900, 16, torch.float16),
    "bf16": (900, 16, torch.bfloat16),
    "thin": (3000, 2, torch.float32),
    "Üser id/2 %": (600, 8, torch.float32),
    "tiny": (20, 4, torch.float32),
}
_UNSIGNED = {1: torch.uint8, 2: torch.uint16}


def dense_values() -> dict[str, torch.Tensor]:
    """Tensors of the element types and shapes that are stored whole."""
    values = torch.linspace(-3, 3, 24).reshape(4, 6)
    kinds = [torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool]
    kinds += [torch.int8, torch.int16, torch.int32, torch.int64]
    unsigned = [torch.uint8, torch.uint16, torch.uint32, torch.uint64]
    found = {f"of_{str(kind).removeprefix('torch.')}": values.to(kind) for kind in kinds}
    found |= {f"of_{str(kind).removeprefix('torch.')}": values.abs().to(kind) for kind in unsigned}
    found |= {
        "scalar": torch.tensor(-0.0),
        "scalar_bfloat16": torch.tensor(1.5, dtype=torch.bfloat16),
        "scalar_bool": torch.tensor(True),
        "empty": torch.zeros(0),
        "no_columns": torch.zeros(3, 0, dtype=torch.int64),
        "no_rows": torch.zeros(0, 3, dtype=torch.bfloat16),
        "cube": torch.arange(30.0).reshape(2, 3, 5),
        "not_finite": torch.tensor([np.nan, np.inf, -np.inf, -0.0, 1e-45]),
    }
    return found


class Model(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.tables = nn.ModuleDict()
        for name, (rows, dim, dtype) in TABLES.items():
            self.tables[name] = nn.Embedding(rows, dim, sparse=True, _weight=_rows(rows, dim).to(dtype))
        self.top = nn.Linear(64, 64)
        for name, values in dense_values().items():
            self.register_buffer(name, values)

    def weight(self, name: str) -> nn.Parameter:
        weight = self.tables[name].weight
        assert isinstance(weight, nn.Parameter)
        return weight


def _rows(rows: int, dim: int) -> torch.Tensor:
    """Rows of all magnitudes, and those that quantization finds hard."""
    values = torch.randn(rows, dim) * torch.logspace(-6, 6, rows)[:, None]
    values[0, 0], values[1, -1], values[2] = np.nan, -np.inf, 0.7
    values[3, 0], values[3, -1] = -3e38, 3e38
    values[4], values[5], values[6] = values[4] * 1e-40, 1e6 + torch.rand(dim), -0.0
    return values


class Bench:
    """The model and its optimizers. `wide`, `adam` and the dense layer are trained, other tables changed by hand."""

    def __init__(self, seed: int = 3) -> None:
        self.model = Model(seed)
        by_hand = [self.model.weight(name) for name in TABLES if name not in ("wide", "adam")]
        self.adagrad = torch.optim.Adagrad([self.model.weight("wide"), *self.model.top.parameters()], lr=0.1)
        self.adam = torch.optim.SparseAdam([self.model.weight("adam")], lr=0.1)
        self.sgd = torch.optim.SGD(by_hand, lr=0.1)
        rows = TABLES["bf16"][0]
        self.sgd.state[self.model.weight("bf16")]["count"] = torch.zeros(rows, dtype=torch.int64)
        self.optimizers = [self.adagrad, self.adam, self.sgd]

    def change(self, checkpointer: Checkpointer, changes: dict[str, Array]) -> None:
        """Change rows of each table, and the dense layer."""
        self.adagrad.zero_grad()
        self.adam.zero_grad()
        loss = self.model.top(torch.ones(64)).square().sum()
        for name in ("wide", "adam"):
            loss = loss + self.model.tables[name](torch.from_numpy(changes[name])).cos().sum()
        loss.backward()
        self.adagrad.step()
        if len(changes["adam"]):
            self.adam.step()  # type: ignore[no-untyped-call]  # torch's own
        self.sgd.state[self.model.weight("bf16")]["count"][changes["bf16"]] += 1
        for name, ids in changes.items():
            if name not in ("wide", "adam"):
                with torch.no_grad():
                    weight = self.model.weight(name)
                    weight[ids] = weight[ids] * 0.75 + torch.randn(len(ids), weight.shape[1]).to(weight.dtype)
                checkpointer.touch(f"tables.{name}", ids)

    def rows_now(self) -> Arrays:
        """Weights and slots by path; bfloat16 as float32."""
        found = {}
        for name in TABLES:
            parameter = self.model.weight(name)
            found[slot_path(f"tables.{name}", "weight")] = _as_numpy(parameter)
            for optimizer in self.optimizers:
                for slot, tensor in optimizer.state.get(parameter, {}).items():
                    if isinstance(tensor, torch.Tensor) and tensor.ndim:
                        found[slot_path(f"tables.{name}", slot)] = _as_numpy(tensor)
        return found

    def dense_now(self) -> Arrays:
        """Dense tensors by path; those of types that numpy lacks as the unsigned integers that hold their bits."""
        tensors = dict(self.model.named_buffers())
        tensors |= {f"top.{name}": value for name, value in self.model.top.named_parameters()}
        found = {dense_path("model", name): _as_bits(tensor) for name, tensor in tensors.items()}
        sums = self.adagrad.state[self.model.top.weight]["sum"]
        found[dense_path("optim", "optimizers.0.state.top.weight.sum")] = _as_bits(sums)
        return found


def _as_numpy(tensor: torch.Tensor) -> Array:
    plain = tensor.detach()
    values: Array = (plain.float() if plain.dtype is torch.bfloat16 else plain).numpy().copy()
    return values


def _as_bits(tensor: torch.Tensor) -> Array:
    plain = tensor.detach().clone()
    if plain.dtype in (torch.bfloat16, torch.float8_e4m3fn):
        plain = plain.reshape(-1).view(_UNSIGNED[plain.element_size()]).reshape(plain.shape)
    values: Array = plain.numpy()
    return values


def reference_rows(values: Array, element: str, bits: int) -> Array:
    """What rows decode to after they were quantized, each by itself."""
    raw_bytes = values.shape[1] * element_named(element).stored.itemsize
    finite: Flags = np.asarray(np.isfinite(values).all(axis=1))
    wide = np.where(finite[:, None], values, 0).astype(np.float32)
    parameters = reference.parameters(wide, "adaptive", bits, element_named(element))
    codes = reference.quantize(wide, parameters.scale, parameters.offset, bits)
    decoded = reference.dequantize(codes, parameters.scale, parameters.offset)
    code_bytes = -(-values.shape[1] * bits // 8)
    costly = np.where(parameters.float16, 4, 8) + code_bytes >= raw_bytes
    exact = ~finite | parameters.raw | costly
    with np.errstate(over="ignore"):
        rounded = round_to_bfloat16(decoded) if element == "bfloat16" else decoded.astype(values.dtype)
    return np.where(exact[:, None], values, rounded)


@dataclass
class Expected:
    """One version: `stored` as a Zarr reader sees it alone, `values` as it loads."""

    stored: Arrays
    values: Arrays
    changed: dict[str, Flags]


@dataclass
class Oracle:
    """Follows a run save by save, by the policy's definition alone."""

    policy: str
    bits: int
    versions: dict[str, Expected] = field(default_factory=dict)

    def note(self, info: VersionInfo, bench: Bench, changes: dict[str, Array]) -> None:
        before = self.versions[info.previous] if info.previous else None
        expected = Expected({}, {}, {})
        for path, live in bench.rows_now().items():
            name = next(name for name in TABLES if path.startswith(slot_path(f"tables.{name}", "")))
            element = "bfloat16" if name == "bf16" and path.endswith("/weight") else element_of(live.dtype)
            lossless = self.bits == 32 or not path.endswith("/weight") or live.nbytes < 16 << 10
            rows = self._written(info, path, TABLES[name][0], changes[name], before, expected)
            values = live if lossless else reference_rows(live, element, self.bits)
            older = before.values.get(path) if before else None
            if older is not None:
                values = np.where(rows.reshape(-1, *[1] * (live.ndim - 1)), values, older)
            expected.values[path] = values
            if rows.any():
                stored = np.full_like(live, np.nan if live.dtype.kind == "f" else 0)
                stored[rows] = values[rows]
                expected.stored[path] = stored
        expected.stored |= bench.dense_now()
        self.versions[info.id] = expected

    def _written(
        self,
        info: VersionInfo,
        path: str,
        count: int,
        ids: Array,
        before: Expected | None,
        expected: Expected,
    ) -> Flags:
        """The rows that a version has of an array, which begins anew where it is whole."""
        written = np.zeros(count, bool)
        written[ids] = True
        # A table as small as the one that changes as a whole here is no new base where others keep theirs.
        is_new_base = written.all() and self.policy == "consecutive"
        if info.kind == "baseline" or before is None or path not in before.values or is_new_base:
            expected.changed[path] = np.zeros_like(written)
            return np.ones_like(written)
        expected.changed[path] = written | before.changed[path]
        return written if self.policy == "consecutive" else expected.changed[path]
