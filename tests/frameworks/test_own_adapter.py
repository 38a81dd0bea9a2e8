"""The adapter of the page on ways in, for a loop that reduces by hand: it sees what DDP's does, and changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ds_silent.drill.training import hash_of
from ds_silent.sinks.jsonl import read_events, read_metrics
from tests.support.distributed import run_distributed
from tests.support.pages import fences

PAGE = Path(__file__).resolve().parents[2] / "docs" / "ways-in.md"
STEPS, ROWS, MICRO_BATCHES, WRONG = 8, 4, 2, 5


class Trainer:
    """Averages its gradients by itself, but for one on rank 1 at step WRONG, where that is asked for."""

    def __init__(self, wrong: bool):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.accumulation, self.micro_batch, self.taken, self._wrong = MICRO_BATCHES, 0, 0, wrong

    def step(self, generator: torch.Generator) -> None:
        for self.micro_batch in range(MICRO_BATCHES):
            rows, labels = torch.randn(ROWS, 16, generator=generator), torch.randint(0, 4, (ROWS,), generator=generator)
            (nn.functional.cross_entropy(self.model(rows), labels) / MICRO_BATCHES).backward()
        self.taken += 1
        self.average_gradients()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def average_gradients(self) -> None:
        for number, parameter in enumerate(self.model.parameters()):
            own = parameter.grad
            assert own is not None
            total = own.clone()
            dist.all_reduce(total)
            if not (self._wrong and self.taken == WRONG and number == 2 and dist.get_rank() == 1):
                own.copy_(total / dist.get_world_size())


def train(directory: str) -> dict[str, Any]:
    """Unobserved, healthy and with a fault: the weights, and what rank 0 has written."""
    return {case: train_once(Path(directory, case), case) for case in ("unobserved", "healthy", "wrong")}


def train_once(folder: Path, case: str) -> Any:
    names: dict[str, Any] = {}
    exec(next(fence for fence in fences(PAGE.read_text(encoding="utf-8"), "python") if "ByHand" in fence), names)
    trainer, generator = Trainer(case == "wrong"), torch.Generator().manual_seed(dist.get_rank() + 1)
    block = {
        "output_dir": str(folder),
        "tensorboard": False,
        "direction": {"exact_interval": 1 if case == "healthy" else 0},
        "integrity": {"replica_interval": 2},
    }
    observer = None if case == "unobserved" else names["attach_by_hand"](trainer, block)
    for _ in range(STEPS):
        trainer.step(generator)
    if observer is not None:
        observer.close()
    weights = hash_of(trainer.model.parameters())
    if dist.get_rank() or observer is None:
        return weights, [], []
    return weights, list(read_metrics(folder / "metrics.jsonl")), list(read_events(folder / "events.jsonl"))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_distributed(train, 2, (str(tmp_path_factory.mktemp("by_hand")),))[0]


def test_the_weights_are_those_without_an_observer(found: Any) -> None:
    assert found["healthy"][0] == found["unobserved"][0]


def test_a_healthy_training_is_measured_and_silent(found: Any) -> None:
    _, records, events = found["healthy"]
    assert events == []
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert records[-1]["samples"] == STEPS * MICRO_BATCHES * ROWS * 2
    assert all(record["integrity"]["relative_error"] < 1e-6 for record in records)
    assert {record["direction"]["method"] for record in records} == {"exact"}


def test_the_exact_cosine_is_that_of_the_gradients_before_the_reduction(found: Any) -> None:
    (_, healthy, _), (_, sketched, _) = found["healthy"], found["wrong"]
    for exact, sketch in zip(healthy[: WRONG - 1], sketched[: WRONG - 1], strict=True):
        assert exact["direction"]["mean_cosine"] == pytest.approx(
            sketch["direction"]["mean_cosine"], abs=6.0 * sketch["direction"]["standard_error"]
        )


def test_a_gradient_that_one_rank_does_not_average_is_found(found: Any) -> None:
    first = found["wrong"][2][0]
    assert (first["kind"], first["step"], first["where"]) == ("aggregation-error", WRONG, "2"), first
