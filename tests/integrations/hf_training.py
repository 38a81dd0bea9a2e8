"""Small trainings by transformers' Trainer and by accelerate, and what their losses are by plain computation."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset

from ds_silent.config import SilentConsistencyConfig
from ds_silent.drill.training import hash_of
from ds_silent.frameworks.auto_attach import AutoAttach
from ds_silent.observing.observe import observer_of
from ds_silent.sinks.jsonl import read_events, read_metrics

VOCABULARY, LENGTH = 40, 12


class Rows(Dataset[dict[str, Tensor]]):
    """Token rows of unequal numbers of labels, the same on every rank."""

    def __init__(self, rows: int, uneven: bool = True):
        generator = torch.Generator().manual_seed(3)
        self.tokens = torch.randint(0, VOCABULARY, (rows, LENGTH), generator=generator)
        # A row's first label is predicted from nothing: transformers 5 does not count it as an item, 4 does.
        self.ignored = torch.randint(0, LENGTH - 2, (rows,), generator=generator) if uneven else torch.ones(rows).int()

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        labels = self.tokens[index].clone()
        labels[: int(self.ignored[index])] = -100
        return {"input_ids": self.tokens[index], "labels": labels, "attention_mask": torch.ones(LENGTH).long()}


def model_of(dropout: float = 0.0) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, attention_dropout=dropout, **sizes, **tokens))


@dataclass(frozen=True)
class HFCase:
    """One training by the Trainer."""

    accumulation: int = 1
    rows: int = 64
    epochs: float = 1
    steps: int = -1
    loss: str = "model"  # or "given": a compute_loss_func
    uneven: bool = True
    dropout: float = 0.0
    grouped: bool = False  # rows of like lengths together
    stage: int | None = None  # of DeepSpeed
    block: str = "callback"  # or "ds_config", or "-m": of python -m ds_silent
    named: dict[str, Any] = field(default_factory=dict)  # more TrainingArguments


@dataclass(frozen=True)
class HFTrace:
    """What one rank saw."""

    weights: str
    losses: tuple[float, ...]  # per step: the mean over micro-batches of this rank's mean losses, computed plainly
    records: tuple[dict[str, Any], ...] = ()
    events: tuple[dict[str, Any], ...] = ()
    trained: float = 0.0


def as_launched(deepspeed: bool) -> None:
    """What torchrun sets and the spawner does not: the environment that accelerate reads.

    It knows DeepSpeed on accelerators only: on CPUs it would call every rank the only one.
    """
    from accelerate.state import AcceleratorState, DistributedType, PartialState

    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(cpu=True)
    if deepspeed:
        PartialState._shared_state["distributed_type"] = DistributedType.DEEPSPEED


def plain_loss(logits: Tensor, labels: Tensor) -> float:
    """The mean over a micro-batch's own label tokens, in float64."""
    flat, targets = logits[:, :-1].double().flatten(0, 1), labels[:, 1:].flatten()
    kept = targets != -100
    return float(torch.nn.functional.cross_entropy(flat[kept], targets[kept]))


def squared(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """A loss of one's own, in the form that the Trainer asks for: it divides by the step's items."""
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    total = torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
    return total / num_items_in_batch


def trainer_of(
    case: HFCase, directory: Path, callbacks: Sequence[Any] = (), block: dict[str, Any] | None = None
) -> Any:
    from transformers import Trainer, TrainingArguments

    named: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": case.accumulation,
        "num_train_epochs": case.epochs,
        "max_steps": case.steps,
        "learning_rate": 1e-2,
        "use_cpu": case.stage is None,
        "accelerator_config": {"use_configured_state": True},
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 11,
    }
    if case.stage is not None:
        ds_config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "zero_optimization": {"stage": case.stage},
            "zero_force_ds_cpu_optimizer": False,
        }
        named["deepspeed"] = ds_config if block is None else {**ds_config, "silent_consistency": block}
    if case.grouped:  # transformers 5, and 4
        new = "train_sampling_strategy" in TrainingArguments.__dataclass_fields__
        named |= {"train_sampling_strategy": "group_by_length"} if new else {"group_by_length": True}
    arguments = TrainingArguments(str(directory), **{**named, **case.named})
    loss = {"compute_loss_func": squared} if case.loss == "given" else {}
    trainer = Trainer(
        model_of(case.dropout), arguments, train_dataset=Rows(case.rows, case.uneven), callbacks=list(callbacks), **loss
    )
    if trainer.place_model_on_device:
        trainer.model.to(arguments.device)
    return trainer


def train(case: HFCase, directory: Path, observed: bool, resume: bool = False) -> HFTrace:
    """On every rank."""
    from ds_silent.integrations.huggingface import SilentConsistencyCallback

    as_launched(case.stage is not None)
    block = {"output_dir": str(directory / "silent"), "tensorboard": False}
    callbacks = [SilentConsistencyCallback(block)] if observed and case.block == "callback" else []
    auto_attach = AutoAttach(SilentConsistencyConfig(**block)) if observed and case.block == "-m" else None
    trainer = trainer_of(case, directory, callbacks, block if observed and case.block == "ds_config" else None)
    micro: list[float] = []
    steps: list[float] = []
    kept = trainer.compute_loss

    def compute_loss(model: Any, inputs: dict[str, Any], **named: Any) -> Any:
        labels = inputs["labels"].clone()
        returns = named.pop("return_outputs", False)
        loss, outputs = kept(model, inputs, return_outputs=True, **named)
        if model.training:
            micro.append(plain_loss(outputs.logits.detach(), labels))
            if trainer.accelerator.sync_gradients:
                steps.append(sum(micro) / len(micro))
                micro.clear()
        return (loss, outputs) if returns else loss

    trainer.compute_loss = compute_loss
    result = trainer.train(resume_from_checkpoint=resume or None)
    wrapper = "DistributedDataParallel" if case.stage is None else "DeepSpeedEngine"
    assert type(trainer.model_wrapped).__name__ == wrapper
    dispatches = case.named.get("accelerator_config", {}).get("dispatch_batches", False)
    assert (type(trainer.callback_handler.train_dataloader).__name__ == "DataLoaderDispatcher") == dispatches
    observed_still = [callback for callback in callbacks if callback.observer is not None]
    assert not observed_still, "an observer is open behind the training's end"
    if auto_attach is not None:
        auto_attach.undo()
        observer = observer_of(trainer.model_wrapped)
        assert observer is not None
        observer.close()
    weights = hash_of(parameter.detach() for parameter in trainer.model.parameters())
    records: tuple[dict[str, Any], ...] = ()
    events: tuple[dict[str, Any], ...] = ()
    silent = directory / "silent"
    if observed and dist.get_rank() == 0 and silent.exists():
        records = tuple(read_metrics(silent / "metrics.jsonl"))
        events = tuple(event for event in read_events(silent / "events.jsonl") if event["severity"] != "info")
    return HFTrace(weights, tuple(steps), records, events, result.training_loss)
