"""What a framework answers, and the moments at which it calls: all that an observer knows of it.

    framework = DeepSpeedFramework(engine, config)      # answers; keeps nothing of a step but what the framework hides
    capture = StepCapture(framework, config)            # the same for every framework: ds_silent.capture.step
    framework.connect(capture.moments)                  # hooks, each of which calls a moment

A new framework is one folder beside ``deepspeed``: one class that has :class:`Framework`'s members, and those of the
abilities that it has, its :class:`~ds_silent.text.Words`, and a way in that hands a
:class:`~ds_silent.observing.observe.Subject` to :func:`ds_silent.observing.observe.observe`. Whatever a step remembers
is in :mod:`ds_silent.capture.step`, once for all of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_silent.distributed.guard import CollectiveGuard
from ds_silent.exchange.whole_model import WholeModel
from ds_silent.kernels.checksums import Items, Replica
from ds_silent.maths.rounding_bound import Arithmetic
from ds_silent.records import Event
from ds_silent.text import Words

Part = tuple[int, int, Tensor]
"""(parameter, first element, values): a piece of a gradient."""


@dataclass(frozen=True)
class Ranks:
    """Who does what with whom. Communicators of our own: nothing of the training's pairs with them."""

    reduced: dist.ProcessGroup  # whose gradients make one aggregate
    replicated: dist.ProcessGroup  # who hold the same parameters
    device: torch.device  # of what they exchange
    alike: bool = True  # each does the same work on rows of its own: who differs from the others is odd


@dataclass(frozen=True)
class Moments:
    """What a framework calls, each guarded already (:mod:`ds_silent.distributed.guard`): none raises what is ours.

    In the order of a step. A framework leaves out what it does not have: the observation says so then.
    """

    guard: CollectiveGuard  # for what a framework's own hooks do on the way to a moment
    begins: Callable[..., object]  # (held) as a step's first forward comes: held() is what gradients hold already
    forward: Callable[..., object]  # (module, args, kwargs) before the module's forward: a micro-batch's rows
    forwarded: Callable[..., object]  # (module, args, output) behind it: a loss, where nobody gives one
    loss: Callable[..., object]  # (loss) of a micro-batch, unscaled, as its backward begins
    share: Callable[..., object]  # (loss) the same of one that was divided: the shares of a step add up to its loss
    root: Callable[..., object]  # (tensor, own=False) that a backward begins with, before it runs; own: surely ours
    scaled: Callable[..., object]  # (factor, gradient) of the loss: together the factor on the step's gradients
    gradient: Callable[..., object]  # (parameter, gradient) of one micro-batch, before it is accumulated; from a hook
    micro_batch_ended: Callable[[], bool | None]  # (): before a reduction; whether exact inner products are due
    before_reduction: Callable[..., object]  # (*anything): the same, and they are exchanged here
    reduced: Callable[..., object]  # (again=False): the aggregate is there, and the script has not seen it yet
    applying: Callable[..., object]  # (optimizer, args, kwargs) as it begins to apply the aggregate
    before_update: Callable[..., object]  # (*anything): once per step, before the optimizer
    dropped: Callable[[], object]  # (): what has come since the last step was cleared and belongs to none
    updated: Callable[[], object]  # (): the optimizer has run, the framework's counters have advanced
    before_checkpoint: Callable[..., object]  # (*anything)
    ends: Callable[..., object]  # (*anything): the training is over


class Framework(Protocol):
    """One training of one framework. Every rank asks the same at the same steps."""

    words: Words  # what its users know things by
    ranks: Ranks
    module: nn.Module  # a micro-batch is one forward of it
    names: list[str]  # of the trainable parameters
    numels: list[int]  # elements of each, whole
    micro_batches: int  # per step
    micro_batch_rows: int  # as configured, on each rank
    boundaries: int  # micro-batches of a step that :meth:`is_boundary` may call its last, where a script reduces each
    additive: bool  # every micro-batch is reduced and freed: nobody accumulates the local gradient
    overlapped: bool  # the reduction begins while the boundary's backward runs
    aggregate_replicated: bool  # every rank holds the whole aggregated gradient where it accumulates
    whole_at_hook: bool  # at the boundary, what is accumulated and the gradient in a hook make the local gradient
    observes_applied: bool  # :meth:`applied` can tell
    clip: float  # largest norm of the applied gradient; 0 is none

    def arithmetic(self, elements: int, width: int) -> Arithmetic:
        """Of the reduction of ``elements`` numbers, seen through sketches of ``width``."""

    @property
    def step(self) -> int:
        """The optimizer step under way, from 1."""

    @property
    def samples(self) -> int:
        """Rows consumed by all ranks so far."""

    @property
    def batch(self) -> float:
        """Rows per rank and optimizer step, now."""

    @property
    def update_skipped(self) -> bool:
        """Whether the optimizer did not apply the step just taken, whatever the reason."""

    def skipped(self, applied: bool | None) -> bool:
        """Whether that was a search for the loss scale; ``applied``: whether ``applying`` came, None: not observed."""

    def is_boundary(self) -> bool:
        """Whether the micro-batch under way is the step's last."""

    def accumulated(self, index: int) -> Tensor | None:
        """What this rank has accumulated of a parameter's gradient, until the reduction; never asked if additive."""

    def reduced(self, index: int) -> Tensor | None:
        """Where every rank holds the whole aggregate: of one parameter, from the reduction until the optimizer."""

    def aggregated(self) -> Iterator[Part] | None:
        """This rank's share of the aggregated gradient: the ranks' shares make up the whole, once. None: hidden."""

    def applied(self, optimizer: Any) -> Iterator[Part]:
        """What an optimizer is about to apply, of this rank's share."""

    def scale(self, seen: Tensor | None) -> float | Tensor:
        """The factor on every gradient of this step; ``seen``: what the loss's own gradient said."""

    def gram(self) -> Tensor | None:
        """This rank's part of the exact inner products, where the framework's reduction has made them by the way."""

    def optimizers(self) -> list[Any]:
        """The ``torch.optim`` optimizers at the bottom."""

    def replicated(self) -> tuple[Items, Callable[[], Items]]:
        """Parameters that every rank holds whole, and a function that names all else that is replicated."""

    def connect(self, moments: Moments) -> None:
        """Register every hook."""

    def close(self, ended: bool) -> None:
        """Remove every hook; ``ended``: for good, and not because an observer broke."""


@runtime_checkable
class Repeats(Protocol):
    """A reduction that can be run again from the same local gradients."""

    def keep_for_again(self, *args: Any, **kwargs: Any) -> None:
        """At the boundary, before the reduction, with what ``before_reduction`` was called with."""

    def reduce_again(self) -> int:
        """Run it again; bytes of the gradients. A collective."""


@runtime_checkable
class HasReplica(Protocol):
    """What makes one replica can be named, and written between two steps."""

    def replica(self, optimizer_state: bool, buffers: bool) -> Replica:
        """Its tensors: with what the optimizer keeps beside fp32 masters, and the buffers that a forward may change."""


@runtime_checkable
class Counts(Protocol):
    """Nobody but the adapter counts the steps: they go with the observer's state."""

    def counted(self) -> dict[str, int]:
        """JSON values, for a checkpoint."""

    def count_on(self, counted: dict[str, int]) -> None:
        """Continue from :meth:`counted`."""


@runtime_checkable
class HasPeers(Protocol):
    """Ranks of other groups hold the rest of the model, or the same once more."""

    model: WholeModel | None  # on a group's first rank, where one group does not know all
    in_norm: frozenset[int] | None  # parameters that count in the whole model's norm, where a step clips by it

    def beside(self, step: int) -> Iterable[Event]:
        """What differs between ranks of several groups as a step begins; on every rank, and nobody waits."""


@runtime_checkable
class Covers(Protocol):
    """It is known which parameters the framework reduces, and which ones its optimizers hold."""

    def reduced_ids(self) -> Set[int] | None:
        """``id`` of each parameter whose gradient is reduced; None: of all that have one, or it is not known."""
        return None

    def held(self) -> list[list[Tensor]]:
        """The model's own parameters, by the groups of the optimizers: the same lists until they change."""

    def is_own(self, wrapper: object) -> bool:
        """Whether that is what wraps this model."""
        return False


@runtime_checkable
class LeavesOut(Protocol):
    """Its scripts step by themselves, and may throw a reduced gradient away: on all ranks alike that is no fault."""

    @property
    def left_out(self) -> bool:
        """Whether the script left out the step just over."""


@runtime_checkable
class SavesSuspect(Protocol):
    """The framework's own checkpoint can be written to a place that is named."""

    def save_checkpoint(self, directory: str, tag: str, client_state: dict[str, Any]) -> None:
        """A collective."""


def layers_of(names: list[str]) -> tuple[tuple[str, ...], list[int]]:
    """Layer of each parameter: the path up to the first number (``model.layers.3``), else the module's own name."""
    order: dict[str, int] = {}
    groups = []
    for name in names:
        match = re.match(r"(.*?\.\d+)\.", name)
        layer = match.group(1) if match else name.rpartition(".")[0] or name
        groups.append(order.setdefault(layer, len(order)))
    return tuple(order), groups
