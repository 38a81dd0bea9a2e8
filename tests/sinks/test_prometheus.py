"""What Prometheus scrapes, and that neither a taken port nor a missing library stops more than it must."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shutil
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_silent.config import ConfigError, parse
from ds_silent.observing.start import refuse_metrics_without_library
from ds_silent.records import IntegrityStats, LossStats
from ds_silent.sinks.prometheus import PrometheusSink, open_prometheus
from tests.sinks.example_records import empty_record, event, full_record

PAGES = Path(__file__).resolve().parents[2] / "docs" / "prometheus"
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture
def served() -> Iterator[tuple[PrometheusSink, str]]:
    pytest.importorskip("prometheus_client")
    port = free_port()
    sink = open_prometheus(port, "127.0.0.1", lambda: 'runs/"my"-run')
    assert sink is not None
    yield sink, f"http://127.0.0.1:{port}/metrics"
    sink.close()


def scrape(address: str) -> tuple[str, dict[str, float]]:
    """The text, and every sample by its name and labels."""
    with urllib.request.urlopen(address, timeout=10) as answer:
        text = answer.read().decode()
    samples = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    assert len({name for name, _ in samples}) == len(samples)
    return text, {name: float(value) for name, value in samples}


def test_every_number_of_a_record(served: tuple[PrometheusSink, str]) -> None:
    sink, address = served
    sink.write(full_record(12))
    sink.write_event(event(12, "replica-drift"))
    sink.write_event(event(14, "replica-drift"))
    _, found = scrape(address)
    counted = {name: value for name, value in found.items() if name.startswith("ds_silent_events_total")}
    assert sum(counted.values()) == 2.0
    assert found['ds_silent_events_total{kind="replica-drift",severity="error"}'] == 2.0
    assert found['ds_silent_last_event_step{kind="replica-drift",severity="error"}'] == 14.0
    assert found['ds_silent_run_info{output_dir="runs/\\"my\\"-run"}'] == 1.0
    assert found.pop("ds_silent_last_record_timestamp_seconds") > 0
    assert {name: value for name, value in found.items() if "{" not in name} == {
        "ds_silent_observing": 1.0,
        "ds_silent_label_weight_sum": 1.0625,
        "ds_silent_label_weight_spread": 0.0021 / 0.0019,
        "ds_silent_step": 12.0,
        "ds_silent_samples": 768.0,
        "ds_silent_world_size": 4.0,
        "ds_silent_loss_mean": 2.31,
        "ds_silent_loss_std": 0.18,
        "ds_silent_loss_range": 0.52,
        "ds_silent_grad_norm_mean": 1.02,
        "ds_silent_grad_norm_std": 0.16,
        "ds_silent_grad_norm_cv": 0.157,
        "ds_silent_grad_norm_aggregated": 0.61,
        "ds_silent_cosine_mean": 0.041,
        "ds_silent_cosine_min": -0.011,
        "ds_silent_cosine_max": 0.091,
        "ds_silent_noise_scale": 310.25,
        "ds_silent_duplicate_rows": 3.0,
        "ds_silent_integrity_relative_error": 1e-7,
        "ds_silent_integrity_rounding_bound": 2e-6,
        "ds_silent_replica_groups": 2.0,
        "ds_silent_step_seconds": 0.3,
        "ds_silent_observe_seconds": 0.002,
    }


def test_what_was_not_measured_is_absent_and_what_is_no_number_is_kept(served: tuple[PrometheusSink, str]) -> None:
    sink, address = served
    assert scrape(address)[1]["ds_silent_observing"] == 1.0
    sink.write(full_record(1))
    sink.write(replace(empty_record(2), loss=LossStats(mean=math.nan, std=math.inf)))
    sink.write_event(replace(event(2), kind="observer-off", severity="warning"))
    _, found = scrape(address)
    assert math.isnan(found["ds_silent_loss_mean"])
    assert found["ds_silent_loss_std"] == math.inf
    assert "ds_silent_loss_range" not in found
    assert "ds_silent_cosine_mean" not in found
    assert found["ds_silent_replica_groups"] == 2.0  # of the last comparison
    assert found["ds_silent_observing"] == 0.0


def test_the_port_is_free_again_and_a_taken_one_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("prometheus_client")
    port = free_port()
    first = open_prometheus(port, "127.0.0.1", lambda: "runs/a")
    assert first is not None
    with caplog.at_level(logging.WARNING):
        assert open_prometheus(port, "127.0.0.1", lambda: "runs/b") is None
    [said] = [record.getMessage() for record in caplog.records]
    assert said == (
        f"ds_silent: no metrics are served for 'runs/b', the training goes on: '127.0.0.1' port {port} cannot be "
        "listened on (Address already in use); set silent_consistency.metrics_port to a free one"
    )
    first.close()
    again = open_prometheus(port, "127.0.0.1", lambda: "runs/c")
    assert again is not None
    again.close()
    assert open_prometheus(port, "no-such-host.invalid", lambda: "runs/d") is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_does_not_keep_the_port() -> None:
    pytest.importorskip("prometheus_client")
    port = free_port()
    sink = open_prometheus(port, "127.0.0.1", lambda: "runs/a")
    assert sink is not None
    wait, told = os.pipe()
    child = os.fork()
    if not child:
        os.close(told)
        os.read(wait, 1)  # until its parent has looked
        os._exit(0)
    try:
        sink.close()
        again = open_prometheus(port, "127.0.0.1", lambda: "runs/b")
        assert again is not None
        again.close()
    finally:
        os.close(told)
        os.waitpid(child, 0)


def test_a_missing_library_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds_silent.observing.start.installed", lambda package: False)
    config = parse({"silent_consistency": {"metrics_port": 9400}})
    assert config is not None
    with pytest.raises(ConfigError, match=r'metrics_port 9400 needs prometheus_client, .* "ds_silent\[prometheus\]"'):
        refuse_metrics_without_library(config)
    plain = parse({"silent_consistency": {}})
    assert plain is not None
    refuse_metrics_without_library(plain)


@needs_promtool
def test_promtool_finds_nothing_wrong_with_the_names(served: tuple[PrometheusSink, str]) -> None:
    sink, address = served
    sink.write(full_record(12))
    sink.write_event(event(12))
    assert PROMTOOL is not None
    text, _ = scrape(address)
    found = subprocess.run([PROMTOOL, "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout + found.stderr) == (0, "")


@needs_promtool
@pytest.mark.parametrize(("command", "name"), [("check", "rules.yml"), ("test", "rules_test.yml")])
def test_promtool_accepts_the_rules(command: str, name: str) -> None:
    assert PROMTOOL is not None
    found = subprocess.run([PROMTOOL, command, "rules", name], cwd=PAGES, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "SUCCESS" in found.stdout


def known_names() -> set[str]:
    pytest.importorskip("prometheus_client")
    sink = PrometheusSink(lambda: "run")
    sink.write(replace(full_record(1), integrity=IntegrityStats(0.1, 0.2, ((0,),))))
    sink.write_event(event(1))
    return {family.name + ("_total" if family.type == "counter" else "") for family in sink.collect()}


def expressions(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key in ("expr", "query") and isinstance(inner, str):
                yield inner
            else:
                yield from expressions(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from expressions(inner)


def test_dashboard_and_rules_ask_for_what_there_is() -> None:
    dashboard = json.loads((PAGES / "grafana.json").read_text())
    asked = list(expressions(dashboard))
    assert len(asked) > 20
    rules = re.findall(r"expr: (.+)", (PAGES / "rules.yml").read_text())
    assert len(rules) == 6
    names = set(re.findall(r"\bds_silent_\w+", " ".join(asked + rules)))
    assert names <= known_names()
    page = (PAGES.parent / "prometheus.md").read_text()
    assert known_names() <= set(re.findall(r"\bds_silent_\w+", page))
    places = [tuple(panel["gridPos"][key] for key in "xywh") for panel in dashboard["panels"]]
    cells = [(x + i, y + j) for x, y, w, h in places for i in range(w) for j in range(h)]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24
