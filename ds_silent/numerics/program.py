"""The measurements one after the other, and what they amount to.

findings = measure(Options(world_sizes=(2, 4, 8)), told=print)
findings.sound                                 # every bound holds, and ranks got the same bits
to_json(findings)
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ds_silent.config import ConfigError
from ds_silent.numerics.gradient_errors import Gradients, practice_gradients, read_gradients
from ds_silent.numerics.rounding import DTYPES, Rounding, measure_rounding, settled_loss_scale, spread
from ds_silent.numerics.weights import Distance, measure_weights
from ds_silent.numerics.wire import Job, RealReduction, Timing, reduce_for_real
from ds_silent.practice.model import PracticeModel, warm_up
from ds_silent.records import to_json as plain

WORLD_SIZES = (2, 4, 8)
MOST_MICRO_BATCHES = 64
MOST_TRAINED = 4  # ranks


@dataclass(frozen=True)
class Options:
    """As typed; :func:`measure` checks it."""

    gradients: str | None = None  # directory; None: the practice model
    world_sizes: tuple[int, ...] = ()  # empty: those of WORLD_SIZES that the gradients can be spread over
    dtypes: tuple[str, ...] = tuple(DTYPES)
    steps: int = 20  # 0: no training
    rounds: int = 20  # 0: nothing is timed
    processes: bool = True  # real all-reduces
    elements: int | None = None  # of the timed all-reduces; None: as many as the gradient has
    loss_scale: float | None = None  # of fp16; None: where dynamic loss scaling settles
    seed: int = 1


@dataclass(frozen=True)
class Findings:
    """All that was measured."""

    source: str
    elements: int
    micro_batches: int
    options: Options
    rounding: tuple[Rounding, ...]
    reductions: tuple[RealReduction, ...]
    weights: tuple[Distance, ...]
    timings: tuple[Timing, ...]

    @property
    def sound(self) -> bool:
        """Whether rounding stays below ``integrity``'s bound everywhere, and all ranks got the same bits."""
        return all(row.holds for row in self.rounding) and all(row.same_on_all_ranks for row in self.reductions)


def measure(options: Options, told: Callable[[str], None] = lambda _: None) -> Findings:
    """Everything that ``options`` ask for; ``told`` hears what has ended.

    Raises:
        ConfigError: a dtype, a loss scale, gradients or world sizes that do not fit.
        RankBroke: a process of the real all-reduces did not end well.
    """
    for dtype in options.dtypes:
        if dtype not in DTYPES:
            raise ConfigError(f"--dtype must be fp32, bf16 or fp16, got {dtype!a}")
    if options.loss_scale is not None and not math.isfinite(options.loss_scale):
        raise ConfigError(f"--loss-scale must be a finite number of at least 1, got {options.loss_scale}")
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # the practice model is too small for more, which would only wait for each other
    try:
        return _measured(options, told)
    finally:
        torch.set_num_threads(before)


def _measured(options: Options, told: Callable[[str], None]) -> Findings:
    given = None if options.gradients is None else read_gradients(options.gradients)
    world_sizes = _world_sizes(options, given)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        model = PracticeModel()
        if given is None or options.steps:
            warm_up(model)
            told("the practice model's warm-up")
    with tempfile.TemporaryDirectory(prefix="ds_silent_numerics_") as folder:
        count = math.lcm(*world_sizes)
        gradients = given or practice_gradients(model, count, options.seed, Path(folder))
        count, elements = gradients.micro_batches.shape
        scale, dtypes = options.loss_scale, options.dtypes
        rounding = tuple(measure_rounding(gradients.micro_batches, gradients.kept, world_sizes, dtypes, scale))
        told("the simulated orders")
        reductions, timings = _for_real(options, gradients, world_sizes, folder, told)
    weights: Iterable[Distance] = ()
    if options.steps:
        weights = measure_weights(model, dtypes, weights_ranks(world_sizes), options.steps, options.seed, told)
    options = replace(options, world_sizes=world_sizes)
    return Findings(gradients.source, elements, count, options, rounding, reductions, tuple(weights), timings)


def weights_ranks(world_sizes: Sequence[int]) -> int:
    """Ranks of the trainings: their time grows with it, and what more ranks do to the error is known by then."""
    return min(world_sizes[-1], MOST_TRAINED)


def _for_real(
    options: Options, gradients: Gradients, world_sizes: tuple[int, ...], folder: str, told: Callable[[str], None]
) -> tuple[tuple[RealReduction, ...], tuple[Timing, ...]]:
    if not options.processes:
        return (), ()
    micro_batches = gradients.micro_batches
    scale = options.loss_scale or settled_loss_scale(spread(micro_batches, world_sizes[-1]))
    elements = options.elements or micro_batches.shape[1]
    job = Job(tuple(map(str, gradients.files)), options.dtypes, scale, elements, options.rounds, folder)
    reductions, timings = list[RealReduction](), list[Timing]()
    for world_size in world_sizes:
        reduced, timed = reduce_for_real(job, micro_batches, world_size)
        reductions += reduced
        timings += timed
        told(f"all-reduces of {world_size} processes")
    return tuple(reductions), tuple(timings)


def _world_sizes(options: Options, given: Gradients | None) -> tuple[int, ...]:
    """Sorted. Each must divide the number of micro-batches, so that all ranks get as many."""
    wanted = tuple(sorted(set(options.world_sizes)))
    if given is None:
        wanted = wanted or WORLD_SIZES
        if math.lcm(*wanted) > MOST_MICRO_BATCHES:
            raise ConfigError(
                f"--world-size: the same micro-batches must spread evenly over all of {_listed(wanted)}, which takes "
                f"{math.lcm(*wanted)} of them; at most {MOST_MICRO_BATCHES} are possible, so measure them apart"
            )
        return wanted
    files = len(given.files)
    if not wanted:
        return tuple(size for size in WORLD_SIZES if files % size == 0 and size < files) + (files,)
    for size in wanted:
        if files % size:
            raise ConfigError(
                f"--world-size must divide the {files} files in {options.gradients!a}, so that each rank gets as "
                f"many, got {size}"
            )
    return wanted


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:-1])) + f" and {numbers[-1]}" if len(numbers) > 1 else str(numbers[0])


def to_json(findings: Findings) -> dict[str, Any]:
    """Return numbers as measured; what is not finite is the string "nan", "inf" or "-inf"."""
    found: dict[str, Any] = plain(findings)
    for written, row in zip(found["rounding"], findings.rounding, strict=True):
        written["bound_over_seen"] = plain(row.ratio)
    for written, reduction in zip(found["reductions"], findings.reductions, strict=True):
        written["equals"] = reduction.orders
    return found | {"sound": findings.sound}
