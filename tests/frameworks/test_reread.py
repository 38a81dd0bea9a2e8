"""What is applied is not read again where it is what was read; and is, where anything was written to it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ds_silent
from ds_silent.capture.local_gradient import LocalGradient
from ds_silent.capture.reduced_gradient import ReducedGradient, Remembered
from ds_silent.config import SilentConsistencyConfig
from ds_silent.kernels.accumulator import CompiledAccumulator
from ds_silent.sinks.jsonl import read_events
from tests.support.distributed import run_distributed

STEPS, AT = 5, 3
Write = Callable[[list[Tensor]], object]


def scaled(gradients: list[Tensor]) -> None:
    for gradient in gradients:
        gradient.data.mul_(0.5)


def one_element(gradients: list[Tensor]) -> None:
    """Of a layer's 1,600 each 200th is looked at."""
    for gradient in gradients:
        if gradient.numel() > 1000:
            gradient.data.view(-1)[7] += 1.0
            gradient.data.view(-1)[-2] += 1.0


def counted(gradients: list[Tensor]) -> None:
    for gradient in gradients:
        gradient.mul_(0.5)


def train(folder: Path, write: Write | None, optimizers: int, block: dict[str, Any]) -> int:
    """Train; return how many elements were read as they were applied."""
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 40), nn.Linear(40, 5)))
    parameters = list(model.parameters())
    parts = [parameters] if optimizers == 1 else [parameters[:4], parameters[4:]]
    trained = [torch.optim.SGD(part, 0.01) for part in parts]
    steps = [0]

    def before(optimizer: Any, *_: Any) -> None:
        if write is not None and steps[0] == AT and dist.get_rank() == 1:
            write([p.grad for group in optimizer.param_groups for p in group["params"]])

    for optimizer in trained:
        optimizer.register_step_pre_hook(before)
    held = {"output_dir": str(folder), "preflight": False, "tensorboard": False, **block}
    observer = ds_silent.attach(model, {"silent_consistency": held}, optimizer=trained)
    assert observer is not None
    aggregate, read = observer._capture.moments.aggregate, [0]
    apply, add_all = aggregate.apply, CompiledAccumulator.add_all

    def applies(parts: Any) -> None:
        def adds(self: Any, parts: Any, **named: Any) -> None:
            parts = list(parts)
            read[0] += sum(values.numel() for *_, values in parts)
            add_all(self, parts, **named)

        accumulator = type(aggregate._local.accumulator)
        accumulator.add_all = adds
        try:
            apply(parts)
        finally:
            accumulator.add_all = add_all

    aggregate.apply = applies
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(1, STEPS + 1):
        steps[0] = step
        for optimizer in trained:
            optimizer.zero_grad()
        model(torch.randn(8, 40, generator=generator)).square().mean().backward()
        for optimizer in trained:
            optimizer.step()
    observer.close()
    return read[0]


CASES: dict[str, tuple[Write | None, int, dict[str, Any]]] = {
    "healthy": (None, 1, {}),
    "healthy, two optimizers": (None, 2, {}),
    "reread": (None, 1, {"integrity": {"reread": True}}),
    "counted": (counted, 1, {}),
    "scaled behind torch's back": (scaled, 1, {}),
    "one element behind torch's back": (one_element, 1, {}),
}


def train_all(directory: str) -> list[int]:
    return [train(Path(directory, name), *case) for name, case in CASES.items()]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[int], list[tuple[int, str]]]]:
    """Of each case, the elements that each rank read as they were applied, and (step, kind) of its errors."""
    directory = tmp_path_factory.mktemp("reread")
    ranks = run_distributed(train_all, 2, (str(directory),), timeout=200)
    errors = [
        [(e["step"], e["kind"]) for e in read_events(directory / name / "events.jsonl") if e["severity"] == "error"]
        for name in CASES
    ]
    return {name: (list(read), own) for name, *read, own in zip(CASES, *ranks, errors, strict=True)}


def test_what_nobody_wrote_to_is_not_read_again(found: dict[str, Any]) -> None:
    (shares, errors), whole = found["reread"], 2 * 1640 + 205
    assert (sum(shares), errors) == (STEPS * whole, [])
    assert found["healthy"] == ([0, 0], [])


def test_with_two_optimizers_all_is_read(found: dict[str, Any]) -> None:
    """A rank whose share lies in one of them alone needs not."""
    read, errors = found["healthy, two optimizers"]
    assert (read[1], errors) == (found["reread"][0][1], [])


@pytest.mark.parametrize("name", [name for name, (write, *_) in CASES.items() if write is not None])
def test_what_one_rank_writes_before_the_step_is_an_error(name: str, found: dict[str, Any]) -> None:
    """What was written behind torch's back to one element has other bits than the other rank's."""
    assert found[name][1] == [(AT, "aggregation-error")]


@pytest.mark.parametrize(
    ("write", "zeros", "reread", "factor", "error"),
    [
        (lambda values: None, False, False, 1.0, 0.0),
        (lambda values: values.mul_(0.5), False, False, 0.5, 0.0),
        (lambda values: values.data.mul_(0.5), False, False, 0.5, 0.0),
        (lambda values: values.data.mul_(0.5), True, False, 0.5, 0.0),
        (lambda values: values.data[1].add_(4.0), False, False, 1.0, 0.0),
        (lambda values: values.data[1].add_(4.0), False, True, 1.0, 16.0),
        (lambda values: values.data[1].add_(4.0), True, False, 1.0, 16.0),
    ],
)
def test_what_is_written_within_the_step(write: Any, zeros: bool, reread: bool, factor: float, error: float) -> None:
    """Of 100 elements the first and each 12th behind it are looked at; where these are zero, all are read.

    An embedding has many zeros: where no token came.
    """
    config = SilentConsistencyConfig().direction
    local = LocalGradient(
        [100],
        [0],
        config,
        torch.device("cpu"),
        lambda index: None,
        additive=False,
        norms_add_up=True,
        copied=False,
        by_layer=False,
    )
    reduced = ReducedGradient(local, None, reread)
    values = torch.randn(100, generator=torch.Generator().manual_seed(0))
    if zeros:
        values[::12] = 0.0
    parts = [(0, 0, values)]
    reduced.observed(parts)
    write(values)
    reduced.apply(parts)
    reduced.apply([])  # an optimizer that holds nothing of this rank's share
    applied = reduced.compare_applied(applied=True, left_out=False)
    assert float(applied.factor) == pytest.approx(factor, rel=0.1 if error else 1e-6)
    assert float(applied.error) == pytest.approx(error, rel=0.1, abs=1e-9)
    assert float(local.accumulator.take()[0].abs().max()) == 0.0


def test_of_an_embedding_that_few_tokens_hit_more_is_compared() -> None:
    """8 elements of 100,000 are zero, and so is nearly all of them: it was read at every step."""
    values = torch.zeros(100, 1000)
    values[7] = 1.0
    others = torch.ones(3)
    remembered = Remembered([values, others])
    assert remembered.are([values, others])
    values.data.mul_(0.5)
    assert not remembered.are([values, others])
    nothing = torch.zeros(100, 1000)
    assert not Remembered([nothing]).are([nothing])
    nothing[50, 50] = 1.0  # a write that torch counts
    assert not Remembered([nothing]).are([nothing])
    empty = torch.zeros(0)
    assert Remembered([empty, others, empty]).are([empty, others, empty])
