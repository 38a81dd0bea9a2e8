"""Faults of Megatron-LM's public issues are found with ranks and cause; their healthy trainings are silent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds_silent.drill.faults.catalogue import FAULTS
from ds_silent.drill.faults.fault import Fault
from ds_silent.drill.faults.injection import NOTHING, Target
from ds_silent.drill.verdicts import FaultVerdict, judge, judge_healthy
from ds_silent.extras import installed
from ds_silent.practice.ranks import on_ranks
from ds_silent.sinks.jsonl import read_events
from megatron_issues import SCENARIOS, Scenario, training_of

RANKS, STEPS, REPLICA_INTERVAL = 4, 9, 5
PUBLIC = {name: scenario for name, scenario in SCENARIOS.items() if scenario.issue}


def test_every_public_issue_has_a_training_and_a_healthy_one() -> None:
    issues = {issue for scenario in PUBLIC.values() for issue in scenario.issue.split(", ")}
    assert issues == {
        *("#3023", "#7165", "#6080", "#1622", "#7289", "#1446", "#619", "#656", "#565", "#4609", "#5916", "#950"),
        "#7299",
    }
    assert not set(PUBLIC) & set(FAULTS)
    assert {scenario.healthy for scenario in PUBLIC.values()} == set(SCENARIOS) - set(PUBLIC)
    for name, scenario in SCENARIOS.items():
        twin = SCENARIOS[scenario.healthy]
        assert twin.expected is None, name
        assert (twin.shape == scenario.shape) or name == "stale-weights", name
        assert (scenario.expected is None) == (name == scenario.healthy), name


def train(send: Callable[[str], None], directory: str) -> None:
    for name, scenario in SCENARIOS.items():
        block = {
            "output_dir": f"{directory}/{name}",
            "tensorboard": False,
            "integrity": {"replica_interval": REPLICA_INTERVAL},
        }
        with training_of(scenario, block) as training:
            for _ in range(STEPS):
                training.step()
        send(name)


def verdict_of(name: str, scenario: Scenario, events: list[dict[str, Any]]) -> FaultVerdict:
    if scenario.expected is None:
        return judge_healthy(events)
    fault = Fault(
        name,
        lambda target, me: NOTHING,  # what goes wrong is in the scenario
        scenario.title,
        scenario.who,
        (scenario.expected,),
        "replica" if scenario.expected == "replica-drift" else "reduction",
        says=scenario.says,
    )
    return judge(fault, Target(2, RANKS, scenario.first_step), events, 1, REPLICA_INTERVAL)


@pytest.mark.skipif(not installed("megatron.core"), reason="megatron-core is not installed")
@pytest.mark.matrix
def test_what_happened_to_somebody_is_told(tmp_path: Path) -> None:
    wrong = {}
    for name in on_ranks(train, (str(tmp_path),), RANKS):
        scenario = SCENARIOS[name]
        events = [event for path in (tmp_path / name).glob("**/events.jsonl") for event in read_events(path)]
        verdict = verdict_of(name, scenario, sorted(events, key=lambda event: int(event["step"])))
        if not (verdict.answer == "missed" if scenario.expected is None else verdict.right):
            wrong[name] = verdict, events
    assert not wrong, "\n".join(f"{name}: {verdict} {events}" for name, (verdict, events) in wrong.items())
