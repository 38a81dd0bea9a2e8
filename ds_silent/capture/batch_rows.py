"""Which rows this rank's micro-batches hold, from ids that the script gives or else from the model's inputs.

rows = RowIds(enabled=True, capacity=64, micro_batch=4, ranks=8)
rows.given(sample_ids); rows.forward(args, kwargs)       # per micro-batch, in this order
packed = rows.take(device)                               # at a measured step: everything since the last one
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import dataloader

from ds_silent.capture.data_facts import DataFacts, Deal, data_facts, deal_of
from ds_silent.capture.mean_loss import IGNORED_LABEL
from ds_silent.capture.row_hashes import batch_tensors, row_hashes
from ds_silent.config import SilentConsistencyConfig
from ds_silent.exchange.row_ids import MAX_ROWS, pack_rows, sampling_of

logger = logging.getLogger("ds_silent")

# ----------------------------------------------------------------------------------------------------------------------
# Which ``torch.utils.data.DataLoader`` feeds the training, and where it begins anew, without anybody saying so.
#
# One method of a class of torch's is wrapped while anybody watches: ``_BaseDataLoaderIter.__next__``
# (``torch/utils/data/dataloader.py``, 1.2 to 2.13), which every loader of torch's, accelerate's and the frameworks'
# goes through. Of the iterator are read ``_num_yielded``, ``_index_sampler`` and ``_dataset``; where they are gone
# nothing is known, and nothing breaks. The newest iterator that was advanced is the one whose batch is trained on.


_watches: weakref.WeakSet[LoaderWatch | LoaderMemory] = weakref.WeakSet()
_ORDERS = 256  # of passes, that are remembered
_originals: list[Callable[[Any], Any]] = []  # the one, while it is wrapped


class LoaderWatch:
    """Follows the loader that feeds one training, on this rank.

    Attributes:
        facts: of the loader's data.
        seen: whether there is such a loader; not where several take turns.
        given: a loader or sampler that the script has named, which is asked where none is seen.
    """

    def __init__(self, ranks: int):
        self.facts, self.seen = DataFacts(), False
        self.given: Any = None
        self._ranks = ranks
        self._passes: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # of iterators that are alive
        self._begun = 0  # passes so far, evaluation's too
        self._newest, self._newest_facts = 0, DataFacts()  # the pass that gave the newest batch; of the newest pass
        self._training = 0  # the pass that the newest training forward was of
        self._mixed = False
        self._newest_deal, self._deal = Deal(), Deal()
        self._orders: deque[float] = deque(maxlen=_ORDERS)  # of the passes that were trained on

    def connect(self) -> LoaderWatch:
        """Begin; ``remove()`` ends it. What a script fed its first batch with is remembered, where somebody does."""
        for memory in [one for one in _watches if isinstance(one, LoaderMemory)]:
            if memory.newest is not None:
                self.advanced(memory.newest)
        _connect(self)
        return self

    def remove(self) -> None:
        """The last to go leaves torch's class as it was."""
        _disconnect(self)

    def advanced(self, iterator: Any) -> None:
        """An iterator has given a batch; of evaluation, too."""
        number = self._passes.get(iterator, 0)
        if not number or getattr(iterator, "_num_yielded", 0) == 1:
            self._begun += 1
            self._passes[iterator] = number = self._begun
            self._newest_facts = data_facts(iterator, self._ranks)
            self._newest_deal = deal_of(iterator, self._ranks)
        self._newest = number

    def forward(self) -> bool:
        """A training forward. True: its batch is the first of a pass over the data."""
        if not self._newest or self._mixed or self._newest == self._training:
            return False
        if self._newest < self._training:  # back to one that had begun before: they take turns
            self.facts, self.seen, self._mixed = DataFacts(), False, True
            return False
        self.facts, self.seen, self._training = self._newest_facts, True, self._newest
        self._deal = self._known_before(self._newest_deal)
        return True

    @property
    def deal(self) -> Deal:
        """How the rows that are trained on now are dealt, as far as this rank's sampler says."""
        if self._mixed:
            return Deal(by="loaders that take turns")
        return self._deal if self.seen else deal_of(self.given, self._ranks)

    def _known_before(self, deal: Deal) -> Deal:
        """A pass has begun: a sampler whose epoch does not advance deals each rank the rows that it had."""
        if not deal.by_epoch or not deal.order:
            return deal
        if deal.order in self._orders:
            return replace(deal, dealt="own-shard", by=f"{deal.by}, but its epoch does not advance")
        self._orders.append(deal.order)
        return replace(deal, by=f"{deal.by}, epoch advances") if len(self._orders) > 1 else deal


class LoaderMemory:
    """Remembers from now on which iterator of a loader was advanced last, for a watch that connects later.

    Attributes:
        newest: None before the first, and once it is gone.
    """

    def __init__(self) -> None:
        self._newest: weakref.ref[Any] | None = None
        _connect(self)

    @property
    def newest(self) -> Any:
        return None if self._newest is None else self._newest()

    def advanced(self, iterator: Any) -> None:
        """An iterator has given a batch."""
        self._newest = weakref.ref(iterator)

    def remove(self) -> None:
        """Forget it."""
        _disconnect(self)


def _connect(watch: LoaderWatch | LoaderMemory) -> None:
    _watches.add(watch)
    iterator = getattr(dataloader, "_BaseDataLoaderIter", None)
    if _originals or iterator is None:
        return
    original = iterator.__next__
    _originals.append(original)

    def advance(self: Any) -> Any:
        batch = original(self)
        for watch in tuple(_watches):
            try:
                watch.advanced(self)
            except Exception as error:  # in the script's own loop: it must not end it
                _watches.discard(watch)
                logger.warning("ds_silent: the loader is not followed any more: %s", error)
        return batch

    setattr(iterator, "__next__", advance)  # noqa: B010 - a class of torch's


def _disconnect(watch: LoaderWatch | LoaderMemory) -> None:
    _watches.discard(watch)
    if not _watches and _originals:
        setattr(dataloader._BaseDataLoaderIter, "__next__", _originals.pop())  # noqa: B010


# -- Which rows this rank's micro-batches hold, from ids that the script gives or else from the model's inputs ---------


def id_capacity(config: SilentConsistencyConfig, rows_per_step: int) -> int:
    """Rows of a rank that one observation looks at; 0 with ``coverage`` off. The same on every rank."""
    return min(config.interval * rows_per_step, MAX_ROWS) if config.coverage else 0


class RowIds:
    """Collects ids until they are sent. ``capacity`` rows at most are kept; what is lost is counted.

    Args:
        micro_batch: rows per rank and micro-batch, as configured.
        ranks: N, on which it depends whether all rows are sent or a sample.

    Attributes:
        sampling: which rows are sent.
        starts: places in what was taken last at which a loader had begun anew.
        told: whether all of it were ids that the script has told.
    """

    def __init__(self, enabled: bool, capacity: int, micro_batch: int, ranks: int = 1):
        self.sampling = sampling_of(ranks, capacity)
        self.enabled, self._capacity, self._micro_batch = enabled, capacity, micro_batch
        self._ids: list[Tensor] = []  # of micro-batches that have been forwarded
        self._given: list[Tensor] = []  # told by the script, whose forward is to come
        self._hashed: list[int] = []  # places in _ids of this step's micro-batches that nobody told of
        self._begins: list[int] = []  # places in _ids of the first micro-batches of passes over the data
        self.starts: tuple[int, ...] = ()
        self.told = False
        self._told = True  # of what waits, as far as earlier steps go
        self._warned = False
        self._label_tokens: Tensor | None = None
        self._start = self._behind = 0  # places in _ids: of the step's first micro-batch, and behind its last backward
        self._tokens_behind: Tensor | None = None  # of the step's, those whose backward has come

    def given(self, sample_ids: Tensor) -> None:
        """Ids of the next micro-batch, int64 (rows,), on any device."""
        if self.enabled:
            self._given.append(sample_ids)

    def forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], begins: bool = False) -> None:
        """The inputs of one training forward; ``begins``: the first of a pass over the data."""
        if not self.enabled:
            return
        if begins:
            self._begins.append(len(self._ids))
        labels = kwargs.get("labels")
        if isinstance(labels, Tensor) and labels.ndim == 2 and not labels.dtype.is_floating_point:
            tokens = (labels[:, 1:] != IGNORED_LABEL).sum()
            self._label_tokens = tokens if self._label_tokens is None else self._label_tokens + tokens
        tensors, mask = batch_tensors(args, kwargs)
        tensors = [tensor for tensor in tensors if tensor.ndim]
        if self._given:
            given = self._given.pop(0)
            rows = {int(tensor.shape[0]) for tensor in tensors}
            if not rows or len(given) in rows | {self._micro_batch}:
                self._ids.append(given)
                return
            self._warn(len(given), int(tensors[0].shape[0]))
        if tensors:
            self._hashed.append(len(self._ids))
            self._ids.append(row_hashes(tensors, mask))

    def _warn(self, ids: int, rows: int) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "ds_silent: observe_batch was given %d ids for a micro-batch of %d rows on rank %d; pass one id per "
                "row, till then the rows are followed by their content (said once)",
                ids,
                rows,
                dist.get_rank() if dist.is_initialized() else 0,
            )

    def _told_late(self) -> None:
        """Ids of this step that no forward came after: the script tells of a micro-batch when it is through."""
        while self._given and self._hashed:
            place, given = self._hashed.pop(0), self._given.pop(0)
            rows = len(self._ids[place])
            if len(given) in (rows, self._micro_batch):
                self._ids[place] = given
            else:
                self._warn(len(given), rows)
        self._ids += self._given  # the forward was not the observed module's
        self._given = []

    def backward_ended(self) -> None:
        """What was forwarded until now is in the gradients, or never will be."""
        self._behind, self._tokens_behind = len(self._ids), self._label_tokens

    def drop(self) -> None:
        """Forget the rows of this step whose backward has come: they were never to be of a step."""
        start, gone = self._start, self._behind - self._start
        if gone <= 0:
            return
        del self._ids[start : self._behind]
        kept = (place for place in self._hashed if not start <= place < self._behind)
        self._hashed = [place - gone if place > start else place for place in kept]
        self._begins = sorted({max(place - gone, start) if place > start else place for place in self._begins})
        if self._label_tokens is not None and self._tokens_behind is not None:
            self._label_tokens = self._label_tokens - self._tokens_behind
        self._behind, self._tokens_behind = start, None

    @property
    def waiting(self) -> bool:
        """Whether ids wait to be sent."""
        return bool(self._ids)

    def take(self, device: torch.device) -> Tensor | None:
        """Packed ids of the rows since the last call, fp32 (sampling.numbers,) on ``device``; None when off."""
        if not self.enabled:
            return None
        self._told_late()
        places = [0]
        for one in self._ids:
            places.append(places[-1] + len(one))
        lost = max(0, places[-1] - self._capacity)
        self.starts = tuple(places[index] - lost for index in self._begins if places[index] >= lost)
        self.told = self._told and not self._hashed
        ids, self._ids, self._hashed, self._begins, self._told = self._ids, [], [], [], True
        if not ids:
            return None
        together = torch.cat([one.to(ids[-1].device) for one in ids])
        return pack_rows(together, self.sampling).to(device, non_blocking=True)

    def take_label_tokens(self) -> Tensor | None:
        """Tokens that entered this step's loss, 0-dim; None when the inputs have no labels."""
        return None if self._label_tokens is None else self._label_tokens.float()

    def end_step(self) -> None:
        """Forget what belongs to one step only; ids of unmeasured steps wait for the next observation."""
        self._label_tokens = self._tokens_behind = None
        self._told_late()
        self._told &= not self._hashed
        self._hashed = []
        kept = sum(len(one) for one in self._ids)
        while len(self._ids) > 1 and kept - len(self._ids[0]) > self._capacity:
            kept -= len(self._ids.pop(0))
            self._begins = [index - 1 for index in self._begins if index > 0]
        self._start = self._behind = len(self._ids)
