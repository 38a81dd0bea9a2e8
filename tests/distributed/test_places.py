"""Which host and device a rank is on: gathered once, and said where it helps."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ds_silent
from ds_silent.config import ConfigError
from ds_silent.distributed import places as places_module
from ds_silent.distributed.agreement import store_of_all
from ds_silent.distributed.places import AT_ONCE, PlaceBoard, Places, own_place, read_groups, spot
from ds_silent.records import Event, Place, from_json
from ds_silent.sinks.jsonl import read_event_records
from ds_silent.sinks.run_directory import process_of
from tests.support.distributed import run_distributed


def cluster(hosts: int, per_host: int = 8, groups: dict[str, str] | None = None) -> Places:
    ranks = range(hosts * per_host)
    of = [(f"node{rank // per_host:04d}", rank % per_host) for rank in ranks]
    found = [Place(rank, rank, host, local, f"cuda:{local}", f"{rank:08x}") for rank, (host, local) in enumerate(of)]
    return Places(found, groups or {})


def told(places: Places, *ranks: int, message: str = "Odd.") -> Event:
    return places.told(Event(3, "outlier-rank", "error", ranks, None, None, None, message, "Look."))


GROUPS = {f"node{host:04d}": "AB"[host // 2] for host in range(4)}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("The loss of rank 12 is off.", "The loss of rank 12 (node0001:4) is off."),
        ("Rank 12 has rank 12.", "Rank 12 (node0001:4) has rank 12."),
        ("Rank 12's gradient is off.", "Rank 12's gradient is off. Rank 12 is node0001:4."),
        ("Rank 123 and rank 12.5 are off.", "Rank 123 and rank 12.5 are off. Rank 12 is node0001:4."),
        ("It is off on rank 12.", "It is off on rank 12 (node0001:4)."),
        ("Odd.", "Odd. Rank 12 is node0001:4."),
    ],
)
def test_one_rank_is_said_with_its_place(message: str, expected: str) -> None:
    event = told(cluster(4), 12, message=message)
    assert event.message == expected
    assert event.places == (Place(12, 12, "node0001", 4, "cuda:4", "0000000c"),)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ((8, 9), "All on node0001."),
        (tuple(range(8, 16)), "All on node0001."),
        ((7, 8), "They are rank 7 (node0000:7), rank 8 (node0001:0)."),
        (tuple(range(9)), "They are on 2 of 4 hosts, most of them on node0000 (8), node0001 (1)."),
        (tuple(range(31)), "They are on 4 of 4 hosts, most of them on node0000 (8), node0001 (8), node0002 (8)."),
    ],
)
def test_several_ranks_are_said_by_what_they_have_in_common(ranks: tuple[int, ...], expected: str) -> None:
    event = told(cluster(4), *ranks)
    assert event.message == f"Odd. {expected}"
    assert event.places is not None
    assert [place.rank for place in event.places] == list(ranks[:8])


def test_ranks_of_one_switch_group_are_said_to_be_there() -> None:
    places = cluster(4, groups=GROUPS)
    assert told(places, 7, 8).message == "Odd. All in switch group A: rank 7 (node0000:7), rank 8 (node0001:0)."
    assert told(places, *range(16, 32)).message == (
        "Odd. All in switch group B: on 2 of 4 hosts, most of them on node0002 (8), node0003 (8)."
    )
    assert told(places, 8, 9).message == "Odd. All on node0001."
    assert told(places, 8, 16).message == "Odd. They are rank 8 (node0001:0), rank 16 (node0002:0)."
    assert [place.group for place in told(places, 8, 16).places or ()] == ["A", "B"]
    everywhere = cluster(4, groups=dict.fromkeys(GROUPS, "A"))
    assert told(everywhere, 7, 8).message == "Odd. They are rank 7 (node0000:7), rank 8 (node0001:0)."


def test_hosts_that_the_map_does_not_name_are_in_no_group() -> None:
    places = cluster(4, groups={"node0000": "A", "node0001.cluster": "A", "node0099": "C"})
    assert places.without_group == ["node0001", "node0002", "node0003"]
    assert told(places, 8, 16).message == "Odd. They are rank 8 (node0001:0), rank 16 (node0002:0)."
    full = [replace(place, host=f"{place.host}.cluster.local") for place in cluster(2).places]
    assert [place.group for place in Places(full, GROUPS).places] == ["A"] * 16


def test_where_nothing_is_learnt_from_it_nothing_is_said() -> None:
    places = cluster(4)
    for ranks in ((), tuple(range(32)), (99,)):
        event = told(places, *ranks)
        assert (event.message, event.places) == ("Odd.", None)
    one_host = cluster(1)
    assert told(one_host, 3).message == told(one_host, 3, 4).message == "Odd."
    assert [place.device for place in told(one_host, 3, 4).places or ()] == ["cuda:3", "cuda:4"]
    assert told(Places([], {}), 0).places is None


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        (Place(0, 0, "a", 3, "cuda:0", None), "a:3"),  # each process sees one device, as its first
        (Place(0, 0, "a", None, "npu:5", None), "a:5"),
        (Place(0, 0, "a", None, "cpu", None), "a"),
    ],
)
def test_a_spot_is_the_host_and_a_number_on_it(place: Place, expected: str) -> None:
    assert spot(place) == expected


@pytest.mark.parametrize(
    ("name", "value", "rank"), [("LOCAL_RANK", "3", 3), ("SLURM_LOCALID", "0", 0), ("X", "1", None)]
)
def test_the_local_rank_is_the_launcher_s(
    name: str, value: str, rank: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for other in places_module.LOCAL_RANKS:
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, value)
    assert own_place() == (socket.gethostname(), rank, "cpu", None)


def test_a_device_that_breaks_costs_its_name_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places_module.device, "serial", lambda: 1 / 0)
    assert own_place()[2:] == ("unknown", None)


def test_ranks_json_holds_a_rank_per_line() -> None:
    places = cluster(2, per_host=2, groups={"node0000": "A"})
    lines = places.text().splitlines()
    assert len(lines) == 4 + 2
    found = json.loads(places.text())
    assert (found["version"], found["world_size"], found["hosts"]) == (1, 4, 2)
    assert tuple(from_json(Place, one) for one in found["ranks"]) == places.places
    assert found["ranks"][1] == {
        "rank": 1,
        "global_rank": 1,
        "host": "node0000",
        "local_rank": 1,
        "device": "cuda:1",
        "serial": "00000001",
        "group": "A",
    }


# -- the user's map ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, r"cannot be read \(No such file or directory\); give the path of a JSON file on the first rank's host"),
        ("", "is no JSON"),
        ("{'node1': 'A'}", "is no JSON"),
        ("\xff", "is no JSON"),
        ("[" * 99_999, "is no JSON"),
        ("[]", r"must hold an object with a host or more, got \[\]"),
        ("{}", "must hold an object with a host or more, got"),
        ('"A"', "must hold an object with a host or more"),
        ('{"node1": 3}', 'the switch group of "node1" must be a name of 1 to 64 characters, got 3; write'),
        ('{"node1": " "}', 'the switch group of "node1" must be a name'),
        ('{"node1": ["A"]}', 'the switch group of "node1" must be a name'),
        (json.dumps({"node1": "A" * 65}), 'the switch group of "node1" must be a name'),
        ('{"node1": "A", "node2": "B", "node1": "C"}', 'names "node1" twice; name each host once'),
    ],
)
def test_a_wrong_map_is_one_sentence(content: str | None, why: str, tmp_path: Path) -> None:
    path = tmp_path / "switches.json"
    if content is not None:
        path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=why) as caught:
        read_groups(str(path))
    message = str(caught.value)
    assert message.startswith(f'silent_consistency.places "{path}"')
    assert "\n" not in message
    assert len(message) < 400


def test_a_map_is_read_as_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "switches.json"
    path.write_text(json.dumps(GROUPS))
    assert read_groups(str(path)) == GROUPS
    assert read_groups(None) == {}


# -- on real ranks -----------------------------------------------------------------------------------------------------


def observed(directory: str) -> dict[str, Any]:
    """Two ranks that say they are on two hosts; the first attempt has a map that only rank 0 finds wrong."""
    rank = dist.get_rank()
    name = f"host{rank}"
    socket.gethostname = lambda: name  # type: ignore[assignment]
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    output, switches = Path(directory, "run"), Path(directory, f"switches-{rank}.json")  # rank 1 has no such file
    block = {"output_dir": str(output), "tensorboard": False, "preflight": False, "places": str(switches)}
    with pytest.raises(ConfigError, match=r"switch group of \"host0\" must be a name"):
        ds_silent.attach(model, block, optimizer=optimizer)
    if rank == 0:
        switches.write_text('{"host0": "A"}')
    store = store_of_all()
    with ds_silent.observe(model, optimizer, config=block) as observer:
        dist.barrier()
        left = [store.check([f"{board}/{rank}"]) for board in boards]
        for _ in range(2):
            model(torch.ones(3, 4) * (rank + 1)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if rank == 0:
            observer.report(Event(2, "outlier-rank", "info", (1,), None, None, None, "See rank 1.", ""))
    if rank:
        return {"left": left}
    events = list(read_event_records(output / "events.jsonl"))
    return {"left": left, "ranks": json.loads((output / "ranks.json").read_text()), "events": events}


boards: list[str] = []  # names of the boards of this process


class Watched(PlaceBoard):
    def __init__(self, group: dist.ProcessGroup):
        super().__init__(group)
        boards.append(self._name)


def watched(directory: str) -> dict[str, Any]:
    import ds_silent.observing.observe

    ds_silent.observing.observe.PlaceBoard = Watched  # type: ignore[misc]
    return observed(directory)


def test_places_are_gathered_once_and_nothing_is_left_behind(tmp_path: Path) -> None:
    (tmp_path / "switches-0.json").write_text('{"host0": 1}')
    first, second = run_distributed(watched, 2, (str(tmp_path),))
    assert first["left"] == second["left"] == [False]  # a training that is refused leaves nothing
    assert [(r["rank"], r["host"], r["local_rank"], r["device"]) for r in first["ranks"]["ranks"]] == [
        (0, "host0", 0, "cpu"),
        (1, "host1", 1, "cpu"),
    ]
    assert [r.get("group") for r in first["ranks"]["ranks"]] == ["A", None]
    seen = next(event for event in first["events"] if event.message.startswith("See"))
    assert seen.message == "See rank 1 (host1:1)."
    assert [place.host for place in seen.places] == ["host1"]


class OneProcess(PlaceBoard):
    """The board of 16,384 ranks, over a store that counts what it is asked."""

    def __init__(self, ranks: int, store: Any):
        self._members, self._me, self._name, self._store = tuple(range(ranks)), 0, "places", store


class Counting:
    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}
        self.asked = 0

    def set(self, key: str, value: str) -> None:
        self.held[key] = value.encode()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.asked += 1
        return [self.held[key] for key in keys]

    def delete_key(self, key: str) -> None:
        del self.held[key]


def test_sixteen_thousand_ranks_are_read_with_a_few_questions() -> None:
    store, ranks = Counting(), 16_384
    process = process_of(os.getpid())
    for rank in range(ranks):
        own = [f"node{rank // 8:04d}", rank % 8, f"cuda:{rank % 8}", "0" * 36, process]
        store.set(f"places/{rank}", json.dumps(own))
    assert max(map(len, store.held.values())) < 200
    began = time.process_time()
    places = Places(OneProcess(ranks, store).read(), {})
    text = places.text()
    seconds = time.process_time() - began
    assert store.asked == ranks // AT_ONCE
    assert (len(places.places), places.hosts) == (ranks, 2048)
    assert len(text) < 170 * ranks
    assert seconds < 5.0  # 0.3 s where it is quiet


def test_a_store_that_is_gone_costs_the_places_alone(caplog: pytest.LogCaptureFixture) -> None:
    board = OneProcess(4, Counting())
    board.leave({})
    assert board.read() == ()
    assert "it is not known where the ranks run: KeyError" in caplog.text
    assert os.environ is not None
