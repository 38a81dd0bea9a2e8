"""A small GPT from random weights, for what a cold start does to the detectors: warm-up, plateaus, decay.

    order = Scratch(stage=1, dtype="bf16", accumulation=2, seed=3, steps=600, output="runs/scratch")
    train(order)                            # on every rank of a process group

120,000 parameters on the bytes of the embedded instruction set, packed: every row has ``LENGTH`` tokens, all with a
label. AdamW, a tenth of the steps of linear warm-up, cosine decay to a tenth of the peak, clipping at 1. Within 600
steps the loss falls from log 256 through the plateau of letter frequencies to words that are read from the context:
what a large model does in its first thousands of steps.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

sys.path.append(str(Path(__file__).resolve().parents[1] / "launch"))  # the fine-tune's modules

from instructions import generate

VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH = 256, 64, 4, 2, 64
MICRO_BATCH = 8
ROWS = 8192  # instructions; about 14,000 packed rows
WARM_UP, FLOOR = 0.1, 0.1  # shares of the steps and of the peak


@dataclass(frozen=True)
class Scratch:
    """One training from random weights."""

    stage: int
    dtype: str
    accumulation: int
    seed: int
    steps: int
    output: str
    peak: float = 3e-3  # learning rate
    micro_batch: int = MICRO_BATCH

    def ds_config(self) -> dict[str, Any]:
        """Everything on, but for TensorBoard, which draws what is judged already."""
        return {
            "train_micro_batch_size_per_gpu": self.micro_batch,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": 1.0,
            "bf16": {"enabled": self.dtype == "bf16"},
            "zero_optimization": {"stage": self.stage},
            "optimizer": {"type": "AdamW", "params": {"lr": self.peak, "weight_decay": 0.01, "torch_adam": True}},
            "silent_consistency": {"output_dir": self.output, "tensorboard": False},
        }

    def rate(self, done: int) -> float:
        """Of the peak, after ``done`` optimizer steps."""
        warm = max(1, int(WARM_UP * self.steps))
        if done < warm:
            return (done + 1) / warm
        return FLOOR + (1.0 - FLOOR) * 0.5 * (1.0 + math.cos(math.pi * (done - warm) / max(1, self.steps - warm)))


class Packed(Dataset[dict[str, Tensor]]):
    """The instruction set's bytes in rows of ``LENGTH``."""

    def __init__(self, seed: int):
        rows = generate(rows=ROWS, seed=seed)
        text = "\n".join("\n".join((row["instruction"], row["input"], row["output"])) for row in rows)
        whole = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
        self.rows = whole[: len(whole) // LENGTH * LENGTH].view(-1, LENGTH)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm and beside a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.heads, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        query, key, value = (
            part.view(rows, length, HEADS, -1).transpose(1, 2) for part in self.heads(self.norms[0](x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class SmallGPT(nn.Module):
    """Initialised as GPT-2 is: weights 0.02, the layers that write into the residual stream less."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                nn.init.normal_(
                    parameter, std=0.02 / (math.sqrt(2 * LAYERS) if "out." in name or "down." in name else 1)
                )

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(input_ids) + self.places.weight[: input_ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.norm(x) @ self.tokens.weight.T
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


def train(order: Scratch) -> float:
    """The whole training on this rank; the loss of its last step."""
    import deepspeed
    import torch.distributed as dist

    import ds_silent

    torch.manual_seed(order.seed)
    model = SmallGPT()
    data = Packed(order.seed)
    sampler: Any = DistributedSampler(data, dist.get_world_size(), dist.get_rank(), seed=order.seed, drop_last=True)
    engine, *_ = ds_silent.initialize(
        model=model, model_parameters=list(model.parameters()), config=order.ds_config(), sampler=sampler
    )
    assert isinstance(engine, deepspeed.DeepSpeedEngine)
    loss, epoch, done = torch.zeros(()), 0, 0
    while done < order.steps:
        sampler.set_epoch(epoch)
        epoch += 1
        for batch in DataLoader(data, order.micro_batch, sampler=sampler, drop_last=True):
            for group in engine.optimizer.param_groups:
                group["lr"] = order.peak * order.rate(done)
            loss = engine(**batch)
            engine.backward(loss)
            engine.step()
            done = engine.global_steps
            if done == order.steps:
                break
    observer = ds_silent.observer_of(engine)
    if observer is not None:
        observer.close()
    engine.destroy()
    return float(loss)
