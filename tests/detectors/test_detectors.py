"""The detectors on made records: each finds its fault, keeps silent in health, and none is blinded by a bad number."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest

from ds_silent.config import DetectorsConfig
from ds_silent.detectors import Judge, duplicate_data
from ds_silent.detectors.same_rows import SameRows
from ds_silent.measure.evidence import Coverage, Evidence, LayerValues, OwnPasses
from ds_silent.records import Event, ObjectiveStats, StepRecord
from tests.support.made_records import NOTHING, Run, ids, kinds, make

# -- numbers that are none -------------------------------------------------------------------------------------------


def test_non_finite_names_the_layer_and_spreads_without_a_second_event() -> None:
    run = Run()
    first = run.judge.step(run.record(), Evidence(non_finite={1: "model.layers.3"}))
    assert [(e.kind, e.ranks, e.where) for e in first] == [("non-finite", (1,), "model.layers.3")]
    record = run.record()
    everywhere = replace(record, loss=replace(record.loss, per_rank=(math.nan,) * 4))
    assert run.judge.step(everywhere, NOTHING) == []


def test_what_is_not_finite_is_told_in_the_right_number() -> None:
    for losses, ranks, message in (
        ((math.nan, 1.0), 2, "The loss of rank 0 is not finite."),
        ((math.nan, math.nan), 2, "The loss of both ranks is not finite."),
        ((math.nan,) * 3, 3, "The loss of all 3 ranks is not finite."),
    ):
        run = Run(ranks)
        record = run.record()
        [event] = run.judge.step(replace(record, loss=replace(record.loss, per_rank=losses)), NOTHING)
        assert event.message.startswith(f"{message} The aggregated gradient is finite")
    run = Run(2)
    record = run.record()
    record = replace(record, loss=replace(record.loss, per_rank=(math.nan, 1.0)))
    [event] = run.judge.step(record, Evidence(non_finite={0: "model.layers.3"}))
    assert event.message.startswith("The loss and gradient of rank 0 are not finite, first in model.layers.3. ")


def test_an_aggregate_that_is_not_finite_is_seen() -> None:
    run = Run()
    record = run.record()
    events = run.judge.step(replace(record, grad_norm=replace(record.grad_norm, aggregated=math.inf)), NOTHING)
    assert [(e.kind, e.ranks, e.where) for e in events] == [("non-finite", (), "aggregated gradient")]


def test_a_skipped_fp16_step_is_no_fault_but_its_nan_loss_is() -> None:
    run = Run()
    record = run.record()
    record = replace(record, grad_norm=replace(record.grad_norm, per_rank=(math.inf,) * 4, aggregated=math.inf))
    assert run.judge.step(record, Evidence(step_skipped=True)) == []
    record = replace(record, loss=replace(record.loss, per_rank=(1.0, math.nan, 1.0, 1.0)))
    assert kinds(run.judge.step(record, Evidence(step_skipped=True))) == ["non-finite"]


def test_zero_gradient_and_why() -> None:
    run = Run()
    record = run.record(scale=0.0)
    event = run.judge.step(record, Evidence(dealt="random", label_tokens=(9, 9, 0, 9)))[0]
    assert (event.kind, event.ranks, event.severity) == ("zero-gradient", (2,), "error")
    assert event.message == (
        "The gradient of rank 2 is exactly zero in all parameters: none of its rows has a label token."
    )
    event = Run().judge.step(record, Evidence(dealt="random", label_tokens=(9, 9, 9, 9)))[0]
    assert "label token" not in event.message


ON_RANK_2, ON_RANK_1 = Evidence(stale_parameters=(0, 0, 3, 0)), Evidence(stale_parameters=(0, 2, 0, 0))
NOWHERE = Evidence(stale_parameters=(0, 0, 0, 0))


@pytest.mark.parametrize(("before", "at"), [(0, 8), (7, 15), (8, 9)])
def test_stale_parameters_on_one_rank_are_told_once_and_conditional_models_are_left_alone(before: int, at: int) -> None:
    run = Run()
    events = run.steps(before, NOWHERE) + run.steps(10, ON_RANK_2)
    assert [(e.kind, e.ranks, e.where, e.step) for e in events] == [("zero-gradient", (2,), "parameters", at)]
    events = run.steps(1, ON_RANK_1)
    assert [e.severity for e in events] == ["info"]  # the first has ended
    assert run.steps(10, ON_RANK_2) == []


def test_parameters_without_a_gradient_are_told_with_the_layers_that_got_none() -> None:
    log_norms = np.zeros((4, 6))
    log_norms[2, :5] = -np.inf
    log_norms[:, 4] = -np.inf  # nobody trains it
    layers = LayerValues(("embedding", "b.0", "b.1", "b.2", "frozen", "head"), log_norms, None)
    [event] = Run().steps(8, replace(ON_RANK_2, layers=layers))
    assert event.message == (
        "Rank 2 got no gradient for 3 trainable parameters that other ranks do train, among them all of embedding, "
        "b.0, b.1 and 1 more layers, since step 1."
    )
    whole = replace(layers, log_norms=np.zeros((4, 6)))
    for unknown in (whole, None):
        [event] = Run().steps(8, replace(ON_RANK_2, layers=unknown))
        assert event.message == (
            "Rank 2 got no gradient for 3 trainable parameters that other ranks do train, since step 1."
        )


@pytest.mark.parametrize("other", [ON_RANK_1, NOWHERE])
def test_parameters_that_come_and_go_from_the_first_steps_on_are_a_mixture_of_experts(other: Evidence) -> None:
    run = Run()
    assert run.steps(7, ON_RANK_2) + run.steps(1, other) + run.steps(20, ON_RANK_2) == []


LAYERS = ("embedding", "b.0", "b.1", "b.2", "head")


def zero_in(*layers: int, ranks: tuple[int, ...] = (2,)) -> Evidence:
    """Evidence of a gradient of exactly zero on these of 4 ranks, in these of 5 layers."""
    log_norms = np.zeros((4, 5))
    log_norms[np.ix_(np.array(ranks, int), np.array(layers, int))] = -np.inf
    return Evidence(layers=LayerValues(LAYERS, log_norms, None), dealt="random")


@pytest.mark.parametrize(("before", "at"), [(0, 8), (7, 15), (8, 12), (40, 44)])
def test_a_gradient_of_zero_in_a_layer_of_one_rank_is_a_fact_with_the_layers_names(before: int, at: int) -> None:
    run = Run()
    events = run.steps(before, zero_in()) + run.steps(20, zero_in(1, 2))
    [event] = [event for event in events if event.severity != "info"]
    assert (event.kind, event.severity, event.ranks, event.step) == ("zero-gradient", "warning", (2,), at)
    assert event.where == "b.0"
    assert event.message == (
        f"The gradient of b.0, b.1 is exactly zero on rank 2 since step {before + 1}, and not on the other ranks."
    )
    assert [event for event in events if event.kind == "outlier-rank" and event.severity != "info"] == []


def test_a_layer_that_is_zero_now_and_then_or_everywhere_is_the_models_own() -> None:
    run = Run()
    for step in range(60):  # a task whose rows a rank sometimes lacks, for two steps in a row
        assert run.steps(1, zero_in(4, ranks=(step // 2 % 4,) if step % 5 < 4 else ())) == []
    assert Run().steps(30, zero_in(4, ranks=(0, 1, 2, 3))) == [], "nobody trains it"
    run = Run()
    for turn in range(6):  # a task that one rank has rows of, now and then
        alone = tuple(rank for rank in range(4) if rank != turn % 4)
        assert run.steps(9, zero_in(4, ranks=(0, 1, 2, 3))) + run.steps(2, zero_in(4, ranks=alone)) == []
    later = run.steps(30, zero_in(4, ranks=(0, 1, 2)))
    assert [event for event in later if event.kind == "zero-gradient"] == [], "it has come and gone before"


@pytest.mark.parametrize("kind", ["zero", "stale"])
def test_other_experts_on_each_rank_are_no_fault_though_the_same_rank_trains_fewer(kind: str) -> None:
    """As a healthy mixture of experts was told: one rank had more without a gradient at eight steps in a row."""

    def seen(counts: tuple[int, ...], marks: tuple[float, ...]) -> Evidence:
        return Evidence(dealt="random", **{f"{kind}_parameters": counts, f"{kind}_marks": marks})  # type: ignore[arg-type]

    run = Run()
    events = [event for step in range(30) for event in run.steps(1, seen((0, 0, 16, 0), (5, 9, 100 + step, 7)))]
    assert events == []
    same = Run().steps(8, seen((0, 0, 16, 0), (5, 9, 100, 7)))
    assert [(event.kind, event.ranks) for event in same] == [("zero-gradient", (2,))]


def test_a_zero_layer_is_no_second_finding_where_its_rank_has_no_gradient_at_all_or_none_of_its_parameters() -> None:
    run = Run()
    assert [event.where for event in run.steps(20, replace(ON_RANK_2, layers=zero_in(1).layers))] == ["parameters"]
    run = Run()
    run.steps(9, zero_in())
    everything = zero_in(0, 1, 2, 3, 4)
    [event] = run.judge.step(run.record(scale=0.0), everything)
    assert event.where == "gradient"
    for _ in range(9):
        assert run.judge.step(run.record(scale=0.0), everything) == []


def test_a_zero_layer_begins_at_a_measured_step() -> None:
    run = Run(interval=5)
    for step in range(5, 60, 5):
        record = replace(run.record(), step=step)
        events = run.judge.step(record, zero_in(1) if step >= 15 else zero_in())
        if events:
            break
    assert "since step 15," in events[0].message


def test_zero_layers_survive_a_resume() -> None:
    first, second = Run(), Run()
    assert first.steps(9, zero_in()) + first.steps(3, zero_in(1)) == []
    second.judge.load_state_dict(json.loads(json.dumps(first.judge.state_dict())))
    second.random, second.number = first.random, getattr(first, "number", 0)
    [event] = second.steps(1, zero_in(1))
    assert event.where == "b.0"


def without_loss(run: Run, *ranks: int) -> StepRecord:
    """A margin that all rows of a batch keep: loss and gradient are exactly zero."""
    record = run.record()
    losses, norms = list(record.loss.per_rank or ()), list(record.grad_norm.per_rank or ())
    for rank in ranks:
        losses[rank] = norms[rank] = 0.0
    return replace(
        record,
        loss=replace(record.loss, per_rank=tuple(losses)),
        grad_norm=replace(record.grad_norm, per_rank=tuple(norms)),
    )


def test_a_loss_of_zero_now_and_then_has_no_gradient_and_is_no_fault() -> None:
    run, judge = Run(), Judge(DetectorsConfig())
    for step in range(60):
        ranks = [rank for rank in range(4) if run.random.random() < step / 60] if step % 2 else [0, 1, 2, 3]
        found = judge.step(without_loss(run, *ranks), NOTHING)
        assert [event for event in found if event.kind == "zero-gradient"] == []


def test_a_loss_that_is_zero_on_all_ranks_from_the_beginning_is_told() -> None:
    run, judge = Run(), Judge(DetectorsConfig())
    steps = [judge.step(without_loss(run, 0, 1, 2, 3), NOTHING) for _ in range(20)]
    assert [step for step, events in enumerate(steps, 1) for e in events if e.kind == "zero-gradient"] == [16]
    later = [event for _ in range(200) for event in judge.step(without_loss(run, 0, 1, 2, 3), NOTHING)]
    assert [event.message[:20] for event in later if event.kind == "zero-gradient"] == ["Still, since step 1: "[:20]]


def test_a_loss_that_is_zero_on_one_rank_for_good_is_told() -> None:
    run, judge = Run(), Judge(DetectorsConfig())
    steps = [judge.step(without_loss(run, 2), NOTHING) for _ in range(20)]
    found = [(step, event.ranks, event.severity) for step, events in enumerate(steps, 1) for event in events]
    assert next(one for one in found if one[1] == (2,)) == (16, (2,), "error")
    record = without_loss(run, 1)
    fine = replace(record, loss=replace(record.loss, per_rank=(2.0, 2.1, 0.0, 1.9)))
    assert ("zero-gradient", (1,)) in [(e.kind, e.ranks) for e in Judge(DetectorsConfig()).step(fine, NOTHING)]


# -- the same data ---------------------------------------------------------------------------------------------------


def test_all_ranks_on_the_same_rows() -> None:
    run = Run()
    events = run.steps(3, ids(dict.fromkeys(itertools.combinations(range(4), 2), 4)))
    assert [(e.kind, e.ranks, e.step, e.severity) for e in events] == [("duplicate-data", (0, 1, 2, 3), 1, "error")]
    assert "All 4 ranks" in events[0].message


def test_the_same_rows_of_which_each_rank_trains_others_are_no_duplicates() -> None:
    """A graph whose forward takes all nodes on every rank, and whose loss is of the rank's own."""
    everything, told = ids({(0, 1): 400}, rows=400), []
    for labels, losses in ((50, (1.59, 1.6)), (800, (1.59, 1.6)), (50, (1.6, 1.6)), (None, (1.59, 1.6))):
        record = Run(2).record()
        objective = ObjectiveStats(1.0, labels=labels, known=labels is not None)
        record = replace(record, loss=replace(record.loss, per_rank=losses), objective=objective)
        told.append(kinds(SameRows(16.0).step(record, replace(everything, rows_per_rank=(400, 400)))))
    assert told == [[], ["duplicate-data"], ["duplicate-data"], ["duplicate-data"]]


def test_one_pair_on_the_same_rows_and_its_end() -> None:
    run = Run()
    events = run.steps(2, ids({(0, 3): 2})) + run.steps(1, ids({}))
    assert [(e.ranks, e.severity) for e in events] == [((0, 3), "error"), ((0, 3), "info")]
    assert events[1].message.startswith("Ended")
    assert [event.phase for event in events] == ["started", "ended"]


def test_a_pair_that_is_named_stays_so_while_it_shares_half_of_its_rows() -> None:
    """A GAN whose ranks draw the same fakes: once that had ended with the ranks' fourth batch, and went on."""
    rows, found = SameRows(16.0), []
    for step in range(1, 21):
        passes = OwnPasses((16,) * 4, (16.0 * step,) * 4, 0.0, (16 * step,) * 4)
        shares = {(0, 3): 8} if step < 20 else {}
        found.append(len(rows.step(Run().record(), replace(ids(shares, rows=16), passes=passes))))
    assert found == [1] * 19 + [0]


def test_ranks_that_held_the_same_rows_still_do_while_they_take_them_again() -> None:
    run, again = Run(), Evidence(batch_again=True)
    events = run.steps(2, ids({(0, 3): 2})) + run.steps(20, again)
    assert [(event.kind, event.phase) for event in events] == [("duplicate-data", "started")]
    assert [event.phase for event in run.steps(3, ids({}))] == ["ended"]


def test_a_state_that_kept_the_pairs_alone_is_read() -> None:
    rows, evidence = SameRows(16.0), ids({(0, 3): 1}, rows=1)
    rows.load_state_dict([[0, 3]])
    assert [found.kind for found in rows.step(Run().record(), evidence)] == ["duplicate-data"]
    again = SameRows(16.0)
    again.load_state_dict(json.loads(json.dumps(rows.state_dict())))
    assert again.state_dict() == rows.state_dict()


def test_padding_of_the_last_batch_is_no_duplicate() -> None:
    run = Run()
    assert run.steps(1, ids({(0, 1): 1, (2, 3): 1})) == []
    assert run.steps(1, ids({(0, 1): 1}, rows=1)) == []
    assert kinds(run.steps(1, ids({(0, 1): 1}, rows=1))) == ["duplicate-data"]  # twice in a row is no padding


def matrix_with(pairs: set[tuple[int, int]], ranks: int, value: float = 1.0) -> tuple[tuple[float, ...], ...]:
    m = [[1.0 if i == j else 0.1 for j in range(ranks)] for i in range(ranks)]
    for i, j in pairs:
        m[i][j] = m[j][i] = value
    return tuple(tuple(row) for row in m)


def test_equal_gradients_tell_without_ids() -> None:
    losses, norms = [2.0, 2.1, 2.0, 2.3], [1.0, 1.2, 1.0, 0.9]
    record = make(1, losses, norms, [0.1] * 4, matrix=matrix_with({(0, 2)}, 4, 1 - 1e-9))
    assert [(e.kind, e.ranks) for e in Judge(DetectorsConfig()).step(record, NOTHING)] == [("duplicate-data", (0, 2))]
    # ids that each rank counts for itself differ although the rows are the same
    assert kinds(Judge(DetectorsConfig()).step(record, ids({}))) == ["duplicate-data"]
    for different in (
        make(1, [2.0, 2.1, 2.01, 2.3], norms, [0.1] * 4, matrix=record.cosine_matrix),
        make(1, losses, [1.0, 1.2, 1.1, 0.9], [0.1] * 4, matrix=record.cosine_matrix),
        make(1, losses, norms, [0.1] * 4, matrix=matrix_with({(0, 2)}, 4, 0.999)),
        make(1, losses, norms, [0.1] * 4, matrix=matrix_with({(0, 2)}, 4, math.nan)),
    ):
        assert "duplicate-data" not in kinds(Judge(DetectorsConfig()).step(different, NOTHING))


def test_equal_gradients_of_other_rows_or_none_are_not_said_to_come_of_the_same_data() -> None:
    """A GAN's generator, whose noise is the same on all ranks: its step takes no rows, its discriminator's others."""
    record = make(1, [2.0, 2.1, 2.0, 2.3], [1.0, 1.2, 1.0, 0.9], [0.1] * 4, matrix=matrix_with({(0, 2)}, 4, 1 - 1e-9))
    passes = OwnPasses((2,) * 4, (100.0,) * 4, 0.25, (400,) * 4)
    others, none = replace(ids({}), passes=passes), replace(NOTHING, no_rows=True)
    for seen, said in ((others, "not the same"), (none, "no rows"), (ids({}, rows=0), "no rows"), (NOTHING, "")):
        [event] = Judge(DetectorsConfig()).step(record, seen)
        assert (event.kind, event.severity, event.ranks) == ("duplicate-data", "error", (0, 2))
        assert ("train on the same data" in event.message) == (seen is NOTHING)
        assert ("from the same rows or the same random numbers" in event.message) == (seen is not NOTHING)
        assert said in event.message
        assert ("seed + rank" in event.remedy) == (seen is not NOTHING)
        assert "a DistributedSampler" in event.remedy


def test_equal_gradients_of_rows_that_were_shared_by_chance_are_no_fault() -> None:
    """Of batches of one row two ranks took the same; where that goes on, it is no chance."""
    record = make(1, [2.0, 2.1, 2.0, 2.3], [1.0, 1.2, 1.0, 0.9], [0.1] * 4, matrix=matrix_with({(0, 2)}, 4))
    passes = OwnPasses((2,) * 4, (100.0,) * 4, 0.25, (400,) * 4)
    shared = replace(ids({(0, 2): 1}, rows=1), passes=passes)
    judge = Judge(DetectorsConfig())
    assert judge.step(record, shared) == []
    assert kinds(judge.step(record, replace(ids({}), passes=passes))) == ["duplicate-data"]  # not by the rows
    judge, few = Judge(DetectorsConfig()), replace(shared, passes=replace(passes, distinct=(2.0,) * 4))
    found = [step for step in range(1, 41) for event in judge.step(record, few) if event.kind == "duplicate-data"]
    assert found == [32]


@pytest.mark.parametrize(("content_known", "step"), [(True, 32), (False, 3)])
def test_gradients_that_are_nearly_equal_may_come_of_other_rows(content_known: bool, step: int) -> None:
    """A classifier of which one class is rare: most batches have the other alone, and teach it the same."""
    matrix = matrix_with({(0, 2)}, 4)
    record = make(1, [2.0, 2.1, 2.0, 2.3], [1.0, 1.2, 1.0 + 1e-6, 0.9], [0.1] * 4, matrix=matrix)
    passes = OwnPasses((2,) * 4, (100.0,) * 4, 0.25, (400,) * 4) if content_known else None
    judge, others = Judge(DetectorsConfig()), replace(ids({}), passes=passes)
    found = [step for step in range(1, 41) for event in judge.step(record, others) if event.kind == "duplicate-data"]
    assert found == [step]
    unlike = replace(record, loss=make(1, [2.0, 2.1, 2.2, 2.3], [1.0] * 4, [0.1] * 4).loss)
    judge = Judge(DetectorsConfig())
    events = [
        event for number in range(2 * step) for event in judge.step(unlike if number % step == 1 else record, others)
    ]
    assert "duplicate-data" not in kinds(events)


def test_above_the_gather_limit_the_mean_cosine_tells() -> None:
    record = make(1, [2.0] * 100, [1.0] * 100, [1.0] * 100)
    event = Judge(DetectorsConfig()).step(record, NOTHING)[0]
    assert (event.kind, len(event.ranks)) == ("duplicate-data", 100)
    assert "All 100 ranks" in event.message


def test_groups_are_connected_components() -> None:
    assert duplicate_data.groups([(3, 5), (0, 1), (1, 2)]) == [(0, 1, 2), (3, 5)]


# -- the order of the data -------------------------------------------------------------------------------------------


def epoch_of(run: Run, ranks: int, rows: int, own_permutations: bool, batch: int = 4) -> list[Event]:
    """One epoch of a sharded sampler with ``drop_last``, its coverage counted."""
    common = run.random.permutation(rows)
    shards = [(run.random.permutation(rows) if own_permutations else common)[r::ranks] for r in range(ranks)]
    seen: set[int] = set()
    events, repeated, consumed = [], 0, 0
    for step in range(rows // ranks // batch):
        for shard in shards:
            for row in shard[step * batch : (step + 1) * batch].tolist():
                consumed += 1
                repeated += row in seen
                seen.add(row)
        coverage = Coverage(consumed / rows, len(seen) / rows, repeated / rows, rows)
        events += run.judge.step(run.record(), Evidence(coverage=coverage))
    return events


def test_each_rank_its_own_permutation_is_found_with_its_coverage() -> None:
    run = Run()
    events = [e for e in epoch_of(run, 4, 2400, own_permutations=True) if not e.message.startswith("Still")]
    assert kinds(events) == ["data-order-mismatch", "low-coverage"]
    assert events[0].step < 40
    assert events[1].score == pytest.approx(0.685, abs=0.02)
    assert "68" in events[1].message
    after = [e for e in epoch_of(run, 4, 2400, own_permutations=False) if not e.message.startswith("Still")]
    assert {(e.kind, e.severity) for e in after} == {("data-order-mismatch", "info"), ("low-coverage", "info")}


def test_one_permutation_for_all_is_silent_over_epochs() -> None:
    run = Run()
    assert [event for _ in range(4) for event in epoch_of(run, 4, 1203, own_permutations=False)] == []


def test_rows_that_the_data_hold_twice_are_tolerated() -> None:
    run = Run()
    for step in range(1, 200):
        share = step * 16 / 4000
        coverage = Coverage(share, share * 0.995, share * 0.005, 4000)
        assert run.judge.step(run.record(), Evidence(coverage=coverage)) == []


# -- events ----------------------------------------------------------------------------------------------------------


def test_one_event_then_reminders_at_doubling_intervals_then_the_end() -> None:
    run = Run()
    events = run.steps(600, ids({(0, 1): 4}))
    assert [e.step for e in events] == [1, 129, 257, 513]
    assert all(e.message.startswith("Still, since step 1: ") for e in events[1:])
    assert [e.phase for e in events] == ["started", *["ongoing"] * (len(events) - 1)]
    assert [e.severity for e in run.steps(1, ids({}))] == ["info"]


def test_a_fault_that_comes_and_goes_does_not_fill_the_log() -> None:
    run, events = Run(), []
    for step in range(1000):
        events += run.steps(1, ids({(0, 1): 4} if step % 2 else {}))
    assert len(events) < 12


def test_an_outlier_ends_when_the_rank_is_like_the_others_again() -> None:
    run = Run()
    run.steps(60)
    run.until_event(30, scale=3.0)
    assert run.steps(100, scale=3.0) == []
    steps, event = run.until_event(200)
    assert (event.kind, event.severity, event.ranks) == ("outlier-rank", "info", (2,))
    assert steps < 150
    assert run.steps(150) == []


def test_the_state_survives_a_resume_through_json() -> None:
    run, other = Run(), Run()
    run.steps(70)
    run.steps(8, scale=1.5)
    other.judge.load_state_dict(json.loads(json.dumps(run.judge.state_dict(), allow_nan=False)))
    for _ in range(60):
        record = run.record(scale=1.5)
        first, second = run.judge.step(record, NOTHING), other.judge.step(record, NOTHING)
        assert first == second
    assert "outlier-rank" in {fault.kind for fault in other.judge._episodes._active.values()}
    with pytest.raises(ValueError, match="version"):
        other.judge.load_state_dict({"version": 99})


def test_nothing_measured_is_nothing_said() -> None:
    judge = Judge(DetectorsConfig())
    for step in range(1, 30):
        assert judge.step(StepRecord(step, step, None, 4), NOTHING) == []
