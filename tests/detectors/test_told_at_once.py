"""Faults of one rank in real trainings with a script of their own: told at once where that is possible, and as code,
data or gradient, whichever it is. Beside a rank that is NaN the others' numbers stay numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import ds_silent
from ds_silent.exchange.layout import GATHER_LIMIT
from tests.support.distributed import gather_limit_of, run_distributed
from tests.support.training import LENGTH, VOCABULARY, Case, Probe

BAD, STRIKE, ROWS = 2, 4, 4


class Fused(torch.autograd.Function):
    """A loss whose graph tells nothing: it is judged by its size and its gradient alone."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, reduction: str, times: float) -> Tensor:
        with torch.enable_grad():
            own = logits.detach().requires_grad_()
            loss = times * F.cross_entropy(own, labels, ignore_index=-100, reduction=reduction)
        ctx.save_for_backward(*torch.autograd.grad(loss, own))
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.saved_tensors[0], None, None, None


class Scored(nn.Module):
    """Probe's blocks, called with labels, as transformers' models are, with a fused loss."""

    def __init__(self) -> None:
        super().__init__()
        self.probe = Probe(None)

    def forward(self, input_ids: Tensor, labels: Tensor, reduction: str = "mean", times: float = 1.0) -> Tensor:
        probe = self.probe
        hidden = probe.embedding(input_ids)
        for layer in probe.layers:
            hidden = hidden + layer(hidden)
        logits = probe.head(probe.norm(hidden + probe.sometimes(hidden) + probe.frozen(hidden)))[:, :-1]
        loss: Tensor = Fused.apply(logits.float().flatten(0, 1), labels[:, 1:].flatten(), reduction, times)
        return loss


@dataclass(frozen=True)
class Script:
    """One training; ``fault`` strikes rank 2 from step 4 on."""

    fault: str = "healthy"
    case: Case = field(default_factory=Case)
    steps: int = STRIKE + 3
    strike: int = STRIKE
    uneven: bool = False  # label tokens differ between ranks and rows


def batch(script: Script, generator: torch.Generator, struck: bool) -> tuple[Tensor, Tensor]:
    rows = 2 * ROWS if struck and script.fault == "micro-batch" else ROWS
    successor = torch.arange(VOCABULARY).roll(7)
    tokens = torch.randint(0, VOCABULARY, (rows, 1), generator=generator)
    for _ in range(2 * LENGTH - 1):
        follows = torch.where(
            torch.rand(rows, generator=generator) < 0.7,
            successor[tokens[:, -1]],
            torch.randint(0, VOCABULARY, (rows,), generator=generator),
        )
        tokens = torch.cat([tokens, follows[:, None]], 1)
    labels = tokens.clone()
    if script.uneven:
        labels[torch.rand(labels.shape, generator=generator) < torch.rand((rows, 1), generator=generator) * 0.8] = -100
        labels[:, -1] = tokens[:, -1]
    if struck and script.fault == "labels shuffled":
        labels = labels[:, torch.randperm(labels.shape[1], generator=generator)]
    if struck and script.fault == "quarter of the labels":
        labels[:, LENGTH // 2 :] = -100
    return tokens, labels


def train(script: Script, folder: Path, limit: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    rank, case = dist.get_rank(), script.case
    config = case.config(folder, enabled=True)
    config["train_micro_batch_size_per_gpu"] = ROWS
    config["silent_consistency"]["detectors"] = {"dealt": "random"}  # every rank draws new rows by one rule
    config["train_batch_size"] = ROWS * dist.get_world_size() * case.accumulation
    torch.manual_seed(1234)
    model, now = Scored(), {"step": 1}
    bad = rank == BAD
    # the hooks are there on every rank: a hook that one rank alone has is told by its name, whatever it does
    if script.fault in ("gradient twice", "sign", "gradient NaN"):
        factor = {"gradient twice": 200.0, "sign": -1.0, "gradient NaN": math.nan}[script.fault]
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_hook(lambda g: g * factor if bad and now["step"] >= script.strike else g)
    if script.fault == "cut":  # a hook clips each parameter by itself, before the reduction
        for parameter in model.parameters():
            if parameter.requires_grad:
                most = 0.05 if bad else math.inf
                parameter.register_hook(lambda g, most=most: g * (most / g.norm().clamp(min=1e-30)).clamp(max=1.0))
    with gather_limit_of(limit):
        engine, *_ = ds_silent.initialize(model=model, model_parameters=model.parameters(), config=config)
    generator = torch.Generator().manual_seed(50 + rank)
    for step in range(1, script.steps + 1):
        now["step"] = step
        struck = bad and step >= script.strike
        for _ in range(case.accumulation):
            tokens, labels = batch(script, generator, struck)
            reduction = "sum" if struck and script.fault == "loss summed" else "mean"
            times = {"loss 1.5": 1.5, "loss halved": 0.5}.get(script.fault, 1.0) if struck else 1.0
            if script.fault == "out of phase":  # two tasks in turn, on this rank the other one
                times = 100.0 if (step + struck) % 2 else 1.0
            loss = engine(input_ids=tokens, labels=labels, reduction=reduction, times=times)
            if struck and script.fault == "loss NaN":
                loss = loss * math.nan
            engine.backward(loss)
            engine.step()
    ds_silent.observer_of(engine).close()
    engine.destroy()
    dist.barrier()
    from ds_silent.sinks.jsonl import read_events, read_metrics

    return list(read_metrics(folder / "metrics.jsonl")), list(read_events(folder / "events.jsonl"))


def train_all(scripts: dict[str, Script], directory: str, limit: int = GATHER_LIMIT) -> dict[str, Any]:
    return {name: train(script, Path(directory, name), limit) for name, script in scripts.items()}


def alarms(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["severity"] != "info" and event["step"] > 0]


SUMMED = {
    "zero 0": Script("loss summed"),
    "zero 1, bf16": Script("loss summed", Case(stage=1, dtype="bf16")),
    "zero 2, accumulation 4": Script("loss summed", Case(stage=2, accumulation=4), strike=1),
    "zero 3": Script("loss summed", Case(stage=3)),
    "at the first step": Script("loss summed", strike=1),
}
OTHERS = {
    "cut": Script("cut", steps=10, strike=1),
    "gradient twice": Script("gradient twice"),
    "healthy": Script(steps=20),
    "healthy, uneven": Script(steps=20, uneven=True),
    "micro-batch": Script("micro-batch", steps=STRIKE + 8),
}


@pytest.mark.parametrize("ranks", [4, 3])
def test_what_no_noise_explains_is_told_at_its_first_step_as_what_it_is(ranks: int, tmp_path: Path) -> None:
    scripts = {**SUMMED, **OTHERS} if ranks == 4 else {"zero 0": SUMMED["zero 0"], "healthy": OTHERS["healthy"]}
    found = run_distributed(train_all, ranks, (scripts, str(tmp_path)), 400.0)[0]
    for name in SUMMED if ranks == 4 else ("zero 0",):
        [event] = alarms(found[name][1])
        assert (event["kind"], event["severity"], event["ranks"]) == ("outlier-rank", "error", [BAD]), name
        assert event["step"] == scripts[name].strike, name
        assert "label tokens" in event["message"].split("Most likely: ")[1].split(":")[0], (name, event["message"])
        assert "summed over them, not averaged" in event["message"], name
        assert "hardware" not in event["message"] + event["remedy"], name
    assert alarms(found["healthy"][1]) == []
    if ranks == 4:
        assert alarms(found["healthy, uneven"][1]) == []
        [event] = alarms(found["gradient twice"][1])
        assert (event["step"], event["severity"], event["ranks"]) == (STRIKE, "error", [BAD])
        assert "behind the loss" in event["message"].split("Else")[0], event["message"]
        [event] = alarms(found["cut"][1])
        assert (event["severity"], event["ranks"]) == ("error", [BAD])
        assert event["step"] <= 6
        assert "a far smaller gradient norm than all others, since step 1" in event["message"]
        assert "clips before the reduction" in event["message"].split("Else")[0], event["message"]
        [event] = alarms(found["micro-batch"][1])
        assert (event["kind"], event["ranks"], event["step"]) == ("batch-size-mismatch", [BAD], STRIKE + 3)


LATER = {
    "loss 1.5": (Script("loss 1.5", steps=90, strike=30), ("multiplied",)),
    "loss halved": (Script("loss halved", steps=90, strike=30), ("multiplied",)),
    "out of phase": (Script("out of phase", steps=60, strike=30), ("a task out of phase",)),
    "labels shuffled": (Script("labels shuffled", steps=70, strike=30), ("rows or labels are of another kind",)),
    "summed, uneven tokens": (Script("loss summed", steps=70, strike=30, uneven=True), ("sum",)),
    "sign": (Script("sign", steps=70, strike=30), ("points the other way",)),
}


@pytest.mark.long
def test_what_takes_some_steps_is_told_with_the_likelier_cause_first(tmp_path: Path) -> None:
    scripts = {name: script for name, (script, _) in LATER.items()}
    found = run_distributed(train_all, 4, (scripts, str(tmp_path)), 500.0)[0]
    for name, (script, words) in LATER.items():
        told = alarms(found[name][1])
        assert [(e["kind"], e["ranks"]) for e in told] == [("outlier-rank", [BAD])], (name, told)
        assert told[0]["step"] >= script.strike, name
        first = told[0]["message"].split("Most likely: ")[1].split(". Else")[0]
        assert all(word in first for word in words), (name, told[0]["message"])


NANS = {
    "loss NaN": Script("loss NaN"),
    "gradient NaN": Script("gradient NaN"),
    "zero 2, accumulation 2": Script("gradient NaN", Case(stage=2, accumulation=2)),
    "exact": Script("gradient NaN", Case(method="exact")),
}


@pytest.mark.parametrize("limit", [64, 1])
@pytest.mark.long
def test_beside_a_nan_rank_the_others_stay_numbers(limit: int, tmp_path: Path) -> None:
    scripts = NANS if limit == 64 else {name: NANS[name] for name in ("gradient NaN", "zero 2, accumulation 2")}
    found = run_distributed(train_all, 4, (scripts, str(tmp_path), limit), 300.0)[0]
    for name in scripts:
        records, events = found[name]
        record = next(r for r in records if r["step"] == STRIKE)
        before = next(r for r in records if r["step"] == STRIKE - 1)
        direction, per_rank = record["direction"], record["direction"]["per_rank"]
        assert direction["mean_cosine"] == record["grad_norm"]["mean"] == "nan", name
        for rank in range(4):
            healthy = rank != BAD
            assert isinstance(per_rank[rank], float) == healthy, (name, per_rank)
            assert isinstance(record["grad_norm"]["per_rank"][rank], float) == healthy, name
            if healthy:
                assert abs(per_rank[rank] - before["direction"]["per_rank"][rank]) < 0.5, name
                assert isinstance(record["loss"]["per_rank"][rank], float), name
        if limit == 64:
            assert BAD not in direction["min_pair"] + direction["max_pair"], name
            assert -1.0 <= direction["min_cosine"] <= direction["max_cosine"] <= 1.0, name
        event = next(e for e in events if e["kind"] == "non-finite")
        assert (event["step"], event["ranks"]) == (STRIKE, [BAD]), name
        skips = scripts[name].case.stage > 0  # ZeRO skips a step with an overflow in any dtype
        said = "skipped this step: the weights do not hold" if skips else "the weights hold it by now"
        assert said in event["message"], (name, event["message"])
        assert ("checkpoint" in event["remedy"]) != skips, name
