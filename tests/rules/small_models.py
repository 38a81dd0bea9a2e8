"""Small language models of transformers from random weights, and rows of tokens for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertLMHeadModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

VOCABULARY, BEGIN, END, PADDING = 64, 1, 2, 3
FIRST_WORD = 4
SPECIAL = {"bos_token_id": BEGIN, "eos_token_id": END, "pad_token_id": PADDING}
_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


def model_of(kind: str, **more: Any) -> nn.Module:
    torch.manual_seed(3)
    settings = {"vocab_size": VOCABULARY, **SPECIAL, **more}
    if kind == "gpt2":
        return GPT2LMHeadModel(GPT2Config(**{"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **settings}))
    if kind == "bert":
        return BertForMaskedLM(BertConfig(**_SIZES, **settings))
    if kind == "bert-lm":  # its loss shifts, and it is bidirectional
        return BertLMHeadModel(BertConfig(**_SIZES, **settings))
    if kind == "t5":
        sizes = {"d_model": 32, "d_kv": 8, "num_layers": 1, "num_heads": 4, "d_ff": 64}
        return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=PADDING, **settings))
    decoder = {**_SIZES, "num_key_value_heads": 2, "use_cache": False, **settings}
    if kind == "mixtral":
        return MixtralForCausalLM(MixtralConfig(**decoder, num_local_experts=4))
    return LlamaForCausalLM(LlamaConfig(**decoder))


def words(rows: int, length: int, seed: int = 0) -> Tensor:
    """(rows, length) tokens, none of which is special."""
    return torch.randint(FIRST_WORD, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))
