"""Find on which host and device each rank runs, for the events that name ranks.

    board = PlaceBoard(group)                     # every rank
    board.leave(process_of(os.getpid()))          # ... before something that all ranks come to
    places = Places(board.read(), {})             # behind it: the writing rank alone
    board.processes                               # what the ranks of this host have left with it, by rank
    board.forget()                                # every rank, once the writing rank has read
    places.told(event)                            # the event with hosts and devices

Each rank leaves one short string in the process group's key-value store. No collective.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ds_silent import device
from ds_silent.config import BLOCK, ConfigError
from ds_silent.distributed.agreement import meeting, store_of_all
from ds_silent.distributed.parts import SHOWN_RANKS, listed, ranks_of
from ds_silent.records import Event, Place, to_json
from ds_silent.text import shown

logger = logging.getLogger("ds_silent")
LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
"""Where launchers say it; the first that is there counts."""
AT_ONCE = 1024  # strings that are asked of the store together
SHOWN_HOSTS = 3
LONGEST_NAME = 64  # characters of a host, as Linux has them, and of a group
_Own = tuple[str, int | None, str, str | None]


def own_place() -> _Own:
    """Return host, local rank, device and its serial, of this process."""
    told = next((os.environ[name] for name in LOCAL_RANKS if name in os.environ), "")
    which, serial = "unknown", None
    try:
        which, serial = device.name(), device.serial()
    except Exception as error:  # a driver's own; nothing that a training needs
        logger.debug("ds_silent: this rank's device does not say which it is: %s", error)
    return socket.gethostname()[:LONGEST_NAME], int(told) if told.isdecimal() else None, which, serial


class PlaceBoard:
    """Exchange the places of a group's ranks. What fails here is logged, and costs the places alone."""

    processes: Mapping[int, Mapping[str, Any]] = {}

    def __init__(self, group: dist.ProcessGroup):
        self._members = tuple(dist.get_process_group_ranks(group))
        self._me = dist.get_rank(group)
        self._name = meeting("places", self._members)
        self._store: Any = store_of_all() if len(self._members) > 1 else None

    def leave(self, process: Mapping[str, Any]) -> None:
        """Leave this rank's place, and what names its process."""
        if self._store is not None:
            self._tried(lambda: self._store.set(self._key(self._me), json.dumps([*own_place(), process])))

    def read(self) -> tuple[Place, ...]:
        """Read all ranks' places, once all have left theirs; none where that is not known."""
        read: list[Sequence[Any]] = []
        self._tried(lambda: read.extend(self._read()))
        host = own_place()[0]
        self.processes = {rank: one[4] for rank, one in enumerate(read) if one[0] == host and len(one) > 4}
        return tuple(
            Place(rank, whole, *one[:4]) for rank, (whole, one) in enumerate(zip(self._members, read, strict=False))
        )

    def forget(self) -> None:
        """Free the memory of the rank that holds the store."""
        if self._store is not None:
            self._tried(lambda: self._store.delete_key(self._key(self._me)))

    def _read(self) -> Sequence[Sequence[Any]]:
        if len(self._members) == 1:
            return [own_place()]
        if self._store is None:
            return []
        everybody, read = range(len(self._members)), []
        for first in everybody[::AT_ONCE]:
            keys = [self._key(rank) for rank in everybody[first : first + AT_ONCE]]
            read += [json.loads(said) for said in self._store.multi_get(keys)]
        return read

    @staticmethod
    def _tried(act: Callable[[], object]) -> None:
        try:
            act()
        except Exception as error:  # the rank that holds the store is gone
            logger.warning("ds_silent: it is not known where the ranks run: %s: %s", type(error).__name__, error)

    def _key(self, rank: int) -> str:
        return f"{self._name}/{rank}"


class Places:
    """Hold the places of all ranks of a group, by rank; empty where they are not known.

    Args:
        groups: by host, the switch group or whatever larger unit it is in; {} where the user has given none.
    """

    def __init__(self, places: Sequence[Place], groups: Mapping[str, str]):
        found = {place.host: _group_of(place.host, groups) for place in places}
        self.places = tuple(dataclasses.replace(place, group=found[place.host]) for place in places)
        self.hosts = len(found)
        self.without_group = sorted(host for host, group in found.items() if group is None) if groups else []
        self._groups = len({group for group in found.values() if group is not None})

    def text(self) -> str:
        """Return the text of ``ranks.json``, a rank per line."""
        lines = ",\n".join(json.dumps(to_json(place)) for place in self.places)
        return f'{{"version": 1, "world_size": {len(self.places)}, "hosts": {self.hosts}, "ranks": [\n{lines}\n]}}\n'

    def told(self, event: Event) -> Event:
        """Add to an event the places of the ranks that it names, in its message too where there are several hosts.

        About no rank, or about all, it stays as it is.
        """
        ranks = event.ranks
        if not ranks or len(ranks) >= len(self.places) or max(ranks) >= len(self.places):
            return event
        message = event.message if self.hosts == 1 else self._message(event.message, ranks)
        return dataclasses.replace(
            event, places=tuple(self.places[rank] for rank in ranks[:SHOWN_RANKS]), message=message
        )

    def _message(self, message: str, ranks: tuple[int, ...]) -> str:
        if len(ranks) == 1:
            where, spoken = spot(self.places[ranks[0]]), rf"\b([Rr]ank {ranks[0]})\b(?!['’.]\w)"
            named, count = re.subn(spoken, lambda found: f"{found[1]} ({where})", message, count=1)
            return named if count else f"{message} Rank {ranks[0]} is {where}."
        hosts = Counter(self.places[rank].host for rank in ranks)
        if len(hosts) == 1:
            return f"{message} All on {next(iter(hosts))}."
        if len(ranks) <= SHOWN_RANKS:
            each = ", ".join(f"rank {rank} ({spot(self.places[rank])})" for rank in ranks)
        else:
            most = ", ".join(f"{host} ({count})" for host, count in hosts.most_common(SHOWN_HOSTS))
            each = f"on {len(hosts)} of {self.hosts} hosts, most of them on {most}"
        groups = {self.places[rank].group for rank in ranks}
        if len(groups) == 1 and None not in groups and self._groups + bool(self.without_group) > 1:
            return f"{message} All in switch group {next(iter(groups))}: {each}."
        return f"{message} They are {each}."


def spot(place: Place) -> str:
    """Name a place, as ``node0087:3``: the local rank, or else the number of the device."""
    number = str(place.local_rank) if place.local_rank is not None else place.device.partition(":")[2]
    return f"{place.host}:{number}" if number else place.host


def read_groups(path: str | None) -> dict[str, str]:
    """Read the user's map from host to switch group; empty without one.

    Raises:
        ConfigError: it cannot be read, or is no such map.
    """
    if path is None:
        return {}
    key = f"{BLOCK}.places {shown(path, 240)}"  # the whole of it, where a path is of a usual length
    remedy = 'write {"node0001": "A", "node0002": "A", "node0003": "B"}'
    try:
        held = json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=_Pairs)
    except OSError as error:
        raise ConfigError(
            f"{key} cannot be read ({error.strerror or type(error).__name__}); "
            "give the path of a JSON file on the first rank's host, or leave it out"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{key} is no JSON ({shown(str(error))}); {remedy}") from None
    if not isinstance(held, _Pairs) or not held:
        raise ConfigError(f"{key} must hold an object with a host or more, got {shown(held)}; {remedy}")
    twice = [host for host, count in Counter(host for host, _ in held).items() if count > 1]
    if twice:
        raise ConfigError(
            f"{key} names {listed([shown(host) for host in twice], SHOWN_HOSTS, 'hosts')} twice; name each host once"
        )
    for host, group in held:
        if not isinstance(group, str) or not group.strip() or len(group) > LONGEST_NAME:
            raise ConfigError(
                f"{key}: the switch group of {shown(host)} must be a name of 1 to {LONGEST_NAME} characters, got "
                f"{shown(group)}; {remedy}"
            )
    return dict(held)


class _Pairs(list[tuple[str, Any]]):
    """Hold a JSON object as it is written, a key that comes twice included."""


def _group_of(host: str, groups: Mapping[str, str]) -> str | None:
    """Find a host's group by its name, or by what stands before its first dot."""
    return groups.get(host, groups.get(host.partition(".")[0]))


def in_whole(event: Event, members: tuple[int, ...]) -> Event:
    """Say which ranks of the whole training an event of a group that is a part of it names.

    ``members``: of the group, as the whole training counts its ranks.
    """
    if not event.ranks or members == tuple(range(len(members))):
        return event
    whole = tuple(members[rank] for rank in event.ranks)
    is_one = "is" if len(whole) == 1 else "are"
    those = ranks_of(event.ranks).capitalize()
    said = f"{those} of this data-parallel group {is_one} {ranks_of(whole)} of the whole training."
    return dataclasses.replace(event, global_ranks=whole, message=f"{event.message} {said}")
