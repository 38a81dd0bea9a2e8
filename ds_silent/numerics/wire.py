"""The real thing: all-reduces of N gloo processes on this machine, their bits and their time.

    reductions, timings = reduce_for_real(job, micro_batches, world_size=4)     # for each dtype

The processes read their own gradients from the files, so nothing of the size of the model is sent to them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from ds_silent.exchange.collectives import same_on_all
from ds_silent.numerics.gradient_errors import read_flat
from ds_silent.numerics.rounding import DTYPES, ORDERS, changed_bits, spread, term_of_mean, terms_of_mean
from ds_silent.practice.ranks import on_ranks

WARM_UP = 3  # all-reduces of each dtype that are not timed
AGAIN = "fp32 again"  # the noise of the ratios


@dataclass(frozen=True)
class Job:
    """What the processes do."""

    files: tuple[str, ...]  # of the M micro-batches
    dtypes: tuple[str, ...]
    loss_scale: float  # for fp16
    elements: int  # of the timed all-reduces
    rounds: int  # each dtype is timed once per round
    folder: str  # where rank 0 leaves the results


@dataclass(frozen=True)
class RealReduction:
    """The bits of one all-reduce."""

    world_size: int
    dtype: str
    same_on_all_ranks: bool
    equal: Mapping[str, float]  # share of elements whose bits are those of the simulated order

    @property
    def orders(self) -> list[str]:
        """The simulated orders that it equals bit for bit."""
        return [order for order, share in self.equal.items() if share == 1.0]


@dataclass(frozen=True)
class Timing:
    """One all-reduce of ``elements`` elements."""

    world_size: int
    dtype: str
    elements: int
    bytes_sent: float  # by each rank, with a ring
    seconds: float  # median over the rounds
    fp32_ratio: tuple[float, float, float]  # fp32's time over this one's: quartiles over the rounds


def reduce_for_real(job: Job, micro_batches: Tensor, world_size: int) -> tuple[list[RealReduction], list[Timing]]:
    """Starts ``world_size`` processes; the results are compared with the simulated orders here.

    Raises:
        RankBroke: a process did not end well.
    """
    gradients, reductions, timings = spread(micro_batches, world_size), list[RealReduction](), list[Timing]()
    for kind, name, found in on_ranks(_work, (job,), world_size):
        if kind == "reduced":
            result = load_file(_result(job, name))["sum"]
            terms = terms_of_mean(gradients, DTYPES[name], job.loss_scale if name == "fp16" else 1.0)
            equal = {order: 1.0 - changed_bits(result, add(terms)) for order, add in ORDERS.items()}
            reductions.append(RealReduction(world_size, name, found, equal))
        else:
            timings += timings_of(found, world_size, job.elements)
    return reductions, timings


def timings_of(seconds: Mapping[str, list[float]], world_size: int, elements: int) -> Iterator[Timing]:
    """From the rounds' times by dtype; fp32 and ``fp32 again`` among them."""
    for name, times in seconds.items():
        size = elements * DTYPES[name.removesuffix(" again")].itemsize
        ratios = [full / own for full, own in zip(seconds["fp32"], times, strict=True)]
        low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
        sent = 2.0 * (world_size - 1) / world_size * size  # reduce-scatter, then all-gather, each (N - 1)/N of it
        yield Timing(world_size, name, elements, sent, statistics.median(times), (low, median, high))


def _work(send: Callable[[Any], None], job: Job) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    count = len(job.files) // ranks
    own = [read_flat(Path(path)) for path in job.files[rank * count : (rank + 1) * count]]
    gradient = spread(torch.stack(own), 1)[0]
    for name in job.dtypes:
        total = term_of_mean(gradient, ranks, DTYPES[name], job.loss_scale if name == "fp16" else 1.0)
        dist.all_reduce(total)
        if rank == 0:
            save_file({"sum": total}, _result(job, name))
        bits = total.view(torch.int32 if total.element_size() == 4 else torch.int16).int()
        send(("reduced", name, bool(same_on_all(bits, dist.distributed_c10d._get_default_group()).all())))
    if job.rounds:
        send(("timed", "", _timed(job)))


def _timed(job: Job) -> dict[str, list[float]]:
    """Seconds by dtype and round. Every other round goes backwards, so that no dtype is always first."""
    names = ["fp32", *(name for name in job.dtypes if name != "fp32"), AGAIN]
    buffers = {name: torch.zeros(job.elements, dtype=DTYPES[name.removesuffix(" again")]) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(WARM_UP + job.rounds):
        for name in names if turn % 2 else reversed(names):
            dist.barrier()
            started = time.perf_counter()
            dist.all_reduce(buffers[name])
            if turn >= WARM_UP:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def _result(job: Job, name: str) -> Path:
    return Path(job.folder, f"sum_{name}.safetensors")
