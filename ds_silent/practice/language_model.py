"""Train a small causal language model of transformers, on the practice model's rows: its forward's contract is known.

model = LanguageModel()                      # from random weights; transformers is imported here
loss = model(rows.tokens, rows.labels)
model.given = change                         # the forward gets change(batch) from now on
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ds_silent.practice.model import IGNORED, LENGTH, VOCABULARY

PADDING, BEGIN, END = 0, VOCABULARY, VOCABULARY + 1
LEAST_PADDING = 6  # tokens of each row, so that all ranks' rows have the same faults
Inputs = dict[str, Any]
"""Arguments of the forward by their names."""


def batch_of(tokens: Tensor, labels: Tensor) -> Inputs:
    """Make of rows what a healthy script gives: they begin and end with a token of their own, and have a mask."""
    columns = torch.arange(LENGTH, device=tokens.device)
    length = tokens.ne(PADDING).sum(1, keepdim=True).clamp(max=LENGTH - LEAST_PADDING)
    ids = torch.where(columns < length - 1, tokens, torch.where(columns == length - 1, END, PADDING))
    ids[:, 0] = BEGIN
    trained = (labels != IGNORED) & (columns < length)
    return {
        "input_ids": ids,
        "labels": torch.where(trained, ids, IGNORED),
        "attention_mask": (columns < length).long(),
    }


class LanguageModel(nn.Module):
    """A Llama of two layers, called as the practice model is."""

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
