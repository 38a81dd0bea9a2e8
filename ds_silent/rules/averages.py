"""Look whether an average of the weights is updated once for each step, and not for each micro-batch.

An exponential moving average takes its decay at each update. Where a loop accumulates and updates it per micro-batch,
weights that have not changed are averaged again, and the average forgets as many times as fast. Known are torch's
``AveragedModel``, diffusers' ``EMAModel`` and timm's ``ModelEma``. A note: nobody promises how fast it is to forget.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from ds_silent.framework import Framework
from ds_silent.patches import Patches
from ds_silent.rules.rule import Breach, Rule

_STEPS = 3  # measured, in a row
_AVERAGES = (
    ("torch.optim.swa_utils", "AveragedModel", "update_parameters"),
    ("diffusers.training_utils", "EMAModel", "step"),
    *(("timm.utils.model_ema", f"ModelEma{version}", "update") for version in ("", "V2", "V3")),
)


class AverageUpdates(Rule):
    """Count the updates of each average in a step."""

    def __init__(self, framework: Framework):
        self._framework = framework
        self._updates: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # in the step under way
        self._step = self._steps = self._since = self._most = 0
        self._name = ""

    def connect(self, patches: Patches, safely: Callable[..., Any]) -> None:
        """Stand behind the update of each kind that the script has imported."""
        for module, name, method in _AVERAGES:
            kind = getattr(sys.modules.get(module), name, None)
            if kind is not None:
                patches.wrap_method(kind, method, partial(self._update, safely))

    def _update(
        self, safely: Callable[..., Any], original: Callable[..., Any], average: Any, *args: Any, **kwargs: Any
    ) -> Any:
        safely(self._count, average)
        return original(average, *args, **kwargs)

    def _count(self, average: Any) -> None:
        if self._framework.step != self._step:
            self._updates.clear()
            self._step = self._framework.step
        self._updates[average] = self._updates.get(average, 0) + 1
        self._most, self._name = max((self._most, self._name), (self._updates[average], type(average).__name__))

    def breaches(self) -> tuple[Breach, ...]:
        times, self._most = self._most, 0
        self._steps = self._steps + 1 if times > 1 else 0
        if self._steps == 1:
            self._since = self._framework.step
        if self._steps < _STEPS:
            return ()
        message = (
            f"{self._name} averages the weights {times} times in each step, since step {self._since}: between two of "
            "these updates no optimizer has stepped, and the average forgets as many times as fast as its decay says."
        )
        remedy = "Update the average once, behind optimizer.step(). Do nothing if the decay was chosen for this."
        return (Breach("averages", "update-mismatch", "info", self._name, message, remedy, self._since),)
