"""Make process groups that only observers use, beside the training's."""

from __future__ import annotations

import ctypes
import hashlib
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

logger = logging.getLogger("ds_silent")
_own: dict[tuple[int, tuple[int, ...]], dist.ProcessGroup] = {}  # of a training's group and its members
_made: Counter[tuple[int, ...]] = Counter()  # groups of these members; another process group has another store


def own_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return the same ranks with a communicator that only observers use, made once. Every rank of ``group`` calls it.

    Collectives of one communicator pair by their order. A step left out, or an observer closed on one rank, may change
    the order of ours there: on a communicator of their own they never meet a gradient.
    """
    return own_part(group, range(dist.get_world_size(group)))


def own_part(group: dist.ProcessGroup, ranks: Sequence[int]) -> dist.ProcessGroup:
    """Do the same for some of ``group``'s ranks, as it counts them; each of these calls it."""
    key = (id(dist.distributed_c10d._get_default_group()), _members(group, ranks))
    if key not in _own:
        _own[key] = new_part(group, ranks)
    return _own[key]


def outlive_python(group: dist.ProcessGroup) -> None:
    """Never give a group back: as Python ends, gloo's would wait for peers that wait for this process to end."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def new_part(group: dist.ProcessGroup, ranks: Sequence[int]) -> dist.ProcessGroup:
    """Make such a group anew, for collectives that some of the ranks may leave out in the end."""
    members = _members(group, ranks)
    with _named(members):  # no rank outside of the group needs to come, nor may it be waited for
        made: dist.ProcessGroup = dist.new_group(
            list(members), timeout=timeout_of(group), use_local_synchronization=True
        )
    return made


def _members(group: dist.ProcessGroup, ranks: Sequence[int]) -> tuple[int, ...]:
    everybody = dist.get_process_group_ranks(group)
    return tuple(everybody[rank] for rank in ranks)


@contextmanager
def _named(members: tuple[int, ...]) -> Iterator[None]:
    """Give the group the same name on every rank.

    Torch's has the number of groups that a rank is in, in which ranks may be unlike (the first and last stages of a
    pipeline are in more): then each waits for ranks under a name of its own (torch 2.4 to 2.13).
    """
    c10d: Any = dist.distributed_c10d
    if not hasattr(c10d, "_hash_ranks_to_str"):
        yield
        return
    _made[members] += 1
    name, original = f"ds_silent_{_made[members]}_{'_'.join(map(str, members))}", c10d._hash_ranks_to_str
    c10d._hash_ranks_to_str = lambda ranks: hashlib.sha1(name.encode(), usedforsecurity=False).hexdigest()
    try:
        yield
    finally:
        c10d._hash_ranks_to_str = original


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """Return the time-out that a group was made with; None where torch does not tell (known: 2.4 to 2.15).

    The default of new groups may be many times longer. A group of our own takes the training's, so that no rank gives
    up earlier here, or waits longer.
    """
    try:
        devices: Any = group._device_types
        backends: Any = [group._get_backend(torch.device(kind)) for kind in {one.type for one in devices}]
        longest: timedelta = max(backend.options._timeout for backend in backends)
        return longest
    except Exception as error:
        logger.debug("ds_silent: the default time-out of new groups is used: %s", error)
        return None
