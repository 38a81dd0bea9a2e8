"""Ranks with rows of their own: unlike each other in health, compared with their own past, and judged by size."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest

from ds_silent.config import DetectorsConfig, EffectsConfig
from ds_silent.detectors import Judge
from ds_silent.detectors.effects import HIGH, EffectContext, effect_of
from ds_silent.detectors.likely_causes import Symptoms
from ds_silent.detectors.own_past import FEWEST, OwnPast
from ds_silent.detectors.sequential import SequentialTest
from ds_silent.detectors.symptoms import Recent, beyond, is_gradual, moved_alone
from ds_silent.measure.evidence import Evidence, LayerValues
from ds_silent.records import Dealt, Event
from tests.support.made_records import comparison_of, make

OWN = Evidence(dealt="own-shard")
AT_RANDOM = Evidence(dealt="random")


class Shards:
    """N ranks whose loss, norm and cosine have offsets and scales of their own; offsets walk, in units of the scale."""

    def __init__(self, ranks: int = 4, seed: int = 0, walk: float = 0.0, rate: float = 1.0):
        self.ranks, self.number, self.walk = ranks, 0, walk
        self.random = np.random.default_rng(seed)
        self.judge, self.log_loss = Judge(DetectorsConfig(false_alarms_per_million_steps=rate)), 0.0
        self.offsets = self.random.standard_t(3, (3, ranks)) * np.array([[0.2], [0.5], [0.03]])
        self.scales = np.array([[0.08], [0.12], [0.02]]) * np.exp(0.4 * self.random.standard_normal((3, ranks)))

    def step(self, extras: Evidence = OWN, bad: int = 1, norm: float = 1.0, loss: float = 1.0) -> list[Event]:
        self.number += 1
        self.offsets += self.walk * self.scales * self.random.standard_normal(self.offsets.shape)
        drawn = self.offsets + self.scales * self.random.standard_normal(self.offsets.shape)
        losses, norms, cosines = (
            2.0 * np.exp(drawn[0] + self.log_loss),
            np.exp(drawn[1]),
            np.clip(0.2 + drawn[2], -1.0, 1.0),
        )
        losses[bad] *= loss
        norms[bad] *= norm
        return self.judge.step(make(self.number, losses, norms, cosines), extras)

    def steps(self, count: int, extras: Evidence = OWN, **change: float) -> list[Event]:
        return [event for _ in range(count) for event in self.step(extras, **change)]  # type: ignore[arg-type]


def alarms(events: list[Event]) -> list[Event]:
    return [event for event in events if event.severity != "info"]


@pytest.mark.parametrize(("dealt", "says"), [("unknown", True), ("own-shard", False)])
def test_a_note_about_data_says_what_makes_an_alarm_of_it(dealt: Dealt, says: bool) -> None:
    told = Shards().steps(60, Evidence(dealt=dealt))
    remedies = [event.remedy for event in told if event.kind == "outlier-rank" and event.phase == "started"]
    assert remedies
    assert all(('"detectors": {"dealt": "random"}' in remedy) == says for remedy in remedies)


# -- the evidence ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slack", [0.0, 0.3, 1.0])
def test_shifts_within_half_of_the_slack_make_no_evidence(slack: float) -> None:
    """The guarantee itself: over all permutations of any noise, each rank's offset as unfavourable as it may be."""
    random, ranks = np.random.default_rng(5), 4
    noise = random.standard_cauchy(ranks)
    gains = []
    for order in itertools.permutations(range(ranks)):
        values = noise[list(order)].copy()
        values += np.where(np.arange(ranks) == 0, slack / 2.0, -slack / 2.0)  # rank 0 high, all others low
        test = SequentialTest(1, ranks, 50.0)
        known = np.ones((1, ranks), dtype=bool)
        residuals = np.clip(values, -50.0, 50.0)[None]
        off = np.abs(np.array([0.125, 0.25, 0.5, 1.0, 2.0, 4.0]))[:, None] * slack
        gains.append(np.exp(test._gain(slice(None), residuals, known, known)[0][0, :6] - off)[:, 0])
    assert (np.mean(gains, axis=0) <= 1.0 + 1e-9).all()
    if slack == 0.0:
        assert np.mean(gains, axis=0) == pytest.approx(np.ones(6))


def test_the_slack_is_taken_off_every_bet() -> None:
    values, healthy = np.array([[3.0, 0.1, -0.2, 0.0]]), np.ones(4, dtype=bool)
    plain, slackened = SequentialTest(1, 4, 50.0), SequentialTest(1, 4, 50.0)
    plain.step(1, values, healthy)
    slackened.step(1, values, healthy, np.full((1, 4), 0.5))
    _, scales, _ = SequentialTest(1, 4, 50.0)._residuals(values, np.isfinite(values), np.isfinite(values))
    tilts = np.array([0.125, 0.25, 0.5, 1.0, 2.0, 4.0])
    taken = (plain.gain - slackened.gain)[0, :6]
    assert taken == pytest.approx(tilts[:, None] * (0.5 / scales[0])[None])


# -- one rank's past ---------------------------------------------------------------------------------------------------


def follow(past: OwnPast, rows: np.ndarray) -> list[np.ndarray]:
    """Deviations of each step of (T, N) values, one series."""
    healthy, found = np.ones(rows.shape[1], dtype=bool), []
    for row in rows:
        found.append(past.step(past.moved(row[None]), row[None], healthy)[0][0])
    return found


def test_offsets_and_scales_of_ranks_vanish() -> None:
    random = np.random.default_rng(0)
    offsets, scales = np.array([0.0, 5.0, -3.0, 100.0, 1.0, 2.0]), np.array([1.0, 10.0, 0.1, 1.0, 3.0, 0.5])
    rows = offsets + scales * random.standard_normal((800, 6))
    late = np.array(follow(OwnPast(1, 6, 128, np.zeros(1)), rows)[400:])
    assert np.abs(late.mean(axis=0)).max() < 0.25
    assert (late.std(axis=0) > 0.7).all()
    assert (late.std(axis=0) < 1.5).all()


def excess(rows: np.ndarray) -> list[float]:
    """The largest deviation beyond the slack, of each step."""
    past, healthy, found = OwnPast(1, 4, 16, np.zeros(1)), np.ones(4, dtype=bool), []
    for row in rows:
        deviations, slack = past.step(past.moved(row[None]), row[None], healthy)
        found.append(float(np.nan_to_num(np.abs(deviations) - slack).max()))
    return found


def test_what_all_ranks_do_together_is_no_change() -> None:
    noise = 0.5 * np.random.default_rng(1).standard_normal((300, 4))
    rows = np.cumsum(np.ones((300, 4)), axis=0) + np.array([0.0, 1.0, 2.0, 3.0])
    rows[150:] *= 2.0  # also where the ranks' offsets answer by as much
    together, alone = excess(rows + noise), excess(noise)
    assert max(together[40:150]) < max(alone[40:150]) + 0.5
    assert max(together[150:]) < max(alone[150:]) + 0.5


def test_nothing_is_compared_before_a_past_is_known() -> None:
    found = follow(OwnPast(1, 3, 16, np.zeros(1)), np.random.default_rng(2).standard_normal((40, 3)))
    assert all(np.isnan(one).all() for one in found[: 2 * FEWEST])
    assert np.isfinite(found[2 * FEWEST + 1]).all()


def test_a_past_survives_a_checkpoint() -> None:
    rows = np.random.default_rng(3).standard_normal((60, 5))
    one, other = OwnPast(1, 5, 16, np.zeros(1)), OwnPast(1, 5, 16, np.zeros(1))
    follow(one, rows[:40])
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert np.array(follow(one, rows[40:])) == pytest.approx(np.array(follow(other, rows[40:])))


# -- what is said ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "walk"), [(2, 0.0), (4, 0.02), (8, 0.02), (64, 0.0)])
@pytest.mark.long
def test_unlike_shards_raise_no_alarm(ranks: int, walk: float) -> None:
    run = Shards(ranks, seed=ranks, walk=walk)
    assert alarms(run.steps(600)) == []


def test_the_same_ranks_would_be_alarms_if_rows_were_dealt_at_random() -> None:
    assert alarms(Shards(8, seed=8).steps(200, AT_RANDOM))


@pytest.mark.parametrize(("factor", "limit"), [(2.0, 30), (1.5, 60), (0.5, 30)])
@pytest.mark.long
def test_a_gradient_that_changes_beside_a_plain_loss_is_an_alarm(factor: float, limit: int) -> None:
    run = Shards(8, seed=1)
    assert alarms(run.steps(200)) == []
    found = alarms(run.steps(limit, norm=factor))
    assert [(event.kind, event.ranks, event.where) for event in found] == [("outlier-rank", (1,), "gradient norm")]
    assert found[0].effect == pytest.approx(factor, rel=0.15)
    assert "than before" in found[0].message
    since = int(found[0].message.split("since about step ")[1].split(".")[0])
    assert 190 <= since <= 206
    ended = run.steps(60)
    assert alarms(ended) == []
    assert any(event.message.startswith("Ended") for event in ended)


@pytest.mark.long
def test_a_gradient_that_grows_step_by_step_is_a_note() -> None:
    """A jump is told apart from it most of the time."""
    told = {"grows": 0, "jumps": 0}
    for seed in range(4):
        grows, jumps = Shards(8, seed), Shards(8, seed)
        assert alarms(grows.steps(120) + jumps.steps(120)) == []
        told["grows"] += bool(alarms([e for k in range(100) for e in grows.step(norm=3.0 ** min(1.0, k / 60))]))
        told["jumps"] += bool(alarms(jumps.steps(30, norm=2.0)))
    assert told["grows"] <= 1, told
    assert told["jumps"] == 4, told


@pytest.mark.parametrize("where", ["loss", "gradient norm", "gradient direction"])
def test_gradual_is_where_a_bent_line_leaves_smaller_squares_than_a_jump(where: str) -> None:
    """Against least squares with every place for the bend, or the jump, in its turn."""
    random, said = np.random.default_rng(11), []
    for case in range(60):
        since, count = 41, int(random.integers(3, 40))
        steps, recent = np.arange(1, since + count), Recent(3)
        course = 0.02 * (steps - since).clip(0) if case % 2 else 0.4 * (steps >= since)
        values = 0.1 * random.standard_normal((len(steps), 3))
        values[:, 1] += course * random.uniform(0.3, 1.5)
        for step, row in zip(steps.tolist(), values, strict=True):
            columns = [np.exp(row) if where == name else np.ones(3) for name in ("loss", "gradient norm")]
            recent.append(make(step, *columns, row if where == "gradient direction" else np.zeros(3)), OWN)
        seen = (values[:, 1] - np.median(values[:, [0, 2]], axis=1))[since - 33 :]
        left = {"bend": math.inf, "jump": math.inf}
        for place in range(len(seen) - 1):
            past = np.arange(len(seen)) - place
            for shape, column in (("bend", past.clip(0)), ("jump", past > 0)):
                known = np.stack([np.ones(len(seen)), column.astype(float)], axis=1)
                fit = np.linalg.lstsq(known, seen, rcond=None)[0]
                left[shape] = min(left[shape], float(np.square(seen - known @ fit).sum()))
        assert is_gradual(*recent.around(1, [0, 2], since, where)) == (left["bend"] < left["jump"]), case
        said.append(left["bend"] < left["jump"])
    assert 15 < sum(said) < 45


@pytest.mark.parametrize("where", ["loss", "gradient norm", "gradient direction"])
def test_beyond_is_how_far_a_rank_is_from_what_it_has_been(where: str) -> None:
    """Against the medians of as many steps in a row, 32 at most, one by one."""
    random, since = np.random.default_rng(5), 101
    for shift, steps in ((0.0, 120), (0.3, 120), (0.9, 120), (-0.9, 120), (0.3, 140), (-0.9, 140)):
        values, recent = 0.1 * random.standard_normal((steps, 3)), Recent(3)
        values[:, 1] += 0.4 * np.sin(np.arange(steps) / 9.0) + shift * (np.arange(1, steps + 1) >= since)
        for step, row in enumerate(values, 1):
            columns = [np.exp(row) if where == name else np.ones(3) for name in ("loss", "gradient norm")]
            recent.append(make(step, *columns, row if where == "gradient direction" else np.zeros(3)), OWN)
        apart = [float(row[1] - np.median(row[[0, 2]])) for row in values]
        size = min(32, steps - since + 1)
        usual = [float(np.median(apart[start : start + size])) for start in range(since - 1 - size + 1)]
        now = float(np.median(apart[since - 1 :]))
        wanted = max(now - max(usual), min(usual) - now, 0.0)
        assert beyond(*recent.around(1, [0, 2], since, where)) == pytest.approx(wanted, abs=1e-12)
        assert (wanted > 0.2) == (abs(shift) > 0.5), (shift, wanted)
    assert beyond(*recent.around(1, [0, 2], 32, where)) is None  # 31 steps say little of what is usual


@pytest.mark.long
def test_a_norm_that_comes_and_goes_is_a_note_at_most() -> None:
    """As of rows that are learnt by heart, where what is usual for a moment is not what is usual."""
    for seed in range(4):
        run, random, level = Shards(4, seed), np.random.default_rng(seed), 0.0
        for stretch in range(17):
            towards = float(random.choice([-0.35, 0.0, 0.35]))
            for _ in range(24):
                level += (towards - level) / 8.0
                events = run.step(norm=math.exp(level))
                assert alarms(events) == [] or stretch < 7, seed  # before, nobody knows that it comes and goes


@pytest.mark.parametrize("seed", [0, 1, 4])
def test_a_change_that_few_steps_do_not_show_is_weighed_again(seed: int) -> None:
    """Twice the norm among norms that vary by a third from step to step."""
    run = Shards(8, seed)
    run.scales *= 3.0
    assert alarms(run.steps(300)) == []
    run.judge.load_state_dict(json.loads(json.dumps(run.judge.state_dict())))
    found = [event for _ in range(7) for event in alarms(run.steps(10, norm=2.0))]
    assert [event.ranks for event in found] == [(1,)]


def test_a_loss_that_changes_with_the_gradient_is_a_note_that_speaks_of_data() -> None:
    run = Shards(8, seed=2)
    run.steps(200)
    events = run.steps(60, norm=1.6, loss=1.4)
    assert alarms(events) == []
    notes = [event for event in events if event.ranks == (1,) and "since about step" in event.message]
    assert len(notes) == 1
    assert "data are of another kind" in notes[0].message
    assert "swap" not in notes[0].remedy
    assert [e for e in run.steps(300, norm=1.6, loss=1.4) if e.ranks == (1,)] == []  # it is the rank's past now


@pytest.mark.parametrize("healthy", [*range(186, 194), 200])  # step 192 is one of the looks at the highest losses
def test_a_loss_above_all_that_this_run_has_had_is_an_alarm(healthy: int) -> None:
    run = Shards(8, seed=3)
    run.steps(healthy)
    found = alarms(run.steps(40, norm=3.0, loss=8.0))
    assert [(event.kind, event.ranks) for event in found] == [("outlier-rank", (1,))]


def test_what_is_a_hundredfold_is_an_alarm_at_its_third_step() -> None:
    run = Shards(4, seed=4)
    run.steps(10)  # too few for the windows
    found = alarms(run.steps(3, norm=100.0))
    assert [(event.step, event.ranks) for event in found] == [(13, (1,))]


def test_one_spike_is_no_alarm() -> None:
    run = Shards(4, seed=4)
    run.steps(100)
    assert alarms(run.steps(1, norm=100.0, loss=50.0)) == []
    assert alarms(run.steps(100)) == []


def test_a_rank_that_is_unlike_from_the_beginning_is_a_note() -> None:
    run = Shards(4, seed=5)
    events = run.steps(300, norm=3.0, loss=1.5)
    assert alarms(events) == []
    note = next(event for event in events if event.ranks == (1,))
    assert "data are of another kind" in note.message
    assert "By chance alone" in note.message


@pytest.mark.parametrize("seed", range(4))
def test_where_nothing_has_changed_no_step_is_named(seed: int) -> None:
    """What ranks are to each other becomes sure one rank after the other, at a step of no meaning."""
    run = Shards(4, seed)
    run.offsets[:] = [[0.0, 0.6, -0.5, 0.2]]
    notes = [event.message for event in run.steps(120) if event.kind == "outlier-rank"]
    assert notes
    assert not [message for message in notes if "since about step" in message]


@pytest.mark.parametrize(("apart", "noted"), [(0.03, False), (0.5, True)])
def test_a_note_of_unlike_rows_is_worth_reading(apart: float, noted: bool) -> None:
    """A difference of a few hundredths is sure after some hundred steps, and nobody can do anything about it."""
    run = Shards(4, seed=2)
    run.offsets[:], run.scales = [[0.0, apart, 0.0, 0.0]], run.scales / 10.0
    run.offsets[2] = 0.0
    notes = [event for event in run.steps(200) if event.kind == "outlier-rank"]
    assert bool(notes) is noted


def test_a_first_loss_that_no_rows_have_is_an_alarm() -> None:
    run = Shards(4, seed=6)
    run.offsets[:] = 0.0
    found = alarms(run.steps(100, norm=20.0, loss=20.0))
    assert [(event.kind, event.ranks) for event in found] == [("outlier-rank", (1,))]


def test_another_deal_begins_the_comparison_anew() -> None:
    run = Shards(8, seed=8)
    run.steps(200)
    run.offsets[:] = 0.0
    assert alarms(run.steps(300, AT_RANDOM)) == []
    found = alarms(run.steps(60, AT_RANDOM, norm=1.5))
    assert (1,) in {event.ranks for event in found}


def test_a_change_against_the_own_past_is_set_aside_where_ranks_become_comparable() -> None:
    run = Shards(8, seed=1)
    run.steps(200)
    assert alarms(run.steps(60, norm=1.5))
    run.offsets[:] = 0.0
    assert any(event.message.startswith("Ended: outlier-rank") for event in run.step(AT_RANDOM))
    test = comparison_of(run.judge).outlier
    assert test is not None
    assert test.standing() == []


def test_a_resume_keeps_each_ranks_past() -> None:
    run, later = Shards(8, seed=1), Judge(DetectorsConfig())
    run.steps(200)
    later.load_state_dict(json.loads(json.dumps(run.judge.state_dict())))
    run.judge = later
    found = alarms(run.steps(60, norm=1.5))
    assert [(event.ranks, event.where) for event in found] == [((1,), "gradient norm")]


# -- sizes -------------------------------------------------------------------------------------------------------------

PLAIN = Symptoms(loss=1.0, norm=1.0, cosine=0.3, peers_cosine=0.3, ranks=4, cosine_noise=0.01)
CHANGED = EffectContext(random=False, own_past=True)
ALWAYS = EffectContext(random=False)


@pytest.mark.parametrize(
    ("changes", "setting", "severity"),
    [
        ({"norm": 1.02}, EffectContext(random=True), "info"),
        ({"norm": 1.06}, EffectContext(random=True), "warning"),
        ({"loss": 1.02}, EffectContext(random=True), "info"),
        ({"loss": 0.9}, EffectContext(random=True), "warning"),
        ({"cosine": 0.25}, EffectContext(random=True), "warning"),
        ({"norm": 1.2}, CHANGED, "info"),
        ({"norm": 1.3}, CHANGED, "warning"),
        ({"norm": 0.7}, CHANGED, "warning"),
        ({"norm": 0.7}, replace(CHANGED, norm_beyond=0.2), "info"),
        ({"norm": 0.7}, replace(CHANGED, norm_beyond=0.3), "warning"),
        ({"norm": 1.3, "loss": 1.2}, CHANGED, "info"),
        ({"norm": 1.3, "loss": None}, CHANGED, "info"),
        ({"cosine": 0.05}, CHANGED, "warning"),
        ({"cosine": 0.05, "loss": 1.5}, CHANGED, "info"),
        ({"cosine": 0.2}, CHANGED, "info"),
        ({"loss": 3.0, "norm": 3.0}, CHANGED, "info"),
        ({"loss": 3.0, "norm": 3.0}, replace(CHANGED, above_highest=2.1), "warning"),
        ({"norm": 1.3}, replace(CHANGED, sudden=False), "info"),
        ({"loss": 3.0, "norm": 3.0, "inputs": 10.0}, replace(CHANGED, inputs_beyond=5.0), "warning"),
        ({"loss": 3.0, "norm": 3.0, "inputs": 10.0}, replace(CHANGED, inputs_beyond=4.9), "info"),
        ({"loss": 3.0, "norm": 3.0, "inputs": 10.0}, replace(CHANGED, inputs_beyond=9.0, sudden=False), "info"),
        ({"norm": 90.0}, ALWAYS, "info"),
        ({"loss": 4.0, "norm": 4.0}, ALWAYS, "info"),
        ({"loss": 4.0, "norm": 4.0}, replace(ALWAYS, first_loss=HIGH), "warning"),
    ],
)
def test_size_decides(changes: dict[str, float], setting: EffectContext, severity: str) -> None:
    assert effect_of(replace(PLAIN, **changes), "gradient norm", EffectsConfig(), setting).severity == severity


def test_a_norm_that_was_not_found_to_differ_does_not_decide() -> None:
    """Where rows are few, norms scatter as far."""
    assert effect_of(replace(PLAIN, norm=1.45), "gradient direction", EffectsConfig(), CHANGED).severity == "info"
    assert effect_of(replace(PLAIN, norm=1.45), "gradient norm", EffectsConfig(), CHANGED).severity == "warning"


def test_sizes_are_the_users() -> None:
    sizes = EffectsConfig(gradient_norm=0.01, changed_norm=0.1)
    assert effect_of(replace(PLAIN, norm=1.02), "loss", sizes, EffectContext(random=True)).severity == "warning"
    assert effect_of(replace(PLAIN, norm=1.12), "loss", sizes, CHANGED).severity == "warning"


# -- layers ------------------------------------------------------------------------------------------------------------


class OwnLayers:
    """Layers whose norms each rank's rows make; beside a loss that all ranks have."""

    def __init__(self, ranks: int = 4, layers: int = 7, seed: int = 0):
        self.random, self.number = np.random.default_rng(seed), 0
        self.offsets = self.random.standard_normal((ranks, layers))
        self.names, self.judge = tuple(f"layers.{layer}" for layer in range(layers)), Judge(DetectorsConfig())

    def steps(self, count: int, factor: float = 1.0, loss: float = 1.0, dealt: str = "own-shard") -> list[Event]:
        events = []
        for _ in range(count):
            self.number += 1
            norms = self.offsets + 0.1 * self.random.standard_normal(self.offsets.shape)
            norms[2, 3] += math.log(factor)
            cosines = 0.15 + 0.05 * self.random.standard_normal(norms.shape)
            losses = 2.0 + 0.1 * self.random.standard_normal(len(norms))
            losses[2] *= loss
            whole = np.sqrt(np.exp(2.0 * norms).sum(axis=1))
            values = LayerValues(self.names, norms, cosines)
            record = make(self.number, losses, whole, cosines.mean(axis=1))
            events += self.judge.step(record, Evidence(dealt=dealt, layers=values))  # type: ignore[arg-type]
        return events


def test_unlike_layers_raise_no_alarm() -> None:
    assert alarms(OwnLayers().steps(400)) == []
    assert alarms(OwnLayers().steps(100, dealt="random"))  # as they would


def test_a_layer_that_changes_beside_a_plain_loss_is_an_alarm() -> None:
    run = OwnLayers(seed=1)
    assert alarms(run.steps(150)) == []
    found = alarms(run.steps(40, factor=2.0))
    assert [(event.ranks, event.where) for event in found][:1] == [((2,), "layers.3")]


def test_a_layer_that_begins_to_learn_on_all_ranks_is_a_note() -> None:
    """On one of them more than on the others, as its rows are louder: once found by 3 of 3 healthy trainings."""
    for seed in range(4):
        run = OwnLayers(seed=seed)
        events = run.steps(60)
        moves = np.array([0.3, 0.7, 0.9, 0.0])
        for k in range(60):
            run.offsets[:, 3] += moves * (0.12 * 0.88**k)
            events += run.steps(1)
        events += run.steps(60)
        assert [event for event in alarms(events) if str(event.where).startswith("layers")] == [], seed


@pytest.mark.parametrize(("others", "common", "alone"), [(0.0, 0.0, True), (0.3, 0.0, False), (0.0, 0.8, False)])
def test_a_rank_moves_alone_where_the_others_do_not(others: float, common: float, alone: bool) -> None:
    """By 0.7; against twice the second largest move of the others, and what all ranks did in another statistic."""
    random = np.random.default_rng(0)
    before, after = (0.02 * random.standard_normal((count, 5)) for count in (110, 10))
    before[:40] += 5.0  # long before: what counts are the 64 steps right before
    after[:, 1] += 0.7
    after[:, 3:] += others
    after[:, 4] += others
    moves = np.median(after, axis=0) - np.median(before[-64:], axis=0)
    theirs = sorted(abs(move - np.median(moves[[0, 2, 3, 4]])) for move in moves[[0, 2, 3, 4]])
    wanted = abs(moves[1] - np.median(moves[[0, 2, 3, 4]])) >= max(2.0 * theirs[-1], common)
    assert moved_alone(before, after, 1, [0, 2, 3, 4], common) is bool(wanted) is alone
    after += 0.9  # all ranks: farther than the one by itself
    assert not moved_alone(before, after, 1, [0, 2, 3, 4], 0.0)


def test_a_norm_that_changes_while_all_losses_fall_is_a_note() -> None:
    """The same change once they stand is an alarm."""
    for falls, found in ((2.0, 0), (0.0, 1)):
        run = Shards(8, seed=1)
        events = run.steps(150)
        for k in range(60):
            run.log_loss = -falls * min(1.0, k / 30)
            events += run.step(norm=1.0 if k < 10 else 1.6)
        assert (len(alarms(events)) > 0) == bool(found), falls


def test_a_layer_that_changes_with_the_loss_is_a_note() -> None:
    run = OwnLayers(seed=1)
    run.steps(150)
    events = run.steps(60, factor=2.0, loss=1.5)
    assert alarms(events) == []
    assert any("data are of another kind" in event.message for event in events)
