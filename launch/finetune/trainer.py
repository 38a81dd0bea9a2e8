"""One fine-tune from settings to a saved model: transformers' Trainer, our rows and the observer.

    outcome = train(checked(Settings(...)), join())

May be called several times in one process group. Every rank calls it, and every rank leaves it the same way. What the
Trainer does not have: a sampler that knows the ranks, which a replicated scenario must not, no decay of vectors where
the config names the optimizer, a loss per label token over held-out rows, and checkpoints that are whole or not there.
"""

from __future__ import annotations

import logging
import math
import os
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import deepspeed
import torch
from accelerate.state import AcceleratorState, DistributedType, PartialState
from deepspeed.utils import logger as deepspeed_logger
from torch import nn
from torch.utils.data import DataLoader
from transformers import PrinterCallback, Trainer, TrainingArguments
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

import ds_silent
from ds_silent.device import kind
from finetune import checkpoint, scenarios
from finetune.ds_config import refuse_auto
from finetune.encoding import IGNORED, Example, collate
from finetune.lost import lost_peers
from finetune.models import save
from finetune.prepare import Prepared, prepare
from finetune.ranks import MISTAKES, Ranks, agreed, sum_float32, together
from finetune.runlog import RunLog
from finetune.sampler import Plan, ResumableSampler
from finetune.scenarios import rank_seed
from finetune.settings import Settings, UserError
from finetune.watch import StopRequest, Watch


@dataclass(frozen=True)
class Outcome:
    """How a run ended: after ``steps`` optimizer steps, with this mean loss over all ranks at the last one."""

    steps: int
    loss: float  # NaN when no step was left to do
    stopped: bool  # by a signal, with a checkpoint saved
    plan: Plan


class FineTune(Trainer):  # type: ignore[misc]  # transformers is not typed
    """transformers' Trainer on our rows: each micro-batch's mean counts alike, as in the paper."""

    def __init__(self, settings: Settings, ranks: Ranks, prepared: Prepared, arguments: TrainingArguments, seed: int):
        self.settings, self.ranks, self.prepared = settings, ranks, prepared
        self.sampler = ResumableSampler(prepared.plan, seed, ranks.rank)
        self.own_loss = torch.zeros((), device=ranks.device)  # this rank's mean over the step's micro-batches
        self.watch = Watch(self, seed)
        model = prepared.loaded.model
        model.config.use_cache = False
        if settings.activation_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        super().__init__(model, arguments, callbacks=[self.watch])
        self.remove_callback(PrinterCallback)
        self.model_accepts_loss_kwargs = False  # else the Trainer takes the mean over the label tokens of all ranks

    def get_train_dataloader(self) -> DataLoader[Example]:
        """Not prepared by accelerate, which would share the rows out once more."""

        def batch_of(examples: list[Example]) -> dict[str, torch.Tensor]:
            return dict(vars(collate(examples, self.prepared.pad_id)))

        return DataLoader(self.prepared.training, batch_sampler=self.sampler, collate_fn=batch_of)  # type: ignore[arg-type]

    def create_optimizer(self, *given: Any) -> Any:
        """The config's optimizer with our groups: the Trainer would let biases and norms decay too."""
        if hasattr(self.optimizer, "params"):  # accelerate's stand-in for the one of the config
            self.optimizer.params = parameter_groups(self.model, self.args.weight_decay)
        return super().create_optimizer(*given)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, *given: Any) -> Any:
        """None where a resumed run has no step left: the Trainer would do one more."""
        left = self.state.global_step < self.state.max_steps
        return super().get_batch_samples(epoch_iterator, num_batches if left else 0, *given)

    def training_step(self, model: Any, inputs: dict[str, Any], *given: Any, **named: Any) -> torch.Tensor:
        """One micro-batch; the observer hears which rows are in it."""
        row_ids = inputs.pop("row_ids")
        if self.watch.observer is not None:
            self.watch.observer.observe_batch(row_ids)
        loss: torch.Tensor = super().training_step(model, inputs, *given, **named)
        self.own_loss += loss.float()
        return loss

    def evaluate(self, *given: Any, **named: Any) -> dict[str, float]:
        """Mean cross entropy per label token of the held-out rows, natural logarithm. A collective.

        Every rank runs as many forward passes as the others, because under ZeRO 3 a forward pass is a collective: a
        rank that has run out of examples repeats the first ones with weight 0.
        """
        examples, size, ranks = self.prepared.evaluation, self.prepared.plan.micro_batch, self.ranks
        totals = torch.zeros(2, dtype=torch.float64)  # loss times tokens, tokens
        self.model_wrapped.eval()
        with torch.no_grad():
            for index in range(math.ceil(len(examples) / (size * ranks.world_size))):
                start = (index * ranks.world_size + ranks.rank) * size
                share = examples[start : start + size]
                batch = vars(collate(share or examples[:size], self.prepared.pad_id))
                inputs = {name: batch[name].to(ranks.device) for name in ("input_ids", "attention_mask", "labels")}
                loss = self.model_wrapped(**inputs).loss
                if share:
                    tokens = int((batch["labels"][:, 1:] != IGNORED).sum())
                    totals += torch.tensor([float(loss) * tokens, tokens], dtype=torch.float64)
        self.model_wrapped.train()
        total, counted = sum_float32(ranks, totals)
        mean = total / counted if counted else math.nan
        self.watch.log.write(self.state.global_step, eval_loss=mean)
        self.control.should_evaluate = False  # the Trainer would ask once more as the epoch ends
        return {"eval_loss": mean}

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write Hugging Face files on rank 0. A collective: under ZeRO 3 parameters are gathered one at a time."""
        if _internal_call:  # for a checkpoint, where DeepSpeed's own files hold the weights
            return
        module, state = self.model, {}
        shared: dict[int, torch.Tensor] = {}  # tied parameters stay one tensor
        for name, parameter in module.named_parameters(remove_duplicate=False):
            with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
                if self.ranks.is_first:
                    state[name] = shared.setdefault(id(parameter), parameter.detach().cpu().clone())
        if self.ranks.is_first:
            persistent = module.state_dict().keys()
            state.update((name, buffer.cpu()) for name, buffer in module.named_buffers() if name in persistent)
            save(self.prepared.loaded, module, Path(output_dir or self.settings.output / "model"), state)

    def _save_checkpoint(self, *given: Any, **named: Any) -> None:
        """The Trainer's checkpoint, sealed.

        Raises:
            UserError: on the rank that could not write; ``latest`` then still names the checkpoint before.
        """
        step, directory = self.state.global_step, self.settings.checkpoints
        if self.watch.observer is not None:
            self.watch.observer.flush()  # the records up to here are as safe as the checkpoint
        try:
            super()._save_checkpoint(*given, **named)
            checkpoint.seal(directory / f"checkpoint-{step}", self.prepared.facts, self.ranks)
        except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
            if lost_peers(error) is not None:  # nothing is wrong with the disk
                raise
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"rank {self.ranks.rank} could not finish the checkpoint of step {step} in {directory} ({reason}): see "
                "to space and rights there, the checkpoint before is untouched"
            ) from error


def train(settings: Settings, ranks: Ranks) -> Outcome:
    """Run the fine-tune that ``settings`` describe. A collective.

    Raises:
        SystemExit: on every rank, after one of them has printed the sentence, for a mistake in config, data, model or
            checkpoint, and when the ranks are not what the scenario says.
    """
    deepspeed_logger.setLevel(logging.WARNING)
    logging.getLogger("accelerate").setLevel(logging.ERROR)  # of accumulation, which is the Trainer's here
    seed = rank_seed(settings.scenario, settings.seed, ranks.rank)
    scenarios.apply_seed(seed)
    prepared = prepare(settings, ranks)
    total, folder = prepared.total_steps, None
    if settings.resume:
        folder = agreed(ranks, lambda: checkpoint.check(settings.checkpoints, prepared.facts, ranks))
    done = 0 if folder is None else int(folder.name.rpartition("-")[2])
    arguments = agreed(ranks, lambda: _arguments(settings, ranks, prepared, seed), (*MISTAKES, ValueError))
    run = FineTune(settings, ranks, prepared, arguments, seed)
    run.sampler.go_to(done)
    # as python -m ds_silent does it: the preflight sees what each rank itself has loaded, and its sampler
    observed = patch.object(deepspeed, "initialize", partial(ds_silent.initialize, sampler=run.sampler))
    log = run.watch.log = RunLog(settings.output / "train.jsonl", done, ranks.is_first)
    try:
        with observed, StopRequest() as run.watch.stop:
            together(ranks, lambda: run.train(folder and str(folder)))
            if done >= total:
                log.say(f"the checkpoint already holds {done} steps of {total}: nothing is left to train")
    finally:
        if run.watch.observer is not None:
            ended = sys.exc_info()[1]
            run.watch.observer.close(ended.__cause__ if isinstance(ended, SystemExit) else ended)
        unset_hf_deepspeed_config()
    if settings.save_model and not run.watch.stopped:
        together(ranks, run.save_model)
    run.model_wrapped.destroy()
    return Outcome(run.state.global_step, run.watch.loss, run.watch.stopped, prepared.plan)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Trainable parameters, matrices with ``weight_decay``, vectors (biases, norms) with none."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if _dimensions(p) > 1], "weight_decay": weight_decay},
        {"params": [p for p in trainable if _dimensions(p) <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _dimensions(parameter: nn.Parameter) -> int:
    # ZeRO 3's zero.Init leaves an empty one-dimensional stub and keeps the shape beside it
    return len(getattr(parameter, "ds_shape", parameter.shape))


def _arguments(settings: Settings, ranks: Ranks, prepared: Prepared, seed: int) -> TrainingArguments:
    """The Trainer's arguments, its DeepSpeed config filled; what it would log and save by itself is off."""
    on_cpu = kind() == "cpu"
    if on_cpu:  # accelerate knows DeepSpeed on accelerators only: on CPUs each rank would count as the only one
        os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
        AcceleratorState._reset_state(reset_partial_state=True)
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.DEEPSPEED
    arguments = TrainingArguments(
        str(settings.checkpoints),
        deepspeed=prepared.config,
        **prepared.arguments,
        seed=seed,
        use_cpu=on_cpu,
        accelerator_config={"use_configured_state": on_cpu},
        lr_scheduler_type="linear",
        ignore_data_skip=True,  # the sampler goes there by itself
        eval_strategy="no",
        save_strategy="no",
        logging_strategy="no",
        logging_nan_inf_filter=False,
        log_level="error",
        report_to="none",
        disable_tqdm=not (settings.progress and sys.stderr.isatty()),
    )
    config = arguments.hf_deepspeed_config.config
    refuse_auto(config)
    deepspeed.DeepSpeedConfig(config)  # what DeepSpeed itself refuses, while the ranks can still agree
    return arguments
