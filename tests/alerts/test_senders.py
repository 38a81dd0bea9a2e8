"""Alerts arrive at real servers of this machine, and servers that do wrong delay nobody."""

from __future__ import annotations

import json
import logging
import random
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ds_silent.alerts import senders, sink
from ds_silent.alerts.message import Alert, alert_of, payload, plain_text
from ds_silent.alerts.senders import NotSent, sender_of
from ds_silent.alerts.sink import Alerts, Delivery
from ds_silent.config import AlertConfig
from ds_silent.config.destination import parse_destination
from ds_silent.records import Event
from tests.alerts.servers import FINE, SECRET, an_alert, closes, drips, hangs, http_server, mail_server, slow, status
from tests.sinks.example_records import event, full_record
from tests.support.distributed import wait_for


def alerts_to(*to: str, level: str = "warning", **more: Any) -> Alerts:
    wanted = [AlertConfig(to=each, level=level, **more) for each in to]  # type: ignore[arg-type]
    return Alerts(wanted, lambda: "runs/my-run")


def test_an_event_arrives_within_two_seconds_though_another_server_hangs() -> None:
    with http_server() as fine, http_server(hangs()) as hanging:
        alerts = alerts_to(f"{hanging.address}/{SECRET}", f"{fine.address}/x/{SECRET}", timeout=2)
        began = time.monotonic()
        alerts.write_event(event(12))
        assert time.monotonic() - began < 0.1
        fine.wait(1)
        assert fine.times[0] - began < 2.0
        hanging.wait(1)
        began = time.monotonic()
        alerts.close()
        assert time.monotonic() - began < sink.END + 1.0
    assert fine.paths == [f"/x/{SECRET}"]
    assert fine.headers[0]["Content-Type"] == "application/json"
    assert fine.bodies == [
        {
            "source": "ds_silent",
            "title": "ERROR: duplicate-data at step 12, ranks 0, 3",
            "text": "These ranks read the same rows.",
            "level": "error",
            "kind": "duplicate-data",
            "run": "runs/my-run",
            "step": 12,
            "ranks": [0, 3],
            "hosts": [],
            "remedy": "Give each rank its own sampler.",
            "left_out": 0,
        }
    ]


def closed_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{found.getsockname()[1]}"


def failure(address: str, seconds: float = 0.5) -> NotSent:
    with pytest.raises(NotSent) as caught:
        sender_of(parse_destination(f"{address}/{SECRET}?token={SECRET}"), seconds)(an_alert())
    assert SECRET not in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("answer", "why", "again"),
    [
        (status(500), "the server answered 500", True),
        (status(404), "the server answered 404", False),
        (status(403), "the server answered 403", False),
        (status(429, Retry_After="7"), "the server answered 429", True),
        (status(503, Retry_After="Fri, 31 Dec 1999 23:59:59 GMT"), "the server answered 503", True),
        (status(302, Location=f"http://127.0.0.1:1/{SECRET}"), "a redirection, which is not followed", False),
        (status(307, Location=f"http://127.0.0.1:1/{SECRET}"), "a redirection, which is not followed", False),
        (hangs(3.0), "the server did not answer within 0.5 s", True),
        (drips, "the server did not answer within 0.5 s", True),
        (closes, "the server could not be reached", True),
    ],
)
def test_servers_that_do_wrong(answer: Callable[..., None], why: str, again: bool) -> None:
    waits = 0.5 if "within" in why else 20.0  # a busy machine answers late
    with http_server(answer) as server:
        began = time.monotonic()
        error = failure(server.address, waits)
        assert time.monotonic() - began < waits + 1.5
        assert len(server.bodies) == 1
    assert why in str(error)
    assert error.again is again
    assert error.after == {status(429): 7.0}.get(answer, 7.0 if "429" in why else 0.0 if "503" in why else None)


def test_nobody_listens_and_nobody_is_there() -> None:
    assert str(failure(closed_port())).startswith("the server could not be reached: ConnectionRefusedError")
    assert str(failure("http://no-such-host.invalid", 5.0)).startswith("the server ")


def test_a_slow_server_is_waited_for_and_a_user_is_sent_as_a_header() -> None:
    with http_server(slow(0.3)) as server:
        address = server.address.replace("://", f"://me:{SECRET}@")
        sender_of(parse_destination(address + "/x"), 5.0)(an_alert())
    assert server.headers[0]["Authorization"].startswith("Basic ")
    assert SECRET not in server.headers[0]["Host"]


def test_repeated_until_it_is_taken(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(sink, "PAUSE", 0.01)
    drawn = random.getstate()
    with http_server(status(500), closes, status(429, Retry_After="0.3"), FINE) as server:
        alerts = alerts_to(f"{server.address}/{SECRET}")
        with caplog.at_level(logging.DEBUG):
            alerts.write_event(event(12))
            server.wait(4)
            alerts.close()
    assert random.getstate() == drawn  # the script's numbers are its own
    assert len(server.bodies) == 4
    assert server.times[3] - server.times[2] >= 0.3
    assert "not sent" not in caplog.text
    assert SECRET not in caplog.text


def test_given_up_with_one_sentence(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(sink, "PAUSE", 0.01)
    with http_server(status(500)) as server, caplog.at_level(logging.DEBUG):
        alerts = alerts_to(f"{server.address}/{SECRET}")
        alerts.write_event(event(12))
        until = time.monotonic() + 10
        while "not sent" not in caplog.text and time.monotonic() < until:
            time.sleep(0.02)
        alerts.close()
    assert len(server.bodies) == sink.TRIES
    [said] = [record.getMessage() for record in caplog.records if record.name == "ds_silent"]
    why = "the server answered 500 (5 tries)"
    assert said == f"ds_silent: an alert to {server.address}/… was not sent, the training goes on: {why}"
    assert SECRET not in caplog.text


def test_the_end_of_a_run_waits_for_its_last_alert_but_not_for_ever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with http_server(slow(0.5)) as server:
        alerts = alerts_to(server.address)
        alerts.write_event(event(12))
        alerts.close()
        assert len(server.bodies) == 1
    monkeypatch.setattr("ds_silent.alerts.sink.END", 0.5)
    with http_server(hangs()) as first, http_server(hangs()) as second:
        alerts = alerts_to(f"{first.address}/{SECRET}", f"{second.address}/{SECRET}", timeout=60)
        for step in range(3):
            alerts.write_event(event(step, "repaired"))
        first.wait(1)
        second.wait(1)
        began = time.monotonic()
        alerts.close()
        assert time.monotonic() - began < 1.5  # both together
    said = [r.getMessage() for r in caplog.records if "were not sent" in r.getMessage()]
    assert [s.split("/…")[0].split(" to ")[0] for s in said] == ["ds_silent: 3 alerts"] * 2
    assert SECRET not in caplog.text


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_at_most_n_an_hour_and_the_next_one_counts_what_was_left_out() -> None:
    clock, sent = Clock(), []
    one = Delivery("somewhere", 2, clock=clock)
    for step in range(1, 6):
        one.put(replace(an_alert(), step=step), sent.append)
        wait_for(lambda: not one._waiting)
    wait_for(lambda: len(sent) == 2 and one._left_out == 3)
    assert [alert.step for alert in sent] == [1, 2]
    clock.now = 3_599.0
    one.put(replace(an_alert(), step=6), sent.append)
    wait_for(lambda: one._left_out == 4)
    clock.now = 3_601.0  # the thread sleeps by the wall's clock: the next one wakes it
    one.put(replace(an_alert(), step=7), sent.append)
    wait_for(lambda: len(sent) == 3)
    assert (sent[2].step, sent[2].left_out) == (7, 4)
    assert "and: 4 more events before this one" in plain_text(sent[2])
    one.stop()
    one.join(sink.END)
    assert len(sent) == 3


def test_what_was_left_out_is_told_when_the_hour_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds_silent.alerts.sink.HOUR", 0.4)
    sent: list[Alert] = []
    one = Delivery("somewhere", 1)
    for step in range(1, 14):
        one.put(replace(an_alert(), step=step), sent.append)
    wait_for(lambda: len(sent) == 2)
    one.stop()
    one.join(sink.END)
    assert sent[1].title == "12 more events, the last one replica-drift at step 13"


def test_a_queue_that_is_full_counts_too() -> None:
    with http_server(hangs()) as server:
        alerts = alerts_to(server.address, at_most_per_hour=1000)
        began = time.monotonic()
        for step in range(5_000):
            alerts.write_event(event(step, "repaired"))
        assert time.monotonic() - began < 2.0
        [one] = alerts._destinations
        assert len(one.delivery._waiting) <= sink.LONGEST
        server.wait(1)
        counted = server.bodies[0]["left_out"] + one.delivery._left_out
        assert counted == 5_000 - len(one.delivery._waiting) - 1
        one.delivery.stop()
        one.delivery.join(0.0)


def test_an_episode_is_told_once_and_its_end() -> None:
    def said(step: int, message: str, severity: str = "error", where: str = "layer 1") -> Event:
        phase = {"Still": "ongoing", "Ended": "ended"}.get(message[:5], "started")
        return replace(event(step, message=message), severity=severity, where=where, phase=phase)  # type: ignore[arg-type]

    with http_server() as server:
        alerts = alerts_to(server.address)
        alerts.write_event(said(1, "They differ."))
        alerts.write_event(said(129, "Still, since step 1: They differ."))
        alerts.write_event(said(130, "They differ.", where="layer 2"))
        alerts.write_event(said(131, "A note.", severity="info"))
        alerts.write_event(said(140, "Ended: duplicate-data, from step 1 to step 139.", severity="info"))
        alerts.write_event(
            said(141, "Ended: duplicate-data, from step 1 to step 139.", severity="info", where="layer 9")
        )
        alerts.write_event(said(200, "They differ."))
        server.wait(4)
        alerts.close()
    assert [body["step"] for body in server.bodies] == [1, 130, 140, 200]
    assert [body["level"] for body in server.bodies] == ["error", "error", "info", "error"]


def test_what_the_services_get() -> None:
    alert = an_alert()
    assert alert.hosts == ("node0007",)
    slack = payload("slack", alert)["text"]
    assert slack.startswith("*ERROR: replica-drift at step 12, ranks 3, 4*\nThey &lt;differ&gt; &amp; @all.")
    assert "hosts: node0007" in slack
    discord = payload("discord", alert)
    assert discord["allowed_mentions"] == {"parse": []}
    assert {"name": "ranks", "value": "3, 4", "inline": True} in discord["embeds"][0]["fields"]
    long = replace(alert, text="x" * 1_500, remedy="y" * 1_500)
    assert len(payload("discord", long)["embeds"][0]["description"]) < 4_096
    [attachment] = payload("teams", alert)["attachments"]
    assert attachment["contentType"] == "application/vnd.microsoft.card.adaptive"
    assert attachment["content"]["body"][-1]["facts"][0] == {"title": "run", "value": "runs/my-run"}
    json.dumps([payload(form, alert) for form in ("slack", "discord", "teams", "json")], allow_nan=False)


def test_hostile_names_stay_on_their_line() -> None:
    hostile = replace(event(12, message="a\r\nBcc: x@example.org\x1b[2J" + "z" * 9_000), kind="odd\nkind")  # type: ignore[arg-type]
    alert = alert_of(hostile, "runs/\n\x1b[31m")
    text = f"{alert.title}{alert.text}{alert.run}"
    assert all(character.isprintable() for character in text)
    assert len(alert.text) <= 1_500
    with mail_server() as server:
        sender_of(parse_destination(f"smtp://127.0.0.1:{server.port}/a@example.org"), 5.0)(alert)
        [(_, envelope)] = server.taken
    assert envelope.rcpt_tos == ["a@example.org"]


def test_tries_that_never_end_are_not_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    before = sum(each.name == senders.TRY for each in threading.enumerate())
    monkeypatch.setattr(senders, "MOST_TRIES", before + 2)
    with http_server(drips) as server:
        said = [str(failure(server.address, 0.2)) for _ in range(3)]
    assert said == ["the server did not answer within 0.2 s"] * 2 + ["earlier tries have not ended yet"]


def test_deepspeeds_monitor_gets_the_number_of_events() -> None:
    points: list[Any] = []
    alerts = Alerts([AlertConfig(to="monitor")], lambda: "run", monitor_write=points.extend)  # type: ignore[arg-type]
    alerts.write(full_record(2))
    alerts.write_event(event(2))
    alerts.write_event(replace(event(3), severity="info"))
    alerts.write(full_record(4))
    alerts.write_event(event(4))
    alerts.close()
    assert points == [("silent/events/error", 1.0, 128), ("silent/events/error", 2.0, 256)]
