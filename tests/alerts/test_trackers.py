"""The trackers' own alert functions, as stand-ins of their modules take them; and the libraries where installed."""

from __future__ import annotations

import contextvars
import logging
import sys
import threading
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ds_silent.alerts.sink import Alerts
from ds_silent.config import AlertConfig
from tests.sinks.example_records import event


class Calls(list[Any]):
    def __getattr__(self, name: str) -> Any:
        return lambda *args, **named: self.append((name, args, named, threading.current_thread().name))


def told(form: str) -> None:
    alerts = Alerts([AlertConfig(to=form)], lambda: "runs/my-run")  # type: ignore[arg-type]
    alerts.write_event(event(12))
    alerts.close()


@pytest.fixture
def module(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    made = ModuleType(request.param)
    made.__spec__ = SimpleNamespace()  # type: ignore[assignment]  # what find_spec looks at
    monkeypatch.setitem(sys.modules, request.param, made)
    return made


TITLE = "ERROR: duplicate-data at step 12, ranks 0, 3"


@pytest.mark.parametrize("module", ["wandb"], indirect=True)
def test_wandb(module: Any, caplog: pytest.LogCaptureFixture) -> None:
    module.run = None
    told("wandb")
    [said] = [record.getMessage() for record in caplog.records]
    assert said == (
        "ds_silent: an alert to wandb was not sent, the training goes on: no wandb run is under way on rank 0: call "
        "wandb.init before the training, or leave the alert out"
    )
    module.run = calls = Calls()
    told("wandb")
    [(name, _, named, thread)] = calls
    assert (name, named["title"], named["level"], thread) == ("alert", TITLE, "ERROR", "ds_silent alerts")
    assert len(named["title"]) < 64


@pytest.mark.parametrize("module", ["mlflow"], indirect=True)
def test_mlflow(module: Any) -> None:
    own, calls = threading.local(), Calls()  # its active run belongs to a thread
    own.run = SimpleNamespace(info=SimpleNamespace(run_id="r1"))
    module.active_run = lambda: getattr(own, "run", None)
    module.MlflowClient = lambda: calls
    told("mlflow")
    assert calls[0][:2] == ("set_tag", ("r1", "silent.last_alert", calls[0][1][2]))
    assert calls[0][1][2].startswith(TITLE)
    assert calls[1][:3] == ("log_metric", ("r1", "silent/alerts/error", 1.0), {"step": 12})


@pytest.mark.parametrize("module", ["trackio"], indirect=True)
def test_trackio(module: Any) -> None:
    calls = Calls()
    current: contextvars.ContextVar[Any] = contextvars.ContextVar("current", default=None)
    current.set(calls)
    module.context_vars = SimpleNamespace(current_run=current)
    module.AlertLevel = SimpleNamespace(ERROR="an error")
    told("trackio")
    assert (calls[0][0], calls[0][2]["title"], calls[0][2]["level"]) == ("alert", TITLE, "an error")


@pytest.mark.parametrize("module", ["comet_ml"], indirect=True)
def test_comet(module: Any) -> None:
    calls = Calls()
    module.get_running_experiment = lambda: calls
    told("comet")
    assert [call[0] for call in calls] == ["log_text", "send_notification"]
    assert calls[1][1] == (TITLE,)
    assert calls[1][2]["status"] == "error"


@pytest.mark.parametrize("module", ["wandb"], indirect=True)
def test_what_a_library_says_is_not_repeated(
    module: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def alert(**named: Any) -> None:
        raise RuntimeError("the key s3cr3t is wrong")

    monkeypatch.setattr("ds_silent.alerts.sink.TRIES", 1)
    module.run = SimpleNamespace(alert=alert)
    with caplog.at_level(logging.DEBUG):
        told("wandb")
    assert "an alert to wandb was not sent, the training goes on: RuntimeError" in caplog.text
    assert "s3cr3t" not in caplog.text


def test_the_real_mlflow(tmp_path: Any) -> None:
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    with mlflow.start_run() as run:
        told("mlflow")
    found = mlflow.MlflowClient().get_run(run.info.run_id).data
    assert found.tags["silent.last_alert"].startswith(TITLE)
    assert found.metrics["silent/alerts/error"] == 1.0


def test_the_real_trackio(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    trackio = pytest.importorskip("trackio")
    found: list[Any] = []
    trackio.init(project="ds-silent-test", embed=False, auto_log_gpu=False)
    monkeypatch.setattr(type(trackio.context_vars.current_run.get()), "alert", lambda run, **named: found.append(named))
    told("trackio")
    trackio.finish()
    assert (found[0]["title"], found[0]["level"]) == (TITLE, trackio.AlertLevel.ERROR)


def test_the_real_wandb(tmp_path: Any) -> None:
    wandb = pytest.importorskip("wandb")
    run = wandb.init(mode="offline", project="ds-silent-test", dir=str(tmp_path))
    told("wandb")
    run.finish()
    until = time.monotonic() + 10
    while time.monotonic() < until:
        data = b"".join(path.read_bytes() for path in tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
        if TITLE.encode() in data:
            return
        time.sleep(0.2)
    raise AssertionError("the alert is not in the offline run")
