"""Scripts of transformers and TRL as they stand: ``python -m ds_silent`` and the ds_config's block are all."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from ds_silent.extras import installed
from ds_silent.sinks.jsonl import read_events, read_metrics
from finetune.models import EMBEDDED
from tests.frameworks.test_ways_in import free_port, run
from tests.support.interpreter import interpreter

SCRIPTS = Path(__file__).parent / "scripts"
COMMON = ["--max_steps=3", "--per_device_train_batch_size=4", "--gradient_accumulation_steps=2", "--logging_steps=1"]
QUIET = ["--report_to", "none", "--save_strategy", "no"]


def launched(script: list[str], tmp_path: Path) -> list[dict[str, Any]]:
    """The records of a script under DeepSpeed, on two ranks; nothing was found wrong."""
    ds_config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": 2},
        "zero_force_ds_cpu_optimizer": False,
        "silent_consistency": {"output_dir": str(tmp_path / "run"), "tensorboard": False},
    }
    (tmp_path / "ds_config.json").write_text(json.dumps(ds_config))
    command = [interpreter(), "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", free_port()]
    options = [
        "--deepspeed",
        "ds_config.json",
        "--accelerator_config",
        '{"use_configured_state": true}',
        *COMMON,
        *QUIET,
    ]
    ours = ["-m", "ds_silent", str(SCRIPTS / "deepspeed_on_cpu.py")]
    status, said = run([*command, *ours, *script, *options, "--output_dir", "out"], tmp_path)
    assert status == 0, said
    events = read_events(tmp_path / "run" / "events.jsonl")
    assert [event for event in events if event["severity"] != "info"] == []
    return list(read_metrics(tmp_path / "run" / "metrics.jsonl"))


def logged(tmp_path: Path) -> list[float]:
    history = json.loads((tmp_path / "out" / "trainer_state.json").read_text())["log_history"]
    return [one["loss"] for one in history if "loss" in one]


@pytest.mark.long
def test_run_clm(tmp_path: Path) -> None:
    lines = [f"What is {i} plus {j}? It is {i + j}.\n" for i in range(20) for j in range(9)]
    (tmp_path / "train.txt").write_text("".join(lines))
    script = [str(SCRIPTS / "run_clm.py"), "--model_name_or_path", str(EMBEDDED), "--train_file", "train.txt"]
    records = launched(script, tmp_path)
    assert [record["step"] for record in records] == [1, 2, 3]
    assert [record["loss"]["mean"] for record in records] == pytest.approx(logged(tmp_path), rel=1e-4)


REWARDS = "def variety(completions, **_): return [len(set(one)) / 20 for one in completions]\n"


def launched_of_trl(name: str, rows: list[dict[str, str]], tmp_path: Path, *options: str) -> list[dict[str, Any]]:
    """The records of three steps of TRL's own script of that name, on these rows."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    script = [f"trl.scripts.{name}", "--model_name_or_path", str(EMBEDDED), "--dataset_name", "data", *options]
    records = launched([*script, "--bf16", "False", "--dtype", "float32"], tmp_path)
    assert [record["step"] for record in records] == [1, 2, 3]
    return records


@pytest.mark.skipif(not installed("trl"), reason="TRL is not installed")
@pytest.mark.long
def test_trls_own_sft_script(tmp_path: Path) -> None:
    rows = [{"prompt": f"What is {i} plus {j}?", "completion": f" It is {i + j}."} for i in range(8) for j in range(8)]
    assert all(4 < record["loss"]["mean"] < 5 for record in launched_of_trl("sft", rows, tmp_path))


@pytest.mark.skipif(not installed("trl"), reason="TRL is not installed")
@pytest.mark.long
def test_trls_own_dpo_script(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"What is {i} plus {j}?", "chosen": f" It is {i + j}.", "rejected": f" It is {i * j + 1}."}
        for i in range(8)
        for j in range(8)
    ]
    first, *_ = launched_of_trl("dpo", rows, tmp_path)
    objective = first["objective"]
    assert objective["labels"] == 16  # one comparison per row: 2 ranks x 2 micro-batches x 4 rows
    assert objective["weight_sum"] == pytest.approx(1.0, rel=1e-6)
    assert objective["weight_min"] == objective["weight_max"] == pytest.approx(1 / 16, rel=1e-6)
    assert first["loss"]["mean"] == pytest.approx(math.log(2.0), rel=1e-4)


@pytest.mark.skipif(not installed("trl"), reason="TRL is not installed")
@pytest.mark.long
def test_trls_own_grpo_script(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(REWARDS)
    rows = [{"prompt": f"What is {i} plus {j}?"} for i in range(8) for j in range(8)]
    options = ("--reward_funcs", "own.variety", "--num_generations", "4", "--max_completion_length", "8")
    records = launched_of_trl("grpo", rows, tmp_path, *options)
    assert not records[0]["objective"]["known"]
    assert all(record["direction"]["mean_cosine"] < 0.99 for record in records)
