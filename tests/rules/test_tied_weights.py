"""A model whose configuration ties its embeddings, and what unties them in silence."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import ds_silent
from ds_silent.rules.weights_in_use import TiedWeights
from ds_silent.sinks.jsonl import read_events
from tests.support.distributed import run_distributed

pytest.importorskip("transformers")
from tests.rules.small_models import model_of, words


def found(model: nn.Module) -> list[tuple[str, str]]:
    framework: Any = SimpleNamespace(module=model, step=1)
    rule = TiedWeights(framework)
    assert rule.breaches() == rule.breaches()
    return [(breach.severity, breach.message) for breach in rule.breaches()]


def untied(model: nn.Module) -> nn.Module:
    """As code does that loads or resizes one of the two."""
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    head.weight = nn.Parameter(head.weight.detach().clone())
    return model


class Adapter(nn.Module):
    """A trained addition to an embedding, of its shape."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.weight = base, nn.Parameter(torch.zeros_like(base.weight))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["gpt2", "bert", "bert-lm", "t5", "llama"])
def test_embeddings_that_a_configuration_ties_are_one_parameter(kind: str) -> None:
    model = model_of(kind, tie_word_embeddings=True)
    assert found(model) == []
    [(severity, message)] = found(untied(model))
    assert severity == "warning"
    assert "they are two parameters" in message
    assert "None" not in message


def test_what_is_apart_by_design_is_silent() -> None:
    from transformers import BertConfig, BertForSequenceClassification, Wav2Vec2Config, Wav2Vec2ForCTC

    assert found(untied(model_of("llama", tie_word_embeddings=False))) == []
    small: Any = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32}
    assert found(BertForSequenceClassification(BertConfig(**small, vocab_size=16))) == []
    assert found(Wav2Vec2ForCTC(Wav2Vec2Config(**small, vocab_size=16, conv_dim=[8] * 7))) == []
    frozen = untied(model_of("llama", tie_word_embeddings=True))
    frozen.get_output_embeddings().weight.requires_grad_(False)  # type: ignore[operator]
    assert found(frozen) == []
    assert found(nn.Linear(2, 2)) == []
    adapted: Any = model_of("llama", tie_word_embeddings=True).requires_grad_(False)
    for end in ("input", "output"):
        base = getattr(adapted, f"get_{end}_embeddings")()
        getattr(adapted, f"set_{end}_embeddings")(Adapter(base))
    assert found(adapted) == []


def trained(directory: str, apart: bool) -> bool:
    """Train a small Llama under FSDP2; return whether its two embeddings are equal at the end."""
    from torch.distributed.fsdp import fully_shard

    model: Any = model_of("llama", tie_word_embeddings=True)
    fully_shard(untied(model) if apart else model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with ds_silent.observe(model, optimizer, config={"output_dir": directory, "tensorboard": False}):
        for step in range(3):
            optimizer.zero_grad()
            tokens = words(2, 12, step)
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
    first, last = (one.weight.full_tensor() for one in (model.get_input_embeddings(), model.get_output_embeddings()))
    return bool(torch.equal(first, last))


@pytest.mark.parametrize("apart", [False, True])
def test_in_a_training(apart: bool, tmp_path: Path) -> None:
    equal = run_distributed(trained, 2, (str(tmp_path), apart))
    assert equal == [not apart] * 2
    told = [e for e in read_events(tmp_path / "events.jsonl") if e["kind"] == "update-mismatch"]
    assert [(e["step"], e["severity"], e["where"]) for e in told] == [(1, "warning", "tied embeddings")] * apart
