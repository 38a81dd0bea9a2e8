"""``ds-silent alert --test``, ``ds-silent watch --alert`` and ``ds-silent check``: told, and no secret said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ds_silent.cli import app
from ds_silent.integrations.callback_config import as_json
from ds_silent.records import Event
from ds_silent.sinks import open_files
from tests.alerts.servers import http_server, status
from tests.sinks.example_records import event

ROOT = Path(__file__).resolve().parents[2]
SECRET = "s3cr3t-T0k3n"


def run(*arguments: str, **environment: str) -> Any:
    found = CliRunner().invoke(app, list(arguments), env=environment)
    assert SECRET not in found.output
    return found


def test_a_test_message() -> None:
    with http_server() as server:
        found = run(
            "alert", "--test", f"slack+{server.address}/{SECRET}", "--test", "env:MY_HOOK", MY_HOOK=server.address
        )
        assert found.exit_code == 0, found.output
        assert found.output.splitlines() == [f"sent to {server.address}/… ({form})" for form in ("slack", "json")]
    assert server.bodies[0]["text"].startswith("*INFO: test of ds_silent's alerts*\nThis is a test")
    assert server.bodies[1]["kind"] == "test"


def test_a_test_message_that_does_not_arrive() -> None:
    with http_server(status(403)) as server:
        found = run("alert", "--test", f"{server.address}/{SECRET}")
    assert found.exit_code == 1
    assert found.output == f"ds-silent: nothing was sent to {server.address}/…: the server answered 403\n"


@pytest.mark.parametrize(
    ("to", "said"),
    [
        (f"htps:{SECRET}", "ds-silent: a destination must be a webhook"),
        ("env:NO_SUCH_VARIABLE_HERE", "ds-silent: a destination must name an environment variable that is set"),
        ("monitor", "ds-silent: a destination must be reached without a training"),
    ],
)
def test_a_destination_that_is_none(to: str, said: str) -> None:
    found = run("alert", "--test", to)
    assert found.exit_code == 2
    assert found.output.startswith(said)
    assert found.output.count("\n") == 1


def test_check_says_who_is_told(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    alerts = [{"to": f"https://hooks.slack.com/services/{SECRET}"}, {"to": "env:PAGER", "level": "error"}]
    path.write_text(json.dumps({"train_batch_size": 4, "silent_consistency": {"alerts": alerts}}))
    found = run("check", str(path), "--world-size", "4")
    assert found.exit_code == 0, found.output
    assert "  alerts      https://hooks.slack.com/…: warnings and errors, at most 10 in an hour" in found.output
    assert "env:PAGER: errors, at most 10" in found.output
    alerts[0]["to"] = SECRET
    path.write_text(json.dumps({"train_batch_size": 4, "silent_consistency": {"alerts": alerts}}))
    assert run("check", str(path)).exit_code == 2


def test_a_checkpoint_holds_no_secret() -> None:
    from ds_silent.config import BLOCK, parse

    block = {"interval": 2, "alerts": [{"to": f"https://example.org/{SECRET}"}, {"to": "env:PAGER", "level": "error"}]}
    for config in (block, {BLOCK: block}, parse({BLOCK: block})):
        kept = as_json(config)
        assert SECRET not in json.dumps(kept)
        held = kept.get(BLOCK, kept)
        again = parse({BLOCK: held})
        assert again is not None
        assert (again.interval, [one.address for one in again.alerts]) == (2, ["env:PAGER"])


def append(directory: Path, *events: Event) -> None:
    files = open_files(directory, tensorboard=False)
    for one in events:
        files.write_event(one)
    files.close()


def test_watch_tells_what_comes_and_not_what_was(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    append(directory, replace(event(3), message="They differ."))
    with http_server() as server:
        arguments = ["watch", str(directory), "--every", "0.1", "--alert", "env:HOOK"]
        program = subprocess.Popen(
            [sys.executable, "-c", "from ds_silent.cli import app; app()", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "HOOK": f"{server.address}/{SECRET}", "PYTHONPATH": str(ROOT)},
        )
        try:
            assert program.stdout is not None
            assert program.stdout.readline().startswith("alerts of ")
            time.sleep(1.0)
            append(directory, replace(event(131), message="Still, since step 3: They differ.", phase="ongoing"))
            append(directory, replace(event(140), kind="replica-drift", severity="info"))  # type: ignore[arg-type]
            began = time.monotonic()
            append(directory, event(150, "replica-drift"))
            server.wait(1)
            assert server.times[0] - began < 2.0
            append(
                directory,
                replace(
                    event(160), message="Ended: duplicate-data, from step 3 to 159.", severity="info", phase="ended"
                ),
            )
            server.wait(2)
        finally:
            program.terminate()
            said = program.communicate(timeout=20)[0]
    assert [body["step"] for body in server.bodies] == [150, 160]
    assert server.bodies[0]["run"] == str(directory)
    assert SECRET not in said
    assert "Traceback" not in said


def test_watch_refuses_a_destination_that_is_none(tmp_path: Path) -> None:
    found = run("watch", str(tmp_path), "--alert", SECRET)
    assert found.exit_code == 2
    assert found.output.startswith("ds-silent: silent_consistency.alerts[0].to must be a webhook")
    assert run("watch", str(tmp_path), "--once", "--alert", "env:X").exit_code == 2
