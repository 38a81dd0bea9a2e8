"""The rows and losses of one rank's micro-batches, from its forwards and backwards.

A trainer may make a forward's loss a share of the whole step's: transformers' counts the label tokens of all
micro-batches of a step (and of all ranks) and hands their number to the forward as ``num_items_in_batch``; the model
then divides its sum by that number and not by its own tokens. Some models take the number and take the mean all the
same, which is seen in what autograd has recorded. What is observed is the mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ds_silent.capture.batch_rows import IGNORED_LABEL, RowIds
from ds_silent.capture.loaders import LoaderWatch
from ds_silent.capture.local_settings import LocalSettings
from ds_silent.capture.loss_origin import reduction_near
from ds_silent.capture.traced import TraceCapture
from ds_silent.exchange.observation import Loss
from ds_silent.framework import Framework
from ds_silent.preflight.inventory import LoaderPass
from ds_silent.rules.language_models import shifts_labels

_FEW = 3  # batches of a pass, none of which is the smaller last one
_ASKED = 16  # steps whose labels may tell whether rows are packed
AHEAD, KEPT = 16, 64  # batches that a script fetches ahead at most; times the rows of a batch that it trains it for


class _Pass:
    """Count the forwards on one pass of a loader, by their tensors' rows and by what the loader has dealt."""

    def __init__(self, loader_pass: LoaderPass, batch: int, joins: bool, ranks: int):
        """``joins``: the passes before took several batches in a forward."""
        self._part = batch / ranks  # that a rank takes where all have drawn the same batch
        self.loader_pass, self.batch = loader_pass, batch
        self.rows = self.fresh = 0  # of the tensors; of new batches
        self.forwards = 0
        self.ahead, self._ahead_now = math.inf, 0  # batches more than forwards: the fewest, and by the newest
        self.joins, self._may_join = joins, True
        self._since = self._given = 0  # rows since a batch was given
        self.kept = False  # the script goes over batches again that it keeps
        self.single = True  # each forward has one row, of batches of several
        self.fewer = True  # each batch was forwarded once, in fewer rows, before the next was given
        self.more = self.short = False  # a forward has had more rows than a batch; all together have had fewer

    def forward(self, rows: int, fresh: bool) -> None:
        """Take a forward; ``fresh``: of another batch than the one before."""
        loader_pass, batch = self.loader_pass, self.batch
        self.forwards += fresh
        self._since = rows + (self._since if loader_pass.given == self._given else 0)
        self._given, ahead = loader_pass.given, max(0, loader_pass.given - self.forwards)
        if self.forwards > 1:  # where batches are joined, each forward takes more than the one by which it counts
            sure = self.forwards > _FEW and ahead > self.forwards / 2
            self._may_join = self.joins = self._may_join and (ahead > self._ahead_now or sure)
        self.ahead, self._ahead_now = min(self.ahead, ahead), ahead
        self.rows, self.fresh = self.rows + rows, self.fresh + rows * fresh
        whole = self.forwards == 1 < loader_pass.given == loader_pass.batches
        self.kept = self.kept or whole or self._since > KEPT * batch
        self.single = self.single and rows == 1 < batch and self.forwards <= loader_pass.given and not self.kept
        self.fewer = self.fewer and fresh and self._part != rows < batch and self.forwards == loader_pass.given
        self.more = self.more or rows > batch
        missing = self.missing
        self.short = missing > 0 and (self.short or self.forwards < _FEW or missing >= 2 * batch)

    @property
    def missing(self) -> int:
        """Return how many rows fewer than its batches a forward for each has had; 0 where batches are cut."""
        if self.kept or self.forwards > self.loader_pass.given:
            return 0
        return max(0, self.loader_pass.rows_in(self.forwards) - self.rows)

    @property
    def dealt(self) -> int:
        """Return the rows of the batches that were not only fetched ahead."""
        ahead = 0 if self.joins else int(min(self.ahead, self.loader_pass.given))
        return self.loader_pass.rows_in(self.loader_pass.given - ahead)

    @property
    def unlike(self) -> bool:
        """Tell whether forwards have more rows than the data, as pairs and several views at once."""
        return self.more and not self.kept and self.fresh > self.dealt

    @property
    def pairs_or_joined(self) -> bool:
        """Tell whether it is open what the first forward's rows are: of several batches joined, or of pairs."""
        return self.forwards == 1 and self.more and self.ahead > 0

    def counted(self, packed: bool) -> int:
        """Return the rows of the data."""
        if packed:
            return self.rows + self.missing
        return self.rows if self.kept else min(self.rows, self.dealt)


class RowsOfData:
    """Count the rows of the data that a rank trains, where a loader says what it deals.

    A forward's tensors may hold other rows: pairs, several views, many rows packed into one, or the same rows once
    more. So no more rows count than the loader has dealt, less the batches that are fetched ahead: the fewest by which
    it has been ahead of the forwards. Of a script that joins batches, it gets further ahead from forward to forward. A
    script that keeps its batches and goes over them again is not followed: there the tensors' rows count.
    """

    def __init__(self, ranks: int = 1) -> None:
        self._ranks = ranks
        self.unlike = False  # the tensors' rows are none of the data
        self.known = True  # each row counts that was trained
        self._pass: _Pass | None = None  # None: nobody says what is dealt
        self._packed = False
        self._before = self._told = 0  # rows: of passes before; told in steps before
        self._owed = 0  # rows of passes before that count as soon as it is sure that they were packed
        self._forwards = self._labelled = 0  # at the last step's end; steps in a row whose loss had a label per row
        self._asked = 0  # steps whose labels were asked for
        self.by_labels: int | None = None  # rows of the newest step, where it is sure by its labels

    def forward(self, rows: int, fresh: bool, loader_pass: LoaderPass | None, deals: bool) -> None:
        """Take a training forward.

        Args:
            rows: of its tensors.
            fresh: it is of another batch than the one before.
            loader_pass: of the pass under way.
            deals: whether the loader is known to deal this rank its share of all rows.
        """
        own = self._pass
        if loader_pass is None or not loader_pass.batch:
            self._pass = None
            return
        if own is not None and own.loader_pass is not loader_pass:
            self._before += own.counted(self._packed)
            self._owed += own.missing if (own.single or own.fewer) and not self._packed else 0
            self._forwards = 0
        if own is None or own.loader_pass is not loader_pass:
            own, fresh = _Pass(loader_pass, loader_pass.batch, own is not None and own.joins, self._ranks), True
        self._pass = own
        own.forward(rows, fresh)
        if own.single and deals and self._owed + own.missing > AHEAD * own.batch:
            self._packed, self._before, self._owed = True, self._before + self._owed, 0
        doubtful = own.short or (own.single and self._owed > 0) or (own.pairs_or_joined and not self._before)
        self.known = self._packed or not doubtful
        self.unlike = self._packed or doubtful or own.unlike

    @property
    def are_dealt(self) -> bool:
        """Tell whether forwards have taken what the loader has dealt, and no part of it."""
        own = self._pass
        return own is not None and (self._packed or own.rows == own.loader_pass.rows_in(own.forwards))

    @property
    def may_be_packed(self) -> bool:
        """Tell whether the labels of a step's loss would say whether its tensors held whole batches, in fewer rows.

        Of the first steps: on an accelerator their number has to be waited for.
        """
        return self._pass is not None and self._pass.fewer and not self._packed and self._asked < _ASKED

    def of_step(self, rows: int, labels: float = 0.0) -> int:
        """Return the rows of the data in the step that ends.

        Args:
            rows: of its tensors, which count without a loader.
            labels: of its loss, if :attr:`may_be_packed`. As many as rows were dealt, step after step: the tensors hold
                them all, as the nodes of graphs or a list of images.
        """
        if self._pass is None:
            self._before = self._told = 0
            return rows
        dealt = (self._pass.forwards - self._forwards) * self._pass.batch
        if self.may_be_packed and labels:
            self._asked += 1
            self._labelled = self._labelled + 1 if labels == dealt else 0
            if self._labelled >= _FEW:
                self._packed = self.unlike = self.known = True
                self._before, self._owed, self.by_labels = self._before + self._owed, 0, dealt
        self._forwards = self._pass.forwards
        self.by_labels = None if self.by_labels is None else dealt
        now = self._before + self._pass.counted(self._packed)
        rows, self._told = now - self._told, now
        return rows


class Forwards:
    """Collect rows and losses of a module's forwards. A loss that a backward begins with counts before a forward's."""

    def __init__(
        self,
        framework: Framework,
        local: Callable[..., Any],
        rows: RowIds,
        loaders: LoaderWatch,
        settings: LocalSettings,
        traced: TraceCapture | None = None,
    ):
        """``local``: calls what must not reach the training when it breaks."""
        self._module, self._rows, self._loaders, self._settings = framework.module, rows, loaders, settings
        self.rows_of_data, self._batches = RowsOfData(loaders.ranks), 0
        framework.counts.rows_of_step = lambda: local(self.rows_of_step) or (0, 0)
        settings.deal = lambda: loaders.deal
        rows.batch_of = lambda: None if loaders.loader_pass is None else loaders.loader_pass.batch
        rows.given_by_loader = loaders.rows_given
        self._order = None if traced is None else traced.order
        self.evaluated: Callable[[], None] | None = None  # a forward in evaluation mode, which may be a training's
        self._evaluated_loss: Tensor | None = None
        self._taken: list[int] = []  # rows of the step's forwards
        self._taken_behind = 0  # of them, those whose backward has come, or never will
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
        rows = partial(self._take_rows, args, kwargs)
        if self._order is not None:
            self._order.begin()
        if self._module.training:  # a wrapper's own flag stays when its module is set to evaluate
            self.evaluated = self._evaluated_loss = None
            self._settings.before_forward()
            rows()
            self._settings.objective.places.forward(args, kwargs)
        else:
            self.evaluated = rows

    def _take_rows(self, args: Any, kwargs: Any) -> None:
        self._rows.forward(args, kwargs, self._loaders.forward)
        loaders, before = self._loaders, self._batches
        self._batches = loaders.forwards
        deals = loaders.facts.rows is not None and loaders.deal.dealt != "unknown"
        self._taken.append(self._rows.newest)
        rows = self._rows.newest if self._rows.dimension.known else 0
        self.rows_of_data.forward(rows, self._batches != before, loaders.loader_pass, deals)

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
        self._behind, self._taken_behind = len(self._of_forwards), len(self._taken)
        self._rows.backward_ended()
        if self._order is not None:
            self._order.end()

    def drop(self) -> None:
        """Forget what is in the gradients; a forward whose backward is to come stays."""
        self._rows.drop()
        self._taken, self._taken_behind = self._taken[self._taken_behind :], 0
        self._start_step(self._of_forwards[self._behind :])

    def rows_of_step(self) -> tuple[int, int]:
        """Count the rows of the step that ends: of the data, and of its forwards' tensors."""
        rows, self._taken, self._taken_behind = sum(self._taken), [], 0
        labels = float(self._settings.objective.numbers().labels) if self.rows_of_data.may_be_packed else 0.0
        found, by_labels = self.rows_of_data.of_step(rows, labels), self.rows_of_data.by_labels
        return found, rows if by_labels is None else by_labels

    def end_step(self) -> None:
        """Forget the step that was taken; its rows are forgotten as they are counted."""
        self.evaluated = self._evaluated_loss = None
        self._rows.end_step()
        self._start_step()

    def observed(self, scale: float | Tensor) -> Loss[float | Tensor]:
        """Return the numbers of an observation; ``scale``: the factor on all gradients."""
        tokens, inputs = self._rows.sizes()
        losses = self._losses or self._shares or self._of_forwards
        shares = len(losses) if losses is self._shares else 1  # they add up to the mean of the micro-batches'
        data, first_rows = self._loaders.whole_data if self.rows_of_data.are_dealt else (0.0, 0.0)
        return Loss(
            total=torch.stack([loss.float().reshape(()) for loss in losses]).sum() * shares if losses else 0.0,
            count=float(len(losses)),
            scale=scale,
            tokens=0.0 if tokens is None else tokens,
            inputs=0.0 if inputs is None else inputs,
            order=self._loaders.deal.word,
            data=data,
            first_rows=first_rows,
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
