"""The JSON Schemas say what the code does: of the block, and of the lines that a run writes."""

from __future__ import annotations

import json
import typing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from typer.testing import CliRunner

import ds_silent
from ds_silent.cli import app
from ds_silent.commands.schema import DRAFT, NAMES, Name, schema_of, written
from ds_silent.config import BLOCK, ConfigError, SilentConsistencyConfig, parse
from ds_silent.records import Event, EventKind, StepRecord, to_json
from ds_silent.sinks.files import written_event, written_record
from ds_silent.sinks.jsonl import read_event_records, read_records
from tests.sinks.example_records import empty_record, event, full_record
from tests.support.distributed import run_distributed
from tests.support.pages import DOCS, ROOT

jsonschema = pytest.importorskip("jsonschema")


def faults(name: Name, value: Any, closed: bool = False) -> list[str]:
    """What the schema refuses in ``value``; ``closed``: keys that it does not name too."""
    schema = schema_of(name)
    if closed:
        for record in (schema, *schema["definitions"].values()):
            if "properties" in record:
                record["additionalProperties"] = False
    jsonschema.Draft7Validator.check_schema(schema)
    return [error.message for error in jsonschema.Draft7Validator(schema).iter_errors(value)]


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("name", NAMES)
def test_the_copies_in_docs_are_up_to_date_and_are_what_the_command_prints(name: Name) -> None:
    copy = (DOCS / "schemas" / f"{name}.json").read_text(encoding="utf-8")
    assert copy == written(name), "the code has changed: `make docs` writes them anew"
    printed = CliRunner().invoke(app, ["schema", name])
    assert (printed.exit_code, printed.stdout) == (0, copy)
    assert schema_of(name)["$schema"] == DRAFT


def test_another_name_is_one_sentence() -> None:
    result = CliRunner().invoke(app, ["schema", "blok"])
    assert result.exit_code == 2
    assert result.stderr == "ds-silent: there is no schema 'blok'; the names are block, metrics, events\n"


# -- the block ---------------------------------------------------------------------------------------------------------


def test_the_configurations_of_the_project_are_right() -> None:
    found = sorted((ROOT / "configs").glob("ds_*.json"))
    assert len(found) >= 5
    for path in found:
        assert faults("block", json.loads(path.read_text(encoding="utf-8"))) == [], path.name
    assert faults("block", {BLOCK: json.loads(SilentConsistencyConfig().model_dump_json())}) == []


@pytest.mark.parametrize(
    "block",
    [
        {"intervall": 1},
        {"interval": 0},
        {"interval": "1"},
        {"interval": 1.5},
        {"output_dir": ""},
        {"direction": {"sketch_size": 1000}},
        {"direction": {"sketch_size": 128}},
        {"direction": {"method": "auto"}},
        {"direction": []},
        {"detectors": {"false_alarms_per_million_steps": 0}},
        {"respond": {"on_replica_drift": "retry"}},
        {"coverage": None},
        [],
    ],
)
def test_what_the_schema_refuses_the_block_refuses_too(block: Any) -> None:
    assert faults("block", {BLOCK: block})
    with pytest.raises(ConfigError):
        parse({BLOCK: block})


def test_an_editor_is_told_what_each_key_means_and_what_else_a_ds_config_holds_is_left_alone() -> None:
    definitions = schema_of("block")["definitions"]
    keys = [(name, key, field) for name, of in definitions.items() for key, field in of["properties"].items()]
    assert len(keys) > 20
    for name, key, field in keys:
        assert "$ref" in field or field["description"], f"{key} of {name}"
    assert "``" not in written("block")
    assert '"must"' not in written("block")
    assert faults("block", {"train_batch_size": 8, "zero_optimization": {"stage": 1}}) == []


def test_a_ds_config_may_name_its_schema(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    config = {"$schema": "docs/schemas/block.json", "train_batch_size": 8, BLOCK: {}}
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config))
    result = CliRunner().invoke(app, ["check", str(path)])
    assert result.exit_code == 0, result.output
    assert faults("block", config) == []


# -- the records -------------------------------------------------------------------------------------------------------


def train(directory: str) -> None:
    """Both ranks hold the same rows, so that there is an event."""
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    block = {"output_dir": directory, "tensorboard": False, "integrity": {"replica_interval": 2}}
    with ds_silent.observe(model, optimizer, config=block):
        for step in range(3):
            rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            model(rows).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_every_line_of_a_run_is_as_the_schemas_say(tmp_path: Path) -> None:
    run_distributed(train, 2, (str(tmp_path),))
    metrics, events = lines(tmp_path / "metrics.jsonl"), lines(tmp_path / "events.jsonl")
    assert [line["step"] for line in metrics] == [1, 2, 3]
    assert "duplicate-data" in {line["kind"] for line in events}
    assert [faults("metrics", line, closed=True) for line in metrics] == [[]] * 3
    assert [fault for line in events for fault in faults("events", line, closed=True)] == []


@pytest.mark.parametrize(
    "record",
    [
        full_record(),
        full_record(ranks=65, layers=(), cosine_matrix=None),
        empty_record(),
        full_record(noise_scale=float("nan"), epoch=float("-inf")),
    ],
)
def test_all_that_a_record_may_hold(record: StepRecord) -> None:
    assert faults("metrics", to_json(written_record(record)), closed=True) == []


def test_all_that_an_event_may_hold() -> None:
    many = event(ranks=tuple(range(100)))
    assert faults("events", to_json(written_event(many)), closed=True) == []
    kinds = schema_of("events")["properties"]["kind"]["enum"]
    assert tuple(kinds) == typing.get_args(EventKind)


@pytest.mark.parametrize(
    "changes",
    [
        {"step": "1"},
        {"loss": None},
        {"epoch": "much"},
        {"loss": {"mean": 1.0}},
        {"grad_norm": {**to_json(full_record())["grad_norm"], "method": "guessed"}},
        {"direction": {**to_json(full_record())["direction"], "min_pair": [0, 1, 2]}},
    ],
)
def test_what_is_no_record_is_refused(changes: dict[str, Any]) -> None:
    assert faults("metrics", {**to_json(full_record()), **changes})
    assert faults("metrics", {}) != []


def test_keys_of_a_newer_version_are_no_fault() -> None:
    assert faults("metrics", {**to_json(full_record()), "more": 1}) == []
    assert faults("events", {**to_json(event()), "more": {"a": 1}}) == []


OLD_METRICS = """\
{"step": 1, "samples": 16, "epoch": 0.25, "world_size": 4, "loss": {"mean": 2.0, "std": 0.1, "range": 0.3, \
"per_rank": [1.9, 2.0, 2.1, 2.0]}, "grad_norm": {"method": "exact", "mean": 1.0, "std": 0.1, "cv": 0.1, \
"range": 0.2, "aggregated": 0.6, "per_rank": [1.0, 0.9, 1.1, 1.0]}, "direction": {"method": "sketch", \
"mean_cosine": 0.1, "standard_error": 0.004, "min_cosine": 0.0, "max_cosine": 0.2, "min_pair": [0, 3], \
"max_pair": [1, 2], "per_rank": [0.1, 0.1, 0.1, 0.1]}, "noise_scale": "nan", "coverage": {"duplicates": 0, \
"seen": 0.25, "repeated": 0.0}, "integrity": {"relative_error": 1e-07, "rounding_bound": 3e-07, \
"replica_groups": null}, "seconds": {"step": 0.5, "observe": 0.01}}
{"step": 2, "samples": 32, "world_size": 4, "loss": {"mean": "inf", "std": "nan", "range": "nan"}}
"""
"""As the first releases wrote them, and a line that lacks what came later."""
OLD_EVENTS = """\
{"step": 1, "kind": "duplicate-data", "severity": "error", "ranks": [0, 1], "where": null, "score": null, "threshold": \
null, "message": "The same rows.", "remedy": "Give each rank its own."}
{"step": 2, "kind": "of-a-newer-version", "severity": "info", "ranks": [], "where": null, "score": null, "threshold": \
null, "message": "?", "remedy": "", "cause": "unknown here"}
"""


def test_lines_of_older_and_newer_versions_are_read(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(OLD_METRICS)
    (tmp_path / "events.jsonl").write_text(OLD_EVENTS)
    first, second = read_records(tmp_path / "metrics.jsonl")
    assert (first.samples, first.loss.per_rank, first.loss.quantiles) == (16, (1.9, 2.0, 2.1, 2.0), None)
    assert first.noise_scale != first.noise_scale  # a NaN, not the word
    assert (second.epoch, second.loss.mean, second.loss.per_rank) == (None, float("inf"), None)
    assert second.direction.mean_cosine is None
    old, new = read_event_records(tmp_path / "events.jsonl")
    assert (old.ranks, old.places, old.false_alarms_per_million_steps) == ((0, 1), None, None)
    assert isinstance(new, Event)
    assert new.kind == "of-a-newer-version"  # type: ignore[comparison-overlap]
    assert faults("metrics", json.loads(OLD_METRICS.splitlines()[0]), closed=True) == []
    assert faults("events", json.loads(OLD_EVENTS.splitlines()[0]), closed=True) == []
