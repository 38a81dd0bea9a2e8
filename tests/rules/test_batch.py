"""What a batch says of itself: each fault is told, by name, and none where it may be meant so."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_silent.drill.training import hash_of
from ds_silent.patches import Patches
from ds_silent.rules.batch import (
    EVERY,
    LOOKED_AT,
    BatchContents,
    Counts,
    OverwrittenLabels,
    SpecialTokens,
    _verdicts,
    counts_of,
)
from tests.rules.small_models import BEGIN, END, PADDING, model_of, words

ROWS, LENGTH, IGNORED = 8, 16, -100
Inputs = dict[str, Tensor]


def rows(seed: int = 0) -> Inputs:
    """Make begin, words, end; rows of several lengths, padded to the right, labels as they should be."""
    ids, mask = words(ROWS, LENGTH, seed), torch.ones(ROWS, LENGTH, dtype=torch.int64)
    ids[:, 0] = BEGIN
    for row in range(ROWS):
        length = LENGTH - row
        ids[row, length - 1] = END
        ids[row, length:], mask[row, length:] = PADDING, 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, IGNORED)}


def packed(seed: int = 0) -> Inputs:
    """Make two documents a row, of 6 and 10 tokens, whose positions start again."""
    ids = words(ROWS, LENGTH, seed)
    ids[:, 5] = ids[:, -1] = END
    positions = torch.cat((torch.arange(6), torch.arange(10))).expand(ROWS, -1)
    return {"input_ids": ids, "position_ids": positions, "labels": ids.clone()}


def changed(make: Callable[[int], Inputs], change: Callable[[Inputs], Any]) -> Callable[[int], Inputs]:
    def made(seed: int) -> Inputs:
        inputs = make(seed)
        change(inputs)
        return {name: value for name, value in inputs.items() if value is not None}

    return made


def shift(inputs: Inputs) -> None:
    labels = inputs["labels"]
    inputs["labels"] = torch.cat((labels[:, 1:], torch.full_like(labels[:, :1], IGNORED)), 1)


def pad_left(inputs: Inputs) -> None:
    for row in range(ROWS):
        for value in inputs.values():
            value[row] = value[row].roll(row)


def answers_alone(inputs: Inputs) -> None:
    inputs["labels"][:, :7] = IGNORED


def ends_as_padding(inputs: Inputs) -> None:
    """Do as DataCollatorForLanguageModeling where the padding token is the end token."""
    inputs["input_ids"][inputs["input_ids"] == PADDING] = END
    inputs["labels"] = inputs["input_ids"].masked_fill(inputs["input_ids"] == END, IGNORED)


def end_twice(inputs: Inputs) -> None:
    for row in range(ROWS):
        inputs["input_ids"][row, LENGTH - row - 2] = END
    inputs["labels"] = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, IGNORED)


FAULTS: dict[str, tuple[str, Callable[[int], Inputs]]] = {
    "labels all ignored": ("ignored", changed(rows, lambda i: i["labels"].fill_(IGNORED))),
    "labels shifted already": ("shifted", changed(rows, shift)),
    "packed labels shifted already": ("shifted", changed(packed, shift)),
    "two tokens at the beginning": ("doubled", changed(rows, lambda i: i["input_ids"][:, 1].fill_(BEGIN))),
    "two tokens at the end": ("ended twice", changed(rows, end_twice)),
    "no end is trained": ("ends", changed(rows, ends_as_padding)),
    "no end of a packed row is trained": ("ends", changed(packed, ends_as_padding)),
    "padding is trained": ("padding", changed(rows, lambda i: i.update(labels=i["input_ids"].clone()))),
    "padding to the left is trained": (
        "padding",
        changed(rows, lambda i: (pad_left(i), i.update(labels=i["input_ids"].clone()))),
    ),
    "a mask of ones on packed rows": (
        "positions",
        changed(packed, lambda i: i.update(attention_mask=torch.ones_like(i["input_ids"]))),
    ),
    "a mask of ones on padding": ("padded", changed(rows, lambda i: (pad_left(i), i["attention_mask"].fill_(1)))),
    "rows without a token": ("empty", changed(rows, lambda i: i["attention_mask"][:4].fill_(0))),
    "no mask on padding": ("padded", changed(rows, lambda i: (pad_left(i), i.pop("attention_mask")))),
}


def run(
    make: Callable[[int], Inputs],
    model: nn.Module | None = None,
    steps: int = LOOKED_AT,
    loss_of: Callable[[Any, Inputs], Tensor] = lambda output, inputs: output.loss,
    micro_batches: int = 1,
) -> tuple[list[list[str]], Any]:
    """Train, and return what was broken at each step, and the model."""
    model = model or model_of("llama")
    framework: Any = SimpleNamespace(module=model, step=1)
    rule, patches, found = BatchContents(framework), Patches(), []
    rule.connect(patches, lambda function, *arguments: function(*arguments))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        framework.step = step + 1
        for micro in range(micro_batches):
            inputs = make(100 * step + micro)
            loss_of(model(**inputs), inputs).backward()
        found.append([breach.key.removeprefix("batch:") for breach in rule.breaches()])
        optimizer.step()
        optimizer.zero_grad()
    patches.undo()
    assert not model._forward_hooks
    return found, model


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_batch_is_told_by_its_name(name: str) -> None:
    check, make = FAULTS[name]
    found, _ = run(make)
    assert found[-1] == [check]
    assert check == "ignored" or found[0] == [check], "at its first step"


def test_mask_and_ends_speak_for_themselves_where_the_script_makes_the_loss() -> None:
    def logits_alone(output: Any, inputs: Inputs) -> Tensor:
        return output.logits.square().mean()  # type: ignore[no-any-return]

    without = changed(FAULTS["rows without a token"][1], lambda i: i.pop("labels"))
    assert run(without, loss_of=logits_alone)[0] == [["empty"]] * LOOKED_AT
    ends = changed(FAULTS["two tokens at the end"][1], lambda i: i.pop("labels"))
    assert run(ends, loss_of=logits_alone)[0] == [["ended twice"]] * LOOKED_AT
    three = changed(rows, lambda i: (i.pop("labels"), i["attention_mask"][0].fill_(0)))
    assert run(three, loss_of=logits_alone)[0] == [[]] * 3 + [["empty"]]
    assert run(changed(rows, lambda i: i.pop("labels")), loss_of=logits_alone)[0] == [[]] * LOOKED_AT


def test_a_fault_is_told_of_gpt2_too() -> None:
    assert run(FAULTS["labels shifted already"][1], model_of("gpt2"))[0][0] == ["shifted"]


def dense_mask(inputs: Inputs) -> None:
    """A mask by documents: what is packed, and is seen so."""
    documents = torch.tensor([0] * 6 + [1] * 10)
    allowed = (documents[:, None] == documents) & torch.ones(LENGTH, LENGTH).tril().bool()
    inputs["attention_mask"] = allowed.expand(ROWS, 1, -1, -1)


def own_loss(output: Any, inputs: Inputs) -> Tensor:
    """Shift nothing: the labels are shifted, and the model's own loss is not trained."""
    return nn.functional.cross_entropy(output.logits.flatten(0, 1), inputs["labels"].flatten())


CONTROLS: dict[str, tuple[Callable[[int], Inputs], dict[str, Any]]] = {
    "padded to the right": (rows, {}),
    "padded to the left": (changed(rows, pad_left), {}),
    "answers alone": (changed(rows, answers_alone), {}),
    "packed": (packed, {}),
    "packed, and a mask by documents": (changed(packed, dense_mask), {}),
    "text without any special token": (lambda seed: {k: words(4, 16, seed) for k in ("input_ids", "labels")}, {}),
    "one word only": (lambda seed: {k: torch.full((4, 16), 9) for k in ("input_ids", "labels")}, {}),
    "the end is the padding, and trained once": (
        changed(rows, lambda i: i["input_ids"].masked_fill_(i["input_ids"] == PADDING, END)),
        {},
    ),
    "padding has the end's id, no end, no mask": (
        changed(
            rows,
            lambda i: (
                i["input_ids"].masked_fill_(i["input_ids"] == END, 9),
                i["labels"].masked_fill_(i["labels"] == END, 9),
                i["input_ids"].masked_fill_(i["input_ids"] == PADDING, END),
                i.pop("attention_mask"),
            ),
        ),
        {},
    ),
    "the first end behind a row is trained": (  # a padding token that is the end token, as the row's only end
        changed(
            rows,
            lambda i: (
                i["input_ids"].masked_fill_(i["input_ids"] == PADDING, END),
                i["attention_mask"].masked_fill_(i["input_ids"] == END, 0),
            ),
        ),
        {},
    ),
    "labels shifted for a loss of the script's own": (changed(rows, shift), {"loss_of": own_loss}),
    "labels ignored, and a loss of the script's own": (
        changed(rows, lambda i: i["labels"].fill_(IGNORED)),
        {"loss_of": lambda output, inputs: output.logits.square().mean()},
    ),
    "labels that are shifted, and said to be so": (
        changed(rows, lambda i: (shift(i), i.update(shift_labels=i["labels"]))),
        {},
    ),
}


@pytest.mark.parametrize("name", CONTROLS)
def test_what_may_be_meant_is_not_told(name: str) -> None:
    make, more = CONTROLS[name]
    assert run(make, steps=2 * LOOKED_AT, **more)[0] == [[]] * 2 * LOOKED_AT


@pytest.mark.parametrize("kind", ["bert", "bert-lm", "t5"])
def test_models_that_do_not_shift_their_labels_are_not_looked_at(kind: str) -> None:
    def make(seed: int) -> Inputs:
        inputs = rows(seed)
        inputs["labels"] = inputs["input_ids"].roll(-1, 1)
        return inputs

    assert run(make, model_of(kind))[0] == [[]] * LOOKED_AT


def test_two_begin_tokens_that_are_also_ends_or_padding_say_nothing() -> None:
    twice = changed(packed, lambda i: (i.pop("position_ids"), i["input_ids"][:, :2].fill_(END)))
    assert run(twice, model_of("llama", bos_token_id=END))[0][-1] == []
    assert run(twice, model_of("llama", bos_token_id=END, eos_token_id=5))[0][-1] == ["doubled"]


def test_flash_attention_sees_packed_rows_behind_a_mask_of_ones() -> None:
    model = model_of("llama")
    make = FAULTS["a mask of ones on packed rows"][1]
    model.config._attn_implementation_internal = "flash_attention_2"  # as the rule reads it, when it is connected
    framework: Any = SimpleNamespace(module=model, step=1)
    rule = BatchContents(framework)
    rule.connect(Patches(), lambda function, *arguments: function(*arguments))
    assert not rule._hides_restarts
    assert counts_of(make(0), SpecialTokens.of(model), rule._hides_restarts)[Counts._fields.index("restarts")] == 0  # type: ignore[index]


def test_micro_batches_without_a_label_are_told_when_there_are_too_many() -> None:
    """Of 8 micro-batches of a step 7 have no label that counts; then none has, for 31 rows, and then for 32."""

    def make(seed: int) -> Inputs:
        inputs = {name: value[:1] for name, value in rows(seed).items()}
        if seed % 100 != 5 or seed >= 100 * LOOKED_AT:
            inputs["labels"] = torch.full_like(inputs["labels"], IGNORED)
        return inputs

    found, _ = run(make, steps=LOOKED_AT, micro_batches=8)
    assert found == [[]] * LOOKED_AT
    late = changed(lambda seed: make(seed + 100 * LOOKED_AT), lambda inputs: None)
    found, _ = run(late, steps=33)
    assert found == [[]] * 31 + [["ignored"]] * 2, "it looks on, behind the first steps"


def test_an_evaluation_is_not_looked_at_and_a_frozen_forward_neither() -> None:
    model = model_of("llama")
    framework: Any = SimpleNamespace(module=model, step=1)
    rule = BatchContents(framework)
    rule.connect(Patches(), lambda function, *arguments: function(*arguments))
    inputs = FAULTS["labels shifted already"][1](0)
    with torch.no_grad():
        model(**inputs)
    model(**inputs)  # no backward
    assert rule.breaches() == ()
    model(inputs["input_ids"], inputs["attention_mask"], labels=inputs["labels"]).loss.backward()
    assert [breach.key for breach in rule.breaches()] == ["batch:shifted"], "arguments by their places count too"


def test_a_fault_that_ends_or_begins_is_seen_in_the_next_look() -> None:
    def make(seed: int) -> Inputs:
        wrong = 0 < seed // 100 < EVERY
        return FAULTS["padding is trained" if wrong else "padding to the left is trained"][1](seed)

    def mended(seed: int) -> Inputs:
        return (FAULTS["two tokens at the beginning"][1] if seed < 100 * LOOKED_AT else rows)(seed)

    def late(seed: int) -> Inputs:
        return (rows if seed < 100 * EVERY else FAULTS["labels shifted already"][1])(seed)

    assert run(make, steps=2)[0] == [["padding"]] * 2
    assert run(late, steps=EVERY + 1)[0] == [[]] * EVERY + [["shifted"]]
    found, _ = run(mended, steps=EVERY + 1)
    assert found == [["doubled"]] * EVERY + [[]]


def test_counts_are_those_of_a_loop_over_all_places() -> None:
    """The oracle goes place by place."""
    tokens = SpecialTokens(BEGIN, (END, 5), PADDING)
    for seed in range(20):
        chance = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, 7, (6, 9), generator=chance)
        labels = torch.where(torch.rand(6, 9, generator=chance) < 0.4, torch.tensor(IGNORED), ids)
        labels = torch.where(torch.rand(6, 9, generator=chance) < 0.3, ids.roll(-1, 1), labels)
        mask = torch.ones(6, 9, dtype=torch.int64)
        for row in range(6):
            mask[row, : row // 2] = 0
            mask[row, 9 - row % 3 :] = 0
        mask[5] = 0
        ids[4, :5] = PADDING
        mask[4, :4] = 1
        positions = torch.arange(9).repeat(6, 1) % (3 + seed % 5)
        inputs = {"input_ids": ids, "labels": labels, "attention_mask": mask, "position_ids": positions}
        found = counts_of(inputs, tokens, hides_restarts=True)
        assert found is not None
        assert Counts(*found.tolist()) == naive(ids.tolist(), labels.tolist(), mask.tolist(), positions.tolist())


def naive(ids: Any, labels: Any, mask: Any, positions: Any) -> Counts:
    found = dict.fromkeys(Counts._fields, 0.0)
    for x, y, m, p in zip(ids, labels, mask, positions, strict=True):
        n, places = len(x), [t for t in range(len(x)) if m[t]]
        found["rows"] += 1
        found["empty"] += not places
        first = places[0] if places else 0
        found["doubled"] += x[first] == BEGIN and x[min(first + 1, n - 1)] == BEGIN
        end = [x[max((places[-1] if places else n - 1) - back, 0)] for back in (2, 1, 0)]
        found["ended"] += bool(places) and end[2] in (END, 5)
        found["ended_twice"] += bool(places) and end[2] in (END, 5) and end[1] == end[2] != end[0]
        found["led_by_padding"] += all(x[t] == PADDING and m[t] for t in range(4)) and x[-1] != PADDING
        for t in range(n):
            counts, end = y[t] != IGNORED, x[t] in (END, 5) and m[t]
            if t < n - 1 and counts:
                found["pairs"] += 1
                found["same"] += y[t] == x[t]
                found["ahead"] += y[t] == x[t + 1]
            if t == 0:
                continue
            found["labels"] += counts
            found["ends"] += y[t] in (END, 5)
            more = t < n - 1 and x[t + 1] in (END, 5) and m[t + 1]
            found["ends_ignored"] += bool(end and not more and not counts and y[t - 1] != IGNORED)
            out = bool(places) and all(not places[0] <= s <= places[-1] for s in (t, t - 1))
            found["padding"] += out
            found["padding_trained"] += out and counts
            found["restarts"] += p[t] == 0 and p[t - 1] > 0 and bool(m[t] and m[t - 1])
    return Counts(**found)


def test_a_token_that_is_two_of_them_is_none() -> None:
    def tokens(begin: Any, ends: Any, padding: Any) -> SpecialTokens:
        config = SimpleNamespace(bos_token_id=begin, eos_token_id=ends, pad_token_id=padding)
        return SpecialTokens.of(SimpleNamespace(config=config))  # type: ignore[arg-type]

    assert tokens(1, [2, 3], 0) == SpecialTokens(1, (2, 3), 0)
    assert tokens(1, 2, 1) == SpecialTokens(None, (2,), None)
    assert tokens(2, 2, 0) == SpecialTokens(None, (2,), 0)
    assert tokens(1, 2, 2) == SpecialTokens(1, (2,), None)
    assert tokens(None, None, None) == SpecialTokens(None, (), None)


VERDICTS: list[tuple[str, dict[str, float], bool | None]] = [
    ("shifted", {"pairs": 64, "ahead": 52, "same": 32}, True),
    ("shifted", {"pairs": 64, "ahead": 51, "same": 0}, False),
    ("shifted", {"pairs": 64, "ahead": 64, "same": 33}, False),
    ("shifted", {"pairs": 63, "ahead": 63}, None),
    ("doubled", {"rows": 8, "doubled": 8}, True),
    ("doubled", {"rows": 8, "doubled": 7}, False),
    ("doubled", {"rows": 7, "doubled": 7}, None),
    ("ended twice", {"ended": 8, "ended_twice": 8}, True),
    ("ended twice", {"ended": 8, "ended_twice": 7}, False),
    ("ended twice", {"ended": 7, "ended_twice": 7}, None),
    ("ends", {"ends_ignored": 8}, True),
    ("ends", {"ends_ignored": 7}, None),
    ("ends", {"ends_ignored": 8, "ends": 1}, False),
    ("padding", {"padding": 16, "padding_trained": 15}, True),
    ("padding", {"padding": 16, "padding_trained": 14}, False),
    ("padding", {"padding": 15, "padding_trained": 15}, None),
    ("positions", {"rows": 4, "restarts": 4}, True),
    ("positions", {"rows": 4, "restarts": 3}, False),
    ("positions", {"rows": 3, "restarts": 9}, None),
    ("padded", {"rows": 4, "led_by_padding": 4}, True),
    ("padded", {"rows": 4, "led_by_padding": 3}, False),
    ("padded", {"rows": 3, "led_by_padding": 3}, None),
    ("ignored", {"unlabelled": 32}, True),
    ("ignored", {"unlabelled": 31}, None),
    ("ignored", {"unlabelled": 0}, False),
]


@pytest.mark.parametrize(("check", "given", "broken"), VERDICTS)
def test_how_many_it_takes_for_a_verdict(check: str, given: dict[str, float], broken: bool | None) -> None:
    unlabelled = given.get("unlabelled", 0.0)
    counts = Counts(*[given.get(name, 0.0) for name in Counts._fields])
    assert _verdicts(counts, unlabelled)[check] is broken


def test_weights_and_random_numbers_are_as_without_the_rule() -> None:
    def trained(watched: bool) -> tuple[str, Tensor]:
        model = model_of("gpt2", resid_pdrop=0.2)
        torch.manual_seed(11)
        if watched:
            run(rows, model)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            for step in range(LOOKED_AT):
                model(**rows(100 * step)).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        return str(hash_of([model])), torch.get_rng_state()

    (with_rule, random), (without, same) = trained(True), trained(False)
    assert with_rule == without
    assert torch.equal(random, same)


class Tokens:
    """As much of a tokenizer as the collator asks for: rows of one length."""

    pad_token_id, mask_token, padding_side, deprecation_warnings = PADDING, None, "right", dict[str, bool]()

    def pad(self, examples: Any, **how: Any) -> dict[str, Tensor]:
        return {name: torch.as_tensor([one[name] for one in examples]) for name in examples[0]}


def collated(*rows: dict[str, list[int]]) -> list[str]:
    """What is told of a batch behind transformers' own collator, which stays as it was."""
    collators = pytest.importorskip("transformers.data.data_collator")
    rule, patches = OverwrittenLabels(SimpleNamespace(step=1)), Patches()  # type: ignore[arg-type]
    rule.connect(patches, lambda function, *args: function(*args))
    collator = collators.DataCollatorForLanguageModeling(Tokens(), mlm=False)  # type: ignore[arg-type]
    batch = collator([dict(row) for row in rows])
    assert batch["labels"].tolist() == [row["input_ids"] for row in rows]
    patches.undo()
    return [breach.message for breach in rule.breaches()]


def test_a_collator_that_makes_labels_anew_is_told_where_the_data_set_leaves_some_out() -> None:
    ids = [BEGIN, 11, 12, 13, END]
    prompt = {"input_ids": ids, "labels": [IGNORED, IGNORED, 12, 13, END]}
    [message] = collated(prompt, prompt)
    assert "4 in 10 of one batch are -100, and 10 are trained behind it" in message
    assert collated({"input_ids": ids, "labels": ids}) == [], "the same labels as it makes"
    assert collated({"input_ids": ids}) == []
