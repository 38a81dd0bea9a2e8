"""The loss on rows that were held out: the mean over all label tokens of all ranks' shares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from finetune.encoding import IGNORED, Example, collate
from finetune.ranks import Ranks, sum_float32


def evaluate(engine: Any, examples: Sequence[Example], micro_batch: int, pad_id: int, ranks: Ranks) -> float:
    """Mean cross entropy per label token, natural logarithm. A collective; the random generators are not touched.

    Every rank runs as many forward passes as the others, because under ZeRO 3 a forward pass is a collective: a rank
    that has run out of examples repeats the first ones with weight 0.
    """
    passes = math.ceil(len(examples) / (micro_batch * ranks.world_size))
    totals = torch.zeros(2, dtype=torch.float64)  # loss times tokens, tokens
    engine.eval()
    with torch.no_grad():
        for index in range(passes):
            start = (index * ranks.world_size + ranks.rank) * micro_batch
            share = examples[start : start + micro_batch]
            batch = collate(share or examples[:micro_batch], pad_id)
            outputs = engine(
                input_ids=batch.input_ids.to(engine.device),
                attention_mask=batch.attention_mask.to(engine.device),
                labels=batch.labels.to(engine.device),
            )
            if share:
                tokens = int((batch.labels[:, 1:] != IGNORED).sum())
                totals += torch.tensor([float(outputs.loss) * tokens, tokens], dtype=torch.float64)
    engine.train()
    loss, counted = sum_float32(ranks, totals)
    return loss / counted if counted else math.nan
