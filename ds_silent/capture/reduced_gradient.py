"""This rank's share of the aggregated gradient, from the reduction until the optimizer has used it.

    aggregate = ReducedGradient(local, counted)
    aggregate.reduced(parts)          # the reduction has ended; the script may change its result now
    aggregate.observed(parts)         # the step begins: the aggregate, and whether it was changed since
    aggregate.apply(parts)            # from inside the optimizer's step: what it is about to use
    aggregate.compare_applied(...)    # travels with the next observation

Clipping and its like are the script's own business: what is reduced is looked at before, what is applied after them.
Whether a script changed gradients in between is found without reading them again. On the CPU what is applied is not
read either, if it lies where it was read, torch has counted no write since, and some elements of each tensor, not all
of them zero, are what they were. On an accelerator the host would have to wait for these.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ds_silent.capture.local_gradient import LocalGradient
from ds_silent.exchange.observation import LEFT_OUT, PARTLY, Applied, Reduced
from ds_silent.framework import Part
from ds_silent.maths.rounding_bound import multiple_of

FEW, MORE = 8, 4096  # elements of each tensor; of one in which the few are zero


class Remembered:
    """Remember pieces of a gradient, of any shape and floating dtype, on one device; they are not kept."""

    def __init__(self, values: Sequence[Tensor]):
        self._places, self._few = _places(values), _few(values)
        self._more = {place: _some(values[place], MORE).clone() for place in self._zeros(values)}

    def hold(self, values: Sequence[Tensor]) -> bool:
        """Tell whether each of these is one of the pieces, and was not written to since."""
        known = set(self._places) if len(values) > 1 else self._places
        return all(place in known for place in _places(values))

    def moved(self, values: Sequence[Tensor]) -> bool:
        """Tell whether the pieces are others, or were written to since; ``tensor.data`` hides from this."""
        return _places(values) != self._places

    def differs(self, values: Sequence[Tensor]) -> Tensor | None:
        """Compare a few elements, fp32 (): 1 where they differ, else 0; NaN differs from itself. None without pieces.

        Scaling shows in all elements but zeros; what is written behind autograd's back to single elements may not.
        """
        few = _few(values)
        return None if few is None or self._few is None else (few != self._few).any().float()

    def are(self, values: Sequence[Tensor]) -> bool:
        """Tell whether these are the pieces, as they were; not on an accelerator, where the host would wait.

        A piece whose few elements are zero, as an embedding's are where no token came, says nothing: scaled they stay.
        Of such a piece more elements are compared; if they are zero, too, it is not known.
        """
        if self._few is None or self._few.device.type != "cpu" or self.moved(values) or bool(self.differs(values)):
            return False
        more = ((held, _some(values[place], MORE)) for place, held in self._more.items())
        return all(bool(held.any()) and torch.equal(held, now) for held, now in more)

    def _zeros(self, values: Sequence[Tensor]) -> list[int]:
        """Return the places of pieces on the CPU whose few elements are all zero."""
        if self._few is None or self._few.device.type != "cpu":
            return []
        counts = np.array([min(FEW, value.numel()) for value in values])
        held = np.flatnonzero(counts)
        known = np.logical_or.reduceat((self._few != 0.0).numpy(), np.cumsum(counts)[held] - counts[held])
        return list(map(int, held[~known]))


def _places(values: Sequence[Tensor]) -> tuple[tuple[int, int], ...]:
    """Where each lies, and how often torch has counted a write to it."""
    return tuple((value.data_ptr(), 0 if value.is_inference() else value._version) for value in values)


def _few(values: Sequence[Tensor]) -> Tensor | None:
    return torch.cat([_some(value) for value in values]) if values else None


def _some(value: Tensor, most: int = FEW) -> Tensor:
    """Elements that are spread evenly: one view of a contiguous tensor, because this is done for each at every step."""
    step, count = max(1, value.numel() // most), min(most, value.numel())
    if value.is_contiguous() and not value.requires_grad:
        return value.as_strided((count,), (step,))
    return value.detach().reshape(-1)[::step][:most]


Sketched = tuple[Tensor, Tensor]
"""(L, k) sketches and (G,) squared norms, by layer."""


class ReducedGradient:
    """See the module docstring. It borrows the local gradient's accumulator, which is empty before and after.

    Args:
        counted: parameters that count in the whole model's norm, where other ranks hold the rest; else None.
        reread: read what is applied even where it is what was read before.
    """

    def __init__(self, local: LocalGradient, counted: frozenset[int] | None, reread: bool = False):
        self._local, self._counted, self._reread = local, counted, reread
        self.start_step()

    def start_step(self) -> None:
        """Forget the step that was taken."""
        self._local_sketched: Sketched | None = None  # the local gradient's, where the reduction's end was observed
        self._reduced: tuple[Sketched, Remembered] | None = None
        self._sketch: Tensor | None = None  # (k,) of this rank's share, as the optimizer gets it
        self._sketched: Remembered | None = None  # what that sketch is of
        self._unread: bool | None = None  # the optimizer applies just that; None before it comes to apply anything
        self._written = False  # since the reduction, by what torch does not count
        self._void = False  # written to since the step began, as by a GradScaler that unscales for each optimizer
        self._in_place = False  # the first optimizer applies what that sketch is of, and no copy of it

    def written(self) -> None:
        """Look at the aggregate again as the step begins: it was written to, and torch has not counted that.

        Where the step has begun, nothing is said of what it applies.
        """
        self._written = True
        self._void = self._sketched is not None

    def reduced(self, aggregated: Iterable[Part] | None) -> None:
        """Look at the reduction's result before the script can change it. The last such call of a step counts."""
        sketches, squares = self._local.take()
        if self._local_sketched is not None:  # another backward at the same boundary
            sketches, squares = sketches + self._local_sketched[0], squares + self._local_sketched[1]
        self._local_sketched = sketches, squares
        if aggregated is not None:
            parts = list(aggregated)
            self._reduced = self._read(parts), Remembered(_values(parts))

    def take_local(self) -> Sketched:
        """Return the local gradient's sketches."""
        return self._local_sketched or self._local.take()

    def observed(
        self, aggregated: Iterable[Part] | None, again: bool = False
    ) -> tuple[Reduced[float | Tensor], Tensor | None, Tensor | None]:
        """Observe the aggregate as the step begins.

        Args:
            aggregated: this rank's share; None where it is hidden.
            again: the reduction was repeated: what was remembered of the first one is void.

        Returns:
            its numbers, (k,) sketch, (L, k) sketches by layer.
        """
        if aggregated is None:
            return Reduced(), None, None
        parts, before = list(aggregated), None if again else self._reduced
        by_layer, squares = self._read(parts) if before is None else before[0]
        sketches = by_layer if self._local.sketching else None
        sketch = self._sketch = None if sketches is None else sketches.sum(0)
        numbers: Reduced[float | Tensor] = Reduced(seen=1.0, squared=squares.sum())
        if before is None:
            self._sketched = Remembered(_values(parts))
        else:
            numbers = self._changed_after_reduction(before[1], parts, numbers)
        if self._counted is not None:
            numbers = replace(numbers, counted=_squared(parts, self._counted))
        return numbers, sketch, sketches

    def _changed_after_reduction(
        self, remembered: Remembered, parts: list[Part], numbers: Reduced[float | Tensor]
    ) -> Reduced[float | Tensor]:
        """Compare what is applied with what the step began with; look again only where a script changed that."""
        values = _values(parts)
        if not self._written and not remembered.moved(values):
            changed, self._sketched = remembered.differs(values), remembered
            return numbers if changed is None else replace(numbers, handed_seen=-changed)
        (sketches, squares), self._sketched = self._read(parts), Remembered(values)
        numbers = replace(numbers, handed_seen=1.0, handed_squared=squares.sum())
        if self._sketch is None:
            return numbers
        before, self._sketch = self._sketch, sketches.sum(0)
        factor, error = multiple_of(self._sketch, before)
        return replace(numbers, handed_factor=factor, handed_error=torch.dot(error, error))

    def apply(self, parts: Iterable[Part]) -> None:
        """Observe what the optimizer is about to apply, of this rank's share of the parameters."""
        parts = [] if self._sketch is None else list(parts)
        if not parts or self._sketched is None:
            return
        values, first = _values(parts), self._unread is None
        held = self._sketched.hold(values[:1] if first else values)
        self._in_place = held if first else self._in_place
        self._void = self._void or (self._in_place and not held)  # the script clips for each of its optimizers
        self._unread = not self._reread and self._unread is not False and self._sketched.are(values)
        if not self._unread:
            self._local.accumulator.add_all(parts, square=False)

    def compare_applied(self, applied: bool, left_out: bool = False, partly: bool = False) -> Applied[float | Tensor]:
        """Compare: applied = factor * aggregate + error, of this rank's share; all of it stays on the device.

        Args:
            applied: whether the optimizer came to apply it.
            left_out: whether the script has thrown the gradient away.
            partly: whether one of several optimizers did not come.
        """
        if self._sketch is None:
            return Applied()
        if not applied:
            return Applied(seen=LEFT_OUT if left_out else -1.0)
        seen = PARTLY if partly else 1.0
        if self._unread and not self._void:
            return Applied(seen, 1.0, 0.0, torch.dot(self._sketch, self._sketch))
        total = self._local.accumulator.take()[0].sum(0)
        if self._void:
            return Applied()
        factor, error = multiple_of(total, self._sketch)
        return Applied(seen, factor, torch.dot(error, error), torch.dot(total, total))

    def _read(self, parts: Iterable[Part]) -> Sketched:
        self._local.accumulator.add_all(parts, sketching=self._local.sketching)
        return self._local.accumulator.take()


def _values(parts: list[Part]) -> list[Tensor]:
    return [values for *_, values in parts]


def _squared(parts: list[Part], counted: frozenset[int]) -> float | Tensor:
    squares = [values.float().square().sum() for index, _, values in parts if index in counted]
    return torch.stack(squares).sum() if squares else 0.0
