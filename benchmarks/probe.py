"""What tests and benchmarks train to compare bit by bit, or with plain torch: a tiny language model with what bites.

    model = Probe(checkpointing=None)
    tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH))
    loss = model(tokens, skip=False)

Weights tied between embedding and output, a frozen parameter, a layer that only some ranks (or only some micro-batches)
use, a bias, a norm, and optional activation checkpointing of both kinds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCABULARY, WIDTH, LENGTH, ROWS = 61, 24, 12, 3
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Probe(nn.Module):
    """A tiny language model; ``skip`` leaves one layer out."""

    def __init__(self, checkpointing: str | None):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(2)
        )
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.checkpointing = checkpointing

    def forward(self, tokens: Tensor, skip: bool) -> Tensor:
        hidden = self.embedding(tokens[:, :-1])
        for layer in self.layers:
            if self.checkpointing:
                hidden = hidden + checkpoint(layer, hidden, use_reentrant=self.checkpointing == "reentrant")
            else:
                hidden = hidden + layer(hidden)
        if not skip:
            hidden = hidden + self.sometimes(hidden)
        logits = self.head(self.norm(hidden + self.frozen(hidden)))
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def full_parameters(engine: Any) -> list[Tensor]:
    """Clone every parameter of a DeepSpeed engine, whole, in its training dtype."""
    import deepspeed

    parameters = []
    for parameter in engine.module.parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=engine.zero_optimization_stage() == 3):
            parameters.append(parameter.detach().clone())
    return parameters
