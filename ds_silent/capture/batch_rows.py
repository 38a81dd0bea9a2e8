"""Which rows this rank's micro-batches hold, from ids that the script gives or else from the model's inputs.

rows = RowIds(enabled=True, capacity=64, micro_batch=4, ranks=8)
rows.given(as_ids([7, 8, 9, 10])); rows.forward(args, kwargs)       # per micro-batch, in this order
packed = rows.take(device)                               # at a measured step: everything since the last one

What is known of a micro-batch beside its ids is a field of :class:`_MicroBatch`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_silent.capture.loss_origin import backward_is_compiled
from ds_silent.capture.row_hashes import RowDimension, batch_tensors, row_hashes
from ds_silent.config import SilentConsistencyConfig
from ds_silent.exchange.row_ids import MAX_BYTES, MAX_ROWS, hash_rows, pack_rows, sampling_of
from ds_silent.rules.cleared import NewestBatch

logger = logging.getLogger("ds_silent")
UNTOLD, UNTOLD_ROWS = 16, 512  # micro-batches of a step for which there is room, and rows, where nobody says how many
_OUTPUTS = 16  # tensors of a forward's output that are looked at
IGNORED_LABEL = -100  # torch.nn.CrossEntropyLoss's default ignore_index, and Hugging Face's


def id_capacity(config: SilentConsistencyConfig, rows_per_step: int, ranks: int = 1, told: bool = True) -> int:
    """Return how many rows of a rank one observation looks at; 0 with ``coverage`` off. The same on every rank.

    ``told``: else a step may have more micro-batches than one, and there is room for several, where that is little.
    """
    own = min(config.interval * rows_per_step, MAX_ROWS)
    several = 0 if told else min(UNTOLD * own, UNTOLD_ROWS, MAX_BYTES // (8 * ranks))
    return max(own, several) if config.coverage else 0


@dataclass(slots=True, eq=False)
class _MicroBatch:
    """Hold the rows of one micro-batch that has been forwarded."""

    ids: Tensor
    told: bool  # by the script; else they are hashes of the rows' content
    begins: bool  # it is the first of a pass over the data
    given: int = 0  # rows that the loader had given by then
    trained: bool = False  # a gradient has reached what a forward made of it
    hidden: bool = False  # or may have, unseen
    looked: bool = False  # it is known which

    @property
    def acted(self) -> bool:
        """Whether no gradient has come of it: an agent has chosen what to do, or a script has made its own targets."""
        return self.looked and not self.hidden and not self.trained

    def reached(self, gradient: Tensor) -> None:
        """Note a gradient. This is a hook of an output, which would put what it returns in the gradient's place."""
        self.trained = True


class _Waiting:
    """Hold the micro-batches that wait to be sent: this step's, and the newest of steps that were not measured."""

    def __init__(self, capacity: int):
        self.all: list[_MicroBatch] = []
        self._capacity = capacity
        self._start = self._behind = 0  # the step's first, and behind its last backward
        self._rows_before = 0  # rows of the steps before it

    @property
    def of_step(self) -> list[_MicroBatch]:
        """This step's."""
        return self.all[self._start :]

    @property
    def through(self) -> list[_MicroBatch]:
        """This step's whose backward has come."""
        return self.all[self._start : self._behind]

    @property
    def all_through(self) -> bool:
        """Whether none has come behind the newest backward."""
        return len(self.all) == self._behind

    def backward_ended(self) -> None:
        """Note that a backward has come of all that are there."""
        self._behind = len(self.all)

    def replace(self, kept: list[_MicroBatch]) -> bool:
        """Keep these alone of those that are through; return whether the next one begins what one of the others did."""
        begins = any(one.begins for one in self.through if one not in kept)
        self.all[self._start : self._behind] = kept
        self._behind = self._start + len(kept)
        if begins and self._start < len(self.all):
            self.all[self._start].begins = True
            return False
        return begins

    def take(self) -> list[_MicroBatch]:
        """Give all away."""
        taken, self.all, self._start, self._behind, self._rows_before = self.all, [], 0, 0, 0
        return taken

    def end_step(self) -> None:
        """Begin a step; forget the oldest ones whose rows are too many."""
        self._rows_before += sum(len(one.ids) for one in self.of_step)
        while len(self.all) > 1 and self._rows_before - len(self.all[0].ids) > self._capacity:
            self._rows_before -= len(self.all.pop(0).ids)
        self._start = self._behind = len(self.all)


@dataclass
class _StepSizes:
    """Add up what a step's micro-batches hold beside their rows.

    Attributes:
        tokens: in the loss, 0-dim; None: not known.
        behind: of them those whose backward has come.
        inputs: root mean squares, of the micro-batches whose inputs are no ids.
    """

    tokens: Tensor | None = None
    behind: Tensor | None = None
    inputs: list[Tensor] = field(default_factory=list)

    def add_tokens(self, kwargs: Mapping[str, Any]) -> None:
        if (tokens := label_tokens_of(kwargs)) is not None:
            self.tokens = tokens if self.tokens is None else self.tokens + tokens

    def drop(self) -> None:
        """Forget the tokens whose backward has come."""
        if self.tokens is not None and self.behind is not None:
            self.tokens = self.tokens - self.behind
        self.behind = None


class RowIds:
    """Collect ids until they are sent. ``capacity`` rows at most are kept; what is lost is counted.

    Args:
        micro_batch: rows per rank and micro-batch, as configured.
        ranks: N, on which it depends whether all rows are sent or a sample.
        local: calls a hook that runs in the training's backward, so that what breaks in it does not reach the training.
    """

    def __init__(
        self,
        enabled: bool,
        capacity: int,
        micro_batch: int,
        ranks: int = 1,
        local: Callable[[Callable[[Tensor], None], Tensor], None] = lambda hook, gradient: hook(gradient),
    ):
        self.sampling = sampling_of(ranks, capacity)  # which rows are sent
        self.enabled, self._capacity, self._micro_batch, self._local = enabled, capacity, micro_batch, local
        self._waiting = _Waiting(capacity)
        self._under_way: _MicroBatch | None = None  # that of the forward under way
        self._given: list[Tensor] = []  # told by the script, whose forward is to come
        self._newest, self._repeated = NewestBatch(), 0  # forwards on it whose ids may come
        self._begins = False  # the next micro-batch is the first of a pass over the data
        self.starts: tuple[int, ...] = ()  # places in what was taken last at which a loader had begun anew
        self.given_rows: tuple[tuple[int, int], ...] = ()  # see Walk.given
        self.told = self.repeated = self.batch_again = False  # all were told; none were there, as each took one again
        self._warned = self._again = self._others = False
        self.is_measured: Callable[[], bool] = lambda: True  # the step under way: else the size of inputs is not read
        self.is_left_out: Callable[[], bool] = lambda: False  # the script has thrown away what the step has brought
        self.are_others: Callable[[Sequence[Tensor], bool], bool] = lambda tensors, same: False  # than the loader's
        self.batch_of: Callable[[], int | None] = lambda: None  # rows of a whole batch of the loader, where it is known
        self.given_by_loader: Callable[[], int] = lambda: 0  # rows so far
        self.newest, self.dimension, self._sizes = 0, RowDimension(), _StepSizes()  # rows of the newest forward

    def given(self, sample_ids: Tensor) -> None:
        """Take the ids of the next micro-batch, int64 (rows,), on any device."""
        if self.enabled:
            self._given.append(sample_ids)

    def forward(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], begins: Callable[[], bool] = lambda: False
    ) -> None:
        """Take the inputs of one training forward, unless they are the last one's: SAM and closures use a batch again.

        Args:
            begins: tells of a batch whether it is the first of a pass over the data.
        """
        tensors, mask = batch_tensors(args, kwargs)
        tensors = [tensor for tensor in tensors if tensor.ndim]
        if not self.enabled:
            begins()  # how a loader deals its rows is known without them
            self._count(args, kwargs, tensors)
            return
        self._sizes.add_tokens(kwargs)
        self._under_way, self._again = None, self._newest.repeated_by(tensors)
        self._others = self.are_others(tensors, self._newest.same) and not self._given
        if self._others:
            self._begins |= begins()  # what an agent acts on may come before the batch
            return
        if self._again:
            self._told_again()
            return
        self._begins |= begins()
        listed = self._count(args, kwargs, tensors)
        self._sizes.inputs += sizes_of(tensors) if self.is_measured() else []
        if self._given:
            given = self._given.pop(0)
            if not tensors or len(given) in {
                self._micro_batch,
                self.newest,
                *(int(tensor.shape[0]) for tensor in tensors),
            }:
                self._add(given, told=True)
                return
            self._warn(len(given), self.newest)
        if tensors:
            hashed = [row_hashes([one[None]]) for one in listed or ()]
            self._add(torch.cat(hashed) if hashed else row_hashes(tensors, mask, self.newest), told=False)

    def _count(self, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: list[Tensor]) -> list[Tensor] | None:
        """Count the rows of a micro-batch; return them where each is a tensor of its own."""
        batch = self.batch_of()
        listed = self.dimension.listed(args, kwargs, batch)
        self.newest = self.dimension.rows(tensors, batch) if listed is None else len(listed)
        return listed

    def forwarded(self, output: Any) -> None:
        """Look whether a gradient will reach the output of the forward that has ended."""
        own, self._under_way = self._under_way, None
        if own is None or own.trained:
            return
        outputs = [] if backward_is_compiled() else _with_graphs(output)
        own.looked, own.hidden = True, own.hidden or not outputs
        for one in outputs:
            one.register_hook(partial(self._local, own.reached))  # type: ignore[no-untyped-call]

    def _leave_out(self) -> None:
        """Leave out the forwards of this step of which no gradient has come, if one has come of others.

        If the script throws the step's gradient away, all that are in it: they count where they are taken again (SAM).
        """
        own, gone = self._waiting.through, self.is_left_out()
        kept = [one for one in own if not (gone or one.acted)]
        if gone and self._waiting.all_through:
            self._newest = NewestBatch()
        if gone or (len(kept) < len(own) and any(one.trained for one in kept)):
            self._begins |= self._waiting.replace(kept)

    def _told_again(self) -> None:
        """Leave out ids that the script gives for a repeated batch, ahead of its forward or behind it."""
        newest = self._under_way = self._waiting.all[-1] if self._waiting.all else None
        if self._given and newest is not None and newest.told:
            del self._given[:1]
            return
        if self._given and newest is not None and len(self._given[0]) == len(newest.ids):
            newest.ids, newest.told = self._given.pop(0), True
        self._repeated += 1

    def _add(self, ids: Tensor, told: bool) -> None:
        self._under_way = _MicroBatch(ids, told, self._begins, self.given_by_loader())
        self._waiting.all.append(self._under_way)
        self._begins = False

    def _warn(self, ids: int, rows: int) -> None:
        if not self._warned:
            self._warned = True
            _warn_of(ids, rows)

    def _settle(self) -> None:
        """Settle which rows the step has: leave some out, and take ids that no forward came after.

        A script may tell of a micro-batch when it is through.
        """
        self._leave_out()
        hashed = [one for one in self._waiting.of_step if not one.told]
        for one, given in zip(hashed, self._given, strict=False):
            if len(given) in (len(one.ids), self._micro_batch):
                one.ids, one.told = given, True
            else:
                self._warn(len(given), len(one.ids))
        for given in self._given[len(hashed) + self._repeated :]:  # the forward was not the observed module's
            self._add(given, told=True)
        self._given, self._repeated = [], 0

    def backward_ended(self) -> None:
        """Note that what was forwarded until now is in the gradients, or never will be."""
        self._waiting.backward_ended()
        self._sizes.behind = self._sizes.tokens

    def drop(self) -> None:
        """Forget the rows of this step whose backward has come: they were never to be of a step."""
        self._newest, self._sizes.inputs = NewestBatch(), []
        if self._waiting.through:
            self._begins |= self._waiting.replace([])
            self._sizes.drop()

    @property
    def waiting(self) -> bool:
        """Tell whether ids wait to be sent."""
        return bool(self._waiting.all)

    def take(self, device: torch.device) -> Tensor | None:
        """Pack the ids of the rows since the last call, fp32 (sampling.numbers,) on ``device``; None when off."""
        if not self.enabled:
            return None
        self._settle()
        taken = self._waiting.take()
        places = [0, *accumulate(len(one.ids) for one in taken)]
        lost = max(0, places[-1] - self._capacity)
        begun = [place for place, one in zip(places, taken, strict=False) if one.begins]
        self.starts = tuple(place - lost for place in begun if place >= lost)
        self.given_rows = tuple((max(0, place - lost), one.given) for place, one in zip(places, taken, strict=False))
        self.told = all(one.told for one in taken)
        self.repeated = (self._again or self._others) and not taken
        self.batch_again = self._again and not (self._others or taken)
        if not taken:
            return None
        together = torch.cat([one.ids.to(taken[-1].ids.device) for one in taken])
        return pack_rows(together, self.sampling).to(device, non_blocking=True)

    def hashed(self, device: torch.device) -> Tensor | None:
        """Hash all rows of the step under way before they are taken, fp32 (ROW_NUMBERS,) on ``device``; None if off."""
        if not self.enabled:
            return None
        self._settle()
        own = self._waiting.of_step
        together = [one.ids.to(own[-1].ids.device) for one in own if len(one.ids)]
        return hash_rows(together, all(one.told for one in own), device)

    def sizes(self) -> tuple[Tensor | None, Tensor | None]:
        """Return this step's tokens in its loss and the root mean square of its inputs, 0-dim; None: not known."""
        tokens, inputs = self._sizes.tokens, self._sizes.inputs
        return None if tokens is None else tokens.float(), torch.stack(inputs).mean() if inputs else None

    def end_step(self) -> None:
        """Forget what belongs to one step only; ids of unmeasured steps wait for the next observation."""
        self._sizes = _StepSizes()
        self._settle()
        self._waiting.end_step()


def _warn_of(ids: int, rows: int) -> None:
    logger.warning(
        "ds_silent: observe_batch was given %d ids for a micro-batch of %d rows on rank %d; pass one id per row, till "
        "then the rows are followed by their content (said once)",
        ids,
        rows,
        dist.get_rank() if dist.is_initialized() else 0,
    )


def _with_graphs(output: Any) -> list[Tensor]:
    """Return a forward's tensors that have a graph; none where there are many, or something that may hold others."""
    found: list[Tensor] = []
    waiting = [output]
    while waiting and len(found) <= _OUTPUTS:
        one = waiting.pop()
        if isinstance(one, Tensor):
            found += [one] if one.grad_fn is not None else []
        elif isinstance(one, Mapping):
            waiting += one.values()
        elif isinstance(one, (list, tuple)):
            waiting += one
        elif one is not None and not isinstance(one, (bool, int, float, str)):
            return []
    return found if len(found) <= _OUTPUTS else []


def label_tokens_of(kwargs: Mapping[str, Any]) -> Tensor | None:
    """Count the tokens that enter the loss of a forward, 0-dim; None where it is given no labels, int (B, T)."""
    labels = kwargs.get("labels")
    if not isinstance(labels, Tensor) or labels.ndim != 2 or labels.dtype.is_floating_point:
        return None
    return (labels[:, 1:] != IGNORED_LABEL).sum()


def sizes_of(tensors: list[Tensor]) -> list[Tensor]:
    """Return the root mean square, fp32 0-dim, of a micro-batch's first floats with rows; nothing where it has none."""
    floats = [one for one in tensors if one.ndim > 1 and one.is_floating_point() and one.layout == torch.strided]
    wide = [(one.detach(), torch.promote_types(one.dtype, torch.float32)) for one in floats[:1] if one.numel()]
    return [torch.linalg.vector_norm(one, dtype=dtype).float() / math.sqrt(one.numel()) for one, dtype in wide]
