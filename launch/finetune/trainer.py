"""One fine-tune from settings to a saved model: an ordinary DeepSpeed loop with two lines for the observer.

    outcome = train(checked(Settings(...)), join())

May be called several times in one process group. Every rank calls it, and every rank leaves it the same way.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.utils import logger as deepspeed_logger
from rich.console import Console
from tqdm import tqdm

import ds_silent
from finetune import checkpoint, scenarios
from finetune.encoding import collate
from finetune.evaluation import evaluate
from finetune.export import save_model
from finetune.prepare import MISTAKES, Prepared, engine_of, facts_of, prepare
from finetune.ranks import Ranks, agreed, gather_int32, sum_float32, together
from finetune.runlog import RunLog
from finetune.sampler import Plan, ResumableSampler
from finetune.scenarios import rank_seed
from finetune.settings import Settings
from finetune.stop import StopRequest


@dataclass(frozen=True)
class Outcome:
    """How a run ended: after ``steps`` optimizer steps, with this mean loss over all ranks at the last one."""

    steps: int
    loss: float  # NaN when no step was left to do
    stopped: bool  # by a signal, with a checkpoint saved
    plan: Plan


@dataclass(frozen=True)
class Run:
    """What the loop works with."""

    settings: Settings
    ranks: Ranks
    prepared: Prepared
    engine: Any
    sampler: ResumableSampler
    observer: Any  # None without the block
    facts: checkpoint.Facts


def train(settings: Settings, ranks: Ranks) -> Outcome:
    """Runs the fine-tune that ``settings`` describe. A collective.

    Raises:
        SystemExit: on every rank, after one of them has printed the sentence, for a mistake in config, data, model or
            checkpoint, and when the ranks are not what the scenario says.
    """
    deepspeed_logger.setLevel(logging.WARNING)
    seed = rank_seed(settings.scenario, settings.seed, ranks.rank)
    scenarios.apply_seed(seed)
    prepared = prepare(settings, ranks)
    facts = facts_of(prepared, settings)
    tag = (
        agreed(ranks, lambda: checkpoint.check(settings.checkpoints, facts, ranks), MISTAKES)
        if settings.resume
        else None
    )
    sampler = ResumableSampler(prepared.plan, seed, ranks.rank)
    engine = together(ranks, lambda: engine_of(prepared, settings, sampler), (*MISTAKES, ValueError), alike=MISTAKES)
    observer = ds_silent.observer_of(engine)
    run = Run(settings, ranks, prepared, engine, sampler, observer, facts)
    if observer is not None:
        # with the last batch completed from the epoch's start, an epoch has a few rows more than the data
        plan = prepared.plan
        observer.samples_per_epoch = max(plan.rows, plan.steps_per_epoch * plan.global_batch)
    done = _resume(run, tag) if tag is not None else 0
    if tag is None:
        scenarios.apply_seed(seed)  # a library that loads a model or makes an engine may have seeded by itself
    _prove_scenario(run)
    try:
        outcome = _loop(run, done)
    finally:
        if observer is not None:
            observer.close()
    if settings.save_model and not outcome.stopped:
        together(ranks, lambda: save_model(engine, prepared.loaded, settings.output / "model", ranks), MISTAKES)
    engine.destroy()
    return outcome


def _loop(run: Run, done: int) -> Outcome:
    """Optimizer steps ``done + 1`` to the last, or until a signal has reached any rank."""
    settings, ranks, total = run.settings, run.ranks, run.prepared.total_steps
    loss = math.nan
    shown = settings.progress and ranks.is_first
    bar = tqdm(total=total, initial=done, unit="step", disable=None if shown else True)  # None: on a terminal only
    with RunLog(settings.output / "train.jsonl", ranks, done) as log, bar, StopRequest() as stop:
        for step in range(done + 1, total + 1):
            started = time.perf_counter()
            learning_rate = float(run.engine.get_lr()[0])
            own = _step(run)
            # one small collective gives every rank the mean loss and tells it whether any was asked to stop
            both = torch.stack([own / ranks.world_size, own.new_tensor(float(stop.asked))])
            loss, asked = sum_float32(ranks, both)
            bar.update()
            bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
            last, stopping = step == total, asked > 0
            if last or stopping or step == done + 1 or step % settings.log_every == 0:
                log.write(step, loss=loss, lr=learning_rate, seconds=time.perf_counter() - started)
            if run.prepared.evaluation and (last or _due(step, settings.eval_every)):
                log.write(step, eval_loss=_evaluate(run))
            if stopping or _due(step, settings.save_every):
                together(ranks, lambda: _save(run, step), MISTAKES)  # noqa: B023 - called at once
            if stopping and not last:
                log.say(
                    f"stopped by a signal after step {step} of {total}; --resume goes on from {settings.checkpoints}"
                )
                return Outcome(step, loss, True, run.prepared.plan)
        if done >= total:
            log.say(f"the checkpoint already holds {done} steps of {total}: nothing is left to train")
    return Outcome(max(done, total), loss, False, run.prepared.plan)


def _step(run: Run) -> torch.Tensor:
    """One optimizer step; this rank's mean loss over its micro-batches, fp32 [], on the device."""
    device = run.engine.device
    total = torch.zeros((), dtype=torch.float32, device=device)
    for positions in run.sampler.step():
        batch = collate([run.prepared.training[position] for position in positions], run.prepared.pad_id)
        if run.observer is not None:
            run.observer.observe_batch(batch.row_ids)
        outputs = run.engine(
            input_ids=batch.input_ids.to(device),
            attention_mask=batch.attention_mask.to(device),
            labels=batch.labels.to(device),
        )
        run.engine.backward(outputs.loss)
        run.engine.step()
        total += outputs.loss.detach().float()
    return total / run.prepared.plan.accumulation


def _evaluate(run: Run) -> float:
    return evaluate(run.engine, run.prepared.evaluation, run.prepared.plan.micro_batch, run.prepared.pad_id, run.ranks)


def _save(run: Run, step: int) -> None:
    if run.observer is not None:
        run.observer.flush()  # the records up to here are as safe as the checkpoint
    state = {
        "steps": step,
        "sampler": dict(run.sampler.state_dict()),
        "observer": None if run.observer is None else run.observer.state_dict(),
    }
    checkpoint.save(run.engine, run.settings.checkpoints, step, state, run.facts, run.ranks)


def _resume(run: Run, tag: str) -> int:
    """Puts everything where the checkpoint was made; the number of steps that are done."""
    state = together(run.ranks, lambda: checkpoint.load(run.engine, run.settings.checkpoints, tag, run.ranks), MISTAKES)
    agreed(run.ranks, lambda: run.sampler.load_state_dict(state["sampler"]), MISTAKES)
    if run.observer is not None and state["observer"] is not None:
        run.observer.load_state_dict(state["observer"])
    return int(state["steps"])


def _prove_scenario(run: Run) -> None:
    settings, prepared, ranks = run.settings, run.prepared, run.ranks
    first = prepared.row_ids[run.sampler.peek().reshape(-1)]
    observed = gather_int32(ranks, scenarios.proof_of(first.tolist()))
    place = run.sampler.state_dict()
    step = place["position"] // prepared.plan.global_batch
    expected = scenarios.expected_proofs(
        prepared.plan, settings.scenario, settings.seed, prepared.row_ids, place["epoch"], step
    )
    if ranks.is_first:
        Console(stderr=True).print(scenarios.table_of(observed, settings.scenario, settings.sampler))
    agreed(
        ranks,
        lambda: scenarios.refuse_unless_as_told(expected, observed, settings.scenario, settings.sampler),
        MISTAKES,
    )


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
