"""What one fine-tune is to do: the options of the command line, checked before anything expensive starts.

    settings = checked(Settings(data="alpaca.json", scenario="s1-3"))

A field's annotation is its option. Every bound is in :func:`checked`; its errors are one sentence with the option's
name, value, bound and remedy.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import typer

Scenario = Literal["s1-1", "s1-2", "s1-3"]
SamplerMode = Literal["sharded", "replicated"]
Template = Literal["alpaca", "alpaca-with-input"]

CONFIGS = Path(__file__).resolve().parents[2] / "configs"  # those of the project
EXIT_USER_ERROR = 2
EXIT_STOPPED = 75  # EX_TEMPFAIL of sysexits.h: a checkpoint was saved, the same command with --resume goes on
LARGEST_SEED = 2**31 - 2**20  # seeds travel as int32 and rank numbers are added to them


class UserError(Exception):
    """A mistake that the user can correct; its text is the one sentence that is printed."""


def _option(panel: str, text: str, *names: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel)


_DATA, _BATCH, _SCHEDULE, _SCENARIO, _KEEP = "Model and data", "Batch", "Schedule", "Scenario", "Saving and showing"
_CONFIG = _option(
    _BATCH,
    "DeepSpeed JSON; by default the one of configs/ for this accelerator.",
    *("--deepspeed", "--deepspeed_config", "--deepspeed-config"),
)


@dataclass(frozen=True)
class Settings:
    """One run. ``None``: from the DeepSpeed config, or the default that :mod:`finetune.ds_config` names."""

    model: Annotated[str, _option(_DATA, "'embedded', a directory, a GGUF file or a hub id.")] = "embedded"
    revision: Annotated[str | None, _option(_DATA, "Commit or tag of a hub model.")] = None
    data: Annotated[str, _option(_DATA, "'embedded', a .json, .jsonl or .parquet file, or a hub id.")] = "embedded"
    template: Annotated[Template, _option(_DATA, "'alpaca-with-input' shows an empty input too.")] = "alpaca"
    append_eos: Annotated[bool, _option(_DATA, "End each response with the eos token.")] = True
    max_length: Annotated[int | None, _option(_DATA, "Tokens per row; 1024, or what the model holds.")] = None
    scenario: Annotated[Scenario, _option(_SCENARIO, "Seeds: all the same, rank 0 another, each its own.")] = "s1-1"
    sampler: Annotated[SamplerMode, _option(_SCENARIO, "'replicated' forgets to share the rows out, on purpose.")] = (
        "sharded"
    )
    seed: Annotated[int, _option(_SCENARIO, "Of data order and generators.")] = 42
    deepspeed_config: Annotated[str | None, _CONFIG] = None
    micro_batch: Annotated[int | None, _option(_BATCH, 'Rows per rank and pass, where the JSON says "auto"; 2.')] = None
    accumulation: Annotated[int | None, _option(_BATCH, 'Passes per step, where the JSON says "auto"; 4.')] = None
    drop_last: Annotated[bool, _option(_BATCH, "Leave out an epoch's incomplete last batch, or complete it.")] = True
    activation_checkpointing: Annotated[bool, _option(_BATCH, "Less memory for a second forward pass.")] = False
    learning_rate: Annotated[float | None, _option(_SCHEDULE, "Peak learning rate; 5e-5.", "--lr")] = None
    weight_decay: Annotated[float | None, _option(_SCHEDULE, "Of matrices; 0.01.")] = None
    warmup_ratio: Annotated[float, _option(_SCHEDULE, "Share of the steps.")] = 0.0
    epochs: Annotated[int, _option(_SCHEDULE, "Passes over the rows.")] = 1
    max_steps: Annotated[int | None, _option(_SCHEDULE, "Steps, instead of epochs.")] = None
    eval_rows: Annotated[int, _option(_SCHEDULE, "Rows to hold out.")] = 0
    eval_every: Annotated[int, _option(_SCHEDULE, "Steps; 0: after the last.")] = 0
    output: Annotated[Path, _option(_KEEP, "Where everything is written.")] = Path("runs/finetune")
    save_every: Annotated[int, _option(_KEEP, "Steps between checkpoints; 0: on a signal only.")] = 0
    resume: Annotated[bool, _option(_KEEP, "Go on from the output's checkpoint.", "--resume")] = False
    save_model: Annotated[bool, _option(_KEEP, "Write the trained model at the end.")] = True
    log_every: Annotated[int, _option(_KEEP, "Steps between lines.")] = 10
    progress: Annotated[bool, _option(_KEEP, "A progress bar on rank 0, on a terminal.")] = True

    @property
    def checkpoints(self) -> Path:
        """Where this run's checkpoints lie."""
        return self.output / "checkpoints"


_AT_LEAST = {
    "max_length": (8, "tokens"),
    "micro_batch": (1, "rows"),
    "accumulation": (1, "micro-batches"),
    "epochs": (1, "epochs"),
    "max_steps": (1, "steps"),
    "eval_rows": (0, "rows"),
    "eval_every": (0, "steps"),
    "save_every": (0, "steps"),
    "log_every": (1, "steps"),
}


def option_of(name: str) -> str:
    """Return how a field is given on the command line."""
    [option] = get_type_hints(Settings, include_extras=True)[name].__metadata__
    named = option.default  # typer's first name of an annotated option
    return named if isinstance(named, str) else f"--{name.replace('_', '-')}"


def checked(settings: Settings) -> Settings:
    """Return ``settings`` unchanged.

    Raises:
        UserError: one value is out of its bounds, or two contradict each other.
    """
    for name, choices in (("scenario", Scenario), ("sampler", SamplerMode), ("template", Template)):
        value = getattr(settings, name)
        if value not in get_args(choices):
            raise UserError(f"--{name} must be one of {', '.join(get_args(choices))}, got {value!r}")
    for name, (bound, unit) in _AT_LEAST.items():
        value = getattr(settings, name)
        if value is not None and value < bound:
            raise UserError(f"{option_of(name)} must be at least {bound} {unit}, got {value}")
    if not 0 <= settings.seed <= LARGEST_SEED:
        raise UserError(f"--seed must be between 0 and {LARGEST_SEED}, got {settings.seed}")
    if settings.learning_rate is not None and not 0.0 < settings.learning_rate < 10.0:
        raise UserError(f"--lr must be above 0 and below 10, got {settings.learning_rate}; 5e-5 is the default")
    if settings.weight_decay is not None and not 0.0 <= settings.weight_decay < 1.0:
        raise UserError(f"--weight-decay must be at least 0 and below 1, got {settings.weight_decay}")
    if not 0.0 <= settings.warmup_ratio < 1.0:
        raise UserError(f"--warmup-ratio must be at least 0 and below 1, got {settings.warmup_ratio}")
    if settings.eval_every and not settings.eval_rows:
        raise UserError(
            f"--eval-every {settings.eval_every} needs rows to evaluate on: add --eval-rows 64, for example"
        )
    return settings
