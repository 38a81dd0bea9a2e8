"""What a trace needs of a step beside what is observed anyway: all rows, a few weights, the rates, an order.

traced = TraceCapture(framework, guard, rows)
traced.observed(due=True)  # between the reduction and the update, before the ids are taken
traced.rates               # that the update is about to take
"""

from __future__ import annotations

from typing import Any

from ds_silent.capture.batch_rows import RowIds
from ds_silent.capture.forward_order import ForwardOrder
from ds_silent.capture.weight_samples import WeightSamples
from ds_silent.distributed.guard import CollectiveGuard
from ds_silent.framework import Framework
from ds_silent.rules.known_optimizers import number


class TraceCapture:
    """See the module docstring.

    Attributes:
        samples: of the weights.
        order: of the first forward.
        rates: of each parameter group in the step that was observed last; None where one lies on a device.
    """

    def __init__(self, framework: Framework, guard: CollectiveGuard, rows: RowIds):
        self._framework, self._rows = framework, rows
        self.samples, self.order = WeightSamples(framework), ForwardOrder(framework, guard)
        self.rates: tuple[float | None, ...] = ()
        framework.patches.also(self.order.end)

    def observed(self, due: bool) -> dict[str, Any]:
        """Return what an observation holds beside: this rank's part of all rows and weights; ``due``: of this step."""
        if not due:
            return {}
        optimizers = self._framework.optimizers()
        self.rates = tuple(number(group["lr"]) for optimizer in optimizers for group in optimizer.param_groups)
        return {"rows": self._rows.hashed(self._framework.device), "weights": self.samples.values()}
