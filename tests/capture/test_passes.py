"""How often a step reads the gradient, and calls the kernels: counted in real trainings of two ranks, not timed.

A pass over a gradient is what a step pays most for, so one that creeps in fails here, with the moment at which it does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from fractions import Fraction
from functools import partial, wraps
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ds_silent
from benchmarks.probe import LENGTH, ROWS, VOCABULARY, Probe
from ds_silent.capture.step import StepCapture, StepMoments
from ds_silent.kernels.accumulator import Accumulator
from ds_silent.kernels.checksums import Checksums
from tests.support import ddp_training, training
from tests.support.distributed import run_on_kept_ranks

PASSES = {
    "local: sketch": Fraction(1),
    "reduced: sketch": Fraction(1, 2),  # its share
    "observation: checksum": Fraction(1),
}
"""Of a measured step, as multiples of the gradient's bytes, of a rank out of two; what is applied was read before."""
CALLS = {"reduced: add_all": 1, "reduced: take": 2, "observation: checksum": 1}
"""Of a measured step, on each rank, beside those that read the local gradient."""
LOCAL_CALLS = {
    "ddp": {"local: add_all": 1},
    "views": {"local: add": 13},  # each gradient as it comes: the reduction writes where it lies
    "deepspeed": {"local: add_all": 1},
}
"""Of a measured step; the model has 13 trainable parameters."""
MOMENTS = [
    ("local", StepMoments, "gradient"),
    ("local", StepMoments, "accumulated"),
    ("reduced", StepMoments, "reduced"),
    ("observation", StepCapture, "observation"),
    ("applied", StepMoments, "applying"),
    ("after the step", StepMoments, "end_step"),
]
KERNELS = {
    Accumulator: {"add": "sketch", "add_all": "sketch", "take": "", "peek": ""},
    Checksums: {"__call__": "checksum"},
}
"""What each of a kernel's functions does with the tensors that it is given, if anything."""


def family(kind: type) -> list[type]:
    """A class and all below it."""
    children: list[type] = kind.__subclasses__()
    return [kind, *(one for child in children for one in family(child))]


class Counts:
    """What one rank hands to the kernels, and how often it calls them, by moment."""

    def __init__(self, patched: pytest.MonkeyPatch) -> None:
        self.read: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self._moments, self._inside = ["elsewhere"], False
        for moment, kind, name in MOMENTS:
            patched.setattr(kind, name, self._at(moment, getattr(kind, name)))
        for kernel, functions in KERNELS.items():
            for kind in family(kernel):
                for name in functions.keys() & vars(kind).keys():
                    patched.setattr(kind, name, self._counted(name, functions[name], vars(kind)[name]))

    def take(self) -> tuple[dict[str, int], dict[str, int]]:
        """Bytes that were handed over since the last call, and calls."""
        taken = dict(self.read), dict(self.calls)
        self.read.clear()
        self.calls.clear()
        return taken

    def _at(self, moment: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._moments.append(moment)
            try:
                return function(*args, **kwargs)
            finally:
                self._moments.pop()

        return call

    def _counted(self, name: str, what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            if self._inside:  # one of them calls another, with the same
                return function(kernel, *args, **kwargs)
            given = [list(arg) if name == "add_all" else arg for arg in args]
            self.calls[f"{self._moments[-1]}: {what if name == '__call__' else name}"] += 1
            if what:
                self.read[f"{self._moments[-1]}: {what}"] += sum(map(bytes_in, (given, kwargs.values())))
            self._inside = True
            try:
                return function(kernel, *given, **kwargs)
            finally:
                self._inside = False

        return call


def bytes_in(values: Iterable[Any]) -> int:
    nested = (bytes_in(value) for value in values if isinstance(value, (list, tuple)))
    return sum(v.numel() * v.element_size() for v in values if isinstance(v, Tensor)) + sum(nested)


Training = tuple[Callable[[bool], None], list[Tensor], Any]
"""A micro-step of it, its parameters, and its observer."""


def in_ddp(block: dict[str, Any], accumulation: int, views: bool = False) -> Training:
    ddp, optimizer = ddp_training.build(ddp_training.DDPCase(views=views))
    observer = ds_silent.attach(ddp, block, optimizer=optimizer, accumulation=accumulation)
    generator = torch.Generator().manual_seed(dist.get_rank())

    def micro_step(last: bool) -> None:
        with nullcontext() if last else ddp.no_sync():
            ddp(torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator), False).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()

    return micro_step, list(ddp.parameters()), observer


def in_deepspeed(block: dict[str, Any], accumulation: int) -> Training:
    case = training.Case(accumulation=accumulation)
    model = Probe(None)
    config = {**case.config(Path(), enabled=False), "silent_consistency": block}
    engine = ds_silent.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    generator = torch.Generator().manual_seed(dist.get_rank())
    return lambda _: training.one_step(engine, generator), list(model.parameters()), ds_silent.observer_of(engine)


Step = tuple[dict[str, Fraction], dict[str, int]]


def steps_of(directory: str, framework: str, interval: int, accumulation: int, steps: int) -> list[list[Step]]:
    """Multiples of the gradient's bytes that were handed over, and calls: of each step's micro-batches."""
    block = {"output_dir": directory, "interval": interval, "tensorboard": False}
    made_by = {"ddp": in_ddp, "views": partial(in_ddp, views=True), "deepspeed": in_deepspeed}
    with pytest.MonkeyPatch.context() as patched:
        counts = Counts(patched)
        micro_step, parameters, observer = made_by[framework](block, accumulation)
        size = bytes_in([parameter for parameter in parameters if parameter.requires_grad])
        counts.take()  # the preflight may sum up the weights
        found: list[list[Step]] = []
        for _ in range(steps):
            found.append([])
            for micro in range(accumulation):
                micro_step(micro == accumulation - 1)
                read, calls = counts.take()
                found[-1].append(({place: Fraction(bytes_, size) for place, bytes_ in read.items()}, calls))
        observer.close()
    return found


def over_ranks(step: list[Step], other: list[Step]) -> list[dict[str, Fraction]]:
    """The mean over two ranks: a share need not be exactly half of the elements."""
    rows = []
    for (mine, _), (theirs, _) in zip(step, other, strict=True):
        rows.append(
            {place: (mine.get(place, Fraction(0)) + theirs.get(place, Fraction(0))) / 2 for place in mine | theirs}
        )
    return rows


def gradients_taken(directory: str, views: bool) -> list[int]:
    """How many gradients the hooks hand on in each of 3 steps, of which the second is measured."""
    handed, taken, original = [0], [], StepMoments.gradient

    def gradient(moments: StepMoments, index: int, values: Tensor) -> bool:
        handed[0] += 1
        return original(moments, index, values)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(StepMoments, "gradient", gradient)
        block = {"output_dir": directory, "interval": 2, "tensorboard": False}
        micro_step, _, observer = in_ddp(block, accumulation=1, views=views)
        for _ in range(3):
            handed[0] = 0
            micro_step(True)
            taken.append(handed[0])
        observer.close()
    return taken


@pytest.mark.parametrize("framework", list(LOCAL_CALLS))
def test_a_measured_step_makes_these_passes_and_calls_and_no_more(tmp_path: Path, framework: str) -> None:
    ranks = run_on_kept_ranks(steps_of, 2, (str(tmp_path), framework, 1, 1, 3))
    assert [over_ranks(*both) for both in zip(*ranks, strict=True)] == 3 * [[PASSES]]
    expected = CALLS | LOCAL_CALLS[framework]
    assert [[calls for _, calls in step] for rank in ranks for step in rank] == 2 * 3 * [[expected]]


@pytest.mark.parametrize("framework", list(LOCAL_CALLS))
def test_accumulation_is_read_once_at_the_boundary(tmp_path: Path, framework: str) -> None:
    """A hook that reads there reads what is accumulated beside what comes in; the first micro-batch reads nothing."""
    ranks = run_on_kept_ranks(steps_of, 2, (str(tmp_path), framework, 1, 2, 3))
    boundary = PASSES | {"local: sketch": Fraction(2 if framework == "views" else 1)}
    assert [over_ranks(*both) for both in zip(*ranks, strict=True)] == 3 * [[{}, boundary]]
    expected = CALLS | LOCAL_CALLS[framework]
    assert [[calls for _, calls in step] for rank in ranks for step in rank] == 2 * 3 * [[{}, expected]]


@pytest.mark.parametrize("framework", ["ddp", "deepspeed"])
def test_an_unmeasured_step_reads_nothing_and_calls_no_kernel_in_any_micro_batch(
    tmp_path: Path, framework: str
) -> None:
    for rank in run_on_kept_ranks(steps_of, 2, (str(tmp_path), framework, 10, 2, 12)):
        assert [step for step, micros in enumerate(rank, 1) if micros != [({}, {}), ({}, {})]] == [10]
        assert rank[9][0] == ({}, {})


@pytest.mark.parametrize("views", [False, True])
def test_an_unmeasured_step_takes_its_first_gradient_alone(tmp_path: Path, views: bool) -> None:
    """So does a measured one where all are read together."""
    assert run_on_kept_ranks(gradients_taken, 2, (str(tmp_path), views)) == 2 * [[1, 13 if views else 1, 1]]
