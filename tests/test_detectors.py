"""The detectors on made records: each finds its fault, keeps silent in health, and none is blinded by a bad number."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest

from ds_silent.config import DetectorsConfig
from ds_silent.detectors import Coverage, Evidence, Judge, duplicates
from ds_silent.detectors.explained import Explained
from ds_silent.detectors.sequential import CLIP, WITHIN, SequentialTest, _others
from ds_silent.records import DirectionStats, Event, GradNormStats, LossStats, StepRecord

NOTHING = Evidence()


class Run:
    """Healthy records of N ranks, with a fault on request."""

    def __init__(self, ranks: int = 4, seed: int = 0, rate: float = 1.0, interval: int = 1):
        self.ranks, self.number = ranks, 0
        self.random = np.random.default_rng(seed)
        self.judge = Judge(DetectorsConfig(false_alarms_per_million_steps=rate), interval)

    def record(
        self, scale: float = 1.0, loss: float = 0.0, cosine: float = 0.0, bad: int = 2, spread: float = 1.0
    ) -> StepRecord:
        self.number += 1
        losses = 2.0 + 0.2 * spread * self.random.standard_normal(self.ranks)
        norms = np.exp(0.16 * spread * self.random.standard_normal(self.ranks))
        cosines = 0.1 + 0.03 * spread * self.random.standard_normal(self.ranks)
        bad %= self.ranks
        losses[bad] += loss
        norms[bad] *= scale
        cosines[bad] += cosine
        return make(self.number, losses, norms, cosines, noise=100 + 20 * self.random.standard_normal())

    def steps(self, count: int, extras: Evidence = NOTHING, **fault: float) -> list[Event]:
        events = []
        for _ in range(count):
            events += self.judge.step(self.record(**fault), extras)  # type: ignore[arg-type]
        return events

    def until_event(self, limit: int, **fault: float) -> tuple[int, Event]:
        for step in range(1, limit + 1):
            events = [e for e in self.steps(1, **fault) if not e.message.startswith("Still")]
            if events:
                return step, events[0]
        raise AssertionError(f"nothing found in {limit} steps")


def make(step: int, losses, norms, cosines, noise: float | None = 100.0, matrix=None) -> StepRecord:  # type: ignore[no-untyped-def]
    losses, norms, cosines = (np.asarray(v, dtype=float) for v in (losses, norms, cosines))
    with np.errstate(all="ignore"):
        return StepRecord(
            step=step,
            samples=step * 4 * len(losses),
            epoch=None,
            world_size=len(losses),
            loss=LossStats(float(losses.mean()), float(losses.std()), 0.0, tuple(losses.tolist())),
            grad_norm=GradNormStats(
                "exact", float(norms.mean()), 0.1, float(norms.std() / norms.mean()), 0.0, 0.6, tuple(norms.tolist())
            ),
            direction=DirectionStats("sketch", float(cosines.mean()), 0.004, per_rank=tuple(cosines.tolist())),
            noise_scale=noise,
            cosine_matrix=matrix,
        )


def kinds(events: list[Event]) -> list[str]:
    return [event.kind for event in events]


# -- the arithmetic of the evidence ----------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [[0.3, -1.0, 2.5, 0.1], [1e9, 0.0, 0.0, -1e-9], [1.0, 1.0, 1.0, 5.0]])
def test_evidence_of_a_step_has_expectation_one_over_all_permutations(values: list[float]) -> None:
    total = np.zeros((2 * len(WITHIN), 4))
    orders = list(itertools.permutations(values))
    for order in orders:
        test = SequentialTest(1, 4, cap=math.inf)
        test.step(1, np.array([order]), np.ones(4, dtype=bool))
        total += np.exp(test._evidence[0, : 2 * len(WITHIN)])  # M_1 = L_1
    assert total / len(orders) == pytest.approx(1.0, rel=1e-12)


def test_the_others_median_and_deviation_are_those_of_the_others() -> None:
    for count in (2, 3, 4, 7, 8):
        x = np.random.default_rng(count).standard_normal(count) * 1e3 + 1e6
        medians, deviations = (rows[0] for rows in _others(x[None]))
        for index in range(count):
            rest = np.delete(x, index)
            assert medians[index] == pytest.approx(np.median(rest), rel=1e-12)
            expected = rest.std(ddof=1) if count > 2 else 0.0
            assert deviations[index] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("law", ["cauchy", "skewed", "restless"])
def test_false_alarms_stay_below_the_stated_rate_without_any_assumption_on_the_values(law: str) -> None:
    run, steps, rate = Run(rate=1e5, seed=5), 1000, 1e5
    random, found = run.random, 0
    for step in range(1, steps + 1):
        restless = 1.0 + 9.0 * (step // 100 % 2)
        draw = {
            "cauchy": lambda: random.standard_cauchy(4),
            "skewed": lambda: np.exp(2 * random.standard_normal(4)),
            "restless": lambda r=restless: r * random.standard_normal(4),
        }[law]
        events = run.judge.step(make(step, draw(), np.exp(np.clip(draw(), -50, 50)), draw(), noise=None), NOTHING)
        found += sum(e.kind == "outlier-rank" and e.severity == "warning" for e in events)
    expected = rate * steps / 1e6 / 3  # the outlier detector's share
    assert found <= expected + 3 * math.sqrt(expected)


def test_a_stated_rate_makes_the_threshold() -> None:
    few, many = (Run(rate=rate).until_event(400, scale=1.5)[1] for rate in (1.0, 1e4))
    assert few.threshold == pytest.approx(math.log(3e6) + math.log(4), rel=1e-9)
    assert few.threshold - many.threshold == pytest.approx(math.log(1e4), rel=1e-9)
    assert Run(interval=10).until_event(400, scale=1.5)[1].threshold == pytest.approx(few.threshold - math.log(10))


def test_healthy_ranks_are_silent() -> None:
    for ranks in (1, 2, 4, 8):
        assert Run(ranks, seed=ranks).steps(400) == []


# -- a rank that is off ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "where", "limit"),
    [
        ({"scale": 1.5}, "gradient norm", 25),
        ({"scale": 0.6}, "gradient norm", 25),
        ({"scale": 1.1}, "gradient norm", 400),
        ({"loss": 1.0}, "loss", 15),
        ({"loss": -0.5}, "loss", 30),
        ({"cosine": -0.1}, "gradient direction", 20),
    ],
)
def test_the_rank_that_is_off_is_named(fault: dict[str, float], where: str, limit: int) -> None:
    run = Run()
    assert run.steps(60) == []
    _, event = run.until_event(limit, **fault)
    assert (event.kind, event.ranks, event.where, event.severity) == ("outlier-rank", (2,), where, "warning")
    assert event.score is not None
    assert event.threshold is not None
    assert event.score >= event.threshold
    assert "since about step" in event.message


def test_three_per_cent_is_found_in_time() -> None:
    run = Run(ranks=8, seed=3)
    run.steps(60)
    _, event = run.until_event(2000, scale=1.03)
    assert (event.kind, event.ranks, event.where) == ("outlier-rank", (2,), "gradient norm")


def test_the_onset_is_told() -> None:
    run = Run()
    run.steps(100)
    _, event = run.until_event(30, scale=3.0)
    since = int(event.message.split("step ")[1].rstrip("."))
    assert 95 <= since <= 103


def test_two_ranks_off_are_both_found() -> None:
    run, found = Run(ranks=8), set()
    run.steps(60)
    for _ in range(60):
        record = run.record(scale=3.0, bad=1)
        norms = list(record.grad_norm.per_rank or ())
        norms[5] *= 3.0
        record = replace(record, grad_norm=replace(record.grad_norm, per_rank=tuple(norms)))
        found |= {e.ranks for e in run.judge.step(record, NOTHING)}
    assert found == {(1,), (5,)}


def test_an_outlier_does_not_end_because_other_ranks_hold_the_same_rows() -> None:
    run = Run(ranks=8)
    run.steps(60)
    run.until_event(30, scale=3.0)
    events = run.steps(5, ids({(0, 1): 4}, ranks=8), scale=3.0)
    assert kinds(events) == ["duplicate-data"]


def test_of_two_ranks_none_is_blamed() -> None:
    run = Run(ranks=2)
    run.steps(60)
    _, event = run.until_event(60, scale=3.0)
    assert event.ranks == (0, 1)
    assert "disagree" in event.message
    assert "nobody can say" in event.message


@pytest.mark.parametrize("size", [3.0, 1e3, 1e300])
def test_one_spike_is_no_alarm_and_blinds_nobody(size: float) -> None:
    run = Run()
    run.steps(80)
    assert run.steps(1, scale=size, loss=size) == []
    assert run.steps(20) == []
    _, event = run.until_event(25, scale=1.6)
    assert event.ranks == (2,)


def test_spikes_do_not_enter_the_baseline_until_the_fifth_passes() -> None:
    run = Run()
    run.steps(80)
    assert kinds(run.steps(20, scale=20.0)).count("outlier-rank") == 1
    test = run.judge._outlier._test  # type: ignore[union-attr]
    assert np.nanmedian(test._spreads[:, 1]) < 0.3
    assert np.nanmax(np.abs(test._pool[:, 1, 2])) < CLIP  # what the flagged rank did was taken out again


@pytest.mark.parametrize("healthy_steps", [0, 50])
def test_a_constant_baseline_alarms(healthy_steps: int) -> None:
    judge, found = Judge(DetectorsConfig()), []
    for step in range(1, healthy_steps + 20):
        losses = [2.0, 2.0, 2.0, 2.0]
        if step > healthy_steps:
            losses[3] = 2.001
        found += judge.step(make(step, losses, [1.0] * 4, [0.1] * 4, None), NOTHING)
        if found:
            break
    assert [(e.kind, e.where, e.ranks) for e in found] == [("outlier-rank", "loss", (3,))]


def test_a_nan_hides_nothing_and_poisons_nothing() -> None:
    run = Run()
    run.steps(40)
    record = run.record()
    losses = (math.nan, *(record.loss.per_rank or ())[1:])
    bad = replace(record, loss=LossStats(math.nan, math.nan, math.nan, losses), noise_scale=math.nan)
    bad = replace(bad, direction=DirectionStats("sketch", math.nan, math.nan, per_rank=(math.nan,) * 4))
    events = run.judge.step(bad, NOTHING)
    assert [(e.kind, e.ranks, e.severity) for e in events] == [("non-finite", (0,), "error")]
    assert kinds(run.steps(1)) == ["non-finite"]  # ended
    assert run.steps(20) == []
    assert run.until_event(25, loss=1.0)[1].kind == "outlier-rank"


def test_a_rank_that_stays_nan_leaves_the_others_watched() -> None:
    run, found = Run(ranks=8), []
    run.steps(40)
    for _ in range(40):
        record = run.record(scale=3.0, bad=5)
        norms = (math.nan, *(record.grad_norm.per_rank or ())[1:])
        found += run.judge.step(replace(record, grad_norm=replace(record.grad_norm, per_rank=norms)), NOTHING)
    assert [(e.kind, e.ranks) for e in found] == [("non-finite", (0,)), ("outlier-rank", (5,))]


# -- label tokens ----------------------------------------------------------------------------------------------------


def with_tokens(run: Run, tokens: np.ndarray, scale: float = 1.0) -> list[Event]:
    """Norms and losses as noisy, and norms as large, as the tokens make them."""
    noise = np.sqrt(100.0 / tokens)
    losses = 2.0 + 0.2 * noise * run.random.standard_normal(len(tokens))
    norms = noise * np.exp(0.1 * run.random.standard_normal(len(tokens)))
    norms[1] *= scale
    run.number += 1
    record = make(run.number, losses, norms, 0.1 / noise + 0.01 * run.random.standard_normal(len(tokens)), None)
    return run.judge.step(record, Evidence(label_tokens=tuple(int(t) for t in tokens)))


def test_a_rank_with_fewer_label_tokens_never_alarms() -> None:
    run = Run()
    for _ in range(600):
        tokens = run.random.integers(80, 120, 4).astype(float)
        tokens[3] = run.random.integers(10, 30)
        assert with_tokens(run, tokens) == []


def test_tokens_dealt_at_random_explain_the_norm() -> None:
    delays = []
    for known in (True, False):
        run = Run(seed=7)
        for step in range(1, 1500):
            tokens = np.exp(run.random.uniform(3, 6, 4)).round()
            if not known:
                run.judge._outlier and run.judge._outlier._norm.load_state_dict(Explained(3).state_dict())
            if with_tokens(run, tokens, scale=1.2 if step > 100 else 1.0):
                delays.append(step - 100)
                break
        else:
            delays.append(1500)
    assert delays[0] < delays[1] / 2


# -- numbers that are none -------------------------------------------------------------------------------------------


def test_non_finite_names_the_layer_and_spreads_without_a_second_event() -> None:
    run = Run()
    first = run.judge.step(run.record(), Evidence(non_finite={1: "model.layers.3"}))
    assert [(e.kind, e.ranks, e.where) for e in first] == [("non-finite", (1,), "model.layers.3")]
    record = run.record()
    everywhere = replace(record, loss=replace(record.loss, per_rank=(math.nan,) * 4))
    assert run.judge.step(everywhere, NOTHING) == []


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
    event = run.judge.step(record, Evidence(label_tokens=(9, 9, 0, 9)))[0]
    assert (event.kind, event.ranks, event.severity) == ("zero-gradient", (2,), "error")
    assert "label token" in event.message
    event = Run().judge.step(record, Evidence(label_tokens=(9, 9, 9, 9)))[0]
    assert "label token" not in event.message


def test_stale_parameters_on_one_rank_are_told_once_and_conditional_models_are_left_alone() -> None:
    run = Run()
    events = run.steps(5, Evidence(stale_parameters=(0, 0, 3, 0)))
    assert [(e.kind, e.ranks, e.where) for e in events] == [("zero-gradient", (2,), "parameters")]
    events = run.steps(1, Evidence(stale_parameters=(0, 2, 0, 0)))
    assert [e.severity for e in events] == ["info"]  # the first has ended
    assert run.steps(5, Evidence(stale_parameters=(0, 0, 3, 0))) == []


# -- the same data ---------------------------------------------------------------------------------------------------


def ids(pairs: dict[tuple[int, int], int], rows: int = 4, ranks: int = 4) -> Evidence:
    return Evidence(duplicates=pairs, rows_per_rank=(rows,) * ranks)


def test_all_ranks_on_the_same_rows() -> None:
    run = Run()
    events = run.steps(3, ids(dict.fromkeys(itertools.combinations(range(4), 2), 4)))
    assert [(e.kind, e.ranks, e.step, e.severity) for e in events] == [("duplicate-data", (0, 1, 2, 3), 1, "error")]
    assert "All 4 ranks" in events[0].message


def test_one_pair_on_the_same_rows_and_its_end() -> None:
    run = Run()
    events = run.steps(2, ids({(0, 3): 2})) + run.steps(1, ids({}))
    assert [(e.ranks, e.severity) for e in events] == [((0, 3), "error"), ((0, 3), "info")]
    assert events[1].message.startswith("Ended")


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


def test_above_the_gather_limit_the_mean_cosine_tells() -> None:
    record = make(1, [2.0] * 100, [1.0] * 100, [1.0] * 100)
    event = Judge(DetectorsConfig()).step(record, NOTHING)[0]
    assert (event.kind, len(event.ranks)) == ("duplicate-data", 100)
    assert "All 100 ranks" in event.message


def test_groups_are_connected_components() -> None:
    assert duplicates.groups([(3, 5), (0, 1), (1, 2)]) == [(0, 1, 2), (3, 5)]


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
    assert other.judge._episodes.active("outlier-rank")
    with pytest.raises(ValueError, match="version"):
        other.judge.load_state_dict({"version": 99})


def test_a_jump_is_noted_and_a_slow_change_is_not() -> None:
    run = Run(seed=2)
    for step in range(500):
        assert run.steps(1, spread=1.0 + step / 500) == []
    events = run.steps(40, spread=40.0)
    assert {(e.kind, e.severity) for e in events} == {("drift", "info")}
    assert {e.where for e in events} <= {"loss dispersion", "gradient-norm dispersion"}


def test_nothing_measured_is_nothing_said() -> None:
    judge = Judge(DetectorsConfig())
    for step in range(1, 30):
        assert judge.step(StepRecord(step, step, None, 4), NOTHING) == []
