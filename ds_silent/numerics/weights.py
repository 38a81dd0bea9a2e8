"""What the rounding of every step does to the weights: the same training again, with another reduction.

    train(model, reducer("bf16", "ring"), "AdamW", world_size=8, steps=20, seed=1)     # (D,) weights
    measure_weights(model, ("bf16",), world_size=8, steps=20, seed=1)                  # distances

Rows, dropout and the optimizer are the same in all of them. The yardstick is a training on other rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from ds_silent.numerics.gradient_errors import ROWS, gradient_of, micro_batch, trainable
from ds_silent.numerics.rounding import DTYPES, ORDERS, reference_mean, settled_loss_scale, terms_of_mean
from ds_silent.practice.model import PracticeModel, make_rows

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01),
}
OTHER_ROWS = 7919  # added to the seed


@dataclass(frozen=True)
class Distance:
    """Between the last weights of two trainings, relative to the way that the reference went from its start."""

    optimizer: str
    one: str
    other: str
    relative: float


def measure_weights(
    model: PracticeModel,
    dtypes: Sequence[str],
    world_size: int,
    steps: int,
    seed: int,
    told: Callable[[str], None] = lambda _: None,
) -> Iterator[Distance]:
    """Each reduction against the float64 one, two fp32 orders against each other, and other rows as the yardstick.

    Args:
        model: warm; left as it is.
        dtypes: of the reductions.
        world_size, steps, seed: of the trainings.
        told: is called with the name of each training that ended.
    """
    start = parameters_to_vector(trainable(model)).detach().double()
    for optimizer in OPTIMIZERS:

        def walk(dtype: str, order: str = "ring", rows: int = seed, optimizer: str = optimizer) -> Tensor:
            weights = train(model, reducer(dtype, order), optimizer, world_size, steps, rows).double()
            told(f"{optimizer}, {dtype}")
            return weights

        exact = walk("fp64")
        travelled = float((exact - start).norm())
        for dtype in dtypes:
            ended = walk(dtype)
            yield Distance(optimizer, f"{dtype}, ring", "fp64", float((ended - exact).norm()) / travelled)
            if dtype == "fp32":
                between = float((walk(dtype, "tree") - ended).norm()) / travelled
                yield Distance(optimizer, "fp32, ring", "fp32, tree", between)
        other = float((walk("fp64", rows=seed + OTHER_ROWS) - exact).norm()) / travelled
        yield Distance(optimizer, "fp64, other rows", "fp64", other)


def reducer(dtype: str, order: str) -> Callable[[Tensor], Tensor]:
    """(N, D) fp32 local gradients to the (D,) fp32 gradient that the optimizer gets; fp16 with its loss scale."""
    if dtype == "fp64":
        return lambda gradients: reference_mean(gradients).float()

    def reduce(gradients: Tensor) -> Tensor:
        scale = settled_loss_scale(gradients) if dtype == "fp16" else 1.0
        return ORDERS[order](terms_of_mean(gradients, DTYPES[dtype], scale)).float() / scale

    return reduce


def train(
    model: PracticeModel, reduce: Callable[[Tensor], Tensor], optimizer: str, world_size: int, steps: int, seed: int
) -> Tensor:
    """The (D,) fp32 weights after ``steps`` steps of ``world_size`` simulated ranks; ``model`` is left as it is."""
    model = copy.deepcopy(model)
    parameters = trainable(model)
    stepper = OPTIMIZERS[optimizer](parameters)
    rows = make_rows(steps * world_size * ROWS, seed)
    for step in range(steps):
        numbers = range(step * world_size, (step + 1) * world_size)
        local = [gradient_of(model, micro_batch(rows, number), (seed, number)) for number in numbers]
        mean = reduce(torch.stack(local))
        pieces = torch.split(mean, [parameter.numel() for parameter in parameters])
        for parameter, piece in zip(parameters, pieces, strict=True):
            parameter.grad = piece.view_as(parameter)
        stepper.step()
    return parameters_to_vector(parameters).detach()
