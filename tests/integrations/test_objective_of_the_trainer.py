"""transformers' Trainer promises that each label of a step counts alike: a loss that does not is told at step 1."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_silent.detectors.label_weights import STEPS
from ds_silent.sinks.jsonl import read_events
from tests.integrations import hf_training
from tests.integrations.hf_training import HFCase, HFTrace, train
from tests.integrations.test_huggingface import ran

pytest.importorskip("transformers", minversion="5.0")
RANKS, ACCUMULATION, LONGER = 2, 2, 4
SCALED = "loss_is_scaled_for_ga"  # of a Trainer, in transformers 5.23: False has it divide by the micro-batches
LLAMA = hf_training.model_of
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


Trained = Callable[[Path, bool, bool | None], HFTrace]


def computed(compute_loss: Callable[..., Any], scaled: bool | None, case: HFCase, at: Path, observed: bool) -> HFTrace:
    """A Trainer with a ``compute_loss`` of one's own, and with what it says of it in ``SCALED``."""
    from transformers import Trainer

    original = Trainer.compute_loss
    Trainer.compute_loss = compute_loss
    if scaled is not None:
        setattr(Trainer, SCALED, scaled)
    try:
        return train(case, at, observed)
    finally:
        Trainer.compute_loss = original
        if scaled is not None:
            setattr(Trainer, SCALED, None)


def plain_mean(directory: Path, observed: bool, block: str = "callback", scaled: bool | None = None) -> HFTrace:
    """A ``compute_loss`` of one's own that returns a mean, of a model that takes ``num_items_in_batch``."""

    def compute_loss(
        self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss

    return computed(compute_loss, scaled, HFCase(accumulation=ACCUMULATION, steps=4, block=block), directory, observed)


def changed(change: Callable[[Any, Tensor], Tensor]) -> Trained:
    """A ``compute_loss`` that changes what the Trainer's own returns."""

    def trained(at: Path, observed: bool, scaled: bool | None) -> HFTrace:
        from transformers import Trainer

        original = Trainer.compute_loss

        def compute_loss(self: Any, model: Any, inputs: Any, return_outputs: bool = False, **named: Any) -> Any:
            loss, outputs = original(self, model, inputs, return_outputs=True, **named)
            loss = change(self, loss)
            return (loss, outputs) if return_outputs else loss

        return computed(compute_loss, scaled, HFCase(accumulation=LONGER, steps=3), at, observed)

    return trained


def by_own_items(at: Path, observed: bool, scaled: bool | None) -> HFTrace:
    """A ``compute_loss`` of one's own that divides a sum by ``num_items_in_batch``, which the model is not given."""

    def compute_loss(
        self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = summed(outputs, labels)[0] / num_items_in_batch * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss

    return computed(compute_loss, scaled, HFCase(accumulation=LONGER, steps=3), at, observed)


DIVIDED: dict[str, tuple[Trained, bool | None, bool]] = {  # what is said of SCALED; whether it is one division too many
    "by the script": (changed(lambda trainer, loss: loss / trainer.args.gradient_accumulation_steps), None, True),
    "by the Trainer": (changed(lambda trainer, loss: loss), False, True),
    "by the Trainer, a sum of the script's own": (by_own_items, False, True),
    "once": (changed(lambda trainer, loss: loss), True, False),
    "once, a sum of the script's own": (by_own_items, None, False),
    "once, a mean": (lambda at, observed, scaled: plain_mean(at, observed, scaled=scaled), False, False),
    "by a hyper-parameter": (changed(lambda trainer, loss: loss / 3.0), None, False),
}


def divided() -> dict[str, tuple[Trained, bool | None, bool]]:
    """Return those that the installed transformers has a name for."""
    from transformers import Trainer

    return {name: one for name, one in DIVIDED.items() if one[1] is None or hasattr(Trainer, SCALED)}


def train_divided(directory: str, observed: bool) -> list[HFTrace]:
    made = enumerate(divided().values())
    return [one(Path(directory, str(place)), observed, scaled) for place, (one, scaled, _) in made]


def test_a_loss_by_items_that_is_divided_by_the_micro_batches_too_is_told_at_its_first_step(tmp_path: Path) -> None:
    says = "by the number of labels of the whole step, and by 4 micro-batches once more"
    for (name, (_, _, again)), trace in zip(divided().items(), ran(train_divided, str(tmp_path))[0], strict=True):
        told = [(one["step"], one["severity"], one["effect"]) for one in trace.events]
        assert told == ([(1, "warning", pytest.approx(1 / LONGER))] if again else []), name
        assert all(says in event["message"] for event in trace.events), name


SMOOTHING = {"label_smoothing_factor": 0.1}
SHORT = HFCase(accumulation=3, epochs=1)  # of 8 micro-batches: the last of 3 windows has 2


def smoothed_without_items(directory: Path, observed: bool) -> HFTrace:
    """The smoother of transformers before 5.13, issue 46731."""
    from transformers.trainer_pt_utils import LabelSmoother

    original = LabelSmoother.__call__

    def without(self: Any, outputs: Any, labels: Tensor, shift_labels: bool = False, **_: Any) -> Any:
        return original(self, outputs, labels, shift_labels)

    LabelSmoother.__call__ = without
    try:
        return train(HFCase(accumulation=ACCUMULATION, steps=4, named=SMOOTHING), directory, observed)
    finally:
        LabelSmoother.__call__ = original


def with_model(make: Callable[[], Any], case: HFCase, directory: Path, observed: bool) -> HFTrace:
    original = hf_training.model_of
    hf_training.model_of = lambda dropout=0.0: make()
    try:
        return train(case, directory, observed)
    finally:
        hf_training.model_of = original


def mixture() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(7)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}
    config = MixtralConfig(vocab_size=40, **sizes, **experts, output_router_logits=True, router_aux_loss_coef=0.5)
    config._experts_implementation = "eager"
    return MixtralForCausalLM(config)


def without_items() -> Any:
    """A model whose loss is a mean, which the Trainer divides by as many micro-batches as come."""
    model = LLAMA()
    model.accepts_loss_kwargs = False
    return model


def divided_by_the_configured(directory: Path, observed: bool) -> HFTrace:
    """The Trainer of transformers 4.45, on a short window."""
    from transformers import Trainer

    Trainer.current_gradient_accumulation_steps = property(lambda _: 3, lambda _, value: None)
    try:
        return with_model(without_items, SHORT, directory, observed)
    finally:
        del Trainer.current_gradient_accumulation_steps


def train_more(directory: str, observed: bool) -> dict[str, HFTrace]:
    smoothed = HFCase(accumulation=ACCUMULATION, steps=4, named=SMOOTHING)
    made = {
        "smoothed": lambda at: train(smoothed, at, observed),
        "smoothed, without items": lambda at: smoothed_without_items(at, observed),
        "mixture": lambda at: with_model(mixture, HFCase(accumulation=ACCUMULATION, steps=4), at, observed),
        "short": lambda at: train(SHORT, at, observed),
        "short, without items": lambda at: with_model(without_items, SHORT, at, observed),
        "short, divided by the configured": lambda at: divided_by_the_configured(at, observed),
    }
    return {name: one(Path(directory, str(place))) for place, (name, one) in enumerate(made.items())}


def test_smoothed_labels_routers_and_short_windows(tmp_path: Path) -> None:
    found = ran(train_more, str(tmp_path))[0]
    told = {
        name: [(e["step"], e["severity"], pytest.approx(e["effect"], rel=1e-4)) for e in trace.events]
        for name, trace in found.items()
    }
    assert told == {
        **{name: [] for name in found},
        "smoothed, without items": [(1, "warning", float(ACCUMULATION * RANKS))],
        "short, divided by the configured": [(3, "warning", 2 / 3)],
    }
    for name in ("smoothed", "mixture", "short"):
        for record in found[name].records:
            own = record["objective"]
            assert own["known"] is True, name
            assert own["weight_sum"] == pytest.approx(1.0, rel=1e-5), name
            assert own["weight_min"] == pytest.approx(1.0 / own["labels"], rel=1e-5), name
            assert own["weight_max"] == pytest.approx(1.0 / own["labels"], rel=1e-5), name
    [note] = [e for e in read_events(tmp_path / "2" / "silent" / "events.jsonl") if e["kind"] == "objective-mismatch"]
    assert (note["step"], note["severity"], note["effect"]) == (STEPS, "info", ACCUMULATION * RANKS)
    whole = found["short, without items"].records
    assert [record["objective"]["weight_sum"] for record in whole] == pytest.approx([1.0] * 3, rel=1e-5)


def train_all(directory: str, observed: bool) -> list[HFTrace]:
    traces = [plain_mean(Path(directory, block), observed, block) for block in ("callback", "-m")]
    for place, (loss, _, _) in enumerate(LOSSES.values()):
        hf_training.squared = loss
        traces.append(train(CASE, Path(directory, str(place)), observed))
    return traces


def test_a_loss_that_breaks_the_trainers_promise_is_told_at_its_first_step(tmp_path: Path) -> None:
    by_callback, unedited, *traces = ran(train_all, str(tmp_path))[0]
    for plain in (by_callback, unedited):
        [event] = plain.events
        assert (event["step"], event["kind"], event["severity"]) == (1, "objective-mismatch", "warning")
        assert event["effect"] == pytest.approx(ACCUMULATION, rel=1e-4)
        assert "transformers' Trainer promises the mean" in event["message"]
        assert event["remedy"].startswith("If compute_loss is your own, divide the labels' summed loss by num_items")
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
