"""Alerts by mail: a server that takes them, refuses them, hangs or drips."""

from __future__ import annotations

import random
import re
import socket
import threading
import time
from contextlib import suppress
from typing import Any

import pytest

from ds_silent.alerts.senders import NotSent, sender_of
from ds_silent.alerts.sink import Alerts
from ds_silent.config import AlertConfig
from ds_silent.config.destination import parse_destination
from tests.alerts.servers import SECRET, an_alert, mail_server
from tests.sinks.example_records import event
from tests.support.distributed import wait_for


def authenticator(server: Any, session: Any, envelope: Any, mechanism: str, data: Any) -> Any:
    from aiosmtpd.smtp import AuthResult

    return AuthResult(success=(data.login, data.password) == (b"me", SECRET.encode()), handled=False)


def test_a_mail_arrives() -> None:
    drawn = random.getstate()
    with mail_server() as server:
        to = f"smtp://127.0.0.1:{server.port}/a@example.org,b@example.org?from=training@example.org"
        alerts = Alerts([AlertConfig(to=to)], lambda: "runs/my-run")  # type: ignore[arg-type]
        began = time.monotonic()
        alerts.write_event(event(12))
        wait_for(lambda: bool(server.taken))
        assert time.monotonic() - began < 2.0
        alerts.close()
        [(_, envelope)] = server.taken
    assert random.getstate() == drawn  # the script's numbers are its own
    assert (envelope.mail_from, envelope.rcpt_tos) == ("training@example.org", ["a@example.org", "b@example.org"])
    content = envelope.content.decode()
    assert re.search(r"^Message-ID: <[0-9a-f]{32}@example\.org>\s*$", content, re.MULTILINE)
    assert "Subject: [ds_silent] ERROR: duplicate-data at step 12, ranks 0, 3" in content
    assert "What to do: Give each rank its own sampler." in content


@pytest.mark.parametrize(
    ("password", "why"), [(SECRET, None), (f"{SECRET}x", "did not accept the user and password (535)")]
)
def test_a_password(password: str, why: str | None) -> None:
    with mail_server(authenticator=authenticator, auth_require_tls=False, auth_required=True) as server:
        send = sender_of(parse_destination(f"smtp://me:{password}@127.0.0.1:{server.port}/a@example.org"), 5.0)
        if why is None:
            send(an_alert())
        else:
            with pytest.raises(NotSent) as caught:
                send(an_alert())
            assert why in str(caught.value)
            assert not caught.value.again
            assert SECRET not in str(caught.value)
        assert len(server.taken) == (why is None)


def test_a_password_is_not_sent_in_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds_silent.config.destination._LOOPBACK", ())
    with mail_server(authenticator=authenticator, auth_require_tls=False) as server:
        send = sender_of(parse_destination(f"smtp://me:{SECRET}@127.0.0.1:{server.port}/a@example.org"), 5.0)
        with pytest.raises(NotSent, match="a password is not sent without"):
            send(an_alert())
        assert not server.taken


@pytest.mark.parametrize(("reply", "again"), [("451 later", True), ("554 no", False)])
def test_a_mail_that_is_refused(reply: str, again: bool) -> None:
    with mail_server(replies=(f"{reply} {SECRET}",)) as server:
        with pytest.raises(NotSent, match=rf"the server answered {reply[:3]}$") as caught:
            sender_of(parse_destination(f"smtp://127.0.0.1:{server.port}/a@example.org"), 5.0)(an_alert())
        assert caught.value.again is again


def test_a_mail_server_that_hangs() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        with pytest.raises(NotSent, match=r"did not answer within 0\.5 s"):
            sender_of(parse_destination(f"smtp://127.0.0.1:{silent.getsockname()[1]}/a@example.org"), 0.5)(an_alert())
        assert time.monotonic() - began < 2.0


def test_a_mail_server_that_drips() -> None:
    def drip(server: socket.socket) -> None:
        with suppress(OSError):
            taken, _ = server.accept()
            for _ in range(300):
                taken.sendall(b"2")
                time.sleep(0.1)

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=drip, args=(server,), daemon=True).start()
        began = time.monotonic()
        with pytest.raises(NotSent, match=r"did not answer within 0\.5 s"):
            sender_of(parse_destination(f"smtp://127.0.0.1:{server.getsockname()[1]}/a@example.org"), 0.5)(an_alert())
        assert time.monotonic() - began < 2.0
