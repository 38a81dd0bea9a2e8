"""Which rows which rank sees when: a pure function of (seed, epoch, step, rank), and an iterator over it.

    plan = Plan(rows=52002, world_size=8, micro_batch=2, accumulation=4, mode="sharded")
    sampler = ResumableSampler(plan, seed=42, rank=0)
    for positions in sampler.step():      # one int64 [micro_batch] per micro-batch of the optimizer step
        ...

``sharded``: the ranks split one global batch after another of the permutation among them. With the same global batch
the rows of an optimizer step do not depend on the number of ranks. ``replicated``: every rank walks its own
permutation as if it were alone - the classic mistake of a sampler that nobody told of the ranks. An epoch is in both
modes as many steps as all ranks together need to consume ``rows`` rows, so that the two can be compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from finetune.settings import SamplerMode, UserError

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Plan:
    """How rows are cut into steps; the same on every rank."""

    rows: int
    world_size: int
    micro_batch: int  # rows per rank and forward pass
    accumulation: int  # micro-batches per optimizer step
    mode: SamplerMode
    drop_last: bool = True  # else the epoch's last global batch is completed with the permutation's first rows

    @property
    def per_rank(self) -> int:
        """Rows per rank and optimizer step."""
        return self.micro_batch * self.accumulation

    @property
    def global_batch(self) -> int:
        """Rows per optimizer step over all ranks."""
        return self.per_rank * self.world_size

    @property
    def steps_per_epoch(self) -> int:
        whole = self.rows // self.global_batch
        return whole if self.drop_last or self.rows % self.global_batch == 0 else whole + 1

    def checked(self) -> Plan:
        """Returns itself; raises UserError when an epoch would have no step."""
        if self.rows < self.global_batch and (self.drop_last or self.rows == 0):
            raise UserError(
                f"the {self.rows} training rows are fewer than one global batch of {self.global_batch} "
                f"({self.world_size} ranks x {self.micro_batch} rows x {self.accumulation} micro-batches): "
                "lower --micro-batch or --accumulation, or add --no-drop-last"
            )
        return self


@lru_cache(maxsize=4)
def permutation(seed: int, epoch: int, rows: int) -> Positions:
    """A permutation of range(rows), int64.

    Sorting PCG64's raw stream, not ``Generator.permutation``: numpy promises the former's bits across versions.
    """
    raw = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(rows)
    order = np.argsort(raw, kind="stable").astype(np.int64)
    order.flags.writeable = False  # it is shared through the cache
    return order


def step_positions(plan: Plan, seed: int, rank: int, epoch: int, step: int) -> Positions:
    """Rows of one optimizer step on one rank, int64 [accumulation, micro_batch]; ``step`` counts within the epoch."""
    micro = np.arange(plan.accumulation, dtype=np.int64)[:, None]
    within = np.arange(plan.micro_batch, dtype=np.int64)[None, :]
    if plan.mode == "sharded":
        offsets = step * plan.global_batch + (micro * plan.world_size + rank) * plan.micro_batch + within
    else:
        offsets = step * plan.per_rank + micro * plan.micro_batch + within
    positions: Positions = permutation(seed, epoch, plan.rows)[offsets % plan.rows]
    return positions


def epoch_coverage(plan: Plan, seeds: Sequence[int], epoch: int = 0) -> float:
    """Share of the rows that any rank sees in one epoch, when rank r's sampler has ``seeds[r]``.

    Found by walking the sampler, not by formula: 1 for sharded with one seed, about 1-(1-1/N)^N with N seeds, and
    1/N for replicated with one seed.
    """
    seen = np.zeros(plan.rows, dtype=bool)
    for rank, seed in enumerate(seeds):
        for step in range(plan.steps_per_epoch):
            seen[step_positions(plan, seed, rank, epoch, step)] = True
    return float(seen.mean())


class ResumableSampler:
    """Hands out the rows of one rank, step after step and epoch after epoch, without an end.

    Args:
        plan: the same on every rank.
        seed: of this rank's permutation; equal on all ranks unless the scenario says otherwise.
        rank: in the data-parallel group.
    """

    def __init__(self, plan: Plan, seed: int, rank: int) -> None:
        self.plan = plan.checked()
        self.seed = seed
        self._rank = rank
        self._epoch = 0
        self._step = 0

    # How the data are shared, by the names of torch's DistributedSampler: ds_silent's preflight compares them.

    @property
    def num_replicas(self) -> int:
        """Shares that the data are cut into: 1 when every rank walks all of them."""
        return self.plan.world_size if self.plan.mode == "sharded" else 1

    @property
    def rank(self) -> int:
        """The share that this rank takes."""
        return self._rank if self.plan.mode == "sharded" else 0

    @property
    def epoch(self) -> int:
        """From 0; with the seed and the number of rows it makes the permutation."""
        return self._epoch

    @property
    def dataset(self) -> range:
        """The positions that are permuted."""
        return range(self.plan.rows)

    def peek(self) -> Positions:
        """The rows of the step that comes next, int64 [accumulation, micro_batch], without consuming them."""
        return step_positions(self.plan, self.seed, self._rank, self._epoch, self._step)

    def go_to(self, steps: int) -> None:
        """To where the sampler is after ``steps`` optimizer steps of the run."""
        self._epoch, self._step = divmod(steps, self.plan.steps_per_epoch)

    def step(self) -> Iterator[Positions]:
        """The next step's micro-batches, int64 [micro_batch] each; the sampler is one step further at once."""
        positions = self.peek()
        self.go_to(self._epoch * self.plan.steps_per_epoch + self._step + 1)
        return iter(positions)

    def __iter__(self) -> Iterator[list[int]]:
        """What is left of the epoch, one micro-batch after another: a DataLoader's ``batch_sampler``."""
        epoch = self._epoch
        while self._epoch == epoch:
            yield from ([int(position) for position in micro_batch] for micro_batch in self.step())

    def __len__(self) -> int:
        """Micro-batches in an epoch."""
        return self.plan.steps_per_epoch * self.plan.accumulation
