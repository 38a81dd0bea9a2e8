"""``ds-silent check``: what it says is what the code does, and a mistake is one sentence with exit status 2."""

from __future__ import annotations

import json
import os
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ds_silent.cli import app
from ds_silent.exchange.observation import FIELDS


def check(tmp_path: Path, ds_config: Any, *options: str) -> Any:
    path = tmp_path / "ds_config.json"
    path.write_text(ds_config if isinstance(ds_config, str) else json.dumps(ds_config))
    return CliRunner().invoke(app, ["check", str(path), *options])


def lines(result: Any) -> dict[str, str]:
    assert result.exit_code == 0, result.output
    first, *others = result.stdout.splitlines()
    return {"": first} | {line[:14].strip(): line[14:] for line in others}


def test_the_default_block(tmp_path: Path) -> None:
    said = lines(check(tmp_path, {"silent_consistency": {"output_dir": "runs/x"}}, "--world-size", "4"))
    assert said[""] == "silent_consistency: on, measures every optimizer step over 4 ranks"
    assert said["direction"] == "sketch of 16384 numbers, standard error of one cosine about 0.0078"
    sent = re.match(r"one all-gather of ([\d.]+) KiB from each rank per measurement", said["sends"])
    assert sent is not None
    named = len(FIELDS) + 4  # and a checksum, in four
    assert float(sent[1]) == round((2 * 16384 + named) * 4 / 1024, 1)  # two sketches of 16384 fp32 numbers
    kept = re.match(r"([\d.]+) MiB per rank .* CPU, ([\d.]+) MiB where on an accelerator", said["keeps"])
    assert kept is not None
    assert 1 < float(kept[1]) < 4
    assert 30 < float(kept[2]) < 40
    files = "metrics.jsonl, events.jsonl, scores.jsonl, matrices.jsonl, TensorBoard files in tensorboard/"
    assert said["writes"] == f"{files} in 'runs/x', on rank 0"
    assert said["preflight"].startswith("before step 1: weights, generators, sampler")
    assert said["coverage"].endswith("row ids travel too, 12 B each")
    assert said["judges"] == "each measured step; false alarms by chance: at most 1 in a million steps"
    assert said["reduction"].startswith("aggregated gradient against the mean of the ranks'")
    assert said["place"] == "the layer where it went wrong; for each layer 511.9 KiB are kept and 512 B sent"
    assert said["replicas"].startswith("bits compared every 100 optimizer steps")
    assert "exact" not in said
    assert "per layer" not in said
    assert "stops" not in said


def test_what_is_switched_off_is_not_promised(tmp_path: Path) -> None:
    off = {
        "coverage": False,
        "preflight": False,
        "detectors": {"enabled": False, "stop_on": "error"},
        "integrity": {"aggregation": False, "replica_interval": 0},
    }
    said = lines(check(tmp_path, {"silent_consistency": off}))
    assert not {"preflight", "coverage", "judges", "reduction", "place", "replicas", "stops"} & set(said)
    without_sketch = lines(check(tmp_path, {"silent_consistency": {"direction": {"method": "off"}}}))
    assert without_sketch["reduction"].startswith("not checked")
    stopping = lines(check(tmp_path, {"silent_consistency": {"detectors": {"stop_on": "warning"}}}))
    assert stopping["stops"].endswith("after a warning or an error")
    assert stopping["changes"].endswith("until it is stopped")


def test_several_configurations_at_once(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.json", "b.json", "c.json")]
    for path, text in zip(
        paths, ('{"silent_consistency": {}}', '{"silent_consistency": {"interval": 0}}', "{}"), strict=True
    ):
        path.write_text(text)
    result = CliRunner().invoke(app, ["check", *map(str, paths)])
    assert result.exit_code == 2
    assert [line for line in result.stdout.splitlines() if line.startswith("'")] == [f"'{path}'" for path in paths]
    assert result.stdout.count("silent_consistency: on") == result.stdout.count("silent_consistency: off") == 1
    assert result.stderr.count("\n") == 1
    assert "interval must be" in result.stderr


@pytest.mark.parametrize("command", ["check", "drill"])
def test_the_help_says_the_exit_status(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert "Exit status: 0" in result.stdout


def test_above_the_gather_limit_nothing_grows_with_the_ranks(tmp_path: Path) -> None:
    block = {"silent_consistency": {"interval": 10}}
    small, middle, large = (lines(check(tmp_path, block, "--world-size", n)) for n in ("65", "256", "65536"))
    assert small["sends"] == middle["sends"]
    assert small["sends"].startswith("one all-reduce of 168 KiB and one all-gather of ")
    assert large["sends"].startswith("two all-reduces of 200 KiB and ")  # three bits of each rank
    assert small["keeps"] == middle["keeps"]
    assert "every 10 optimizer steps over 65 ranks" in small[""]


@pytest.mark.parametrize(
    ("zero", "copy"),
    [
        ({}, False),
        ({"stage": 0}, False),
        ({"stage": 1}, False),
        ({"stage": 1, "overlap_comm": True}, True),
        ({"stage": 2}, True),
        ({"stage": 3}, True),
    ],
)
def test_the_exact_method_says_whether_it_copies_the_gradient(tmp_path: Path, zero: dict[str, Any], copy: bool) -> None:
    block = {"method": "exact", "exact_memory_mb": 32}
    ds_config = {"zero_optimization": zero, "silent_consistency": {"direction": block}}
    said = lines(check(tmp_path, ds_config, "--world-size", "4", "--parameters", str(2**28)))["exact"]
    assert "in pieces within 32 MiB, 768 MiB leave each rank" in said
    assert ("one fp32 copy of the gradient (1 GiB)" in said) == copy
    assert ("no copy of the gradient" in said) != copy


def test_without_the_size_of_the_model(tmp_path: Path) -> None:
    ds_config = {"zero_optimization": {"stage": 2}, "silent_consistency": {"direction": {"exact_interval": 50}}}
    said = lines(check(tmp_path, ds_config))
    assert "(4 bytes per parameter), because ZeRO stage 2 keeps none" in said["exact"]
    assert said["direction"].endswith("checked exactly every 50 measurements")


def test_direction_off_and_per_layer(tmp_path: Path) -> None:
    off = lines(check(tmp_path, {"silent_consistency": {"direction": {"method": "off"}, "tensorboard": False}}))
    assert off["direction"] == "off"
    assert re.match(r"one all-gather of \d+ B from each rank", off["sends"])
    assert "TensorBoard" not in off["writes"]
    assert "per layer" in lines(check(tmp_path, {"silent_consistency": {"direction": {"per_layer": True}}}))


@pytest.mark.parametrize("ds_config", [{}, {"silent_consistency": {"enabled": False}}])
def test_off(tmp_path: Path, ds_config: dict[str, Any]) -> None:
    result = check(tmp_path, ds_config)
    assert result.exit_code == 0
    assert result.stdout.startswith("silent_consistency: off")


@pytest.mark.parametrize(
    ("ds_config", "sentence"),
    [
        (
            {"silent_consistency": {"interval": 0}},
            "silent_consistency.interval must be a whole number, at least 1, got 0",
        ),
        ({"silent_consistancy": {}}, 'did you mean "silent_consistency"?'),
        ('{"a": ', "is not JSON"),
        (
            {"silent_consistency": {}, "optimizer": {"type": "OneBitAdam"}},
            "silent_consistency cannot observe optimizer.type OneBitAdam",
        ),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path: Path, ds_config: Any, sentence: str) -> None:
    result = check(tmp_path, ds_config)
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("ds-silent: ")
    assert sentence in line


@pytest.mark.parametrize("command", [[], ["drill"], ["numerics"], ["compare"], ["bisect"]])
def test_the_help_is_broken_at_the_edge_alone(command: list[str]) -> None:
    """Lines of the source that were longer than the terminal left single words on lines of their own."""
    said = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "70", "TERMINAL_WIDTH": "70"}).stdout
    lines = [line.strip() for line in said.partition("╭")[0].splitlines()]
    for line, after in pairwise(lines):
        if line and after:
            assert len(line) + 1 + len(after.split()[0]) > 68, (line, after)


def test_a_missing_comma_is_said(tmp_path: Path) -> None:
    """DeepSpeed's Hjson wants none, and the file passed as if it were JSON."""
    said = lines(check(tmp_path, '{\n "silent_consistency": {"output_dir": "runs/x"}\n "train_batch_size": 8\n}'))
    assert said["plain JSON"].startswith("no: a comma is missing before line 3, column 2; ds_silent and DeepSpeed read")
    assert "plain JSON" in check(tmp_path, '{"interval": 2} // a comment').stdout
    assert "plain JSON" not in check(tmp_path, {"interval": 2}).stdout


def test_from_where_the_number_of_ranks_is_known(tmp_path: Path) -> None:
    """It said 8 without anybody having said so."""
    sizes = {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    for own, options, ranks in (
        ({}, (), "8 ranks (assumed; --world-size says how many)"),
        ({"train_batch_size": 8}, (), "8 ranks (assumed; --world-size says how many)"),
        (sizes, (), "3 ranks (from the batch sizes)"),
        (sizes, ("--world-size", "3"), "3 ranks"),
    ):
        said = lines(check(tmp_path, {"silent_consistency": {}, **own}, *options))[""]
        assert said == f"silent_consistency: on, measures every optimizer step over {ranks}"


def test_a_block_alone_is_not_told_of_deepspeed(tmp_path: Path) -> None:
    """It may be for DDP, FSDP2 or Megatron."""
    result = check(tmp_path, {"interval": 5})
    assert "ds_silent.observe(model, optimizer, config=FILE)" in lines(result)["read"]
    assert "DeepSpeed" not in result.output
    assert "DeepSpeed" in check(tmp_path, {"silent_consistency": {"interval": 5}}).output


def test_a_file_with_the_block_alone(tmp_path: Path) -> None:
    result = check(tmp_path, {"interval": 5})
    assert (result.exit_code, "off" in result.stdout.splitlines()[0]) == (0, False)
    assert "every 5 optimizer steps" in result.stdout
    result = check(tmp_path, {"interval": 5, "directon": {}})
    assert (result.exit_code, 'did you mean "direction"?' in result.stderr) == (2, True)


def test_an_output_dir_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "afile").touch()
    for path in (tmp_path / "afile", tmp_path / "afile" / "runs" / "x"):
        config = tmp_path / "ds_config.json"
        config.write_text(json.dumps({"silent_consistency": {"output_dir": str(path)}}))
        result = CliRunner().invoke(app, ["check", str(config)])
        assert result.exit_code == 2
        assert "afile' is a file; choose a directory" in result.stderr
        assert "writes" not in result.stdout


def test_an_output_dir_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "closed").mkdir(mode=0o555)
    monkeypatch.setattr(os, "access", lambda path, mode: "closed" not in str(path))  # the tests may be root's
    monkeypatch.chdir(tmp_path)
    for name in (str(tmp_path / "closed"), str(tmp_path / "closed" / "runs" / "x"), "closed"):
        result = check(tmp_path, {"silent_consistency": {"output_dir": name}})
        assert (result.exit_code, result.stdout) == (2, "")
        there = "closed" if name == "closed" else str(tmp_path / "closed")
        assert result.stderr.splitlines()[0] == (
            f"ds-silent: silent_consistency.output_dir {name!a} cannot be written, because this user may not create "
            f"files in {there!a}; choose a directory that rank 0 can create files in"
        )
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["closed", "ds_config.json"]


def test_an_output_dir_on_another_machines_disk_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != "/")
    assert check(tmp_path, {"silent_consistency": {"output_dir": "/no/such/disk"}}).exit_code == 0


def test_a_missing_file() -> None:
    result = CliRunner().invoke(app, ["check", "no/such.json"])
    assert result.exit_code == 2
    assert result.stderr == 'ds-silent: there is no ds_config file "no/such.json"; check the path\n'


def test_a_world_without_ranks(tmp_path: Path) -> None:
    result = check(tmp_path, {}, "--world-size", "0")
    assert result.exit_code == 2
    assert "--world-size" in result.stderr
    assert "Traceback" not in result.output


def test_lossy_gradients_are_observed_without_the_check_of_the_sum(tmp_path: Path) -> None:
    zero = {"stage": 3, "zero_quantized_gradients": True}
    said = check(tmp_path, {"zero_optimization": zero, "silent_consistency": {}})
    assert said.exit_code == 2
    assert said.stderr.count("\n") == 1
    assert "zero_optimization.zero_quantized_gradients true" in said.stderr
    assert '"aggregation": false' in said.stderr
    block = {"integrity": {"aggregation": False}}
    assert check(tmp_path, {"zero_optimization": zero, "silent_consistency": block}).exit_code == 0
    zero["zero_quantized_gradients"] = False
    assert check(tmp_path, {"zero_optimization": zero, "silent_consistency": {}}).exit_code == 0
