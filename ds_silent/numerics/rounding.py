"""The error of one reduction, the bits that its order decides, and the bound that ``integrity`` sets beside it.

for row in measure_rounding(micro_batches, torch.float32, (2, 4, 8), ("fp32", "bf16")): row.relative_error
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_silent.config import DetectorsConfig, DirectionConfig
from ds_silent.detectors import log_steps
from ds_silent.maths.rounding_bound import Arithmetic, check_aggregate, terms_of
from ds_silent.maths.sketch import make_plan, sketch_of
from ds_silent.numerics.orders import (
    DTYPES,
    ORDERS,
    changed_bits,
    reference_mean,
    relative_error,
    settled_loss_scale,
    spread,
    terms_of_mean,
)


@dataclass(frozen=True)
class Rounding:
    """Of one world size and communication dtype. Errors and bounds are relative to the mean gradient."""

    world_size: int
    dtype: str
    loss_scale: float  # 1 unless fp16
    errors: Mapping[str, float]  # by order, against the float64 mean
    seen: float  # the largest error over the orders, as the sketch shows it (``integrity.relative_error``)
    bound: float  # what ``integrity`` puts down to rounding (``integrity.rounding_bound``)
    changed: Mapping[str, float]  # share of elements whose bits are not those of the plain ring, by order
    changed_by_world_size: float | None  # against the ring of the largest world size; None for that one
    unscaled_error: float | None  # of the ring without loss scaling; fp16 only

    @property
    def error(self) -> float:
        return self.errors["ring"]

    @property
    def ratio(self) -> float:
        """The bound over the error that it must cover."""
        return self.bound / self.seen if self.seen > 0.0 else math.inf

    @property
    def holds(self) -> bool:
        """Whether rounding alone raises no alarm. What overflowed is another finding (``non-finite``)."""
        return not math.isfinite(self.seen) or self.seen <= self.bound


def measure_rounding(
    micro_batches: Tensor,
    kept: torch.dtype,
    world_sizes: Sequence[int],
    dtypes: Sequence[str],
    loss_scale: float | None = None,
) -> Iterator[Rounding]:
    """A row for every world size and dtype.

    Args:
        micro_batches: (M, D) fp32, M a multiple of each world size.
        kept: dtype in which the gradients were stored before.
        world_sizes, dtypes: what to measure.
        loss_scale: for fp16; None: where dynamic loss scaling settles.
    """
    scale = settled_loss_scale(spread(micro_batches, max(world_sizes))) if loss_scale is None else loss_scale
    for name in dtypes:
        factor = scale if name == "fp16" else 1.0
        largest = ORDERS["ring"](terms_of_mean(spread(micro_batches, max(world_sizes)), DTYPES[name], factor))
        for world_size in world_sizes:
            local = kept if world_size == len(micro_batches) else torch.float32
            other = largest if world_size != max(world_sizes) else None
            yield _row(spread(micro_batches, world_size), local, name, factor, other)


def _row(gradients: Tensor, kept: torch.dtype, name: str, scale: float, largest: Tensor | None) -> Rounding:
    dtype, reference = DTYPES[name], reference_mean(gradients)
    terms = terms_of_mean(gradients, dtype, scale)
    results = {order: add(terms) for order, add in ORDERS.items()}
    seen, bound = _checked(gradients * scale, list(results.values()), arithmetic_of_mean(gradients, kept, dtype))
    plain = results["ring"]
    unscaled = relative_error(ORDERS["ring"](terms_of_mean(gradients, dtype)), reference)
    return Rounding(
        world_size=len(gradients),
        dtype=name,
        loss_scale=scale,
        errors={order: relative_error(result, reference, scale) for order, result in results.items()},
        seen=seen,
        bound=bound,
        changed={order: changed_bits(plain, result) for order, result in results.items() if order != "ring"},
        changed_by_world_size=None if largest is None else changed_bits(plain, largest),
        unscaled_error=unscaled if name == "fp16" else None,
    )


def arithmetic_of_mean(gradients: Tensor, kept: torch.dtype, dtype: torch.dtype) -> Arithmetic:
    """What :func:`terms_of_mean` and one sum round: a cast to a narrower dtype, and a division unless N is 2^n."""
    narrows = torch.promote_types(kept, dtype) != dtype
    divides = not math.log2(len(gradients)).is_integer()
    size = DirectionConfig().sketch_size
    return Arithmetic(
        dtype, before=narrows + divides, elements=gradients.shape[1], width=make_plan(gradients.shape[1], size).width
    )


def _checked(gradients: Tensor, results: Sequence[Tensor], arithmetic: Arithmetic) -> tuple[float, float]:
    """Largest relative error over the results and the bound, as the observer's audit would have them."""
    plan = make_plan(gradients.shape[1], DirectionConfig().sketch_size)
    terms = terms_of(torch.stack([sketch_of(plan, gradient).double() for gradient in gradients]))
    log_rate = log_steps(DetectorsConfig(), 1) + math.log(2.0)  # as the observer: the reduction, and what is applied
    checks = [check_aggregate(terms, sketch_of(plan, result).double(), arithmetic, log_rate) for result in results]
    errors = [check.error / check.expected for check in checks]
    worst = max(errors) if all(map(math.isfinite, errors)) else math.nan
    return worst, checks[0].tolerance / checks[0].expected
