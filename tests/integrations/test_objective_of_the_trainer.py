"""transformers' Trainer promises that each label of a step counts alike: a loss that does not is told at step 1."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integrations import hf_training
from tests.integrations.hf_training import HFCase, HFTrace, train
from tests.integrations.test_huggingface import ran

pytest.importorskip("transformers", minversion="5.0")
RANKS, ACCUMULATION = 2, 2
CASE = HFCase(accumulation=ACCUMULATION, steps=4, loss="given")


def summed(outputs: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The sum over a micro-batch's labels, and their number."""
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    total = torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
    return total, (targets != -100).sum()


def by_own_labels(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    total, own = summed(outputs, labels)
    return total / own


def a_mean_of_means(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    total, own = summed(outputs, labels)
    return total / own / ACCUMULATION / RANKS


def by_the_ranks_once_more(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return summed(outputs, labels)[0] / num_items_in_batch / RANKS


def by_a_hyper_parameter(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return 0.7 * summed(outputs, labels)[0] / num_items_in_batch


LOSSES: dict[str, tuple[Callable[..., Tensor], float | None, str]] = {
    "by its own labels": (by_own_labels, float(ACCUMULATION * RANKS), "2 micro-batches are added up and not divided"),
    "a mean of means": (a_mean_of_means, None, "do not count alike"),
    "by the ranks": (by_the_ranks_once_more, 1 / RANKS, "divided by the 2"),
    "healthy": (hf_training.squared, None, ""),
    "healthy, by a factor": (by_a_hyper_parameter, None, ""),
}


def plain_mean(directory: Path, observed: bool) -> HFTrace:
    """A ``compute_loss`` of one's own that returns a mean, of a model that takes ``num_items_in_batch``."""
    from transformers import Trainer

    original = Trainer.compute_loss

    def compute_loss(
        self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss

    Trainer.compute_loss = compute_loss
    try:
        return train(HFCase(accumulation=ACCUMULATION, steps=4), directory, observed)
    finally:
        Trainer.compute_loss = original


def train_all(directory: str, observed: bool) -> list[HFTrace]:
    traces = [plain_mean(Path(directory, "plain"), observed)]
    for place, (loss, _, _) in enumerate(LOSSES.values()):
        hf_training.squared = loss
        traces.append(train(CASE, Path(directory, str(place)), observed))
    return traces


def test_a_loss_that_breaks_the_trainers_promise_is_told_at_its_first_step(tmp_path: Path) -> None:
    plain, *traces = ran(train_all, str(tmp_path))[0]
    [event] = plain.events
    assert (event["step"], event["kind"], event["severity"]) == (1, "objective-mismatch", "warning")
    assert event["effect"] == pytest.approx(ACCUMULATION, rel=1e-4)
    assert "transformers' Trainer promises the mean" in event["message"]
    for (name, (_, effect, says)), trace in zip(LOSSES.items(), traces, strict=True):
        assert len(trace.records) == 4, name
        if not says:
            assert trace.events == (), name
            continue
        [event] = trace.events
        assert (event["step"], event["kind"], event["severity"]) == (1, "objective-mismatch", "warning"), name
        assert says in event["message"], (name, event["message"])
        spread = trace.records[0]["objective"]["weight_max"] / trace.records[0]["objective"]["weight_min"]
        assert event["effect"] == pytest.approx(spread if effect is None else effect, rel=1e-4), name
