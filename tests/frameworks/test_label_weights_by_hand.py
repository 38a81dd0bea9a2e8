"""What a label weighs in a step, by hand in float64: 6 kinds of loops x 4 losses x 2 accumulations, on 2 ranks.

So is the angle from the mean of the ranks' means to the mean over all labels, from gradients of the whole model.

What a framework promises of it is told where it is broken, what a script's own loop does is a note.
"""

from __future__ import annotations

import itertools
import math
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
from ds_silent.detectors.label_weights import STEPS
from ds_silent.sinks.jsonl import read_events, read_metrics
from tests.support.distributed import run_distributed

RANKS, WIDTH, CLASSES, ROWS = 2, 8, 6, 12
LOOPS = ("ddp", "fsdp2", "stage 0", "stage 1", "stage 1, loss.backward()", "accelerate")
LOSSES = ("mean", "mean over accumulation", "sum over items", "masked")
CASES = list(itertools.product(LOOPS, LOSSES, (1, 4)))


class Model(nn.Module):
    """Gives logits, or like a model of transformers the mean loss of given labels."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, CLASSES))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        logits = self.net(x)
        return logits if labels is None else F.cross_entropy(logits, labels)


def counts_of(step: int, accumulation: int) -> list[list[int]]:
    """Label tokens, by rank and micro-batch."""
    return [[3 + (5 * rank + 2 * micro + step) % 8 for micro in range(accumulation)] for rank in range(RANKS)]


def by_hand(loop: str, loss: str, step: int, accumulation: int) -> dict[str, Any]:
    """In Python's floats: the weight of each label in the mean of the ranks' losses, from the formula of each loss."""
    counts = counts_of(step, accumulation)
    items = sum(itertools.chain(*counts))
    divided = accumulation if loop.startswith(("stage", "accelerate")) else 1
    weights = []
    for count in itertools.chain(*counts):
        each = {"sum over items": RANKS / items, "mean over accumulation": 1 / count / accumulation}
        weights += [each.get(loss, 1 / count) / divided / RANKS] * count
    sizes = {"weight_min": min(weights), "weight_max": max(weights), "labels": len(weights)}
    return {"weight_sum": math.fsum(weights), **sizes, "known": True}


def loss_of(model: Any, loss: str, x: Tensor, y: Tensor, items: int, accumulation: int) -> Tensor:
    if loss == "mean":
        return model(x, y)
    logits = model(x)
    if loss == "mean over accumulation":
        return F.cross_entropy(logits, y) / accumulation
    if loss == "sum over items":
        return F.cross_entropy(logits, y, reduction="sum") / items * RANKS
    mask = (y != -100).float()
    return (F.cross_entropy(logits, y.clamp(min=0), reduction="none") * mask).sum() / mask.sum()


def flat_gradient(loss: Tensor, model: nn.Module) -> Tensor:
    return torch.cat([gradient.flatten() for gradient in torch.autograd.grad(loss, list(model.parameters()))])


def angle_by_hand(model: Any, loss: str, batches: list[tuple[Tensor, Tensor]], items: int) -> float:
    """Degrees between the mean of the ranks' gradients and that of the mean over all labels. A collective."""
    module = getattr(model, "module", model)
    held = {name: getattr(value, "full_tensor", lambda v=value: v)() for name, value in module.state_dict().items()}
    plain = Model().double()
    plain.load_state_dict(held)
    own = sum(loss_of(plain, loss, x.double(), y, items, len(batches)) for x, y in batches)
    summed = sum(F.cross_entropy(plain(x.double()), y, reduction="sum") for x, y in batches)
    gradients = torch.stack([flat_gradient(one, plain) for one in (own, summed)])  # type: ignore[arg-type]
    dist.all_reduce(gradients)
    return math.degrees(math.acos(min(1.0, float(F.cosine_similarity(gradients[0], gradients[1], dim=0)))))


def train(case: tuple[str, str, int], directory: str) -> tuple[list[Any], list[Any], list[float]]:
    """Records and events, on rank 0, and the steps' angles by hand."""
    loop, loss, accumulation = case
    torch.manual_seed(0)
    model: Any = Model()
    block = {"output_dir": directory, "tensorboard": False, "preflight": False, "direction": {"sketch_size": 256}}
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.02)
    accelerator: Any = None
    if loop == "ddp":
        model = DistributedDataParallel(model)
    elif loop == "fsdp2":
        torch.distributed.fsdp.fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    elif loop == "accelerate":
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
        model, optimizer = accelerator.prepare(model, optimizer)
    else:
        import deepspeed

        config = {
            "train_micro_batch_size_per_gpu": ROWS,
            "gradient_accumulation_steps": accumulation,
            "zero_optimization": {"stage": int(loop[len("stage ")])},
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
        }
        model, optimizer, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    angles: list[float] = []
    given = {} if loop.startswith("stage") else {"optimizer": optimizer, "accumulation": accumulation}
    with ds_silent.observe(model, config=block, **given):
        generator = torch.Generator().manual_seed(dist.get_rank())
        for step in range(1, STEPS + 1):
            counts = counts_of(step, accumulation)
            items = sum(itertools.chain(*counts))
            batches = []
            for count in counts[dist.get_rank()]:
                x = torch.randn(ROWS, WIDTH, generator=generator)
                y = torch.randint(0, CLASSES, (ROWS,), generator=generator)
                y[count:] = -100
                batches.append((x, y))
            angles.append(angle_by_hand(model, loss, batches, items))
            for micro, (x, y) in enumerate(batches):
                last = micro + 1 == accumulation
                if loop == "fsdp2":
                    model.set_requires_gradient_sync(last)
                around = model.no_sync() if loop == "ddp" and not last else nullcontext()
                with accelerator.accumulate(model) if accelerator else around:
                    root = loss_of(model, loss, x, y, items, accumulation)
                    if accelerator:
                        accelerator.backward(root)
                    elif loop in ("stage 0", "stage 1"):
                        model.backward(root)
                    else:
                        root.backward()
                    if loop.startswith("stage"):
                        model.step()
                    elif accelerator or last:
                        optimizer.step()
                        optimizer.zero_grad()
    if dist.get_rank():
        return [], [], []
    folder = Path(directory)
    return list(read_metrics(folder / "metrics.jsonl")), list(read_events(folder / "events.jsonl")), angles


def train_all(directory: str) -> list[Any]:
    from tests.integrations.hf_training import as_launched

    as_launched(deepspeed=False)
    return [train(case, f"{directory}/{place}") for place, case in enumerate(CASES)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[list[Any], list[Any], list[float]]]:
    return run_distributed(train_all, RANKS, (str(tmp_path_factory.mktemp("weights")),), timeout=600)[0]


@pytest.mark.timeout(700)
@pytest.mark.parametrize("place", range(len(CASES)), ids=lambda place: ", ".join(map(str, CASES[place])))
@pytest.mark.long
def test_each_label_weighs_what_it_does_by_hand(trained: Any, place: int) -> None:
    loop, loss, accumulation = CASES[place]
    records, events, angles = trained[place]
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    for record, expected in zip(records, angles, strict=True):
        found = record["objective"]
        angle, error = found.pop("mean_of_means_angle"), found.pop("mean_of_means_angle_error")
        assert found == pytest.approx(by_hand(loop, loss, record["step"], accumulation), rel=1e-6)
        if accumulation > 1 and loss != "sum over items":
            assert angle is error is None, "the labels of a rank's micro-batches do not weigh alike"
            assert expected > 0.1
        elif loss == "sum over items":
            assert (angle, error) == pytest.approx((0.0, 0.0), abs=1e-4)
            assert expected < 1e-4
        else:
            assert 1.0 < expected < 30.0
            assert angle == pytest.approx(expected, abs=4.0 * error)
            assert 0.0 < error < 0.1 * angle
    found = [(e["step"], e["severity"], e["effect"]) for e in events if e["kind"] == "objective-mismatch"]
    own_loop = loop in ("ddp", "fsdp2")
    if (loss, accumulation) == ("mean over accumulation", 4) and not own_loop:
        assert found == [(1, "warning", pytest.approx(1 / 4))]
        [event] = [e for e in events if e["kind"] == "objective-mismatch"]
        by = "accelerator.backward" if loop == "accelerate" else "engine.backward"
        told = f"{by} divides by the 4 micro-batches itself"
        told = "DeepSpeed's hook on what its engine returns" if loop.endswith("()") else told
        assert told in event["message"]
    elif (loss, accumulation) == ("mean", 4) and own_loop:
        assert found == [(STEPS, "info", pytest.approx(4.0))]
    else:
        assert found == []
