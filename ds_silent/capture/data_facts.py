"""What a sampler or a loader says of the data: how many rows an epoch has, and whether it shuffles them.

    data_facts(loader, ranks=4)          # DataFacts(rows=52002, shuffles=True)

Read are the names of torch's samplers and of accelerate's shards; nothing here communicates or raises.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ds_silent.preflight.inventory import length_of, sampler_facts, samplers_in


@dataclass(frozen=True)
class DataFacts:
    """None where nobody knows."""

    rows: int | None = None  # of one epoch, over all ranks
    shuffles: bool | None = None


@dataclass(frozen=True)
class Walk:
    """How the rows of one observation came to the rank that writes."""

    facts: DataFacts = DataFacts()
    starts: tuple[int, ...] = ()  # places in this rank's rows at which its loader had begun anew
    watched: bool = False  # a loader was seen: where there are no starts, none began
    told: bool = True  # the script has told the ids: they are not hashes of the rows' content


def data_facts(source: Any, ranks: int) -> DataFacts:
    """Facts of a DataLoader, of its iterator, of a loader that wraps one, or of a sampler.

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
    inner = [getattr(getattr(one, "dataset", None), "sampler", None) for one in samplers]
    if any(getattr(one, "replacement", False) is True for one in (*samplers, *inner)):
        return DataFacts()
    shares = sampler_facts(source)
    rows = None if shares is None else shares.rows
    if rows is None and (shares is not None or ranks == 1):
        sets = [getattr(one, name, None) for one in samplers for name in ("dataset", "_dataset", "data_source")]
        rows = next((length for length in map(length_of, sets) if length is not None), None)
    return DataFacts(rows, next((known for known in map(_shuffles, samplers) if known is not None), None))


def _shuffles(sampler: Any) -> bool | None:
    said = getattr(sampler, "shuffle", None)
    if isinstance(said, bool):
        return said
    name = type(sampler).__name__
    return True if "RandomSampler" in name else (False if name == "SequentialSampler" else None)
