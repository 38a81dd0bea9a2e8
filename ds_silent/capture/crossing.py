"""Whether a loss is made of other ranks' rows: a gather with a gradient, as in a contrastive loss over all ranks.

    crossing = Crossing()
    crossing.look(root)         # as a backward begins
    crossing.found              # whether one of the first was so

The gradient of such a rank holds what the others' losses say of its rows, so one rank's fault changes all gradients.
"""

from __future__ import annotations

from collections import deque
from typing import Any

BACKWARDS = 8  # that are looked at, the first of a run: a script's losses are alike at all steps
NODES = 256  # of each, from the root down: the gather stands before the loss, not deep in the model
_MODULE = "torch.distributed.nn.functional"
_FUNCTIONAL = "_c10d_functional"  # torch.distributed._functional_collectives, from torch 2.13 on with a gradient


class Crossing:
    """Look for a collective with a gradient near the roots of the first backwards."""

    def __init__(self) -> None:
        self.found, self._looked = False, 0

    def look(self, root: Any) -> None:
        """Read the graph below ``root``; nothing of it is kept."""
        if self.found or self._looked >= BACKWARDS:
            return
        self._looked += 1
        first = getattr(root, "grad_fn", None)
        waiting = deque([] if first is None else [first])
        met = set(waiting)
        while waiting and len(met) <= NODES and not self.found:
            node = waiting.popleft()
            of_torch = getattr(getattr(type(node), "_forward_cls", None), "__module__", "") == _MODULE
            self.found = of_torch or _FUNCTIONAL in node.name()
            inner = [one for one, _ in node.next_functions if one is not None and one not in met]
            met.update(inner)
            waiting.extend(inner)
