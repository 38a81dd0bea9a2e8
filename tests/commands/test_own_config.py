"""``ds-silent check`` of what is wrong: one sentence, exit status 2; and what it accepts, DeepSpeed accepts too."""

from __future__ import annotations

import copy
import json
import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed.runtime.config
import numpy as np
import pytest
import torch.distributed as dist
from deepspeed.runtime.config import DeepSpeedConfig
from typer.testing import CliRunner

import ds_silent
from ds_silent.cli import app
from ds_silent.config import ConfigError, parse
from tests.support.distributed import run_distributed
from tests.support.training import Case, Probe

BLOCK: dict[str, Any] = {"silent_consistency": {}}
ROOT = Path(__file__).resolve().parents[2]


def check(path: Path, content: Any, *options: str) -> Any:
    text = json.dumps(content) if isinstance(content, dict) else content
    path.write_bytes(text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text)
    return CliRunner().invoke(app, ["check", str(path), *options])


def sentence_of(result: Any) -> str:
    """The one line of a refusal."""
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("ds-silent: ")
    assert line.isascii()
    assert len(line) < 600
    return str(line)


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


REFUSED: list[tuple[Any, str]] = [
    ({"optimizer": ["AdamW"]}, 'optimizer must be an object in braces, got ["AdamW"]'),
    ({"optimizer": {"type": 3}}, "optimizer.type must be a name in quotes, got 3"),
    ({"optimizer": {"type": "AdamX"}}, 'class of torch.optim, got "AdamX"'),
    ({"optimizer": {"type": "AdamW", "params": []}}, "optimizer.params must be an object in braces, got []"),
    (
        {"optimizer": {"type": "AdamW", "params": {"lr": "1"}}},
        "optimizer.params.lr must be a finite number, at least 0",
    ),
    ({"scheduler": "WarmupLR"}, 'scheduler must be an object in braces, got "WarmupLR"'),
    ({"zero_optimization": {"stage": 9}}, "zero_optimization.stage must be 0, 1, 2 or 3, got 9"),
    ({"zero_optimization": {"stage": None}}, "zero_optimization.stage null"),
    ({"zero_optimization": [1]}, 'zero_optimization must be an object in braces, such as {"stage": 1}, got [1]'),
    ({"zero_optimization": {"stage": 1, "overlap_com": True}}, "zero_optimization.overlap_com is a key that DeepSpeed"),
    ({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "gpu"}}}, 'offload_optimizer.device "gpu"'),
    ({"bf16": []}, "bf16 must be an object in braces, got []"),
    ({"bf16": {"enabled": "x"}}, 'bf16.enabled "x"'),
    ({"bf16": {"enabled": True}, "fp16": {"enabled": True}, "train_batch_size": 8}, "change one of them"),
    ({"fp16": 1}, "fp16 must be an object in braces, got 1"),
    ({"compile": []}, "compile must be an object in braces, got []"),
    ({"data_types": [1]}, "data_types must be an object"),
    ({"torch_autocast": [1]}, "torch_autocast must be an object"),
    ({"torch_autocast": {"enabled": True, "dtype": "x"}}, "torch_autocast"),
    ({"gradient_accumulation_steps": "four"}, "gradient_accumulation_steps must be a whole number from 1"),
    ({"gradient_accumulation_steps": 1.5}, "gradient_accumulation_steps must be a whole number from 1"),
    ({"gradient_accumulation_steps": True}, "gradient_accumulation_steps must be a whole number from 1"),
    ({"gradient_accumulation_steps": -1}, "gradient_accumulation_steps must be a whole number from 1"),
    ({"train_batch_size": 10**4000}, "train_batch_size must be a whole number from 1 to 2147483647"),
    ({"gradient_clipping": "a"}, "gradient_clipping must be a finite number, at least 0"),
    ({"gradient_clipping": -1}, "gradient_clipping must be a finite number, at least 0"),
    ({"communication_data_type": "fp8"}, "communication_data_type"),
    ({"gradient_allreduce_op": "avg"}, "gradient_allreduce_op"),
    ({"wall_clock_breakdown": "x"}, "wall_clock_breakdown must be true or false"),
    ({"tensorboard": [1]}, "tensorboard [1]"),
    ({"checkpoint": []}, "checkpoint []"),
    (
        {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 3},
        "must be a multiple of train_micro_batch_size_per_gpu 3",
    ),
    ({"silent_consistency": []}, "silent_consistency must be an object in braces, got []"),
    ({"silent_consistency": {"interval": 10**4000}}, "at least 1 and at most 2147483647, got 1000"),
    ({"silent_consistency": {"output_dir": "\ud800"}}, "silent_consistency.output_dir must be the name of a directory"),
    ('{"silent_consistency": {"interval": NaN}}', "NaN at line 1 is no number"),
    ('{"silent_consistency": {},\n "lr": "NaN", // NaN\n "gradient_clipping": -Infinity}', "-Infinity at line 3 is no"),
    ('{"silent_consistency": {"interval": NaN\n}}', 'interval must be a whole number, at least 1, got "NaN"'),
    (
        '{"silent_consistency": {},\n"gradient_clipping": NaN,\n"train_batch_size": 8}',
        "gradient_clipping must be a finite",
    ),
    ('{"silent_consistency": {}, "gradient_clipping": 1e999}', "cannot be read as JSON (OverflowError)"),
    ('{"silent_consistency": {"interval": ' + "9" * 5000 + "}}", "cannot be read as JSON (ValueError)"),
    ("", "is empty"),
    (" \r\n\t", "is empty"),
    ("# {}\n// {}\n/* {} */", "is empty"),
    ("null", "must hold one object in braces, got null"),
    ("[]", "must hold one object in braces, got []"),
    ('{"silent_consistency": {}', "is not JSON"),
    ('{"silent_consistency": {}}}', "is not JSON"),
    ('{"silent_consistency": {}, "silent_consistency": {}}', 'has the key "silent_consistency" twice'),
    ('{"silent_consistency": {}, "x": ' + nested(100) + "}", "x is nested deeper than 64 objects"),
    (nested(5000), "cannot be read as JSON (RecursionError)"),
    (bytes(range(256)), "is not text in UTF-8"),
]


@pytest.mark.parametrize(("content", "said"), REFUSED, ids=[str(n) for n in range(len(REFUSED))])
def test_what_is_wrong_is_one_sentence(content: Any, said: str, tmp_path: Path) -> None:
    whole = {**BLOCK, **content} if isinstance(content, dict) else content
    assert said in sentence_of(check(tmp_path / "c.json", whole))
    if isinstance(content, dict) and "silent_consistency" not in content:  # without a block too
        assert said in sentence_of(check(tmp_path / "c.json", content))


@pytest.mark.parametrize("source", ["", "QUJD", "a\0b", "e30", "x" * 5000])
def test_what_is_no_configuration(source: str) -> None:
    assert "there is no ds_config file" in sentence_of(CliRunner().invoke(app, ["check", source]))


def test_a_directory(tmp_path: Path) -> None:
    assert "Is a directory" in sentence_of(CliRunner().invoke(app, ["check", str(tmp_path)]))


@pytest.mark.parametrize(
    ("sizes", "options", "ranks", "said"),
    [
        ((64, 2, 4), (), 8, ""),
        ((16, 4, 1), (), 4, ""),
        ((16, 4, 1), ("--world-size", "8"), 0, "4 x gradient_accumulation_steps 1 x 8 ranks = 32, got 16"),
        ((24, 4, None), ("--world-size", "6"), 6, ""),
        (
            (24, 4, None),
            ("--world-size", "4"),
            0,
            "must be a multiple of train_micro_batch_size_per_gpu 4 x 4 ranks = 16",
        ),
        ((7, None, None), (), 7, ""),
        ((7, None, 2), (), 0, "must be a multiple of gradient_accumulation_steps 2, got 7"),
        ((None, 3, 5), ("--world-size", "7"), 7, ""),
        (("auto", 3, 5), ("--world-size", "7"), 7, ""),
        ((64, "auto", "auto"), ("--world-size", "7"), 7, ""),
        ((None, None, None), (), 8, ""),
    ],
)
def test_the_batch_sizes(
    sizes: tuple[Any, ...], options: tuple[str, ...], ranks: int, said: str, tmp_path: Path
) -> None:
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    content = {**BLOCK, **{key: size for key, size in zip(keys, sizes, strict=True) if size is not None}}
    result = check(tmp_path / "c.json", content, *options)
    if said:
        assert said in sentence_of(result)
    else:
        assert result.exit_code == 0, result.output
        assert f"over {ranks} ranks" in result.stdout


def test_auto_is_for_the_trainer_and_said(tmp_path: Path) -> None:
    content = {**BLOCK, "train_batch_size": "auto", "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 2}}
    result = check(tmp_path / "c.json", content)
    assert result.exit_code == 0, result.output
    assert '"auto"      train_batch_size, bf16.enabled: for the Hugging Face Trainer to fill in' in result.stdout
    assert '"auto"' not in check(tmp_path / "c.json", {**BLOCK, "train_batch_size": 8}).stdout


@pytest.mark.parametrize("text", ["\ufeff%s", "// NaN\n%s", "%s\r\n\r\n", "# a\r\n%s /* b */", " %s"])
def test_what_people_write_around_it(text: str, tmp_path: Path) -> None:
    result = check(tmp_path / "c.json", text % json.dumps({**BLOCK, "train_batch_size": 8}))
    assert result.exit_code == 0, result.output
    assert DeepSpeedConfig(str(tmp_path / "c.json")).train_batch_size == 8  # the same file, read by DeepSpeed


@pytest.mark.parametrize("zero", [True, {"stage": "2"}, {"stage": 2.0}, {"stage": 1, "overlap_comm": "true"}])
def test_values_that_deepspeed_converts_are_read_as_it_does(zero: Any, tmp_path: Path) -> None:
    block = {"direction": {"method": "exact"}, "respond": {"on_replica_drift": "mean"}}
    said = sentence_of(check(tmp_path / "c.json", {"silent_consistency": block, "zero_optimization": zero}))
    assert "ZeRO stage" in said  # which has no full replica
    relaxed = {"silent_consistency": {"direction": {"method": "exact"}}, "zero_optimization": zero}
    result = check(tmp_path / "c.json", relaxed)
    assert ("one fp32 copy" in result.stdout) == (zero is not True)


# -- what is accepted is accepted by DeepSpeed ---------------------------------------------------------

VALID: list[dict[str, Any]] = [
    {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.99]}}},
    {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "overlap_comm": True, "offload_optimizer": {"device": "cpu"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "data_types": {"grad_accum_dtype": "fp32"},
    },
    {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "fp16": {"enabled": True, "initial_scale_power": 8},
        "zero_optimization": {"stage": 3, "contiguous_gradients": True},
        "communication_data_type": "fp32",
        "prescale_gradients": False,
        "gradient_predivide_factor": 1.0,
        "steps_per_print": 10,
        "wall_clock_breakdown": False,
    },
    {
        "train_batch_size": "auto",
        "zero_optimization": {"stage": 1, "reduce_bucket_size": "auto"},
        "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
        "activation_checkpointing": {"partition_activations": True},
        "compile": {"deepcompile": False},
        "tensorboard": {"enabled": False},
        "checkpoint": {"tag_validation": "Warn"},
    },
]  # fmt: skip
ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 8, 9, 1.5, -0.0, 1e308, 10**30, 10**400, "", "x", "auto", "true", "2", "NaN",
    "\ud800", "\x1b[2J", [], [1], ["AdamW"], {}, {"a": 1}, {"type": "AdamW"}, {"enabled": True}, {"stage": 2}, [[[]]],
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield (*path, key)
        yield from places(child, (*path, key))


def mutated(config: dict[str, Any], dice: random.Random) -> dict[str, Any]:
    config = {"silent_consistency": {"interval": 2, "direction": {"method": "exact"}}, **copy.deepcopy(config)}
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        *outer, key = dice.choice(list(places(config)))
        inner: Any = config
        for part in outer:
            inner = inner[part]
        act = dice.random()
        if act < 0.3 and isinstance(inner[key], (bool, int, float)):  # something that may well be right
            inner[key] = not inner[key] if isinstance(inner[key], bool) else 2 * inner[key]
        elif act < 0.75:
            inner[key] = copy.deepcopy(dice.choice(ODD))
        elif act < 0.85:
            del inner[key]
        elif isinstance(inner, dict):
            inner[dice.choice(("stage", "enabled", "nope", "type", "train_batch_size", "bf16", ""))] = dice.choice(ODD)
        if not config:
            break
    return config


def filled_in(config: Any) -> Any:
    """As the Trainer would: no "auto" is left."""
    if isinstance(config, dict):
        return {key: filled_in(value) for key, value in config.items() if value != "auto"}
    return [filled_in(value) for value in config] if isinstance(config, list) else config


@pytest.mark.long
def test_what_check_accepts_deepspeed_accepts_and_nothing_is_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = [1]
    monkeypatch.setattr(deepspeed.runtime.config.dist, "get_rank", lambda *a, **k: 0)
    monkeypatch.setattr(deepspeed.runtime.config.dist, "get_world_size", lambda *a, **k: ranks[0])
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    dice, accepted, refused, sizes = random.Random(7), 0, 0, ("train_batch_size", "train_micro_batch_size_per_gpu")
    for _ in range(500):
        ranks[0] = dice.choice((8, 8, 8, 1, 3))
        config = mutated(dice.choice(VALID), dice)
        result = check(tmp_path / "c.json", config, "--world-size", str(ranks[0]))
        if result.exit_code:
            sentence_of(result)
            refused += 1
            continue
        assert result.stderr == ""
        whole = filled_in(config)
        if all(whole.get(key) is None for key in sizes) or "auto" in [config.get(key) for key in sizes]:
            whole = {key: value for key, value in whole.items() if "batch" not in key and "accumulation" not in key}
            whole["train_micro_batch_size_per_gpu"] = 1
        found = DeepSpeedConfig(whole)  # raises where it does not take it
        assert found.world_size == ranks[0]
        assert found.zero_optimization_stage in (0, 1, 2, 3)
        accepted += 1
    assert min(accepted, refused) > 100, (accepted, refused)
    for base in VALID:
        assert check(tmp_path / "c.json", {**BLOCK, **base}).exit_code == 0


@pytest.mark.long
def test_no_damage_to_the_text_is_a_traceback(tmp_path: Path) -> None:
    dice, outcomes = random.Random(11), {0: 0, 2: 0}
    pieces = [
        "{",
        "}",
        "[",
        "]",
        ":",
        ",",
        '"',
        "\\",
        "NaN",
        "-Infinity",
        "1e999",
        "\x00",
        "//",
        "/*",
        "*/",
        "#",
        "'''",
        "\n",
        "\ufeff",
    ]
    for _ in range(300):
        text = json.dumps({**BLOCK, **dice.choice(VALID)}, indent=dice.choice((None, 1)))
        for _ in range(dice.choice((1, 2, 4))):
            at = dice.randrange(len(text))
            text = text[:at] + dice.choice([*pieces, ""]) + text[at + dice.choice((0, 1, 1, 5)) :]
        result = check(tmp_path / "c.json", text)
        assert result.exit_code in outcomes, (text, result.exception)
        outcomes[result.exit_code] += 1
        if result.exit_code == 2:
            sentence_of(result)
    assert outcomes[2] > 50


# -- at the start of a training ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "block",
    [
        {"interval": np.array([1, 2])},
        {"interval": np.int64(2)},
        {"interval": float("nan")},
        {"interval": 10**5000},
        {"detectors": {"false_alarms_per_million_steps": 10**400}},
        {"output_dir": Path("x")},
        {"direction": [("method", "sketch")]},
        {3: 4},
        {"\ud800": 1},
    ],
)
def test_a_wrong_block_is_one_sentence_whatever_it_holds(block: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        parse({"silent_consistency": block})
    assert "\n" not in str(caught.value)
    assert str(caught.value).isascii()
    assert len(str(caught.value)) < 400


def started(directory: str) -> list[str]:
    """A block beside values that DeepSpeed refuses by itself: what initialize raises."""
    raised = []
    for change in (
        {"optimizer": ["AdamW"]},
        {"zero_optimization": [1]},
        {"bf16": [1]},
        {"compile": [1]},
        {"data_types": [1]},
        {"silent_consistency": {"reduction": "ordered"}, "data_types": [1]},
        {"silent_consistency": {"reduction": "ordered"}, "gradient_accumulation_steps": -3},
    ):
        model = Probe(None)
        config = Case().config(Path(directory), enabled=True) | change
        try:
            ds_silent.initialize(model=model, model_parameters=model.parameters(), config=config)
            raised.append("nothing")
        except Exception as error:
            frames, where = error.__traceback__, ""
            while frames is not None:
                where, frames = frames.tb_frame.f_code.co_filename, frames.tb_next
            raised.append("deepspeed" if "/deepspeed/runtime/" in where or "/deepspeed/compile" in where else where)
    dist.barrier()
    return raised


def test_what_deepspeed_refuses_it_refuses_itself(tmp_path: Path) -> None:
    for raised in run_distributed(started, 2, (str(tmp_path),), timeout=300):
        assert set(raised) == {"deepspeed"}, raised
