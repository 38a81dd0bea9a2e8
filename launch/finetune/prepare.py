"""Everything before the Trainer: config, model, data and plan, agreed step by step by all ranks.

prepared = prepare(settings, ranks)
"""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass, fields
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
from finetune.ranks import Ranks, agreed, gather_int32
from finetune.sampler import Plan
from finetune.settings import Settings, UserError, option_of

LONGEST = 1024  # tokens, the paper's
_OF_ONE_HOST = ("model", "data", "progress")  # options that may differ: a place of its own on each host, a terminal
_ARCHITECTURE = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "tie_word_embeddings",
)
"""Keys of a model's config on which what it computes depends."""


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
    facts: Facts  # what a resumed run must share with the one that it continues

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
    _refuse_other_options(settings, ranks)
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
    facts = agreed(ranks, lambda: _facts(settings, config, loaded, training, plan))
    prepared = Prepared(config, arguments, loaded, training, evaluation, plan, total_steps, facts)
    if ranks.is_first:
        _announce(prepared, settings, encoded.dropped, len(rows))
    return prepared


def _facts(
    settings: Settings, config: dict[str, Any], loaded: LoadedModel, training: list[Example], plan: Plan
) -> Facts:
    """What a resumed run must share with the one that it continues."""
    model, rows = loaded.model, 0
    for example in training:
        rows = zlib.crc32(example.ids.tobytes(), zlib.crc32(str(example.prompt_length).encode(), rows))
    shapes = [(name, tuple(getattr(one, "ds_shape", one.shape))) for name, one in model.named_parameters()]
    shape = (f"{key} {getattr(model.config, key)}" for key in _ARCHITECTURE if hasattr(model.config, key))
    return {
        "ranks": plan.world_size,
        "ZeRO stage": zero_stage(config),
        "dtype": str(dtype_of(config)),
        "parameters": int(model.num_parameters()),
        "model": f"{model.config.model_type}: {', '.join(shape)}",
        "parameters' names and shapes": zlib.crc32(repr(shapes).encode()),
        "training rows": plan.rows,
        "micro-batch": plan.micro_batch,
        "accumulation": plan.accumulation,
        "sampler": settings.sampler,
        "drop-last": settings.drop_last,
        "scenario": settings.scenario,
        "seed": settings.seed,
        "rows whose tokens have the check sum": rows,
    }


def _refuse_other_options(settings: Settings, ranks: Ranks) -> None:
    """A collective.

    Raises:
        SystemExit: on every rank, where an option of one has another value than rank 0's.
    """
    names = [field.name for field in fields(settings) if field.name not in _OF_ONE_HOST]
    values = [repr(getattr(settings, name)) for name in names]
    first = gather_int32(ranks, [zlib.crc32(value.encode()) >> 1 for value in values])
    other = [name for name, own, zero in zip(names, first[ranks.rank], first[0], strict=True) if own != zero]

    def refuse() -> None:
        if other:
            raise UserError(
                f"{option_of(other[0])} is {getattr(settings, other[0])} on rank {ranks.rank}, and another "
                "value on rank 0: give every rank the same options"
            )

    agreed(ranks, refuse)


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
