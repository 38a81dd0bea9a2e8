"""Which loader feeds the training, where it begins anew, and what it says of the data: rows of an epoch, whether it
shuffles them, how it deals them to the ranks. Nobody has to tell, and nothing here communicates or raises.

    watch = LoaderWatch(ranks=4).connect()
    watch.forward()                      # a training forward: whether its batch is the first of a pass
    watch.facts, watch.deal              # DataFacts(rows=52002, shuffles=True), Deal("random", ...)
    data_facts(loader, ranks=4)          # of a loader that is at hand

Two methods of a class of torch's are wrapped while anybody watches: ``_BaseDataLoaderIter.__next__`` and
``_next_index`` (``torch/utils/data/dataloader.py``, 1.2 to 2.13), which every loader of torch's, accelerate's and the
frameworks' goes through. Of the iterator are read ``_num_yielded``, ``_index_sampler``, ``_sampler_iter`` and
``_dataset``; where they are gone nothing is known, and nothing breaks. The newest iterator that was advanced is the
one whose batch is trained on. Of samplers are read the names of torch's and of accelerate's shards.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, Sampler, dataloader

from ds_silent.capture.data_set import held_by, rows_held_by
from ds_silent.capture.deals import Deal, deal_of
from ds_silent.maths.fingerprint import short_hash
from ds_silent.patches import Patches
from ds_silent.preflight.inventory import LoaderPass, length_of, loader_pass_of, sampler_facts, samplers_in

logger = logging.getLogger("ds_silent")
_watches: weakref.WeakSet[Watch] = weakref.WeakSet()
_ORDERS = 256  # of passes, that are remembered
_FIRST = 8  # rows of a pass that tell its order
_wrapped: list[Patches] = []  # one, while anybody watches
_first_rows: weakref.WeakKeyDictionary[Any, tuple[Any, list[Any]]] = weakref.WeakKeyDictionary()
"""Of each iterator: what it draws from in its newest pass, and the first indices that it drew."""


@dataclass(frozen=True)
class DataFacts:
    """None where nobody knows."""

    rows: int | None = None  # of one epoch, over all ranks
    shuffles: bool | None = None
    filled: int = 0  # rows more that a pass deals to the ranks, as of a sampler that fills up each of its buckets
    by_epoch: bool = False  # nobody says whether they are shuffled, and a sampler or a shuffled data set has set_epoch


@dataclass(frozen=True)
class Walk:
    """How the rows of one observation came to the rank that writes."""

    facts: DataFacts = DataFacts()
    starts: tuple[int, ...] = ()  # places in this rank's rows at which its loader had begun anew
    watched: bool = False  # a loader was seen: where there are no starts, none began
    told: bool = True  # the script has told the ids: they are not hashes of the rows' content
    deal: Deal = field(default_factory=Deal)
    repeated: bool = False  # there are no rows, and none is missing
    batch_again: bool = False  # as all forwards took the batch before once more
    given: tuple[tuple[int, int], ...] = ()  # each micro-batch's place, and what the loader had given by then: rows


class Watch:
    """Hear of each batch that an iterator of torch's loaders gives, from :meth:`watch` until :meth:`remove`."""

    def advanced(self, iterator: Any, batch: Any = None) -> None:
        """Note that an iterator has given a batch; of evaluation, too."""
        raise NotImplementedError

    def watch(self) -> None:
        """Begin; :meth:`remove` ends it."""
        _watches.add(self)
        iterator = getattr(dataloader, "_BaseDataLoaderIter", None)
        if not _wrapped and iterator is not None:
            _wrapped.append(patches := Patches())
            patches.wrap_method(iterator, "__next__", _advance)
            patches.wrap_method(iterator, "_next_index", _draw)

    def remove(self) -> None:
        """End it; the last watch to go leaves torch's class as it was."""
        _watches.discard(self)
        if not _watches and _wrapped:
            _wrapped.pop().undo()


def _advance(original: Callable[[Any], Any], iterator: Any) -> Any:
    batch = original(iterator)
    for watch in tuple(_watches):
        try:
            watch.advanced(iterator, batch)
        except Exception as error:  # in the script's own loop: it must not end it
            _watches.discard(watch)
            logger.warning("ds_silent: the loader is not followed any more: %s", error)
    return batch


def _draw(original: Callable[[Any], Any], iterator: Any) -> Any:
    indices, source = original(iterator), getattr(iterator, "_sampler_iter", None)
    try:
        drawn_from, first = _first_rows.get(iterator, (None, []))
        if drawn_from is not source:
            _first_rows[iterator] = source, (first := [])
        if len(first) < _FIRST:
            first += indices if type(indices) is list else [indices]
    except Exception as error:  # likewise
        logger.debug("ds_silent: the order of a pass is not known: %s", error)
    return indices


class LoaderWatch(Watch):
    """Follow the loader that feeds one training, on this rank."""

    def __init__(self, ranks: int):
        self.facts, self.seen = DataFacts(), False  # of its data; whether there is one: not where several take turns
        self.given: Any = None  # a loader or sampler that the script has named, which is asked where none is seen
        self.ranks = ranks
        self._passes: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # of iterators that are alive
        self._begun = 0  # passes so far, evaluation's too
        self._newest_iterator: weakref.ref[Any] | None = None
        self._newest, self._newest_facts = 0, DataFacts()  # the pass that gave the newest batch; of the newest pass
        self.fetches_ahead = False  # the loop does, several batches: a pass is over when all that it gave are trained
        self._training = 0  # the pass that the newest training forward was of
        self._batches = 0  # that were trained in it
        self._sampler: weakref.ref[Any] | None = None  # of its batches
        self._newest_sampler: weakref.ref[Any] | None = None
        self._newest_skips = 0
        self._loader_passes: dict[int, LoaderPass] = {}  # of the newest passes
        self._given_in: LoaderPass | None = None  # the pass in which ``rows_given`` was asked last
        self._given_before = 0  # rows of the passes before it
        self._mixed = False
        self._newest_deal, self._deal = Deal(), Deal()
        self._orders: deque[float] = deque(maxlen=_ORDERS)  # of the passes that were trained on
        self._order, self._alike = 0.0, 0  # of the newest of them, and how many in a row had it
        self._held: tuple[weakref.ref[Any], float] | None = None  # the newest data set, and its hash

    def connect(self) -> LoaderWatch:
        """Begin; ``remove()`` ends it. What a script fed its first batch with is remembered, where somebody does."""
        for newest in [one.newest() for one in _watches if isinstance(one, LoaderMemory)]:
            if newest is not None:
                self.advanced(newest)
        self.watch()
        return self

    def advanced(self, iterator: Any, batch: Any = None) -> None:
        number = self._passes.get(iterator, 0)
        if not number or getattr(iterator, "_num_yielded", 0) == 1:
            self._begun += 1
            self._passes[iterator] = number = self._begun
            self._newest_facts = data_facts(iterator, self.ranks)
            self._newest_deal = deal_of(iterator, self.ranks)
            self._newest_sampler, self._newest_skips = batches_of(iterator)
            for old in [one for one in self._loader_passes if one != self._training][:-3]:
                del self._loader_passes[old]  # of evaluations; the training's may be under way
            self._loader_passes[number] = own = loader_pass_of(iterator)
            own.first = _first_rows.get(iterator, (None, []))[1]
        self._newest, self._newest_iterator = number, weakref.ref(iterator)
        if number in self._loader_passes:
            self._loader_passes[number].given = getattr(iterator, "_num_yielded", 0)

    def _hash_of(self, iterator: Any) -> float:
        """Return :func:`held_by` of the training's data set, which is read once where it can be known again; where a
        sampler deals its rows to the ranks :func:`rows_held_by`, negative."""
        data, known = getattr(iterator, "_dataset", None), self._held
        if known is None or known[0]() is not data:
            found = held_by(iterator) if self._deal.dealt == "unknown" else -rows_held_by(data)
            try:
                self._held = known = weakref.ref(data), found
            except TypeError:  # a list
                return found
        return known[1]

    @property
    def whole_data(self) -> tuple[float, float]:
        """Return the hash of the data set that each pass takes whole, and that of the order in the pass under way; 0.0
        where it is not known. Of one whose rows a sampler deals to the ranks, the first is negative."""
        own = self.loader_pass
        if own is None or own.data <= 0.0:  # of rows that are dealt the order need not be the same
            return (0.0 if own is None else own.data), 0.0
        first = own.first[:_FIRST]
        return own.data, short_hash(first) if len(first) >= min(_FIRST, own.rows or _FIRST) else 0.0

    @property
    def loader_pass(self) -> LoaderPass | None:
        """Return what the pass under way has dealt to this rank; None without one, and where several take turns."""
        return None if self._mixed else self._loader_passes.get(self._training)

    def rows_given(self) -> int:
        """Count the rows that the training's loader has given this rank so far; to be asked at each forward."""
        own, last = self.loader_pass, self._given_in
        if own is not last:
            self._given_before += 0 if last is None else last.rows_in(last.given)
            self._given_in = own
        return self._given_before + (0 if own is None else own.rows_in(own.given))

    def feeds_training(self, iterator: Any) -> bool:
        """Tell whether an iterator deals batches of the sampler whose batches are trained, or may come to."""
        sampler = None if self._sampler is None else self._sampler()
        return not self._mixed and (sampler is None or batches_of(iterator)[0] == self._sampler)

    @property
    def forwards(self) -> int:
        """Return how many batches were trained; one that is forwarded again counts once."""
        return self._batches

    def forward(self) -> bool:
        """Note a training forward; return whether its batch is the first of a pass over the data.

        The rest of a pass that was broken off belongs to it: accelerate's ``skip_first_batches`` skips as many batches
        of the same sampler as were trained.
        """
        if not self._newest or self._mixed:
            return False
        self._batches += 1
        if self._newest == self._training:
            return False
        if self._newest < self._training:  # back to one that had begun before: they take turns
            self.facts, self.seen, self._mixed = DataFacts(), False, True
            return False
        if self.fetches_ahead and (own := self.loader_pass) is not None and self._batches <= own.given:
            return False
        sampler = None if self._sampler is None else self._sampler()
        same = sampler is not None and self._newest_sampler is not None and self._newest_sampler() is sampler
        if same and self._newest_skips and self._newest_skips == self._batches - 1:
            self._training = self._newest
            if self._newest_deal.order != self._deal.order:  # the rest comes in another order
                self._deal = self._newest_deal
            return False
        self._sampler, self._batches = self._newest_sampler, self._newest_skips + 1
        self.facts, self.seen, self._training = self._newest_facts, True, self._newest
        self._deal = self._known_before(self._newest_deal, same)
        if (own := self.loader_pass) is not None and self._newest_iterator is not None:
            own.data = self._hash_of(self._newest_iterator())
        return True

    @property
    def deal(self) -> Deal:
        """Tell how the rows that are trained on now are dealt, as far as this rank's sampler says."""
        if self._mixed:
            return Deal(by="loaders that take turns")
        return self._deal if self.seen else deal_of(self.given, self.ranks)

    def _known_before(self, deal: Deal, same: bool) -> Deal:
        """Compare with earlier passes as one begins: an epoch that does not advance deals each rank the rows it had.

        ``same``: the sampler that deals is that of the pass before.
        """
        self._alike = self._alike + 1 if same and deal.fixed and deal.fixed == self._order else 1
        self._order, deal = deal.fixed, replace(deal, alike=self._alike)
        if not deal.by_epoch or not deal.order:
            return deal
        if deal.order in self._orders:
            return replace(deal, dealt="own-shard", by=f"{deal.by}, but its epoch does not advance")
        self._orders.append(deal.order)
        return replace(deal, by=f"{deal.by}, epoch advances") if len(self._orders) > 1 else deal


class LoaderMemory(Watch):
    """Remember which iterator of a loader was advanced last, for a watch that connects later."""

    def __init__(self) -> None:
        self.newest: Callable[[], Any] = lambda: None
        self.watch()

    def advanced(self, iterator: Any, batch: Any = None) -> None:
        self.newest = weakref.ref(iterator)


# -- what a loader or sampler says of the data -------------------------------------------------------------------------


def batches_of(iterator: Any) -> tuple[weakref.ref[Any] | None, int]:
    """Return the sampler of an iterator's batches, and how many of them accelerate (1.0 to 1.15) skips."""
    sampler: Any = getattr(iterator, "_index_sampler", None)
    skips = 0
    while type(sampler).__name__ == "SkipBatchSampler" and isinstance(getattr(sampler, "skip_batches", None), int):
        sampler, skips = getattr(sampler, "batch_sampler", None), skips + sampler.skip_batches
    try:
        return (None if sampler is None else weakref.ref(sampler)), skips
    except TypeError:  # a list of batches
        return None, skips


def data_facts(source: Any, ranks: int) -> DataFacts:
    """Read the facts of a DataLoader, of its iterator, of a loader that wraps one, or of a sampler.

    An epoch is all rows of the data set where the sampler deals them to ranks, or where there is one rank. With a plain
    sampler on each of several ranks the data may have been split before: then nobody knows. Rows that are drawn with
    replacement have no epoch.
    """
    try:
        return _facts(source, ranks)
    except Exception:  # somebody else's property
        return DataFacts()


def _facts(source: Any, ranks: int) -> DataFacts:
    samplers = samplers_in(source)
    inner = [_sampler_within(one) for one in samplers]
    if any(getattr(one, "replacement", False) is True for one in (*samplers, *inner)):
        return DataFacts()
    shares = sampler_facts(source)
    rows = None if shares is None else shares.rows
    if rows is None and (shares is not None or ranks == 1):
        sets = [getattr(one, name, None) for one in samplers for name in ("dataset", "_dataset", "data_source")]
        rows = next((length for length in map(length_of, sets) if length is not None), None)
    unasked = {id(one.sampler) for one in samplers if _has_own_batches(one)}
    both = [(one, within) for one, within in zip(samplers, inner, strict=True) if id(one) not in unasked]
    deciding = [one if within is None or not isinstance(one, Sampler) else within for one, within in both]
    shuffles = next((known for known in map(_shuffles, deciding) if known is not None), None)
    by_epoch = shuffles is None and any(map(_takes_epochs, deciding))
    return DataFacts(rows, shuffles, 0 if shares is None else _filled(source, rows, ranks), by_epoch)


def _sampler_within(source: Any) -> Any:
    """Return the sampler that another one cuts into the ranks' shares, as a data set: so do Lightning and Catalyst."""
    data = getattr(source, "dataset", None)
    held = (getattr(data, name, None) for name in ("sampler", "_sampler"))
    return next((one for one in held if isinstance(one, Sampler)), None)


def _has_own_batches(source: Any) -> bool:
    """Tell whether a DataLoader's batch sampler does not ask the sampler that torch gives it then."""
    batches = getattr(source, "batch_sampler", None) if isinstance(source, DataLoader) else None
    return batches is not None and getattr(batches, "sampler", None) is not source.sampler


def _filled(iterator: Any, rows: int | None, ranks: int) -> int:
    """Count the rows that a pass deals beyond the data's; 0 where it deals them several times."""
    own = loader_pass_of(iterator)
    more = ranks * own.rows_in(own.batches or 0) - (rows or 0)
    return more if ranks <= more < (rows or 0) else 0


def _shuffles(sampler: Any) -> bool | None:
    said = getattr(sampler, "shuffle", None)
    if isinstance(said, bool):
        return said
    name = type(sampler).__name__
    return True if "RandomSampler" in name else (False if name == "SequentialSampler" else None)


def _takes_epochs(source: Any) -> bool:
    """Tell whether a sampler, or the streamed and shuffled data set of a loader, is told of each epoch.

    ``_shuffling`` is that of datasets' ``IterableDataset`` (2.14 to 4.4). A loader's own ``set_epoch`` says nothing.
    """
    data = getattr(source, "dataset", getattr(source, "_dataset", None))
    inner = getattr(data, "dataset", data)
    if hasattr(inner, "_shuffling") or hasattr(data, "_shuffling"):
        return getattr(inner, "_shuffling", None) is not None
    if isinstance(data, IterableDataset) and callable(getattr(data, "set_epoch", None)):
        return True
    return isinstance(source, Sampler) and callable(getattr(source, "set_epoch", None))
