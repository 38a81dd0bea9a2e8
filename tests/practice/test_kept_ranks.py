"""Ranks that the tests keep: they do one call after the other, and break with the words of who broke."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from ds_silent.practice.ranks import RankBroke
from tests.support.distributed import run_on_kept_ranks


def process_of(variable: str) -> tuple[int, int, str | None]:
    total = torch.ones(1)
    dist.all_reduce(total)
    before = os.environ.get("KEPT")
    os.environ["KEPT"] = variable
    return os.getpid(), int(total), before


def breaks(how: str) -> None:
    print(f"{how} comes")
    if dist.get_rank() == 1:
        if how == "silence":
            time.sleep(60)
        raise ValueError("the own")
    dist.barrier()


@pytest.mark.parametrize("how", ["an error", "silence"])
def test_they_stay_until_one_breaks(how: str) -> None:
    first, second = (run_on_kept_ranks(process_of, 2, (value,)) for value in "ab")
    assert first == second
    assert {(total, before) for _, total, before in first} == {(2, None)}
    with pytest.raises(RankBroke, match="took too long(?s:.*)silence comes" if how == "silence" else "the own"):
        run_on_kept_ranks(breaks, 2, (how,), timeout=1.0 if how == "silence" else 60.0)
    assert {process for process, *_ in run_on_kept_ranks(process_of, 2, ("c",))}.isdisjoint(
        process for process, *_ in first
    )
