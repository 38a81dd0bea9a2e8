"""Compare what ranks of different data-parallel groups hold alike: layer norms of tensor parallelism, tied embeddings.

    duplicates = Duplicates("tensor-parallel duplicates", ranks=(0, 1), items=[("norm.weight", weight)], every=100)
    event = duplicates.compare(step)         # as each step begins, on each of them; on the first, where they differ

Each data-parallel group is observed by itself, so ranks leave their checksums on a board of
:mod:`ds_silent.distributed.agreement`, and the first one looks whether all are there, now or later. No rank waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import torch.distributed as dist

from ds_silent.distributed.agreement import KEPT, Board
from ds_silent.distributed.parts import SHOWN_RANKS, listed, parts_of
from ds_silent.kernels.checksums import Bits, Items
from ds_silent.records import Event

SHOWN = 3


class Duplicates:
    """Compare one set of duplicates.

    Args:
        ranks: of the whole training, that hold them; this one is among them.
        items: on every rank the same number, in the same order.
        every: steps between comparisons, from 1.
        alike: of these, the ranks that hold the same as this one; by default all.
    """

    def __init__(self, what: str, ranks: Sequence[int], items: Items, every: int, alike: Sequence[int] | None = None):
        self._what, self._ranks, self._items, self._every = what, tuple(ranks), list(items), every
        self._me, self._alike = dist.get_rank(), list(ranks if alike is None else alike)
        self._board = Board(f"duplicates/{what}", ranks)
        self._bits = Bits()
        self._waiting: deque[int] = deque(maxlen=KEPT)  # steps of which all may have left theirs
        self._apart, self._first = False, True

    def compare(self, step: int) -> Event | None:
        """Leave this rank's checksums as ``step`` begins, if it is due or the first; return what the first rank finds.

        Earlier checksums may come at any step. Waits for the device where it is due. An episode is told once.
        """
        if self._first or step % self._every == 0:
            self._first = False
            self._board.leave(step, [self._alike, self._bits(self._items).tolist()])
            if self._me == self._ranks[0]:
                self._waiting.append(step)
        events = [event for event in map(self._heard, list(self._waiting)) if event is not None]
        return events[0] if events else None

    def _heard(self, step: int) -> Event | None:
        heard = [self._board.heard(step, rank) for rank in self._ranks]
        if None in heard:
            return None
        self._waiting.remove(step)
        alike, said = zip(*heard, strict=True)
        sets = [[place for place, ranks in enumerate(alike) if ranks == one] for one in alike]
        unlike = [one for one in sets if any(said[place] != said[one[0]] for place in one)]
        before, self._apart = self._apart, bool(unlike)
        return self._event(step, unlike[0], list(said)) if unlike and not before else None

    def _event(self, step: int, members: list[int], checksums: list[list[int]]) -> Event:
        """``members``: places of the ranks that should have the same and do not."""
        said = [checksums[member] for member in members]
        places = [place for place, values in enumerate(zip(*said, strict=True)) if len(set(values)) > 1]
        names = [self._items[place][0] for place in places]
        where = listed(names, SHOWN)
        groups = [[self._ranks[members[rank]] for rank in part] for part in parts_of(map(str, said))]
        shown = " | ".join(listed(group, SHOWN_RANKS) for group in groups[:SHOWN])
        shown += " | ..." if len(groups) > SHOWN else ""
        message = (
            f"The {self._what} are not the same on the ranks that share them, as step {step} begins: ranks of the "
            f"whole training with the same bits: {shown}."
        )
        remedy = "Look for what these ranks must reduce among each other beside the data-parallel reduction."
        return Event(step, "replica-drift", "error", (), where, None, None, message, remedy)


def compared(kept: Iterable[Duplicates], step: int) -> list[Event]:
    """Compare several sets as a step begins."""
    found = (duplicates.compare(step) for duplicates in kept)
    return [event for event in found if event is not None]
