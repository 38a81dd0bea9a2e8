"""The rows and losses of one rank's micro-batches, from its forwards and backwards.

A trainer may make a forward's loss a share of the whole step's: transformers' counts the label tokens of all
micro-batches of a step (and of all ranks) and hands their number to the forward as ``num_items_in_batch``; the model
then divides its sum by that number and not by its own tokens. Some models take the number and take the mean all the
same, which is seen in what autograd has recorded. What is observed is the mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ds_silent.capture.batch_rows import IGNORED_LABEL, RowIds
from ds_silent.capture.loaders import LoaderWatch
from ds_silent.capture.local_settings import LocalSettings
from ds_silent.capture.loss_origin import reduction_near
from ds_silent.capture.row_hashes import batch_tensors, rows_of
from ds_silent.capture.traced import TraceCapture
from ds_silent.exchange.observation import Loss
from ds_silent.framework import StepCounts
from ds_silent.rules.language_models import shifts_labels

SURE = 32  # forwards that show whether each takes one batch of the loader


class RowsOfData:
    """Count rows of the data where a forward's tensors hold another number: pairs, several views, many packed into one.

    Each such forward takes the rows of one batch. A script that cuts its batches into micro-batches of one row takes
    more forwards than batches, one that joins several takes fewer: these count their tensors' rows.
    """

    def __init__(self) -> None:
        self.unlike = False  # the tensors' rows are none of the data, as far as it is known yet
        self.plain = False  # they are, for good
        self._forwards = self._added = self._waiting = 0  # rows that were added, and that will be
        self._one_each = False  # joined batches are out of the question

    @property
    def known(self) -> bool:
        """Tell whether rows are counted that the data have."""
        return not self._waiting

    def missing(self, rows: int, loaders: LoaderWatch) -> int:
        """Return how many rows of the data are to be added to those counted; ``rows``: of the forward's tensors."""
        batch = loaders.batch if loaders.facts.rows else None
        if self.plain or not batch or not rows:
            return 0
        if 1 < rows <= batch or batch == 1 == rows:  # as many, or the last ones
            self.plain = not self.unlike
            return 0
        self._forwards, self.unlike = self._forwards + 1, True
        self._one_each |= 0 <= loaders.ahead < loaders.forwards > 1
        joined = rows > batch and not self._one_each and self._forwards >= SURE
        if joined or (rows < batch and (loaders.ahead < 0 or loaders.deal.dealt == "unknown")):
            self.plain, self.unlike, self._waiting = True, False, 0
            return -self._added
        self._waiting += batch - rows
        if rows < batch and self._forwards < SURE:
            return 0
        more, self._waiting = self._waiting, 0
        self._added += more
        return more


class Forwards:
    """Collect rows and losses of a module's forwards. A loss that a backward begins with counts before a forward's."""

    def __init__(
        self,
        module: nn.Module,
        counts: StepCounts,
        rows: RowIds,
        loaders: LoaderWatch,
        settings: LocalSettings,
        traced: TraceCapture | None = None,
    ):
        self._module, self._counts, self._rows, self._loaders, self._settings = module, counts, rows, loaders, settings
        self.rows_of_data = RowsOfData()
        self._order = None if traced is None else traced.order
        self.evaluated: Callable[[], None] | None = None  # a forward in evaluation mode, which may be a training's
        self._evaluated_loss: Tensor | None = None
        self._times_share: Tensor | None = None  # of the forward under way, where its loss is a share of the step's
        self._start_step()

    def _start_step(self, to_come: Iterable[Tensor] = ()) -> None:
        self._losses: list[Tensor] = []
        self._shares: list[Tensor] = []
        self._of_forwards = [*to_come]
        self._behind = 0  # of the forwards': those whose backward has come

    def forward(self, module: Any, args: Any, kwargs: Any) -> None:
        """Take the micro-batch's rows, by content where the script does not give their ids, and its label tokens.

        In evaluation mode it is an evaluation, or a training that forgot to call ``train()``: the newest such forward
        is kept until a gradient comes.
        """
        if not torch.is_grad_enabled():
            return
        self._times_share = times_its_share(self._module, kwargs)
        if (items := kwargs.get("num_items_in_batch")) is not None:
            self._settings.objective.items = items
        rows = partial(self._rows.forward, args, kwargs, self._loaders.forward)
        if self._order is not None:
            self._order.begin()
        if self._module.training:  # a wrapper's own flag stays when its module is set to evaluate
            self.evaluated = self._evaluated_loss = None
            self._settings.before_forward()
            rows()
            if self._loaders.batch and not self.rows_of_data.plain:
                own = rows_of(batch_tensors(args, kwargs)[0])
                self._counts.correct(self.rows_of_data.missing(own, self._loaders))
            self._settings.objective.places.forward(args, kwargs)
        else:
            self.evaluated = rows

    def forwarded(self, module: Any, inputs: Any, output: Any) -> None:
        """Take the forward's loss: with a plain ``loss.backward()`` there is no other."""
        if not torch.is_grad_enabled():
            return
        if self._order is not None:
            self._order.end()
        loss = loss_in(output)
        if loss is not None:
            loss = mean_of(loss, self._times_share)
        if not self._module.training:
            self._evaluated_loss = loss
            return
        self._settings.after_forward()
        self._rows.forwarded(output)
        if loss is not None:
            self._of_forwards.append(loss)

    def was_training(self) -> None:
        """Take the forward that was kept: a gradient has come of it. Its loss may be counted by now."""
        if self.evaluated is not None:
            self.evaluated()
            if self._evaluated_loss is not None and not self._losses and not self._shares:
                self._of_forwards.append(self._evaluated_loss)
            self.evaluated = self._evaluated_loss = None

    def loss(self, loss: Tensor) -> None:
        """Take a micro-batch's loss, unscaled, as its backward begins."""
        self._of_forwards.clear()
        self._losses.append(loss.detach())

    def share(self, loss: Tensor) -> None:
        """Take what a micro-batch adds to the step's loss: a script has divided its own."""
        self._of_forwards.clear()
        self._shares.append(loss.detach())

    def backward_ended(self) -> None:
        """Note that what was forwarded until now is in the gradients, or never will be."""
        self._behind = len(self._of_forwards)
        self._rows.backward_ended()
        if self._order is not None:
            self._order.end()

    def drop(self) -> None:
        """Forget what is in the gradients; a forward whose backward is to come stays."""
        self._rows.drop()
        self._start_step(self._of_forwards[self._behind :])

    def end_step(self) -> None:
        """Forget the step that was taken."""
        self.evaluated = self._evaluated_loss = None
        self._rows.end_step()
        self._start_step()

    def observed(self, scale: float | Tensor) -> Loss[float | Tensor]:
        """Return the numbers of an observation; ``scale``: the factor on all gradients."""
        tokens, inputs = self._rows.take_label_tokens(), self._rows.take_input_size()
        losses = self._losses or self._shares or self._of_forwards
        shares = len(losses) if losses is self._shares else 1  # they add up to the mean of the micro-batches'
        return Loss(
            total=torch.stack([loss.float().reshape(()) for loss in losses]).sum() * shares if losses else 0.0,
            count=float(len(losses)),
            scale=scale,
            tokens=0.0 if tokens is None else tokens,
            inputs=0.0 if inputs is None else inputs,
            order=self._loaders.deal.word,
        )


# -- the loss of a forward ---------------------------------------------------------------------------------------------


def loss_in(output: Any) -> Tensor | None:
    """Find the scalar loss in a module's output: the output, its ``loss``, its ``["loss"]`` or its first element."""
    candidate = output
    if not isinstance(output, Tensor):
        candidate = getattr(output, "loss", None)
        if candidate is None and isinstance(output, Mapping):
            candidate = output.get("loss")
        if candidate is None and isinstance(output, (tuple, list)) and output:
            candidate = output[0]
    is_loss = isinstance(candidate, Tensor) and candidate.numel() == 1 and candidate.requires_grad
    return candidate if is_loss else None


def times_its_share(module: nn.Module, inputs: Mapping[str, Any]) -> Tensor | None:
    """0-dim fp32: what makes a loss the mean over the micro-batch's own label tokens, shifted as ``module`` shifts."""
    items, labels = inputs.get("num_items_in_batch"), inputs.get("shift_labels")
    if not isinstance(labels, Tensor):
        labels = inputs.get("labels")
        if isinstance(labels, Tensor) and labels.ndim > 1 and shifts_labels(module):
            labels = labels[..., 1:]
    if items is None or not isinstance(labels, Tensor) or labels.dtype.is_floating_point:
        return None  # losses of floating labels (a regression's) are means whatever they are given
    total = torch.as_tensor(items, device=labels.device).float().reshape(-1)[0]
    return total / (labels != IGNORED_LABEL).sum().clamp(min=1)


def mean_of(loss: Tensor, factor: Tensor | None) -> Tensor:
    """Return a forward's loss, given with its graph, as the mean over the micro-batch's own tokens; without a graph."""
    if factor is None or reduction_near(loss) == 1:
        return loss.detach()
    return loss.detach() * factor
