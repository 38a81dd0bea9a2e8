"""What the trainers of a script that nobody edits promise of a step's gradient; a callback would say so.

trainers = Trainers(patches)     # before the script imports one
trainers.promise()               # as a training begins
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from ds_silent.framework import Promise
from ds_silent.patches import Patches

TRAINER = Promise("transformers' Trainer")
_LIGHTNINGS = ("lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer")


class Trainers:
    """Remember which trainers train now."""

    def __init__(self, patches: Patches):
        self._patches = patches
        self._promises: list[Callable[[], Promise | None]] = []  # of those, the innermost last
        patches.after_import("transformers.trainer", partial(self._watch, "train", lambda _: TRAINER))
        for name in _LIGHTNINGS:
            patches.after_import(name, partial(self._watch, "fit", promise_of_lightning))

    def promise(self) -> Promise | None:
        """Return that of the innermost; None: none trains, or it promises nothing."""
        return self._promises[-1]() if self._promises else None

    def _watch(self, method: str, promise: Callable[[Any], Promise | None], module: ModuleType) -> None:
        def trains(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
            self._promises.append(partial(promise, trainer))
            try:
                return original(trainer, *args, **kwargs)
            finally:
                self._promises.pop()

        self._patches.wrap_method(module.Trainer, method, trains)


def promise_of_lightning(trainer: Any) -> Promise | None:
    """Return what Lightning's Trainer promises while it trains; nothing where the script takes the steps itself."""
    if not trainer.lightning_module.automatic_optimization:
        return None
    return Promise("Lightning's Trainer", int(trainer.accumulate_grad_batches))
