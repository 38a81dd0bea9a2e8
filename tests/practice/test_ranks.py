"""The one spawner: what each rank returned, and what is said where one broke."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ds_silent.drill.training import hash_of
from ds_silent.practice.ranks import RankBroke, results_of
from tests.support.distributed import wait_for


def one_breaks(how: str) -> tuple[int, int]:
    total = torch.ones(1)
    dist.all_reduce(total)
    if dist.get_rank() == 1:
        if how == "raises":
            raise ValueError("out of rows")
        if how == "dies":
            os._exit(9)
        if how == "sleeps":
            time.sleep(60)
    return dist.get_rank(), int(total)


def test_what_each_rank_returned_in_their_order() -> None:
    assert results_of(one_breaks, ("not",), 2) == [(0, 2), (1, 2)]


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("raises", r"(?s)rank 1 ended with exit code 1.*in one_breaks.*ValueError: out of rows"),
        ("dies", "rank 1 ended with exit code 9"),
        ("sleeps", "did not end within 8 s"),
    ],
)
@pytest.mark.long
def test_the_rank_that_broke_is_named_with_its_own_traceback(how: str, sentence: str) -> None:
    with pytest.raises(RankBroke, match=sentence):
        results_of(one_breaks, (how,), 2, timeout=8.0 if how == "sleeps" else 120.0)


def test_a_rank_that_may_die_has_no_result_and_its_peers_have_theirs() -> None:
    assert results_of(one_breaks, ("dies",), 2, may_die=(0, 1))[1] is None


def waits(folder: str) -> None:
    Path(folder, str(os.getpid())).touch()
    time.sleep(300)


@pytest.mark.long
def test_ranks_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    """Killed, it has no time to end them."""
    script = f"from tests.practice.test_ranks import *; results_of(waits, ({str(tmp_path)!r},), 2)"
    parent = subprocess.Popen([sys.executable, "-c", script])
    try:
        wait_for(lambda: len(list(tmp_path.iterdir())) == 2, 120.0)
    finally:
        parent.kill()
    ranks = [int(file.name) for file in tmp_path.iterdir()]
    wait_for(lambda: not any(Path(f"/proc/{rank}").exists() for rank in ranks), 60.0)


def test_every_bit_is_in_the_hash() -> None:
    values = torch.zeros(5)
    before = hash_of([values, 3])
    values.view(torch.int32)[4] ^= 1
    assert hash_of([values, 3]) != before
    assert hash_of([torch.zeros(5), 3]) == before
    assert hash_of([torch.zeros(5), 4]) != before
