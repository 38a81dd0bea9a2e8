"""A communicator of the observers' own, whatever other groups a rank is in."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ds_silent.distributed.communicator import own_group
from tests.support.distributed import run_distributed


def make_after_unlike_groups() -> float:
    """On every rank: rank 1 is in one group more than rank 0."""
    dist.new_group([1])
    group = own_group(dist.distributed_c10d._get_default_group())
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    return float(total)


def test_ranks_that_are_in_unlike_numbers_of_groups_find_each_other() -> None:
    assert run_distributed(make_after_unlike_groups, 2, timeout=60) == [2.0, 2.0]


def wait_as_long_as(seconds: float) -> float:
    """Seconds of the group beside one that waits for ``seconds``."""
    group = own_group(dist.new_group([0, 1], timeout=timedelta(seconds=seconds)))
    backend: Any = group._get_backend(torch.device("cpu"))
    return float(backend.options._timeout.total_seconds())


def test_no_rank_waits_longer_for_observers_than_for_the_training() -> None:
    assert run_distributed(wait_as_long_as, 2, (77.0,), timeout=60) == [77.0, 77.0]
