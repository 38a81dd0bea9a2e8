"""Alerts to a command and by apprise: they arrive, no secret shows, and the program ends in time."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ds_silent.alerts.message import Alert
from ds_silent.alerts.senders import NotSent, sender_of
from ds_silent.config.destination import parse_destination
from tests.alerts.servers import SECRET, an_alert, drips, http_server


def by_apprise(server: Any, seconds: float, alert: Alert | None = None) -> None:
    address = server.address.replace("http://", f"apprise:json://me:{SECRET}@")
    sender_of(parse_destination(f"{address}/{SECRET}"), seconds)(alert or an_alert())


def test_apprise_sends_and_its_log_goes_nowhere(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("apprise")
    (tmp_path / "sitecustomize.py").write_text("import logging; logging.basicConfig(level=1)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # every Python that is started logs all that it can
    with caplog.at_level(1), http_server() as server:
        by_apprise(server, 60.0)
    assert server.paths == [f"/{SECRET}"]
    [body] = server.bodies
    assert (body["title"], body["type"]) == ("ERROR: replica-drift at step 12, ranks 3, 4", "failure")
    assert body["message"].startswith("They <differ> & @\u200ball.\n\nWhat to do: ")
    assert SECRET not in caplog.text + "".join(capfd.readouterr())


@pytest.mark.long
def test_apprise_is_ended_when_the_time_is_over() -> None:
    pytest.importorskip("apprise")
    with http_server(drips) as server, ThreadPoolExecutor() as pool:
        began = time.monotonic()
        sent = pool.submit(by_apprise, server, 10.0)
        server.wait(1)
        mine = ["ps", "-ww", "-o", "args", "--ppid", str(os.getpid())]
        said = subprocess.run(mine, capture_output=True, text=True, check=True).stdout
        assert "apprise.Apprise" in said
        assert SECRET not in said
        with pytest.raises(NotSent, match=r"^apprise did not end within 10 s$"):
            sent.result()
        assert time.monotonic() - began < 13.0
        said = subprocess.run(mine, capture_output=True, text=True, check=False).stdout
        assert "apprise.Apprise" not in said


@pytest.mark.parametrize(
    ("to", "why", "again"),
    [
        (f"apprise:nosuch://{SECRET}/x", "apprise takes no such address: see its list of services", False),
        (f"apprise:json://127.0.0.1:1/{SECRET}", "apprise could not send it, and says no more", True),
    ],
)
def test_what_apprise_cannot_send(to: str, why: str, again: bool) -> None:
    pytest.importorskip("apprise")
    with pytest.raises(NotSent) as caught:
        sender_of(parse_destination(to), 60.0)(an_alert())
    assert (str(caught.value), caught.value.again) == (why, again)


def test_a_command_gets_json(tmp_path: Path) -> None:
    out = tmp_path / "with blank" / "out.json"
    out.parent.mkdir()
    program = "import sys; open(sys.argv[1], 'w').write(sys.stdin.read())"
    command = f"command:{shlex.join([sys.executable, '-c', program, str(out)])}"
    sender_of(parse_destination(command), 10.0)(an_alert())
    assert json.loads(out.read_text())["kind"] == "replica-drift"


def test_a_command_that_fails_or_hangs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NotSent, match=r"^the command ended with status 3$"):
        sender_of(parse_destination(f"command:sh -c 'echo {SECRET}; echo {SECRET} >&2; exit 3'"), 10.0)(an_alert())
    mark = f"ds_silent_test_{time.monotonic_ns()}"
    began = time.monotonic()
    with pytest.raises(NotSent, match="did not end within"):
        sender_of(parse_destination(f"command:sh -c 'sleep 57 # {mark}\nsleep 58'"), 0.5)(an_alert())
    assert time.monotonic() - began < 5.0
    assert mark not in subprocess.run(["ps", "ax", "-o", "args"], capture_output=True, text=True, check=True).stdout
    with pytest.raises(NotSent, match=r"cannot be started: FileNotFoundError"):
        sender_of(parse_destination(f"command:/no/such/{SECRET}"), 1.0)(an_alert())
    assert SECRET not in "".join(capfd.readouterr())
