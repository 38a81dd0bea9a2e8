"""One rank trains for another objective: told at its first step. Objectives that differ by design are silent.

Real trainings on gloo ranks.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ds_silent
from ds_silent.capture.loss_graph import terms_of
from ds_silent.drill.training import hash_of
from ds_silent.drill.verdicts import alarms
from ds_silent.sinks.jsonl import read_events, read_metrics
from tests.support.distributed import run_on_kept_ranks

CLASSES, ROWS, STEPS = 8, 6, 12
CLASS_WEIGHTS = torch.arange(1.0, 1.0 + CLASSES)

Loss = Callable[[Tensor, Tensor, int, int], Tensor]
"""Of logits, targets, rank and step."""


def _one(wrong: Callable[[Tensor, Tensor], Tensor], right: Callable[[Tensor, Tensor], Tensor]) -> Loss:
    return lambda x, y, rank, step: (wrong if rank == 1 else right)(x, y)


def _mean(x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(x, y)


FAULTS: dict[str, tuple[Loss, str]] = {
    "a quarter": (_one(lambda x, y: _mean(x, y) * 0.25, _mean), "MulBackward0 x 0.25 > NllLossBackward0 (mean)"),
    "a quarter of a factor": (
        lambda x, y, rank, step: _mean(x, y) * (0.25 if rank == 1 else 1.0),
        "MulBackward0 x 0.25 > NllLossBackward0 (mean)",
    ),
    "four times": (_one(lambda x, y: _mean(x, y) * 4, _mean), "MulBackward0 x 4 > NllLossBackward0 (mean)"),
    "divided twice": (
        _one(lambda x, y: _mean(x, y) / 4 / 4, lambda x, y: _mean(x, y) / 4),
        "DivBackward0 x 0.25 > DivBackward0 x 0.25 > NllLossBackward0 (mean)",
    ),
    "another accumulation": (
        lambda x, y, rank, step: _mean(x, y) / (4 if rank == 1 else 2),
        "DivBackward0 x 0.25 > NllLossBackward0 (mean)",
    ),
    "summed": (_one(lambda x, y: F.cross_entropy(x, y, reduction="sum"), _mean), "NllLossBackward0 (sum)"),
    "class weights": (
        _one(lambda x, y: F.cross_entropy(x, y, weight=CLASS_WEIGHTS), _mean),
        "NllLossBackward0 (mean, class weights)",
    ),
    "label smoothing": (_one(lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1), _mean), "MulBackward1 x 0.9"),
    "more smoothing": (
        lambda x, y, rank, step: F.cross_entropy(x, y, label_smoothing=0.2 if rank == 1 else 0.1),
        "MulBackward1 x 0.8",
    ),
    "ignored": (
        _one(lambda x, y: F.cross_entropy(x, y, ignore_index=0), _mean),
        "NllLossBackward0 (mean, ignore_index 0)",
    ),
    "another loss": (
        _one(lambda x, y: F.mse_loss(x, F.one_hot(y, CLASSES).float()), _mean),
        "MseLossBackward0 (mean)",
    ),
    "beta": (
        lambda x, y, rank, step: F.smooth_l1_loss(x, F.one_hot(y, CLASSES).float(), beta=0.1 if rank == 1 else 1.0),
        "SmoothL1LossBackward0 (mean, beta 0.1)",
    ),
    "a sum by hand": (
        lambda x, y, rank, step: getattr((x - F.one_hot(y, CLASSES)).square(), "sum" if rank == 1 else "mean")(),
        "SumBackward0 > PowBackward0",
    ),
}


def _ppo(x: Tensor, y: Tensor, rank: int, step: int) -> Tensor:
    log = x.log_softmax(1).gather(1, y[:, None])[:, 0]
    ratio, gain = (log - log.detach() + 0.01).exp(), torch.randn(len(y))
    policy = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
    entropy = -(x.softmax(1) * x.log_softmax(1)).sum(1).mean()
    return policy + 0.5 * (x[:, 0] - gain).square().mean() - 0.01 * entropy


def _distilled(x: Tensor, y: Tensor, rank: int, step: int) -> Tensor:
    teacher = torch.randn(len(y), CLASSES).softmax(1)
    return 0.5 * _mean(x, y) + 0.5 * 4.0 * F.kl_div((x / 2.0).log_softmax(1), teacher, reduction="batchmean")


def _contrastive(x: Tensor, y: Tensor, rank: int, step: int) -> Tensor:
    similar = x @ F.one_hot(y, CLASSES).float().t() / 0.1
    own = torch.arange(len(y))
    return (_mean(similar, own) + _mean(similar.t(), own)) / 2


def _by_tokens(x: Tensor, y: Tensor, rank: int, step: int) -> Tensor:
    """Each row counts alike, whoever holds it: the mean's share of all rows."""
    rows = torch.tensor(float(len(y)))
    dist.all_reduce(rows)
    return _mean(x, y) * (len(y) * dist.get_world_size() / float(rows))


def _items(x: Tensor, y: Tensor, rank: int, step: int) -> Tensor:
    rows = torch.tensor(len(y))
    dist.all_reduce(rows)
    return F.cross_entropy(x, y, reduction="sum") / rows * dist.get_world_size()


def _masked(x: Tensor, y: Tensor, rank: int, step: int) -> Tensor:
    """A count of the script's own, that nobody else knows."""
    mask = (torch.rand(len(y)) < 0.7).float()
    mask[0] = 1.0
    return ((x - 1.0).square().mean(1) * mask).sum() / int(mask.sum())


def _hard(x: Tensor, y: Tensor, rank: int, step: int) -> Tensor:
    return _mean(x, y) * float(torch.sigmoid(x.detach().mean()))


def _mixed(x: Tensor, y: Tensor, rank: int, step: int) -> Tensor:
    weight = torch.sigmoid(x.detach().mean())
    return weight * _mean(x, y) + (1 - weight) * x.square().mean()


def _chunks(x: Tensor, y: Tensor, rank: int, step: int) -> Tensor:
    parts = 1 + (rank + step) % 3
    losses = [_mean(a, b) for a, b in zip(x.chunk(parts), y.chunk(parts), strict=True)]
    return sum(losses) / len(losses)  # type: ignore[return-value]


def _no_labels(x: Tensor, y: Tensor, rank: int, step: int) -> Tensor:
    return x.sum() * 0.0 if rank == 1 and step % 4 == 2 else _mean(x, y)


def _sometimes_more(x: Tensor, y: Tensor, rank: int, step: int) -> Tensor:
    """A second term where some row asks for it."""
    return _mean(x, y) + (0.1 * x.square().mean() if int(y[0]) > 3 else 0.0)


HEALTHY: dict[str, Loss] = {
    "sums": lambda x, y, rank, step: F.cross_entropy(x, y, reduction="sum"),
    "means by hand": lambda x, y, rank, step: F.cross_entropy(x, y, reduction="sum") / len(y),
    "several": lambda x, y, rank, step: 0.7 * _mean(x, y) + 0.3 * x.square().mean() + 1e-3 * x.abs().sum(),
    "smoothed": lambda x, y, rank, step: F.cross_entropy(x, y, label_smoothing=0.1),
    "classes": lambda x, y, rank, step: F.cross_entropy(x, y, weight=CLASS_WEIGHTS),
    "soft labels": lambda x, y, rank, step: F.cross_entropy(x, F.one_hot(y, CLASSES).float()),
    "distilled": _distilled,
    "contrastive": _contrastive,
    "ppo": _ppo,
    "by tokens": _by_tokens,
    "items": _items,
    "masked": _masked,
    "hard": _hard,
    "mixed": _mixed,
    "balanced": lambda x, y, rank, step: F.cross_entropy(x, y, weight=torch.rand(CLASSES) + 0.1),
    "dynamic": lambda x, y, rank, step: (1.1**step) * _mean(x, y) + (0.9**step) * x.square().mean(),
    "staged": lambda x, y, rank, step: _mean(x, y) if step < 5 else x.square().mean() * 0.5,
    "chunks": _chunks,
    "no labels": _no_labels,
    "sometimes more": _sometimes_more,
}


def _train(name: str, loss: Loss, directory: str, uneven: bool, observed: bool, **named: Any) -> tuple[Any, Any, str]:
    """Events and records on rank 0, and the weights."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, CLASSES))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    accumulation, scaled, steps = (named.get(key, default) for key, default in _HOW.items())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, enabled=scaled)
    generator = torch.Generator().manual_seed(rank)
    torch.manual_seed(100 + rank)
    folder = Path(directory, name.replace(" ", "_"))
    block = {"output_dir": str(folder), "tensorboard": False, "preflight": False, "coverage": False}
    block |= {"integrity": {"replica_interval": 0}, "direction": {"sketch_size": 256}}
    watched = ds_silent.observe(ddp, optimizer, config=block, accumulation=accumulation)
    with watched if observed else nullcontext():
        for step in range(1, steps + 1):
            for micro in range(accumulation):
                rows = ROWS - (2 * rank + step) % 3 if uneven else ROWS
                x, y = (
                    torch.randn(rows, 5, generator=generator),
                    torch.randint(0, CLASSES, (rows,), generator=generator),
                )
                with ddp.no_sync() if micro + 1 < accumulation else nullcontext():
                    scaler.scale(loss(ddp(x), y, rank, step) / accumulation).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    weights = hash_of(model.parameters())
    if rank or not observed:
        return [], [], weights
    return list(read_events(folder / "events.jsonl")), list(read_metrics(folder / "metrics.jsonl")), weights


_HOW = {"accumulation": 1, "scaled": False, "steps": STEPS}


def _train_faults(directory: str) -> list[Any]:
    return [_train(name, loss, directory, uneven=False, observed=True, steps=3) for name, (loss, _) in FAULTS.items()]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.long
def test_a_rank_with_another_objective_is_told_at_its_first_step(ranks: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        done = run_on_kept_ranks(_train_faults, ranks, (directory,), timeout=300)[0]
    for (name, (_, node)), (events, _, _) in zip(FAULTS.items(), done, strict=True):
        found = [event for event in alarms(events) if event["kind"] not in ("batch-size-mismatch",)]
        assert [(e["kind"], e["severity"], e["step"]) for e in found] == [("objective-mismatch", "error", 1)], name
        assert found[0]["ranks"] == ([0, 1] if ranks == 2 else [1]), name
        assert node in found[0]["message"], (name, found[0]["message"])


def _train_healthy(directory: str) -> list[Any]:
    return [_train(name, loss, directory, uneven=True, observed=True) for name, loss in HEALTHY.items()]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.long
def test_objectives_that_differ_by_design_are_silent(ranks: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        done = run_on_kept_ranks(_train_healthy, ranks, (directory,), timeout=300)[0]
    for name, (events, records, _) in zip(HEALTHY, done, strict=True):
        assert [e for e in events if e["kind"] == "objective-mismatch"] == [], name
        assert len(records) == STEPS, name


def _begins_later(x: Tensor, y: Tensor, rank: int, step: int) -> Tensor:
    return _mean(x, y) * 0.25 if rank == 1 and step >= 5 else _mean(x, y)


def _smaller_part(x: Tensor, y: Tensor, rank: int, step: int) -> Tensor:
    return _mean(x, y) + (0.3 if rank == 1 else 0.1) * x.square().mean()


def _train_more(directory: str) -> list[Any]:
    return [
        _train("later", _begins_later, directory, False, True),
        _train("scaled", _begins_later, directory, False, True, accumulation=2, scaled=True),
        _train("part", _smaller_part, directory, False, True),
        *(_train("weights", _by_tokens, directory, True, seen, accumulation=2) for seen in (False, True)),
    ]


def test_what_begins_later_what_stays_and_the_records() -> None:
    with tempfile.TemporaryDirectory() as directory:
        ranks = run_on_kept_ranks(_train_more, 3, (directory,), timeout=300)
    later, scaled, part, plain, watched = ranks[0]
    for events, records, _ in (later, scaled):
        assert [(e["kind"], e["ranks"], e["step"]) for e in alarms(events)] == [("objective-mismatch", [1], 5)]
        sums = [record["objective"]["weight_sum"] for record in records]
        assert sums == pytest.approx([1.0] * 4 + [(2 + 0.25) / 3] * (STEPS - 4), rel=1e-5)
    # another weight of one term of several may come of the data: it is told when it has stayed
    assert [(e["kind"], e["ranks"], e["step"]) for e in alarms(part[0])] == [("objective-mismatch", [1], 8)]
    assert plain[2] == watched[2]
    assert len({rank[4][2] for rank in ranks}) == 1
    for record in watched[1]:
        own = record["objective"]
        assert own["known"] is True
        assert own["weight_sum"] == pytest.approx(1.0, rel=1e-5)
        assert own["weight_min"] == pytest.approx(1 / own["labels"], rel=0.3)
        assert own["weight_min"] <= own["weight_max"]
        assert math.isclose(own["weight_max"], own["weight_min"], rel_tol=1e-5)  # each row counts alike


class _LikeTransformers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        logits = self.net(x)
        return {"loss": _mean(logits, y), "logits": logits, "cache": None, "kept": logits.detach()}


def _terms_of_a_searched_model(directory: str) -> list[str]:
    """Of a loss that a wrapper hands through with logits, and with what is no tensor."""
    model = DistributedDataParallel(_LikeTransformers(), find_unused_parameters=True)
    loss = model(torch.randn(ROWS, 5), torch.zeros(ROWS, dtype=torch.int64))["loss"]
    loss *= 2
    terms = terms_of(loss)
    loss.backward()
    return [term.shown[-1] for term in terms or ()]


def test_a_search_for_unused_parameters_keeps_the_loss_apart_from_the_logits(tmp_path: Path) -> None:
    assert run_on_kept_ranks(_terms_of_a_searched_model, 1, (str(tmp_path),)) == [["NllLossBackward0 (mean)"]]
