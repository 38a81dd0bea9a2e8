"""The paper's seed scenarios, applied once ranks are known and proved before the first step.

    apply_seed(rank_seed("s1-3", 42, ranks.rank))     # the process group exists: the rank is the real one
    refuse_unless_as_told(expected_proofs(...), gathered, scenario, sampler)

S1-1 strict: every rank the same seed. S1-2 mild: rank 0 another one. S1-3 significant: each rank its own. (arXiv
2602.14462; its released code reads the rank before the group exists and is re-seeded afterwards, so that all three
become S1-1. Hence the proof: what is compared is what the generators and the sampler of each rank really hold.)
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from rich.table import Table

from ds_silent.device import initial_seed, seed_all
from finetune.sampler import Plan, step_positions
from finetune.settings import SamplerMode, Scenario, UserError

SHOWN_IDS = 8
SHOWN_RANKS = 16
Proof = list[int]  # [seed of torch's CPU generator, seed of the device's, the first row ids ...], each an int32


def rank_seed(scenario: Scenario, seed: int, rank: int) -> int:
    """The seed that ``rank`` must have."""
    if scenario == "s1-1":
        return seed
    if scenario == "s1-2":
        return seed + 1 if rank == 0 else seed
    return seed + rank


def checked_world_size(scenario: Scenario, world_size: int) -> None:
    """Raises UserError for a scenario that needs ranks to differ when there is only one."""
    if scenario != "s1-1" and world_size < 2:
        raise UserError(f"--scenario {scenario} needs at least 2 ranks, got {world_size}: launch more, or use s1-1")


def apply_seed(seed: int) -> None:
    """Seeds python, numpy, torch and the accelerator on this rank."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    seed_all(seed)


def proof_of(first_row_ids: Sequence[int]) -> Proof:
    """What this rank really holds now; ``first_row_ids`` are those its sampler hands out next."""
    shown = [int(row_id) for row_id in first_row_ids[:SHOWN_IDS]]
    # a generator seeded by something else may hold 64 bits: fold them, a scenario's own seed is unchanged by it
    return [torch.initial_seed() % 2**31, initial_seed() % 2**31, *shown]


def expected_proofs(
    plan: Plan, scenario: Scenario, seed: int, row_ids: npt.NDArray[np.int64], epoch: int, step: int
) -> list[Proof]:
    """What every rank's proof must be, in rank order; ``row_ids`` int64 [rows] maps positions to row ids."""
    proofs = []
    for rank in range(plan.world_size):
        own = rank_seed(scenario, seed, rank)
        positions = step_positions(plan, own, rank, epoch, step).reshape(-1)[:SHOWN_IDS]
        proofs.append([own, own, *row_ids[positions].tolist()])
    return proofs


def refuse_unless_as_told(
    expected: Sequence[Proof], observed: Sequence[Proof], scenario: Scenario, sampler: SamplerMode
) -> None:
    """Raises UserError, the same on every rank, naming the first rank that is not what the scenario says."""
    for rank, (want, have) in enumerate(zip(expected, observed, strict=True)):
        told = f"scenario {scenario} with the {sampler} sampler wants rank {rank} to"
        if want[:2] != have[:2]:
            raise UserError(
                f"{told} have seed {want[0]}, but its generators hold {have[0]} (CPU) and {have[1]} (device): "
                "something seeded them again after the process group was made; the training was not started"
            )
        if want[2:] != have[2:]:
            raise UserError(
                f"{told} start with rows {want[2:]}, but its sampler hands out {have[2:]}: "
                "the ranks do not hold the same data in the same order; the training was not started"
            )


def table_of(observed: Sequence[Proof], scenario: Scenario, sampler: SamplerMode) -> Table:
    """Seed and first row ids of each rank, for rank 0 to print."""
    table = Table(title=f"scenario {scenario}, {sampler} sampler: what each rank starts with", min_width=64)
    if scenario != "s1-1" or sampler == "replicated":
        table.caption = "So it was asked for, and ds_silent reports it like a mistake."
    table.add_column("rank", justify="right")
    table.add_column("seed", justify="right")
    table.add_column("first row ids")
    for rank, proof in enumerate(observed[:SHOWN_RANKS]):
        table.add_row(str(rank), str(proof[0]), " ".join(str(row_id) for row_id in proof[2:]))
    if len(observed) > SHOWN_RANKS:
        table.add_row("…", "…", f"and {len(observed) - SHOWN_RANKS} more ranks")
    return table
