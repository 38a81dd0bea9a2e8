"""The same small training under every framework, over any number of ranks, and what its trace should hold.

Each step has ``MICRO`` micro-batches, dealt to the ranks one after the other, so that R ranks take MICRO / R each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

import ds_silent
from benchmarks.probe import LENGTH, ROWS, VOCABULARY, Probe, full_parameters
from ds_silent.drill.training import hash_of
from ds_silent.exchange.layout import GATHER_LIMIT
from ds_silent.frameworks.ddp import attach_ddp
from ds_silent.frameworks.fsdp2 import attach_fsdp2
from ds_silent.frameworks.megatron.megatron_framework import attach_megatron
from tests.support import ddp_training, megatron_training
from tests.support.ddp_training import DDPCase, FSDP2Case
from tests.support.distributed import gather_limit_of
from tests.support.megatron_training import MegatronCase
from tests.support.training import Case, whole

MICRO, STEPS, CLIP = 8, 4, 1.0
Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Cell:
    """One training. ``limit``: of the gathering exchange; ``told``: the script tells its rows' ids."""

    kind: str  # ddp, fsdp2, hsdp, zero0 to zero3, megatron, megatron-distributed
    dtype: str = "fp32"
    limit: int = GATHER_LIMIT
    told: bool = False
    seed: int = 5
    per_layer: bool = False
    observed: bool = True
    common: bool = False  # neither schedule nor weight decay: Megatron's AdamW decays no bias, and has no LambdaLR

    def block(self, directory: Path) -> dict[str, Any]:
        return Case(per_layer=self.per_layer).block(directory) | {"trace": {"size": 256}}


@dataclass(frozen=True)
class Truth:
    """One step in float64, of a plain copy of the model with the step's weights and all its rows."""

    loss: float
    gradient: list[Array]  # by parameter
    weights: list[Array]
    rows: list[int]  # ids


@dataclass(frozen=True)
class Outcome:
    truths: list[Truth]
    weights: str  # hash of the bits after the last step


class Training:
    """One cell's model, ready to take steps; see :func:`start`."""

    def __init__(self, observer: Any, step: Callable[[Tensor], None], parameters: Callable[[], list[Tensor]]):
        self.observer, self.step, self.parameters = observer, step, parameters


def rows_of_step(cell: Cell, step: int) -> tuple[Tensor, list[int]]:
    """Return all rows of a step, (MICRO, ROWS, LENGTH), and an id of each."""
    generator = torch.Generator().manual_seed(1000 * cell.seed + step)
    rows = torch.randint(0, VOCABULARY, (MICRO, ROWS, LENGTH), generator=generator)
    return rows, [step * 1000 + place * 7 - 3 for place in range(MICRO * ROWS)]


def train(cell: Cell, directory: str, steps: int = STEPS) -> Outcome:
    """Train on every rank of the group; return the truth on rank 0."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    with megatron_training.parallel() if cell.kind.startswith("megatron") else nullcontext():
        made = start(cell, Path(directory), MICRO // ranks)
        truths = []
        for step in range(1, steps + 1):
            rows, ids = rows_of_step(cell, step)
            weights = [one.detach().clone() for one in made.parameters()]
            if rank == 0:
                truths.append(truth_of(weights, rows, ids))
            if cell.told:
                for part in torch.tensor(ids).view(ranks, -1, ROWS)[rank]:
                    made.observer.observe_batch(part)
            made.step(rows.view(ranks, -1, ROWS, LENGTH)[rank])
        after = hash_of(one.detach() for one in made.parameters())
        if made.observer is not None:
            made.observer.close()
    return Outcome(truths, after)


def truth_of(weights: list[Tensor], rows: Tensor, ids: list[int]) -> Truth:
    copy = Probe(None).double()
    with torch.no_grad():
        for own, value in zip(copy.parameters(), weights, strict=True):
            own.copy_(value.reshape(own.shape))
    losses = [copy(part, False) for part in rows]
    loss = torch.stack(losses).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    trained = [parameter for parameter in copy.parameters() if parameter.requires_grad]
    none = torch.zeros(())
    gradient = [(none.expand(p.shape) if p.grad is None else p.grad).numpy().astype(np.float64) for p in trained]
    return Truth(float(loss), gradient, [p.detach().numpy().copy() for p in trained], ids)


def start(cell: Cell, directory: Path, accumulation: int) -> Training:
    if cell.kind.startswith("zero"):
        return _deepspeed(cell, directory, accumulation)
    if cell.kind.startswith("megatron"):
        return _megatron(cell, directory, accumulation)
    return _torch(cell, directory, accumulation)


def falling(optimizer: Any) -> Any:
    """A rate that is another in every step."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))


def without_decay(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0


def _torch(cell: Cell, directory: Path, accumulation: int) -> Training:
    sharded = cell.kind != "ddp"
    if sharded:
        fsdp = FSDP2Case(dtype=cell.dtype, replicas=2 if cell.kind == "hsdp" else 1)
        model, optimizer = ddp_training.build_fsdp2(fsdp)
    else:
        model, optimizer = ddp_training.build(DDPCase(dtype=cell.dtype))
    if cell.common:
        without_decay(optimizer)
    attach = attach_fsdp2 if sharded else attach_ddp
    block = cell.block(directory) if cell.observed else {"enabled": False}
    with gather_limit_of(cell.limit):
        observer = attach(model, optimizer, block, accumulation=accumulation)
    scheduler = None if cell.common else falling(optimizer)

    def step(batches: Tensor) -> None:
        for number, batch in enumerate(batches):
            last = number == accumulation - 1
            if sharded:
                model.set_requires_gradient_sync(last)
            with nullcontext() if sharded or last else model.no_sync():
                (model(batch, False) / accumulation).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()

    module = model if sharded else model.module
    return Training(observer, step, lambda: [whole(p) for p in module.parameters()])


def _deepspeed(cell: Cell, directory: Path, accumulation: int) -> Training:
    case = Case(
        stage=int(cell.kind[-1]),
        dtype=cell.dtype,
        accumulation=accumulation,
        clipping=CLIP,
    )
    if cell.dtype == "fp16":  # DeepSpeed's CPU accelerator refuses fp16 although torch computes it
        get_accelerator().is_fp16_supported = lambda: True
    torch.manual_seed(1234)
    model = Probe(None)
    config = case.config(directory, False) | {"silent_consistency": cell.block(directory)}
    if cell.common:
        config["optimizer"]["params"]["weight_decay"] = 0.0
    if not cell.observed:
        del config["silent_consistency"]
    parameters, schedule = model.parameters(), None if cell.common else falling
    with gather_limit_of(cell.limit):
        engine, *_ = ds_silent.initialize(
            model=model, model_parameters=parameters, config=config, lr_scheduler=schedule
        )

    def step(batches: Tensor) -> None:
        for batch in batches:
            engine.backward(engine(batch, False))
            engine.step()

    return Training(ds_silent.observer_of(engine), step, lambda: full_parameters(engine))


def _megatron(cell: Cell, directory: Path, accumulation: int) -> Training:
    case = MegatronCase(dtype=cell.dtype, distributed=cell.kind == "megatron-distributed", clipping=CLIP)
    chunk, optimizer = megatron_training.build(case)
    if cell.common:
        without_decay(optimizer)
    block = cell.block(directory) if cell.observed else {"enabled": False}
    with gather_limit_of(cell.limit):
        observer = attach_megatron([chunk], optimizer, block, accumulation=accumulation)

    def step(batches: Tensor) -> None:
        for number, batch in enumerate(batches):
            with nullcontext() if number == accumulation - 1 else chunk.no_sync():
                optimizer.scale_loss(chunk(batch, False) / accumulation).backward()
        chunk.finish_grad_sync()
        optimizer.step()
        chunk.zero_grad_buffer()
        optimizer.zero_grad()

    return Training(observer, step, lambda: list(chunk.module.parameters()))


# -- the naive sketch ------------------------------------------------------------------------------------------------


def sketch64(tensors: list[Array], size: int, only: Iterator[int] | None = None) -> Array:
    """Sketch a gradient in float64, by the definition in :mod:`ds_silent.maths.sketch`; ``only``: these tensors."""
    prime = next(n for n in range(size - 1, 1, -1) if all(n % d for d in range(2, int(n**0.5) + 1)))
    width, place = 8 * prime, 0
    total = sum(-(-one.size // 8) * 8 for one in tensors)
    rows = -(-total // width)
    generator = torch.Generator().manual_seed(0x5117E27)
    signs = torch.randint(0, 2, (width + 8 * rows,), generator=generator, dtype=torch.int8).numpy() * 2.0 - 1.0
    chosen = set(range(len(tensors))) if only is None else set(only)
    sketch = np.zeros(size)
    for index, one in enumerate(tensors):
        if index in chosen:
            row, column = np.divmod(np.arange(place, place + one.size), width)
            np.add.at(sketch, column % size, signs[8 * row + column] * one.reshape(-1))
        place += -(-one.size // 8) * 8
    return sketch


def folded(sketch: Array, size: int) -> Array:
    return sketch.reshape(-1, size).sum(0)
