"""Where a repair's bits arrive: they may be damaged on the way.

    damage_repairs(patches, arrived, repairing)      # arrived(tensor) behind each collective, where repairing()

Repairs of replicas use ``torch.distributed.broadcast`` and asynchronous ``all_reduce``, which nobody else does during a
step (up to 64 ranks).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ds_silent.patches import Patches


class _Arriving:
    """Work under way whose result changes when somebody waits for it."""

    def __init__(self, work: Any, arrived: Callable[[], None]) -> None:
        self._work, self._arrived = work, arrived

    def wait(self) -> None:
        self._work.wait()
        self._arrived()


def damage_repairs(patches: Patches, arrived: Callable[[Tensor], None], repairing: Callable[[], bool]) -> None:
    """Until ``patches`` are undone."""

    def restore(original: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(tensor, *args, **kwargs)
        if repairing():
            arrived(tensor)
        return result

    def average(original: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(tensor, *args, **kwargs)
        if not repairing() or not kwargs.get("async_op"):
            return result
        return _Arriving(result, lambda: arrived(tensor))

    patches.wrap(dist, "broadcast", restore)
    patches.wrap(dist, "all_reduce", average)
