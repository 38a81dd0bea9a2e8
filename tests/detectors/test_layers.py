"""One rank whose gradient is off in one layer: named with the layer, once, with a false-alarm rate that is shared."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ds_silent.config import DetectorsConfig
from ds_silent.detectors import Judge
from ds_silent.detectors.layer_evidence import CLIP, WITHIN, LayerEvidence
from ds_silent.detectors.layers import LayerTest
from ds_silent.exchange.observation import EachRank, Gathered
from ds_silent.measure.evidence import Evidence, LayerValues
from ds_silent.measure.record import layer_values
from ds_silent.records import Event
from tests.support.made_observations import gathered_of
from tests.support.made_records import Run, comparison_of, make

LOG_STEPS = math.log(8e6)


class Layers:
    """Gradients of N ranks by layer: what a rank's layers share varies more than what they do not."""

    def __init__(self, ranks: int, layers: int, seed: int = 0, sketch: int | None = 64):
        self.ranks, self.names = ranks, tuple(f"layers.{layer}" for layer in range(layers))
        self.random, self.sketch = np.random.default_rng(seed), sketch
        self.test, self.number = LayerTest(ranks, LOG_STEPS), 0

    def values(self, factor: float = 1.0, layer: int | None = None, rank: int | None = None) -> LayerValues:
        """``factor`` on the gradient of one layer (of all, where none is given) of one rank (the last)."""
        bad = self.ranks - 1 if rank is None else rank
        size, count = (self.ranks, len(self.names)), len(self.names)
        norms = 0.3 * self.random.standard_t(4, (self.ranks, 1)) + 0.12 * self.random.standard_t(4, size)
        norms = norms + np.linspace(-1.0, 1.0, count)
        cosines = 0.15 + 0.05 * self.random.standard_normal(size)
        if self.sketch:
            cosines = cosines + self.random.standard_normal(size) / math.sqrt(self.sketch)
        place = slice(None) if layer is None else layer
        with np.errstate(divide="ignore"):
            norms[bad, place] += np.log(abs(factor))
        cosines[bad, place] *= np.sign(factor) if factor else np.nan
        return LayerValues(self.names, norms, cosines if self.sketch else None)

    def steps(self, count: int, tokens: np.ndarray | None = None, **fault: float) -> list[tuple[int, ...]]:
        found: list[tuple[int, ...]] = []
        for _ in range(count):
            self.number += 1
            drawn = self.random.integers(80, 120, self.ranks) if tokens is None else tokens
            found = [f.ranks for f in self.test.step(self.number, self.values(**fault), drawn)]  # type: ignore[arg-type]
            if found:
                break
        return found


@pytest.mark.parametrize(
    ("ranks", "layers", "factor", "limit"),
    [
        *((3, 4, factor, limit) for factor, limit in ((1.5, 60), (2.0, 30), (0.5, 30), (-1.0, 80), (0.0, 12))),
        *((4, 28, factor, limit) for factor, limit in ((1.5, 50), (-1.0, 80), (0.0, 12))),
        *((8, 7, factor, limit) for factor, limit in ((1.5, 40), (0.5, 20), (-1.0, 60))),
        (64, 28, 1.5, 40),
        (200, 28, 1.5, 40),
    ],
)
def test_the_rank_and_its_layer_are_named(ranks: int, layers: int, factor: float, limit: int) -> None:
    run = Layers(ranks, layers, sketch=64 if ranks <= 64 else None)
    bad = layers // 2
    assert run.steps(60) == []
    assert run.steps(limit, factor=factor, layer=bad) == [(ranks - 1,)]
    finding = run.test.standing()[0]
    assert (finding.kind, finding.where) == ("outlier-rank", f"layers.{bad}")
    assert finding.score is not None
    assert finding.threshold is not None
    assert finding.score >= finding.threshold >= LOG_STEPS + math.log(ranks)
    assert 50 <= finding.since <= run.number
    word = "zero" if factor == 0.0 else "agrees less" if factor < 0 else "larger" if factor > 1 else "smaller"
    assert word in finding.message


@pytest.mark.parametrize("factor", [1.5, 10.0, -1.0])
def test_a_whole_gradient_that_is_off_is_no_layers_business(factor: float) -> None:
    run = Layers(8, 7)
    assert run.steps(60) == []
    assert run.steps(300, factor=factor) == []


def test_a_layer_is_not_larger_where_all_others_are_cut() -> None:
    """One rank clips each parameter by itself before the reduction, and one layer has always been small enough."""
    run = Layers(8, 7)
    assert run.steps(60) == []
    for _ in range(60):
        run.number += 1
        log_norms = run.values().log_norms
        log_norms[-1, :] = np.minimum(log_norms[-1], np.where(np.arange(7) == 3, np.inf, log_norms[:-1].min(0) - 2.0))
        run.test.step(run.number, LayerValues(run.values().names, log_norms, None), [100] * 8)
    [finding] = run.test.standing()
    assert finding.ranks == (7,)
    assert "larger" not in finding.message
    assert "times what it is on the other ranks, and its other layers" in finding.message
    assert "clipping or scaling before the reduction" in finding.remedy


def test_of_two_ranks_none_is_blamed() -> None:
    run = Layers(2, 5)
    assert run.steps(60) == []
    assert run.steps(200, factor=3.0, layer=2) == [(0, 1)]
    assert "nobody can say" in run.test.standing()[0].message


def test_it_ends_when_the_layer_is_right_again() -> None:
    run = Layers(8, 7)
    run.steps(60)
    assert run.steps(60, factor=3.0, layer=2)
    for _ in range(200):
        run.number += 1
        if not run.test.step(run.number, run.values(), [100] * 8):
            break
    else:
        raise AssertionError("never ended")
    assert run.steps(60, factor=3.0, layer=4) == [(7,)]


@pytest.mark.parametrize(("ranks", "layers"), [(3, 4), (4, 12), (8, 28)])
@pytest.mark.long
def test_health_is_silent_at_a_rate_ten_thousand_times_the_default(ranks: int, layers: int) -> None:
    run = Layers(ranks, layers, seed=ranks)
    run.test = LayerTest(ranks, math.log(800))  # one false alarm in 800 steps is allowed
    begun = before = 0
    for step in range(1, 2001):
        standing = len(run.test.step(step, run.values(), run.random.integers(80, 120, ranks).tolist()))
        begun, before = begun + max(0, standing - before), standing
    assert begun <= 5  # 2.5 are allowed; more than 5 happen once in 20 runs of a test that uses its allowance up


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.long
def test_health_is_silent_after_rows_turn_out_to_be_dealt_at_random(ranks: int, resumed: bool) -> None:
    """Against its own past a rank is measured in units of its own scale, and against the others in their own."""
    highest = []
    for seed in range(12):
        run, scores = Layers(ranks, 5, seed=seed), []
        for step in range(1, 261):
            if resumed and step == 111:
                state, run.test = json.loads(json.dumps(run.test.state_dict())), LayerTest(ranks, LOG_STEPS)
                run.test.load_state_dict(state)
            values = run.values()
            calm = replace(values, log_norms=values.log_norms / 4.0)
            run.test.step(step, calm, [8.0] * ranks, random=step > 110)
            scores += [score.score for score in run.test.scores]
        highest.append(max(scores))
    # of one run at most a tenth reaches this: the mean evidence against a rank is the number of steps
    assert np.median(highest) < math.log(10 * ranks * 260)
    assert max(highest) < run.test.scores[0].threshold


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.long
def test_health_is_silent_after_a_layer_begins_to_be_trained(ranks: int) -> None:
    highest = []
    for seed in range(20):
        run, scores = Layers(ranks, 5, seed=seed), []
        for step in range(1, 201):
            values = run.values()
            if step <= 40:
                values.log_norms[:, 0] = -np.inf
                assert values.cosines is not None
                values.cosines[:, 0] = np.nan
            run.test.step(step, values, [8.0] * ranks)
            scores += [score.score for score in run.test.scores]
        highest.append(max(scores))
    assert np.quantile(highest, 0.9) < math.log(10 * ranks * 200)  # as in the test above


def test_the_evidence_of_one_step_has_expectation_one() -> None:
    """The guarantee itself, exactly: over all permutations of any values, with any past of the same ranks."""
    random, ranks = np.random.default_rng(3), 5
    values = random.standard_cauchy(ranks)
    gains = np.zeros((2 * len(WITHIN), ranks))
    for turn in range(ranks):
        test = LayerEvidence(ranks)
        test.start(1)
        rolled = np.clip(np.roll(values, turn)[None], -CLIP, CLIP)
        known = np.ones((1, ranks), dtype=bool)
        test._grow(1, rolled, known, known, None)
        gains += test.gain[: 2 * len(WITHIN), 0]
    assert gains / ranks == pytest.approx(np.ones_like(gains))


def test_more_layers_cost_their_logarithm() -> None:
    few, many = LayerEvidence(4), LayerEvidence(4)
    few.start(3)
    many.start(57)
    for test in (few, many):
        test.of_series[0, 1] = 1e9
    assert float(few.score()[1] - many.score()[1]) == pytest.approx(math.log(56 / 2))


def test_label_tokens_that_are_dealt_unevenly_are_no_alarm() -> None:
    """The embedding's share of the gradient follows the tokens; one rank has few, always."""
    run, found = Layers(4, 6), []
    for step in range(1, 600):
        tokens = run.random.integers(80, 120, 4)
        tokens[3] = run.random.integers(10, 30)
        seen = run.values()
        seen.log_norms[:, 0] -= 0.5 * np.log(tokens / 100)
        found += run.test.step(step, seen, tokens.tolist())
    assert found == []


def test_what_is_not_known_poisons_nothing() -> None:
    run = Layers(4, 6)
    run.steps(40)
    seen = run.values()
    seen.log_norms[1] = math.nan
    seen.log_norms[2, 3] = math.inf
    assert seen.cosines is not None
    seen.cosines[:] = math.nan
    run.number += 1
    assert run.test.step(run.number, seen, None) == []
    assert run.test.step(run.number, None, None) == []
    assert np.isfinite(run.test._test.score()).all()
    assert run.steps(60, factor=2.0, layer=1) == [(3,)]


@pytest.mark.filterwarnings("error")  # numpy's would be printed beside the training's own lines
@pytest.mark.parametrize("where", [(slice(None), 2), (1, slice(None)), (slice(None), slice(None))])
def test_a_gradient_of_zero_is_silent(where: tuple[Any, Any]) -> None:
    """Of a layer on all ranks, of one rank in all layers, which another detector reports, and of all."""
    run = Layers(4, 5)
    for step in range(1, 200):
        seen = run.values()
        seen.log_norms[where] = -math.inf
        assert run.test.step(step, seen, [100] * 4) == []


# -- with the others ---------------------------------------------------------------------------------------------------


def judged(judge: Judge, run: Run, layers: Layers, **fault: float) -> list[Event]:
    scale = fault.pop("scale", 1.0)
    seen = layers.values(**fault)  # type: ignore[arg-type]
    return judge.step(run.record(scale=scale, bad=7), Evidence(dealt="random", layers=seen))


def test_one_fault_one_event_and_it_survives_a_resume() -> None:
    run, layers, events = Run(ranks=8), Layers(8, 7), []
    judge = Judge(DetectorsConfig())
    for _ in range(60):
        assert judged(judge, run, layers) == []
    for _ in range(40):
        events += judged(judge, run, layers, factor=20.0, layer=3, scale=3.0)  # it shows in the whole norm too
    assert [(e.kind, e.ranks) for e in events] == [("outlier-rank", (7,))]
    later = Judge(DetectorsConfig())
    later.load_state_dict(json.loads(json.dumps(judge.state_dict())))
    again = [event for _ in range(40) for event in judged(later, run, layers, factor=20.0, layer=3, scale=3.0)]
    assert again == []


def test_a_scaled_gradient_is_told_of_the_whole() -> None:
    run, layers, judge = Run(ranks=8), Layers(8, 7), Judge(DetectorsConfig())
    events = [event for _ in range(60) for event in judged(judge, run, layers)]
    events += [event for _ in range(60) for event in judged(judge, run, layers, factor=3.0, scale=3.0)]
    assert [(e.kind, e.ranks, e.where) for e in events] == [("outlier-rank", (7,), "gradient norm")]


def test_a_layer_that_is_seen_later_adds_no_event() -> None:
    run, layers, judge = Run(ranks=8), Layers(8, 7), Judge(DetectorsConfig())
    events = [event for _ in range(60) for event in judged(judge, run, layers)]
    events += [event for _ in range(80) for event in judged(judge, run, layers, factor=1.3, layer=3, scale=1000.0)]
    test = comparison_of(judge).layers
    assert test is not None
    assert [finding.ranks for finding in test.standing()] == [(7,)]
    assert [(e.kind, e.ranks, e.where) for e in events] == [("outlier-rank", (7,), "gradient norm")]


def test_rows_that_go_on_changing_are_one_note() -> None:
    run, layers, judge = Run(ranks=8), Layers(8, 7), Judge(DetectorsConfig())

    def notes(steps: int, factor: float = 1.0, layer: int = 0) -> list[tuple[int, ...]]:
        found: list[Event] = []
        for _ in range(steps):
            found += judge.step(run.record(), Evidence(layers=layers.values(factor, layer)))
        return [event.ranks for event in found if event.message.startswith("Rank 7's data")]

    assert notes(200) == []
    assert notes(60, factor=2.0, layer=3) == [(7,)]
    assert notes(60, factor=0.4, layer=1) == []
    assert notes(60, factor=2.0, layer=4) == []
    assert notes(80) == []
    comparison = comparison_of(judge)
    [(rank, noted)] = comparison._noted.items()
    again = Event(1, "outlier-rank", "info", (rank,), None, None, None, "", "")
    assert comparison._new_notes(noted + 255, [again]) == []
    assert comparison._new_notes(noted + 256, [again]) == [again]


def test_both_share_one_detectors_rate() -> None:
    judge = Judge(DetectorsConfig(false_alarms_per_million_steps=1.0))
    judge.step(make(1, [1.0] * 4, [1.0] * 4, [0.1] * 4), Evidence(dealt="random"))
    outlier, layers = comparison_of(judge).outlier, comparison_of(judge).layers
    assert outlier is not None
    assert layers is not None
    over_steps, of_layers = (math.exp(-test._threshold) * 4 for test in (outlier, layers))
    # the other sixteenth of the outlier test's half is that of the test at once
    assert over_steps * 16 / 15 + of_layers == pytest.approx(1e-6 / 4)


# -- from what the ranks send ------------------------------------------------------------------------------------------


def gathered(squares: torch.Tensor, sketches: torch.Tensor | None, norm_seen: bool = True) -> Gathered:
    ranks = len(squares)
    seen = {"local.seen": [1.0] * ranks, "local.norm_seen": [float(norm_seen)] * ranks}
    made = gathered_of(1, ranks, **seen)
    return replace(made, layer_squares=squares, directions=EachRank(torch.zeros(ranks, 0), sketches, None))


def test_layer_values_are_norms_and_cosines_with_the_others() -> None:
    generator = torch.Generator().manual_seed(4)
    sketches = torch.randn(4, 3, 16, generator=generator, dtype=torch.float64)
    squares = torch.rand(4, 3, generator=generator, dtype=torch.float64)
    names = ("a", "b", "c")
    seen = layer_values(gathered(squares, sketches), names)
    assert seen is not None
    assert seen.cosines is not None
    for rank in range(4):
        for layer in range(3):
            others = sum(sketches[k, layer] for k in range(4) if k != rank)
            cosine = torch.nn.functional.cosine_similarity(sketches[rank, layer], others, dim=0)  # type: ignore[arg-type]
            assert seen.cosines[rank, layer] == pytest.approx(float(cosine))
            assert seen.log_norms[rank, layer] == pytest.approx(math.log(math.sqrt(float(squares[rank, layer]))))
    from_sketches = layer_values(gathered(squares, sketches, norm_seen=False), names)
    assert from_sketches is not None
    assert from_sketches.log_norms[1, 2] == pytest.approx(math.log(float(sketches[1, 2].norm())))
    assert layer_values(gathered(squares, None, norm_seen=False), names) is None
    above = layer_values(gathered(squares, None), names)
    assert above is not None
    assert above.cosines is None
    assert layer_values(gathered(squares, None), ("a",)) is None
    assert replace(seen, cosines=None).names == names
