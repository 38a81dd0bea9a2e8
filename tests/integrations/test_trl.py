"""TRL's SFT, DPO and GRPO: the loss that they train on, the same weights, and one engine observed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="TRL is not installed")

import torch
import torch.distributed as dist

from ds_silent.drill.training import hash_of
from ds_silent.sinks.jsonl import read_events, read_metrics
from finetune.models import EMBEDDED
from tests.frameworks.test_ways_in import free_port, run
from tests.integrations.hf_training import as_launched
from tests.support.distributed import run_distributed
from tests.support.interpreter import interpreter

EXAMPLE = Path(__file__).parents[2] / "launch" / "examples" / "trl_sft.py"
STEPS = 2
CASES = {"sft": ("sft", None), "dpo": ("dpo", None), "grpo": ("grpo", None), "dpo, deepspeed": ("dpo", 2)}


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(completion))) for completion in completions]


def trainer_of(kind: str, stage: int | None, directory: Path, callbacks: list[Any]) -> Any:
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    named: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": STEPS,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": stage is None,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "accelerator_config": {"use_configured_state": True},
    }
    if stage is not None:
        auto = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
        ds_config = {**dict.fromkeys(auto, "auto"), "zero_optimization": {"stage": stage}}
        named["deepspeed"] = {**ds_config, "zero_force_ds_cpu_optimizer": False}
    pairs = [(i, j) for i in range(8) for j in range(8)]
    rows = [{"prompt": f"What is {i} plus {j}?"} for i, j in pairs]
    given: dict[str, Any] = {"processing_class": AutoTokenizer.from_pretrained(EMBEDDED), "callbacks": callbacks}
    if kind == "sft":
        rows = [{**row, "completion": f" It is {i + j}."} for row, (i, j) in zip(rows, pairs, strict=True)]
        return trl.SFTTrainer(
            str(EMBEDDED), trl.SFTConfig(str(directory), **named), train_dataset=Dataset.from_list(rows), **given
        )
    if kind == "dpo":
        answers = [{"chosen": f" It is {i + j}.", "rejected": f" No idea {i * j}."} for i, j in pairs]
        rows = [{**row, **answer} for row, answer in zip(rows, answers, strict=True)]
        model, reference = (AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32) for _ in range(2))
        arguments = trl.DPOConfig(str(directory), **named)
        return trl.DPOTrainer(model, reference, arguments, train_dataset=Dataset.from_list(rows), **given)
    arguments = trl.GRPOConfig(str(directory), num_generations=4, max_completion_length=6, beta=0.1, **named)
    return trl.GRPOTrainer(str(EMBEDDED), reward, arguments, train_dataset=Dataset.from_list(rows), **given)


def train(kind: str, stage: int | None, directory: Path, observed: bool) -> dict[str, Any]:
    from ds_silent.integrations.huggingface import SilentConsistencyCallback

    as_launched(stage is not None)
    silent = directory / "silent"
    callbacks = [SilentConsistencyCallback({"output_dir": str(silent), "tensorboard": False})] if observed else []
    torch.manual_seed(5)
    trainer = trainer_of(kind, stage, directory, callbacks)
    trainer.train()
    seen: dict[str, Any] = {"weights": hash_of(p.detach() for p in trainer.model.parameters())}
    seen["logged"] = [one for one in trainer.state.log_history if "loss" in one]
    if observed and dist.get_rank() == 0:
        seen["records"] = list(read_metrics(silent / "metrics.jsonl"))
        seen["events"] = [event for event in read_events(silent / "events.jsonl") if event["severity"] != "info"]
        seen["written"] = [str(path.relative_to(silent)) for path in silent.glob("**/metrics.jsonl")]
    return seen


def all_of_it(directory: str) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """On every rank: each case observed, and not."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    return {
        name: tuple(train(*case, Path(directory, str(place), on), on == "on") for on in ("on", "off"))  # type: ignore[misc]
        for place, (name, case) in enumerate(CASES.items())
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_distributed(all_of_it, 2, (str(tmp_path_factory.mktemp("trl")),), timeout=280)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.long
def test_the_true_loss_and_the_same_weights(name: str, found: list[dict[str, Any]]) -> None:
    observed, plain = found[0][name]
    assert all(rank[name][0]["weights"] == rank[name][1]["weights"] for rank in found)
    assert [one["loss"] for one in observed["logged"]] == [one["loss"] for one in plain["logged"]]
    records = observed["records"]
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    for record, logged in zip(records, observed["logged"], strict=True):
        assert record["loss"]["mean"] == pytest.approx(logged["loss"], rel=1e-5)  # the Trainer's, over all ranks
        assert record["grad_norm"]["aggregated"] == pytest.approx(logged["grad_norm"], rel=1e-4)
        assert record["integrity"]["relative_error"] <= record["integrity"]["rounding_bound"]
    assert observed["events"] == []
    assert observed["written"] == ["metrics.jsonl"]  # the reference's engine has no records


@pytest.mark.long
def test_the_example_under_torchrun(tmp_path: Path) -> None:
    command = [interpreter(), "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", free_port()]
    status, said = run([*command, str(EXAMPLE), "--steps", "3", "--output-dir", str(tmp_path / "out")], tmp_path)
    assert status == 0, said
    records = list(read_metrics(tmp_path / "out" / "metrics.jsonl"))
    assert [record["step"] for record in records] == [1, 2, 3]
    events = read_events(tmp_path / "out" / "events.jsonl")
    assert [event for event in events if event["severity"] != "info"] == []
