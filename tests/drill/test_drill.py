"""The drill's own honesty: what counts as found, what the user's configuration becomes, and the exit code."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from rich.console import Console
from typer.testing import CliRunner

from ds_silent.cli import app
from ds_silent.drill.faults.catalogue import FAULTS
from ds_silent.drill.faults.injection import Target
from ds_silent.drill.printing import print_report, sentence
from ds_silent.drill.run_drill import Outcome, exit_code, judged, to_json
from ds_silent.drill.run_trial import TrialRun, run_trial
from ds_silent.drill.setting import make_setting
from ds_silent.drill.training import Trial
from ds_silent.drill.verdicts import due, first_compared, first_measured, judge, judge_healthy, loss_shift
from ds_silent.practice.ranks import RankBroke, on_ranks
from ds_silent.records import Event, StepRecord
from tests.drill.cold_start import cold_start

TARGET = Target(2, 4, 21)
BLOCK: dict[str, Any] = {"silent_consistency": {}}


def event(step: int, kind: str, ranks: tuple[int, ...], severity: str = "error", message: str = "") -> dict[str, Any]:
    return {"step": step, "kind": kind, "severity": severity, "ranks": list(ranks), "message": message, "where": None}


# -- the verdict ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "events", "answer"),
    [
        ("nan-loss", [event(21, "non-finite", (2,))], "found"),
        ("nan-loss", [], "missed"),
        ("nan-loss", [event(21, "non-finite", (2,), "info")], "missed"),
        ("nan-loss", [event(21, "non-finite", (1,))], "wrong ranks"),
        ("nan-loss", [event(22, "non-finite", (0, 1, 2, 3))], "wrong ranks"),
        ("nan-loss", [event(21, "outlier-rank", (2,))], "wrong kind"),
        ("nan-loss", [event(20, "non-finite", (2,))], "false alarm"),
        ("nan-loss", [event(20, "outlier-rank", (0,)), event(21, "non-finite", (2,))], "false alarm"),
        ("nan-loss", [event(21, "outlier-rank", (0,)), event(21, "non-finite", (2,))], "found"),
        ("no-labels", [event(21, "zero-gradient", (2,))], "found"),
        ("learning-rate", [event(0, "config-mismatch", (2,))], "found"),
        ("learning-rate", [event(0, "config-mismatch", ())], "wrong ranks"),
        ("repeated-batch", [event(22, "data-order-mismatch", (2,))], "found"),
        ("repeated-batch", [event(25, "data-order-mismatch", (0, 1, 2, 3))], "wrong ranks"),
        ("sampler-seed-one-rank", [event(25, "data-order-mismatch", (0, 1, 2, 3))], "found"),
        ("repeated-batch", [event(25, "data-order-mismatch", (1,))], "wrong ranks"),
    ],
)
def test_what_counts_as_found(name: str, events: list[dict[str, Any]], answer: str) -> None:
    fault = FAULTS[name]
    target = Target(2, 4, fault.first_step)
    assert judge(fault, target, events, interval=1).answer == answer


def test_a_deterministic_fault_must_be_found_at_its_first_measured_step() -> None:
    fault = FAULTS["nan-loss"]
    assert not judge(fault, TARGET, [event(21, "non-finite", (2,))], 1).late
    assert judge(fault, TARGET, [event(22, "non-finite", (2,))], 1).late
    assert not judge(fault, TARGET, [event(30, "non-finite", (2,))], 10).late
    assert not judge(FAULTS["gradient-negated"], TARGET, [event(60, "outlier-rank", (2,))], 1).late
    assert [first_measured(step, 10) for step in (0, 1, 10, 11)] == [0, 10, 10, 20]


def test_the_cause_must_be_right_too() -> None:
    fault = FAULTS["contribution-missing"]
    for message, answer in (
        ("rank 2 0.00 times", "found"),
        ("rank 2 2.00 times", "wrong cause"),
        ("rank 2 0.00 timeses", "wrong cause"),
        ("", "wrong cause"),
    ):
        events = [event(4, "aggregation-error", (2,), message=message)]
        assert judge(fault, Target(2, 4, 4), events, 1).answer == answer
    assert judge(fault, Target(2, 4, 40), [event(40, "aggregation-error", (2,))], 10).found  # the rule needs step 39


def test_a_replica_is_due_at_the_first_comparison_after_the_update() -> None:
    assert [first_compared(step, 1, 5) for step in (3, 4, 5, 9)] == [5, 5, 10, 10]
    assert [first_compared(step, 3, 5) for step in (3, 6, 9, 12)] == [6, 12, 12, 15]
    fault = FAULTS["frozen-parameter-changed"]
    told = "The first update that left them apart was that of step 4. rescale.shift"
    for step, late in ((5, False), (10, True)):
        verdict = judge(fault, Target(2, 4, 4), [event(step, "replica-drift", (2,), message=told)], 1, 5)
        assert (verdict.found, verdict.late, verdict.right) == (True, late, not late)
    wrong = [event(5, "replica-drift", (2,), message=told.replace("step 4", "step 41"))]
    assert judge(fault, Target(2, 4, 4), wrong, 1, 5).answer == "wrong cause"
    assert due(FAULTS["bucket-stale"], Target(2, 4, 4), 1, 5) == 4


def test_what_is_below_rounding_may_stay_silent_and_nothing_else_may() -> None:
    fault, target = FAULTS["aggregate-flip-byte-0"], Target(2, 4, 4)
    assert judge(fault, target, [], 1, change=1e-7, rounding=3e-7).answer == "below rounding"
    assert judge(fault, target, [], 1, change=1e-7, rounding=3e-7).right
    assert judge(fault, target, [], 1, change=5e-7, rounding=3e-7).right
    assert judge(fault, target, [], 1, change=7e-7, rounding=3e-7).answer == "missed"
    assert judge(fault, target, [], 1, change=None, rounding=3e-7).answer == "missed"
    alarm = [event(4, "outlier-rank", (2,))]
    assert judge(fault, target, alarm, 1, change=1e-7, rounding=3e-7).answer == "wrong kind"


def test_a_healthy_run_is_right_only_without_an_alarm() -> None:
    assert judge_healthy([]).answer == "missed"
    assert judge_healthy([event(9, "drift", (), "info")]).answer == "missed"
    assert judge_healthy([event(9, "outlier-rank", (1,), "warning")]).answer == "false alarm"


def test_the_loss_is_compared_step_by_step_in_the_healthy_runs_deviations() -> None:
    healthy = [1.0, 3.0, 1.0, 3.0, 1.0, 3.0]
    deviation = math.sqrt(6 / 5)
    shifted = [1.0, 3.0, 2.0, 4.0]
    assert loss_shift(shifted, healthy, 3, 4) == pytest.approx(1.0 / deviation)
    assert loss_shift(shifted, healthy, 1, 4) == pytest.approx(0.5 / deviation)
    assert loss_shift(shifted, healthy, 7, 9) is None
    assert math.isnan(loss_shift([1.0, math.nan], healthy, 2, 2) or 0.0)


# -- the command line -------------------------------------------------------------------------------------------------


def test_the_list_names_every_fault() -> None:
    result = CliRunner().invoke(app, ["drill", "--list"])
    assert result.exit_code == 0
    for fault in FAULTS.values():
        assert f"{fault.name} → {fault.kind}" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--fault", "no-such"], "there is no fault 'no-such'"),
        (["--rank", "4"], "--rank must be one of the 4 ranks"),
        (["--steps", "5"], "--steps must be at least 29, got 5"),
        (["--dtype", "fp16"], "--dtype must be fp32 or bf16, got 'fp16'"),
        (["--config", "missing.json"], "there is no ds_config file"),
        (["--json", "no/such/place.json"], "--json 'no/such/place.json' cannot be written"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_status_2(arguments: list[str], sentence: str) -> None:
    result = CliRunner().invoke(app, ["drill", *arguments])
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith(f"ds-silent: {sentence}")


# -- the ranks --------------------------------------------------------------------------------------------------------


def report_ranks(send: Callable[[Any], None], what: str) -> None:
    import torch
    import torch.distributed as dist

    total = torch.ones(1)
    dist.all_reduce(total)
    send((what, int(total)))
    if what == "broken" and dist.get_rank() == 1:
        raise ValueError("a rank \x1b[31mbroke")
    if what == "dead" and dist.get_rank() == 1:
        os._exit(9)
    if what == "silent":
        time.sleep(60)


def test_rank_0_is_heard_and_nobody_is_left() -> None:
    assert list(on_ranks(report_ranks, ("well",), 2)) == [("well", 2)]


@pytest.mark.parametrize(
    ("what", "sentence"), [("broken", "broke"), ("dead", "exit code 9"), ("silent", "said nothing")]
)
def test_a_rank_that_breaks_ends_the_drill_with_its_last_words(what: str, sentence: str) -> None:
    with pytest.raises(RankBroke, match=sentence) as caught:
        for _ in on_ranks(report_ranks, (what,), 2, silence=5.0 if what == "silent" else 60.0):
            pass
    assert "\x1b" not in str(caught.value)


# -- the whole, with judges of our own --------------------------------------------------------------------------------

SETTING = make_setting(BLOCK, 3)
FAKES = ("right", "disabled", "wrong rank", "wrong kind", "cries wolf")


TRIALS = (Trial("healthy", None, Target(2, 3, 0), 4), Trial("nan-loss", FAULTS["nan-loss"], Target(2, 3, 3), 8))


def perform_with_fakes(send: Callable[[Any], None], directory: str) -> None:
    """Trains for real; in place of the detectors a judge that is right, or broken in a known way."""
    from ds_silent.sinks import Background

    write, fake = Background.write, FAKES[0]

    def write_and_judge(sink: Background, record: StepRecord) -> None:
        write(sink, record)
        assert record.loss.per_rank is not None
        bad = tuple(rank for rank, loss in enumerate(record.loss.per_rank) if not math.isfinite(loss))
        if fake == "cries wolf" and record.step == 2:
            bad = (0,)
        if bad and fake != "disabled":
            ranks = (0,) if fake == "wrong rank" else bad
            kind = "outlier-rank" if fake == "wrong kind" else "non-finite"
            sink.write_event(Event(record.step, kind, "error", ranks, "loss", None, None, "NaN.", ""))

    Background.write = write_and_judge  # type: ignore[method-assign]  # this process ends with the test
    start = cold_start({}, 0, "fp32")
    for fake in FAKES:
        send((fake, [run_trial(start, trial, Path(directory, fake, trial.name)) for trial in TRIALS]))


@pytest.fixture(scope="module")
def judged_by_fakes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[TrialRun]]:
    return dict(on_ranks(perform_with_fakes, (str(tmp_path_factory.mktemp("drill")),), 3))


@pytest.mark.parametrize("fake", FAKES)
@pytest.mark.long
def test_the_exit_code_is_0_only_for_a_judge_that_is_right(
    fake: str, judged_by_fakes: dict[str, list[TrialRun]]
) -> None:
    outcome = Outcome(SETTING, tuple(judged(TRIALS, judged_by_fakes[fake], SETTING)), ())
    assert exit_code(outcome) == (0 if fake == "right" else 1)
    healthy, faulty = outcome.results
    expected = {
        "right": ("missed", "found"),
        "disabled": ("missed", "missed"),
        "wrong rank": ("missed", "wrong ranks"),
        "wrong kind": ("missed", "wrong kind"),
        "cries wolf": ("false alarm", "false alarm"),
    }[fake]
    assert (healthy.verdict.answer, faulty.verdict.answer) == expected
    assert len(faulty.run.losses) == (8 if fake in ("disabled", "wrong rank", "wrong kind") else len(faulty.run.losses))
    if fake == "right":
        assert len(faulty.run.losses) < 8  # it ends soon after it has found the fault
    json.dumps(to_json(outcome), allow_nan=False)
    console = Console(width=120, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    print_report(outcome, console)
    text = console.export_text()
    assert "nan-loss" in text
    assert ("The alarm works" in text) == (fake == "right")
    assert ("not: nan-loss" in sentence(outcome)) == (fake != "right")


# -- the whole, with the real detectors -------------------------------------------------------------------------------

ON = {"detectors": {"enabled": True}, "coverage": True, "preflight": True}
HIT_BY: dict[str, tuple[str, ...]] = {  # fault → the functions without which it cannot be found
    "nan-loss": ("ds_silent.detectors.broken.non_finite",),
    "zero-gradient": ("ds_silent.detectors.broken.zero_gradient",),
    "same-batch-pair": ("ds_silent.detectors.same_rows.by_ids", "ds_silent.detectors.duplicate_data.by_gradients"),
    "learning-rate": ("ds_silent.observing.observe.events_of", "ds_silent.capture.settings_check.events_of"),
}


def perform_with_mutations(send: Callable[[Any], None], directory: str) -> None:
    """Every fault with the detectors as they are, then each again with its detector disabled."""
    start = cold_start(ON, 0, "fp32")
    for trial in real_trials():
        send((trial.name, "intact", run_trial(start, trial, Path(directory, "intact", trial.name))))
    for trial in real_trials()[1:]:
        with ExitStack() as disabled:
            for function in HIT_BY[trial.name]:
                disabled.enter_context(patch(function, lambda *given: []))
            send((trial.name, "disabled", run_trial(start, trial, Path(directory, "disabled", trial.name))))


def real_trials() -> tuple[Trial, ...]:
    faults = [FAULTS[name] for name in HIT_BY]
    struck = [(fault, Target(2, 4, min(fault.first_step, 3), fault.size)) for fault in faults]
    return (
        Trial("healthy", None, Target(2, 4, 0), 8),
        *(Trial(fault.name, fault, target, 6) for fault, target in struck),
    )


@pytest.fixture(scope="module")
def real_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], TrialRun]:
    folder = str(tmp_path_factory.mktemp("real"))
    return {(name, state): run for name, state, run in on_ranks(perform_with_mutations, (folder,), 4)}


def test_the_real_alarm_finds_the_faults_that_need_no_statistics(real_runs: dict[tuple[str, str], TrialRun]) -> None:
    trials = real_trials()
    runs = [real_runs[trial.name, "intact"] for trial in trials]
    outcome = Outcome(SETTING, tuple(judged(trials, runs, SETTING)), ())
    assert {result.trial.name: result.verdict.answer for result in outcome.results if not result.right} == {}
    assert not any(result.verdict.late for result in outcome.results)
    assert exit_code(outcome) == 0


@pytest.mark.parametrize("name", HIT_BY)
def test_a_disabled_detector_makes_the_drill_fail(name: str, real_runs: dict[tuple[str, str], TrialRun]) -> None:
    trials = tuple(trial for trial in real_trials() if trial.name in ("healthy", name))
    runs = [real_runs["healthy", "intact"], real_runs[name, "disabled"]]
    outcome = Outcome(SETTING, tuple(judged(trials, runs, SETTING)), ())
    assert outcome.results[0].right
    assert not outcome.results[1].right
    assert exit_code(outcome) == 1
