"""Loops whose calls stand in the wrong place, or give the wrong thing, on both ranks alike; and loops that mean it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, OneCycleLR, PolynomialLR
from torch.utils.checkpoint import checkpoint
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

import ds_silent
from ds_silent.patches import Patches
from ds_silent.rules.call_order import Clipping, SteppedAgain
from ds_silent.sinks.jsonl import read_events
from tests.support.distributed import run_distributed

STEPS, FEW, ROWS, CLASSES = 20, 8, 8, 4
UNUSED = ("reentrant checkpoint", "a head that is not in use")
STATIC = "a part of a reentrant checkpoint whose inputs need a gradient"


class Net(nn.Module):
    """Two adapters behind a frozen layer, the first of which may lie inside a checkpoint, and a head."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.adapter, self.head, self.spare = nn.Linear(8, 8), nn.Linear(8, CLASSES), nn.Linear(8, CLASSES)
        self.spare.requires_grad_(kind == "a head that is not in use")

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(x)
        if "checkpoint" in self.kind:
            x = x.requires_grad_("inputs" in self.kind)
            inner = self._half if self.kind == STATIC else self.adapter
            x = checkpoint(inner, x, use_reentrant="reentrant" in self.kind)
        else:
            x = self.adapter(x)
        logits: Tensor = self.head(x.tanh())
        return logits

    def _half(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.adapter.weight) + self.adapter(x).detach()


def _pairs(logits: Tensor) -> Tensor:
    """(B, T, C) of (B T, C), with T other than C."""
    return torch.cat((logits, logits.detach())).view(ROWS // 2, -1, CLASSES)[:, :2]


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "softmax before cross_entropy": lambda x, y: functional.cross_entropy(x.softmax(-1), y),
    "softmax before soft targets": lambda x, y: functional.cross_entropy(
        x.softmax(-1).view(-1, CLASSES), functional.one_hot(y, CLASSES).float()
    ),
    "softmax before smoothing": lambda x, y: functional.cross_entropy(x.softmax(-1), y, label_smoothing=0.1),
    "sigmoid before logits": lambda x, y: functional.binary_cross_entropy_with_logits(
        x.sigmoid(), functional.one_hot(y, CLASSES).float()
    ),
    "softmax before nll_loss": lambda x, y: functional.nll_loss(x.softmax(-1), y),
    "softmax before kl_div": lambda x, y: functional.kl_div(
        x.softmax(-1), x.detach().softmax(-1), reduction="batchmean"
    ),
    "a router's balance of probabilities": lambda x, y: (
        functional.cross_entropy(x, y)
        + 0.01 * (torch.cat([x.softmax(-1), x.softmax(-1)]).softmax(-1).mean(0) * torch.ones(CLASSES)).sum()
    ),
    "a router's balance of logits": lambda x, y: (
        functional.cross_entropy(x, y) + 0.01 * (torch.cat([x, x]).softmax(-1).mean(0) * torch.ones(CLASSES)).sum()
    ),
    "one minus the probability": lambda x, y: (1 - functional.one_hot(y, CLASSES) * x.softmax(-1)).sum(-1).mean(),
    "log_softmax over the rows": lambda x, y: functional.nll_loss(x.log_softmax(0), y),
    "one class": lambda x, y: functional.cross_entropy(x[:, :1], y.float()[:, None]),
    "one class by number": lambda x, y: functional.cross_entropy(x[:, :1], 0 * y),
    "one class in a term": lambda x, y: (
        functional.cross_entropy(x, y) + 0.1 * functional.cross_entropy(x[:, :1], 0 * y)
    ),
    "log_softmax over the classes": lambda x, y: functional.nll_loss(x.log_softmax(1), y),
    "targets of another shape": lambda x, y: functional.mse_loss(x[:, :1], y.float()),
    "targets of another shape, by hand": lambda x, y: ((x[:, 0] - y.float()[:, None]) ** 2).mean(),
    "targets of one shape": lambda x, y: functional.mse_loss(x[:, :1], y.float()[:, None]) + (x[:, 0] - y).abs().mean(),
    "view for a transposition": lambda x, y: functional.cross_entropy(_pairs(x).reshape(-1, CLASSES, 2), y.view(-1, 2)),
    "transposition": lambda x, y: functional.cross_entropy(_pairs(x).transpose(1, 2), y.view(-1, 2)),
    "flattened": lambda x, y: functional.cross_entropy(_pairs(x).reshape(-1, CLASSES), y),
    "logarithm between": lambda x, y: functional.nll_loss((x.softmax(-1) + 1e-6).log(), y),
    "temperature between": lambda x, y: functional.cross_entropy(x.softmax(-1) / 0.1, y),
    "log_softmax twice": lambda x, y: functional.cross_entropy(x.log_softmax(-1), y),  # changes nothing
    "distillation": lambda x, y: functional.kl_div(x.log_softmax(-1), x.detach().softmax(-1), reduction="batchmean"),
    "entropy": lambda x, y: functional.cross_entropy(x, y) + 0.1 * (x.softmax(-1) * x.log_softmax(-1)).sum(-1).mean(),
}


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "linear schedule over": lambda optimizer: get_linear_schedule_with_warmup(optimizer, 2, 4),
    "cosine schedule over": lambda optimizer: get_cosine_schedule_with_warmup(optimizer, 2, 4),
    "cosine schedule": lambda optimizer: get_cosine_schedule_with_warmup(optimizer, 2, STEPS - 7),
    "polynomial schedule over": lambda optimizer: PolynomialLR(optimizer, 4),
    "cosine by torch over": lambda optimizer: CosineAnnealingLR(optimizer, 4),
    "cosine by torch": lambda optimizer: CosineAnnealingLR(optimizer, STEPS - 7),
    "one cycle over": lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=4),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=STEPS - 7),
    "warm-up": lambda optimizer: LinearLR(optimizer, 0.1, 1.0, 4),
}


def _rate(kind: str, step: int) -> float:
    ends = {"rate of 0": 4, "schedule ends a little early": STEPS - 5, "schedule never starts": 0}
    return float(step < ends.get(kind, STEPS))


def steps_of(kind: str) -> int:
    """A schedule or a checkpoint is told behind step 12; what else is told is told by step 4."""
    late = kind in SCHEDULES or kind in UNUSED or any(word in kind for word in ("schedule", "rate of 0", "checkpoint"))
    return STEPS if late or kind == "healthy" else FEW


def _train(directory: str, kind: str) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(kind), find_unused_parameters=kind in UNUSED, static_graph=kind == STATIC)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer: Any = torch.optim.SGD(trainable, lr=0.05, fused=True if "fused" in kind else None)
    if kind == "a step within a step":
        optimizer = Around(trainable, optimizer)
    several = "two" in kind or ("stepped" in kind and "scaled" not in kind)
    second: Any = torch.optim.SGD(trainable[:2], lr=0.01) if several else None
    held = (parameter for parameter in trainable[:0])  # as of model.parameters() that an optimizer has read
    scheduler: Any = LambdaLR(optimizer, lambda step: _rate(kind, step))
    if kind in SCHEDULES:
        scheduler = SCHEDULES[kind](optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled="disabled" not in kind)
    limit = 0.0 if "to 0" in kind else math.inf if "infinity" in kind else 100.0 if "nothing to clip" in kind else 0.01
    loss_of = LOSSES.get(kind, functional.cross_entropy)
    torch.manual_seed(1 + dist.get_rank())
    dtype = torch.float16 if "fp16" in kind else torch.bfloat16
    casts = partial(torch.autocast, "cpu", dtype, cache_enabled="uncached" not in kind)
    around, within = (
        casts() if f"autocast {where}" in kind else contextlib.nullcontext() for where in ("around", "within")
    )
    config = {"output_dir": directory, "tensorboard": False}
    both = optimizer if second is None else (optimizer, second)
    with ds_silent.observe(model, both, config=config), around:
        for step in range(steps_of(kind)):
            for _ in range(3 if "accumulation" in kind else 0):
                with model.no_sync():
                    (loss_of(model(torch.randn(ROWS, 8)), torch.randint(CLASSES, (ROWS,))) / 4).backward()
                if "clipped within" in kind:
                    nn.utils.clip_grad_norm_(trainable, limit)
            with within:
                loss = loss_of(model(torch.randn(ROWS, 8)), torch.randint(CLASSES, (ROWS,)))
            loss = loss / 4 if "accumulation" in kind else loss
            (scaler.scale(loss) if "scaled" in kind else loss).backward()
            if kind == "cleared between":
                optimizer.zero_grad()
            if "unscaled" in kind:
                scaler.unscale_(optimizer)
            if "by hand" in kind:
                for parameter in trainable:
                    parameter.grad /= scaler.get_scale()
            if "clipped before" in kind or "clipped within" in kind:
                nn.utils.clip_grad_norm_(trainable, limit)
            if "clipped of" in kind:
                for one in [held] if "nothing" in kind else [[], trainable]:
                    nn.utils.clip_grad_norm_(one, limit)
            if "by the scaler" in kind:
                scaler.step(optimizer)
            elif "anew" in kind:
                with casts():  # left behind the step
                    loss_of(model(torch.randn(ROWS, 8)), torch.randint(CLASSES, (ROWS,))).backward()
                    optimizer.step()
            elif not (kind == "two optimizers in turn" and step % 2):
                optimizer.step()
            if kind == "stepped twice" or (kind == "two optimizers in turn" and step % 2):
                second.step()
            elif kind == "stepped twice by one":
                optimizer.step()
            if "unscaled" in kind or "by the scaler" in kind:
                scaler.update()
            if not ("one cycle" in kind and scheduler.last_epoch == scheduler.total_steps):  # it would raise
                scheduler.step()
            if "behind" in kind:
                nn.utils.clip_grad_norm_(trainable, limit)
            optimizer.zero_grad()


class Around(torch.optim.Optimizer):
    """An optimizer that wraps one, as SAM's do."""

    def __init__(self, parameters: list[Tensor], inner: torch.optim.Optimizer) -> None:
        super().__init__(parameters, {"lr": 0.05})
        self.inner, self.param_groups = inner, inner.param_groups

    def step(self, closure: Any = None) -> None:
        self.inner.step(closure)


TOLD = {
    "stepped twice": (4, "info", "optimizer.step()"),
    "stepped twice by one": (4, "info", "optimizer.step()"),
    "clipped behind": (4, "warning", "clip_grad_norm_"),
    "clipped before, to 0": (3, "warning", "clip_grad_norm_"),
    "clipped of nothing": (4, "warning", "clip_grad_norm_"),
    "clipped within the accumulation": (1, "warning", "clip_grad_norm_"),
    "autocast around the loop": (4, "warning", "autocast"),
    "cleared between": (4, "error", "zero_grad"),
    "scaled, stepped past the scaler": (3, "warning", "GradScaler"),
    "fp16 autocast within": (3, "info", "GradScaler"),
    "fp16 autocast within, scaled, disabled": (3, "info", "GradScaler"),
    "rate of 0": (12, "info", "learning rate"),
    "linear schedule over": (14, "warning", "learning rate"),
    "cosine schedule over": (14, "warning", "learning rate"),
    "one cycle over": (13, "warning", "learning rate"),
    "cosine by torch over": (14, "info", "learning rate"),
    "polynomial schedule over": (14, "warning", "learning rate"),
    "softmax before cross_entropy": (1, "warning", "cross_entropy"),
    "softmax before soft targets": (1, "warning", "cross_entropy"),
    "softmax before smoothing": (1, "warning", "cross_entropy"),
    "sigmoid before logits": (1, "warning", "binary_cross_entropy_with_logits"),
    "softmax before nll_loss": (1, "info", "nll_loss"),
    "softmax before kl_div": (1, "info", "kl_div"),
    "log_softmax over the rows": (1, "warning", "nll_loss"),
    "one class": (1, "warning", "cross_entropy"),
    "one class by number": (1, "warning", "cross_entropy"),
    "targets of another shape": (1, "warning", "mse_loss"),
    "targets of another shape, by hand": (1, "info", "the script's loss"),
    "view for a transposition": (1, "warning", "cross_entropy"),
    "a router's balance of probabilities": (1, "info", "softmax"),
    "reentrant checkpoint": (16, "warning", "adapter.weight, adapter.bias"),
    STATIC: (16, "info", "adapter.bias"),
    "a head that is not in use": (16, "info", "spare.weight, spare.bias"),
}
MEANT = (
    "healthy",
    "two optimizers in turn",
    "a step within a step",
    "clipped before",
    "clipped of each group, one of them empty",
    "log_softmax over the classes",
    "one class in a term",
    "targets of one shape",
    "infinity behind",
    "clipped before, after an accumulation",
    "clipped within an accumulation, to infinity",
    "autocast around, uncached",
    "autocast within",
    "fp16 autocast within, scaled, by the scaler",
    "fp16 autocast within, scaled, by hand",
    "nothing to clip behind",
    "scaled, unscaled, by the scaler",
    "scaled, by the scaler",
    "scaled, unscaled",
    "scaled, by hand",
    "scaled, disabled",
    "schedule ends a little early",
    "schedule never starts",
    "cosine schedule",
    "one cycle",
    "warm-up",
    "checkpoint",
    "reentrant checkpoint whose inputs need a gradient",
    "a router's balance of logits",
    "logarithm between",
    "temperature between",
    "one minus the probability",
    "cosine by torch",
    "log_softmax twice",
    "distillation",
    "transposition",
    "flattened",
    "an autocast anew for each step, accumulation",
    "scaled, fused, by the scaler",
    "entropy",
)


def _each(directory: str) -> None:
    for kind in (*TOLD, *MEANT):
        _train(f"{directory}/{kind}", kind)


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.long)], ids="{} ranks".format)
def runs(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """What is the same on every rank is found by one; two cost twice as much."""
    directory = tmp_path_factory.mktemp("calls")
    run_distributed(_each, request.param, (str(directory),), timeout=400)
    return directory


def _found(directory: Path) -> list[tuple[Any, ...]]:
    events = [event for event in read_events(directory / "events.jsonl") if event["kind"] != "same-draws"]
    return [(event["step"], event["severity"], event["where"], event["ranks"]) for event in events]


@pytest.mark.parametrize("kind", TOLD)
def test_a_call_in_the_wrong_place_is_told_once(kind: str, runs: Path) -> None:
    assert _found(runs / kind) == [(*TOLD[kind], [])]


@pytest.mark.parametrize("kind", [kind for kind in TOLD if TOLD[kind][2] == "clip_grad_norm_"])
def test_a_clipping_is_dated_by_its_first_step(kind: str, runs: Path) -> None:
    [event] = [one for one in read_events(runs / kind / "events.jsonl") if one["where"] == "clip_grad_norm_"]
    assert ", since step 1" in event["message"]


def test_a_step_that_comes_twice_is_dated_by_its_first(runs: Path) -> None:
    for kind, who in (("stepped twice", "another optimizer, which holds them too,"), ("by one", "the same optimizer")):
        directory = next(one for one in TOLD if one.startswith("stepped") and one.endswith(kind))
        [event] = read_events(runs / directory / "events.jsonl")
        assert f"by the same gradient, since step 1: {who} steps again before another" in event["message"]


@pytest.mark.parametrize("kind", MEANT)
def test_what_is_meant_is_silent(kind: str, runs: Path) -> None:
    assert _found(runs / kind) == []


@pytest.mark.parametrize("each", ["a group at a time", "a tensor at a time", "all, by closures", "all, twice"])
def test_groups_that_are_stepped_one_by_one_are_no_second_step(each: str) -> None:
    """As by ZeRO, which puts one group, or one tensor, in the place of all for each of its steps."""
    model, patches = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), Patches()
    optimizer = torch.optim.SGD([{"params": list(layer.parameters())} for layer in model], lr=0.1)
    framework: Any = SimpleNamespace(step=1, parameters=list(model.parameters()), optimizers=lambda: [optimizer])
    rule, groups = SteppedAgain(framework), optimizer.param_groups
    rule.connect(patches, lambda function, *given: function(*given))
    try:
        for framework.step in range(1, 8):
            model(torch.randn(3, 2)).sum().backward()

            def loss() -> float:
                total = model(torch.randn(3, 2)).sum()
                total.backward()
                return float(total.detach())

            parts = [[group] for group in groups] if "at a time" in each else [groups, groups]
            if each == "a tensor at a time":
                parts = [[{**group, "params": [one]}] for group in groups for one in group["params"]]
            for optimizer.param_groups in parts:
                optimizer.step(loss if "closures" in each else None)
            optimizer.param_groups = groups
    finally:
        patches.undo()
    assert len(rule.breaches()) == (each == "all, twice")


@pytest.mark.parametrize("within", [True, False])
def test_a_clipping_before_a_step_without_a_reduction_is_not_within_an_accumulation(within: bool) -> None:
    """Where nothing is ever reduced, that is the fault, and the clipping stands where it should."""
    model, patches = nn.Linear(2, 2), Patches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    framework: Any = SimpleNamespace(
        step=1, parameters=list(model.parameters()), optimizers=lambda: [optimizer], counts=SimpleNamespace()
    )
    rule = Clipping(framework)
    rule.connect(patches, lambda function, *given, **named: function(*given, **named))
    try:
        for framework.step in range(1, 8):
            for micro_batch in range(2):
                framework.counts.unreduced = not within or micro_batch == 0
                model(torch.randn(3, 2)).sum().backward()
                if within or micro_batch == 1:
                    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad()
    finally:
        patches.undo()
    assert [one.message.partition(",")[0] for one in rule.breaches()] == (
        ["clip_grad_norm_ is called within the accumulation"] if within else []
    )
