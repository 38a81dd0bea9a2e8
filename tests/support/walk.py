"""Raise at every statement of the observer's own step, one at a time, on one rank.

    walked = walk(cell, directory, share, steps, frozenset())        # on every rank of a group; an even number of steps

The statements are found by watching a healthy observation of the same steps: every line of ``ds_silent`` that a rank
executes between the first backward and the end of the last step. Then one observation per statement: the line raises
when it is reached for the first time. The engine goes on from case to case beside a plain one that sees the same rows.

Left out, because nothing in them can fail and something has to stand outside of any guard:

* what is trained and what starts the ranks (``ds_silent.practice``);
* the line ``try:`` itself;
* the lines of ``Patches`` that call the guarded entry and the training's own method.
"""

from __future__ import annotations

import logging
import random
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist

import ds_silent
from ds_silent.observing import recorder
from ds_silent.sinks.jsonl import read_events
from ds_silent.sinks.worker import OneTask
from tests.support.distributed import gather_limit_of
from tests.support.training import Case, engine_of, one_step
from tests.support.training import _hash_weights as hash_weights

PACKAGE = str(Path(ds_silent.__file__).parent)
TRAINING = str(Path(PACKAGE, "practice"))  # what is trained, and what starts its ranks: no part of the observation
Place = tuple[str, int]
Walked = frozenset[tuple[int, Place]]  # with the rank
_walked: list[Any] = []
TRIES = 5  # a statement that waits for another thread is not executed where that is faster
FRESH = 1000  # cases after which a new pair of engines is trained: after 3,000 the training itself diverges in fp16


@dataclass(frozen=True)
class Cell:
    """One way to be observed; ``limit``: of the gathering exchange; ``block``: beside what is always set."""

    case: Case
    block: dict[str, Any] = field(default_factory=dict)
    limit: int = 64
    apart: bool = False  # the replicas differ, so that their tensors are exchanged
    dropped: bool = False  # gradients get lost behind the observer, so that micro-batches are exchanged


CELLS = {
    "gathered": Cell(Case(accumulation=2), {"direction": {"per_layer": True}}),
    "constant size": Cell(Case(stage=1, dtype="bf16"), {"direction": {"exact_interval": 2}, "trace": {}}, limit=1),
    "in blocks": Cell(Case(stage=1), {"direction": {"exact_interval": 2}}, limit=0),
    "copied": Cell(Case(stage=2, accumulation=2), {"direction": {"method": "exact"}}),
    "partitioned": Cell(Case(stage=3), {"interval": 2, "tensorboard": True, "trace": {}}),
    "retry": Cell(Case(), {"direction": {"method": "exact"}, "respond": {"on_aggregation_error": "retry"}}),
    "apart": Cell(Case(stage=1, clipping=0.1), apart=True),
    "dropped": Cell(Case(accumulation=2), dropped=True),
    "scaled": Cell(Case(stage=1, dtype="fp16")),
}


@dataclass(frozen=True)
class Outcome:
    """What one rank has of one case."""

    place: Place
    rank: int  # where it raised
    fired: int | None  # in which step
    failed: bool  # the observer noted an error
    observing: bool  # at the end
    steps: int
    alike: bool  # the weights are those of the plain training
    off: int = 0  # observer-off events, on the writing rank


_IN_THE_TRAININGS_FRAME = (
    "Patches.around.<locals>.call",
    "Patches.before_backward.<locals>.backward",
    "Patches.in_backward.<locals>.call",
    "Patches.in_backward.<locals>.runs",
    "Patches.behind_method.<locals>.behind",
    "Patches.wrap_method.<locals>.call",
)
"""Wrappers that only pass on: what breaks in their own lines is the script's call itself."""


@cache
def _lines_of(code: CodeType) -> dict[str, frozenset[int]]:
    """The statements of a function of the package, by its file within the package; empty of any other."""
    file = code.co_filename
    if not file.startswith(PACKAGE) or file.startswith(TRAINING):
        return {}
    return {file[len(PACKAGE) + 1 :]: frozenset(line for *_, line in code.co_lines() if line is not None)}


class _Tracer:
    """Calls ``reached(place)`` ahead of every statement of the package, or of the functions that hold one ``place``."""

    def __init__(self, reached: Any, place: Place | None = None):
        self._reached, self._place = reached, place

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        lines = _lines_of(frame.f_code)
        if self._place is None:
            return self._line if lines else None
        file, line = self._place
        return self._line if line in lines.get(file, ()) else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and frame.f_code.co_qualname not in _IN_THE_TRAININGS_FRAME:
            self._reached((frame.f_code.co_filename[len(PACKAGE) + 1 :], frame.f_lineno))
        return self._line


class Injected(Exception):
    """Raised by the walk."""


def _taken() -> int:
    """Steps, by the engine that is walked through."""
    return int(_walked[-1].engine.global_steps)


class _TracedTask(OneTask):
    """What judges beside the training is walked too. Of what breaks there the training hears a step later."""

    heard = threading.local()

    def begin(self, act: Callable[[], None]) -> None:
        tracer, step = sys.gettrace(), _taken()  # of the training's thread, which begins it

        def traced() -> None:
            self.heard.step = step + 1
            sys.settrace(tracer)
            try:
                act()
            finally:
                sys.settrace(None)

        super().begin(traced)


class _Pair:
    """An engine to be observed, and a plain one that takes the same steps."""

    def __init__(self, cell: Cell, directory: Path, steps: int):
        self.cell, self._directory, self.steps = cell, directory, steps
        self.engine, self._plain = (self._build() for _ in range(2))
        self._number = self.before = 0  # steps before the observation

    def _build(self) -> Any:
        engine = engine_of(self.cell.case.config(self._directory, enabled=False))
        if self.cell.apart and dist.get_rank() == 1:
            with torch.no_grad():
                engine.module.frozen.weight[0, 0] += 1.0
        return engine

    def observe(self, tracer: Any) -> tuple[Any, int, bool, int]:
        """A fresh observer for ``steps`` steps under ``tracer``."""
        self._number += 1
        folder = self._directory / str(self._number)
        block = {"output_dir": str(folder), "tensorboard": False, "preflight": False, **self.cell.block}
        block.setdefault("integrity", {"replica_interval": 1})
        block["direction"] = {"sketch_size": 256, "exact_memory_mb": 1, **block.get("direction", {})}
        with gather_limit_of(self.cell.limit):
            observer = ds_silent.attach(self.engine, block)
        self.before = int(self.engine.global_steps)
        dropping = self._drop(self.engine)
        seed = 2 * self._number + dist.get_rank()
        generator = torch.Generator().manual_seed(seed)
        try:
            for _ in range(self.steps * self.cell.case.accumulation):
                sys.settrace(tracer)
                try:
                    one_step(self.engine, generator)
                finally:
                    sys.settrace(None)
        except Injected as raised:  # the other ranks wait for this one by now
            raise RuntimeError("what broke in the observer reached the training") from raised
        steps = int(self.engine.global_steps) - self.before
        state = (observer._guard.failure is not None, observer.measures(0))
        observer.close()
        for handle in dropping:
            handle.remove()
        dropping = self._drop(self._plain)
        generator = torch.Generator().manual_seed(seed)
        for _ in range(self.steps * self.cell.case.accumulation):
            one_step(self._plain, generator)
        for handle in dropping:
            handle.remove()
        alike = hash_weights(self.engine) == hash_weights(self._plain)
        off = 0
        if dist.get_rank() == 0:
            path = folder / "events.jsonl"
            events = read_events(path) if path.exists() else []  # not every place that breaks is an event
            off = sum(event["kind"] == "observer-off" for event in events)
        return state, steps, alike, off

    def _drop(self, engine: Any) -> list[Any]:
        if not self.cell.dropped or dist.get_rank() == 0:
            return []
        return [p.register_hook(torch.zeros_like) for p in engine.module.parameters() if p.requires_grad]


@cache
def _lines(file: str) -> list[str]:
    return Path(PACKAGE, file).read_text().splitlines()


def _can_fail(place: Place) -> bool:
    return _lines(place[0])[place[1] - 1].strip() != "try:"


def statements(pair: _Pair) -> list[Place]:
    """What this rank executes, where everything that is done once per process has been done."""
    for _ in range(2):
        seen: dict[Place, None] = {}
        pair.observe(_Tracer(lambda place: seen.setdefault(place, None)))  # noqa: B023
    return [place for place in seen if _can_fail(place)]


def walk(cell: Cell, directory: str, share: float, steps: int, walked: Walked | None) -> list[Outcome]:
    """Walk through the statements that the ranks execute, each on the rank that executes it.

    Args:
        cell: the way to be observed.
        directory: of the records.
        share: of ``walked`` that is walked again, drawn by seed.
        steps: of each case; even, so that every case sees the same steps of an interval of 2.
        walked: statements that another cell was walked through; None: all.
    """
    logging.getLogger("ds_silent").setLevel(logging.CRITICAL)
    recorder.OneTask = _TracedTask  # type: ignore[misc]
    pair = _Pair(cell, Path(directory), steps)
    _walked.append(pair)
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, statements(pair))
    places = [(rank, place) for rank, own in enumerate(everybody) for place in own]
    chosen = [
        one
        for one in places
        if (walked is not None and one not in walked) or random.Random(repr((one, cell, share))).random() < share
    ]
    outcomes = []
    for number, (rank, place) in enumerate(chosen):
        if number and number % FRESH == 0:
            _walked.append(pair := _Pair(cell, Path(directory, f"from {number}"), steps))
        fired: list[int] = []

        def strike(reached: Place, place: Place = place, fired: list[int] = fired) -> None:
            if reached == place and not fired:
                fired.append(getattr(_TracedTask.heard, "step", _taken()) - pair.before + 1)
                raise Injected(f"at {place[0]}:{place[1]}")

        tracer = _Tracer(strike, place) if dist.get_rank() == rank else None
        for _ in range(TRIES):
            (failed, observing), taken, alike, off = pair.observe(tracer)
            reached = [bool(fired)]
            dist.broadcast_object_list(reached, src=rank)
            if reached[0]:
                break
        step = fired[0] if fired else None
        outcomes.append(Outcome(place, rank, step, failed, observing, taken, alike, off))
    return outcomes
