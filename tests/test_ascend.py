"""The hot path on a device that has only what Ascend's has, see :mod:`tests.support.device_like_ascend`.

From a gradient in the hook to the row that the collective is given. What the collectives themselves are given is held
to fp32, bf16 and int32, and to SUM, MIN and MAX, in ``tests/observing/test_observer.py`` (``check_collectives``).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ds_silent.config import SilentConsistencyConfig
from ds_silent.exchange.layout import ExchangeShape, layout_of, pack
from ds_silent.exchange.observation import Local, Observation
from ds_silent.kernels.accumulator import Accumulator
from ds_silent.kernels.checksums import Bits, LayerChecksums, combined
from ds_silent.maths.sketch import make_plan, offsets_of
from tests.support.device_like_ascend import AscendLike

NUMELS = [5000, 64, 17]
GROUPS = [0, 1, 1]
RANKS = 4


def gradients(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(numel, generator=generator).to(dtype) for numel in NUMELS]


def accumulator(block_rows: int, by_layer: bool = True) -> Accumulator:
    """``block_rows``: 1 on the CPU; an accelerator has many."""
    offsets, total = offsets_of(NUMELS)
    plan = replace(make_plan(total, 256), block_rows=block_rows)
    return Accumulator(plan, offsets, NUMELS, GROUPS, by_layer)


def test_the_device_refuses_what_ascend_lacks() -> None:
    with AscendLike() as device:
        torch.ones(3).double().sum()
        torch.ones(3) * 1j
        torch.ones(3, dtype=torch.int64).sum()
    assert {dtype for _, dtype in device.refused} == {"torch.float64", "torch.complex64"}
    assert device.slow == {"sum": 1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_rows", [1, 4])
def test_sketch_norm_and_packing_stay_with_what_ascend_computes(block_rows: int, dtype: torch.dtype) -> None:
    config = SilentConsistencyConfig.model_validate({"direction": {"sketch_size": 256, "per_layer": True}})
    made, values = accumulator(block_rows), gradients(dtype)
    layout = layout_of(config, ExchangeShape(RANKS, max(GROUPS) + 1, ids=8, micro_batches=1, aggregate_replicated=True))
    row = torch.zeros(sum(layout.parts))
    with AscendLike() as device:
        for index, gradient in enumerate(values):
            made.add(index, gradient, previous=gradient)
        layers, squares = made.take()
        sketch = layers.sum(0)
        local = Local(seen=1.0, norm_seen=1.0, squared=squares.sum(), fired=3.0)
        seen = Observation(local=local, sketch=sketch, aggregate=sketch, layer_squares=squares, layer_sketches=layers)
        pack(layout, seen, row)
    assert device.refused == {}
    assert device.slow == {}
    assert device.ran.total() >= 2 * len(NUMELS)
    exact = sum(float((2.0 * gradient.double()).square().sum()) for gradient in values)
    assert float(squares.sum()) == pytest.approx(exact, rel=1e-2 if dtype != torch.float32 else 1e-5)
    assert int((row != 0).sum()) > 2 * 256


def test_checksums_compute_in_int64_and_in_nothing_that_is_refused() -> None:
    """Known and left: their words are 64 bits wide by definition. What runs in int64 is counted, so that it shows
    where more is added; packed bits and int32 would keep it on the AI cores."""
    values = gradients(torch.bfloat16)
    bits, layers = Bits(), LayerChecksums(NUMELS, GROUPS, torch.device("cpu"))
    with AscendLike() as device:
        combined(bits([(str(index), value) for index, value in enumerate(values)]))
        layers(values)
    assert device.refused == {}
    assert set(device.slow) <= {"sum", "mul", "add", "add_", "index_add_"}
    assert sum(device.slow.values()) <= 18
