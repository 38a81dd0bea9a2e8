"""Ranks whose code does not do the same during the training: told at its step, with the rank, the thing and its values.

Real trainings on gloo ranks, each of which is healthy but for one line of one rank.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ds_silent
from ds_silent.capture.settings_check import MOST_QUESTIONS, differing
from ds_silent.drill.verdicts import alarms
from ds_silent.exchange.observation import Code
from ds_silent.preflight.inventory import dropout_probabilities, generator_items
from ds_silent.preflight.messages import verdict as verdict_of
from ds_silent.sinks.jsonl import read_events, read_metrics
from tests.support.distributed import run_on_kept_ranks
from tests.support.preflight import outcome_of

ROWS, WIDTH, STRIKE, STEPS = 4, 16, 4, 8


class Net(nn.Module):
    def __init__(self, dropout: float = 0.1):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Dropout(dropout)) for _ in range(2)
        )
        self.frozen = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)).requires_grad_(False)
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.first(rows)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return (self.last(self.frozen(hidden)) - rows.sum(1, keepdim=True)).square().mean()


@dataclass(frozen=True)
class Case:
    name: str
    stage: int = 0
    dtype: str = "fp32"
    accumulation: int = 1
    optimizer: str = "AdamW"
    interval: int = 1
    backward: str = "engine"
    dropout: float = 0.1
    own_seeds: bool = False
    preflight: bool = False
    steps: int = STEPS
    ids: bool = False
    flush: bool = False  # after every step, as a script does that writes checkpoints


def _config(case: Case, directory: Path) -> dict[str, Any]:
    world = dist.get_world_size()
    parameters: dict[str, Any] = {"lr": 1e-3}
    if case.optimizer == "AdamW":
        parameters["torch_adam"] = True
    else:
        parameters["momentum"] = 0.9
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": case.accumulation,
        "train_batch_size": ROWS * case.accumulation * world,
        "optimizer": {"type": case.optimizer, "params": parameters},
        "zero_optimization": {"stage": case.stage},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": case.dtype == "bf16"},
        "steps_per_print": 10**9,
        "silent_consistency": {
            "output_dir": str(directory),
            "tensorboard": False,
            "preflight": case.preflight,
            "interval": case.interval,
            "direction": {"sketch_size": 1024},
            "integrity": {"replica_interval": 0},
        },
    }


Act = Callable[[Any, int, int], None]


def _group(name: str, change: Callable[[Any], Any]) -> Act:
    def act(engine: Any, rank: int, step: int) -> None:
        if rank == 1 and step == STRIKE:
            for group in engine.optimizer.param_groups:
                group[name] = change(group[name])

    return act


def _decay(engine: Any, rank: int, step: int) -> None:
    """A schedule by hand that runs on all ranks but one, from a step on."""
    if rank != 1 or step < STRIKE:
        for group in engine.optimizer.param_groups:
            group["lr"] = 1e-3 * 0.9**step


def _schedule(engine: Any, rank: int, step: int) -> None:
    for group in engine.optimizer.param_groups:
        group["lr"] = 1e-3 * 0.9**step


def _evaluation(engine: Any, rank: int, step: int) -> None:
    if rank == 1 and step == STRIKE:
        engine.module.eval()


def _one_dropout(engine: Any, rank: int, step: int) -> None:
    if rank == 1 and step == STRIKE:
        engine.module.layers[1][2].eval()


def _trained(engine: Any, rank: int, step: int) -> None:
    """The other way round, buckets of different sizes would end DeepSpeed's own reduction."""
    if rank == 1 and step == STRIKE:
        engine.module.frozen.requires_grad_(True)


def _evaluations_between(engine: Any, rank: int, step: int) -> None:
    """With and without no_grad, whole or a part, on one rank only; what a script does between two steps."""
    engine.module.frozen.eval()
    rows = torch.ones(3, WIDTH, dtype=next(engine.module.parameters()).dtype)
    engine.module.eval()
    with torch.no_grad():
        engine(rows)
    if rank == 1:
        engine(rows)
    engine.module.train()
    engine.module.frozen.eval()


def _all_evaluate(engine: Any, rank: int, step: int) -> None:
    engine.module.eval()


def _nothing(engine: Any, rank: int, step: int) -> None:
    pass


ACTS: dict[str, Act] = {
    "lr": _group("lr", lambda lr: 3 * lr),
    "weight_decay": _group("weight_decay", lambda decay: decay + 0.1),
    "betas": _group("betas", lambda betas: (0.5, betas[1])),
    "momentum": _group("momentum", lambda momentum: momentum / 2),
    "decay": _decay,
    "schedule": _schedule,
    "evaluation": _evaluation,
    "one dropout": _one_dropout,
    "trained": _trained,
    "evaluations between": _evaluations_between,
    "all evaluate": _all_evaluate,
    "healthy": _nothing,
    "functional": _nothing,
}


def _train(case: Case, directory: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Events and records, on rank 0."""
    rank, folder = dist.get_rank(), Path(directory, _folder(case))
    torch.manual_seed(5)
    model = (Functional if case.name == "functional" else Net)(case.dropout)
    engine, *_ = ds_silent.initialize(
        model=model,
        model_parameters=[p for p in model.parameters() if p.requires_grad],
        config=_config(case, folder),
    )
    if case.own_seeds:
        torch.manual_seed(5 + rank)
    observer = ds_silent.observer_of(engine)
    assert observer is not None
    generator = torch.Generator().manual_seed(70 + rank)
    dtype = torch.bfloat16 if case.dtype == "bf16" else torch.float32
    for step in range(1, case.steps + 1):
        ACTS[case.name](engine, rank, step)
        for micro in range(case.accumulation):
            rows = torch.randn(ROWS, WIDTH, generator=generator)
            if case.ids:
                first = 1000 * rank + 10 * step + ROWS * micro
                observer.observe_batch(torch.arange(first, first + ROWS))
            loss = engine(rows.to(dtype))
            if case.backward == "engine":
                engine.backward(loss)
            else:
                loss.backward()
            engine.step()
        if case.flush:
            observer.flush()
    observer.close()
    engine.destroy()
    if rank:
        return [], []
    path = folder / "events.jsonl"
    return (list(read_events(path)) if path.exists() else []), list(read_metrics(folder / "metrics.jsonl"))


def _folder(case: Case) -> str:
    return "-".join(str(value) for value in vars(case).values()).replace(" ", "_").replace(".", "_")


def _train_all(cases: tuple[Case, ...], directory: str) -> list[Any]:
    return [_train(case, directory) for case in cases]


def train(cases: tuple[Case, ...], ranks: int) -> list[tuple[Case, list[dict[str, Any]], list[dict[str, Any]]]]:
    with tempfile.TemporaryDirectory() as directory:
        done = run_on_kept_ranks(_train_all, ranks, (cases, directory), timeout=300)[0]
    return [(case, *one) for case, one in zip(cases, done, strict=True)]


TOLD = {
    "lr": ("learning rate", "0.003 on rank 1"),
    "weight_decay": ("weight decay", "0.11 on rank 1"),
    "betas": ("betas", "[0.5, 0.999] on rank 1"),
    "momentum": ("momentum", "0.45 on rank 1"),
    "decay": ("learning rate", "on rank 1"),
    "evaluation": ("training mode of Net", "Net in evaluation mode on rank 1"),
    "one dropout": ("training mode of layers.1", "layers.1.2 in evaluation mode (1 of 4) on rank 1"),
    "trained": ("trainable flags of frozen.0", "frozen.0.weight frozen (2 of 2) on ranks 0, 2"),
}


@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.long
def test_one_rank_that_does_something_else_is_told_once_at_its_step(ranks: int) -> None:
    cases = (
        Case("lr"),
        Case("lr", stage=1, dtype="bf16", accumulation=4),
        Case("lr", stage=3),
        Case("weight_decay", stage=2),
        Case("betas", stage=1),
        Case("momentum", optimizer="SGD"),
        Case("decay", stage=1),
        Case("lr", interval=3, steps=10),
        Case("evaluation"),
        Case("evaluation", stage=2, dtype="bf16", accumulation=2),
        Case("evaluation", stage=1, backward="torch"),
        Case("one dropout", stage=1),
        Case("trained", stage=1),
    )
    for case, events, records in train(cases if ranks == 3 else cases[:2], ranks):
        found = alarms(events)
        assert [(e["kind"], e["ranks"], e["severity"]) for e in found] == [("config-mismatch", [1], "error")], case
        where, words = TOLD[case.name]
        assert found[0]["step"] == -(-STRIKE // case.interval) * case.interval, case
        assert found[0]["where"] == where, case
        assert words in found[0]["message"], (case, found[0]["message"])
        assert len(records) == case.steps // case.interval


def test_of_two_ranks_none_is_named() -> None:
    for case, events, _ in train((Case("lr"), Case("evaluation", stage=1)), 2):
        found = alarms(events)
        assert [(e["kind"], e["ranks"], e["step"]) for e in found] == [("config-mismatch", [], STRIKE)], case
        assert TOLD[case.name][0] == found[0]["where"]


def test_health_is_silent() -> None:
    cases = (
        Case("healthy"),
        Case("schedule", stage=1, dtype="bf16"),
        Case("schedule", stage=3, accumulation=2),
        Case("evaluations between"),
        Case("evaluations between", stage=2, accumulation=2, backward="torch"),
        Case("all evaluate", stage=1),
        Case("healthy", optimizer="SGD", interval=3),
    )
    for case, events, _ in train(cases, 3):
        assert alarms(events) == [], case


def test_a_rank_that_trains_in_evaluation_mode_keeps_its_rows_and_its_loss() -> None:
    cases = (
        Case("evaluation", stage=1, backward="torch"),
        Case("evaluation", accumulation=2, ids=True),
        Case("evaluations between", stage=1, backward="torch", accumulation=2),
    )
    for case, _, records in train(cases, 3):
        for record in records:
            assert None not in record["loss"]["per_rank"], case
            assert record["coverage"]["duplicates"] == 0, (case, record["step"])
        # an evaluation's rows are not the training's: three ranks hand in as many as they train on
        assert [record["step"] for record in records] == list(range(1, STEPS + 1))


def test_what_the_preflight_has_told_is_not_told_again() -> None:
    with tempfile.TemporaryDirectory() as directory:
        events = run_on_kept_ranks(_other_rate_from_the_start, 3, (directory,))[0]
    assert [(e["step"], e["kind"], e["ranks"]) for e in alarms(events) if e["where"] == "learning rate"] == [
        (0, "config-mismatch", [1])
    ]
    assert all(event["step"] == 0 for event in alarms(events))


def _other_rate_from_the_start(directory: str) -> list[dict[str, Any]]:
    import deepspeed

    rank, case = dist.get_rank(), Case("healthy", preflight=True)
    torch.manual_seed(5)
    model = Net(0.0)
    trained = [p for p in model.parameters() if p.requires_grad]
    config = _config(case, Path(directory))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=config)
    if rank == 1:
        engine.optimizer.param_groups[0]["lr"] *= 3
    observer = ds_silent.attach(engine)
    assert observer is not None
    generator = torch.Generator().manual_seed(70 + rank)
    for _ in range(4):
        engine.backward(engine(torch.randn(ROWS, WIDTH, generator=generator)))
        engine.step()
    observer.close()
    return list(read_events(Path(directory, "events.jsonl"))) if rank == 0 else []


def test_what_is_seen_in_the_last_sample_is_told_at_the_end() -> None:
    (_, events, _), (_, early, _) = train((Case("lr", steps=STRIKE), Case("evaluation", steps=STRIKE)), 3)
    for found in (alarms(events), alarms(early)):
        assert [(e["kind"], e["ranks"], e["step"]) for e in found] == [("config-mismatch", [1], STRIKE)]


def notes(events: list[dict[str, Any]]) -> list[tuple[int, str, str, list[int]]]:
    return [(e["step"], e["kind"], e["severity"], e["ranks"]) for e in events if e["kind"] == "same-draws"]


class Functional(Net):
    """Dropout that no module shows."""

    def forward(self, rows: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(rows, 0.1, self.training))


def test_equal_masks_are_a_note_where_there_are_masks() -> None:
    told = [(1, "same-draws", "info", [])]
    expected = (
        (Case("healthy", steps=2, preflight=True), told),
        (Case("healthy", steps=4, interval=2, accumulation=2, stage=2), [(2, *told[0][1:])]),
        (Case("healthy", steps=2, preflight=True, own_seeds=True), []),
        (Case("healthy", steps=2, preflight=True, dropout=0.0), []),
        (Case("functional", steps=2, dropout=0.0), told),
    )
    for (case, events, _), (_, note) in zip(train(tuple(case for case, _ in expected), 3), expected, strict=True):
        assert notes(events) == note, case
        assert alarms(events) == [], case


def test_the_preflight_shows_dropout_whose_masks_are_equal() -> None:
    for dropout, verdict in ((0.1, "equal, better different"), (0.0, "equal")):
        items = generator_items(Net(dropout))
        shown = [item for item in items if item.name == "dropout's masks"]
        assert [(item.severity, item.shown == "none") for item in shown] == [("info", dropout == 0.0)]
        hashes = np.array([[item.hash for item in items]] * 3, dtype=np.int32)
        outcome = outcome_of(items, hashes)
        assert [verdict_of(f) for f in outcome.items if f.item in shown] == [verdict]
        assert outcome.wrong == ()
        if dropout:
            hashes[:, -1, 0] += np.arange(3, dtype=np.int32)
            assert verdict_of(outcome_of(items, hashes).items[-1]) == "different"


def test_what_drops() -> None:
    attention, without = nn.MultiheadAttention(4, 2, dropout=0.1), nn.MultiheadAttention(4, 2)
    assert list(dropout_probabilities(nn.Sequential(attention, without))) == ["0"]
    assert list(dropout_probabilities(nn.Sequential(nn.Dropout(0.0), nn.Linear(2, 2), nn.Dropout2d(0.2)))) == ["2"]
    assert list(dropout_probabilities(nn.Sequential(nn.GELU()))) == []


def test_samples_that_were_published_early_are_asked_about_at_the_next_step() -> None:
    cases = (Case("lr", flush=True), Case("evaluation", stage=1, flush=True), Case("healthy", flush=True))
    for case, events, _ in train(cases, 3):
        found = [(e["kind"], e["ranks"], e["step"], e["where"]) for e in alarms(events)]
        expected = [("config-mismatch", [1], STRIKE + 1, TOLD[case.name][0])] if case.name in TOLD else []
        assert found == expected, case


def test_unknown_hashes_differ_from_nothing() -> None:
    def found(*hashes: float) -> object:
        return differing(Code(trainable=torch.tensor(hashes)), "trainable")

    assert found(1.0, 0.0, 2.0) is None
    assert found(3.0, 3.0, 3.0) is None
    assert found(3.0, 4.0, 3.0) == ((0, 2), (1,))
    assert MOST_QUESTIONS > 1
