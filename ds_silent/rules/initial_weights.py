"""Look whether weights hold NaN or infinity before they are trained: where nothing has initialised them.

A layer that is made on the meta device and put elsewhere by ``to_empty()`` holds what the memory held. Where the first
loss is not finite this says why. What is finite is not judged. One pass over the weights, once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ds_silent.device import ReadLater
from ds_silent.distributed.parts import listed
from ds_silent.framework import Framework
from ds_silent.patches import Patches
from ds_silent.rules.rule import Breach, Rule

_SHOWN = 3


class InitialWeights(Rule):
    """Look once, as the first backward begins: a script may load or initialise weights behind the observer's start."""

    def __init__(self, framework: Framework):
        self._framework = framework
        self._looked = False
        self._names: list[str] = []
        self._later: ReadLater | None = None  # the largest element of each, NaN where one is
        self._found: tuple[Breach, ...] = ()

    def connect(self, patches: Patches, safely: Callable[..., Any]) -> None:
        """Look at what is to be trained."""
        patches.before_backward(partial(safely, self._look))

    def _look(self, root: Any) -> None:
        if self._looked:
            return
        self._looked, largest = True, []
        for index, _, values in self._framework.weights():
            if values.is_floating_point() and values.itemsize > 1 and values.numel():
                self._names.append(self._framework.names[index])
                largest.append(torch.linalg.vector_norm(values, ord=math.inf).float())
        if largest:
            self._later = ReadLater(torch.stack(largest))

    def breaches(self) -> tuple[Breach, ...]:
        if self._later is not None and self._later.ready:
            bad = [
                name
                for name, finite in zip(self._names, self._later.values.isfinite().tolist(), strict=True)
                if not finite
            ]
            self._later = None
            if bad:
                self._found = (_breach(list(dict.fromkeys(bad)), self._framework.step),)
        return self._found


def _breach(names: list[str], step: int) -> Breach:
    where = listed(names, _SHOWN)
    message = f"{where} held NaN or infinity before the first step."
    remedy = (
        "Look for a layer that nothing has initialised: behind to_empty() each module's own reset_parameters() has to "
        "be called, or all weights be loaded; else look at the checkpoint that was loaded."
    )
    effects = ("broken-numbers",)  # the finding of losses and gradients that are not finite, by its key
    return Breach(f"initial weights:{where}", "non-finite", "error", where, message, remedy, step, effects=effects)
