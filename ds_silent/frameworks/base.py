"""What an observer asks of an adapter, and what it offers in return: no framework here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ds_silent.capture.conduct import Conduct
from ds_silent.capture.data_facts import Walk
from ds_silent.exchange.gather import LocalSample
from ds_silent.maths.rounding_bound import Arithmetic
from ds_silent.ranks.together import Together
from ds_silent.replicas.checksums import Items, Replica


class Listener(Protocol):
    """The observer, as an adapter sees it.

    ``before_step`` and ``after_step`` are to be called by :meth:`ds_silent.ranks.together.Together.play`, the others
    raise nothing.
    """

    @property
    def closed(self) -> bool:
        """Whether it ended for good, and not because it broke: then the engine must be as it was."""

    def measures(self, step: int) -> bool:
        """Whether optimizer step ``step`` is measured; the same answer on every rank."""

    def measures_exactly(self, step: int) -> bool:
        """Whether a measured step is also measured exactly; the same answer on every rank."""

    @property
    def scheduled(self) -> int:
        """The step under way as all ranks count it, by which ``measures`` is asked."""

    def before_reduction(self) -> None:
        """A boundary's gradients are there; stages 0 and 1 reduce them next. Once per reduction."""

    def before_step(self) -> None:
        """The gradients are aggregated, the optimizer has not run."""

    def after_step(self) -> None:
        """The optimizer has run and the framework's counters have advanced."""

    def before_checkpoint(self) -> None:
        """A checkpoint is about to be written: put on disk what is known."""

    def close(self) -> None:
        """The training ends."""


class Capture(Protocol):
    """One framework's gradients. Every rank calls every method at the same steps."""

    group: dist.ProcessGroup
    device: torch.device
    together: Together
    layer_names: tuple[str, ...]

    id_size: int  # numbers that a sample's row ids take
    arithmetic: Arithmetic  # of the reduction
    micro_batches: int  # per step
    aggregate_replicated: bool  # every rank holds the whole aggregated gradient; it sends its layers' checksums
    conduct: Conduct  # what this rank's code does, for the comparison with the others
    clip: float  # largest norm of the applied gradient; 0 is none

    @property
    def step(self) -> int:
        """The optimizer step that is being taken, counted from 1."""

    @property
    def came(self) -> bool:
        """Whether a gradient has come, or a reduction has begun, since the last step."""

    @property
    def samples(self) -> int:
        """Rows consumed by all ranks so far."""

    @property
    def batch(self) -> float:
        """Rows per rank and optimizer step."""

    @property
    def skipped(self) -> bool:
        """Whether the optimizer did not apply the step that was just taken, in search of its loss scale."""

    @property
    def update_skipped(self) -> bool:
        """Whether the optimizer did not apply the step that was just taken, whatever the reason."""

    @property
    def rows_waiting(self) -> bool:
        """Whether ids of earlier steps wait for the next sample."""

    @property
    def walk(self) -> Walk:
        """How the rows of the newest sample came to this rank."""

    def observe_batch(self, sample_ids: Tensor) -> None:
        """Ids of the rows of this rank's next micro-batch."""

    def connect(self, listener: Listener) -> None:
        """Register every hook."""

    def replicated(self) -> tuple[Items, Callable[[], Items]]:
        """Parameters that every rank holds whole, and a function that names all else that is replicated."""

    def sample(self, exact: bool, replica: Tensor | None = None) -> LocalSample:
        """This rank's observation of the current step; also when something broke here."""

    def replica(self, optimizer_state: bool, buffers: bool) -> Replica:
        """Everything that makes one replica; its tensors may be written between two steps.

        Args:
            optimizer_state: with what the optimizer keeps, beside fp32 masters.
            buffers: with the model's buffers, which a forward may change.
        """

    def reduce_again(self) -> int:
        """Repeat the step's reduction from the local gradients that were kept, and say how many bytes. A collective."""

    def sample_again(self) -> LocalSample:
        """The same observation with what the repeated reduction has brought."""

    def gradient_sample(self, stride: int) -> Tensor:
        """fp32 (2,) on the host: sum of squares and number of every ``stride``-th element of the aggregate."""

    def save_checkpoint(self, directory: str, tag: str, client_state: dict[str, Any]) -> None:
        """The framework's own checkpoint. A collective."""

    def keep_micro_batches(self) -> None:
        """Keep a sketch of each micro-batch of the next measured step; every rank calls it at the same step."""

    @property
    def keeps_micro_batches(self) -> bool:
        """Whether they were kept in this step; the same on every rank."""

    def take_micro_batches(self, layer_size: int) -> Tensor:
        """(A, L, layer_size) fp32 sketches of this step's micro-batches, where they were kept."""

    def end_step(self) -> None:
        """Forget the step."""

    def close(self) -> None:
        """Remove every hook: the engine is as it was."""
