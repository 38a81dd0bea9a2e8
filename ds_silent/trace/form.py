"""The lines of a trace: a :class:`Head`, then a :class:`Step` after the other. Arrays are base64 of little-endian fp32.

line = write_head(head)
line = write_step(step)
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ds_silent.json_form import to_json

NAME = "trace.jsonl"
VERSION = 1
SAMPLES = 16
"""Elements of a tensor, at most, whose values a step holds."""
TOGETHER = 4096
"""Of all tensors, while these are fewer; and half as many numbers in all layers' sketches of a gradient."""
LARGEST_LAYER = 64
"""Numbers of a layer's sketch, at most."""
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Layer:
    """A layer, as the records name it."""

    name: str


@dataclass(frozen=True)
class Tensor:
    """A trainable parameter: whole, whoever holds which part of it.

    Attributes:
        layer: its place in :attr:`Head.layers`.
        samples: how many of its elements a step holds, at :func:`sampled`.
        order: in which the module's first forward came to it; None where that is not known.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    layer: int
    samples: int
    order: int | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Head:
    """What holds for all steps behind it.

    Attributes:
        precision: of the gradients as they are reduced.
        rounding: what rounding takes at most from one step's gradient, relative to the lengths of its terms together.
        layer_size: numbers of one layer's sketch.
        sketch_size: ``direction.sketch_size``, of which both sizes are folds: where it is equal, and the shapes of the
            tensors in their order are, sketches of two trainings can be subtracted.
        settings: by key ``{"value", "from"}``, as in ``run.json``.
    """

    interval: int
    size: int
    ranks: int
    micro_batches: int
    framework: str
    precision: str
    rounding: float | None
    layer_size: int
    layers: tuple[Layer, ...]
    tensors: tuple[Tensor, ...]
    sketch_size: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict, metadata={"json": False})
    versions: Mapping[str, Any] = field(default_factory=dict, metadata={"json": False})

    @property
    def samples(self) -> int:
        """Numbers of :attr:`Step.weights`."""
        return sum(tensor.samples for tensor in self.tensors)

    def part(self, index: int) -> slice:
        """Where the samples of a tensor stand in :attr:`Step.weights`."""
        begin = sum(tensor.samples for tensor in self.tensors[:index])
        return slice(begin, begin + self.tensors[index].samples)


@dataclass(frozen=True)
class Rows:
    """The rows of a step, whatever their order and whichever rank had them; ``by``: the script's ids, or content."""

    count: int
    hash: str
    by: Literal["ids", "content"] = "content"


@dataclass(frozen=True)
class Weighed:
    """How much the step's labels count in its loss."""

    labels: float
    weight_sum: float
    weight_min: float
    weight_max: float


@dataclass(frozen=True)
class Used:
    """What the optimizer used: ``factor`` times the reduced gradient, but for a relative error."""

    factor: float
    error: float


@dataclass(frozen=True)
class Gradient:
    """A gradient in a few numbers: fp32 arrays (size,), (layers,) and (layers, layer_size)."""

    norm: float
    sketch: Floats
    layer_norms: Floats
    layer_sketches: Floats


@dataclass(frozen=True)
class StepNumbers:
    """What a step's line holds beside arrays; None is what could not be known.

    Attributes:
        samples: rows consumed up to and with this step by all ranks.
        losses: standard deviation of the loss over the ranks.
        rates: of each parameter group.
    """

    step: int
    samples: int | None
    rows: Rows | None
    loss: float | None
    losses: float | None
    objective: Weighed | None
    rates: tuple[float | None, ...]
    applied: Used | None


@dataclass(frozen=True)
class Step(StepNumbers):
    """One optimizer step; None is what could not be known.

    Attributes:
        local: of the mean over the ranks of what each rank accumulated, before the reduction.
        reduced: of what the reduction made of it, before clipping.
        weights: (head.samples,) fp32 values of the weights in use, before the step's update.
        head: the one that it was written behind.
    """

    local: Gradient | None = field(metadata={"json": False})
    reduced: Gradient | None = field(metadata={"json": False})
    weights: Floats | None = field(metadata={"json": False})
    head: Head | None = field(default=None, metadata={"json": False}, repr=False)


@dataclass(frozen=True)
class Traced:
    """What one measured step adds to a trace: a line of its own, where one is due, and what it tells of the one before.

    Attributes:
        of: the measured step before this one, None where there is none.
        used: what the optimizer used in that.
    """

    step: Step | None
    of: int | None = None
    used: Used | None = None


def sample_counts(numels: Sequence[int]) -> list[int]:
    """Return how many elements of each tensor a step holds: the same however the tensors are sharded."""
    each = min(SAMPLES, max(1, TOGETHER // max(1, len(numels))))
    return [min(numel, each) for numel in numels]


def layer_size(layers: int) -> int:
    """Return the numbers of one layer's sketch, a power of two, for so many layers."""
    share = max(1, TOGETHER // 2 // max(1, layers))
    return min(LARGEST_LAYER, 1 << share.bit_length() - 1)


def line_bytes(size: int, layers: int, samples: int) -> int:
    """Return about how long a step's line is."""
    arrays = (size, layers, layers * layer_size(layers))
    return 700 + sum(4 * -(-4 * count // 3) for count in (*arrays, *arrays, samples))


def sampled(numel: int, count: int) -> npt.NDArray[np.int64]:
    """Return the places of the ``count`` elements of a tensor that a step holds, in its whole, row-major order."""
    places = [(2 * index + 1) * numel // (2 * count) for index in range(count)]  # exact, however large the tensor
    return np.array(places, dtype=np.int64)


# -- Writing -----------------------------------------------------------------------------------------------------------


def write_head(head: Head) -> str:
    """Return the line of a head, without its newline."""
    own = to_json(head)
    return _line({"trace": VERSION, **own, "settings": to_json(head.settings), "versions": to_json(head.versions)})


def write_step(step: Step) -> str:
    """Return the line of a step, without its newline."""
    gradients = {"local": _gradient_json(step.local), "reduced": _gradient_json(step.reduced)}
    return _line({**to_json(step), **gradients, "weights": None if step.weights is None else encoded(step.weights)})


def encoded(values: npt.NDArray[Any]) -> str:
    """Return base64 of the values as little-endian fp32."""
    return base64.b64encode(np.ascontiguousarray(values, dtype="<f4").tobytes()).decode("ascii")


def _gradient_json(gradient: Gradient | None) -> dict[str, Any] | None:
    if gradient is None:
        return None
    arrays = {name: encoded(getattr(gradient, name)) for name in _ARRAYS}
    return {"norm": to_json(gradient.norm), **arrays}


_ARRAYS = ("sketch", "layer_norms", "layer_sketches")


def _line(value: dict[str, Any]) -> str:
    return json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
