"""A rollout engine's log probabilities against the trainer's: equal weights, old ones, and what cannot be compared."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import ds_silent

VOCABULARY, ROWS, LENGTH = 64, 16, 17


def model(attention: str = "sdpa") -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    return LlamaForCausalLM(
        LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, attn_implementation=attention)  # type: ignore[arg-type]
    )


def tokens(seed: int) -> Tensor:
    return torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def log_probabilities(model: Any, rows: Tensor) -> Tensor:
    logits = model(input_ids=rows).logits[:, :-1].float().log_softmax(-1)
    return logits.gather(-1, rows[:, 1:, None])[..., 0]


@torch.no_grad()
def decoded(model: Any, rows: Tensor) -> Tensor:
    """One token after another with a cache, as an engine does."""
    cache, found = None, []
    for place in range(LENGTH - 1):
        output = model(input_ids=rows[:, place : place + 1], past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        found.append(output.logits[:, -1].float().log_softmax(-1).gather(-1, rows[:, place + 1, None]))
    return torch.cat(found, 1)


def trained(steps: int) -> Any:
    found = model()
    optimizer = torch.optim.AdamW(found.parameters(), lr=1e-3)
    for step in range(steps):
        found(input_ids=tokens(step), labels=tokens(step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return found


def test_an_engine_with_the_trainers_weights_is_within_the_precision_and_one_with_old_weights_is_not() -> None:
    rows, new, old = tokens(99), trained(6), trained(5).bfloat16()
    engine = model("eager")
    engine.load_state_dict(new.state_dict())
    fp32, trainer = log_probabilities(new, rows), log_probabilities(copy.deepcopy(new).bfloat16(), rows)
    same = ds_silent.log_probability_gap(fp32, trainer, decoded(engine.bfloat16(), rows))
    assert (same.verdict, same.rows, same.tokens) == ("within the precision", ROWS, ROWS * (LENGTH - 1))
    assert same.ratio == pytest.approx(1.0, abs=0.1)
    behind = ds_silent.log_probability_gap(fp32, trainer, decoded(old, rows))
    assert behind.verdict == "beyond the precision"
    assert behind.sentence.endswith("Compare the weights with ds_silent.fingerprint first.")


def test_ratio_and_bias_are_the_formulas() -> None:
    generator = np.random.default_rng(3)
    fp32, own, other = generator.normal(size=(3, 20, 7))
    trainer, engine = fp32 + 0.01 * own, fp32 + 0.03 * other + 0.002
    mask = generator.random((20, 7)) < 0.8
    engine[~mask] = np.inf  # padding
    found = ds_silent.log_probability_gap(fp32.tolist(), torch.tensor(trainer), engine, mask)
    squares = [[0.0, 0.0] for _ in range(20)]
    difference, count = 0.0, 0
    for row in range(20):
        for place in range(7):
            if mask[row, place]:
                squares[row][0] += (engine[row, place] - fp32[row, place]) ** 2
                squares[row][1] += (trainer[row, place] - fp32[row, place]) ** 2
                difference += engine[row, place] - trainer[row, place]
                count += 1
    assert found.ratio == pytest.approx(math.sqrt(sum(a for a, _ in squares) / sum(b for _, b in squares)), rel=1e-12)
    assert found.bias == pytest.approx(difference / count, rel=1e-9)
    assert (found.rows, found.tokens) == (20, count)
    assert found.low < found.ratio < found.high
    assert found.verdict == "beyond the precision"


def test_the_interval_holds_the_ratio_that_rows_are_drawn_from() -> None:
    inside = 0
    for seed in range(100):
        generator = np.random.default_rng(seed)
        spread = generator.uniform(0.5, 1.5, size=(32, 1))  # tokens of a row are alike
        own, other = generator.normal(size=(2, 32, 10)) * spread
        found = ds_silent.log_probability_gap(np.zeros((32, 10)), own, 2.0 * other)
        inside += found.low < 2.0 < found.high
    assert 88 <= inside <= 99  # 95 of 100; few rows make a bootstrap's interval a little short


GOOD = np.arange(20.0).reshape(10, 2)


@pytest.mark.parametrize(
    ("named", "sentence"),
    [
        ({"engine": GOOD[:9]}, r"engine must be \(rows, tokens\) as fp32 is, \(10, 2\), got \(9, 2\)"),
        ({"fp32": GOOD[0]}, r"fp32 must be \(rows, tokens\)"),
        ({"mask": np.ones(10)}, r"mask must be"),
        ({"engine": np.full((10, 2), np.nan)}, "engine must be finite where the mask is true"),
        ({"trainer": GOOD}, "trainer must differ from fp32"),
        ({"mask": np.arange(20).reshape(10, 2) < 6}, "at least 8 rows with tokens that count, got 3"),
        ({"limit": 1.0}, "limit must be above 1, got 1.0"),
    ],
)
def test_what_cannot_be_compared_is_one_sentence(named: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        ds_silent.log_probability_gap(**{"fp32": GOOD, "trainer": GOOD + 0.1, "engine": GOOD + 0.2, **named})
