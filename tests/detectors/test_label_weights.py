"""The sum of the label weights, judged: what is told, what is noted, and what is silent."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ds_silent.capture.loss_graph import EACH, MEAN, SUM, Constants
from ds_silent.capture.untrained import Unlike
from ds_silent.detectors.label_weights import LONG, STEPS, LabelWeightsTest, Multiple, multiple_of
from ds_silent.framework import Promise
from ds_silent.measure.evidence import Evidence, HandedOn, LabelWeights, ReductionEvidence
from ds_silent.records import Event
from tests.support.made_records import Run

ENGINE, TRAINER = Promise("engine.backward", 4), Promise("transformers' Trainer")
AS_GIVEN = Promise("engine.backward with scale_wrt_gas=False", as_given=True)
ITEMS: dict[str, Any] = {
    "divisors": (),
    "divided_by_items": True,
    "by_items": True,
    "reductions": frozenset({SUM}),
    "times": 3.0,
    "labels": 293,
    "promise": TRAINER,
}
GIVEN: dict[str, Any] = {"promise": AS_GIVEN, "wrapper": 1.0}
UNDONE: dict[str, Any] = {"divisors": (), "times": 4.0, "promise": ENGINE, "wrapper": 0.25, "trainer": TRAINER}


def weights(total: float | list[float] = 1.0, divisors: tuple[float, ...] = (4.0,), **named: Any) -> LabelWeights:
    """Four micro-batches on each of three ranks; by default divided once by 4."""
    totals = np.full(3, total) if isinstance(total, float) else np.array(total)
    given = {name: named.pop(name) for name in ("times", "by_tensor", "wrapper", "of_each", "by_hand") if name in named}
    constants = Constants(divisors, **given, by_items=named.pop("divided_by_items", False))
    smallest, largest = totals / 100, totals / 100
    made = LabelWeights(totals, smallest, largest, frozenset({MEAN}), frozenset({4}), constants)
    return replace(made, **named)


def undivided(*steps: Promise | None, count: int = 4) -> list[Event]:
    made = Run(ranks=3)
    given = [Evidence(undivided=one, micro_batches=(count,) * 3) for one in steps]
    return [event for one in given for event in made.judge.step(made.record(), one)]


def told(*steps: LabelWeights | None, ranks: int = 3) -> list[Event]:
    made = Run(ranks=ranks)
    return [e for one in steps for e in made.judge.step(made.record(), Evidence(label_weights=one))]


@pytest.mark.parametrize(
    ("rows", "by_the_trainer"), [((6, 5, 5), True), ((8, 8, 8), True), ((5, 5, 5), False), (None, False)]
)
def test_a_count_that_holds_first_labels_of_rows_is_the_trainers(
    rows: tuple[int, ...] | None, by_the_trainer: bool
) -> None:
    made = Run(ranks=3)
    [event] = made.judge.step(made.record(), Evidence(label_weights=weights(0.9482, **ITEMS), rows_per_rank=rows))
    assert "divided as for 309 labels, and 293 of them are trained." in event.message
    said = "transformers' Trainer counts so by itself; the script is not at fault" in event.message  # 8 rows are padded
    assert (said, (event.remedy or "").startswith("Do nothing")) == (by_the_trainer, by_the_trainer)
    assert event.severity == ("info" if by_the_trainer else "warning")


def test_a_count_without_the_first_label_of_each_row_is_a_note() -> None:
    """Prompt tuning: the labels of 16 rows weighed 293 / 277, and it was a warning."""
    made = Run(ranks=3)
    seen = Evidence(label_weights=weights(293 / 277, **ITEMS), rows_per_rank=(6, 5, 5))
    [event] = made.judge.step(made.record(), seen)
    assert (event.severity, "one label less for each row" in event.message) == ("info", True)


SHORT: dict[str, Any] = {"promise": TRAINER, "trainer": TRAINER, "backwards": frozenset({2}), "accumulation": 4}


def test_a_short_window_that_a_trainer_divides_by_the_configured_number_is_told() -> None:
    [event] = told(weights(1.0, (2.0,), **SHORT), weights(0.5, (4.0,), **SHORT))
    assert (event.severity, event.effect) == ("warning", 0.5)
    assert "this window has 2 micro-batches, and each is divided by the configured 4" in event.message
    assert "transformers' Trainer promises the mean" in event.message
    three = {**SHORT, "backwards": frozenset({3})}
    assert [event.effect for event in told(weights(0.75, (4.0,), **three))] == [0.75]
    for silent in (
        weights(0.75, (4.0,), **three, by_tensor=True),
        weights(0.75, (3.0,), **three),
        weights(0.75, (4.0, 2.0), **three),
        weights(0.75, (4.0,), **{**three, "trainer": None}),
        weights(0.75, (4.0,), **{**three, "promise": ENGINE, "trainer": None}, wrapper=0.25),
        weights(0.75, (4.0,), **{**three, "accumulation": 1}),
        weights([0.5, 0.75, 1.0], (4.0,), **three),
    ):
        assert told(silent) == []


def test_a_first_step_of_one_micro_batch_that_is_divided_by_four_is_a_note() -> None:
    """transformers' run_glue_no_trainer.py stepped where ``step % accumulation == 0``."""
    one = weights(0.25, backwards=frozenset({1}))
    [event] = told(one, weights(), weights(), one, weights())
    assert (event.step, event.severity, event.effect) == (2, "info", 0.25)
    assert "has 1 micro-batch, divided as if there were 4" in event.message
    assert "(i + 1) % 4 == 0" in str(event.remedy)
    whole = weights(1.0, (1.0,), backwards=frozenset({1}))
    for silent in (
        (whole, weights()),
        (weights(), one, weights()),
        (weights(0.5, backwards=frozenset({1})), weights()),
    ):
        assert told(*silent) == []


def test_a_term_that_counts_more_often_than_the_labels_beside_it_is_a_note() -> None:
    made = Run(ranks=3)
    given = [Evidence(beside=one) for one in (12, 12, 0, *[12] * (2 * STEPS))]
    [event] = [event for one in given for event in made.judge.step(made.record(), one)]
    assert (event.step, event.severity, event.effect, event.kind) == (3 + STEPS, "info", 12.0, "objective-mismatch")
    assert "counts 12 times" in event.message
    assert undivided(None) == [] == list(made.judge.step(made.record(), Evidence(beside=1)))


SEEN: dict[str, Any] = {"trainer": TRAINER, "by_tensor": True, "times": 3.0, "reductions": frozenset({SUM})}
BROKEN = {
    "the engine and the script": (weights(0.25, (4.0,), promise=ENGINE, wrapper=0.25), "the script has divided"),
    "the wrapper does not divide": (weights(4.0, (), promise=ENGINE, wrapper=1.0), "and multiplies by 1."),
    "and the ranks, too": (weights(1 / 12, (4.0, 3.0), promise=ENGINE, wrapper=0.25), "micro-batches twice, and"),
    "the Trainer's loss is not divided": (weights(4.0, (), promise=TRAINER), "4 micro-batches are added up"),
    "the Trainer's and by the ranks": (weights(1 / 3, (4.0, 3.0), promise=TRAINER), "divided by the 3 ranks"),
    "a mean that is given the items": (
        weights(12.0, (), times=3.0, by_items=True, promise=TRAINER),
        "added up and not divided, and they are multiplied by the 3 ranks",
    ),
    "a sum that is given the items": (
        weights(4.0, (), by_tensor=True, by_items=True, reductions=frozenset({SUM})),
        "num_items_in_batch, by which its sum",
    ),
    "items, and an accumulation undone": (
        weights(1 / 3, **ITEMS | {"times": 4.0, "promise": Promise("accelerator.backward", 4)}, wrapper=0.25),
        "divided by the 3 ranks",
    ),
    "items that are no labels, and an accumulation undone": (
        weights(0.32, **ITEMS | {"times": 4.0, "promise": Promise("accelerator.backward", 4)}, wrapper=0.25),
        "divided as for 916 labels, and 293 of them",
    ),
    "items that are no labels of the loss": (weights(0.9482, **ITEMS), "divided as for 309 labels, and 293 of them"),
    "each rank's own items, which are none": (weights([0.9, 0.95, 0.91], **ITEMS | {"times": 1.0}), "0.92 together"),
    "items, and the micro-batches": (weights(0.25, **ITEMS | {"divisors": (4.0,)}), "by 4 micro-batches once more."),
    "items that are no labels, and the micro-batches": (
        weights(0.237, **ITEMS | {"divisors": (4.0,)}),
        "by 4 micro-batches once more.",
    ),
    "items, and the wrapper": (
        weights(0.25, **ITEMS | {"promise": Promise("accelerator.backward", 4)}, wrapper=0.25),
        "once more. accelerator.backward promises to divide by 4, and multiplies by 0.25.",
    ),
    "items, and the configured micro-batches in a window of 4": (
        weights(0.125, **ITEMS | {"divisors": (8.0,), "accumulation": 8}),
        "by 8 micro-batches once more.",
    ),
    "a sum by all labels, and the micro-batches": (
        weights(0.25, **SEEN),
        "by 4 micro-batches once more. transformers'",
    ),
    "a loss that is not passed on as given": (weights(0.25, passed=0.25, **GIVEN), "promises to multiply them by noth"),
    "and the wrapper's own number": (weights(0.25, wrapper=0.25, promise=AS_GIVEN), "is 0.25 times that of the losses"),
    "the Trainer undoes a division": (weights(4.0, **UNDONE), "before that the loss is multiplied by 4. transformers'"),
    "the Trainer's, given to an engine": (weights(0.25, trainer=TRAINER, **GIVEN), "transformers' Trainer promises"),
    "a mean that is maximised": (weights(-0.25, times=-1.0, promise=ENGINE, wrapper=0.25), "is 0.25 times that of"),
    "a sign that is turned instead of passed on": (weights(-1.0, **GIVEN | {"wrapper": -1.0}), "is -1 times that of"),
    "a sign that is turned by a division": (
        weights(-1.0, (), promise=ENGINE, wrapper=-0.25),
        "is -1 times that of the losses as the script has given them, on all ranks alike. "
        "engine.backward promises to divide by 4, and multiplies by -0.25.",
    ),
    "items of labels that are maximised": (weights(-0.9482, **ITEMS | {"times": -3.0}), "divided as for 309 labels"),
    "bf16": (weights(0.2505, promise=ENGINE, wrapper=0.25), "0.2505 times"),
}
SUMMED: dict[str, Any] = {"reductions": frozenset({SUM})}
SILENT = {
    "a sum by each rank's own labels, and by the ranks": weights(
        1 / 3, (), **SUMMED, smallest=np.array([0.001, 0.002, 0.003]), largest=np.array([0.001, 0.002, 0.003])
    ),
    "a mean": weights(),
    "a mean of the engine": weights(1.0, (), promise=ENGINE, wrapper=0.25),
    "a hyper-parameter": weights(0.5, times=0.5, promise=ENGINE),
    "one that equals the accumulation": weights(0.25, times=0.25, promise=ENGINE),
    "one that is a divisor": weights(0.5, (4.0, 2.0), promise=ENGINE),
    "a factor of the Trainer's loss": weights(4.0, times=4.0, promise=TRAINER),
    "a weight that is a tensor": weights(0.25, by_tensor=True, promise=ENGINE),
    "a sum": weights(4.0, (), reductions=frozenset({SUM}), promise=TRAINER),
    "weights of each label": weights(4.0, (), reductions=frozenset({EACH}), promise=TRAINER),
    "ranks that are not alike": weights([1.0, 1.0, 10.0], promise=ENGINE),
    "a short window": weights(0.5, backwards=frozenset({2}), promise=ENGINE),
    "a short window of a loop": weights(0.5, backwards=frozenset({2})),
    "windows that are not alike": weights(0.25, backwards=frozenset({2, 4}), promise=ENGINE),
    "a mean, and nothing known of why": weights(4.0, (4.0,)),
    "a quarter in another way": weights(0.25, (4.0, 2.0, 2.0)),
    "four times by hand": weights(4.0, times=4.0),
    "the items of each rank": weights(
        1.0,
        reductions=frozenset({SUM}),
        by_items=True,
        smallest=np.array([0.01, 0.02, 0.03]),
        largest=np.array([0.01, 0.02, 0.03]),
    ),
    "as many items as labels": weights(1.0, **ITEMS),
    "items in bf16": weights(0.996, **ITEMS),
    "items, and a factor": weights(0.7, **ITEMS | {"times": 2.1}),
    "items, and a tensor": weights(0.7, **ITEMS, by_tensor=True),
    "items, and a divisor": weights(0.7, **ITEMS | {"divisors": (1.43,)}),
    "items that divide no sum over labels": weights(0.7, **ITEMS | {"divided_by_items": False}),
    "items, and weights of each label": weights(0.7, **ITEMS | {"reductions": frozenset({EACH})}),
    "items four times, and weights of each label": weights(4.0, **ITEMS | {"reductions": frozenset({EACH})}),
    "items, and a factor beside the micro-batches": weights(0.175, **ITEMS | {"times": 2.1, "divisors": (4.0,)}),
    "items, and a quarter in another way": weights(0.25, **ITEMS | {"divisors": (2.0, 2.0)}),
    "items, a factor, and the micro-batches": weights(**ITEMS | {"times": 12.0, "divisors": (4.0,)}),
    "a sum by a tensor, and the micro-batches": weights(0.251, **SEEN),
    "a sum by all labels, and the micro-batches, of a loop": weights(0.25, **SEEN | {"trainer": None}),
    "a sum by all labels, by hand": weights(0.25, **SEEN, by_hand=True),
    "a sum by each rank's own labels": weights(
        0.25, **SEEN, smallest=np.array([0.001, 0.002, 0.003]), largest=np.array([0.001, 0.002, 0.003])
    ),
    "a short window of items": weights(1.0, **ITEMS | {"backwards": frozenset({2})}),
    "a loss as given": weights(**GIVEN),
    "a quarter as given": weights(0.25, (4.0, 2.0, 2.0), **GIVEN | {"passed": 1.0}),
    "a scaled loss as given": weights(passed=2.0**-16, wrapper=2.0**16, promise=AS_GIVEN),
    "as given, and nothing known of what follows": weights(0.25, passed=math.nan, **GIVEN),
    "as given, a mean by hand": weights(2.0, passed=0.25, by_hand=True, **GIVEN),
    "as given, a mean of padding too": weights(0.66, passed=0.66, of_each=True, **GIVEN),
    "half of each row is padding": weights(0.25, of_each=True, promise=ENGINE, wrapper=0.25),
    "a loop undoes a division": weights(4.0, **UNDONE | {"trainer": None}),
    "a factor, and the wrapper divides": weights(4.0, **UNDONE | {"times": 2.0}),
    "a factor, and no division": weights(4.0, **UNDONE | {"wrapper": 1.0}),
    "a factor, and a division by another number": weights(4.0, **UNDONE | {"times": 8.0, "wrapper": 0.125}),
    "a mean that is maximised": weights(-1.0, (), times=-1.0, promise=ENGINE, wrapper=0.25),
    "a mean that is maximised, as given": weights(-1.0, times=-1.0, **GIVEN),
    "the items of each rank, in bf16": weights(
        reductions=frozenset({SUM}),
        by_items=True,
        smallest=np.array([0.01, 0.02, 0.03]),
        largest=np.array([0.0101, 0.0202, 0.0303]),
    ),
    "items, a factor, and labels that do not count alike": weights(
        0.7, **ITEMS | {"times": 2.1}, smallest=np.full(3, 0.01), largest=np.full(3, 0.03)
    ),
    "a mean of means": weights(smallest=np.array([0.01] * 3), largest=np.array([0.03] * 3), promise=TRAINER),
    "items, and labels with weights of their own": weights(
        reductions=frozenset({EACH}), by_items=True, smallest=np.array([0.01] * 3), largest=np.array([0.03] * 3)
    ),
}
NOTED = {
    "added up": (weights(4.0, ()), "added up and not divided"),
    "divided twice": (weights(0.25, (4.0, 4.0)), "divided by the 4 micro-batches twice"),
    "divided by the ranks": (weights(1 / 3, (4.0, 3.0)), "divided by the 3 ranks"),
    "multiplied by the ranks": (weights(3.0, times=3.0), "multiplied by the 3 ranks"),
    "added up and maximised": (weights(-4.0, (), times=-1.0), "added up and not divided"),
    "both at once": (weights(1 / 12, (4.0, 4.0, 3.0)), "twice, and they are divided by the 3 ranks"),
    "a sum by all labels, and by the ranks": (
        weights([0.2, 0.5, 0.3], (), **SUMMED, smallest=np.full(3, 0.001), largest=np.full(3, 0.001)),
        "divided by the 3 ranks",
    ),
    "by the ranks, beside a promise of another": (weights(1 / 3, (3.0,), promise=ENGINE, wrapper=0.25), "3 ranks"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_promise_is_told_at_its_first_step_and_once(name: str) -> None:
    wrong, says = BROKEN[name]
    [event] = told(weights(), wrong, wrong, replace(wrong, backwards=frozenset({4})), wrong)
    assert (event.step, event.kind, event.severity, event.ranks) == (2, "objective-mismatch", "warning", ())
    assert event.effect == pytest.approx(abs(float(wrong.totals.mean())))
    assert says in event.message


@pytest.mark.parametrize("name", SILENT)
def test_what_nobody_has_promised_is_silent(name: str) -> None:
    assert told(*[SILENT[name]] * 2 * STEPS) == []


@pytest.mark.parametrize("name", NOTED)
def test_a_loop_of_ones_own_is_a_note_once(name: str) -> None:
    found, says = NOTED[name]
    assert told(*[found] * (STEPS - 1), None, *[found] * (STEPS - 1), weights(), *[found] * (STEPS - 1)) == []
    [note] = told(*[found] * STEPS, weights(), *[found] * 3 * STEPS)
    assert (note.step, note.kind, note.severity, note.ranks) == (STEPS, "objective-mismatch", "info", ())
    assert says in note.message
    assert note.remedy.startswith("Do nothing if that is meant.")
    assert ("Several losses of one batch" in note.remedy) is (says == "added up and not divided")


def test_of_gradients_that_are_cleared_nothing_else_is_noted() -> None:
    """With as many micro-batches as ranks, half of them cleared, they seemed to be divided by the ranks."""
    cleared = Unlike("rule:cleared", (), "zero_grad", "Cleared.", "Clear once.", 1, "update-mismatch", "warning")
    made, found = Run(ranks=3), next(iter(NOTED.values()))[0]
    seen = Evidence(label_weights=found, unlike=(cleared,))
    assert {event.kind for _ in range(3 * STEPS) for event in made.judge.step(made.record(), seen)} <= {cleared.kind}


def test_a_loss_of_several_terms_that_nothing_divides_is_told_at_its_first_step() -> None:
    [event, end] = undivided(None, TRAINER, TRAINER, *[None] * 4)
    assert (event.step, event.kind, event.severity, event.ranks) == (2, "objective-mismatch", "warning", ())
    assert event.effect == 4.0
    assert "the losses of 4 micro-batches are added up and not divided. transformers' Trainer" in event.message
    assert (end.phase, end.step) == ("ended", 4)


def test_twice_a_loss_on_two_ranks_may_be_meant() -> None:
    assert told(*[weights([2.0, 2.0], times=2.0)] * 2 * STEPS, ranks=2) == []


def test_items_promise_that_labels_count_alike() -> None:
    alike = weights(reductions=frozenset({SUM}), by_items=True, by_tensor=True)
    unequal = replace(alike, smallest=np.array([0.01, 0.01, 0.02]), largest=np.array([0.02, 0.01, 0.02]))
    [event] = told(alike, unequal, unequal)
    assert (event.step, event.kind, event.severity, event.effect) == (2, "objective-mismatch", "warning", 2.0)
    assert "one counts 2 times another" in event.message
    by_rank = replace(
        alike, totals=np.array([0.75, 0.75, 1.5]), smallest=np.array([1, 1, 2]), largest=np.array([1, 1, 2])
    )
    assert [event.effect for event in told(by_rank)] == [2.0], "each rank's count alike, and not those of two"


def test_a_model_that_makes_a_mean_of_its_loss_is_told_what_to_set() -> None:
    """transformers' Trainer multiplies by the ranks what it has given the items to."""
    [event] = told(weights(3.0, (), times=3.0, by_items=True))
    assert "multiplied by the 3 ranks" in event.message
    own, model = map(event.remedy.index, ("divide the labels' summed loss", "set model.accepts_loss_kwargs = False"))
    assert own < event.remedy.index("loss_is_scaled_for_ga = False") < model, "what is the user's own comes first"
    [event] = told(weights(1 / 3, (4.0, 3.0), promise=TRAINER))
    assert "accepts_loss_kwargs" not in event.remedy


def test_a_short_window_ends_nothing() -> None:
    wrong = weights(0.25, promise=ENGINE, wrapper=0.25)
    short = replace(wrong, totals=wrong.totals / 2, backwards=frozenset({2}))
    [event] = told(wrong, *[short, wrong] * 4)
    assert event.step == 1
    [_, end] = told(wrong, short, *[weights(promise=ENGINE)] * 4)
    assert (end.phase, end.step) == ("ended", 3)


def test_steps_that_never_have_as_many_micro_batches_as_are_divided_by() -> None:
    fewer = weights(0.5, wrapper=0.25, backwards=frozenset({2}), promise=ENGINE)
    [event] = told(*[fewer] * LONG)
    assert (event.severity, event.step) == ("warning", LONG)
    assert "each step has 2 micro-batches, and engine.backward divides by 4" in event.message
    assert event.remedy.startswith("Let 4 micro-batches make a step")


def test_more_backwards_than_a_wrapper_divides_by_may_be_several_losses() -> None:
    """As of a discriminator, on real and on made-up rows (DeepSpeedExamples' GAN)."""
    more = weights(2.0, wrapper=1.0, backwards=frozenset({2}), promise=Promise("engine.backward", 1))
    [event] = told(*[more] * LONG)
    assert (event.severity, event.step) == ("info", LONG)
    assert "each step has 2 micro-batches, and engine.backward divides by 1" in event.message
    assert event.remedy.startswith("Do nothing if that is meant. Several losses of one batch")
    assert "Let 1 micro-batch make a step" in event.remedy


def test_a_note_survives_a_checkpoint() -> None:
    made, test, other = Run(ranks=3), LabelWeightsTest(), LabelWeightsTest()
    evidence = Evidence(label_weights=weights(4.0, ()))
    for _ in range(STEPS - 1):
        test.step(made.record(), evidence)
    other.load_state_dict(json.loads(json.dumps(test.state_dict())))
    assert other.step(made.record(), evidence) == []
    assert len(other.notes) == 1
    test.load_state_dict(json.loads(json.dumps(other.state_dict())))
    for _ in range(2 * STEPS):
        test.step(made.record(), evidence)
        assert test.notes == ()


def test_what_the_ranks_do_not_do_alike_is_told_as_that_alone() -> None:
    made, test, wrong = Run(ranks=3), LabelWeightsTest(), weights(0.25, promise=ENGINE, wrapper=0.25)
    unlike = (Unlike("", (1,), "loss", "", "", 2, kind="objective-mismatch"),)
    given = [Evidence(label_weights=wrong), Evidence(label_weights=wrong, unlike=unlike), Evidence(unlike=unlike)]
    assert [len(test.step(made.record(), one)) for one in given] == [1, 0, 0]


def test_the_simplest_product_is_found() -> None:
    assert multiple_of(1.0, 4, 3) is None
    assert multiple_of(5.0, 4, 3) is None
    assert multiple_of(float("nan"), 4, 3) is None
    assert multiple_of(0.0, 4, 3) is None
    products = {4.0: (1, 0), 0.25: (-1, 0), 3.0: (0, 1), 1 / 3: (0, -1), 12.0: (1, 1), 1 / 12: (-1, -1), 0.75: (-1, 1)}
    for total, powers in products.items():
        assert multiple_of(total, 4, 3) == Multiple(*powers)
    assert multiple_of(2.0, 2, 2) == Multiple(1, 0)  # of two explanations the micro-batches


def test_gradients_that_the_script_divides_behind_the_reduction_are_no_sum() -> None:
    made = Run(ranks=3)
    added_up = weights(4.0, ())

    def notes(factors: list[float]) -> list[Event]:
        handed_on = [HandedOn(factor, 1.0, 1.0) for factor in factors]
        given = [Evidence(label_weights=added_up, reduction=ReductionEvidence(handed_on=one)) for one in handed_on]
        return [event for one in given for event in made.judge.step(made.record(), one)]

    assert notes([0.25] * 3 * STEPS) == []
    [event] = notes([0.25, 0.1, 0.3, *[0.5] * STEPS])  # as clipping does
    assert event.kind == "objective-mismatch"
