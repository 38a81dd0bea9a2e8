"""Train a language model of 106,240 trainable parameters and made-up rows; nothing is downloaded.

    rows = make_rows(512, seed=1)
    model = PracticeModel()
    warm_up(model)                              # seconds; then its statistics are those of a warm model
    loss = model(rows.tokens[:8], rows.labels[:8])
    model = LanguageModel()                     # of transformers, on the same rows: its forward's contract is known
    model.given = change                        # the forward gets change(batch) from now on

A model with random weights would not do: its losses scatter 20 times too little and its gradients agree far too well,
which makes every fault look easy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, HEADS, LENGTH, LAYERS, DROPOUT = 64, 64, 4, 32, 2, 0.1
WARM_UP_ROWS = 2048
DIALECTS, PROMPT = 3, 6
LEARNT, NEW = (0.6, 0.2, 0.12, 0.08), (0.3, 0.5, 0.1, 0.1)  # how often each preferred successor follows a token
IGNORED = -100  # label of a token that is not learnt
LAST_LAYER = f"layers.{2 * LAYERS - 1}"
PADDING, BEGIN, END = 0, VOCABULARY, VOCABULARY + 1  # of the language model
LEAST_PADDING = 6  # tokens of each of its rows, so that all ranks' rows have the same faults
Inputs = dict[str, Any]
"""Arguments of its forward by their names."""


@dataclass(frozen=True)
class PracticeRows:
    """tokens and labels: (rows, LENGTH) int64; a label is its own token, IGNORED in the prompt and the padding."""

    tokens: Tensor
    labels: Tensor


def make_rows(count: int, seed: int, preference: tuple[float, ...] = NEW) -> PracticeRows:
    """Make sentences of differing length in one of several dialects, each a Markov chain with preferred successors.

    The drill's rows prefer other successors than those of the warm-up, as the data of a fine-tune differ from what the
    model has learnt: so the ranks' gradients share a direction (mean cosine about 0.1 at 8 rows, not 0.01).
    """
    grammar = torch.Generator().manual_seed(5)
    successors = torch.randint(1, VOCABULARY, (DIALECTS, VOCABULARY, 4), generator=grammar)
    generator = torch.Generator().manual_seed(seed)
    dialect = torch.randint(DIALECTS, (count,), generator=generator)
    choices = torch.multinomial(torch.tensor(preference), count * LENGTH, replacement=True, generator=generator).view(
        count, LENGTH
    )
    tokens = torch.empty(count, LENGTH, dtype=torch.int64)
    tokens[:, 0] = torch.randint(1, VOCABULARY, (count,), generator=generator)
    for at in range(1, LENGTH):
        tokens[:, at] = successors[dialect, tokens[:, at - 1], choices[:, at]]
    length = torch.randint(LENGTH // 2, LENGTH + 1, (count,), generator=generator)
    place = torch.arange(LENGTH)
    tokens[place >= length[:, None]] = 0
    labels = tokens.masked_fill((place < PROMPT) | (place >= length[:, None]), IGNORED)
    return PracticeRows(tokens, labels)


class PracticeModel(nn.Module):
    """Pre-norm transformer; attention and MLP are layers of their own, so that one of them can be taken out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(layer for _ in range(LAYERS) for layer in (Attention(), Mlp()))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.rescale = Rescale()
        self.loss_options: dict[str, Any] = {}  # of cross_entropy
        nn.init.normal_(self.embedding.weight, std=0.05)
        nn.init.normal_(self.position.weight, std=0.05)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss over the labelled tokens, fp32; NaN when there is none."""
        hidden = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        logits = self.head(self.rescale(self.norm(hidden)))[:, :-1]
        targets = labels[:, 1:].flatten()
        return F.cross_entropy(logits.float().flatten(0, 1), targets, ignore_index=IGNORED, **self.loss_options)


class Rescale(nn.Module):
    """A frozen parameter and a buffer, as many models have them; they change no bit of what goes through."""

    gain: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)
        self.register_buffer("gain", torch.ones(WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.gain.to(hidden) + self.shift.to(hidden)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(DROPOUT)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        heads = self.qkv(self.norm(hidden)).view(batch, length, 3, HEADS, width // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: Tensor = self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))
        return result


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(DROPOUT)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = self.dropout(self.down(F.gelu(self.up(self.norm(hidden)))))
        return result


def warm_up(model: PracticeModel, steps: int = 160, batch: int = 32) -> float:
    """Train ``model`` in place on rows of its own, in fp32 on this process alone; return the last loss."""
    rows = make_rows(WARM_UP_ROWS, seed=11, preference=LEARNT)
    generator = torch.Generator().manual_seed(12)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    loss = torch.zeros(())
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * (1.0 - step / steps)
        chosen = torch.randint(WARM_UP_ROWS, (batch,), generator=generator)
        loss = model(rows.tokens[chosen], rows.labels[chosen])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def batch_of(tokens: Tensor, labels: Tensor) -> Inputs:
    """Make of rows what a healthy script gives: they begin and end with a token of their own, and have a mask."""
    columns = torch.arange(LENGTH, device=tokens.device)
    length = tokens.ne(PADDING).sum(1, keepdim=True).clamp(max=LENGTH - LEAST_PADDING)
    ids = torch.where(columns < length - 1, tokens, torch.where(columns == length - 1, END, PADDING))
    ids[:, 0] = BEGIN
    trained = (labels != IGNORED) & (columns < length)
    return {"input_ids": ids, "labels": torch.where(trained, ids, IGNORED), "attention_mask": (columns < length).long()}


class LanguageModel(nn.Module):
    """A Llama of two layers from random weights, called as the practice model is; transformers is imported here."""

    given: Callable[[Inputs], Inputs] | None = None

    def __init__(self) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        special = {"pad_token_id": PADDING, "bos_token_id": BEGIN, "eos_token_id": END}
        config: Any = LlamaConfig(vocab_size=VOCABULARY + 2, use_cache=False, **sizes, **special)
        self.model: Any = LlamaForCausalLM(config)

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder's, which FSDP2 shards one by one."""
        layers: nn.ModuleList = self.model.model.layers
        return layers

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss over the labelled tokens."""
        inputs = batch_of(tokens, labels)
        loss: Tensor = self.model(**(inputs if self.given is None else self.given(inputs))).loss
        return loss
