"""Leave values for other ranks in the process group's key-value store, without a collective.

    board = Board("model", ranks=(0, 2, 4, 6))      # on each of them
    board.leave(step, {"squares": 1.5})
    board.heard(step, rank=2)                       # None where it has not been left, or no longer is there

Groups may stop observing, or take their steps, one later than another: a collective between them could hang.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter, deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

logger = logging.getLogger("ds_silent")
KEPT = 8
"""Of what a rank has left, the newest: who is further behind hears nothing."""
_meetings: Counter[str] = Counter()


def store_of_all() -> Any:
    """Return the process group's own store (``torch.distributed.distributed_c10d``, 2.4 to 2.15), or None."""
    try:
        return dist.distributed_c10d._get_default_store()
    except Exception as error:
        logger.debug("ds_silent: this process group has no store: %s", error)
        return None


def meeting(topic: str, ranks: Sequence[int]) -> str:
    """Return what the keys begin with at which ``ranks`` meet: another prefix each time that this process asks."""
    members = hashlib.sha256(repr(list(ranks)).encode()).hexdigest()[:16]
    place = f"ds_silent/{members}/{topic}"
    _meetings[place] += 1
    return f"{place}/{_meetings[place]}"


class Board:
    """Leave values for other ranks, and read theirs.

    Args:
        topic: what it is for; the same on every rank.
        ranks: of the whole training, in the same order on every one; this one is among them.
    """

    def __init__(self, topic: str, ranks: Sequence[int]):
        self._name = meeting(topic, ranks)
        self._store, self._me = store_of_all(), dist.get_rank()
        self._left: deque[str] = deque()  # keys
        self._newest, self._times_back = -1, 0

    def leave(self, step: int, said: object) -> None:
        """Leave what this rank has to say of a step; JSON values. A step before the last one begins another round."""
        if self._store is None:
            return
        self._times_back += step < self._newest
        self._newest, key = step, self._key(step, self._me)
        self._store.set(key, json.dumps(said))
        if key not in self._left:
            self._left.append(key)
        if len(self._left) > KEPT:
            self._store.delete_key(self._left.popleft())

    def heard(self, step: int, rank: int, wait: timedelta | None = None) -> Any:
        """Read what a rank has left of a step, waiting at most ``wait``; None where there is nothing."""
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
        return f"{self._name}/{self._times_back}/{step}/{rank}"
