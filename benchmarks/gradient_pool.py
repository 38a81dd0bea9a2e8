"""Real gradients of the warm embedded model, reduced to what a bootstrap of per-rank statistics needs.

    pool = load_or_collect(Path("/tmp/ds_silent_pool.pt"), batches=3000, noisy=600, seed=0)
    pool.gram[a, b]     # inner product of the gradients of micro-batches a and b, from sketches of 8,192 numbers

Every micro-batch is ``BATCH`` rows of the embedded instruction set at fixed weights, its gradient computed in fp32 by
plain torch. Noisy micro-batches have a share of their labels replaced by uniformly drawn tokens.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ds_silent.maths.sketch import make_plan, offsets_of, sketch_of

sys.path.append(str(Path(__file__).resolve().parents[1] / "launch"))  # the fine-tune's modules

from finetune.data import Row
from finetune.encoding import IGNORED, collate, encode
from finetune.models import load
from instructions import generate

BATCH, SIZE = 4, 8192
LABEL_NOISE = (0.05, 0.2, 1.0)


@dataclass(frozen=True)
class Pool:
    """Statistics of M micro-batches: float64 on the host."""

    loss: Tensor  # (M,)
    tokens: Tensor  # (M,) label tokens
    gram: Tensor  # (M, M) inner products of the gradients; the diagonal is exact
    kind: Tensor  # (M,) 0 healthy, 1 + index into LABEL_NOISE otherwise

    def of_kind(self, kind: int) -> Tensor:
        """Indices of the micro-batches of one kind."""
        return (self.kind == kind).nonzero().flatten()


def load_or_collect(path: Path, batches: int, noisy: int, seed: int) -> Pool:
    """From the cache file, or computed (about 0.1 s per micro-batch on one core) and kept there."""
    if path.exists():
        return Pool(**torch.load(path))
    pool = collect(batches, noisy, seed)
    torch.save(vars(pool), path)
    return pool


def collect(batches: int, noisy: int, seed: int) -> Pool:
    """``batches`` healthy micro-batches and ``noisy`` of each label noise."""
    loaded = load("embedded", dtype=torch.float32)
    model, tokenizer = loaded.model, loaded.tokenizer
    rows = [Row(**row) for row in generate(rows=4 * batches, seed=1000 + seed)]
    examples = encode(rows, tokenizer, template="alpaca", max_length=512, append_eos=True).examples
    generator = torch.Generator().manual_seed(seed)
    parameters = [p for p in model.parameters() if p.requires_grad]
    offsets, numel = offsets_of([p.numel() for p in parameters])
    plan = make_plan(numel, SIZE)
    kinds = [0] * batches + [1 + index for index in range(len(LABEL_NOISE)) for _ in range(noisy)]
    losses, tokens, squares = [], [], []
    sketches = torch.zeros(len(kinds), SIZE)
    flat = torch.zeros(numel)
    for number, kind in enumerate(kinds):
        chosen = torch.randint(0, len(examples), (BATCH,), generator=generator).tolist()
        batch = collate([examples[i] for i in chosen], pad_id=tokenizer.pad_token_id)
        labels = batch.labels
        if kind:
            drawn = torch.randint(0, model.config.vocab_size, labels.shape, generator=generator)
            hit = torch.rand(labels.shape, generator=generator) < LABEL_NOISE[kind - 1]
            labels = torch.where(hit & (labels != IGNORED), drawn, labels)
        model.zero_grad(set_to_none=True)
        loss = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=labels).loss
        loss.backward()
        for parameter, offset in zip(parameters, offsets, strict=True):
            flat[offset : offset + parameter.numel()] = parameter.grad.detach().flatten()
        losses.append(loss.item())
        tokens.append(int((labels[:, 1:] != IGNORED).sum()))
        squares.append(float(flat.double().square().sum()))
        sketches[number] = sketch_of(plan, flat)
        if number % 500 == 0:
            print(f"micro-batch {number} of {len(kinds)}", flush=True)
    own = torch.tensor(squares, dtype=torch.float64)
    units = sketches.double()
    units *= (own.sqrt() / units.norm(dim=1))[:, None]
    gram = (units @ units.T).fill_diagonal_(0.0) + torch.diag(own)
    return Pool(torch.tensor(losses, dtype=torch.float64), torch.tensor(tokens), gram, torch.tensor(kinds))
