"""Parameters that the optimizer steps beside the wrapped model: each rank's own by mistake, by design, or reduced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import ds_silent
from ds_silent.sinks.jsonl import read_events
from tests.support.distributed import run_distributed

STEPS, ROWS, CLASSES = 5, 8, 4
CLASSIFIER, TEMPERATURE = "Head.classifier.weight", "Head.temperature"
TOLD = {
    "": TEMPERATURE,  # of a loss without another weight
    "classifier": CLASSIFIER,
    "classifier, clipped": CLASSIFIER,
    "classifier, accumulated": CLASSIFIER,
    "classifier, fully_shard": CLASSIFIER,
}
SILENT = (
    "classifier, each rank's own",
    "classifier, reduced by hand",
    "classifier, reduced by hand, clipped",
    "classifier, wrapped",
    "classifier, frozen",
    "classifier, masters",
    "classifier, in no optimizer",
    "classifier, wrapped, fully_shard in parts",
)


class Head(nn.Module):
    """A loss with weights of its own."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        if "classifier" in kind:
            torch.manual_seed(1 + dist.get_rank() if "own" in kind else 1)
            self.classifier = nn.Linear(8, CLASSES, bias=False).requires_grad_("frozen" not in kind)
        else:
            self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.classifier(x) if hasattr(self, "classifier") else x[:, :CLASSES] * self.temperature
        return functional.cross_entropy(logits, y)


def _train(directory: str, kind: str) -> list[float]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    if "fully_shard" in kind:
        from torch.distributed.fsdp import fully_shard

        for part in model if "parts" in kind else ():
            fully_shard(part)
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    head: Any = Head(kind)
    if "wrapped" in kind:
        head = DistributedDataParallel(head)
    weights = list(head.parameters())
    if "no optimizer" in kind:
        weights = []
    held = [weight.detach().clone().requires_grad_() for weight in weights] if "masters" in kind else weights
    optimizer = torch.optim.SGD([{"params": model.parameters()}, {"params": held}], lr=0.1)
    torch.manual_seed(1 + dist.get_rank())
    config = {"output_dir": directory, "tensorboard": False}
    with ds_silent.observe(model, optimizer, config=config, accumulation=2 if "accumulated" in kind else 1):
        for _ in range(STEPS):
            optimizer.zero_grad()
            for last in (False, True) if "accumulated" in kind else (True,):
                model.require_backward_grad_sync = last
                head(model(torch.randn(ROWS, 8)), torch.randint(CLASSES, (ROWS,))).backward()
            if "by hand" in kind or "masters" in kind:
                for weight in weights:
                    dist.all_reduce(weight.grad)
                    weight.grad /= 2
            if "masters" in kind:
                for weight, master in zip(weights, held, strict=True):
                    master.grad, weight.grad = weight.grad, None
            if "clipped" in kind:
                nn.utils.clip_grad_norm_([*model.parameters(), *held], 0.01)
            optimizer.step()
            with torch.no_grad():
                for weight, master in zip(weights, held, strict=True):
                    weight.copy_(master)
    return [float(weight.detach().double().sum()) for weight in weights]


def _each(directory: str) -> dict[str, list[float]]:
    return {kind: _train(f"{directory}/{kind or 'temperature'}", kind) for kind in (*TOLD, *SILENT)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, list[float]]]]:
    directory = tmp_path_factory.mktemp("outside")
    return directory, run_distributed(_each, 2, (str(directory),))


@pytest.mark.parametrize("kind", [*TOLD, *SILENT])
def test_what_each_rank_trains_alone_is_told(kind: str, runs: tuple[Path, list[dict[str, list[float]]]]) -> None:
    directory, (first, second) = runs
    assert (first[kind] == second[kind]) is (kind in SILENT and "own" not in kind)
    events = read_events(directory / (kind or "temperature") / "events.jsonl")
    notes = [event["where"] for event in events if event["kind"] == "update-mismatch"]
    assert notes == ([CLASSIFIER] if "no optimizer" in kind else [])
    events = [event for event in events if event["severity"] != "info"]
    told = [(event["step"], event["kind"], event["severity"], event["where"], event["ranks"]) for event in events]
    expected = [(1, "unreduced-gradient", "warning", TOLD[kind], [])] if kind in TOLD else []
    if kind == "classifier, clipped":  # by a norm of its own on each rank
        assert told.pop(0) == (1, "aggregation-error", "error", "applied gradient", [])
    assert told == expected
    if told:
        assert f"{TOLD[kind]} lies outside the wrapped model, and the optimizer steps it" in events[-1]["message"]


# -- frozen modules beside the model -----------------------------------------------------------------------------------


class Teacher(nn.Sequential):
    """A frozen module beside the model."""


class Part(nn.Sequential):
    """The model, and what may be a copy of it."""


UNLIKE = {
    "frozen, other weights on rank 1": ("warning", "Teacher of 144 weights"),
    "in evaluation mode, other weights on rank 1": ("warning", "Teacher of 144 weights"),
    "inside a loss, other weights on rank 1": ("warning", "Loss of 144 weights"),
    "a copy of the model, other weights on rank 1": ("info", "Part of 144 weights"),
}
ALIKE = (
    "frozen",
    "frozen, on rank 1 alone, other weights on rank 1",
    "frozen, a shard, other weights on rank 1",
    "not trained yet, other weights on rank 1",
)


class Loss(nn.Module):
    """A loss that holds a frozen module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


def _distil(directory: str, kind: str) -> None:
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(Part(nn.Linear(8, 8), nn.Linear(8, 8)))
    torch.manual_seed(2 if "other weights" in kind and rank == 1 else 1)
    beside: Any = (Part if "copy" in kind else Teacher)(nn.Linear(8, 8), nn.Linear(8, 8))
    if "in evaluation mode" in kind:
        beside.eval()
    elif "not trained yet" not in kind:
        beside.requires_grad_(False)
    if "shard" in kind:
        for weight in beside.parameters():
            weight.tensor_model_parallel = True
    if "inside a loss" in kind:
        beside = Loss(beside)
    if "alone" in kind and rank != 1:
        beside = None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ds_silent.observe(model, optimizer, config={"output_dir": directory, "tensorboard": False}):
        for step in range(STEPS):
            optimizer.zero_grad()
            torch.manual_seed(10 * step + rank)
            functional.mse_loss(model(torch.randn(ROWS, 8)), torch.randn(ROWS, 8)).backward()
            optimizer.step()
    del beside


def _distil_each(directory: str) -> None:
    for kind in (*UNLIKE, *ALIKE):
        _distil(f"{directory}/{kind}", kind)


@pytest.fixture(scope="module")
def distilled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("frozen")
    run_distributed(_distil_each, 3, (str(directory),))
    return directory


@pytest.mark.parametrize("kind", [*UNLIKE, *ALIKE])
def test_a_frozen_module_beside_the_model_is_the_same_on_all_ranks(kind: str, distilled: Path) -> None:
    events = read_events(distilled / kind / "events.jsonl")
    told = [
        (one["step"], one["severity"], one["where"], one["ranks"])
        for one in events
        if one["kind"] == "weights-mismatch"
    ]
    assert told == ([(1, *UNLIKE[kind], [1])] if kind in UNLIKE else [])
    for event in events:
        if event["kind"] == "weights-mismatch":
            assert event["message"].endswith("its weights differ between ranks: ranks 0, 2; rank 1.")
