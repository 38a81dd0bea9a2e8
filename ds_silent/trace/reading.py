"""Read a trace: find where each step stands, and decode one when it is asked for."""

from __future__ import annotations

import base64
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ds_silent.json_form import from_json, lines_of
from ds_silent.trace.form import NAME, SAMPLES, VERSION, Floats, Gradient, Head, Step, StepNumbers

LONGEST_LINE = 1 << 25
"""Bytes; what is longer is none of ours, and is not taken into memory."""
MOST_STEP = 2**62


class TraceError(ValueError):
    """There is no trace to read; the message is one sentence."""


@dataclass(frozen=True)
class _Place:
    offset: int
    length: int
    head: int


class Trace:
    """A trace that was read: where each of its steps stands, and the heads.

    Attributes:
        path: of the file.
        heads: all of them, in the order of the file; ``head``: the last, of the run that went on.
        steps: the numbers of the steps, from the first to the last.
        skipped: lines that are torn, foreign, or do not fit the head before them.
    """

    def __init__(self, path: Path, heads: tuple[Head, ...], places: Mapping[int, _Place], skipped: int):
        self.path, self.heads, self.skipped, self._places = path, heads, skipped, dict(sorted(places.items()))

    @property
    def head(self) -> Head:
        return self.heads[-1]

    @cached_property
    def steps(self) -> tuple[int, ...]:
        return tuple(self._places)

    def __contains__(self, step: object) -> bool:
        return step in self._places

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Step]:
        """Yield the steps in their order, each read as it is asked for."""
        return map(self.at, self.steps)

    def at(self, step: int) -> Step:
        """Read one step; TraceError where there is no such step, or the file is no longer what it was."""
        place = self._places.get(step)
        if place is None:
            raise TraceError(f"{_shown(self.path)} holds no step {step}; {_extent(self.steps)}")
        try:
            with open(self.path, "rb") as file:
                file.seek(place.offset)
                found = _step(_object(file.read(place.length)), self.heads[place.head])
        except OSError as error:
            raise TraceError(_unreadable(self.path, error)) from None
        if found is None or found.step != step:
            raise TraceError(f"{_shown(self.path)} was changed while it was read; read it again")
        return found


def read_trace(path: str | Path) -> Trace:
    """Read the trace of a run, from its directory or the file itself.

    Raises:
        TraceError: one sentence that names the path, what is wrong and the remedy.
    """
    file = _file_of(Path(path))
    heads: list[Head] = []
    places: dict[int, _Place] = {}
    skipped, last = 0, -1
    try:
        for offset, line in lines_of(file, LONGEST_LINE):
            value = _object(line)
            if value is not None and "trace" in value and (head := _head(value, file)) is not None:
                heads.append(head)
            elif heads and (step := _step(value, heads[-1])) is not None:
                if step.step <= last:
                    places = {number: place for number, place in places.items() if number < step.step}
                last = step.step
                places[last] = _Place(offset, len(line), len(heads) - 1)
            else:
                skipped += 1
    except OSError as error:
        raise TraceError(_unreadable(file, error)) from None
    if not heads:
        what = "is no trace" if skipped else "is empty"
        raise TraceError(f"{_shown(file)} {what}: it has no head; name a run's directory or its {NAME}")
    return Trace(file, tuple(heads), places, skipped)


def _file_of(path: Path) -> Path:
    try:
        if path.is_dir():
            if (path / NAME).is_file():
                return path / NAME
            below = sorted(one.parent.name for one in path.glob(f"*/{NAME}"))[:4]
            if below:
                listed = ", ".join(ascii(one) for one in below)
                raise TraceError(f"{_shown(path)} holds the traces of several groups ({listed}); name one of them")
            raise TraceError(
                f'{_shown(path)} holds no {NAME}; add "trace": {{}} to the block of that training and run it again'
            )
        if not path.exists():
            raise TraceError(f"{_shown(path)} does not exist; name a run's directory or its {NAME}")
        if not path.is_file():
            raise TraceError(f"{_shown(path)} is no file; name a run's directory or its {NAME}")
    except TraceError:
        raise
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise TraceError(f"{_shown(path)} cannot be read ({reason}); name a run's directory or its {NAME}") from None
    return path


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _head(value: dict[str, Any], path: Path) -> Head | None:
    version = value["trace"]
    if type(version) is int and version > VERSION:
        raise TraceError(
            f"{_shown(path)} is a trace of version {version}, and this ds_silent reads version {VERSION}; install a "
            "newer ds_silent"
        )
    try:
        head = from_json(Head, {name: one for name, one in value.items() if name != "version"})
    except (ValueError, TypeError, OverflowError):
        return None
    if version != VERSION or not _plausible(head):
        return None
    texts = {name: value[name] if isinstance(value.get(name), dict) else {} for name in ("settings", "versions")}
    return replace(head, **texts)


def _plausible(head: Head) -> bool:
    counts = (head.interval, head.size, head.ranks, head.micro_batches)
    if min(counts) < 1 or head.layer_size < 0:
        return False
    return all(
        0 <= one.layer < len(head.layers)
        and min(one.shape, default=0) >= 0
        and 0 <= one.samples <= min(SAMPLES, one.numel)
        for one in head.tensors
    )


def _step(value: dict[str, Any] | None, head: Head) -> Step | None:
    """Return the step of a line; None where it is none, or its arrays are not of the head's sizes."""
    if value is None or type(value.get("step")) is not int or not 0 <= value["step"] <= MOST_STEP:
        return None
    try:
        local, reduced = (_gradient(value.get(name), head) for name in ("local", "reduced"))
        weights = _decoded(value.get("weights"), head.samples)
        given = {one.name: value.get(one.name) for one in fields(StepNumbers)}
        read = from_json(StepNumbers, given | {"rates": value.get("rates") or []})
    except (ValueError, TypeError, OverflowError):
        return None
    return Step(**vars(read), local=local, reduced=reduced, weights=weights, head=head)


def _gradient(value: Any, head: Head) -> Gradient | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError("a gradient is an object")
    layers = len(head.layers)
    shapes = {"sketch": (head.size,), "layer_norms": (layers,), "layer_sketches": (layers, head.layer_size)}
    arrays = {}
    for name, shape in shapes.items():
        array = _decoded(value.get(name), math.prod(shape))
        if array is None:
            raise ValueError("a gradient has all its arrays")
        arrays[name] = array.reshape(shape)
    return Gradient(from_json(_Norm, {"norm": value.get("norm")}).norm, **arrays)


@dataclass(frozen=True)
class _Norm:
    norm: float


def _decoded(text: Any, count: int) -> Floats | None:
    if text is None:
        return None
    if not isinstance(text, str) or len(text) != 4 * (-(-4 * count // 3)):
        raise ValueError("an array has the length that the head says")
    return np.frombuffer(base64.b64decode(text, validate=True), dtype="<f4", count=count).astype(np.float32, copy=False)


def _extent(steps: tuple[int, ...]) -> str:
    return f"its steps are {steps[0]} to {steps[-1]}" if steps else "it holds none yet"


def _shown(path: Path) -> str:
    return ascii(os.fspath(path))


def _unreadable(path: Path, error: OSError) -> str:
    return f"{_shown(path)} cannot be read ({error.strerror or type(error).__name__}); check its permissions"
