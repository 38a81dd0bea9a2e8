"""Schedules that a Trainer and accelerate step: a healthy one is silent, and one that steps too often is over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ds_silent
from ds_silent.rules.rates import RateRule
from ds_silent.sinks.jsonl import read_events
from tests.integrations.hf_training import HFCase, Rows, as_launched, model_of, train
from tests.integrations.test_huggingface import ran

pytest.importorskip("transformers", minversion="5.0")
RANKS, ACCUMULATION, STEPS = 2, 2, 24
BY_TRAINER = {
    "linear": ({"lr_scheduler_type": "linear"}, False),
    "cosine with a warm-up": ({"lr_scheduler_type": "cosine", "warmup_steps": 6}, False),
    "constant behind a warm-up": ({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 6}, False),
    "once per micro-batch, too": ({"lr_scheduler_type": "linear"}, True),
}
BY_ACCELERATE = {  # on the prepared optimizer, the schedule's steps, split_batches
    "of the script's optimizer": (False, RANKS * STEPS, False),
    "of the prepared optimizer": (True, RANKS * STEPS, False),
    "of batches that are split": (True, STEPS, True),
    "as many steps as a rank takes": (True, STEPS // RANKS, False),
}


def told(directory: Path) -> list[tuple[int, str, str]]:
    found = read_events(directory / "silent" / "events.jsonl")
    return [(one["step"], one["severity"], one["where"]) for one in found if one["kind"] == "update-mismatch"]


def by_trainer(directory: Path, named: dict[str, Any], per_micro_batch: bool, observed: bool) -> None:
    from transformers import Trainer

    original = Trainer.training_step

    def training_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        loss = original(self, *args, **kwargs)
        self.lr_scheduler.step()
        return loss

    Trainer.training_step = training_step if per_micro_batch else original
    try:
        train(HFCase(accumulation=ACCUMULATION, steps=STEPS, named=named), directory, observed)
    finally:
        Trainer.training_step = original


def by_accelerate(directory: Path, on_prepared: bool, length: int, split: bool) -> None:
    from accelerate import Accelerator, DataLoaderConfiguration
    from torch.utils.data import DataLoader
    from transformers import get_linear_schedule_with_warmup

    as_launched(deepspeed=False)
    configuration = DataLoaderConfiguration(split_batches=split)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATION, dataloader_config=configuration)
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if not on_prepared:
        scheduler = get_linear_schedule_with_warmup(optimizer, 4, length)
    loader = DataLoader(Rows(64), batch_size=4 * RANKS if split else 4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if on_prepared:
        scheduler = get_linear_schedule_with_warmup(optimizer, 4, length)
    scheduler = accelerator.prepare(scheduler)
    block = {"output_dir": str(directory / "silent"), "tensorboard": False}
    with ds_silent.observe(model, config=block, optimizer=optimizer, loader=loader, accumulation=ACCUMULATION):
        for _ in range(STEPS * ACCUMULATION // len(loader)):
            for batch in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(**batch).loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()


def train_all(directory: str, observed: bool) -> list[int]:
    """Return how many schedulers each training has found."""
    counts: list[int] = []
    schedulers = RateRule._schedulers

    def count(rule: RateRule) -> Any:
        found = schedulers(rule)
        counts.append(len(found))
        return found

    RateRule._schedulers = count  # type: ignore[method-assign]
    try:
        for place, (named, micro) in enumerate(BY_TRAINER.values()):
            by_trainer(Path(directory, f"trainer-{place}"), named, micro, observed)
        for place, given in enumerate(BY_ACCELERATE.values()):
            by_accelerate(Path(directory, f"accelerate-{place}"), *given)
    finally:
        RateRule._schedulers = schedulers  # type: ignore[method-assign]
    return counts


def test_a_schedule_that_steps_too_often_is_told_and_a_healthy_one_is_not(tmp_path: Path) -> None:
    for counts in ran(train_all, str(tmp_path)):
        assert counts == [1] * len({**BY_TRAINER, **BY_ACCELERATE})
    found = {name: told(tmp_path / f"trainer-{place}") for place, name in enumerate(BY_TRAINER)}
    found |= {name: told(tmp_path / f"accelerate-{place}") for place, name in enumerate(BY_ACCELERATE)}
    over = {
        "once per micro-batch, too": 9 + 8,  # 8 steps of 3 each, and one within the ninth
        "as many steps as a rank takes": 8 + 8,  # 7 steps of 2 each
    }
    assert found == {name: [(over[name], "warning", "learning rate")] if name in over else [] for name in found}
