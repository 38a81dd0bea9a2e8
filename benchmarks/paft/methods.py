"""The ways of repairing that are compared, each as its ``silent_consistency`` block.

    METHODS["PAFT-Sync, H = 5"].block(output_dir)

Everything that only watches is off, so that a method is tried and timed by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

WATCHING_OFF: dict[str, Any] = {
    "coverage": False,
    "preflight": False,
    "tensorboard": False,
    "detectors": {"enabled": False},
}
NO_COMPARISON: dict[str, Any] = {
    "interval": 100,  # steps between measurements, which averaging does not need
    "direction": {"method": "off"},
    "integrity": {"aggregation": False, "replica_interval": 0},
}


@dataclass(frozen=True)
class Method:
    """``settings``: its part of the block; None is no block at all. ``period``: steps between two averagings."""

    settings: dict[str, Any] | None = field(hash=False)
    period: int | None = None

    def block(self, output_dir: str) -> dict[str, Any] | None:
        return None if self.settings is None else {"output_dir": output_dir, **WATCHING_OFF, **self.settings}


def _resync(**settings: Any) -> dict[str, Any]:
    return {**NO_COMPARISON, "resync": settings}


METHODS = {
    "none": Method(None),
    **{f"sync-{n}": Method(_resync(mode="periodic", interval=n), n) for n in (5, 10, 50)},
    "dynamic": Method(_resync(mode="dynamic", interval=50)),
    "retry": Method(
        {
            "direction": {"sketch_size": 1024},  # the default has nearly as many numbers as the digits' gradient
            "respond": {"on_aggregation_error": "retry"},
            "integrity": {"replica_interval": 0},
        }
    ),
    "majority": Method(
        {
            **NO_COMPARISON,
            "respond": {"on_replica_drift": "majority"},
            "integrity": {"aggregation": False, "replica_interval": 1},
        }
    ),
}
TITLES = {
    "none": "no mitigation",
    "sync-5": "PAFT-Sync H = 5",
    "sync-10": "PAFT-Sync H = 10",
    "sync-50": "PAFT-Sync H = 50",
    "dynamic": "PAFT-Dyn",
    "retry": "retry",
    "majority": "majority",
}
