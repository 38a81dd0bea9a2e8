"""The seed scenarios, and the proof that ranks hold what the scenario says."""

from __future__ import annotations

import io
import random

import numpy as np
import pytest
import torch
from rich.console import Console

from finetune import scenarios
from finetune.sampler import Plan, ResumableSampler
from finetune.settings import SamplerMode, Scenario, UserError

ROW_IDS = np.arange(1000, 1200, dtype=np.int64)  # rows were dropped before: ids are not positions


def plan_of(mode: SamplerMode) -> Plan:
    return Plan(rows=200, world_size=4, micro_batch=2, accumulation=3, mode=mode)


def proofs(scenario: Scenario, mode: SamplerMode, seed_of_rank: list[int]) -> list[scenarios.Proof]:
    """What four ranks would hand in, each made by really seeding and asking a sampler."""
    handed_in = []
    for rank, seed in enumerate(seed_of_rank):
        scenarios.apply_seed(seed)
        sampler = ResumableSampler(plan_of(mode), seed, rank)
        handed_in.append(scenarios.proof_of(ROW_IDS[sampler.peek().reshape(-1)].tolist()))
    return handed_in


@pytest.mark.parametrize(
    ("scenario", "seeds"), [("s1-1", [42, 42, 42, 42]), ("s1-2", [43, 42, 42, 42]), ("s1-3", [42, 43, 44, 45])]
)
@pytest.mark.parametrize("mode", ["sharded", "replicated"])
def test_each_scenario_is_what_the_paper_says_and_is_accepted(
    scenario: Scenario, seeds: list[int], mode: SamplerMode
) -> None:
    assert [scenarios.rank_seed(scenario, 42, rank) for rank in range(4)] == seeds
    expected = scenarios.expected_proofs(plan_of(mode), scenario, 42, ROW_IDS, epoch=0, step=0)
    observed = proofs(scenario, mode, seeds)
    scenarios.refuse_unless_as_told(expected, observed, scenario, mode)
    same_rows = len({tuple(proof[2:]) for proof in observed}) == 1
    assert same_rows == (mode == "replicated" and scenario == "s1-1")


@pytest.mark.parametrize("scenario", ["s1-2", "s1-3"])
def test_every_rank_believing_to_be_rank_0_is_refused(scenario: Scenario) -> None:
    """The published code's mistake: the rank is read before the process group exists."""
    expected = scenarios.expected_proofs(plan_of("sharded"), scenario, 42, ROW_IDS, 0, 0)
    everywhere = scenarios.rank_seed(scenario, 42, 0)
    with pytest.raises(UserError, match=f"scenario {scenario} with the sharded sampler wants rank 1 to have seed"):
        scenarios.refuse_unless_as_told(expected, proofs(scenario, "sharded", [everywhere] * 4), scenario, "sharded")


def test_a_later_seeding_of_everything_is_refused() -> None:
    expected = scenarios.expected_proofs(plan_of("sharded"), "s1-3", 42, ROW_IDS, 0, 0)
    observed = proofs("s1-3", "sharded", [42, 43, 44, 45])
    torch.manual_seed(42)
    observed[3] = scenarios.proof_of(observed[3][2:])
    with pytest.raises(UserError, match="rank 3 to have seed 45, but its generators hold 42"):
        scenarios.refuse_unless_as_told(expected, observed, "s1-3", "sharded")


def test_other_rows_than_the_scenario_says_are_refused() -> None:
    expected = scenarios.expected_proofs(plan_of("sharded"), "s1-1", 42, ROW_IDS, 0, 0)
    observed = proofs("s1-1", "replicated", [42] * 4)
    with pytest.raises(UserError, match="wants rank 0 to start with rows"):
        scenarios.refuse_unless_as_told(expected, observed, "s1-1", "sharded")


def test_a_proof_fits_int32_whatever_seeded_the_generators() -> None:
    torch.manual_seed(2**63 + 5)
    assert all(0 <= value < 2**31 for value in scenarios.proof_of([1, 2]))


def test_all_generators_are_seeded() -> None:
    drawn = []
    for seed in (5, 6, 5):
        scenarios.apply_seed(seed)
        drawn.append((random.random(), float(np.random.random()), float(torch.rand(()))))
    assert drawn[0] == drawn[2]
    assert all(one != other for one, other in zip(drawn[0], drawn[1], strict=True))


def test_scenarios_need_ranks_to_differ() -> None:
    scenarios.checked_world_size("s1-1", 1)
    with pytest.raises(UserError, match="s1-3 needs at least 2 ranks, got 1"):
        scenarios.checked_world_size("s1-3", 1)


@pytest.mark.parametrize(
    ("scenario", "mode", "wrong"),
    [("s1-1", "sharded", False), ("s1-2", "sharded", True), ("s1-1", "replicated", True)],
)
def test_the_table_shows_seeds_and_rows_and_stays_short(scenario: Scenario, mode: SamplerMode, wrong: bool) -> None:
    console = Console(file=io.StringIO(), width=120)
    console.print(scenarios.table_of([[7, 7, 11, 12]] * 100, scenario, mode))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "11 12" in text
    assert "and 84 more ranks" in text
    assert ("So it was asked for" in text) == wrong
