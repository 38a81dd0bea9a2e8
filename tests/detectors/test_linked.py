"""One fault, one alarm: what follows from an open fault names it; a second fault is never hidden."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from ds_silent.capture.untrained import Missed, Unlike, reported
from ds_silent.config import EffectsConfig
from ds_silent.detectors.finding import Detector, Finding
from ds_silent.detectors.lifecycle import Episodes, SettingsDetector, effects_of_settings, setting_findings
from ds_silent.detectors.outlier import RankComparison
from ds_silent.detectors.reduction_errors import reduction
from ds_silent.detectors.replica_errors import replicas
from ds_silent.distributed.parts import Parts
from ds_silent.measure.evidence import AppliedCheck, Evidence, ReductionEvidence
from ds_silent.preflight.items import HOOKS
from ds_silent.records import Event, EventKind, Severity, StepRecord
from ds_silent.text import TORCH
from tests.support.made_records import Run, make

PREFLIGHT = Event(0, "config-mismatch", "error", (2,), "learning rate", None, None, "lr differs.", "Start alike.")


def finding(kind: EventKind, ranks: tuple[int, ...], where: str, since: int, severity: Severity = "error") -> Finding:
    return Finding(f"{kind} {ranks}", kind, severity, ranks, where, None, None, f"{kind} here.", "Do this.", since)


DRIFT = finding("replica-drift", (2,), "embedding", 1)


def test_a_learning_rate_that_the_preflight_told_explains_the_drift_of_its_rank() -> None:
    episodes = Episodes()
    episodes.told(PREFLIGHT)
    [event] = episodes.update(100, [DRIFT])
    assert (event.kind, event.severity, event.ranks) == ("replica-drift", "info", (2,))
    assert event.message == ("Follows from the config-mismatch of the preflight (learning rate): replica-drift here.")
    assert (event.phase, event.follows) == ("started", "config-mismatch (learning rate)")


@pytest.mark.parametrize(
    "other",
    [
        replace(DRIFT, key="b", ranks=(1,)),  # another rank
        replace(DRIFT, key="b", ranks=(1, 2)),
        replace(DRIFT, key="b", ranks=()),  # nobody knows which
        finding("aggregation-error", (2,), "aggregated gradient", 1),  # no effect of a learning rate
        finding("non-finite", (2,), "loss", 1),
    ],
)
def test_a_second_fault_stays_an_alarm(other: Finding) -> None:
    episodes = Episodes()
    episodes.told(PREFLIGHT)
    assert [event.severity for event in episodes.update(100, [DRIFT, other])] == ["info", "error"]


def test_an_outlier_follows_from_a_fault_of_nobody_that_parts_the_replicas() -> None:
    """Of two ranks that clip by other norms nobody can say which is wrong; the outlier names both."""
    clipped = finding("aggregation-error", (), "applied gradient", 1)
    outlier = replace(finding("outlier-rank", (0, 1), "loss", 17, "warning"), log_excess=3.0)
    for effects, severity in ((("replica-drift",), "info"), ((), "warning")):
        episodes = Episodes()
        episodes.update(1, [replace(clipped, effects=effects)])
        [event] = episodes.update(29, [replace(clipped, effects=effects), outlier])
        assert (event.kind, event.severity) == ("outlier-rank", severity)


@pytest.mark.parametrize("where", ["ds_config zero_optimization", "CUBLAS_WORKSPACE_CONFIG", "torch"])
def test_a_setting_that_enters_no_update_explains_no_drift(where: str) -> None:
    episodes = Episodes()
    episodes.told(replace(PREFLIGHT, where=where))
    assert episodes.update(100, [DRIFT])[0].severity == "error"


@pytest.mark.parametrize("key", ["integrity leftover layer", "integrity applied"])
def test_what_no_optimizer_holds_is_neither_cleared_nor_applied(key: str) -> None:
    """DeepSpeed without ZeRO reduces it: one fault had two alarms, and the second named no cause."""
    unheld = setting_findings(reported(Missed(unheld=("last.weight",)), 1))
    effect = replace(finding("aggregation-error", (), "what the optimizer applied", 1), key=key)
    fault, follows = Episodes().update(1, [*unheld, effect])
    assert (fault.kind, fault.severity) == ("update-mismatch", "warning")
    assert (follows.severity, follows.follows) == ("info", "update-mismatch (last.weight)")


@pytest.mark.parametrize("key", ["integrity handed", "integrity idle (1,)"])
def test_a_clip_that_comes_and_goes_is_one_fault_until_it_stays_away(key: str) -> None:
    """Once four errors in 64 steps, of one rank that clipped where its gradient was long enough."""
    clip = replace(finding("aggregation-error", (1,), "what the optimizer applied", 1), key=key)
    steps, episodes, told = (1, 2, 6, 13, 14, 30), Episodes(), []
    for step in range(1, 50):
        told += episodes.update(step, [clip] if step in steps else [])
    assert [(event.step, event.phase, event.severity) for event in told] == [
        (1, "started", "error"),
        (46, "ended", "info"),
    ]
    assert "from step 1 to step 30" in told[1].message


def test_its_first_end_tells_at_once_what_it_has_left_behind() -> None:
    clip = replace(finding("aggregation-error", (1,), "what the optimizer applied", 1), key="integrity handed")
    clip, drift = replace(clip, effects=("replica-drift",)), replace(DRIFT, ranks=(1,), since=2)
    episodes, told = Episodes(), []
    for step in range(1, 50):
        told += episodes.update(step, [clip] * (step in (1, 2, 6, 13, 30)) + [drift] * (step > 1))
    phases = [(event.step, event.kind, event.phase, event.severity) for event in told]
    assert phases == [
        (1, "aggregation-error", "started", "error"),
        (2, "replica-drift", "started", "info"),
        (3, "aggregation-error", "ended", "info"),
        (6, "aggregation-error", "started", "error"),
    ], phases
    assert "What it has left behind goes on: replica-drift" in told[2].message


WRONG = replace(finding("aggregation-error", (2,), "all 11 layers", 200), key="integrity weights", family="reduction")


def test_another_explanation_of_a_wrong_reduction_that_names_nobody_else_is_the_same_fault() -> None:
    """Once 14 errors of one rank's negated gradient, 9 of them without the rank, while it outweighed all others."""
    whole = replace(WRONG, key="integrity scale", ranks=(), since=201)
    elsewhere = replace(WRONG, key="integrity weights body.6", where="body.6", since=202)
    episodes = Episodes()
    assert [event.ranks for event in episodes.update(200, [WRONG])] == [(2,)]
    for step, seen in enumerate([whole, elsewhere, whole, WRONG, whole], start=201):
        assert episodes.update(step, [seen]) == []
    [end] = episodes.update(206, [])
    assert end.message == "Ended: aggregation-error, from step 200 to step 205."
    assert end.phase == "ended"


@pytest.mark.parametrize(
    "other",
    [
        replace(WRONG, key="other", ranks=(1,)),
        replace(WRONG, key="other", ranks=(1, 2)),
        replace(WRONG, key="other", kind="unreduced-gradient", ranks=()),
        replace(WRONG, key="other", family="", ranks=()),
    ],
)
def test_a_wrong_reduction_of_another_rank_or_kind_is_another_fault(other: Finding) -> None:
    episodes = Episodes()
    episodes.update(200, [WRONG])
    assert episodes.update(201, [other])[0].severity == "error"


def test_who_is_named_later_is_told_then() -> None:
    episodes = Episodes()
    episodes.update(200, [replace(WRONG, key="integrity scale", ranks=())])
    assert episodes.update(201, [WRONG])[0].ranks == (2,)


def test_a_parameter_that_is_not_reduced_is_clipped_and_applied_otherwise_on_each_rank() -> None:
    episodes = Episodes()
    episodes.update(40, [finding("unreduced-gradient", (), "temp", 40)])
    applied = finding("aggregation-error", (), "applied gradient", 47)
    unreduced = finding("unreduced-gradient", (), "temp", 40)
    assert [event.severity for event in episodes.update(47, [unreduced, applied])] == ["info"]
    elsewhere = replace(applied, key="elsewhere", where="all 11 layers")
    assert [event.severity for event in episodes.update(48, [unreduced, applied, elsewhere])] == ["error"]


def test_a_parameter_that_one_rank_alone_trains_parts_its_replica() -> None:
    episodes = Episodes()
    episodes.told(replace(PREFLIGHT, step=40, where="trainable flags of temp"))
    assert [event.severity for event in episodes.update(41, [replace(DRIFT, since=40)])] == ["info"]


def skipped(step: int) -> Finding:
    return replace(finding("aggregation-error", (2,), "applied gradient", step), effects=("replica-drift",))


def test_a_skipped_update_and_the_drift_it_leaves_are_one_alarm_and_the_end_says_what_goes_on() -> None:
    episodes = Episodes()
    drift = replace(DRIFT, since=4)
    events = episodes.update(5, [skipped(4), drift])
    assert [(e.kind, e.severity) for e in events] == [("aggregation-error", "error"), ("replica-drift", "info")]
    [end] = episodes.update(6, [drift])
    assert end.message.endswith("What it has left behind goes on: replica-drift of embedding.")
    assert end.remedy == drift.remedy
    later = [event for step in range(7, 300) for event in episodes.update(step, [drift])]
    assert {(e.severity, e.message.split(",")[0]) for e in later} == {("error", "Still")}  # its cause is over


@pytest.mark.parametrize(("ranks", "severities"), [((2,), ["error", "info"]), ((1,), ["error", "error"])])
def test_a_step_that_one_rank_did_not_take_and_its_count_of_steps_are_one_alarm(
    ranks: tuple[int, ...], severities: list[str]
) -> None:
    """A rank that leaves one update out after a NaN had two errors, one by its optimizer's counter."""
    applied = AppliedCheck(31, 1.0, (1.0, 1.0, None, 1.0), 1e-3, 0.0, 1e-3, (), (2,), None)
    judged = reduction(make(32, *[[1.0] * 4] * 3), ReductionEvidence(applied=applied))
    counts = Unlike(f"unlike:counters:{ranks}", ranks, "optimizer's step", "31 and 30.", "Step it everywhere.", 32)
    events = Episodes().update(32, [*judged, *setting_findings((counts,))])
    assert sorted(event.severity for event in events) == sorted(severities)
    by_place = {event.where: event for event in events}
    assert by_place["applied gradient"].severity == "error"
    assert by_place["optimizer's step"].severity == severities[1]


@pytest.mark.parametrize("groups", [((0,), (1,)), ((0, 2, 3), (1,))])
def test_a_step_that_one_rank_did_not_take_explains_its_count_and_its_replica(groups: Parts) -> None:
    """Of two ranks the counters name nobody: their error came first, with a remedy of its own."""
    ranks = sum(map(len, groups))
    applied = AppliedCheck(31, 1.0, (None, *[1.0] * (ranks - 1)), 1e-3, 0.0, 1e-3, (), (1,), None)
    judged = reduction(make(32, *[[1.0] * ranks] * 3), ReductionEvidence(applied=applied))
    odd = (1,) if ranks > 2 else ()
    counts = Unlike(f"unlike:counters:{odd}", odd, "optimizer's step", "31 and 30.", "Step it everywhere.", 32)
    drift = replicas(make(33, *[[1.0] * ranks] * 3), groups, None)
    episodes = Episodes()
    found = [*setting_findings((counts,)), *judged]
    events = [*episodes.update(32, found), *episodes.update(33, [*found, *drift])]
    assert [(one.kind, one.severity) for one in events] == [
        ("aggregation-error", "error"),
        ("config-mismatch", "info"),
        ("replica-drift", "info"),
    ]


def test_other_layers_of_other_bits_are_one_fault() -> None:
    """A rank that alone clips each parameter by its own norm had 18 errors in 64 steps."""
    episodes, events = Episodes(), list[Event]()
    for step, layers in enumerate(((3, 4), (4,), (0, 3), (3, 4), (0, 1, 2)), start=1):
        seen = ReductionEvidence(layers=tuple("abcde"), received=dict.fromkeys(layers, ((0,), (1,))))
        events += episodes.update(step, reduction(make(step, *[[1.0] * 2] * 3), seen))
    [event] = events
    assert (event.kind, event.where, event.severity) == ("aggregation-error", "d, e", "error")
    drift = replicas(make(6, *[[1.0] * 2] * 3), ((0,), (1,)), None)
    *_, end = episodes.update(6, drift)
    assert "a replica-drift follows" not in end.remedy


def test_a_hook_that_is_found_behind_its_rank_explains_it() -> None:
    outlier = finding("outlier-rank", (2,), "gradient norm", 4)
    hook = replace(finding("outlier-rank", (2,), HOOKS, 4), key="script-hooks:(2,)")
    episodes = Episodes()
    assert [event.severity for event in episodes.update(4, [outlier])] == ["error"]
    [event] = episodes.update(7, [outlier, hook])
    assert (event.severity, event.follows) == ("info", "outlier-rank (gradient norm)")
    assert event.message.startswith("Explains the outlier-rank of step 4 (gradient norm): ")
    other = Episodes()
    other.update(4, [replace(outlier, ranks=(1,))])
    assert other.update(7, [replace(outlier, ranks=(1,)), hook])[0].severity == "error"


def test_a_gradient_that_nobody_clears_is_one_fault_however_its_sum_looks_later() -> None:
    """Of the second step it looked like that of before, and later like something that is missing or counted twice."""
    unheld = setting_findings(reported(Missed(unheld=("h.weight",)), 1))
    left = replace(WRONG, key="integrity leftover h", ranks=(), where="h", since=2)
    later = replace(left, key="integrity unexplained", since=4)
    episodes = Episodes()
    assert [event.severity for event in episodes.update(2, [*unheld, left])] == ["warning", "info"]
    assert episodes.update(3, [*unheld, left]) == episodes.update(4, [*unheld, later]) == []
    for other in (replace(later, where="all 5 layers"), replace(later, ranks=(1,))):
        again = Episodes()
        again.update(2, [*unheld, left])
        assert [event.severity for event in again.update(4, [*unheld, other])][:1] == ["error"]


def test_an_outlier_by_way_of_the_replica_that_it_parts_follows_from_it() -> None:
    """A rank clips by a norm of its own, its replica drifts, and some day its gradient is another one."""
    clipped = replace(finding("aggregation-error", (2,), "applied gradient", 1), effects=("replica-drift",))
    drift = replace(DRIFT, ranks=(2,), since=2)
    episodes = Episodes()
    episodes.update(1, [clipped])
    episodes.update(2, [clipped, drift])
    [late] = episodes.update(75, [clipped, drift, finding("outlier-rank", (2,), "gradient norm", 72)])
    assert (late.severity, late.follows) == ("info", "aggregation-error (applied gradient)")
    other, *_ = episodes.update(76, [clipped, drift, finding("outlier-rank", (1,), "gradient norm", 72)])
    assert other.severity == "error"


def test_a_drift_that_began_before_is_not_its_effect() -> None:
    events = Episodes().update(5, [skipped(4), replace(DRIFT, since=3)])
    assert [e.severity for e in events] == ["error", "error"]


def test_after_its_cause_has_ended_a_drift_is_an_alarm() -> None:
    episodes = Episodes()
    episodes.update(5, [skipped(4)])
    episodes.update(6, [])
    assert episodes.update(100, [replace(DRIFT, since=90)])[0].severity == "error"


def test_a_graver_finding_is_no_effect_of_a_lesser_one() -> None:
    stale = finding("zero-gradient", (2,), "parameters", 3, "warning")
    outlier = finding("outlier-rank", (2,), "gradient norm", 5, "warning")
    assert [e.severity for e in Episodes().update(5, [stale, outlier])] == ["warning", "info"]
    assert [e.severity for e in Episodes().update(5, [stale, replace(outlier, severity="error")])] == [
        "warning",
        "error",
    ]


@pytest.mark.parametrize("ranks", [(2,), (0, 1)])
def test_the_outlier_that_another_objective_makes_is_no_second_alarm(ranks: tuple[int, ...]) -> None:
    episodes = Episodes()
    cause = finding("objective-mismatch", ranks, "loss", 1, "error")
    outlier = finding("outlier-rank", ranks, "gradient norm", 2, "error")
    assert [e.severity for e in episodes.update(1, [cause])] == ["error"]
    [event] = episodes.update(2, [cause, outlier])
    assert event.severity == "info"
    assert event.message.startswith("Follows from the objective-mismatch of step 1 (loss): ")
    assert [e.severity for e in Episodes().update(2, [cause, replace(outlier, ranks=(3,))])] == ["error", "error"]


def test_the_links_survive_a_resume() -> None:
    episodes, other = Episodes(), Episodes()
    episodes.update(5, [skipped(4)])
    other.load_state_dict(json.loads(json.dumps(episodes.state_dict())))
    drift = replace(DRIFT, since=4)
    assert episodes.update(6, [skipped(4), drift]) == other.update(6, [skipped(4), drift])
    assert other.state_dict() == episodes.state_dict()


OUTLIER = replace(finding("outlier-rank", (2,), "gradient norm", 9, "warning"), log_excess=1.0)


@pytest.mark.parametrize(
    "where", ["learning rate", "settings of layers.1", "autocast", "optimizer's parameters of head"]
)
def test_an_outlier_after_a_setting_that_was_told_is_no_second_alarm_and_guesses_no_cause(where: str) -> None:
    guessed = replace(
        OUTLIER,
        message="Other data. Norm 2 times. Likely: the loss is not divided.",
        guesses=("Other data. ", "Likely: the loss is not divided."),
    )
    episodes = Episodes()
    episodes.told(replace(PREFLIGHT, where=where))
    [event] = episodes.update(20, [guessed])
    assert (event.severity, "Likely" in event.message) == ("info", False)
    assert event.message.startswith(f"Follows from the config-mismatch of the preflight ({where}): Norm 2 times.")
    assert event.remedy == "Mend what it follows from: it should end with it."


def test_of_two_ranks_that_differ_in_a_setting_either_may_be_the_outlier() -> None:
    episodes = Episodes()
    episodes.told(replace(PREFLIGHT, ranks=()))
    [event] = episodes.update(20, [replace(OUTLIER, ranks=(0, 1))])
    assert event.severity == "info"


@pytest.mark.parametrize(("since", "step", "severity"), [(20, 49, "info"), (20, 23, "warning"), (5, 49, "warning")])
def test_when_an_outlier_began_is_known_the_less_the_longer_it_took(since: int, step: int, severity: str) -> None:
    """The rows are known to come again from step 21 on."""
    episodes = Episodes()
    rows = finding("data-order-mismatch", (2,), "loader", 21)
    episodes.update(21, [rows])
    [event] = episodes.update(step, [rows, replace(OUTLIER, since=since)])
    assert event.severity == severity


def test_a_consequence_is_dated_no_earlier_than_its_cause() -> None:
    """The report once marked step 18 for an outlier that follows from the rows of step 21."""
    episodes = Episodes()
    rows = finding("data-order-mismatch", (2,), "loader", 21)
    episodes.update(21, [rows])
    outlier = replace(OUTLIER, since=18, message="Rank 2 has a larger norm, since about step 18. Norm 1.18.")
    events = [event for step in range(49, 180) for event in episodes.update(step, [rows, outlier])]
    said = [event.message for event in events if event.kind == "outlier-rank"]
    assert [message.split(":")[0] for message in said] == [
        "Follows from the data-order-mismatch of step 21 (loader)",
        "Still, since step 21",
    ]
    for message in said:
        assert "Rank 2 has a larger norm, since step 21. Norm 1.18." in message


def test_what_no_optimizer_holds_is_not_cleared_by_it() -> None:
    wrong = finding("aggregation-error", (), "aggregated gradient", 2)
    for where, severity in (("optimizer's parameters of layers.1", "info"), ("learning rate", "error")):
        episodes = Episodes()
        episodes.told(replace(PREFLIGHT, where=where))
        assert [event.severity for event in episodes.update(2, [wrong])] == [severity]


def test_the_order_of_gradients_is_another_one_under_autocast() -> None:
    """Both are found at one step, the reduction first; a mode of the modules changes no order."""
    wrong = finding("aggregation-error", (), "all 11 layers", 4)
    autocast = replace(
        finding("config-mismatch", (2,), "autocast", 4), effects=effects_of_settings("config-mismatch", "autocast")
    )
    assert [(one.kind, one.severity) for one in Episodes().update(4, [wrong, autocast])] == [
        ("config-mismatch", "error"),
        ("aggregation-error", "info"),
    ]
    mode = replace(autocast, effects=effects_of_settings("config-mismatch", "training mode"))
    assert {one.severity for one in Episodes().update(4, [wrong, mode])} == {"error"}


class Notes(Detector):
    """Note at each step that rank 2 is other."""

    def step(self, record: StepRecord, evidence: Evidence, before: Sequence[Finding] = ()) -> list[Finding]:
        self.notes = (Event(record.step, "outlier-rank", "info", (2,), "loss", None, None, "Other rows.", "Look."),)
        return []


def test_a_note_about_a_rank_is_left_out_while_an_open_fault_explains_it() -> None:
    run = Run()
    run.judge._detectors = (SettingsDetector(), Notes())
    rate = Unlike("lr", (2,), "learning rate", "It differs.", "Change it.", 1)
    other = replace(rate, ranks=(1,))
    for found, notes in (((), 1), ((rate,), 0), ((rate,), 0), ((), 1), ((other,), 1)):
        events = run.judge.step(run.record(), Evidence(unlike=found))
        assert [event.kind for event in events].count("outlier-rank") == notes


@pytest.mark.parametrize(("crosses", "severities"), [(True, ["warning", "info"]), (False, ["warning", "warning"])])
def test_where_ranks_train_on_each_others_rows_the_first_outlier_explains_the_next(
    crosses: bool, severities: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A contrastive loss over all ranks: one rank's wrong labels changed the gradient of the rank that it blamed."""
    first = replace(finding("outlier-rank", (2,), "scale", 1, "warning"), key="outlier-layer:2")
    later = replace(finding("outlier-rank", (0,), "gradient direction", 17, "warning"), key="outlier-rank:0")
    note = replace(later, key="outlier-rank:1", ranks=(1,), severity="info")
    compared, episodes, made = RankComparison(16.0, TORCH, EffectsConfig()), Episodes(), Run(ranks=4)
    events = []
    for found in ([first], [first, later, note]):
        monkeypatch.setattr(compared, "_one_of_each", lambda *_, found=found: found)
        record = made.record()
        events += episodes.update(record.step, compared.step(record, Evidence(crosses=crosses)))
    assert [event.severity for event in events if event.ranks != (1,)] == severities
