"""What one fine-tune is told to do, checked before anything expensive starts.

    settings = checked(Settings(data="alpaca.json", scenario="s1-3"))

Every bound is in :func:`checked`; its errors are one sentence with the option's name, value, bound and remedy.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

Scenario = Literal["s1-1", "s1-2", "s1-3"]
SamplerMode = Literal["sharded", "replicated"]
Template = Literal["alpaca", "alpaca-with-input"]

CONFIGS = Path(__file__).resolve().parents[2] / "configs"  # those of the project
EXIT_USER_ERROR = 2
EXIT_STOPPED = 75  # EX_TEMPFAIL of sysexits.h: a checkpoint was saved, the same command with --resume goes on
LARGEST_SEED = 2**31 - 2**20  # seeds travel as int32 and rank numbers are added to them


class UserError(Exception):
    """A mistake that the user can correct; its text is the one sentence that is printed."""


@dataclass(frozen=True)
class Settings:
    """One run. ``None``: from the DeepSpeed config, or the default that :mod:`finetune.ds_config` names."""

    model: str = "embedded"  # "embedded", a directory, a GGUF file or a hub id
    revision: str | None = None
    data: str = "embedded"  # "embedded", a .json/.jsonl/.parquet file or a hub id
    template: Template = "alpaca"
    append_eos: bool = True
    max_length: int | None = None  # tokens; None: 1024, or what the model can hold when that is less
    scenario: Scenario = "s1-1"
    sampler: SamplerMode = "sharded"
    seed: int = 42
    drop_last: bool = True
    deepspeed_config: str | None = None  # None: the config of configs/ for the accelerator at hand
    output: Path = Path("runs/finetune")
    micro_batch: int | None = None  # rows per rank and forward pass
    accumulation: int | None = None  # micro-batches per optimizer step
    learning_rate: float | None = None
    weight_decay: float | None = None
    warmup_ratio: float = 0.0
    epochs: int = 1
    max_steps: int | None = None  # optimizer steps; wins over epochs
    activation_checkpointing: bool = False
    eval_rows: int = 0
    eval_every: int = 0  # steps; 0: once, after the last step
    save_every: int = 0  # steps; 0: only when a signal asks for it
    resume: bool = False
    save_model: bool = True
    log_every: int = 10
    progress: bool = True

    @property
    def checkpoints(self) -> Path:
        """Where DeepSpeed's checkpoints of this run lie."""
        return self.output / "checkpoints"


def checked(settings: Settings) -> Settings:
    """Returns ``settings`` unchanged.

    Raises:
        UserError: one value is out of its bounds, or two contradict each other.
    """
    for name, choices in (("scenario", Scenario), ("sampler", SamplerMode), ("template", Template)):
        value = getattr(settings, name)
        if value not in get_args(choices):
            raise UserError(f"--{name} must be one of {', '.join(get_args(choices))}, got {value!r}")
    _at_least("--max-length", settings.max_length, 8, "tokens")
    _at_least("--micro-batch", settings.micro_batch, 1, "rows")
    _at_least("--accumulation", settings.accumulation, 1, "micro-batches")
    _at_least("--epochs", settings.epochs, 1, "epochs")
    _at_least("--max-steps", settings.max_steps, 1, "steps")
    _at_least("--eval-rows", settings.eval_rows, 0, "rows")
    _at_least("--eval-every", settings.eval_every, 0, "steps")
    _at_least("--save-every", settings.save_every, 0, "steps")
    _at_least("--log-every", settings.log_every, 1, "steps")
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


def _at_least(name: str, value: int | None, bound: int, unit: str) -> None:
    if value is not None and value < bound:
        raise UserError(f"{name} must be at least {bound} {unit}, got {value}")
