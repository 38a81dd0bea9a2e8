"""The trace of a training does not depend on its framework and its number of ranks, and holds what float64 says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ds_silent
from ds_silent.trace import Gradient, Head, Step, Trace, read_trace, sampled
from tests.support.distributed import run_distributed
from tests.support.traced_training import CLIP, MICRO, STEPS, Cell, Outcome, Truth, folded, sketch64, train

KINDS = ("ddp", "fsdp2", "zero0", "zero1", "zero2", "zero3")
CELLS = {
    1: (*map(Cell, ("ddp", "zero0", "zero3", "fsdp2", "megatron")),),
    2: (*map(Cell, KINDS), *map(Cell, ("megatron", "megatron-distributed")), Cell("ddp", per_layer=True)),
    4: (
        *(Cell("ddp"), Cell("hsdp"), Cell("zero2")),
        *(Cell("ddp", limit=1), Cell("fsdp2", limit=1), Cell("zero3", limit=0), Cell("megatron", limit=1)),
    ),
    8: (Cell("ddp"), Cell("zero3"), Cell("fsdp2", limit=4)),
}
"""By number of ranks; each takes MICRO / ranks micro-batches per step."""


LOW = (
    *(Cell(kind, dtype) for kind in ("zero1", "zero2", "zero3", "megatron") for dtype in ("bf16", "fp16")),
    *(Cell("ddp", "bf16"), Cell("fsdp2", "bf16"), Cell("zero1", "fp16", limit=1)),
)


def all_of(cells: tuple[Cell, ...], directory: str) -> list[Outcome]:
    return [train(cell, f"{directory}/{place}") for place, cell in enumerate(cells)]


def apart(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(one, dtype=np.float64) - other) / np.linalg.norm(other))


MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0x9E3779B97F4A7C15, (1 << 64) - 1)


def hash64(ids: list[int]) -> str:
    """The sum of the ids' splitmix64 in Python's whole numbers."""
    total = 0
    for one in ids:
        x = (one + MIX[2]) & MIX[3]
        x = ((x ^ x >> 30) * MIX[0]) & MIX[3]
        x = ((x ^ x >> 27) * MIX[1]) & MIX[3]
        total += x ^ x >> 31
    return f"{total & MIX[3]:016x}"


def check_gradient(found: Gradient | None, truth: Truth, head: Head, exact_norm: bool) -> None:
    assert found is not None
    bound, size = 2.0 * head.rounding, head.sketch_size  # type: ignore[operator]
    whole = sketch64(truth.gradient, size)
    assert apart(found.sketch, folded(whole, head.size)) < bound
    norm = sum(float((one**2).sum()) for one in truth.gradient) ** 0.5
    assert found.norm == pytest.approx(norm if exact_norm else float(np.linalg.norm(whole)), rel=bound)
    by_layer = [
        folded(sketch64(truth.gradient, size, [i for i, t in enumerate(head.tensors) if t.layer == layer]), 64)
        for layer in range(len(head.layers))
    ]
    assert head.layer_size == 64
    assert apart(found.layer_sketches, np.array(by_layer)) < bound
    assert apart(found.layer_norms, np.linalg.norm(by_layer, axis=1)) < bound


def check_step(step: Step, truth: Truth, head: Head, number: int) -> None:
    """One line against float64."""
    assert step.samples == number * len(truth.rows)
    assert step.rows is not None
    assert step.rows.count == len(truth.rows)
    assert step.loss == pytest.approx(truth.loss, rel=4 * 2.0**-24)
    assert step.objective is not None
    labels = len(truth.rows) * 11
    weighed = step.objective
    assert weighed.labels == labels
    each = (weighed.weight_sum / labels, weighed.weight_min, weighed.weight_max)
    assert each == pytest.approx((1 / labels,) * 3, rel=1e-6)
    check_gradient(step.local, truth, head, exact_norm=False)
    check_gradient(step.reduced, truth, head, exact_norm=True)
    norm = sum(float((one**2).sum()) for one in truth.gradient) ** 0.5
    if number < STEPS:
        assert step.applied is not None
        assert step.applied.factor == pytest.approx(min(1.0, CLIP / norm), rel=1e-5)
        assert 0.0 <= step.applied.error < 1e-6
    else:
        assert step.applied is None  # no step after it has told
    wanted = [one.reshape(-1)[sampled(t.numel, t.samples)] for one, t in zip(truth.weights, head.tensors, strict=True)]
    assert step.weights is not None
    assert step.weights.tobytes() == np.concatenate(wanted).astype(np.float32).tobytes()


def check_trace(trace: Trace, cell: Cell, truths: list[Truth], ranks: int) -> None:
    head = trace.head
    assert trace.steps == tuple(range(1, STEPS + 1))
    assert (trace.skipped, len(trace.heads)) == (0, 1)
    assert (head.ranks, head.micro_batches, head.precision) == (ranks, MICRO // ranks, "fp32")
    assert (head.interval, head.size, head.sketch_size) == (1, 256, 1024)
    assert [one.order for one in head.tensors] == list(range(13))
    assert head.tensors[0].shape == (61, 24)
    assert (head.tensors[0].layer, head.tensors[0].samples, head.tensors[0].dtype) == (0, 16, "float32")
    assert [one.name for one in head.layers] == ["embedding", "layers.0", "layers.1", "sometimes", "norm"]
    assert head.settings["lr"]["from"] in ("yours", "framework")
    assert {"torch", "python", "ds_silent"} <= set(head.versions)
    groups = 2 if cell.kind.startswith("megatron") else 1
    for number, (step, truth) in enumerate(zip(trace, truths, strict=True), start=1):
        check_step(step, truth, head, number)
        rate = 1e-2 if groups == 2 else 1e-2 / number
        assert step.rates == pytest.approx((rate,) * groups)


def check_alike(trace: Trace, other: Trace) -> None:
    """Two traces of the same training, but for rounding."""
    assert (trace.head.layers, trace.head.tensors) == (other.head.layers, other.head.tensors)
    for step, theirs in zip(trace, other, strict=True):
        assert (step.rows, step.samples) == (theirs.rows, theirs.samples)
        assert step.loss == pytest.approx(theirs.loss, rel=1e-6)
        assert (step.applied is None) == (theirs.applied is None)
        if step.applied is not None and theirs.applied is not None:
            assert step.applied.factor == pytest.approx(theirs.applied.factor, rel=1e-5)
        assert step.weights is not None
        assert theirs.weights is not None
        assert apart(step.weights, theirs.weights) < 1e-6  # AdamW's division blows rounding up
        for one, two in ((step.local, theirs.local), (step.reduced, theirs.reduced)):
            assert one is not None
            assert two is not None
            bound = 4.0 * (trace.head.rounding + other.head.rounding)  # type: ignore[operator]
            for name in ("sketch", "layer_norms", "layer_sketches"):
                assert apart(getattr(one, name), getattr(two, name)) < bound, name


def accumulates_unasked(directory: str) -> None:
    """A loop of two micro-batches that says so to nobody; its model has dropout in two places."""
    parts = nn.Linear(4, 4), nn.Dropout(0.1), nn.Linear(4, 1), nn.Dropout(0.25), nn.Dropout(0.0)
    model = DistributedDataParallel(nn.Sequential(*parts))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {"output_dir": directory, "trace": {}, "tensorboard": False}
    with ds_silent.observe(model, optimizer, config=config):
        for _ in range(3):
            with model.no_sync():
                model(torch.ones(2, 4)).mean().backward()
            model(torch.ones(2, 4)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_the_head_holds_what_the_first_step_showed(tmp_path: Path) -> None:
    run_distributed(accumulates_unasked, 1, (str(tmp_path),), timeout=100)
    head = read_trace(tmp_path).head
    assert head.micro_batches == 2
    assert head.settings["dropout"] == {"value": "0.1, 0.25 in 2 modules", "from": "yours"}


@pytest.mark.long
def test_in_low_precision_what_is_scaled_is_unscaled(tmp_path: Path) -> None:
    outcomes = run_distributed(all_of, 2, (LOW, str(tmp_path)), timeout=280)[0]
    for place, (cell, outcome) in enumerate(zip(LOW, outcomes, strict=True)):
        trace = read_trace(tmp_path / str(place))
        unit = {"bf16": 2.0**-8, "fp16": 2.0**-11}[cell.dtype]
        for step, truth in zip(trace, outcome.truths, strict=True):
            whole = folded(sketch64(truth.gradient, 1024), 256)
            norm = sum(float((one**2).sum()) for one in truth.gradient) ** 0.5
            assert step.local is not None
            assert step.reduced is not None
            assert apart(step.local.sketch, whole) < 16 * unit, cell  # the backward rounds too
            assert apart(step.reduced.sketch, whole) < 16 * unit, cell
            assert step.reduced.norm == pytest.approx(norm, rel=16 * unit)
            assert step.loss == pytest.approx(truth.loss, rel=4 * unit)
            assert step.objective is not None
            assert step.objective.weight_sum == pytest.approx(1.0, rel=unit)
            if step.step < STEPS:
                assert step.applied is not None, cell
                assert step.applied.factor == pytest.approx(CLIP / norm, rel=16 * unit), cell
                assert step.applied.error < unit
            assert step.weights is not None
            tensors = zip(truth.weights, trace.head.tensors, strict=True)
            wanted = np.concatenate([one.reshape(-1)[sampled(t.numel, t.samples)] for one, t in tensors])
            assert (step.weights == wanted.astype(np.float32)).all()


@pytest.mark.parametrize("ranks", CELLS)
@pytest.mark.long
def test_traces_agree_over_ranks_and_frameworks_and_with_float64(ranks: int, tmp_path: Path) -> None:
    cells = CELLS[ranks]
    outcomes = run_distributed(all_of, ranks, (cells, str(tmp_path)), timeout=280)[0]
    traces = [read_trace(tmp_path / str(place)) for place in range(len(cells))]
    for cell, trace, outcome in zip(cells, traces, outcomes, strict=True):
        check_trace(trace, cell, outcome.truths, ranks)
    if ranks > 1:
        run_distributed(all_of, 1, (CELLS[1][:1], str(tmp_path / "alone")), timeout=100)
        alone = read_trace(tmp_path / "alone" / "0")
        for cell, trace in zip(cells, traces, strict=True):
            if not cell.kind.startswith("megatron"):  # its AdamW decays no bias
                check_alike(trace, alone)
