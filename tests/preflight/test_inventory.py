"""One rank's items: what is read of settings, environment, code and samplers, and what comes of it among ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SequentialSampler

from ds_silent.frameworks.deepspeed.state import config_items
from ds_silent.preflight.environment import environment_items, git_revision
from ds_silent.preflight.inventory import (
    SamplerFacts,
    optimizer_items,
    sampler_facts,
    sampler_items,
)
from ds_silent.preflight.items import item_of
from ds_silent.preflight.messages import events_of
from ds_silent.records import Event
from finetune.sampler import Plan, ResumableSampler
from finetune.scenarios import rank_seed
from tests.preflight.test_preflight import items_and_hashes
from tests.support.preflight import outcome_of


def test_what_cannot_be_read_is_an_item() -> None:
    def fails() -> str:
        raise OSError("no")

    assert item_of("thing", "code", fails).shown == "cannot be read (OSError)"


def test_the_configuration_without_where_a_run_writes() -> None:
    def of(**changes: Any) -> dict[str, tuple[int, int]]:
        config = {
            "fp16": {"enabled": True},
            "silent_consistency": {"output_dir": "a", "interval": 1},
            "x": 1,
            **changes,
        }
        return {item.name: item.hash for item in config_items(config)}

    assert of() == of(silent_consistency={"interval": 1, "output_dir": "b"}, wandb={"team": "t"}, steps_per_print=3)
    changed = {
        "fp16": "ds_config fp16",
        "silent_consistency": "ds_config silent_consistency",
        "x": "ds_config: the rest",
        "optimizer": "ds_config optimizer",
    }
    for key, name in changed.items():
        other = of(**{key: {"interval": 2}})
        assert {item for item in other if other[item] != of()[item]} == {name}


@pytest.mark.parametrize("change", [{"lr": 0.2}, {"betas": (0.9, 0.98)}, {"weight_decay": 0.3}, {"amsgrad": True}])
def test_every_hyper_parameter_counts(change: dict[str, Any]) -> None:
    def of(**arguments: Any) -> list[Any]:
        module = torch.nn.Linear(2, 2)
        return [
            item.hash for item in optimizer_items(torch.optim.AdamW(module.parameters(), **arguments), None, module)
        ]

    assert of(lr=0.1) == of(lr=0.1)
    different = [a != b for a, b in zip(of(lr=0.1), of(**{"lr": 0.1, **change}), strict=True)]
    assert sum(different) == 1


def test_variables_that_change_numbers_and_those_that_do_not() -> None:
    def changed(**environment: str) -> set[str]:
        pairs = zip(environment_items({}), environment_items(environment), strict=True)
        return {a.name for a, b in pairs if a.hash != b.hash}

    assert changed(NCCL_ALGO="Ring") == {"NCCL_* variables"}
    assert changed(HCCL_DETERMINISTIC="true") == {"HCCL_* variables"}
    assert changed(NVIDIA_TF32_OVERRIDE="0") == {"NVIDIA_TF32_OVERRIDE"}
    assert changed(NCCL_SOCKET_IFNAME="eth1", HCCL_IF_IP="10.0.0.1", NCCL_DEBUG="INFO", HOME="/x") == set()


def test_the_revision_is_read_from_files(tmp_path: Path) -> None:
    git, name = tmp_path / ".git", "refs/heads/main"
    assert git_revision(tmp_path / "no" / "where") in ("none", git_revision(tmp_path))
    (git / "refs" / "heads").mkdir(parents=True)
    (git / "HEAD").write_text(f"ref: {name}\n")
    (git / "packed-refs").write_text(f"# pack-refs\n{'b' * 40} {name}\n")
    assert git_revision(tmp_path) == "b" * 40
    (git / name).write_text("a" * 40 + "\n")
    assert git_revision(tmp_path) == "a" * 40
    (git / "HEAD").write_text("c" * 40)
    inner = tmp_path / "src"
    inner.mkdir()
    assert git_revision(inner) == "c" * 40
    linked = tmp_path / "linked"
    tree = git / "worktrees" / "linked"
    (tree).mkdir(parents=True)
    linked.mkdir()
    (linked / ".git").write_text(f"gitdir: {tree}\n")
    (tree / "HEAD").write_text(f"ref: {name}\n")
    (tree / "commondir").write_text("../..\n")
    assert git_revision(linked) == "a" * 40


def test_samplers_that_tell_how_they_share() -> None:
    data = list(range(10))

    def facts(rank: int, seed: int = 0, epoch: int = 0) -> SamplerFacts:
        sampler: DistributedSampler[int] = DistributedSampler(data, 4, rank, seed=seed)  # type: ignore[arg-type]
        sampler.set_epoch(epoch)
        found = sampler_facts(DataLoader(data, sampler=sampler))  # type: ignore[arg-type]
        assert found is not None
        return found

    assert (facts(2).world_size, facts(2).rank, facts(2).rows, facts(2, seed=7).seed) == (4, 2, 10, 7)
    assert facts(1).permutation == facts(3).permutation
    assert len({facts(1).permutation, facts(1, seed=1).permutation, facts(1, epoch=1).permutation}) == 3
    assert sampler_facts(DataLoader(data)) is None  # type: ignore[arg-type]
    assert sampler_facts(None) is None


def test_what_accelerate_cuts_once_more_is_a_share_of_a_share() -> None:
    data = list(range(96))
    inner: DistributedSampler[int] = DistributedSampler(data, 2, 1)  # type: ignore[arg-type]
    for sampler, expected in ((inner, (4, 1)), (SequentialSampler(data), (2, 0))):
        shard = BatchSamplerShard(BatchSampler(sampler, 8, False), num_processes=2, process_index=0)
        found = sampler_facts(DataLoader(data, batch_sampler=shard))  # type: ignore[arg-type]
        assert found is not None
        assert (found.world_size, found.rank) == expected


def sampler_events(*facts: SamplerFacts | None) -> list[Event]:
    """What the preflight says of these ranks' samplers."""
    return events_of(outcome_of(*items_and_hashes(*[sampler_items(one, len(facts)) for one in facts])))


def shares(*pairs: tuple[int, int], picked: str = "") -> list[SamplerFacts]:
    """A sampler per rank from (number of shares, share taken), all of one permutation; of which rows on each rank."""
    return [
        SamplerFacts(size, rank, (1, 2), 3, 100, picked[place : place + 1]) for place, (size, rank) in enumerate(pairs)
    ]


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (shares((4, 0), (4, 1), (4, 2), (4, 3)), []),
        (shares((4, 3), (4, 1), (4, 0), (4, 2)), []),  # any permutation of the shares is one
        (shares((1, 0)), []),
        ([None] * 4, []),
        (shares(*[(1, 0)] * 4), [("duplicate-data", "error", (0, 1, 2, 3))]),
        (shares(*[(1, 0)] * 2), [("duplicate-data", "error", (0, 1))]),  # known without a majority
        (shares((2, 0), (2, 1), (2, 0), (2, 1)), [("duplicate-data", "error", (0, 1, 2, 3))] * 2),
        (shares((4, 0), (4, 1), (1, 0), (4, 3)), [("duplicate-data", "error", (2,))]),
        (shares((4, 0), (4, 1), (4, 1), (4, 3)), [("duplicate-data", "error", (1, 2))]),
        (shares((8, 0), (8, 1), (8, 2), (8, 3)), [("low-coverage", "warning", (0, 1, 2, 3))]),
        (shares((4, 0), (4, 1), (4, 2), (4, 3), picked="aaaa"), []),
        (shares((4, 0), (4, 1), (4, 2), (4, 3), picked="aaba"), [("data-order-mismatch", "error", (2,))]),
        (shares((2, 0), (2, 1), picked="ab"), [("data-order-mismatch", "error", ())]),
        (shares(*[(1, 0)] * 4, picked="abcd"), []),  # each rank's own data
        (shares(*[(1, 0)] * 4, picked="abca"), [("duplicate-data", "error", (0, 3))]),
        (shares((4, 0), (4, 1), (4, 2), (4, 4)), [("data-order-mismatch", "error", (3,))]),
    ],
)
def test_shares_are_as_many_as_ranks_and_one_for_each(facts: list[SamplerFacts | None], expected: list[Any]) -> None:
    assert [(e.kind, e.severity, e.ranks) for e in sampler_events(*facts)] == expected


def test_a_sampler_that_was_not_told_of_the_ranks_is_said_in_numbers() -> None:
    (event,) = sampler_events(*shares(*[(1, 0)] * 4))
    assert event.message == (
        "The sampler makes 1 share of the data for 4 ranks: rows are taken more than once (ranks 0, 1, 2, 3)."
    )
    assert "real world size" in event.remedy


@pytest.mark.parametrize(
    ("mode", "scenario", "expected"),
    [
        ("sharded", "s1-1", []),
        ("sharded", "s1-2", [("data-order-mismatch", (0,))]),
        ("sharded", "s1-3", [("data-order-mismatch", ())]),
        ("replicated", "s1-1", [("duplicate-data", (0, 1, 2, 3))]),
        ("replicated", "s1-2", [("duplicate-data", (0, 1, 2, 3)), ("data-order-mismatch", (0,))]),
        ("replicated", "s1-3", [("duplicate-data", (0, 1, 2, 3)), ("data-order-mismatch", ())]),
    ],
)
def test_the_fine_tunes_own_sampler_in_each_scenario(mode: Any, scenario: Any, expected: list[Any]) -> None:
    plan = Plan(rows=4096, world_size=4, micro_batch=4, accumulation=1, mode=mode)
    samplers = [ResumableSampler(plan, rank_seed(scenario, 42, rank), rank) for rank in range(4)]
    events = sampler_events(*[sampler_facts(sampler) for sampler in samplers])
    assert [(event.kind, event.ranks) for event in events] == expected


def test_the_fine_tunes_permutation_is_told_by_seed_epoch_and_rows() -> None:
    def permutation(seed: int = 42, epoch: int = 0, rows: int = 96, rank: int = 0) -> tuple[int, int]:
        sampler = ResumableSampler(Plan(rows, 4, 3, 2, "sharded"), seed, rank)
        sampler.go_to(epoch * sampler.plan.steps_per_epoch)
        facts = sampler_facts(sampler)
        assert facts is not None
        assert (facts.world_size, facts.rank, facts.seed, facts.rows) == (4, rank, seed, rows)
        return facts.permutation

    assert permutation() == permutation(rank=3)
    assert len({permutation(), permutation(seed=43), permutation(epoch=1), permutation(rows=97)}) == 4
