"""What a training of the drill may answer a fault with, and what must have come of it.

    setting.answering(MAJORITY)                     # the drill's configuration with this response switched on
    MEAN.compared(4), MEAN.settled(4)               # 6, 6: when a fault of step 4 is seen, and when it is repaired

The healthy training with the same response is the reference: it must be silent, and bit for bit what it is without.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

REPLICAS_COMPARED = 3  # optimizer steps between two averagings, so that a drift lasts before it is found


@dataclass(frozen=True)
class Response:
    """One response.

    ``block``: what it needs of the ``silent_consistency`` block. ``interval``: optimizer steps between its
    comparisons, counted from ``first``. ``delay``: steps from its finding a fault to the end of the repair.
    ``exact``: what it leaves is the healthy training's state, bit for bit; else the same on all ranks. ``reference``:
    the healthy training to compare with. ``least_ranks``: with fewer it is refused. ``names_ranks``: its ``repaired``
    events say who got others' bits.
    """

    name: str
    block: Mapping[str, Any] = field(default_factory=dict)
    interval: int = 1
    first: int = 0
    delay: int = 0
    exact: bool = True
    reference: str = "healthy"
    least_ranks: int = 2
    names_ranks: bool = False

    @property
    def healthy(self) -> str:
        """The training without a fault that has this response."""
        return f"healthy-{self.name}"

    def compared(self, step: int) -> int:
        """The first comparison that sees what happened at ``step``."""
        return self.first + -(-(step - self.first) // self.interval) * self.interval

    def settled(self, step: int) -> int:
        """The step at which it is repaired."""
        return self.compared(step) + self.delay


def _drift(method: str, interval: int) -> dict[str, Any]:
    return {"respond": {"on_replica_drift": method}, "integrity": {"replica_interval": interval}}


def _resync(mode: str) -> dict[str, Any]:
    return {"resync": {"mode": mode, "interval": REPLICAS_COMPARED}, "integrity": {"replica_interval": 0}}


_ON_ERROR = {"respond": {"on_aggregation_error": "retry"}}
_ORDERED = {"reduction": "ordered"}

RETRY = Response("retry", _ON_ERROR)
MAJORITY = Response("majority", _drift("majority", 1), least_ranks=3, names_ranks=True)
MEAN = Response("mean", _drift("mean", REPLICAS_COMPARED), REPLICAS_COMPARED, exact=False)
PERIODIC = Response("periodic", _resync("periodic"), REPLICAS_COMPARED, exact=False)
DYNAMIC = Response("dynamic", _resync("dynamic"), REPLICAS_COMPARED, first=1, delay=1, exact=False)
ORDERED = Response("ordered", _ORDERED, reference="healthy-ordered")  # its order of addition gives bits of its own
ORDERED_RETRY = Response("ordered-retry", {**_ON_ERROR, **_ORDERED}, reference="healthy-ordered")
