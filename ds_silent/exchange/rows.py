"""Bring each rank's row, which says what it knows of itself, to the ranks that read it.

    rows = make_rows(layout, group, device)
    rows.start(mine, leaves, collective)       # collectives; every rank calls it alike
    rows.agreed()                        # what all ranks have alike
    rows.all()                           # everybody's, where ``rows.brings_all``

Up to :data:`ds_silent.exchange.layout.TIMES` gather limits one all-gather brings everybody's row to everybody. Of more
ranks only the writing rank needs them: the first of each block of ranks passes its rows on. All decide together by
whether all values are alike, all are set, or one is: that the smallest and the largest tell, which one all-reduce
brings; and which ranks have failed is in the digits of a sum.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields

import torch
import torch.distributed as dist
from torch import Tensor

from ds_silent.device import SideStream
from ds_silent.distributed.communicator import new_part, own_part
from ds_silent.distributed.guard import CollectiveCall
from ds_silent.exchange.collectives import HostCopy, all_gather, kept
from ds_silent.exchange.layout import DIGIT, DIGITS, Layout
from ds_silent.exchange.observation import FIELDS, Code, Wishes
from ds_silent.maths.mixing import WORDS

DECIDE = (
    "status.nothing",
    "status.step",
    "status.boundary",
    *(f"wishes.{one.name}" for one in fields(Wishes)),
    "reduced.replica_seen",
    "applied.seen",
    *(f"code.{one.name}" for one in fields(Code)),
)
"""What all ranks act by, beside the failures and the replica's checksum."""


def make_rows(layout: Layout, group: dist.ProcessGroup, device: torch.device) -> AllGatherRows | HierarchicalGather:
    """Make the rows that the layout asks for. A collective where they go by way of blocks."""
    return (HierarchicalGather if layout.block else AllGatherRows)(layout, group, device)


class AllGatherRows:
    """Bring every row to every rank by one all-gather."""

    brings_all = True

    def __init__(self, layout: Layout, group: dist.ProcessGroup, device: torch.device):
        self._group, self._width = group, layout.row
        self.received = torch.zeros(dist.get_world_size(group) * layout.row, device=device)
        self._copy_to_host = HostCopy(self.received)
        self.copies = (self._copy_to_host,)  # that every rank waits for

    def start(self, mine: Tensor, leaves: bool, collective: CollectiveCall) -> None:
        """``mine``: (layout.row,) fp32."""
        self._copy_to_host.start(collective(lambda: all_gather(self.received, mine, group=self._group, async_op=True)))

    def agreed(self) -> Tensor:
        """Return rows that are the same on every rank: here all."""
        return self.all()

    def passed_on(self) -> None:
        """Do nothing: no rank passes rows on."""

    def all(self) -> Tensor:
        """(N, layout.row)."""
        return self._copy_to_host.result().view(-1, self._width)


class HierarchicalGather:
    """Gather in each block, exchange between the blocks' first ranks, and reduce the extremes."""

    def __init__(self, layout: Layout, group: dist.ProcessGroup, device: torch.device):
        self._group, ranks, me = group, dist.get_world_size(group), dist.get_rank(group)
        width, begins = layout.row, range(0, ranks, layout.block)
        blocks = [range(begin, min(begin + layout.block, ranks)) for begin in begins]
        own = blocks[me // layout.block]
        self._block = own_part(group, own)
        self._leads, self.brings_all = me == own.start, me == 0
        # another one for each training: a rank that leaves passes nothing on, for which the others' wait
        self._leaders = new_part(group, begins) if self._leads else None
        self._of_block = torch.zeros(len(own) * width, device=device)
        self._give = [len(self._of_block) if place == 0 else 0 for place in range(len(blocks))]
        self._take = [len(block) * width * self.brings_all for block in blocks]
        self.received = torch.zeros(sum(self._take), device=device)
        self._width = width
        replica = layout.scalars - sum(layout.scalar_parts[3:])  # where the first checksum's words begin
        self._columns = [FIELDS.index(name) for name in DECIDE]
        self._columns += range(replica, replica + WORDS * (layout.hashes > 0))
        self._decide = torch.tensor(self._columns, device=device)  # the same, where the rows are
        self.extremes = torch.zeros(2 * len(self._decide), device=device)
        self._side = None if device.type == "cpu" else SideStream(device)
        self._gathered: dist.Work | None = None  # these read buffers that are filled anew
        self._passed: dist.Work | None = None
        self._copy_to_host, self._extremes_copy = HostCopy(self.received), HostCopy(self.extremes)
        self.copies = (self._extremes_copy,)  # that every rank waits for

    def start(self, mine: Tensor, leaves: bool, collective: CollectiveCall) -> None:
        """``leaves``: this rank does not wait for anything any more; where waiting takes the host, it passes nothing
        on, which nobody will ask for."""
        if leaves:  # what was sent last may still be read, and nobody waits for that
            self.extremes, self._of_block = torch.empty_like(self.extremes), torch.empty_like(self._of_block)
        self._extremes_copy.start(collective(lambda: self._compare(mine)))
        gathered = collective(lambda: kept(all_gather(self._of_block, mine, group=self._block, async_op=True)))
        self._gathered, self._passed = gathered, None
        if not self._leads or (leaves and self._side is None):
            return
        with self._beside():
            collective(gathered.wait)
            self._passed = collective(self._pass_on)
        self._copy_to_host.start(self._passed)

    def _pass_on(self) -> dist.Work | None:
        return dist.all_to_all_single(  # type: ignore[no-any-return]
            self.received, self._of_block, self._take, self._give, group=self._leaders, async_op=True
        )

    def _compare(self, mine: Tensor) -> dist.Work | None:
        """Start the all-reduce as the last statement: what raises here raises before it, and is run again."""
        torch.cat((-mine[self._decide], mine[self._decide]), out=self.extremes)
        return dist.all_reduce(self.extremes, op=dist.ReduceOp.MAX, group=self._group, async_op=True)  # type: ignore[no-any-return]

    def passed_on(self) -> None:
        """Wait until this rank's part has gone to the writing rank; where no rank failed, which has come to take it."""
        if self._passed is not None:
            self._passed.wait()

    def _beside(self) -> AbstractContextManager[None]:
        return nullcontext() if self._side is None else self._side.working()

    def agreed(self) -> Tensor:
        """(2, layout.row): the smallest and the largest of what is in :data:`DECIDE`, 0 elsewhere."""
        if self._gathered is not None:
            self._gathered.wait()
        negative, largest = self._extremes_copy.result().view(2, -1)
        both = torch.zeros(2, self._width)
        both[:, self._columns] = torch.stack((-negative, largest))
        return both

    def all(self) -> Tensor:
        """(N, layout.row), on the writing rank."""
        return self._copy_to_host.result().view(-1, self._width)


def digit_of(failed: float, rank: int) -> tuple[int, float]:
    """Return place and value of a rank's failure among the numbers of which sums say which ranks failed."""
    return rank // DIGITS, failed * float(1 << DIGIT * (rank % DIGITS))


def failures_in(sums: Tensor, ranks: int) -> Tensor:
    """Return each rank's failure, (N,) float64, from the sums of :func:`digit_of`."""
    shifts = torch.arange(DIGITS) * DIGIT
    digits = (sums.to(torch.int64)[:, None] >> shifts) & ((1 << DIGIT) - 1)
    return digits.reshape(-1)[:ranks].double()
