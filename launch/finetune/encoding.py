"""Rows to token ids with labels on the response only, and micro-batches of them.

    encoded = encode(rows, tokenizer, template="alpaca", max_length=1024, append_eos=True)
    batch = collate(encoded.examples[:4], pad_id=tokenizer.pad_token_id)

An example is ``prompt ids + response ids (+ eos)``: the two texts are never tokenised as one, because a token that
spans the border would move it (FACTS: in up to 7 % of the rows). Labels and padding are decided by *position*, so a
tokenizer whose pad token is its eos token, or a response that contains it, changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from finetune.data import Row
from finetune.settings import Template, UserError

IGNORED = -100  # the label that torch's cross entropy leaves out

WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
WITHOUT_INPUT = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)


@dataclass(frozen=True)
class Example:
    """Token ids, int32 [length]; the first ``prompt_length`` carry no label; ``row_id`` is the source's index."""

    ids: npt.NDArray[np.int32]
    prompt_length: int
    row_id: int


@dataclass(frozen=True)
class Encoded:
    """Examples that have a label, and how many rows had none (cut before their response, or an empty response)."""

    examples: list[Example]
    dropped: int


@dataclass(frozen=True)
class MicroBatch:
    """int64 [rows, longest]; ``row_ids`` int64 [rows], on the CPU."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    labels: torch.Tensor
    row_ids: torch.Tensor


def prompt_of(row: Row, template: Template) -> str:
    """The text before the response; ``alpaca-with-input`` shows the input's heading even when the input is empty."""
    chosen = WITH_INPUT if template == "alpaca-with-input" or row.input.strip() else WITHOUT_INPUT
    # replace, not format: a row's text may hold braces
    filled = chosen.replace("{instruction}", row.instruction, 1)
    head, mark, tail = filled.rpartition("{input}")
    return head + row.input + tail if mark and chosen is WITH_INPUT else filled


def encode(rows: Sequence[Row], tokenizer: Any, *, template: Template, max_length: int, append_eos: bool) -> Encoded:
    """Token ids of every row that keeps at least one label within ``max_length`` tokens.

    Args:
        rows: in source order; an example's ``row_id`` is its row's index here.
        tokenizer: a transformers tokenizer. A bos token is put first when the tokenizer does so itself.
        append_eos: end the response with the tokenizer's eos token (it has a label).

    Raises:
        UserError: ``append_eos`` without an eos token, or no row is left.
    """
    eos = tokenizer.eos_token_id
    if append_eos and eos is None:
        raise UserError("this tokenizer has no eos token: add --no-append-eos, or set eos_token in its config")
    bos = _leading_ids(tokenizer)
    prompts = tokenizer([prompt_of(row, template) for row in rows], add_special_tokens=False, verbose=False)[
        "input_ids"
    ]
    responses = tokenizer([row.output for row in rows], add_special_tokens=False, verbose=False)["input_ids"]
    examples = []
    for row_id, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        prompt_length = len(bos) + len(prompt)
        # an empty response has nothing to learn; a lone eos would teach the model to say nothing
        if not response or prompt_length >= max_length:
            continue
        ids = [*bos, *prompt, *response, *([eos] if append_eos else [])][:max_length]
        examples.append(Example(np.asarray(ids, dtype=np.int32), prompt_length, row_id))
    if not examples:
        raise UserError(
            f"none of the {len(rows)} rows has a response within --max-length {max_length} tokens: raise it"
        )
    return Encoded(examples, len(rows) - len(examples))


def hold_out(examples: Sequence[Example], count: int, seed: int) -> tuple[list[Example], list[Example]]:
    """(training, evaluation): ``count`` examples drawn by ``seed`` alone, so the same ones on every rank."""
    if count >= len(examples):
        raise UserError(f"--eval-rows must be below the {len(examples)} rows at hand, got {count}")
    chosen = set(np.random.Generator(np.random.PCG64(seed)).permutation(len(examples))[:count].tolist())
    training = [example for index, example in enumerate(examples) if index not in chosen]
    return training, [examples[index] for index in sorted(chosen)]


def collate(examples: Sequence[Example], pad_id: int) -> MicroBatch:
    """Pads on the right to the longest of ``examples``."""
    longest = max(len(example.ids) for example in examples)
    input_ids = torch.full((len(examples), longest), pad_id, dtype=torch.int64)
    attention_mask = torch.zeros((len(examples), longest), dtype=torch.int64)
    labels = torch.full((len(examples), longest), IGNORED, dtype=torch.int64)
    for position, example in enumerate(examples):
        ids = torch.from_numpy(example.ids.astype(np.int64))
        length = len(ids)
        input_ids[position, :length] = ids
        attention_mask[position, :length] = 1
        labels[position, example.prompt_length : length] = ids[example.prompt_length :]
    row_ids = torch.tensor([example.row_id for example in examples], dtype=torch.int64)
    return MicroBatch(input_ids, attention_mask, labels, row_ids)


def _leading_ids(tokenizer: Any) -> list[int]:
    """The bos token when this tokenizer puts one first by itself, otherwise nothing."""
    bos = tokenizer.bos_token_id
    if bos is None:
        return []
    ids = tokenizer("a")["input_ids"]
    return [bos] if ids and ids[0] == bos else []
