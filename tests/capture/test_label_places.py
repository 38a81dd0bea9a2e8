"""Where labels come from: the next input, that of their own place, or another; what differs between ranks is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ds_silent
from ds_silent.capture.label_places import EVERY, FIRST, LASTING, OFFSETS, WORDS, LabelPlaces, counts_of
from ds_silent.capture.objective import LocalObjective
from ds_silent.drill.verdicts import alarms
from ds_silent.sinks.jsonl import read_events
from tests.rules.small_models import model_of
from tests.support.distributed import run_distributed

ROWS, LENGTH, VOCABULARY, IGNORED, PADDING = 8, 24, 32, -100, 3
Batch = tuple[Tensor, Tensor]


class Model(nn.Module):
    """A language model of a script's own."""

    def __init__(self, takes_labels: bool = False):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.takes_labels = takes_labels

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        logits: Tensor = self.head(self.embedding(tokens))
        return logits if targets is None else _loss(logits, targets)


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.reshape(-1), ignore_index=IGNORED)


def _words(seed: int, length: int = LENGTH + 2) -> Tensor:
    return torch.randint(4, VOCABULARY, (ROWS, length), generator=torch.Generator().manual_seed(seed))


def _shifted(by: int) -> Callable[[int], Batch]:
    def batch(seed: int) -> Batch:
        words = _words(seed)
        return words[:, 1:-1], words.roll(-by, 1)[:, 1:-1]

    return batch


def _padded(seed: int) -> Batch:
    """Three of four places are padding that counts."""
    tokens, labels = _shifted(1)(seed)
    tokens[:, LENGTH // 2 :], labels[:, LENGTH // 2 - 1 :] = PADDING, PADDING
    return tokens, labels


def _masked(seed: int) -> Batch:
    """As BERT: a tenth of the labels that count are the input of their place."""
    words = _words(seed, LENGTH)
    chance = torch.rand(words.shape, generator=torch.Generator().manual_seed(seed))
    tokens = words.masked_fill((chance > 0.02) & (chance < 0.2), 2)
    return tokens, words.masked_fill(chance >= 0.2, IGNORED)


def _noisy(seed: int) -> Batch:
    """One input of ten is dropped."""
    tokens, labels = _shifted(1)(seed)
    return tokens.masked_fill(torch.rand(tokens.shape, generator=torch.Generator().manual_seed(seed)) < 0.1, 2), labels


def _naive(tokens: Tensor, labels: Tensor) -> list[int]:
    """Count by loops."""
    found = [0] * 5
    width = labels.numel() // ROWS
    rows = labels.reshape(ROWS, width).tolist()
    for row, own in zip(tokens.tolist(), rows, strict=True):
        for place in range(1, len(row) - 2):
            near = [row[place + offset] for offset in OFFSETS]
            if own[place] != IGNORED and len(set(near)) == len(near):
                found[0] += 1
                for index, one in enumerate(near):
                    found[1 + index] += own[place] == one
    return found


@pytest.mark.parametrize("make", [_shifted(1), _shifted(0), _shifted(2), _shifted(-1), _padded, _masked, _noisy])
def test_counts_are_those_of_a_loop(make: Callable[[int], Batch]) -> None:
    tokens, labels = make(5)
    counts = counts_of(tokens, labels, IGNORED)
    assert counts is not None
    assert counts.tolist() == _naive(tokens, labels)
    for left_out in (1, 2):  # the last places, by the script
        short = counts_of(tokens, labels[:, :-left_out], IGNORED)
        assert short is not None
        assert short.tolist() == counts.tolist()
    assert counts_of(tokens, labels[:, 3:], IGNORED) is None


def test_an_empty_batch_and_two_forwards_say_nothing() -> None:
    assert counts_of(torch.zeros(0, LENGTH, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), IGNORED) is None
    model, objective = Model(), LocalObjective(Model())
    for step in range(2 * FIRST):
        tokens, labels = _shifted(0)(step)
        objective.start()
        for _ in range(3):
            objective.places.forward((tokens,), {})
        objective.begins(_loss(model(tokens), labels), own=True)
        objective.measured(step)
    assert objective.places.code == 0.0


def test_what_raises_ends_this_rule_alone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def breaks(*_: Any) -> Any:
        raise RuntimeError("injected")

    monkeypatch.setattr("ds_silent.capture.label_places.counts_of", breaks)
    assert _of_steps([_shifted(0)(seed) for seed in range(2 * FIRST)]).code == 0.0
    assert [record.getMessage() for record in caplog.records] == [
        "ds_silent: where labels come from is not checked any more: injected"
    ]


def _of_steps(batches: list[Batch], model: Any = None, how: str = "plain") -> LabelPlaces:
    """Follow a training of one backward a step."""
    model = Model() if model is None else model
    objective = LocalObjective(model)
    for step, (tokens, labels) in enumerate(batches, 1):
        objective.start()
        if how == "in the model":
            objective.places.forward((tokens, labels), {})
            loss = model(tokens, labels)
        elif how == "by name":
            objective.places.forward((), {"labels": labels, "attention_mask": torch.ones_like(tokens), "ids": tokens})
            loss = _loss(model(tokens), labels)
        elif how == "in the loss":
            objective.places.forward((tokens,), {})
            loss = _loss(model(tokens)[:, :-1], labels[:, :-1])
        elif how == "transformers":
            objective.places.forward((), {"input_ids": tokens, "labels": labels})
            loss = model(input_ids=tokens, labels=labels).loss
        else:
            objective.places.forward((tokens,), {})
            loss = _loss(model(tokens), labels)
            if how == "two heads":
                loss = loss + _loss(model(tokens), labels.roll(1, 1))
        objective.begins(loss, own=True)
        loss.backward()
        objective.measured(step)
    return objective.places


@pytest.mark.parametrize("how", ["plain", "in the model", "by name", "in the loss"])
@pytest.mark.parametrize("offset", OFFSETS)
def test_labels_come_from_one_place(how: str, offset: int) -> None:
    places = _of_steps([_shifted(offset)(seed) for seed in range(FIRST)], how=how)
    assert places.text == WORDS[OFFSETS.index(offset)]
    assert _of_steps([_shifted(offset)(seed) for seed in range(FIRST - 1)], how=how).code == 0.0  # too few


@pytest.mark.parametrize("make", [_padded, _noisy])
def test_padding_and_noise_hide_nothing(make: Callable[[int], Batch]) -> None:
    assert _of_steps([make(seed) for seed in range(2 * FIRST)]).text == "the next input"


def test_what_agrees_with_no_input_is_not_judged() -> None:
    assert _of_steps([_masked(seed) for seed in range(8 * FIRST)]).code == 0.0
    classes = [(tokens, torch.randint(VOCABULARY, tokens.shape)) for tokens, _ in map(_shifted(1), range(FIRST))]
    assert _of_steps(classes).code == 0.0


def test_a_lasting_change_counts_and_a_mixture_does_not() -> None:
    right, wrong = _shifted(1), _shifted(0)
    before = [right(seed) for seed in range(2 * EVERY)]
    after = [wrong(seed) for seed in range(100, 100 + EVERY + LASTING)]
    assert _of_steps([*before, *after]).text == WORDS[OFFSETS.index(0)]
    assert _of_steps(before).text == "the next input"
    assert _of_steps([*before, *after[: LASTING - 1]]).code == 0.0  # ranks that change together are not compared
    mixed = [(wrong if seed % 3 == 2 else right)(seed) for seed in range(60)]
    assert _of_steps(mixed).code == 0.0
    back = [*before, *after[:LASTING], right(7), *after]
    assert _of_steps(back).code == 0.0


BREACHES = {  # labels, how: severity of what is said where all ranks do so
    (1, "plain"): None,
    (0, "plain"): "info",
    (-1, "plain"): "info",
    (2, "plain"): "info",
    (2, "two heads"): None,
    (1, "transformers"): "error",  # 0 is right: the model shifts
    (0, "transformers"): None,
}


@pytest.mark.parametrize(("offset", "how"), [key for key in BREACHES if key[1] != "transformers"])
def test_what_all_ranks_do_alike(offset: int, how: str) -> None:
    found = _of_steps([_shifted(offset)(seed) for seed in range(FIRST)], how=how).breaches()
    assert [one.severity for one in found] == [one for one in [BREACHES[offset, how]] if one]


def test_a_model_that_shifts_by_contract() -> None:
    """Labels that are the inputs are right; those one place back make it repeat what it reads."""
    model = model_of("llama", vocab_size=VOCABULARY)
    own = [(tokens, tokens.clone()) for tokens, _ in map(_shifted(0), range(FIRST))]
    assert _of_steps(own, model, "transformers").text == "the next input"
    places = _of_steps([(tokens, tokens.roll(1, 1)) for tokens, _ in own], model, "transformers")
    assert [(one.key, one.severity) for one in places.breaches()] == [("labels:0", "error")]


def test_a_rank_with_few_labels_is_not_compared_for_long() -> None:
    right = [_shifted(1)(seed) for seed in range(2 * EVERY)]
    few = [(tokens, labels.masked_fill(torch.arange(LENGTH) > 3, IGNORED)) for tokens, labels in right]
    assert _of_steps([*right, *few[:2]]).text == "the next input"
    assert _of_steps([*right, *few]).code == 0.0


def test_another_models_backward_says_nothing() -> None:
    model = Model()
    objective = LocalObjective(model)
    for step in range(1, 2 * FIRST):
        tokens, labels = _shifted(0)(step)
        objective.start()
        objective.places.forward((tokens,), {})
        objective.begins(_loss(model(tokens), labels))  # no gradient of the observed model comes
        objective.measured(step)
    assert objective.places.code == 0.0


# -- in trainings ------------------------------------------------------------------------------------------------------

STRIKE = 10
CASES = {  # offsets of the ranks' labels, and from which step on rank 1 has them
    "right": ((1, 1, 1), 1),
    "one rank from the beginning": ((1, 0, 1), 1),
    "one rank later": ((1, 0, 1), STRIKE),
    "all ranks repeat": ((0, 0, 0), 1),
    "all ranks shift twice": ((2, 2, 2), 1),
}
STEPS = STRIKE + EVERY + LASTING + 4


def _train(name: str, folder: str) -> list[dict[str, Any]]:
    offsets, since = CASES[name]
    torch.manual_seed(3)
    trained = DistributedDataParallel(Model())
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3)
    rank, output = dist.get_rank(), Path(folder, name)
    block = {"output_dir": str(output), "tensorboard": False, "direction": {"sketch_size": 1024}}
    with ds_silent.observe(trained, optimizer, config=block):
        for step in range(1, STEPS + 1):
            offset = offsets[rank] if step >= since else 1
            tokens, labels = _shifted(offset)(1000 * rank + step)
            _loss(trained(tokens), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
    path = output / "events.jsonl"
    return list(read_events(path)) if rank == 0 and path.exists() else []


def _train_all(folder: str) -> dict[str, list[dict[str, Any]]]:
    return {name: _train(name, folder) for name in CASES}


@pytest.mark.long
def test_in_trainings(tmp_path: Path) -> None:
    found = run_distributed(_train_all, 3, (str(tmp_path),), timeout=300)[0]
    assert alarms(found["right"]) == []
    for name, latest in (("one rank from the beginning", FIRST + 3), ("one rank later", STEPS)):
        told = [one for one in alarms(found[name]) if one["kind"] == "objective-mismatch"]
        assert [(one["ranks"], one["where"], one["severity"]) for one in told] == [([1], "labels", "error")]
        words = "What each label is differs between ranks: the next input on ranks 0, 2; the input of their own place"
        assert f"{words} on rank 1" in told[0]["message"], told
        assert told[0]["step"] <= latest
    assert alarms(found["all ranks repeat"]) == []
    notes = [one for one in found["all ranks repeat"] if one["kind"] == "batch-suspect"]
    assert [(one["severity"], one["ranks"]) for one in notes] == [("info", [])]
    assert alarms(found["all ranks shift twice"]) == []
    twice = [
        (one["severity"], one["ranks"]) for one in found["all ranks shift twice"] if one["kind"] == "batch-suspect"
    ]
    assert twice == [("info", [])]
