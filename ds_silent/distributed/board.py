"""What ranks of different groups leave for each other, in the process group's key-value store.

    board = Board("model", ranks=(0, 2, 4, 6))      # on each of them
    board.leave(step, {"squares": 1.5})
    board.heard(step, rank=2)                       # None where it has not been left, or no longer is there

Groups may stop to observe, or take their steps, one later than another: a collective between them could hang. Here
nobody waits who does not ask for it.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ds_silent.distributed.agreement import store_of_all

KEPT = 8
"""Of what a rank has left, the newest: who is further behind hears nothing."""
_made: Counter[tuple[str, tuple[int, ...]]] = Counter()  # in this process: a training after another has other keys


class Board:
    """Seen from one of the ranks.

    Args:
        topic: what it is for; the same on every one.
        ranks: of the whole training, in the same order on every one; this one is among them.
    """

    def __init__(self, topic: str, ranks: Sequence[int]):
        ranks = tuple(ranks)
        _made[topic, ranks] += 1
        self._name = f"ds_silent/{topic}/{_made[topic, ranks]}/{'-'.join(map(str, ranks))}"
        self._store, self._me = store_of_all(), dist.get_rank()
        self._left: deque[int] = deque()

    def leave(self, step: int, said: object) -> None:
        """What this rank has to say of a step; JSON values."""
        if self._store is None:
            return
        self._store.set(self._key(step, self._me), json.dumps(said))
        if step not in self._left:
            self._left.append(step)
        if len(self._left) > KEPT:
            self._store.delete_key(self._key(self._left.popleft(), self._me))

    def heard(self, step: int, rank: int, wait: timedelta | None = None) -> Any:
        """What a rank has left of a step, waited for at most so long; None where there is nothing."""
        if self._store is None:
            return None
        key = self._key(step, rank)
        try:
            if wait is not None:
                self._store.wait([key], wait)
            elif not self._store.check([key]):
                return None
        except RuntimeError:  # it did not come
            return None
        return json.loads(self._store.get(key))

    def _key(self, step: int, rank: int) -> str:
        return f"{self._name}/{step}/{rank}"
