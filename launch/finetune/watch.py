"""What the fine-tune does at the Trainer's events: our callback, the scenario's proof, the log, and a signal's wish."""

from __future__ import annotations

import math
import signal
import time
from types import FrameType, TracebackType
from typing import Any

import torch
from rich.console import Console

import ds_silent
from ds_silent.integrations.huggingface import SilentConsistencyCallback
from finetune import scenarios
from finetune.ranks import agreed, gather_int32, sum_float32
from finetune.runlog import RunLog


class StopRequest:
    """While entered, SIGTERM and SIGINT only set ``asked``; afterwards the handlers are as they were.

    Further signals change nothing: launchers send SIGTERM after the user's SIGINT, and both mean the same wish. A
    launcher that has lost patience uses SIGKILL.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True


class Watch(SilentConsistencyCallback):
    """The observer's callback, which also proves the scenario, writes the run's log and decides with all ranks.

    Args:
        run: the Trainer.
        seed: this rank's.

    Attributes:
        loss: the mean over all ranks at the last step; NaN before the first.
        stopped: a signal has ended the training before its last step.
    """

    log: RunLog
    stop: StopRequest

    def __init__(self, run: Any, seed: int) -> None:
        super().__init__()
        self.loss, self.stopped = math.nan, False
        self._run, self._seed = run, seed
        self._started, self._rate, self._first = 0.0, 0.0, 0

    def _observer(self, args: Any, kwargs: Any) -> Any:
        """The one that the engine was made with; without the block there is none."""
        return ds_silent.observer_of(self._run.model_wrapped)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The engine is made and a checkpoint is loaded, but for the random generators."""
        super().on_train_begin(args, state, control, **kwargs)
        plan = self._run.prepared.plan
        if self.observer is not None:
            # with the last batch completed from the epoch's start, an epoch has a few rows more than the data
            self.observer.samples_per_epoch = max(plan.rows, plan.steps_per_epoch * plan.global_batch)
        self._first = state.global_step + 1
        scenarios.apply_seed(self._seed)  # a library that loads a model or makes an engine may have seeded by itself
        self._prove_scenario()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The first micro-batch of an optimizer step comes."""
        self._started, self._rate = time.perf_counter(), float(self._run.model_wrapped.get_lr()[0])
        self._run.own_loss.zero_()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """One small collective gives every rank the mean loss and tells it whether any was asked to stop."""
        settings, ranks, step = self._run.settings, self._run.ranks, state.global_step
        own = self._run.own_loss
        self.loss, asked = sum_float32(
            ranks, torch.stack([own / ranks.world_size, own.new_tensor(float(self.stop.asked))])
        )
        last, stopping = step >= state.max_steps, asked > 0
        if last or stopping or step == self._first or step % settings.log_every == 0:
            self.log.write(step, loss=self.loss, lr=self._rate, seconds=time.perf_counter() - self._started)
        control.should_evaluate = bool(self._run.prepared.evaluation) and (last or _due(step, settings.eval_every))
        control.should_save = stopping or _due(step, settings.save_every)
        if stopping and not last:
            self.stopped = control.should_training_stop = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A checkpoint is whole."""
        super().on_save(args, state, control, **kwargs)
        if self.stopped:
            step, total = state.global_step, state.max_steps
            where = self._run.settings.checkpoints
            self.log.say(f"stopped by a signal after step {step} of {total}; --resume goes on from {where}")

    def _prove_scenario(self) -> None:
        settings, prepared, ranks = self._run.settings, self._run.prepared, self._run.ranks
        sampler = self._run.sampler
        first = prepared.row_ids[sampler.peek().reshape(-1)]
        observed = gather_int32(ranks, scenarios.proof_of(first.tolist()))
        expected = scenarios.expected_proofs(
            prepared.plan,
            settings.scenario,
            settings.seed,
            prepared.row_ids,
            *divmod(self._first - 1, prepared.plan.steps_per_epoch),
        )
        if ranks.is_first:
            Console(stderr=True).print(scenarios.table_of(observed, settings.scenario, settings.sampler))
        agreed(ranks, lambda: scenarios.refuse_unless_as_told(expected, observed, settings.scenario, settings.sampler))


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
