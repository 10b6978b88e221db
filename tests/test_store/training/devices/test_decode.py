"""Rows that are decoded into a table on a device equal those that the host decodes, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cnr_codecs import Scheme, UniformRows, array_dtype, decode_into, parse
from cnr_store.training.devices.decode import can_decode, decode
from tests.test_codecs.hard_rows import rows_of
from tests.test_store.training.devices.device import DEVICE, kernels
from tests.test_store.training.devices.test_encode import DTYPES, ELEMENTS, SEEDS, table_of


@given(
    dim=st.sampled_from([2, 3, 17, 70]),
    scheme=st.sampled_from(["symmetric", "asymmetric", "adaptive"]),
    bits=st.integers(1, 8),
    element=ELEMENTS,
    seed=SEEDS,
)
@settings(deadline=None, max_examples=60)
def test_decoded_rows(dim: int, scheme: str, bits: int, element: str, seed: int) -> None:
    kernels()
    rows, rng = 40, np.random.default_rng(seed)
    values = table_of(rows, dim, seed, element).float().cpu().numpy().astype(array_dtype(element))
    payload = parse(UniformRows(scheme, bits).encode_rows(values, None, rows, element=element))
    wanted = np.zeros((rows, dim), array_dtype(element))
    need = np.ones(rows, np.uint8)
    decode_into(payload, wanted, need)

    wide = torch.full((2 * rows, dim + 3), 5, dtype=DTYPES[element], device=DEVICE)
    target = wide[:, 2 : 2 + dim]
    to = rng.permutation(2 * rows)[:rows]
    to[rng.random(rows) < 0.2] = -1
    for segment in payload.segments:
        if segment.scheme is not Scheme.RAW:
            assert can_decode(segment, target)
            chosen = rows_of(segment)
            decode(segment, to[chosen], target)
            kept = chosen[to[chosen] >= 0]
            found = target[torch.from_numpy(to[kept]).to(DEVICE)].float().cpu().numpy()
            np.testing.assert_array_equal(
                found.view(np.uint32), wanted[kept].astype(np.float32).view(np.uint32)
            )
            to[chosen] = -1
        else:
            assert not can_decode(segment, target)
            to[rows_of(segment)] = -1
    assert (wide[:, :2] == 5).all()
    assert (wide[:, 2 + dim :] == 5).all()


def test_codes_that_do_not_fit_are_refused() -> None:
    kernels()
    payload = parse(
        UniformRows("asymmetric", 4).encode_rows(np.eye(4, 8, dtype="f4"), None, 4, element="float32")
    )
    (segment,) = payload.segments
    for places, shape in (([0, 1, 2, 4], (4, 8)), ([0, 1, 2], (4, 8)), ([0, 1, 2, 3], (4, 9))):
        with pytest.raises(ValueError, match="can't be written"):
            decode(segment, np.array(places), torch.zeros(shape, device=DEVICE))
    assert not can_decode(segment, torch.zeros(8, 4, device=DEVICE).t())
    assert not can_decode(segment, torch.zeros(4, 8, dtype=torch.float64, device=DEVICE))
