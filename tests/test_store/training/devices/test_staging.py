"""A device quantizes and decodes rows of a codec only once it was seen to do so as the host does."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import cnr_store
from cnr_codecs import FloatingRows, LatticeRows, LosslessRows, RowCodec, UniformRows
from cnr_store.training.devices import arithmetic, encode, staging
from cnr_store.training.devices.staging import encode_staged, rows_there
from tests.test_store.training.devices.device import DEVICE
from tests.test_store.training.devices.test_cycles import BY_8_BITS, run
from tests.test_store.training.devices.test_encode import DTYPES

pytestmark = pytest.mark.usefixtures("elsewhere", "unproven")
CODECS: list[RowCodec] = [
    *(
        UniformRows(scheme, bits)
        for scheme in ("symmetric", "asymmetric", "adaptive")
        for bits in (2, 3, 4, 8)
    ),
    LatticeRows(),
    LatticeRows(step=0.5, relative=True),
    *(FloatingRows(bits) for bits in (1, 3, 7)),
]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_this_device_passes_for_each_codec(dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    table = torch.randn(9, 16, device=DEVICE).to(dtype)
    for codec in CODECS:
        assert encode_staged("items", codec, table, None, 1 << 20) is not None, codec
        assert rows_there(table, [codec.get_config()]) is not None, codec
    assert not caplog.records


def last_bit(values: torch.Tensor) -> torch.Tensor:
    """The values, the last bit of one of them turned."""
    values.view(-1).view(torch.uint8)[0] ^= 1
    return values


def saved(folder: Path) -> dict[str, torch.Tensor]:
    """What the third version holds, read without torch."""
    values = cnr_store.state_dict(str(folder), cnr_store.versions(str(folder))[2].id)
    return {name: torch.from_numpy(values[name]) for name in ("items.weight", "users.weight")}


Breaks = Callable[[pytest.MonkeyPatch], None]


def wrong_codes(patch: pytest.MonkeyPatch) -> None:
    quantize = arithmetic.quantize
    patch.setattr(encode, "quantize", lambda *given: [*(made := quantize(*given))[:-1], last_bit(made[-1])])


def wrong_values(patch: pytest.MonkeyPatch) -> None:
    values = arithmetic.uniform_values
    patch.setattr(staging, "uniform_values", lambda *given: last_bit(values(*given)))


def no_float64(patch: pytest.MonkeyPatch) -> None:
    def lacks(*_: object) -> None:
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype")

    patch.setattr(torch.Tensor, "double", lacks)


def lost(patch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("device lost")

    patch.setattr(encode, "start_copy", lambda _: fail)


@pytest.mark.parametrize(
    ("breaks", "why"),
    [
        (wrong_codes, "a bit differs"),
        (wrong_values, "a bit differs"),
        (no_float64, "float64"),
        (lost, "device lost"),
    ],
)
def test_a_device_that_differs_leaves_rows_to_the_host_which_is_said_once(
    breaks: Breaks, why: str, tmp_path: Path, encoded: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.WARNING):
        breaks(patch)
        found = run(tmp_path, BY_8_BITS)
    assert encoded == []
    (record,) = caplog.records
    assert f"{DEVICE.type}" in record.message
    assert "asymmetric" in record.message
    assert why in record.message
    assert all(torch.equal(found[name], values) for name, values in saved(tmp_path).items())


def test_what_is_loaded_there() -> None:
    state = torch.zeros(4, 3, dtype=torch.float64, device=DEVICE)
    lossless, floating = LosslessRows().get_config(), FloatingRows().get_config()
    assert rows_there(state, [lossless]) is not None
    assert rows_there(state, [lossless, floating]) is None
    assert rows_there(state.float(), [lossless, floating]) is not None
    unknown: list[dict[str, object]] = [{"id": "cnr_kmeans", "bits": 4}, {"id": "of a newer release"}, {}]
    for config in (*unknown, None):
        assert rows_there(state.float(), [lossless, config]) is None
    assert rows_there(state.float()[:, :0], [lossless]) is None
    assert rows_there(torch.zeros(2, 3, 4), [lossless]) is None


def test_rows_of_the_proof_break_quantizers() -> None:
    """Each kind of storing them is met, and each kind of number is among them."""
    rows = staging._hard_rows()
    assert rows.shape[0] == staging.PROOF_ROWS == 512
    sizes = np.abs(rows[np.isfinite(rows)])
    assert np.isnan(rows).any()
    assert np.isinf(rows).any()
    assert (sizes[sizes < 2.0**-126] > 0).any()
    assert (sizes > 2.0**120).any()
    assert (rows == 0).all(axis=1).any()
    assert (rows == rows[:, :1]).all(axis=1).sum() > 40
    for codec in (UniformRows("symmetric", 4), UniformRows("asymmetric", 4), UniformRows("adaptive", 4)):
        kinds = arithmetic.quantize(codec, torch.from_numpy(rows))[0].bincount(minlength=3)
        assert (kinds > 40).all()
    for grid in (LatticeRows(step=0.34765625), FloatingRows()):
        assert 40 < int(arithmetic.quantize(grid, torch.from_numpy(rows))[0].sum()) < 470
