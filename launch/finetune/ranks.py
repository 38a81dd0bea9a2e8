"""This process among the others: joining the group, and deciding together what one alone must not decide.

    ranks = join()
    rows = agreed(ranks, lambda: load_rows(path))     # a mistake on any rank ends all of them with one sentence

Buffers are int32 and fp32 and reductions SUM, MIN and MAX only: what gloo, NCCL and HCCL all do.
"""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import groups

from ds_silent import ConfigError, SinkError
from ds_silent.distributed.communicator import timeout_of
from finetune.settings import EXIT_USER_ERROR, UserError

T = TypeVar("T")
Mistakes = tuple[type[Exception], ...]
MISTAKES: Mistakes = (UserError, ConfigError, SinkError)  # errors whose text is a sentence for the user
SECONDS_FOR_RANK_0 = 5.0  # a launcher needs at most one to end the others when rank 0 leaves


@dataclass(frozen=True)
class Ranks:
    """Where this process stands; ``device`` is where its collectives' buffers must lie."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def join() -> Ranks:
    """Makes the process group from the launcher's environment; started without a launcher, a group of one."""
    if "RANK" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        alone = {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        os.environ.update(alone)
    accelerator = get_accelerator()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    accelerator.set_device(local_rank)
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    # DeepSpeed reduces gradients in a clone of this group, to which it gives no time-out: with gloo 30 minutes
    everybody = list(range(dist.get_world_size()))
    groups._WORLD_GROUP = dist.new_group(everybody, timeout=timeout_of(dist.distributed_c10d._get_default_group()))
    return Ranks(dist.get_rank(), local_rank, dist.get_world_size(), torch.device(accelerator.device_name(local_rank)))


def agreed(ranks: Ranks, work: Callable[[], T], mistakes: Mistakes = MISTAKES) -> T:
    """``work()`` on every rank; when it failed on any, the lowest such rank says why and all leave. A collective.

    Args:
        work: must not leave a collective half done when it raises.
        mistakes: errors whose text is a sentence for the user; any other error is printed with its traceback.

    Raises:
        SystemExit: on every rank, with ``EXIT_USER_ERROR``, or 1 for an error that is nobody's mistake.
    """
    result: T | None = None
    problem: Exception | None = None
    try:
        result = work()
    except Exception as error:  # whatever it is, the others must hear of it before this rank leaves
        problem = error
    failed = ranks.rank if problem is not None else ranks.world_size
    unexpected = int(problem is not None and not isinstance(problem, mistakes))
    highest, status = reduce_int32(ranks, [-failed, unexpected])
    guilty = -highest  # the lowest rank that failed
    if guilty == ranks.world_size:
        return result  # type: ignore[return-value]  # no rank failed, so work() returned
    if problem is not None and not isinstance(problem, mistakes):
        traceback.print_exception(problem)
        sys.stderr.flush()
    elif problem is not None and ranks.rank == guilty:
        say_error(str(problem))
    reduce_int32(ranks, [0])  # a launcher kills the others when one leaves: only after the sentence is out
    raise SystemExit(1 if status else EXIT_USER_ERROR)


def together(ranks: Ranks, work: Callable[[], T]) -> T:
    """``work()`` that has collectives inside, so that nothing can be agreed after it has failed.

    Raises:
        SystemExit: with ``EXIT_USER_ERROR`` after a mistake's sentence; the ranks above 0 leave a little later, because
            a launcher ends the others as soon as one leaves.
    """
    try:
        return work()
    except MISTAKES as error:
        if ranks.is_first or not isinstance(error, (ConfigError, SinkError)):  # which all ranks make together
            say_error(str(error))
        if not ranks.is_first:
            time.sleep(SECONDS_FOR_RANK_0)
        raise SystemExit(EXIT_USER_ERROR) from error


def say_error(sentence: str) -> None:
    """One line on stderr."""
    print(f"error: {' '.join(sentence.split())}", file=sys.stderr, flush=True)


def reduce_int32(ranks: Ranks, values: Sequence[int]) -> list[int]:
    """Elementwise maximum over the ranks. A collective that also waits for it."""
    buffer = torch.tensor(list(values), dtype=torch.int32, device=ranks.device)
    dist.all_reduce(buffer, op=dist.ReduceOp.MAX)
    return [int(value) for value in buffer.tolist()]


def sum_float32(ranks: Ranks, values: torch.Tensor) -> list[float]:
    """Elementwise sum over the ranks of a one-dimensional tensor. A collective that also waits for it."""
    buffer = values.detach().to(device=ranks.device, dtype=torch.float32).clone()
    dist.all_reduce(buffer, op=dist.ReduceOp.SUM)
    return [float(value) for value in buffer.tolist()]


def gather_int32(ranks: Ranks, values: Sequence[int]) -> list[list[int]]:
    """Every rank's ``values`` (as many on each), in rank order. A collective that also waits for it."""
    own = torch.tensor(list(values), dtype=torch.int32, device=ranks.device)
    gathered = [torch.empty_like(own) for _ in range(ranks.world_size)]
    dist.all_gather(gathered, own)
    return [[int(value) for value in other.tolist()] for other in gathered]
