"""A few elements of every weight in use, as a step's update finds them, for a trace.

    samples = WeightSamples(framework)
    samples.values()            # fp32 (samples.count + 1,): this rank's part; the ranks' parts add up
    samples.whole(added_up)     # the samples; None where a part of them is not known

Which elements follows from the whole tensor alone, so any sharding gives the same numbers. Where every rank holds all
weights, the first one answers. The last number counts how many elements were known: where a shard lies on a disk, or is
held twice, the sum of the counts says so.
"""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ds_silent.framework import Framework
from ds_silent.trace import sample_counts, sampled

_Place = tuple[int, int, int, torch.device]


class WeightSamples:
    """See the module docstring.

    Attributes:
        counts: samples of each parameter; ``count``: of all.
    """

    def __init__(self, framework: Framework):
        self._framework = framework
        self.counts = sample_counts(framework.numels)
        self.count = sum(self.counts)
        self._begins = [0, *accumulate(self.counts)]
        self._elements = [sampled(*one) for one in zip(framework.numels, self.counts, strict=True)]
        self._answers = framework.weights_sharded or dist.get_rank(framework.group) == 0
        self._places: dict[_Place, tuple[Tensor, slice]] = {}
        self._where: tuple[tuple[slice, ...], Tensor] | None = None

    def values(self) -> Tensor | None:
        """Return what this rank knows, and how many they are; None where another rank answers."""
        if not self._answers:
            return None
        picked, where, device = [], [], self._framework.device
        for index, start, weights in self._framework.weights():
            if type(weights) is not Tensor:
                continue  # quantised, or of a kind whose elements are not its values
            elements, place = self._place(index, start, weights)
            if place.start < place.stop:
                few = _elements(weights, elements)
                picked.append(few if few.device == device else few.to(device, non_blocking=True))
                where.append(place)
        found = torch.zeros(self.count + 1, dtype=torch.float32, device=device)
        if picked:
            together = torch.cat(picked).float()
            found[self._positions(tuple(where))] = together
            found[-1].fill_(float(len(together)))
        return found

    def whole(self, added_up: Tensor) -> Tensor | None:
        """Return the samples of all ranks' parts, summed; None where they are not all known, each once."""
        return added_up[:-1] if float(added_up[-1]) == self.count else None

    def _place(self, index: int, start: int, weights: Tensor) -> tuple[Tensor, slice]:
        """Return which elements of a piece are samples, and where they belong."""
        key = index, start, weights.numel(), weights.device
        if key not in self._places:
            elements = self._elements[index]
            low, high = np.searchsorted(elements, (start, start + weights.numel())).tolist()
            begin = self._begins[index]
            chosen = torch.from_numpy(elements[low:high] - start).to(weights.device)
            self._places[key] = chosen, slice(begin + low, begin + high)
        return self._places[key]

    def _positions(self, where: tuple[slice, ...]) -> Tensor:
        if self._where is None or self._where[0] != where:
            places = torch.cat([torch.arange(one.start, one.stop) for one in where])
            self._where = where, places.to(self._framework.device)
        return self._where[1]


def _elements(weights: Tensor, chosen: Tensor) -> Tensor:
    """Return elements in row-major order, without a copy of the whole."""
    if weights.is_contiguous():
        return torch.index_select(weights.view(-1), 0, chosen)
    return weights[torch.unravel_index(chosen, weights.shape)]
