"""Which ``torch.utils.data.DataLoader`` feeds the training, and where it begins anew, without anybody saying so.

    watch = LoaderWatch(ranks=4)
    handle = watch.connect()             # to be removed
    watch.forward()                      # at each training forward: whether its batch is the first of a pass
    watch.facts, watch.seen

One method of a class of torch's is wrapped while anybody watches: ``_BaseDataLoaderIter.__next__``
(``torch/utils/data/dataloader.py``, 1.2 to 2.13), which every loader of torch's, accelerate's and the frameworks' goes
through. Of the iterator are read ``_num_yielded``, ``_index_sampler`` and ``_dataset``; where they are gone nothing is
known, and nothing breaks. The newest iterator that was advanced is the one whose batch is trained on.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch.utils.data import dataloader

from ds_silent.capture.data_facts import DataFacts, Deal, data_facts, deal_of

logger = logging.getLogger("ds_silent")
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
