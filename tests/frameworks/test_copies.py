"""Scripts copy an observed model (an EMA, a target network) and save it whole; the copy is the user's alone.

FSDP2 refuses both by itself, and DeepSpeed's own hooks cannot be saved.
"""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

import ds_silent
from ds_silent.sinks.jsonl import read_events, read_metrics
from tests.support.distributed import each, run_distributed

STEPS = 4


def language_model() -> nn.Module:
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2))


def train(framework: str, directory: Path) -> None:
    torch.manual_seed(7)
    inner = language_model()
    block = {"output_dir": str(directory), "tensorboard": False, "trace": {}}
    model: Any
    observer: Any
    if framework == "deepspeed":
        adam = {"lr": 0.001, "torch_adam": True}  # DeepSpeed's own is compiled for minutes
        config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": adam}}
        config["silent_consistency"] = {**block, "enabled": True}
        model, optimizer, _, _ = ds_silent.initialize(model=inner, model_parameters=inner.parameters(), config=config)
        observer = ds_silent.observer_of(model)
    else:
        model = DistributedDataParallel(inner)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
        observer = ds_silent.attach(model, block, optimizer=optimizer)
    assert observer is not None
    for step in range(STEPS):
        tokens = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        loss = model(input_ids=tokens, labels=tokens).loss
        model.backward(loss) if framework == "deepspeed" else loss.backward()
        if framework == "deepspeed":
            model.step()
        else:
            optimizer.step()
            optimizer.zero_grad()
        if step == 1:  # in the middle: every hook is in place
            copies_are_the_users(framework, model, inner, tokens, observer)
    observer.close()


def copies_are_the_users(framework: str, model: Any, inner: nn.Module, tokens: Tensor, observer: Any) -> None:
    for given in [inner] if framework == "deepspeed" else [inner, model]:
        copied = copy.deepcopy(given)
        assert copied is not given
        with torch.no_grad():
            assert torch.equal(copied(input_ids=tokens).logits, given(input_ids=tokens).logits)
    if framework == "ddp":
        file = io.BytesIO()
        torch.save(inner, file)
        file.seek(0)
        assert b"ds_silent" not in file.getvalue()  # it can be loaded where there is none
        loaded = torch.load(file, weights_only=False)
        with torch.no_grad():
            assert torch.equal(loaded(input_ids=tokens).logits, inner(input_ids=tokens).logits)
        assert type(pickle.loads(pickle.dumps(model))) is DistributedDataParallel
    holder = {"observer": observer}  # as a trainer holds it
    assert copy.deepcopy(holder) == {"observer": None}


def test_copies_and_files_hold_nothing_of_the_observer(tmp_path: Path) -> None:
    folders = {framework: tmp_path / framework for framework in ("ddp", "deepspeed")}
    run_distributed(each, 2, (train, {framework: (framework, folder) for framework, folder in folders.items()}))
    for folder in folders.values():
        steps = [record["step"] for record in read_metrics(folder / "metrics.jsonl")]
        assert steps == list(range(1, STEPS + 1)), folder
        assert not [event for event in read_events(folder / "events.jsonl") if event["severity"] != "info"], folder
