"""Everything before the Trainer: config, model, data and plan, agreed step by step by all ranks.

prepared = prepare(settings, ranks)
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from transformers.utils.logging import disable_progress_bar as hide_loading_bars

from finetune import scenarios
from finetune.checkpoint import Facts
from finetune.data import load_rows
from finetune.ds_config import BatchSizes, arguments_of, dtype_of, read_config, resolve_batch, zero_stage
from finetune.encoding import Encoded, Example, encode, hold_out
from finetune.models import LoadedModel, load
from finetune.ranks import Ranks, agreed
from finetune.sampler import Plan
from finetune.settings import Settings, UserError

LONGEST = 1024  # tokens, the paper's


@dataclass(frozen=True)
class Prepared:
    """What the ranks agreed on before an engine exists; the same on each of them."""

    config: dict[str, Any]
    arguments: dict[str, Any]  # of the Trainer, as far as the config has them too
    loaded: LoadedModel
    training: list[Example]
    evaluation: list[Example]
    plan: Plan
    total_steps: int

    @property
    def parameters(self) -> int:
        """How many numbers are trained, or frozen."""
        return int(self.loaded.model.num_parameters())

    @property
    def row_ids(self) -> npt.NDArray[np.int64]:
        """int64 [training rows]: from a sampler's position to the row's index in its source."""
        return np.array([example.row_id for example in self.training], dtype=np.int64)

    @property
    def pad_id(self) -> int:
        """Any valid token will do: padding is masked by position."""
        pad, eos = self.loaded.tokenizer.pad_token_id, self.loaded.tokenizer.eos_token_id
        return int(pad if pad is not None else eos or 0)


def prepare(settings: Settings, ranks: Ranks) -> Prepared:
    """A collective; raises SystemExit on every rank after one of them has said what is wrong."""
    config, sizes = agreed(ranks, lambda: _config_and_sizes(settings, ranks))
    rows = agreed(ranks, lambda: load_rows(settings.data))
    hide_loading_bars()
    loaded = agreed(ranks, lambda: load(settings.model, dtype=dtype_of(config), revision=settings.revision))

    def examples_and_plan() -> tuple[Encoded, list[Example], list[Example], Plan]:
        encoded = encode(
            rows,
            loaded.tokenizer,
            template=settings.template,
            max_length=_max_length(settings, loaded.model.config),
            append_eos=settings.append_eos,
        )
        training, evaluation = hold_out(encoded.examples, settings.eval_rows, settings.seed)
        plan = Plan(
            len(training), ranks.world_size, sizes.micro_batch, sizes.accumulation, settings.sampler, settings.drop_last
        )
        return encoded, training, evaluation, plan.checked()

    encoded, training, evaluation, plan = agreed(ranks, examples_and_plan)
    total_steps = settings.max_steps or settings.epochs * plan.steps_per_epoch
    arguments = agreed(ranks, lambda: arguments_of(config, settings, sizes, ranks.world_size, total_steps))
    prepared = Prepared(config, arguments, loaded, training, evaluation, plan, total_steps)
    if ranks.is_first:
        _announce(prepared, settings, encoded.dropped, len(rows))
    return prepared


def facts_of(prepared: Prepared, settings: Settings) -> Facts:
    """What a resumed run must share with the one that it continues."""
    plan = prepared.plan
    return {
        "ranks": plan.world_size,
        "ZeRO stage": zero_stage(prepared.config),
        "dtype": str(dtype_of(prepared.config)),
        "parameters": prepared.parameters,
        "training rows": plan.rows,
        "micro-batch": plan.micro_batch,
        "accumulation": plan.accumulation,
        "sampler": settings.sampler,
        "drop-last": settings.drop_last,
        "scenario": settings.scenario,
        "seed": settings.seed,
    }


def _config_and_sizes(settings: Settings, ranks: Ranks) -> tuple[dict[str, Any], BatchSizes]:
    scenarios.checked_world_size(settings.scenario, ranks.world_size)
    config = read_config(settings)
    try:
        settings.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output {settings.output} cannot be made ({error.strerror}): choose another") from error
    if not os.access(settings.output, os.W_OK | os.X_OK):
        raise UserError(f"--output {settings.output} is not writable: choose another, or change its rights")
    return config, resolve_batch(config, settings, ranks.world_size)


def _max_length(settings: Settings, model_config: Any) -> int:
    longest = getattr(model_config, "max_position_embeddings", None)
    if settings.max_length is None:
        return min(LONGEST, longest or LONGEST)
    if longest is not None and settings.max_length > longest:
        raise UserError(
            f"--max-length {settings.max_length} is more than the {longest} positions of this model: lower it"
        )
    return settings.max_length


def _announce(prepared: Prepared, settings: Settings, dropped: int, rows: int) -> None:
    plan = prepared.plan
    lines = [
        f"{prepared.loaded.source}: {prepared.parameters:,} parameters, "
        f"{str(dtype_of(prepared.config)).removeprefix('torch.')}, ZeRO stage {zero_stage(prepared.config)}",
        f"{settings.data}: {plan.rows} rows to train on, {len(prepared.evaluation)} to evaluate on",
        f"{plan.world_size} ranks x {plan.micro_batch} rows x {plan.accumulation} micro-batches, "
        f"{prepared.total_steps} steps",
    ]
    if dropped:
        lines.append(f"{dropped} of {rows} rows have no label (no response, or cut before it) and are left out")
    Console(stderr=True, soft_wrap=True).print("\n".join(lines), markup=False, highlight=False)
