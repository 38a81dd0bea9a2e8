"""What a trace needs of a step beside what is observed anyway: all rows, a few weights, the rates, an order.

traced = TraceCapture(framework, guard, rows)
traced.observed(due=True)  # between the reduction and the update, before the ids are taken
traced.rates               # that the update is about to take
"""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_silent.capture.batch_rows import RowIds
from ds_silent.distributed.guard import CollectiveGuard
from ds_silent.framework import Framework
from ds_silent.patches import Patches
from ds_silent.rules.known_optimizers import number
from ds_silent.rules.language_models import is_compiled
from ds_silent.trace import sample_counts, sampled

_Place = tuple[int, int, int, torch.device]


class TraceCapture:
    """See the module docstring."""

    def __init__(self, framework: Framework, guard: CollectiveGuard, rows: RowIds):
        self._framework, self._rows = framework, rows
        self.samples, self.order = WeightSamples(framework), ForwardOrder(framework, guard)
        self.rates: tuple[float | None, ...] = ()  # of each parameter group; None where one lies on a device
        framework.patches.also(self.order.end)

    def observed(self, due: bool) -> dict[str, Any]:
        """Return what an observation holds beside: this rank's part of all rows and weights; ``due``: of this step."""
        if not due:
            return {}
        optimizers = self._framework.optimizers()
        self.rates = tuple(number(group["lr"]) for optimizer in optimizers for group in optimizer.param_groups)
        return {"rows": self._rows.hashed(self._framework.device), "weights": self.samples.values()}


class ForwardOrder:
    """In which order a module's first training forward comes to its parameters.

        order.begin()                # at every training forward; the first puts hooks in place
        order.end()                  # as soon as that is over: they are gone
        order.of_parameters()        # [0, 2, None, ...]; None where it is not known

    A parameter is reached with the module that holds it, one that several hold (tied weights) with the first of them. A
    compiled module is left alone: its hooks would be compiled too. Made while the modules hold the framework's
    parameters: a forward may hold others.
    """

    def __init__(self, framework: Framework, guard: CollectiveGuard):
        self._local, self._count = guard.local, len(framework.parameters)
        known = {id(parameter): index for index, parameter in enumerate(framework.parameters)}
        self._root = framework.module
        self._holders: list[tuple[nn.Module, list[int]]] | None = [
            (module, own)
            for module in framework.module.modules()
            if (own := [known[id(p)] for p in module.parameters(recurse=False) if id(p) in known])
        ]
        self._patches = Patches()
        self._reached: dict[int, None] = {}  # parameters, in their order

    def begin(self) -> None:
        """Hook the modules, once. The outermost forward has begun: its own hooks are not called any more."""
        holders, self._holders = self._holders, None
        if holders is None or torch.compiler.is_compiling() or is_compiled(self._root):
            return
        for module, own in holders:
            if module is self._root:
                self._reach(own)
            else:
                self._patches.hook(module.register_forward_pre_hook, partial(self._local, self._reach, own))

    def _reach(self, parameters: list[int], *_: Any) -> None:
        for index in parameters:
            self._reached.setdefault(index)

    def end(self) -> None:
        """Remove the hooks."""
        self._patches.undo()

    def of_parameters(self) -> list[int | None]:
        """Return the place of each parameter among those that were reached."""
        places = {index: place for place, index in enumerate(self._reached)}
        return [places.get(index) for index in range(self._count)]


class WeightSamples:
    """A few elements of every weight in use, as a step's update finds them; ``counts``: of each parameter.

        samples.values()            # fp32 (samples.count + 1,): this rank's part; the ranks' parts add up
        samples.whole(added_up)     # the samples; None where a part of them is not known

    Which elements follows from the whole tensor alone, so any sharding gives the same numbers. Where every rank holds
    all weights, the first one answers. The last number counts how many elements were known: where a shard lies on a
    disk, or is held twice, the sum of the counts says so.
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
