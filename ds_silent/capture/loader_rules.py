"""Rules of what a loader gives: whether its workers share the rows, and whether a forward takes what was given.

    given = GivenRows(loaders, lambda: framework.step)
    rows.are_others = given.forward              # at each training forward: its tensors are none of the loader's rows

The nodes of a whole graph, the places of a picture, a prompt or noise are no rows of the data, though a loader feeds
the training: what it gives chooses some of them, or is their target.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import IterableDataset

from ds_silent.capture.loaders import LoaderWatch, Watch
from ds_silent.capture.row_hashes import batch_tensors
from ds_silent.device import ReadLater
from ds_silent.patches import Patches
from ds_silent.rules.rule import Breach, Rule

_TURNS, _OVER = 3, -1  # of a loader's workers
LEARNED = 8  # forwards of the run in which tensors are compared with what the loader gave
_AHEAD = 16  # batches that a loop may have fetched ahead
_FETCHED_AHEAD = 2  # batches that were given since, of a loop that fetches further ahead than accelerate does
_TENSORS, _ROWS, _ELEMENTS = 8, 64, 64  # of a batch; of each tensor; of each row: by them it is known again
_LOOKED_AT = 4  # rows of a forward's tensor
_ALIKE = 0.5  # share of a row's elements, as of tokens of which some are masked
_AFFINE, _FEWEST = 0.9999, 8  # correlation, of as many elements: scaled and shifted on the device
_FEW = 8  # batches that were replaced, before a word is said; forwards without one, after which it is over

_Kind = tuple[int, torch.dtype, int] | tuple[int, torch.dtype, int, int]
"""Of a forward's tensor: its place, dtype, dimensions, and first size, which a last batch has smaller."""


class _Forward(NamedTuple):
    """What one forward took, with the batches that were newest then: beginnings of rows, on their way to the host."""

    kinds: Sequence[_Kind]
    own: Sequence[list[ReadLater]]
    batches: Sequence[list[ReadLater]]

    def beginnings(self) -> list[ReadLater]:
        return [rows for one in (*self.own, *self.batches) for rows in one]


class BatchRule(Rule, Watch):
    """Check batches as a loader gives them: :meth:`look` is called with each, and what raises in it ends the rule."""

    def __init__(self, step: Callable[[], int]):
        """``step``: returns the optimizer step under way."""
        self._step = step
        self._safely: Callable[..., Any] = lambda function, *arguments: function(*arguments)

    def connect(self, patches: Patches, safely: Callable[..., Any]) -> None:
        """Hear of every batch."""
        self._safely = safely
        self.watch()
        patches.also(self.remove)

    def advanced(self, iterator: Any, batch: Any = None) -> None:
        self._safely(self.look, iterator, batch)

    def look(self, iterator: Any, batch: Any) -> None:
        """Take a batch of an iterator."""
        raise NotImplementedError


class WorkerRows(BatchRule):
    """Look whether each worker of a loader yields all rows of an ``IterableDataset``, and not a share of its own.

    Then the workers' batches of each turn are equal. ``_TURNS`` of them are looked at, which differ from each other; a
    turn with two batches speaks for all, and a batch that the script has written to is another.
    """

    def __init__(self, step: Callable[[], int]):
        super().__init__(step)
        self._first: list[Tensor] = []  # of the turn under way
        self._turns = 0  # of equal batches, in a row
        self._found: tuple[Breach, ...] = ()

    def look(self, iterator: Any, batch: Any) -> None:
        workers = getattr(iterator, "_num_workers", 0)
        streams = isinstance(getattr(iterator, "_dataset", None), IterableDataset)
        if workers < 2 or not streams or not torch.is_grad_enabled() or self._turns in (_TURNS, _OVER):
            return
        tensors = [one for one in tree_leaves(batch) if isinstance(one, Tensor) and one.device.type == "cpu"]
        worker = (iterator._num_yielded - 1) % workers
        again = bool(tensors) and len(tensors) == len(self._first) and all(map(torch.equal, tensors, self._first))
        if worker == 0:
            self._turns = _OVER if again else self._turns  # one batch for ever tells nothing
            self._first = tensors
        elif self._first:
            self._turns = _OVER if not again else self._turns + (worker == workers - 1)
        if self._turns == _OVER:
            self._first = []
        if self._turns == _TURNS:
            message = (
                f"Each of the loader's {workers} workers yields all rows of the IterableDataset: {_TURNS} times in a "
                f"row they gave {workers} equal batches. Every row is trained {workers} times in a pass."
            )
            remedy = "Split the rows by torch.utils.data.get_worker_info() in __iter__, or set num_workers to 1 or 0."
            self._found = (Breach("workers", "duplicate-data", "warning", "loader", message, remedy, self._step()),)

    def breaches(self) -> tuple[Breach, ...]:
        return self._found


class GivenRows(BatchRule):
    """Follow whether this rank forwards what its loader gives.

    In the first forwards of a run, the beginnings of each tensor's first rows are compared with those of the newest
    batches' rows: equal, most of it equal, moved by one, or scaled and shifted. The first forward waits for the
    device; what the others take is compared when it has come to the host. Tensors of a kind that was never equal are
    none of the loader's; of an unknown kind they may be.
    """

    def __init__(self, loaders: LoaderWatch, step: Callable[[], int]):
        super().__init__(step)
        self._loaders = loaders
        self._newest: deque[list[ReadLater]] = deque(maxlen=_AHEAD)  # rows of the newest batches
        self._links: dict[_Kind, bool] = {}
        self._learned = 0  # forwards
        self._on_the_way: deque[_Forward] = deque()
        self._given = 0  # batches of the training's loader
        self._looked = (0, 0)  # they, and the step, at the newest forward
        self._fresh = self._since_kept = 0  # forwards of other tensors than the forward before; behind the newest kept
        self._kept = self._unused = 0  # batches in whose place another was trained; not trained when the first was
        self._first = 0  # step

    def look(self, iterator: Any, batch: Any) -> None:
        if not torch.is_grad_enabled():
            return
        self._given += self._loaders.feeds_training(iterator)
        if self._learned < LEARNED:
            tensors = batch_tensors((batch,), {})[0][:_TENSORS]
            self._newest.append([rows for one in tensors for rows in _rows_in(one)])

    def forward(self, tensors: Sequence[Tensor], same: bool) -> bool:
        """Take a training forward; return whether its tensors are none of the loader's rows.

        Args:
            same: they are those of the forward before.
        """
        return bool(self._safely(self._forward, tensors[:_TENSORS], same))

    def _forward(self, tensors: Sequence[Tensor], same: bool) -> bool:
        kinds = [_kind(place, one) for place, one in enumerate(tensors)]
        if self._learned < LEARNED and not same and any(newest := tuple(self._newest)):  # a thread may fetch others
            self._on_the_way.append(_Forward(kinds, [_rows_in(one, _LOOKED_AT) for one in tensors], newest))
            self._learned += 1
            if self._learned == LEARNED:
                self._newest.clear()
        self._compare_arrived()
        known = [self._links.get(kind, self._links.get(kind[:3])) for kind in kinds]
        if same and (self._given, self._step()) != self._looked and True in known:
            self._kept, self._since_kept = self._kept + 1, 0
            if self._kept == 1:
                self._unused, self._first = self._given - self._fresh - 1, self._step()
        self._fresh, self._since_kept = self._fresh + (not same), self._since_kept + (not same)
        self._looked = self._given, self._step()
        return bool(known) and all(one is False for one in known)

    def _compare_arrived(self) -> None:
        """Compare forwards in their order, as far as what they took has come to the host; wait for the run's first."""
        while self._on_the_way:
            beginnings = self._on_the_way[0].beginnings()
            if self._links and not all(rows.ready for rows in beginnings):
                return
            for rows in beginnings:
                rows.wait()
            self._compare(self._on_the_way.popleft())

    def _compare(self, forward: _Forward) -> None:
        batches = [[rows.values.double() for rows in batch] for batch in forward.batches]
        given = [rows for batch in batches for rows in batch]
        for kind, later in zip(forward.kinds, forward.own, strict=True):
            own = [rows.values.double() for rows in later]
            of_any_size = kind[:3]
            self._links[kind] = linked = self._links.get(kind, False) or not own or _are_given(own[0], given)
            self._links[of_any_size] = self._links.get(of_any_size, False) or linked
            if kind[0] == 0 and kind[2] > 1:
                behind = (place for place, batch in enumerate(batches[::-1]) if _is_one_of(own, batch))
                self._loaders.fetches_ahead |= next(behind, 0) >= _FETCHED_AHEAD

    def breaches(self) -> tuple[Breach, ...]:
        unused = self._given - self._fresh - self._unused
        if self._since_kept > _FEW:
            self._kept = 0
        if self._kept < _FEW or unused < self._kept:
            return ()
        message = (
            f"The loop trains a batch once more in the place of the next one: the loader goes on, and {_FEW} batches "
            f"or more that it has given were never trained, since step {self._first}."
        )
        remedy = (
            "Look at the loop: a batch that is kept in a variable, or a prefetcher that does not advance. If a batch "
            "is replaced by the one before it on purpose, do nothing."
        )
        effects = ("repeated-rows", "data-order-mismatch", "low-coverage", "outlier-rank", "outlier-layer")
        return (Breach("kept", "data-order-mismatch", "warning", "loader", message, remedy, self._first, effects),)


def _kind(place: int, tensor: Tensor) -> tuple[int, torch.dtype, int, int]:
    return place, tensor.dtype, tensor.ndim, tensor.shape[0] if tensor.ndim else 0


def _rows_in(tensor: Tensor, most: int = _ROWS) -> list[ReadLater]:
    """Return the beginnings of a tensor's rows, (rows, elements), and of all of it: a row may be a tensor."""
    if not (tensor.ndim and tensor.numel()) or tensor.layout != torch.strided or tensor.is_complex():
        return []
    tensor = tensor.detach()
    first = tensor[:most]
    rows = [first.reshape(len(first), -1)[:, :_ELEMENTS]]
    rows += [tensor[None, :_ELEMENTS]] if tensor.ndim == 1 else []
    return [ReadLater(one.double() if one.device.type == "cpu" else one) for one in rows]


def _is_one_of(own: Sequence[Tensor], batch: Sequence[Tensor]) -> bool:
    """Tell whether the first of a tensor's rows is one of a batch as it is, as far as its beginning tells."""
    return any(
        one.shape[1:] == rows.shape[1:] and bool((one[:1] == rows).all(1).any()) for one in own for rows in batch
    )


def _are_given(own: Tensor, given: Sequence[Tensor]) -> bool:
    """Tell whether one of a tensor's first rows is made of one that was given, as far as their beginnings tell."""
    return any(_is_made_of(row[None], rows) for row in own for rows in given)


def _is_made_of(row: Tensor, rows: Tensor) -> bool:
    """Compare the beginning of one row, (1, elements), with those of several."""
    many = min(row.shape[1], rows.shape[1])
    row, rows = row[:, :many], rows[:, :many]
    alike = _share(row, rows) >= _ALIKE
    if many > 1:
        alike |= (row[:, 0] == rows[:, 0]) & (row[:, 0] != 0.0)  # dimensions in another order begin alike
        alike |= _share(row[:, 1:], rows[:, :-1]) >= _ALIKE
    if many >= _FEWEST:
        one, others = row - row.mean(), rows - rows.mean(1, keepdim=True)
        spread = (one.square().sum() * others.square().sum(1)).sqrt()
        alike |= ((one * others).sum(1).abs() >= _AFFINE * spread) & (spread > 0.0)
    return bool(alike.any())


def _share(row: Tensor, rows: Tensor) -> Tensor:
    """Return the share of equal elements of each row, (rows,), where not both are zero; of many zeros alone 1."""
    told = (row != 0.0) | (rows != 0.0)
    none = not row.any() and row.shape[1] >= _FEWEST
    return torch.where(told.any(1), ((row == rows) & told).sum(1) / told.sum(1).clamp(min=1), float(none))
