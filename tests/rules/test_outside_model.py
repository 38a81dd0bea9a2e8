"""Parameters that the optimizer steps beside the wrapped model: each rank's own by mistake, by design, or reduced."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import ds_silent
from ds_silent.capture.breaches import text_of, unlike_of
from ds_silent.rules.outside_model import leaves_among, nodes_behind
from ds_silent.rules.rule import Breach
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
    "classifier, with another optimizer": CLASSIFIER,
    "classifier, behind a function": CLASSIFIER,
    "table, sparse": "Head.table.weight",
}
SILENT = (
    "classifier, each rank's own",
    "classifier, reduced by hand",
    "classifier, reduced by hand, clipped",
    "shares, reduced by hand",  # of two terms: the mean of two ranks' gradients is a multiple of each
    "table, rows in turn, reduced by hand",  # of the first rows one rank alone has a gradient, the other one next
    "classifier, wrapped",
    "classifier, frozen",
    "classifier, masters",
    "classifier, in no optimizer",
    "classifier, wrapped, fully_shard in parts",
    "table, dealt to the ranks",
    "table, dealt to the ranks, sparse",
)


class Doubled(torch.autograd.Function):
    """A script's own function, which has nothing to do with other ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2.0 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return 2.0 * gradient


def swapped(x: Tensor) -> Tensor:
    """Give each rank one half of its rows from each rank."""
    found = torch.empty_like(x)
    dist.all_to_all_single(found, x.contiguous())
    return found


class Dealt(torch.autograd.Function):
    """Of a table that one rank holds each rank gets its own rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return swapped(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return swapped(gradient)


class Head(nn.Module):
    """A loss with weights of its own."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.calls = kind, 0
        if "table" in kind:
            self.table = nn.Embedding(40, CLASSES, sparse="sparse" in kind)
        elif "shares" in kind:
            self.shares = nn.Parameter(torch.tensor([0.1, 0.2]))
        elif "classifier" in kind:
            torch.manual_seed(1 + dist.get_rank() if "own" in kind else 1)
            self.classifier = nn.Linear(8, CLASSES, bias=False).requires_grad_("frozen" not in kind)
        else:
            self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if "table" in self.kind:
            self.calls += 1
            turn = 0 if self.calls % 2 == dist.get_rank() else 30
            rows = self.table(torch.full((len(x),), turn) if "turn" in self.kind else torch.randint(16, (len(x),)))
            logits = x[:, :CLASSES] + (Dealt.apply(rows) if "dealt" in self.kind else rows)
        elif "classifier" in self.kind:
            logits = self.classifier(Doubled.apply(x) if "function" in self.kind else x)
            logits = Doubled.apply(logits) if "function" in self.kind else logits
        elif "shares" in self.kind:
            one, two = self.shares.softmax(0)
            return one * functional.cross_entropy(x[:, :CLASSES], y) + two * x.square().mean()
        else:
            logits = x[:, :CLASSES] * self.temperature
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
    second: Any = torch.optim.SGD(weights, lr=0.1) if "another" in kind else None
    groups = [{"params": model.parameters()}, {"params": held if second is None else []}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    torch.manual_seed(1 + dist.get_rank())
    config = {"output_dir": directory, "tensorboard": False}
    with ds_silent.observe(model, optimizer, config=config, accumulation=2 if "accumulated" in kind else 1):
        for _ in range(STEPS):
            for one in (optimizer, second) if second is not None else (optimizer,):
                one.zero_grad()
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
            for one in (optimizer, second) if second is not None else (optimizer,):
                one.step()
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
    assert (first[kind] == second[kind]) is (kind in SILENT and "own" not in kind and "dealt" not in kind)
    events = read_events(directory / (kind or "temperature") / "events.jsonl")
    notes = [event["where"] for event in events if event["kind"] == "update-mismatch"]
    assert notes == ([CLASSIFIER] if "no optimizer" in kind else [])
    own = [event["where"] for event in events if (event["kind"], event["severity"]) == ("unreduced-gradient", "info")]
    assert own == ([CLASSIFIER] if "own" in kind else [])
    events = [event for event in events if event["severity"] != "info"]
    told = [(event["step"], event["kind"], event["severity"], event["where"], event["ranks"]) for event in events]
    step = 2 if "another" in kind else 1  # it steps behind the model's, with which the step is over
    expected = [(step, "unreduced-gradient", "warning", TOLD[kind], [])] if kind in TOLD else []
    if kind == "classifier, clipped":  # by a norm of its own on each rank
        assert told.pop(0) == (1, "aggregation-error", "error", "applied gradient", [])
    assert told == expected
    if told:
        assert f"{TOLD[kind]} lies outside the wrapped model, and the optimizer steps it" in events[-1]["message"]


def test_parameters_are_found_in_the_order_of_the_graph() -> None:
    """Each rank words its own finding: the addresses of nodes are others on each."""
    weights = [nn.Parameter(torch.ones(1)) for _ in range(50)]
    total = torch.zeros(1)
    for weight in weights:
        total = total + weight
    found = leaves_among(nodes_behind([total.sum().grad_fn]))
    assert [id(one) for one in found] == [id(one) for one in reversed(weights)]


# -- frozen modules beside the model -----------------------------------------------------------------------------------


class Teacher(nn.Sequential):
    """A frozen module beside the model."""


class Loss(nn.Module):
    """A loss that holds a frozen module, by a method alone, and a part that is trained."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.trained = inner, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.trained(self.inner(x))
        return result


def of_its_own_class(*layers: nn.Module) -> nn.Module:
    """As of symbolic traces, of which each has a class of its own, and all have one name."""
    return type("Teacher", (nn.Sequential,), {})(*layers)


TEACHER = "Teacher of 144 weights"
TOLD_BESIDE = {
    "frozen, odd": ("warning", TEACHER, [1]),
    "in evaluation mode, odd": ("warning", TEACHER, [1]),
    "inside a loss, odd": ("warning", TEACHER, [1]),
    "beside an odd module that is lazy, odd": ("warning", TEACHER, [1]),
    "made in inference mode, odd": ("warning", TEACHER, [1]),
    "with statistics, odd": ("warning", "Teacher of 176 weights", [1]),
    "frozen, own": ("info", TEACHER, []),
}
SILENT_BESIDE = (
    "frozen",
    "frozen, two of one name",
    "frozen, on rank 1 alone, odd",
    "frozen, used on rank 1 alone, odd",
    "frozen, used by nobody, odd",
    "frozen, drawn anew at each step, own",
    "frozen, a shard, odd",
    "an embedding, odd",
    "not frozen, odd",
)


def _beside(kind: str) -> Any:
    rank = dist.get_rank()
    differs = ("own" in kind or rank == 1) and ("own" in kind or "odd" in kind)
    torch.manual_seed(1 + rank if differs and "statistics" not in kind else 1)
    make: Any = of_its_own_class if "of one name" in kind else Teacher
    with torch.inference_mode("inference mode" in kind):
        beside: Any = make(nn.Linear(8, 8), nn.Linear(8, 8))
    if "statistics" in kind:
        beside = Teacher(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)).eval()
        beside[1].running_mean.fill_(1.0 + differs)
    if "embedding" in kind:
        beside = nn.Embedding(8, 8)
    if "in evaluation mode" in kind:
        beside.eval()
    elif "not frozen" not in kind:
        beside.requires_grad_(False)
    if "shard" in kind:
        for weight in beside.parameters():
            weight.tensor_model_parallel = True
    if "of one name" in kind:
        return nn.ModuleList([beside, of_its_own_class(nn.Linear(8, 8), nn.Linear(8, 8)).requires_grad_(False)])
    return None if "on rank 1 alone" in kind and "used" not in kind and rank != 1 else beside


def _distil(directory: str, kind: str) -> None:
    rank, lazy = dist.get_rank(), nn.LazyLinear(8) if "lazy" in kind else None
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)))
    beside = _beside(kind)
    loss = Loss(beside) if "inside a loss" in kind else None
    used = beside is not None and "by nobody" not in kind and ("alone" not in kind or rank == 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ds_silent.observe(model, optimizer, config={"output_dir": directory, "tensorboard": False}):
        for step in range(STEPS):
            optimizer.zero_grad()
            torch.manual_seed(10 * step + rank)
            x, y = torch.randn(ROWS, 8), torch.randn(ROWS, 8)
            if used:
                held = beside if "of one name" in kind else [loss or beside]
                for one in held:
                    with torch.inference_mode("inference mode" in kind), torch.no_grad():
                        y = one(torch.arange(ROWS) if "embedding" in kind else x)
                        if "anew" in kind:
                            one[0].weight.normal_()
            functional.mse_loss(model(x), y.clone()).backward()
            optimizer.step()
    del lazy


def _distil_each(directory: str) -> None:
    for kind in (*TOLD_BESIDE, *SILENT_BESIDE):
        _distil(f"{directory}/{kind}", kind)
        gc.collect()


@pytest.fixture(scope="module")
def distilled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("frozen")
    run_distributed(_distil_each, 3, (str(directory),))
    return directory


@pytest.mark.parametrize("kind", [*TOLD_BESIDE, *SILENT_BESIDE])
def test_a_frozen_module_beside_the_model_is_the_same_on_all_ranks(kind: str, distilled: Path) -> None:
    events = [one for one in read_events(distilled / kind / "events.jsonl") if one["kind"] == "weights-mismatch"]
    told = [(one["step"], one["severity"], one["where"], one["ranks"]) for one in events]
    assert told == ([(2, *TOLD_BESIDE[kind])] if kind in TOLD_BESIDE else [])
    ranks = "each has its own (rank 0; rank 1; rank 2)" if "own" in kind else "ranks 0, 2; rank 1"
    assert all(one["message"].endswith(f"its weights differ between ranks: {ranks}.") for one in events)


def test_only_some_of_many_ranks_speak() -> None:
    def told(*keys: str) -> list[tuple[str, str]]:
        texts = [text_of([Breach(key, "weights-mismatch", "warning", "T", "They differ", "", 1, unlike="t")]) for key in
                 keys]  # fmt: skip
        return [(one.severity, one.message) for one in unlike_of(texts, [(rank,) for rank in range(len(keys))], 16)]

    assert told("a", "b", "c", "d") == [("info", "They differ: rank 0; rank 1; rank 2; rank 3; ….")]
    assert told("a", "b") == []  # the others have found nothing
    assert told("a", "a", "a", "a") == []
