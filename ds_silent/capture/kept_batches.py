"""What a training forwards at one step after another while its loader goes on: a batch that is kept, or a constant.

    kept = KeptBatches(loaders, lambda: framework.step)
    rows.is_constant = kept.forward              # at each training forward

Where the tensors are those of a batch that the loader has given, the loop trains it in the place of another one. Where
they are none of the loader's, as the nodes of a whole graph or the coordinates of a picture, they are no rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_silent.capture.loaders import LoaderWatch, Watch
from ds_silent.capture.row_hashes import batch_tensors
from ds_silent.patches import Patches
from ds_silent.rules.rule import Breach, Rule

_FEW = 8  # batches that were replaced, before a word is said; forwards without one, after which it is over
_TENSORS, _ELEMENTS = 4, 8  # of a batch, by which it is known again on another device
_AHEAD = 3  # batches that a loop may have fetched ahead
_CONSTANT = 2  # batches that the loader gave meanwhile


class KeptBatches(Rule, Watch):
    """Count the batches of this rank's loader that were not trained because the one before was trained once more."""

    def __init__(self, loaders: LoaderWatch, step: Callable[[], int]):
        self._loaders, self._step = loaders, step
        self._newest: deque[tuple[Tensor, ...]] = deque(maxlen=_AHEAD)  # the beginnings of the newest batches
        self._of_forward: tuple[tuple[Tensor, ...], ...] = ()  # those when the newest batch was first forwarded
        self._given = self._looked = 0  # batches of the training's loader; of them, before the newest forward
        self._fresh = self._since_kept = 0  # forwards of other tensors than the forward before; behind the newest kept
        self._kept = self._unused = 0  # batches in whose place another was trained; not trained when the first was
        self._first = 0  # step
        self._linked: bool | None = None  # what is forwarded begins as a batch of the loader does
        self._safely: Callable[..., Any] = lambda function, *arguments: function(*arguments)

    def connect(self, patches: Patches, safely: Callable[..., Any]) -> None:
        """Hear of every batch."""
        self._safely = safely
        self.watch()
        patches.also(self.remove)

    def advanced(self, iterator: Any, batch: Any = None) -> None:
        self._safely(self._note, iterator, batch)

    def _note(self, iterator: Any, batch: Any) -> None:
        if not torch.is_grad_enabled():
            return
        self._given += self._loaders.feeds_training(iterator)
        if self._linked is None:
            tensors = batch_tensors((batch,), {})[0][:_TENSORS]
            self._newest.append(tuple(map(_beginning, tensors)))

    def forward(self, tensors: Sequence[Tensor], same: bool) -> bool:
        """Take a training forward; return whether its tensors are a constant, and no rows.

        Args:
            same: they are those of the forward before.
        """
        if not same:
            self._fresh, self._since_kept, self._looked = self._fresh + 1, self._since_kept + 1, self._given
            self._of_forward = tuple(self._newest)
        elif self._given != self._looked and self._linked is not False:
            self._looked = self._given
            self._kept, self._since_kept = self._kept + 1, 0
            if self._kept == 1:
                self._unused, self._first = self._given - self._fresh - 1, self._step()
            if self._linked is None and self._kept >= _CONSTANT:
                self._linked = bool(self._safely(self._begins_as, tensors))
                self._newest.clear()
        return same and self._linked is False and self._fresh <= 1

    def _begins_as(self, tensors: Sequence[Tensor]) -> bool:
        """Tell whether one of the tensors begins as one of the loader's. This waits for a device, once in a run."""
        given = [one for batch in self._of_forward for one in batch]
        own = [_beginning(one).cpu() for one in tensors]
        return any(one.dtype == other.dtype and torch.equal(one, other.cpu()) for one in own for other in given)

    def breaches(self) -> tuple[Breach, ...]:
        unused = self._given - self._fresh - self._unused
        if self._since_kept > _FEW:
            self._kept = 0
        if self._kept < _FEW or unused < self._kept or not self._linked:
            return ()
        message = (
            f"The loop trains a batch once more in the place of the next one: the loader goes on, and {_FEW} batches "
            f"or more that it has given were never trained, since step {self._first}."
        )
        remedy = (
            "Look at the loop: a batch that is kept in a variable, or a prefetcher that does not advance. If a batch "
            "is replaced by the one before it on purpose, do nothing."
        )
        effects = ("repeated-rows", "data-order-mismatch", "low-coverage", "outlier-rank")
        return (Breach("kept", "data-order-mismatch", "warning", "loader", message, remedy, self._first, effects),)


def _beginning(tensor: Tensor) -> Tensor:
    first = tensor.detach()[:1] if tensor.ndim else tensor.detach()
    return first.reshape(-1)[:_ELEMENTS].clone()
