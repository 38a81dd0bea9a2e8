"""The same training under other frameworks and numbers of ranks does not part; what is not the same does."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_silent.comparison import compare
from tests.support.distributed import run_distributed
from tests.support.traced_training import Cell, train

USUAL = {2: ("fsdp2", "zero2"), 4: ("ddp", "zero3")}
ALL = ("ddp", "fsdp2", "zero0", "zero1", "zero2", "zero3", "megatron", "megatron-distributed")
ALIKE = {
    "fp32": (ALL,),
    # masters in fp32 from stage 1 on; stage 0's optimizer has counted a step before the first
    "bf16": (("ddp", "fsdp2"), ("zero0",), ("zero1", "zero2", "zero3", "megatron", "megatron-distributed")),
}
"""The first of each group, on one rank, is what the others are held against."""


def train_some(cells: list[tuple[Cell, str]], steps: int) -> None:
    for cell, directory in cells:
        train(cell, directory, steps)


def traced(
    kinds: dict[int, tuple[str, ...]], dtype: str, steps: int, directory: Path, common: bool = False
) -> dict[tuple[str, int], Path]:
    """Train each of these on so many ranks; return the runs."""
    runs = {(kind, ranks): directory / f"{kind}-{ranks}" for ranks, each in kinds.items() for kind in each}
    for ranks, each in kinds.items():
        cells = [(Cell(kind, dtype, common=common), str(runs[kind, ranks])) for kind in each]
        run_distributed(train_some, ranks, (cells, steps), timeout=600)
    return runs


def parted(runs: dict[tuple[str, int], Path], reference: Path) -> dict[str, str]:
    """Return what is said of the runs that part from one."""
    found = {run.name: compare(reference, run) for run in runs.values() if run != reference}
    return {name: one.sentence for name, one in found.items() if one.parted}


@pytest.mark.long
def test_frameworks_and_ranks_do_not_part(tmp_path: Path) -> None:
    runs = traced(USUAL, "fp32", 20, tmp_path)
    assert parted(runs, runs["ddp", 4]) == {}


@pytest.mark.matrix
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_all_frameworks_and_ranks_do_not_part(dtype: str, tmp_path: Path) -> None:
    runs = traced(dict.fromkeys((1, 2, 4, 8), ALL), dtype, 50, tmp_path, common=True)
    for alike in ALIKE[dtype]:
        same = {key: run for key, run in runs.items() if key[0] in alike}
        assert len(same) == 4 * len(alike)
        assert parted(same, runs[alike[0], 1]) == {}
