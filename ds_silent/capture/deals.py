"""How a sampler deals rows to the ranks, as far as this rank's own says: nothing here communicates or raises.

    deal_of(loader, ranks=4)      # Deal("random", "DistributedSampler, shuffled", ...)

Of samplers are read the names of torch's and of accelerate's shards.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ds_silent.maths.fingerprint import hash_text, short_hash
from ds_silent.preflight.comparison import PreflightOutcome
from ds_silent.preflight.inventory import length_of, picked_from, samplers_in
from ds_silent.preflight.items import Item
from ds_silent.records import DataDealt, Dealt


@dataclass(frozen=True)
class Deal:
    """How one rank's sampler deals rows to ranks; whether the others' do the same only their observations say."""

    dealt: Dealt = "unknown"
    by: str = "no loader has been seen so far"
    order: float = 0.0  # hash of all that the order of the rows follows from, the same on all ranks; 0 where unknown
    by_epoch: bool = False  # another order comes only with another epoch of the sampler
    fixed: float = 0.0  # hash of what the order surely follows from, on this rank: an epoch that its code reads
    alike: int = 1  # passes in a row that this one sampler has dealt in one order, this one among them
    by_content: bool = False  # rows are chosen by what is in them: one rank may get the longest, by design
    picked: str = ""  # rows that a shared data set picks from another
    pass_rows: int | None = None  # of this rank's data set, of which each pass takes every row: none is left to others

    @property
    def word(self) -> float:
        """Return what the other ranks are sent: ``order``, negative where each rank keeps its rows."""
        return -self.order if self.dealt == "own-shard" else self.order


_UNSEEDED = ", by a generator that nobody has seeded: each run has this order, whatever its seed"
_BY_CONTENT = ("Length", "Bucket", "Group", "Curriculum")
_SHARES = re.compile(r"sampler(:|'s share)")  # how the preflight's items begin that a wrong share is seen in
_BY_EPOCH = ("DistributedSampler", "StatefulDistributedSampler", "ResumableSampler")
"""torch's, torchdata's and this project's: a permutation of a seed and an epoch, cut into a share per rank."""


def deal_of(source: Any, ranks: int) -> Deal:
    """Tell how a loader, its iterator or a sampler deals rows to N ``ranks``, as far as this rank's own says.

    Known are samplers that cut one order of all rows into N shares. A sampler that chooses rows by what is in them, as
    by their length, or that is not known by name, may give one rank other rows than another by design.
    """
    if source is None:
        return Deal()
    try:
        samplers = samplers_in(source)
        found = (deal for one in samplers if (deal := _deal(one, samplers, ranks)) is not None)
        plain = (one for one in samplers if type(one) is RandomSampler and not one.replacement)
        rows = next((length_of(one.data_source) for one in plain), None)
        deal, own = next(found, replace(_as_it_likes(_called(samplers)), pass_rows=rows)), _own_batches(samplers)
        batches = "" if own in deal.by else f", in batches of {own}"
        return replace(deal, by=f"{deal.by}{batches}{_UNSEEDED * any(map(_unseeded, samplers))}")
    except Exception:  # somebody else's property
        return Deal(by=f"{type(source).__name__}, which cannot be read")


def _unseeded(sampler: Any) -> bool:
    """Tell whether it shuffles by a generator of its own whose seed is the one that torch gives to each new one."""
    shuffles = isinstance(sampler, (RandomSampler, SubsetRandomSampler, WeightedRandomSampler))
    seeds_late = hasattr(sampler, "initial_seed")  # accelerate's, as a pass begins
    own = getattr(sampler, "generator", None)
    return shuffles and not seeds_late and own is not None and own.initial_seed() == torch.Generator().initial_seed()


def _as_it_likes(name: str) -> Deal:
    return Deal(by=f"{name}, which may deal as it likes", by_content=any(word in name for word in _BY_CONTENT))


def deal_item(deal: Deal) -> Item:
    """Make the preflight's item: whether all ranks' samplers deal alike. Nothing is expected of it."""
    return Item("how rows are dealt", "sampler", "free", deal.by, hash_text(f"{deal.dealt} {deal.order}"))


def dealt_by_all(outcome: PreflightOutcome, deal: Deal) -> DataDealt:
    """Return what the preflight has found out, from this rank's deal and whether the others' are the same."""
    if any(one.item.name == "how rows are dealt" and not one.agrees for one in outcome.items):
        return DataDealt("unknown", "the ranks' samplers are not the same")
    if deal.dealt != "unknown" and any(_SHARES.match(one.item.name) for one in outcome.wrong):
        return DataDealt("unknown", f"{deal.by}, but not one share for each rank")
    return DataDealt(deal.dealt, deal.by)


_ITERATORS = ("_SingleProcessDataLoaderIter", "_MultiProcessingDataLoaderIter")  # torch's own, of a DataLoader


def _own_batches(samplers: list[Any]) -> str:
    """Name the batch sampler where its class is neither torch's nor accelerate's: it chooses among the rows dealt."""
    batches = getattr(samplers[0], "_index_sampler", getattr(samplers[0], "batch_sampler", None))
    own = batches is not None and type(batches).__module__.partition(".")[0] not in ("torch", "accelerate")
    return type(batches).__name__ if own else ""


def _called(samplers: list[Any]) -> str:
    """Name the sampler that decides, as far as one is there, else the loader."""
    if own := _own_batches(samplers):
        return own
    known = [type(one).__name__ for one in samplers if "Sampler" in type(one).__name__]
    inner = [name for name in known if name not in ("BatchSampler", "_InfiniteConstantSampler")]
    first = type(samplers[0]).__name__
    return inner[0] if inner else "DataLoader" if first in _ITERATORS else first


def _deal(sampler: Any, samplers: list[Any], ranks: int) -> Deal | None:
    """Read a sampler's shares; None where it says nothing of them."""
    name = type(sampler).__name__
    readers = {"num_replicas": _replicas, "num_processes": _processes, "data_parallel_size": _consumed}
    for size, reader in readers.items():
        shares = getattr(sampler, size, None)
        if isinstance(shares, int) and shares != ranks:
            return Deal(by=f"{name}, {shares} share{'s' * (shares != 1)} for {ranks} ranks")
        if isinstance(shares, int):
            return reader(sampler, name, samplers)
    return None


def _replicas(sampler: Any, name: str, samplers: list[Any]) -> Deal:
    torchs = isinstance(sampler, DistributedSampler) and type(sampler).__iter__ is DistributedSampler.__iter__
    if not torchs and name not in _BY_EPOCH:
        return replace(_as_it_likes(name), fixed=_fixed_by_epoch(sampler))
    shuffles = bool(getattr(sampler, "shuffle", True))
    follows = [getattr(sampler, key, None) for key in ("num_replicas", "seed", "epoch", "drop_last")]
    data = getattr(sampler, "dataset", None)
    picked = picked_from(data)
    order = short_hash((name, length_of(data), shuffles, follows, picked))
    if not shuffles:
        return Deal("own-shard", f"{name}, not shuffled", order, picked=picked)
    fixed = order if torchs else 0.0
    return Deal("random", f"{name}, shuffled", order, by_epoch=True, fixed=fixed, picked=picked)


def _fixed_by_epoch(sampler: Any) -> float:
    """Hash the seed and epoch of a sampler of the script's own that shuffles, whose code reads the epoch; else 0."""
    code = getattr(type(sampler).__iter__, "__code__", None)
    epoch, shuffles = getattr(sampler, "epoch", None), getattr(sampler, "shuffle", True) is not False
    if not (shuffles and isinstance(epoch, int) and code is not None and "epoch" in code.co_names):
        return 0.0
    return short_hash((epoch, getattr(sampler, "seed", None))) if callable(getattr(sampler, "set_epoch", None)) else 0.0


def _processes(shard: Any, name: str, samplers: list[Any]) -> Deal:
    """accelerate's shard of another's batches, which is how transformers' Trainer deals."""
    batches = getattr(shard, "batch_sampler", None)
    sampler = getattr(batches, "sampler", None)
    inner = type(sampler).__name__
    known = name == "BatchSamplerShard" and type(batches) is BatchSampler
    said = f"{name} of {inner}"
    if not known or inner not in ("RandomSampler", "SeedableRandomSampler", "SequentialSampler"):
        return _as_it_likes(said)
    if getattr(sampler, "replacement", False):
        return Deal(by=f"{said}, with replacement")
    follows = [getattr(shard, key, None) for key in ("num_processes", "split_batches", "even_batches")]
    data, epoch = getattr(sampler, "data_source", None), getattr(sampler, "epoch", None)
    picked = picked_from(data)
    seed = getattr(sampler, "initial_seed", None) if inner == "SeedableRandomSampler" else None
    order = short_hash((said, length_of(data), seed, epoch, getattr(batches, "batch_size", None), follows, picked))
    if inner == "SequentialSampler":
        return Deal("own-shard", f"{said}, not shuffled", order, picked=picked)
    return Deal("random", f"{said}, shuffled", order, by_epoch=inner == "SeedableRandomSampler", picked=picked)


def _consumed(sampler: Any, name: str, samplers: list[Any]) -> Deal:
    """Samplers that go on by the samples consumed. One that has ``data_sharding`` shuffles, in a bucket of each rank or
    in all; another takes the data set as it is, which may hold a shuffled order for all ranks."""
    sets = [getattr(one, key, None) for one in (sampler, *samplers) for key in ("dataset", "_dataset")]
    held = next((one for one in sets if one is not None), None)
    keys = ("total_samples", "micro_batch_size", "data_parallel_size", "data_sharding", "seed")
    order = short_hash((name, type(held).__name__, [getattr(sampler, key, None) for key in keys]))
    buckets = getattr(sampler, "data_sharding", None)
    if buckets:
        return Deal("own-shard", f"{name}, a bucket for each rank", order)
    if buckets is not None:
        return Deal("random", f"{name}, one order for all ranks", order)
    parts = list(getattr(held, "datasets", None) or [held])
    if all(hasattr(part, "shuffle_index") for part in parts):
        return Deal("random", f"{name} of {type(held).__name__}, one shuffled order for all ranks", order)
    return Deal(by=f"{name} of {type(held).__name__}, which may be in any order")
