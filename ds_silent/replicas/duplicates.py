"""What ranks of different data-parallel groups hold alike: layer norms of tensor parallelism, tied embeddings.

    duplicates = Duplicates("tensor-parallel duplicates", ranks=(0, 1), items=[("norm.weight", norm.weight)])
    event = duplicates.compare(step)         # now and then, on each of these ranks; on the first, where they differ

Each data-parallel group is observed by itself, and one may stop to observe or take its steps later than another: a
collective between them could hang. So each rank leaves its checksums in the process group's key-value store, and the
first one looks whether all are there, at this call or at a later one. Nobody waits.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from ds_silent.ranks.parts import parts_of
from ds_silent.records import Event
from ds_silent.replicas.checksums import Bits, Items

SHOWN = 3


class Duplicates:
    """One set of them.

    Args:
        what: for the message.
        ranks: of the whole training, that hold them; this one is among them.
        items: on every rank the same number, in the same order.
    """

    def __init__(self, what: str, ranks: Sequence[int], items: Items):
        self._what, self._ranks, self._items = what, tuple(ranks), list(items)
        self._me = dist.get_rank()
        self._store: Any = dist.distributed_c10d._get_default_store()  # torch 2.4 to 2.13
        self._bits = Bits()
        self._waiting: list[int] = []  # steps at which all may have left theirs
        self._apart = False

    def compare(self, step: int) -> Event | None:
        """Leave this rank's checksums as of ``step``; what the first rank finds of this step or of earlier ones.

        Waits for the device. An episode is told once.
        """
        self._store.set(self._key(step, self._me), json.dumps(self._bits(self._items).tolist()))
        if self._me != self._ranks[0]:
            return None
        self._waiting.append(step)
        return self._heard()

    def _heard(self) -> Event | None:
        event = None
        while self._waiting:
            step = self._waiting[0]
            keys = [self._key(step, rank) for rank in self._ranks]
            if not self._store.check(keys):
                break
            said = [json.loads(self._store.get(key)) for key in keys]
            for key in keys:
                self._store.delete_key(key)
            self._waiting.pop(0)
            apart = any(values != said[0] for values in said)
            if apart and not self._apart and event is None:
                event = self._event(step, said)
            self._apart = apart
        return event

    def _key(self, step: int, rank: int) -> str:
        return f"ds_silent/duplicates/{self._what}/{'-'.join(map(str, self._ranks))}/{step}/{rank}"

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
