"""Check that the weights that a forward uses are those that the optimizer updates: rounded masters, gathered shards.

Masters and their copies are as the last update left them, between the reduction and the optimizer of the next step. Of
each piece up to ``SAMPLES`` elements, evenly spread and other ones at each look, are compared bit for bit with their
masters, rounded to nearest; looked at are ``LOOKED_AT`` measured steps, from the first and from every ``EVERY``-th on.
A framework that keeps no masters, or whose copies are rounded otherwise, names no copies.

What a forward gathers from the ranks' shards is looked at in that forward, behind the framework's own hook: the part
that comes from this rank must be this rank's shard, cast to the gathered dtype. No other rank is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from ds_silent.device import ReadLater
from ds_silent.distributed.parts import listed
from ds_silent.framework import Framework, GatheredPiece, WeightCopy
from ds_silent.patches import Patches
from ds_silent.rules.batch import EVERY, LOOKED_AT
from ds_silent.rules.rule import Breach, Rule

SAMPLES = 64
_SHOWN = 3


class _Weights(Rule):
    """Keep the newest verdict on the weights that a forward uses."""

    key: str

    def __init__(self, framework: Framework):
        self._framework = framework
        self._steps = 0  # measured
        self._later: list[tuple[int, list[str], list[int], ReadLater]] = []  # step, names, samples of each
        self._found: tuple[Breach, ...] = ()

    def _judged(self) -> tuple[Breach, ...]:
        """Return what the newest look that has arrived has found."""
        while self._later and self._later[0][3].ready:
            step, names, sizes, later = self._later.pop(0)
            parts = later.values.split(sizes) if bool(later.values.any()) else ()  # type: ignore[no-untyped-call]
            unequal = [name for name, part in zip(names, parts, strict=False) if bool(part.any())]
            if not unequal:
                self._found = ()
            elif not self._found:
                message, remedy = (text.format(listed(unequal, _SHOWN)) for text in _WORDS[self.key])
                self._found = (Breach(self.key, "weights-mismatch", "error", unequal[0], message, remedy, step),)
        return self._found


class WeightsInUse(_Weights):
    """Compare samples of the copies with their masters."""

    key = "weights:masters"

    def breaches(self) -> tuple[Breach, ...]:
        """Look at some measured steps."""
        looks = self._steps % EVERY < LOOKED_AT
        copies = sorted(self._framework.copies(), key=_dtype) if looks else []
        if copies:
            unequal = torch.cat([unequal_samples(list(alike), self._steps) for _, alike in groupby(copies, _dtype)])
            sizes = [_places(copy.weights, self._steps)[2] for copy in copies]
            self._later.append((self._framework.step, [copy.name for copy in copies], sizes, ReadLater(unequal)))
        self._steps += 1
        return self._judged()


def _dtype(copy: WeightCopy) -> str:
    return str(copy.weights.dtype)


def sample(values: Tensor, look: int) -> Tensor:
    """Return a view of up to ``SAMPLES`` elements of a flat tensor, evenly spread; other ones at another look."""
    first, stride, count = _places(values, look)
    return values.as_strided((count,), (stride,), values.storage_offset() + first)  # half the cost of two slices


def _places(values: Tensor, look: int) -> tuple[int, int, int]:
    """Return the first element that is looked at, the distance to the next, and their number."""
    numel = values.numel()
    stride = max(1, numel // SAMPLES)
    first = look % stride
    return first, stride, min(SAMPLES, -(-(numel - first) // stride))


def unequal_samples(copies: list[WeightCopy], look: int) -> Tensor:
    """Tell of each sample of copies of one dtype, on their device, whether it is not its rounded master; NaN is NaN."""
    weights = torch.cat([sample(copy.weights, look) for copy in copies])
    masters = torch.cat([sample(copy.masters, look) for copy in copies])
    return _unequal(weights, masters)


def _unequal(used: Tensor, updated: Tensor) -> Tensor:
    rounded = updated.to(used.device, non_blocking=True).to(used.dtype)
    return (used != rounded) & ~(used.isnan() & rounded.isnan())


_WORDS = {
    "weights:masters": (
        "The weights in use are not the rounded fp32 masters: {}. The forward computes with other weights than the "
        "optimizer updates, and the next update overwrites them.",
        "Write both: the masters through deepspeed.utils.safe_set_full_fp32_param, and the weights, which that "
        "call leaves as they are until the next update; or load them before the engine is made. Else go back to the "
        "last checkpoint before this step.",
    ),
    "weights:gathered": (
        "What a forward has gathered is not what the shards hold: {}. The forward computes with other weights than the "
        "optimizer updates.",
        "Look for weights that stay gathered over an update (set_reshard_after_backward(False)), and for code "
        "that writes them while they are whole.",
    ),
}


class GatheredWeights(_Weights):
    """Compare samples of what a forward has gathered with the shards of this rank."""

    key = "weights:gathered"

    def __init__(self, framework: Framework):
        super().__init__(framework)
        self._looked = set[int]()  # modules, since the last measured step
        self._since = 0  # the step of the first of them
        self._names: list[str] = []
        self._unequal: list[Tensor] = []  # bool (), of each name

    def connect(self, patches: Patches, safely: Callable[..., Any]) -> None:
        """Look behind the hooks that gather: they were there before."""
        pieces: dict[nn.Module, list[GatheredPiece]] = {}
        for piece in self._framework.gathered():
            pieces.setdefault(piece.module, []).append(piece)
        for module, own in pieces.items():
            patches.hook(module.register_forward_pre_hook, partial(safely, self._forward, own))

    @torch.no_grad()
    def _forward(self, pieces: Sequence[GatheredPiece], module: nn.Module, args: Any) -> None:
        looks = self._steps % EVERY < LOOKED_AT and id(module) not in self._looked
        if not looks or torch.compiler.is_compiling():
            return
        self._since = self._since if self._looked else self._framework.step
        self._looked.add(id(module))
        for piece in pieces:
            own = piece.own()
            if own is not None and own[0].numel():
                used, updated = (sample(values, self._steps) for values in own)
                unequal = _unequal(used, updated)
                if (travels := piece.travels()) is not None:
                    unequal &= _unequal(used, updated.to(travels))
                self._names.append(piece.name)
                self._unequal.append(unequal.any())

    def breaches(self) -> tuple[Breach, ...]:
        """Send what the forwards since the last measured step have found."""
        if self._unequal:
            ones = [1] * len(self._names)
            self._later.append((self._since, self._names, ones, ReadLater(torch.stack(self._unequal))))
        self._names, self._unequal = [], []
        self._looked.clear()
        self._steps += 1
        return self._judged()
