"""What ranks of different data-parallel groups hold alike: layer norms of tensor parallelism, tied embeddings.

    duplicates = Duplicates("tensor-parallel duplicates", ranks=(0, 1), items=[("norm.weight", weight)], every=100)
    event = duplicates.compare(step)         # as each step begins, on each of them; on the reader, where they differ

Each data-parallel group is observed by itself, and one may stop to observe or take its steps later than another: a
collective between them could hang. So each rank leaves its checksums in the process group's key-value store, and one
looks whether all are there, at this call or at a later one. Nobody waits.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from ds_silent.ranks.parts import parts_of
from ds_silent.records import Event
from ds_silent.replicas.checksums import Bits, Items

SHOWN = 3
SLOTS = 8
"""Comparisons whose checksums are kept: a group that is further behind is not compared."""
_made: Counter[tuple[str, tuple[int, ...]]] = Counter()  # in this process: a training after another has other keys


class Duplicates:
    """One set of them.

    Args:
        what: for the message.
        ranks: of the whole training, that hold them.
        items: on every rank the same number, in the same order; of the reader only the names where it holds none.
        every: steps between comparisons, from 1.
        reader: the rank that looks; the first of ``ranks`` by default.
    """

    def __init__(self, what: str, ranks: Sequence[int], items: Items, every: int, reader: int | None = None):
        self._what, self._ranks, self._items, self._every = what, tuple(ranks), list(items), every
        self._me, self._reader = dist.get_rank(), self._ranks[0] if reader is None else reader
        _made[what, self._ranks] += 1
        self._number = _made[what, self._ranks]
        self._store: Any = dist.distributed_c10d._get_default_store()  # torch 2.4 to 2.13
        self._bits = Bits()
        self._waiting: deque[int] = deque(maxlen=SLOTS)  # steps of which all may have left theirs
        self._apart = False

    def compare(self, step: int) -> Event | None:
        """Leave this rank's checksums as ``step`` begins, if it is due; what the reader finds, of earlier ones too.

        Waits for the device where it is due. An episode is told once.
        """
        if step % self._every:
            return None
        if self._me in self._ranks:
            self._store.set(self._key(step, self._me), json.dumps([step, self._bits(self._items).tolist()]))
        if self._me != self._reader:
            return None
        self._waiting.append(step)
        events = [event for event in map(self._heard, list(self._waiting)) if event is not None]
        return events[0] if events else None

    def _heard(self, step: int) -> Event | None:
        keys = [self._key(step, rank) for rank in self._ranks]
        if not self._store.check(keys):
            return None
        steps, said = zip(*(json.loads(self._store.get(key)) for key in keys), strict=True)
        if any(other != step for other in steps):  # somebody is behind, or far ahead
            return None
        self._waiting.remove(step)
        before, self._apart = self._apart, any(values != said[0] for values in said)
        return self._event(step, list(said)) if self._apart and not before else None

    def _key(self, step: int, rank: int) -> str:
        slot = step // self._every % SLOTS
        return f"ds_silent/duplicates/{self._what}/{self._number}/{'-'.join(map(str, self._ranks))}/{slot}/{rank}"

    def _event(self, step: int, said: list[list[int]]) -> Event:
        places = [place for place, values in enumerate(zip(*said, strict=True)) if len(set(values)) > 1]
        names = [self._items[place][0] for place in places]
        where = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
        groups = [[self._ranks[rank] for rank in part] for part in parts_of(map(str, said))]
        shown = " | ".join(", ".join(map(str, group)) for group in groups)
        message = (
            f"The {self._what} are not the same on the ranks that share them, as step {step} begins: ranks of the "
            f"whole training with the same bits: {shown}."
        )
        remedy = "Look for what these ranks must reduce among each other beside the data-parallel reduction."
        return Event(step, "replica-drift", "error", (), where, None, None, message, remedy)
