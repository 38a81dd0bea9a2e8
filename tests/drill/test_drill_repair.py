"""Faults that are answered: the drill believes weights and optimizer state, not the word "repaired"."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from rich.console import Console
from torch import Tensor

from ds_silent.drill.faults.catalogue import FAULTS
from ds_silent.drill.faults.fault import DYNAMIC, MAJORITY, MEAN, RETRY
from ds_silent.drill.faults.injection import NOTHING, Collective, Injection, Target
from ds_silent.drill.printing import print_report, sentence
from ds_silent.drill.run_drill import DrillOptions, Outcome, exit_code, judged, to_json, trial_of, trials_of
from ds_silent.drill.run_trial import TrialRun, run_trial
from ds_silent.drill.setting import DrillSetting, make_setting
from ds_silent.drill.training import Trial
from ds_silent.drill.verdicts import judge_repair
from ds_silent.practice.ranks import on_ranks
from ds_silent.records import Repair
from tests.drill.cold_start import cold_start

TARGET = Target(2, 4, 4)
RESULT = torch.arange(1.0, 9.0)
ANSWERED = {name: fault for name, fault in FAULTS.items() if fault.response is not None}


# -- the verdict ------------------------------------------------------------------------------------------------------

HEALTHY = [(f"{step}",) * 4 for step in range(1, 9)]


def claim(step: int, ranks: tuple[int, ...] = (2,), message: str = "") -> dict[str, Any]:
    text = message or f"After step {step} rank 2 got the bits; all replicas are equal again"
    return {"step": step, "kind": "repaired", "severity": "info", "ranks": list(ranks), "message": text, "where": None}


def apart(first: int, last: int = 8, everywhere: bool = False) -> list[tuple[str, ...]]:
    """Rank 2 is off after these steps; or all ranks, by the same."""
    states = list(HEALTHY)
    for step in range(first, last + 1):
        states[step - 1] = ("off",) * 4 if everywhere else tuple("off" if r == 2 else str(step) for r in range(4))
    return states


@pytest.mark.parametrize(
    ("claims", "states", "answer"),
    [
        ([claim(4)], HEALTHY, "repaired"),
        ([], HEALTHY, "not repaired"),
        ([], apart(4), "not repaired"),
        ([claim(4)], apart(4), "wrong state"),
        ([claim(4)], apart(4, everywhere=True), "wrong state"),  # equal is not enough: it must be the healthy state
        ([claim(4)], apart(6, 6), "wrong state"),
        ([claim(4)], apart(3, 3), "wrong state"),  # before the fault
        ([claim(4)], HEALTHY[:0], "wrong state"),
        ([claim(5)], HEALTHY, "wrong step"),
        ([claim(4), claim(6)], HEALTHY, "wrong step"),
        ([claim(4, (1,))], HEALTHY, "wrong ranks"),
        ([claim(4, message="Something was done")], HEALTHY, "wrong words"),
    ],
)
def test_what_counts_as_repaired(claims: list[dict[str, Any]], states: list[tuple[str, ...]], answer: str) -> None:
    fault = FAULTS["majority-update-skipped"]
    verdict = judge_repair(fault, TARGET, MAJORITY, claims, states, HEALTHY)
    assert verdict.answer == answer
    assert verdict.right == (answer == "repaired")


def test_an_average_makes_the_ranks_equal_and_no_more() -> None:
    fault, told = FAULTS["dynamic-update-skipped"], "all replicas are equal again"
    states = apart(4, 4)
    states[4:] = [("mean",) * 4] * 4
    assert judge_repair(fault, TARGET, DYNAMIC, [claim(5, (), told)], states, HEALTHY).answer == "repaired"
    assert judge_repair(fault, TARGET, DYNAMIC, [claim(6, (), told)], states, HEALTHY).answer == "wrong step"
    assert judge_repair(fault, TARGET, DYNAMIC, [claim(5, (), told)], apart(4), HEALTHY).answer == "wrong state"
    assert judge_repair(fault, TARGET, DYNAMIC, [claim(5, (2,), told)], states, HEALTHY).answer == "wrong ranks"
    compared = [(response.compared(4), response.compared(5)) for response in (MAJORITY, MEAN, DYNAMIC)]
    assert compared == [(4, 5), (6, 6), (4, 7)]
    assert (MAJORITY.settled(4), MEAN.settled(4), DYNAMIC.settled(4)) == (4, 6, 5)


def test_every_step_or_one() -> None:
    fault = FAULTS["majority-signs-received"]
    claims = [claim(step) for step in range(4, 9)]
    assert judge_repair(fault, TARGET, MAJORITY, claims, HEALTHY, HEALTHY).answer == "repaired"
    assert judge_repair(fault, TARGET, MAJORITY, claims[:-1], HEALTHY, HEALTHY).answer == "wrong step"


def test_what_cannot_be_repaired_must_be_said_and_never_claimed() -> None:
    fault = FAULTS["retry-burst-always"]
    told = {**claim(4, ()), "kind": "aggregation-error", "severity": "error"}
    told["message"] = "The reduction of step 4 was repeated 3 times and stayed wrong."
    wrong = apart(4, everywhere=True)
    assert judge_repair(fault, TARGET, RETRY, [told], wrong, HEALTHY).answer == "given up"
    assert judge_repair(fault, TARGET, RETRY, [], wrong, HEALTHY).answer == "not said"
    assert judge_repair(fault, TARGET, RETRY, [{**told, "step": 5}], wrong, HEALTHY).answer == "not said"
    assert judge_repair(fault, TARGET, RETRY, [told, claim(4)], wrong, HEALTHY).answer == "claimed"
    assert judge_repair(fault, TARGET, RETRY, [{**told, "ranks": [2]}], wrong, HEALTHY).answer == "wrong ranks"
    assert judge_repair(fault, TARGET, RETRY, [told], HEALTHY, HEALTHY).answer == "wrong state"  # there was no fault
    assert FAULTS["majority-tie"].mended_ranks(TARGET) == ()  # nobody is blamed without a majority
    assert FAULTS["majority-two-ranks"].mended_ranks(TARGET) == (2, 3)


def test_a_healthy_training_must_be_left_alone() -> None:
    nobody = replace(TARGET, step=0)
    assert judge_repair(None, nobody, MEAN, [], HEALTHY, HEALTHY).answer == "untouched"
    assert judge_repair(None, nobody, MEAN, [claim(6)], HEALTHY, HEALTHY).answer == "claimed"
    assert judge_repair(None, nobody, MEAN, [], apart(6, everywhere=True), HEALTHY).answer == "wrong state"
    assert judge_repair(None, nobody, MEAN, [], HEALTHY, HEALTHY[:5]).answer == "wrong state"  # not comparable


# -- which trainings --------------------------------------------------------------------------------------------------


def names(stage: int, ranks: int = 4, **given: Any) -> set[str]:
    options = DrillOptions(ranks=ranks, rank=1, **given)
    trials, _ = trials_of(options, make_setting({"silent_consistency": {}}, ranks, stage))
    return {trial.name for trial in trials if trial.response is not None}


def test_responses_bring_their_own_healthy_trainings_where_they_can_work() -> None:
    everything = {f"healthy-{name}" for name in ("retry", "ordered", "ordered-retry", "majority", "mean", "periodic")}
    assert names(0) == {*ANSWERED, *everything, "healthy-dynamic"}
    retried = {name for name in ANSWERED if name.startswith(("retry", "ordered"))}
    assert names(1) == {*retried, "healthy-retry", "healthy-ordered", "healthy-ordered-retry"}
    assert names(2) == names(3) == set()
    assert not [name for name in names(0, ranks=2) if "majority" in name]
    assert names(0, faults=("mean-update-noisy",)) == {"mean-update-noisy", "healthy-mean"}


def test_with_an_interval_responses_still_measure_every_step() -> None:
    setting = make_setting({"silent_consistency": {"interval": 5, "direction": {"method": "off"}}}, 4)
    trial = trial_of(FAULTS["retry-burst"], DrillOptions(), setting)
    assert (trial.target.step, trial.steps) == (4, 6)
    block = setting.answering(trial.response).block
    assert (block.interval, block.direction.method, block.integrity.aggregation) == (1, "sketch", True)


# -- the injections alone ---------------------------------------------------------------------------------------------


def reduced(injection: Injection, step: int, attempt: int = 0, bucket: int = 0) -> Tensor:
    """What a reduction gives that would add 100 to its input of 1, 2, …, 8."""
    values = RESULT.clone()
    hit = injection.reduction if attempt == 0 else injection.repetition
    under_way = Collective(values, lambda: values.add_(100.0), step, (0, bucket), True, attempt)
    (hit or (lambda plain: plain.run()))(under_way)
    return values


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("retry-burst", {(4, 0)}),
        ("retry-burst-twice", {(4, 0), (4, 1)}),
        ("retry-burst-always", {(step, attempt) for step in (4, 5) for attempt in range(4)}),
        ("retry-flips-one-rank", {(4, 0)}),
        ("retry-contribution-missing", {(4, 0)}),
        ("retry-bucket-dropped", {(4, 0)}),
        ("majority-signs-received", {(4, 0), (5, 0)}),
    ],
)
def test_which_attempts_of_which_step_are_hit(name: str, wrong: set[tuple[int, int]]) -> None:
    fault = FAULTS[name]
    injection = fault.inject(replace(TARGET, size=fault.size), 2)
    tried = [(step, attempt) for step in (3, 4, 5) for attempt in range(4)]
    assert {at for at in tried if not torch.equal(reduced(injection, *at), RESULT + 100.0)} == wrong


def test_half_of_the_ranks_skip_and_no_version_has_a_majority() -> None:
    for ranks in (2, 3, 4, 5):
        made = [FAULTS["majority-tie"].inject(Target(ranks - 1, ranks, 4, 0.05), me) for me in range(ranks)]
        versions: list[str] = []
        for injection in made:
            weight = torch.ones(3)
            weight.grad = torch.tensor([1.0, 2.0, 2.0])
            optimizer = SimpleNamespace(param_groups=[{"params": [weight]}])
            step = partial(weight.sub_, weight.grad)
            if injection.update is None:
                step()
            else:
                injection.update(optimizer, step, 4)
            versions.append(str(weight.tolist()))
        assert max(versions.count(version) for version in versions) * 2 <= ranks


def test_a_repair_is_damaged_once_or_always() -> None:
    once, always = (FAULTS[f"majority-copy-{name}"].inject(TARGET, 2) for name in ("damaged", "always-damaged"))
    for injection, expected in ((once, [0, 8, 0, 0]), (always, [0, 8, 8, 8])):
        arrived = []
        for step in (3, 4, 4, 5):
            values = torch.zeros(2, dtype=torch.int32)
            assert injection.repair is not None
            injection.repair(values, step)
            arrived.append(int(values[0]))
        assert arrived == expected
    assert FAULTS["majority-copy-damaged"].inject(TARGET, 1) == NOTHING


# -- real trainings, with responders of our own -----------------------------------------------------------------------

ON = {"detectors": {"enabled": True}}
INTACT = ("retry-burst-twice", "majority-update-skipped", "majority-tie", "mean-average-damaged")
MUTATED = {  # how the responder is broken -> the faults that it then meets, and what the drill must say
    "does nothing": (("retry-burst-twice", "not repaired"), ("majority-update-skipped", "not repaired")),
    "claims": (("retry-burst-twice", "wrong state"), ("majority-update-skipped", "wrong state")),
    "forgets the optimizer": (("majority-update-skipped", "wrong step"),),  # the weights come apart again
    "averages the healthy": (("healthy-mean", "wrong state"),),
}


def setting_of(stage: int, dtype: str) -> DrillSetting:
    return make_setting({"silent_consistency": ON}, 4, stage, dtype)


def trial_named(name: str, setting: DrillSetting) -> Trial:
    if name.startswith("healthy"):
        return Trial(name, None, Target(2, 4, 0), 8, response=MEAN if name == "healthy-mean" else None)
    return trial_of(FAULTS[name], DrillOptions(), setting)


def perform(send: Callable[[Any], None], directory: str) -> None:
    """Everything once as it is, then with a responder that is broken in a known way."""
    practice = cold_start(ON, 0, "fp32")
    trial_of_name = partial(trial_named, setting=practice.setting)
    for name in ("healthy", "healthy-mean", *INTACT):
        send(("intact", name, run_trial(practice, trial_of_name(name), Path(directory, "intact", name))))
    for broken, cases in MUTATED.items():
        with ExitStack() as mutations:
            for owner, method, function in _mutations(broken):
                mutations.enter_context(patch.object(owner, method, function))
            for name, _ in cases:
                send((broken, name, run_trial(practice, trial_of_name(name), Path(directory, broken, name))))


def perform_sharded(send: Callable[[Any], None], directory: str) -> None:
    """Where a reduction is repeated by other means."""
    practice = cold_start(ON, 1, "bf16")
    for name in ("healthy", "retry-burst-twice"):
        trial = trial_named(name, practice.setting)
        send(("sharded", name, run_trial(practice, trial, Path(directory, name))))


def _mutations(how: str) -> list[tuple[Any, str, Any]]:
    from ds_silent.frameworks.deepspeed.engine import DeepSpeedFramework
    from ds_silent.respond import responder as respond

    replica_of, take = DeepSpeedFramework.replica, respond._Notes.take

    def claim_reduction(guard: Any, step: int, notes: Any) -> None:
        seen = guard._examine(guard._exchange.peek())
        if seen is not None and guard._anyone(seen.wrong):
            notes.reductions.append((step, seen))
            notes.repairs.append((step, Repair(step, "retry", True, 2, 0, 0.0)))

    def claim_replicas(keeper: Any, replica: Any, found: Any, step: int, *rest: Any) -> Repair:
        keeper.after_update = lambda *given: None  # and never looks again
        return Repair(step, "majority", True, 1, 0, 0.0, ("embedding.weight",), (2,))

    def without_state(capture: Any, optimizer_state: bool, *rest: Any, **named: Any) -> Any:
        return replica_of(capture, False, *rest, **named)

    def average_always(keeper: Any, step: int, due: bool, notes: Any) -> None:
        for _, tensor in keeper._replica().items:
            if tensor.is_floating_point():
                tensor.detach().mul_(1.0 + 2.0**-20)  # as the rounding of a mean may

    def take_what_was_done(notes: Any, step: int) -> Any:
        notes.repairs = [(at, repair) for at, repair in notes.repairs if repair is not None]
        return take(notes, step)

    mutations: dict[str, list[tuple[Any, str, Any]]] = {
        "does nothing": [
            (respond._Retry, "protect", lambda guard, step, notes: None),
            (respond._Compare, "_repair", lambda *given: None),
            (respond._Notes, "take", take_what_was_done),
        ],
        "claims": [(respond._Retry, "protect", claim_reduction), (respond._Compare, "_repair", claim_replicas)],
        "forgets the optimizer": [(DeepSpeedFramework, "replica", without_state)],
        "averages the healthy": [(respond._Compare, "after_update", average_always)],
    }
    return mutations[how]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], TrialRun]:
    folder = str(tmp_path_factory.mktemp("repair"))
    return {(state, name): run for state, name, run in on_ranks(perform, (folder,), 4)}


def outcome_of(runs: dict[tuple[str, str], TrialRun], state: str, named: tuple[str, ...]) -> Outcome:
    setting = setting_of(1, "bf16") if state == "sharded" else setting_of(0, "fp32")
    trials = tuple(trial_named(name, setting) for name in ("healthy", *named))
    own = [runs["sharded" if state == "sharded" else "intact", "healthy"], *(runs[state, name] for name in named)]
    return Outcome(setting, tuple(judged(trials, own, setting)), ())


@pytest.mark.long
def test_under_zero_1_every_rank_gets_its_own_shard_back(tmp_path: Path) -> None:
    runs = {(state, name): run for state, name, run in on_ranks(perform_sharded, (str(tmp_path),), 4)}
    outcome = outcome_of(runs, "sharded", ("retry-burst-twice",))
    repair = outcome.results[1].repair
    assert repair is not None
    assert repair.answer == "repaired"
    assert len(set(outcome.results[1].run.states[-1])) == 4  # shards of the optimizer's state differ
    assert exit_code(outcome) == 0


def test_the_real_responder_repairs_what_it_can_and_says_what_it_cannot(runs: dict[tuple[str, str], TrialRun]) -> None:
    outcome = outcome_of(runs, "intact", ("healthy-mean", *INTACT))
    answers = {result.trial.name: result.repair.answer for result in outcome.results if result.repair is not None}
    assert answers == {
        "healthy-mean": "untouched",
        "retry-burst-twice": "repaired",
        "majority-update-skipped": "repaired",
        "majority-tie": "given up",
        "mean-average-damaged": "repaired",
    }
    assert exit_code(outcome) == 0
    assert "3 of 3 faults that can be repaired were, and 1 of 1 that cannot were left" in sentence(outcome)
    console = Console(width=120, record=True, quiet=False)
    print_report(outcome, console)
    text = console.export_text()
    assert all(word in text for word in ("repaired", "given up", "untouched"))
    told = {training["name"]: training["repair"] for training in to_json(outcome)["trainings"]}
    assert told["healthy"] is None
    assert told["majority-tie"] == {"answer": "given up", "step": 4, "right": True}


@pytest.mark.parametrize(("broken", "name", "answer"), [(b, n, a) for b, cases in MUTATED.items() for n, a in cases])
def test_a_responder_that_is_broken_makes_the_drill_fail(
    broken: str, name: str, answer: str, runs: dict[tuple[str, str], TrialRun]
) -> None:
    outcome = outcome_of(runs, broken, (name,))
    result = outcome.results[1]
    assert result.repair is not None
    assert result.repair.answer == answer
    assert result.verdict.answer == ("missed" if name.startswith("healthy") else "found")  # the alarm itself works
    assert exit_code(outcome) == 1
    assert "does not work everywhere" in sentence(outcome)
