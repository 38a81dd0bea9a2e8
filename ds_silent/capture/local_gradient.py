"""One rank's gradient of one step, put together from what the hooks of any framework see.

    local = LocalGradient(...)
    local.observe(index, gradient, boundary=True, exact=False)     # from a leaf hook: of one micro-batch and parameter
    local.observe_accumulated(exact=False)                         # at the boundary, before the reduction
    local.take()                                                   # its sketch and squared norm

Gradients are stored in one of two ways. Where they accumulate in a buffer of their own until the reduction, one look
at the boundary suffices: ``grad`` plus the incoming gradient, in the buffer's dtype. Where every micro-batch is
reduced and freed, each is added to the sketch: sketches add up, squared norms do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from ds_silent.config import DirectionConfig
from ds_silent.device import stream_order
from ds_silent.distributed.guard import CollectiveGuard, SparseGradientError
from ds_silent.exchange.exact import copy_overlap, exact_gram
from ds_silent.exchange.observation import MORE_CAME, Local
from ds_silent.kernels.accumulator import Accumulator, Part, new_accumulator
from ds_silent.maths import sketch
from ds_silent.maths.mixing import place_of

_UNKNOWN: tuple[float, float] = -1.0, 0.0  # of which gradients are zero
Accumulated = Callable[[int], Tensor | None]
"""``accumulated(index)``: what the framework has accumulated of a parameter's gradient in this step, if anything."""


class LocalGradient:
    """The local accumulated gradient of all trainable parameters, as sketch, squared norm and, if asked for, exactly.

    Args:
        numels: elements of each trainable parameter.
        groups: layer of each parameter.
        accumulated: see :data:`Accumulated`; never called when ``additive``.
        additive: every micro-batch is reduced and freed; nobody accumulates the local gradient.
        norms_add_up: False when ``additive`` and a step has several micro-batches.
        copied: for the exact method, keep a copy, because nothing else stores the whole local gradient.
        by_layer: keep a sketch of every layer.
    """

    def __init__(
        self,
        numels: list[int],
        groups: list[int],
        config: DirectionConfig,
        device: torch.device,
        accumulated: Accumulated,
        additive: bool,
        norms_add_up: bool,
        copied: bool,
        by_layer: bool,
    ):
        self._offsets, self._total = sketch.offsets_of(numels)
        plan = sketch.make_plan(self._total, config.sketch_size, device)
        self._order = stream_order(device)
        accumulator = partial(new_accumulator, plan, self._offsets, numels, groups, by_layer, self._order)
        self.accumulator = accumulator()
        self.micro_batches = KeptMicroBatches(accumulator)
        self.sketching = config.method != "off"
        self.whole = WholeGradient(self._offsets, self._total, config.exact_memory_mb, device, copied)
        self._accumulated, self._additive, self._norms_add_up = accumulated, additive, norms_add_up
        self._together = True  # as far as a framework asks for it
        self._fires = [0] * len(numels)
        self._captured = [False] * len(numels)
        self.start_step()

    def start_step(self) -> None:
        """Forget the step that was taken; what :attr:`accumulator` holds is forgotten by taking it."""
        self._fires[:] = [0] * len(self._fires)
        self._captured[:] = [False] * len(self._captured)
        self._once = True
        self._more_came = False  # behind what was captured, and was not reduced
        self._waiting: dict[int, None] = {}  # seen by a hook, to be read together
        self._leftover: Tensor | None = None  # squared norm, 0-dim
        self._micro_squared: Tensor | None = None  # sum over micro-batches of squared norms, where norms do not add up
        self._before: Tensor | None = None  # sketch of the micro-batches that have ended
        self._zeros: tuple[float, float] | tuple[Tensor, Tensor] | None = None  # see Accumulator.zeros

    def drop(self) -> None:
        """Forget what has come of the step under way: it was never to be one."""
        self.accumulator.take()
        self.micro_batches.drop()
        self.whole.forget()
        self.start_step()

    def take(self) -> tuple[Tensor, Tensor]:
        """Take what :attr:`accumulator` holds; of a step that takes twice it is not known which gradients are zero."""
        known = self._norms_add_up and self._zeros is None
        self._zeros = self.accumulator.zeros(self._missed()) if known else _UNKNOWN
        return self.accumulator.take()

    def observed(self, squared: Tensor, gram: Tensor | None) -> Local[float | Tensor]:
        """Return the numbers of an observation; ``squared``: norm that was accumulated, ``gram``: if exchanged."""
        missed = self._missed()
        seen = all(captured or not fires for captured, fires in zip(self._captured, self._fires, strict=True))
        zeros = self._zeros if seen and self._once and self._zeros is not None else _UNKNOWN
        return Local(
            seen=MORE_CAME if seen and self._more_came else float(seen),
            norm_seen=float(self._norms_add_up and self._once),
            gram_seen=float(gram is not None),
            squared=squared,
            leftover_squared=0.0 if self._leftover is None else self._leftover,
            micro_squared=0.0 if self._micro_squared is None else self._micro_squared,
            fired=float(len(self._fires) - len(missed)),
            missed_places=float(sum(map(place_of, missed))),
            zeros=zeros[0],
            zero_places=zeros[1],
        )

    def _missed(self) -> list[int]:
        return [index for index, fires in enumerate(self._fires) if not fires]

    def observe(self, index: int, gradient: Tensor, boundary: bool, exact: bool, together: bool = False) -> bool:
        """Observe one micro-batch's gradient of parameter ``index``, before it is accumulated.

        Return whether it is left to :meth:`observe_accumulated`, or needs no more: those behind it may be, too.

        Args:
            gradient: of the parameter's shape; only read, and no reference is kept.
            boundary: whether this is the step's last micro-batch; ignored when ``additive``.
            together: leave it, where nothing of another step or micro-batch is there.

        Raises:
            SparseGradientError: only some rows of it are there.
        """
        if gradient.layout is not torch.strided:
            _refuse_sparse(index)
        together = together and self._together and not self.micro_batches.keeping
        if self.micro_batches.keeping:
            self.micro_batches.add(index, gradient)
        first = self._fires[index] == 0
        self._fires[index] += 1
        if self._additive:
            # A parameter of a reentrant checkpoint fires in parts.
            self._once &= first
            if together and (index in self._waiting or self._accumulated(index) is None):
                self._waiting[index] = None
                return True
            self._captured[index] = True
            self._add(index, gradient, None, exact, square=self._norms_add_up)
            return False
        previous = self._accumulated(index)
        if first and previous is not None:
            self.take_out(index, previous, apart=boundary)
        if not boundary:
            self._more_came |= self._captured[index]
            return together and (previous is None or not first)
        again = self._captured[index]
        if together and not again and (previous is None or not first):
            self._waiting[index] = None
            return True
        self._once, self._captured[index] = self._once and not again, True
        self._add(index, gradient, None if first or again else previous, exact, square=not again)
        return False

    def leave(self, indices: Iterable[int], boundary: bool) -> None:
        """Take in that gradients have come, all at once, as :meth:`observe` has left the one before them."""
        for index in indices:
            self._once &= not (self._additive and self._fires[index])
            self._fires[index] += 1
            if boundary or self._additive:
                self._waiting[index] = None
            else:
                self._more_came |= self._captured[index]

    def take_out(self, index: int, previous: Tensor, apart: bool = False) -> None:
        """Take out what parameter ``index`` holds before a step's first micro-batch: ``zero_grad`` has left it, which
        is a fault of its own. What lies ``apart`` from the step's own gradient is simply not added to it."""
        if self._order is not None:
            self._order.enter()
        self._leftover = _with_square(self._leftover, previous.detach().reshape(-1).float())
        if not apart:
            self.accumulator.add(index, previous, weight=-1.0, square=False, sketching=self.sketching)

    def observe_accumulated(self, exact: bool) -> None:
        """Observe what has accumulated of the parameters that no hook has read at the boundary.

        These took part in earlier micro-batches alone, or all are read together. To be called before a reduction writes
        its result there: at the boundary, behind its backward, and when ``additive`` in each backward.
        """
        unread = self._waiting
        if not self._additive:
            unread = dict.fromkeys(i for i, fires in enumerate(self._fires) if fires and not self._captured[i])
        parts: list[Part] = []
        for index in unread:
            whole = self._accumulated(index)
            if whole is not None:
                if whole.layout is not torch.strided:
                    _refuse_sparse(index)
                self._captured[index] = True
                parts.append((index, 0, whole))
        self._waiting = {}
        if not parts:
            return
        self.accumulator.add_all(parts, square=self._norms_add_up, sketching=self.sketching)
        if exact:
            for index, _, whole in parts:
                self.whole.add(index, whole)

    def end_micro_batch(self) -> None:
        """End a micro-batch's backward; what nobody has read by now was reduced, and hooks read from here on."""
        if self._waiting:
            for index in self._waiting:
                self._captured[index] = False
            self._waiting, self._together = {}, False
        self.micro_batches.end()
        if self._norms_add_up or not self.sketching:
            return
        now = self.accumulator.peek()
        self._micro_squared = _with_square(self._micro_squared, now if self._before is None else now - self._before)
        self._before = now

    def exchange(self, group: dist.ProcessGroup, guard: CollectiveGuard) -> Tensor:
        """Compute this rank's part of the exact (N, N) inner products; a collective: every rank calls it.

        With zeros, or whatever was there, where something broke.
        """
        if self._order is not None:
            self._order.enter()
        stored = (self._accumulated(index) if fires else None for index, fires in enumerate(self._fires))
        return self.whole.exchange(stored, group, guard)

    def _add(self, index: int, gradient: Tensor, previous: Tensor | None, exact: bool, square: bool) -> None:
        self.accumulator.add(index, gradient, previous, square=square, sketching=self.sketching)
        if exact:
            self.whole.add(index, gradient, previous)


def _with_square(total: Tensor | None, vector: Tensor) -> Tensor:
    """Add the square of a vector's norm, 0-dim."""
    square = torch.dot(vector, vector)
    return square if total is None else total + square


def _refuse_sparse(index: int) -> NoReturn:
    raise SparseGradientError(
        f"the gradient of trainable parameter {index} is sparse on rank {dist.get_rank()}, which cannot be "
        "observed: make its module with sparse=False, if it is to be"
    )


class WholeGradient:
    """The whole local gradient, for exact inner products: as it is stored, or a copy where nothing stores all of it."""

    def __init__(self, offsets: list[int], total: int, memory_mb: int, device: torch.device, copied: bool):
        self._offsets, self._total = offsets, total
        self._memory_mb, self._device, self.copied = memory_mb, device, copied
        self._copy: Tensor | None = None

    def add(self, index: int, *terms: Tensor | None) -> None:
        """Add a gradient of parameter ``index``, and what was there before it, to the copy."""
        if not self.copied:
            return
        if self._copy is None:
            self._copy = torch.zeros(self._total, device=self._device)
        for term in terms:
            if term is not None:
                begin = self._offsets[index]
                self._copy[begin : begin + term.numel()].add_(term.detach().reshape(-1))

    def exchange(self, stored: Iterable[Tensor | None], group: dist.ProcessGroup, guard: CollectiveGuard) -> Tensor:
        """Compute the inner products; see :meth:`LocalGradient.exchange`. ``stored``: each parameter's gradient.

        A collective.
        """
        fill = partial(copy_overlap, guard.local(self._parts, stored) or [])
        gram = exact_gram(fill, self._total, group, self._device, self._memory_mb, guard.local, guard.collective)
        self.forget()
        return gram

    def forget(self) -> None:
        """Forget what has come of the step under way."""
        if self._copy is not None:
            self._copy.zero_()

    def close(self) -> None:
        """Give the copy back."""
        self._copy = None

    def _parts(self, stored: Iterable[Tensor | None]) -> list[tuple[int, Tensor]]:
        """Return it as (global offset, flat tensor)."""
        if self.copied:
            return [] if self._copy is None else [(0, self._copy)]
        return [
            (offset, gradient.detach().reshape(-1))
            for offset, gradient in zip(self._offsets, stored, strict=True)
            if gradient is not None
        ]


class KeptMicroBatches:
    """Keep a sketch of each micro-batch of a step, where it is asked for: ``keeping``, the same on every rank."""

    def __init__(self, new_accumulator: Callable[[], Accumulator]):
        self.keeping = self._asked = False
        self._new_accumulator = new_accumulator
        self._accumulator: Accumulator | None = None
        self._sketches: list[Tensor] = []

    def ask(self) -> None:
        """Keep those of the next step: the one under way has had its micro-batches."""
        self._asked = not self.keeping

    def start_step(self) -> None:
        """Begin to keep, where it was asked for."""
        if self._asked:
            self._asked, self.keeping = False, True

    def add(self, index: int, gradient: Tensor) -> None:
        """Take a gradient of the micro-batch under way, while keeping."""
        self._current().add(index, gradient, square=False)

    def end(self) -> None:
        """End the micro-batch under way."""
        if self.keeping:
            self._sketches.append(self._current().take()[0])

    def drop(self) -> None:
        """Forget what has come of the step under way."""
        self._accumulator, self._sketches = None, []

    def stack(self, count: int) -> Tensor | None:
        """(A, L, k) sketches as their gradients came in; None where there are more or fewer than ``count``."""
        return torch.stack(self._sketches) if len(self._sketches) == count else None

    def _current(self) -> Accumulator:
        self._accumulator = self._accumulator or self._new_accumulator()
        return self._accumulator


def sample_of(gradients: Iterable[Tensor | None], stride: int, device: torch.device) -> Tensor:
    """fp32 (2,) on the host: sum of squares and number of every ``stride``-th element of each."""
    total = torch.zeros(2, device=device)
    for gradient in gradients:
        if gradient is not None:
            part = gradient.detach().reshape(-1)[::stride].float()
            total += torch.stack((part.square().sum(), part.new_tensor(float(part.numel()))))
    return total.cpu()
