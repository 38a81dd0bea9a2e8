"""Compare trainings bit by bit or with plain torch: a tiny language model with what bites, and a hash of its state.

    model = Probe(checkpointing=None)
    tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH))
    loss = model(tokens, skip=False)
    hash_of(model.parameters())          # 64 hexadecimal digits; equal only where every bit is

Weights tied between embedding and output, a frozen parameter, a layer that only some ranks (or only some micro-batches)
use, a bias, a norm, and optional activation checkpointing of both kinds.

The hash is another function than the responses' own checksum (:mod:`ds_silent.kernels.checksums`): who judges a repair
must not believe it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

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


def hash_of(values: Iterable[object]) -> str:
    """Return the sha256 of tensors' bits, and of anything else as Python shows it, in their order."""
    digest = hashlib.sha256()
    for value in values:
        if isinstance(value, Tensor):
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            digest.update(repr(value).encode())
    return digest.hexdigest()
