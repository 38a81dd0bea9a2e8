"""A run read back: growing, torn, replaced and resumed files; what is known of it in one sentence."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from ds_silent.records import CoverageStats, Event, EventKind, Place, Score, Scores, to_json
from ds_silent.runs import RunReader, read_run, verdict_of
from ds_silent.runs.columns import Envelope, RankSpread
from ds_silent.runs.run import ReadingError, find_runs
from ds_silent.sinks.jsonl import JsonlSink
from ds_silent.sinks.per_rank import PerRankSink
from tests.support.made_records import Run, make

NO_FAULT = {"same-draws", "gradient-changed", "ranks-changed", "drift"}


def event(step: int, kind: str = "outlier-rank", severity: str = "error", message: str = "Rank 2 is off.", **more):  # type: ignore[no-untyped-def]
    phase = {"Still,": "ongoing", "Ended:": "ended"}.get(message.split()[0])
    given = {"ranks": (2,), "where": "loss", "score": 20.0, "threshold": 16.0, "phase": phase} | more
    return Event(step=step, kind=kind, severity=severity, message=message, remedy="Look.", **given)  # type: ignore[arg-type]


def write(directory: Path, steps: int = 20, events: tuple[Event, ...] = (), **changes: Any) -> Path:
    sink, run = JsonlSink(directory), Run()
    for _ in range(steps):
        record = dataclasses.replace(run.record(), **changes)
        sink.write(record)
        sink.write_scores(Scores(record.step, (Score("outlier", record.step * 0.5, 16.6, 1),)))
    for one in events:
        sink.write_event(one)
    sink.close()
    return directory


def test_columns_hold_what_was_written(tmp_path: Path) -> None:
    run, made = read_run(write(tmp_path)), Run()
    losses = [made.record().loss for _ in range(20)]
    assert run.steps.step.tolist() == list(range(1, 21))
    assert run.steps["loss mean"].tolist() == [loss.mean for loss in losses]
    assert run.steps["loss high"].tolist() == [max(loss.per_rank or ()) for loss in losses]
    assert not run.steps.measured("epoch").any()
    assert run.world_size == 4
    assert list(run.scores.curves[("outlier", "")].score) == [0.5 * step for step in range(1, 21)]


def test_a_number_that_is_none_differs_from_one_that_was_not_measured(tmp_path: Path) -> None:
    lines = [{"step": 1, "world_size": 2, "loss": {"mean": "nan"}}, {"step": 2, "world_size": 2, "loss": None}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    steps = read_run(tmp_path).steps
    assert np.isnan(steps["loss mean"]).all()
    assert steps.measured("loss mean").tolist() == [True, False]


def test_a_resumed_run_retires_what_lay_ahead(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path)
    for step in (1, 2, 3, 4, 2, 3):
        sink.write(make(step, [2.0 + step, 2.0], [1.0, 1.0], [0.1, 0.1]))
    sink.write_event(event(3))
    sink.write_event(event(3))
    sink.close()
    run = read_run(tmp_path)
    assert run.steps.step.tolist() == [1, 2, 3]
    assert run.events.groups()[0].count == 1
    ranks, envelope = run.steps.spread.parts[0]
    assert ranks == 2
    assert envelope.buckets().steps[:, 0].tolist() == [1, 2, 3]


def test_the_follower_sees_growth_truncation_and_another_file(tmp_path: Path) -> None:
    reader, path = RunReader(tmp_path), tmp_path / "metrics.jsonl"
    assert not reader.poll()
    path.write_text('{"step": 1, "world_size": 2}\n{"step": 2, "wor', encoding="utf-8")
    assert reader.poll()
    assert reader.run.steps.step.tolist() == [1]
    with open(path, "a", encoding="utf-8") as file:
        file.write('ld_size": 2}\nnonsense\n')
    assert reader.poll()
    assert reader.run.steps.step.tolist() == [1, 2]
    assert reader.run.skipped == {"metrics.jsonl": 1}
    assert not reader.poll()
    path.write_text('{"step": 7, "world_size": 3}\n', encoding="utf-8")  # shorter
    assert reader.poll()
    assert reader.run.steps.step.tolist() == [7]
    path.unlink()
    path.write_text("".join(f'{{"step": {n}, "world_size": 3}}\n' for n in range(3, 9)), encoding="utf-8")  # longer
    assert reader.poll()
    assert reader.run.steps.step.tolist() == [3, 4, 5, 6, 7, 8]


def test_a_last_line_without_its_end_counts_when_the_run_is_over(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}', encoding="utf-8")
    assert read_run(tmp_path).steps.step.tolist() == [1, 2]
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2', encoding="utf-8")
    run = read_run(tmp_path)
    assert run.steps.step.tolist() == [1]
    assert run.problems == ["metrics.jsonl: 1 torn or foreign line skipped."]


def test_what_a_newer_version_has_written_is_said(tmp_path: Path) -> None:
    write(tmp_path, events=(event(5),))
    for name in ("metrics.jsonl", "events.jsonl"):
        with open(tmp_path / name, "a", encoding="utf-8") as file:
            file.write('{"step": 21, "kind": "outlier-rank", "severity": "error", "version": 2}\n')
    for name in ("run.json", "ranks.json"):
        (tmp_path / name).write_text('{"version": 3}')
    reader = RunReader(tmp_path)
    run = reader.finish()
    assert (len(run.steps), len(run.events)) == (20, 1)
    reads = (
        "1 line of version 2 is skipped, because this ds_silent reads version 1; install a newer ds_silent to read it."
    )
    shown = "is of format version 3, newer than this ds_silent knows; what it knows is shown."
    files = ("events.jsonl", "metrics.jsonl")
    assert run.problems == [*(f"{name}: {reads}" for name in files), f"ranks.json {shown}", f"run.json {shown}"]
    write(tmp_path / "other", steps=1)
    for name in files:
        os.replace(tmp_path / "other" / name, tmp_path / name)
    assert reader.finish().problems == [f"ranks.json {shown}", f"run.json {shown}"]


def test_one_fault_is_one_group_and_every_event_counts(tmp_path: Path) -> None:
    told = (
        event(5),
        event(133, message="Still, since step 5: Rank 2 is off."),
        event(200, severity="info", message="Ended: outlier-rank, from step 5 to step 199."),
        event(300),
        event(7, severity="warning", ranks=(1,)),
    )
    log = read_run(write(tmp_path, events=told)).events
    first, second = log.groups()
    assert (first.ranks, first.severity, first.count, first.spans) == ((2,), "error", 4, [[5, 200, 1], [300, 300, 0]])
    assert (second.ranks, second.severity, second.count) == ((1,), "warning", 1)
    assert log.counts == {"error": 3, "warning": 1, "info": 1}


def test_the_envelope_keeps_what_stood_out_at_one_step_of_many() -> None:
    envelope, steps = Envelope(2), 50_000
    for step in range(steps):
        envelope.add(step, np.array([0.0, -9.0 if step == 31_234 else 0.0], dtype=np.float32))
    view = envelope.buckets()
    assert len(view.steps) <= 2 * 512
    assert view.steps[0, 0] == 0
    assert view.steps[-1, 1] == steps - 1
    assert (view.steps[1:, 0] == view.steps[:-1, 1] + 1).all()
    (at,) = np.flatnonzero(view.low[:, 1])
    assert view.low[at, 1] == -9.0
    assert view.steps[at, 0] <= 31_234 <= view.steps[at, 1]


def test_a_rank_without_a_number_is_at_infinity() -> None:
    spread = RankSpread()
    spread.add(1, [1.0, 2.0, 4.0], [1.0, math.nan, math.e], None)
    view = spread.parts[0][1].buckets()
    loss, norm, cosine = view.high.reshape(3, 3)
    assert loss.tolist() == [-1.0, 0.0, 2.0]
    assert norm.tolist() == pytest.approx([-0.5, math.inf, 0.5])
    assert np.isnan(cosine).all()


def test_many_ranks_come_from_the_file_of_raw_values(tmp_path: Path) -> None:
    lines, raw = JsonlSink(tmp_path), PerRankSink(tmp_path)
    for step in (1, 2):
        losses = np.full(100, 2.0)
        losses[37] = 5.0
        record = make(step, losses, np.ones(100), np.full(100, 0.1))
        lines.write(record)
        raw.write(record)
    lines.close()
    raw.close()
    run = read_run(tmp_path)
    ranks, envelope = run.steps.spread.parts[0]
    assert ranks == 100
    assert np.argmax(envelope.buckets().high[0, :100]) == 37
    assert run.steps["loss high"].tolist() == [5.0, 5.0]


def test_the_verdict_names_rank_host_and_step(tmp_path: Path) -> None:
    place = Place(2, 2, "node0087", 3, "cuda:3", None)
    run = read_run(write(tmp_path, events=(event(12, places=(place,)), event(3, "drift", "info", ranks=()))))
    verdict = verdict_of(run)
    assert verdict.sentence == "Rank 2 (node0087:3) is not like the others, since step 12."
    assert (verdict.severity, verdict.ranks, verdict.since, verdict.others) == ("error", (2,), 12, 0)
    states = {check.name: check.state for check in verdict.checks}
    assert states["Ranks alike"] == "failed"
    assert states["Finite numbers"] == "passed"


def test_rows_that_ranks_share_are_not_told_as_dealt_at_random(tmp_path: Path) -> None:
    """Each rank's sampler deals at random, and two were built for the same share."""
    same = event(0, "duplicate-data", ranks=(0, 1), message="sampler's share must differ between ranks.")
    for directory, events, more in ((tmp_path / "a", (), ""), (tmp_path / "b", (same,), ", but several ranks")):
        run = read_run(write(directory, 1, events))
        run.facts["data"] = {"dealt": "random", "by": "DistributedSampler, shuffled"}
        assert run.data.startswith(f"dealt to the ranks at random (DistributedSampler, shuffled){more}")
        assert run.data.endswith("took the same rows") == bool(more)


def test_equal_work_is_not_told_as_equal_rows(tmp_path: Path) -> None:
    said = "Both ranks have the same gradient and the same loss: they do the same work, from the same rows or the same"
    same = event(2, "duplicate-data", ranks=(0, 1), message=said)
    run = read_run(write(tmp_path, 1, (same,), world_size=2))
    run.facts["data"] = {"dealt": "random", "by": "DistributedSampler, shuffled"}
    assert run.data.endswith(", but several ranks did the same work")
    assert verdict_of(run).sentence == "Both ranks do the same work, since step 2."


def test_two_ranks_have_no_others(tmp_path: Path) -> None:
    disagree = event(30, severity="warning", ranks=(0, 1), message="Ranks 0 and 1 disagree since about step 21.")
    run = read_run(write(tmp_path, 1, (disagree,), world_size=2))
    assert verdict_of(run).sentence == "The two ranks disagree, since step 21 (found at step 30)."


def test_a_fault_that_came_and_went_is_said_to_have_come_several_times(tmp_path: Path) -> None:
    events = []
    for step in (24, 33, 154):
        events.append(event(step, message=f"Rank 2 is off since step {step}.", phase="started"))
        text = f"Ended: outlier-rank, from step {step} to step {step}."
        events.append(event(step + 1, severity="info", message=text, phase="ended"))
    verdict = verdict_of(read_run(write(tmp_path, 1, tuple(events))))
    assert verdict.sentence.startswith("Rank 2 is not like the others, 3 times from step 24 to 15")


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("objective-mismatch", "The ranks do not compute the same loss"),
        ("batch-size-mismatch", "The ranks take different numbers of rows"),
        ("replica-drift", "The replicas hold different weights"),
        ("config-mismatch", "The ranks run with different settings"),
        ("duplicate-data", "{all} work on the same rows"),
    ],
)
def test_where_all_ranks_are_named_there_is_no_rest(kind: str, sentence: str, tmp_path: Path) -> None:
    for ranks, everybody in (((0, 1), "Both ranks"), ((0, 1, 2), "All 3 ranks")):
        events = (event(12, kind, ranks=ranks),)
        run = read_run(write(tmp_path / str(len(ranks)), 1, events, world_size=len(ranks)))
        assert verdict_of(run).sentence == f"{sentence.format(all=everybody)}, since step 12."
    run = read_run(write(tmp_path / "of four", 1, (event(12, "objective-mismatch", ranks=(0, 1)),)))
    assert verdict_of(run).sentence == "Ranks 0, 1 have another loss than the rest, since step 12."


def test_the_healthy_verdict_says_that_there_are_notes(tmp_path: Path) -> None:
    note = event(1, severity="info", ranks=(3,), message="Rank 3's data are of another kind since step 1.")
    verdict = verdict_of(read_run(write(tmp_path, 1, (note,))))
    said = "All 4 ranks agreed at the one measured step; notes say that the data of rank 3 are of another kind"
    assert (verdict.severity, verdict.sentence[: len(said)]) == ("ok", said)
    notes = [event(1, "outlier-rank", severity="info", ranks=(rank,)) for rank in range(4)]
    verdict = verdict_of(read_run(write(tmp_path / "all", 1, notes)))
    assert "; notes say that the ranks have data of unlike kinds" in verdict.sentence
    words = ("AveragedModel averages the weights 3 times in each step, since step 1: often.", "Other notes. So.")
    rules = [event(1, "update-mismatch", "info", one, ranks=(), where=one[:5]) for one in words]
    verdict = verdict_of(read_run(write(tmp_path / "rules", 1, (*notes[:1], *rules))))
    said = "; notes say that the data of rank 0 are of another kind; noted: AveragedModel averages the weights 3 times"
    assert f"{said} in each step (and 1 more)" in verdict.sentence
    assert verdict.severity == "ok"
    shared = event(1, "duplicate-data", "info", "Ranks read the same data, ranks 1 and 2 alone: 40%.", ranks=(1, 2))
    verdict = verdict_of(read_run(write(tmp_path / "shared", 1, (shared,))))
    assert "; noted: Ranks read the same data, ranks 1 and 2 alone" in verdict.sentence
    order = event(65, "same-order", "info", "The sampler shuffles, and its set_epoch is not called.")
    frozen = event(1, "update-mismatch", "info", "A parameter has got no gradient.", where="head")
    over = event(41, "update-mismatch", "info", "Ended: update-mismatch, from step 1 to step 40.", where="head")
    verdict = verdict_of(read_run(write(tmp_path / "over", 1, (frozen, over, order))))
    assert "; noted: The sampler shuffles, and its set_epoch is not called" in verdict.sentence
    assert "no gradient" not in verdict.sentence


@pytest.mark.parametrize(("share", "says"), [(0.7, "All 4 ranks agreed at"), (0.95, "No alarm was raised at")])
def test_ranks_that_are_near_an_alarm_are_not_said_to_agree(share: float, says: str, tmp_path: Path) -> None:
    """A rank whose labels were random was 95 % of an alarm at the end, and all ranks were said to agree."""
    run = write(tmp_path)
    lines = [{"version": 1, "step": 20, "scores": [{"detector": "outlier", "score": share * 16.6, "threshold": 16.6}]}]
    (run / "scores.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    verdict = verdict_of(read_run(run))
    assert (verdict.severity, verdict.sentence[: len(says)]) == ("ok", says)
    assert ("is at 95% of one by now" in verdict.sentence) == (share > 0.9)


def test_what_was_seen_of_an_epoch_that_was_not_followed_is_not_said(tmp_path: Path) -> None:
    """More rows came at a step than there is room for."""
    sink, run = JsonlSink(tmp_path), Run()
    for step in range(20):
        seen = 0.02 if step == 0 else None
        sink.write(dataclasses.replace(run.record(), coverage=CoverageStats(duplicates=0, seen=seen)))
    sink.close()
    (rows,) = (check for check in verdict_of(read_run(tmp_path)).checks if check.name == "Rows")
    assert rows.why == "compared within each step; the epoch was followed at 1 of 20 steps alone"


@pytest.mark.parametrize(
    ("name", "severity", "said"),
    [
        (
            "events.jsonl",
            "warning",
            "1 line of events.jsonl cannot be read: a fault may be among them. Else all 4 ranks",
        ),
        (
            "metrics.jsonl",
            "ok",
            "agreed at all 19 measured steps that are known; 1 line of metrics.jsonl cannot be read",
        ),
    ],
)
def test_the_healthy_verdict_says_what_cannot_be_read(name: str, severity: str, said: str, tmp_path: Path) -> None:
    notes = tuple(event(step, severity="info", ranks=(3,), message="A note.") for step in (1, 2))
    file = write(tmp_path, events=notes) / name
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    file.write_text("".join([lines[0], lines[1][5:], *lines[2:]]), encoding="utf-8")
    verdict = verdict_of(read_run(tmp_path))
    assert verdict.severity == severity
    assert said in verdict.sentence


def test_the_healthy_verdict_says_what_was_not_checked_and_why(tmp_path: Path) -> None:
    write(tmp_path)
    facts = {"version": 1, "training": {"ZeRO stage": 3}, "block": {"coverage": False, "preflight": False}}
    (tmp_path / "run.json").write_text(json.dumps(facts), encoding="utf-8")
    verdict = verdict_of(read_run(tmp_path))
    assert verdict.severity == "ok"
    assert verdict.sentence.startswith(
        "All 4 ranks agreed at all 20 measured steps; not checked: before step 1, rows, "
    )
    why = {check.name: check.why for check in verdict.checks if check.state == "not observed"}
    assert why["Rows"] == "coverage is false"
    assert why["Replicas"] == "ZeRO stage 3 has no replicas"
    assert why["Before step 1"] == "preflight is false"


def test_equal_replicas_are_said_with_what_was_left_out_of_the_comparison(tmp_path: Path) -> None:
    def why(name: str, observed: dict[str, bool]) -> str:
        compared = write(tmp_path / name)
        lines = (compared / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        records = [json.loads(line) for line in lines]
        for record in records:
            record["integrity"]["replica_groups"] = [[0, 1, 2, 3]]
        (compared / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")
        (compared / "run.json").write_text(json.dumps({"version": 1, "observed": observed}), encoding="utf-8")
        [check] = [one for one in verdict_of(read_run(compared)).checks if one.name == "Replicas"]
        return check.why

    assert why("all", {"replicas": True}) == "equal bits, 20 comparisons"
    without = "; running statistics of normalisations (as of BatchNorm), which may differ, are left out"
    assert why("statistics", {"replicas": True, "running statistics": False}) == "equal bits, 20 comparisons" + without


@pytest.mark.parametrize("kind", sorted({*get_args(EventKind)} - NO_FAULT))
def test_every_kind_that_is_an_alarm_has_its_own_sentence(tmp_path: Path, kind: str) -> None:
    for ranks in ((2,), (1, 2), ()):
        run = read_run(write(tmp_path / str(len(ranks)), events=(event(10, kind, ranks=ranks),)))
        assert "event of the kind" not in verdict_of(run).sentence


@pytest.mark.parametrize(
    ("kind", "ranks", "where", "message", "said"),
    [
        (
            "update-mismatch", (), "bf16 moments", "Adam (torch 2.9: a note) forgets, since step 3: it never falls.",
            "Adam (torch 2.9: a note) forgets, since step 3 (found at step 10)",
        ),
        ("objective-mismatch", (), "loss", "A loss is given probabilities. So it is.",
         "A loss is given probabilities, since step 10"),
        ("update-mismatch", (2,), "decay", "On rank 2: weights decay.",
         "Rank 2 does not train what it should, since step 10"),
        ("batch-suspect", (), "batch", "x" * 200 + ". y", "The batches cannot be meant so, since step 10"),
        ("aggregation-error", (), "applied gradient", "The optimizer applied 1.3 times it. (step 10)",
         "The optimizer applied 1.3 times it, since step 10"),
        ("aggregation-error", (2,), "applied gradient", "The optimizer of rank 2 did not step. (step 10)",
         "The optimizer of rank 2 did not step, since step 10"),
    ],
)  # fmt: skip
def test_a_kind_of_many_faults_is_told_by_its_own_words(
    kind: str, ranks: tuple[int, ...], where: str, message: str, said: str, tmp_path: Path
) -> None:
    run = read_run(write(tmp_path, events=(event(10, kind, ranks=ranks, where=where, message=message),)))
    assert verdict_of(run).sentence == f"{said}."


@pytest.mark.parametrize(
    ("ranks", "where", "said"),
    [
        ((2,), "gradient", "Rank 2 has a gradient of zero in all parameters"),
        ((2,), "parameters", "Rank 2 gets no gradient for some parameters that other ranks train"),
        ((2,), "blocks.1", "Rank 2 has a gradient of zero in blocks.1"),
        ((1, 2), "2 parameters", "Ranks 1, 2 have a gradient of zero in 2 parameters"),
        ((1, 2), "parameters", "Ranks 1, 2 get no gradient for some parameters that other ranks train"),
    ],
)
def test_a_gradient_of_zero_is_said_to_be_of_all_parameters_or_of_some(
    ranks: tuple[int, ...], where: str, said: str, tmp_path: Path
) -> None:
    run = read_run(write(tmp_path, events=(event(10, "zero-gradient", ranks=ranks, where=where),)))
    assert verdict_of(run).sentence == f"{said}, since step 10."


@pytest.mark.parametrize("kind", sorted({*get_args(EventKind)} - NO_FAULT - {"observer-off", "repaired"}))
def test_what_is_an_error_fails_a_check(tmp_path: Path, kind: str) -> None:
    """A headline of an error above eight green ticks is not believed."""
    step = 0 if kind == "initial-weights-mismatch" else 10
    failed = [
        one
        for one in verdict_of(read_run(write(tmp_path, events=(event(step, kind),)))).checks
        if one.state == "failed"
    ]
    assert [one.why.partition(",")[0] for one in failed] == [kind]


@pytest.mark.parametrize(
    ("severity", "state"), [("error", "failed"), ("warning", "warned"), ("info", "noted"), (None, "noted")]
)
def test_a_consequence_is_as_bad_as_its_cause(severity: str | None, state: str, tmp_path: Path) -> None:
    cause = [] if severity is None else [event(10, "update-mismatch", severity, where="decay")]
    effect = event(12, severity="info", where="loss", follows="update-mismatch (decay)")
    verdict = verdict_of(read_run(write(tmp_path, events=(*cause, effect))))
    assert [one.state for one in verdict.checks if one.name == "Ranks alike"] == [state]


def test_since_when_is_what_the_message_knows(tmp_path: Path) -> None:
    message = "Rank 2 differs. The first update that left them apart was that of step 4."
    verdict = verdict_of(read_run(write(tmp_path, events=(event(10, "replica-drift", message=message),))))
    assert verdict.since == 4
    assert verdict.sentence == "Rank 2 holds other weights than the rest, since step 4 (found at step 10)."


APPLIED = {"ranks": (2,), "where": "applied gradient"}
SKIPPED = (
    event(10, "aggregation-error", message="The optimizer of rank 2 did not step. (step 10)", **APPLIED),
    event(12, "aggregation-error", "info", "Ended: aggregation-error, from step 10 to step 11.", **APPLIED),
)
FOLLOWING = "Follows from the aggregation-error of step 10 (applied gradient): That of step 10 left them apart."
LATER = event(30, "replica-drift", message="They were left apart by that of step 10.", where="weight")


def test_a_note_before_a_consequence_does_not_date_it(tmp_path: Path) -> None:
    """Buffers that move were noted at step 3, and the drift of step 12 was said to be of step 3."""
    cause = event(11, "config-mismatch", where="learning rate")
    drift = event(12, "replica-drift", "info", where="weight", follows="config-mismatch (learning rate)")
    note = event(3, "replica-drift", "info", "Buffers move.", ranks=(), where="buffer mean")
    [check] = [
        one
        for one in verdict_of(read_run(write(tmp_path, events=(note, cause, drift)))).checks
        if one.name == "Replicas"
    ]
    assert (check.state, check.why) == ("failed", "replica-drift, rank 2, step 12")


LEFT = event(12, "replica-drift", "info", FOLLOWING, where="weight", follows="aggregation-error (applied gradient)")


@pytest.mark.parametrize(
    ("events", "over"),
    [
        ((LEFT,), False),
        ((LEFT, event(140, "replica-drift", message="Still, since step 10: Apart.", where="weight")), False),
        ((LEFT, event(30, "replica-drift", "info", "Ended: replica-drift, from step 10 to 29.", where="weight")), True),
        ((LATER,), False),  # its cause was over when it was found
        ((event(12, message="Rank 2 is off."),), False),
        ((dataclasses.replace(LATER, ranks=()),), False),  # nobody knows whose it is
        ((dataclasses.replace(LATER, ranks=(1,)),), True),
        ((event(30, message="Rank 2 is off."),), True),  # it began later
        ((event(11, "observer-off", "warning"),), True),
    ],
)
def test_a_fault_is_not_over_while_what_it_left_behind_is_open(
    events: tuple[Event, ...], over: bool, tmp_path: Path
) -> None:
    sentence = verdict_of(read_run(write(tmp_path, events=(*SKIPPED, *events)))).sentence
    assert sentence.startswith("The optimizer of rank 2 did not step, ")
    assert sentence.endswith("from step 10 to 11.") == over
    assert ("since step 10, now as " in sentence) == (not over)


def test_nothing_and_nobody(tmp_path: Path) -> None:
    assert verdict_of(read_run(tmp_path)).severity == "unknown"
    with pytest.raises(ReadingError, match="is no directory of a run"):
        read_run(tmp_path / "none")
    with pytest.raises(ReadingError, match="holds no records"):
        find_runs(tmp_path)
    write(tmp_path / "a", 1)
    write(tmp_path / "a" / "engine-2", 1)
    assert find_runs(tmp_path) == [tmp_path / "a", tmp_path / "a" / "engine-2"]


def test_facts_hold_no_address_of_an_alert() -> None:
    from ds_silent.config import SilentConsistencyConfig
    from ds_silent.sinks.run_directory import run_text

    text = run_text(SilentConsistencyConfig(), "DeepSpeed", 4, {"ZeRO stage": 1}, {"replicas": True})
    facts = json.loads(text)
    assert facts["version"] == 1
    assert facts["block"]["integrity"]["replica_interval"] == 100
    assert facts["training"] == {"ZeRO stage": 1}
    assert facts["block"]["alerts"] == []  # and not "0 left out"

    class WithAlerts(SilentConsistencyConfig):
        alerts: list[dict[str, str]] = [{"to": "https://hooks.example/T0/secret"}]  # noqa: RUF012

    assert "secret" not in run_text(WithAlerts(), "torch", 2, {}, {})
    assert to_json(facts) == facts


@pytest.mark.parametrize(("steps", "severity"), [(0, "unknown"), (3, "ok")])
def test_an_interrupted_run_is_said_to_be_one_and_warns_of_nothing(steps: int, severity: str, tmp_path: Path) -> None:
    write(tmp_path, steps)
    ended = {"at": "2026-01-01T00:00:00+00:00", "step": 3, "error": None, "interrupted": True}
    (tmp_path / "run.json").write_text(json.dumps({"version": 1, "ended": ended}))
    verdict = verdict_of(read_run(tmp_path))
    assert verdict.severity == severity
    assert verdict.sentence.startswith("The training was interrupted after step 3")


@pytest.mark.parametrize(("minutes", "lost"), [(50, ""), (70, "silent")])
def test_a_run_of_another_host_is_lost_after_an_hour_without_a_record(minutes: int, lost: str, tmp_path: Path) -> None:
    write(tmp_path, 3)
    facts = {"version": 1, "ended": None, "process": {"host": "another", "pid": 1, "pid_namespace": "x", "began": 1}}
    (tmp_path / "run.json").write_text(json.dumps(facts))
    for path in tmp_path.glob("*.json*"):
        os.utime(path, (time.time() - 60 * minutes,) * 2)
    assert RunReader(tmp_path).finish().lost == lost


def test_of_two_faults_of_one_step_the_first_told_is_the_first(tmp_path: Path) -> None:
    """The headline was the one whose kind comes first in the alphabet, and its remedy made it worse."""
    sink = JsonlSink(tmp_path)
    for kind in ("duplicate-data", "data-order-mismatch"):
        sink.write_event(Event(0, kind, "error", (), "sampler", None, None, f"{kind} here.", "Do this."))  # type: ignore[arg-type]
    sink.close()
    run = read_run(tmp_path)
    assert [group.kind for group in run.events.groups()] == ["duplicate-data", "data-order-mismatch"]
    worst = verdict_of(run).group
    assert worst is not None
    assert worst.kind == "duplicate-data"


def test_of_very_many_runs_the_newest_are_read(tmp_path: Path) -> None:
    for number in range(70):
        run = tmp_path / f"r{number:02}"
        run.mkdir()
        (run / "metrics.jsonl").write_text("")
        os.utime(run, (1000 - number, 1000 - number))  # the first by name is the newest
    assert [one.name for one in find_runs(tmp_path)] == [f"r{number:02}" for number in range(64)]
    for number in range(70):
        os.utime(tmp_path / f"r{number:02}", (number, number))
    assert [one.name for one in find_runs(tmp_path)] == [f"r{number:02}" for number in range(6, 70)]
