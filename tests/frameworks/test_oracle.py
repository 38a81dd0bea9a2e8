"""Every number of a record against a naive float64 computation, and every weight against a run without the block."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.probe import LENGTH, ROWS
from tests.support.distributed import run_distributed
from tests.support.matrix import COVERING, FULL
from tests.support.training import DTYPES, READS_LABELS, REPLICA_INTERVAL, Case, Trace, oracle_layers, train

STEPS = 6  # twice an interval of 3, and both sides of a comparison of the replicas
RESULTS = ("aggregation-error", "unreduced-gradient", "replica-drift", "observer-off", "initial-weights-mismatch")
SKETCH_SIZE = 1024  # of tests.training.Case.config
EFFECTIVE = 1 / (1 / SKETCH_SIZE + 1 / (8 * SKETCH_SIZE))


def run_cases(
    cases: tuple[Case, ...], directory: str, trained: Callable[..., Trace] = train, observed: bool = True
) -> list[tuple[Trace, Trace]]:
    """On every rank: each case with the block, and without it; where not ``observed``, twice without it.

    ``trained``: what trains a case, of this framework or another.
    """
    results = []
    for number, case in enumerate(cases):
        folder = Path(directory) / str(number)
        plain = trained(case, folder / "off", STEPS, enabled=False)
        with_block = trained(case, folder / "on", STEPS, enabled=True, oracle=True) if observed else plain
        results.append((with_block, plain))
    return results


def chunks(cases: tuple[Any, ...], size: int) -> list[tuple[Any, ...]]:
    return [cases[first : first + size] for first in range(0, len(cases), size)]


@pytest.mark.parametrize("cases", chunks(COVERING, 9), ids=lambda cases: f"{len(cases)}-cases")
def test_records_match_the_oracle_and_weights_are_untouched(cases: tuple[Case, ...], tmp_path: Path) -> None:
    check(cases, run_distributed(run_cases, 2, (cases, str(tmp_path)), timeout=280))


@pytest.mark.long
def test_four_ranks(tmp_path: Path) -> None:
    cases = (Case(stage=1, accumulation=2), Case(dtype="bf16"), Case(method="exact", stage=2, accumulation=2))
    check(cases, run_distributed(run_cases, 4, (cases, str(tmp_path)), timeout=280))


def test_one_rank(tmp_path: Path) -> None:
    [[(observed, plain)]] = run_distributed(run_cases, 1, ((Case(),), str(tmp_path)))
    assert observed.weights == plain.weights
    assert len(observed.records) == STEPS
    assert observed.records[0]["direction"]["mean_cosine"] is None  # no pair exists: null, not 0 or 1
    assert observed.records[0]["noise_scale"] is None
    assert observed.records[0]["grad_norm"]["std"] == 0.0


@pytest.mark.matrix
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("cases", chunks(FULL, 12), ids=lambda cases: f"stage{cases[0].stage}-{cases[0].dtype}")
def test_full_matrix(cases: tuple[Case, ...], tmp_path: Path) -> None:
    check(cases, run_distributed(run_cases, 2, (cases, str(tmp_path)), timeout=1100))


def check(cases: tuple[Case, ...], results: list[list[tuple[Trace, Trace]]]) -> None:
    for number, case in enumerate(cases):
        for rank, of_rank in enumerate(results):
            observed, plain = of_rank[number]
            assert observed.weights == plain.weights, (case, rank)
            assert observed.optimizer == plain.optimizer, (case, rank)
            assert observed.losses == plain.losses, (case, rank)
        trace = results[0][number][0]
        steps = [step for step in range(1, STEPS + 1) if step % case.interval == 0]
        assert [record["step"] for record in trace.records] == steps, case
        for record in trace.records:
            check_record(case, record, trace.oracle[record["step"] - 1])
            check_integrity(case, record, len(results))
        check_events(case, trace)
        if case.per_layer:
            check_layers(case, trace)


def check_record(case: Case, record: dict[str, Any], truth: dict[str, Any]) -> None:
    """Tolerances, from the arithmetic, with u the unit roundoff of the training dtype (0 for fp32, whose sums of some
    thousand products are good to 1e-6):

    * The oracle adds micro-batches in float64. The training rounds each element once per addition, by at most u of
      its value, so accumulated gradients differ by at most u |g| per addition: norms by u, cosines by 2 u.
    * The reduction adds N such gradients and divides: N roundings more for the aggregate.
    """
    where = (case, record["step"])
    ranks = len(truth["loss"]["per_rank"])
    u = 0.0 if case.dtype == "fp32" else torch.finfo(DTYPES[case.dtype]).eps / 2
    additions = 0 if case.adds_in_fp32 else case.accumulation - 1
    rounding = 1e-6 + u * additions
    assert record["samples"] == truth["samples"], where
    assert record["world_size"] == ranks
    for name in ("mean", "std", "range"):  # a loss is fp32, whatever the training dtype
        assert record["loss"][name] == pytest.approx(truth["loss"][name], rel=1e-6, abs=2e-6), (where, name)
    assert record["loss"]["per_rank"] == pytest.approx(truth["loss"]["per_rank"], rel=1e-6), where
    labels = ROWS * (LENGTH - 1) * case.accumulation * ranks  # each of the same weight: rows are of one length
    whole = float(case.accumulation if case.no_sync else 1)  # a script of its own that does not divide
    expected = {"weight_sum": whole, "weight_min": whole / labels, "weight_max": whole / labels, "labels": labels}
    own = dict(record["objective"])
    angle = [own.pop(name) for name in ("mean_of_means_angle", "mean_of_means_angle_error")]
    if READS_LABELS:
        assert own == pytest.approx({**expected, "known": True}, rel=1e-5), where
    else:
        assert own == {**dict.fromkeys(expected), "known": False}, where
    if case.method == "off" or not READS_LABELS:
        assert angle == [None, None], where
    else:  # all labels count alike
        assert angle == pytest.approx([0.0, 0.0], abs=1e-3), where

    norms, true_norms = record["grad_norm"], truth["grad_norm"]
    assert norms["aggregated"] == pytest.approx(true_norms["aggregated"], rel=rounding + u * ranks), where
    expect_sketch = case.method != "exact" and case.looks_at_each and case.accumulation > 1
    if case.method == "off" and expect_sketch:
        assert norms["per_rank"] is None
    else:
        error = 5 / math.sqrt(2 * EFFECTIVE) if expect_sketch else rounding
        assert norms["method"] == ("sketch" if expect_sketch else "exact"), where
        assert norms["per_rank"] == pytest.approx(true_norms["per_rank"], rel=error), where
        assert norms["mean"] == pytest.approx(true_norms["mean"], rel=error), where
        size = true_norms["mean"]
        assert norms["std"] == pytest.approx(true_norms["std"], abs=error * size), where
        assert norms["range"] == pytest.approx(true_norms["range"], abs=2 * error * size), where
        assert norms["cv"] == pytest.approx(norms["std"] / norms["mean"], rel=1e-12), where

    check_direction(case, record, truth, 1e-6 + 2 * u * additions)


def check_integrity(case: Case, record: dict[str, Any], ranks: int) -> None:
    """What DeepSpeed reduced is right within rounding, in every supported cell, and the bound is no wild one."""
    where, found = (case, record["step"]), record["integrity"]
    if case.method == "off":
        assert (found["relative_error"], found["rounding_bound"]) == (None, None), where
    else:
        assert 0.0 <= found["relative_error"] < found["rounding_bound"], where
        assert found["relative_error"] > 0.0 or case.sums_exactly, where
        unit = 2.0**-24 if case.dtype == "fp32" else torch.finfo(DTYPES[case.dtype]).eps / 2
        assert found["rounding_bound"] < 16 * unit, where
    due = record["step"] // REPLICA_INTERVAL != (record["step"] - case.interval) // REPLICA_INTERVAL
    together = [list(range(ranks))] if due and case.stage < 3 else None
    if not due and case.unscaled_wrongly and case.method != "off" and found["replica_groups"] is not None:
        together = [list(range(ranks))]  # the event asks for one comparison, some steps behind it
    assert found["replica_groups"] == together, where


def check_events(case: Case, trace: Trace) -> None:
    """None about results, but one: DeepSpeed unscales stage 0's fp16 gradients, which were never scaled, by 2^8."""
    about_results = [event for event in trace.events if event["kind"] in RESULTS]
    if case.unscaled_wrongly and case.method != "off":
        [event] = about_results
        assert (event["step"], event["where"], event["ranks"]) == (1, "applied gradient", []), (case, event)
        assert event["score"] == pytest.approx(1 - 2.0**-8, rel=1e-6)
    else:
        assert about_results == [], case


def check_direction(case: Case, record: dict[str, Any], truth: dict[str, Any], rounding: float) -> None:
    where = (case, record["step"])
    direction, cosine = record["direction"], truth["cosine"]
    if case.method == "off":
        assert set(direction.values()) == {None}, where
        return
    exactly = case.method == "exact" or (case.exact_interval and record["step"] % case.exact_interval == 0)
    assert direction["method"] == ("exact" if exactly else "sketch"), where
    ranks = len(cosine)
    pairs = [(cosine[i][j], (i, j)) for i in range(ranks) for j in range(i + 1, ranks)]

    def tolerance(value: float) -> float:
        return rounding if exactly else 5 * (1 - value**2) / math.sqrt(EFFECTIVE) + rounding

    widest = max(tolerance(value) for value, _ in pairs)
    assert direction["mean_cosine"] == pytest.approx(truth["mean_cosine"], abs=widest), where
    assert direction["min_cosine"] == pytest.approx(min(pairs)[0], abs=widest), where
    assert direction["max_cosine"] == pytest.approx(max(pairs)[0], abs=widest), where
    named = {pair: value for value, pair in pairs}
    assert named[tuple(direction["min_pair"])] == pytest.approx(min(pairs)[0], abs=2 * widest), where
    assert named[tuple(direction["max_pair"])] == pytest.approx(max(pairs)[0], abs=2 * widest), where
    # the mean of the others is a shorter vector than its terms: its sketch's error is that of one cosine
    assert direction["per_rank"] == pytest.approx(truth["per_rank_cosine"], abs=widest), where
    if exactly:
        assert direction["standard_error"] == 0.0, where
    else:
        error = abs(direction["mean_cosine"] - truth["mean_cosine"])
        assert error <= 5 * direction["standard_error"] + rounding, where
    # the noise scale is a ratio whose denominator may be near 0: compare it where the data define it well
    if exactly and case.dtype == "fp32":
        assert record["noise_scale"] == pytest.approx(truth["noise_scale"], rel=1e-4), where


def check_layers(case: Case, trace: Trace) -> None:
    """As check_record, layer by layer; the layers' sketches have 256 numbers (5 layers share one sketch of 1024)."""
    first = trace.layers[0]
    truth = oracle_layers(trace.oracle[0]["layers"])
    assert [layer["name"] for layer in first["layers"]] == list(truth)
    u = 0.0 if case.dtype == "fp32" else torch.finfo(DTYPES[case.dtype]).eps / 2
    additions = case.accumulation - 1
    rounding = 1e-6 + u * additions
    sketched = case.looks_at_each and case.accumulation > 1  # the exact method knows the whole gradient only
    error = 5 / math.sqrt(2 / (1 / 256 + 1 / (8 * SKETCH_SIZE))) if sketched else rounding
    for layer in first["layers"]:
        mean_norm, norm_cv, mean_cosine = truth[layer["name"]]
        assert layer["mean_norm"] == pytest.approx(mean_norm, rel=error), layer
        assert layer["norm_cv"] == pytest.approx(norm_cv, abs=error), layer
        slack = 5 * layer["standard_error"] + 2 * rounding
        assert layer["mean_cosine"] == pytest.approx(mean_cosine, abs=slack), layer
