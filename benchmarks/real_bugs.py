"""Released DeepSpeed versions with silently wrong gradients: what the aggregation check says about each.

    python benchmarks/real_bugs.py              # the known bug and its neighbours: make test-real-bugs
    python benchmarks/real_bugs.py --survey     # every one of real_bugs_settings.py, in every version
    python benchmarks/real_bugs.py --survey --versions 0.17.6 0.19.8 --ranks 2

DeepSpeed 0.17.6 and 0.18.0 apply about one micro-batch's gradient under ZeRO-2 with accumulation, instead of the sum
(DeepSpeed issue 7718); versions before and after are right. Each version is installed into a directory of its own under
build/real-bugs and put before the environment's own by PYTHONPATH; everything else stays as it is. The trainings are
real: several processes, gloo.

Beside what ds_silent says stands a number that knows nothing of it: plain SGD moves the fp32 weights by minus the
learning rate times the gradient, so their change gives what was applied, and a plain torch copy of the model, the same
rows and float64 sums give what should have been. What is wrong is trained once more without ds_silent, and must be
wrong by the same numbers. A finding without an error of that kind would be a false alarm; an
error without a finding, a miss. The exit status is 0 only when neither happened, and the known bug was found at step 1.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from datetime import timedelta
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

from real_bugs_settings import KNOWN, SURVEY, Outcome, Setting

from ds_silent.comparison.releases import laid_over

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / "build" / "real-bugs"
WRONG = ("0.17.6", "0.18.0")
RIGHT = ("0.16.9", "0.17.2", installed_version("deepspeed"))
SURVEYED = ("0.16.9", "0.17.0", "0.17.2", "0.17.6", "0.18.0", "0.18.3", "0.19.0", installed_version("deepspeed"))
STEPS, LEARNING_RATE, SEED = 6, 0.05, 1234
RESULTS = ("aggregation-error", "unreduced-gradient", "replica-drift", "initial-weights-mismatch", "observer-off")
APART = {"fp32": 1e-4, "bf16": 2e-2}
"""From which relative error on the plain computation's word is taken; below lie bf16's own roundings."""


# -- inside one version ---------------------------------------------------------------------------------------------


def train(settings: tuple[Setting, ...], out: Path) -> None:
    """On every rank: all trainings, one after the other. Rank 0 writes after each, for the case that one breaks all."""
    import logging

    import torch.distributed as dist

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    outcomes = []
    for setting in settings:
        with tempfile.TemporaryDirectory(prefix="real_bugs_") as directory:
            try:
                outcomes.append(_train(setting, Path(directory)))
            except (NotImplementedError, AssertionError, AttributeError, RuntimeError, TypeError, ValueError) as error:
                text = str(error).splitlines()
                outcomes.append(Outcome(setting.name, failure=f"{type(error).__name__}: {text[0] if text else ''}"))
        if dist.get_rank() == 0:
            out.write_text(json.dumps([asdict(outcome) for outcome in outcomes]))


def _train(setting: Setting, output_dir: Path) -> Outcome:
    """Rank 0's directory is the one that is read. What is wrong is trained again without ds_silent."""
    import torch
    import torch.distributed as dist

    outcome = _once(setting, output_dir, observed=True)
    worst = torch.tensor(float(wrong(outcome)))
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return replace(outcome, unobserved=_once(setting, output_dir, observed=False).applied) if worst > 0 else outcome


def _once(setting: Setting, output_dir: Path, observed: bool) -> Outcome:
    import torch
    import torch.distributed as dist
    from probe import DTYPES, LENGTH, ROWS, VOCABULARY, Probe

    import ds_silent

    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(SEED)
    model, copy = Probe(None), Probe(None).to(DTYPES[setting.dtype])
    block = {"output_dir": str(output_dir), "tensorboard": False}
    engine, *_ = ds_silent.initialize(
        model=model,
        model_parameters=[parameter for parameter in model.parameters() if parameter.requires_grad],
        config={**_config(setting, ranks), **({"silent_consistency": block} if observed else {})},
    )
    rows = torch.Generator().manual_seed(99 + rank)
    errors, lengths, cosines = [], [], []
    for _ in range(STEPS):
        batches = [torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=rows) for _ in range(setting.accumulation)]
        mean = _true_mean(engine, copy, batches)
        before = _weights(engine)
        for tokens in batches:
            engine.backward(engine(tokens, False))
            engine.step()
        applied = (before - _weights(engine)) / LEARNING_RATE
        errors.append(float((applied - mean).norm() / mean.norm()))
        lengths.append(float(applied.norm() / mean.norm()))
        cosines.append(float(applied @ mean / (applied.norm() * mean.norm())))
    observer = ds_silent.observer_of(engine)
    if observer is not None:
        observer.close()
    engine.destroy()
    if observer is None or rank > 0:
        return Outcome(setting.name, applied=tuple(errors))
    return _outcome(setting, output_dir, errors, lengths[0], cosines[0])


def _config(setting: Setting, ranks: int) -> dict[str, Any]:
    from probe import ROWS

    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": setting.accumulation,
        "train_batch_size": ROWS * ranks * setting.accumulation,
        "optimizer": {"type": "SGD", "params": {"lr": LEARNING_RATE}},
        "zero_optimization": {"stage": setting.stage, **setting.zero},
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        "bf16": {"enabled": setting.dtype == "bf16"},
        **setting.top,
    }


def _true_mean(engine: Any, copy: Any, batches: list[Any]) -> Any:
    """(D,) float64: the mean over ranks and micro-batches of plain torch's gradients, with the engine's weights."""
    import torch
    import torch.distributed as dist
    from probe import full_parameters

    with torch.no_grad():
        for own, theirs in zip(copy.parameters(), full_parameters(engine), strict=True):
            own.copy_(theirs)
    trained = [parameter for parameter in copy.parameters() if parameter.requires_grad]
    total = torch.zeros(sum(parameter.numel() for parameter in trained), dtype=torch.float64)
    for tokens in batches:
        gradients = torch.autograd.grad(copy(tokens, False), trained)
        total += torch.cat([gradient.double().flatten() for gradient in gradients]) / len(batches)
    dist.all_reduce(total)
    return total / dist.get_world_size()


def _weights(engine: Any) -> Any:
    """(D,) float64 clone of the trained weights in the precision in which they are updated."""
    import torch
    from deepspeed.utils import safe_get_full_fp32_param
    from probe import full_parameters

    pairs = list(zip(engine.module.parameters(), full_parameters(engine), strict=True))
    wholes = [whole for own, whole in pairs if own.requires_grad]
    flats = getattr(engine.optimizer, "fp32_groups_flat", None)  # FP16_Optimizer's masters, one after the other
    masters = getattr(engine.optimizer, "fp32_groups", None)  # FP16_UnfusedOptimizer's
    if wholes[0].dtype == torch.float32:
        pass
    elif flats is not None:
        wholes = list(flats)
    elif masters is not None:
        wholes = [master for group in masters for master in group]
    elif hasattr(engine.optimizer, "fp32_groups_flat_partition"):  # BF16_Optimizer's: an N-th on each rank
        wholes = [part for own in engine.optimizer.fp32_groups_flat_partition for part in _gathered(own.detach())]
        total = sum(parameter.numel() for group in engine.optimizer.bf16_groups for parameter in group)
        return torch.cat(wholes)[:total].double()
    else:
        wholes = [safe_get_full_fp32_param(own) for own, _ in pairs if own.requires_grad]
    return torch.cat([whole.detach().double().flatten() for whole in wholes])


def _gathered(own: Any) -> list[Any]:
    import torch
    import torch.distributed as dist

    everybody = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, own.contiguous())
    return everybody


def _outcome(setting: Setting, output_dir: Path, errors: list[float], length: float, cosine: float) -> Outcome:
    from ds_silent.sinks.jsonl import read_metrics

    records = list(read_metrics(output_dir / "metrics.jsonl"))
    integrity = records[0]["integrity"] if records else {"relative_error": None, "rounding_bound": None}
    path = output_dir / "events.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    about = [event for event in events if event["kind"] in RESULTS and event["severity"] != "info"]
    first = about[0] if about else None
    return Outcome(
        setting.name,
        integrity["relative_error"],
        integrity["rounding_bound"],
        *((first["kind"], first["step"]) if first else (None, None)),
        told=tuple(f"{event['step']}: {event['message']}" for event in about),
        applied=tuple(errors),
        length=length,
        cosine=cosine,
    )


def inside(chosen: str, ranks: int, out: Path) -> None:
    """The only call that imports DeepSpeed: this process was started with the version's own PYTHONPATH."""
    import deepspeed
    import torch.multiprocessing

    settings = KNOWN
    if chosen.startswith("survey"):
        parts = json.loads(chosen.removeprefix("survey"))
        settings = tuple(setting for setting in SURVEY if any(part in setting.name for part in parts))
    # An operator for inference, which takes a minute to compile and which no training calls.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    with tempfile.TemporaryDirectory(prefix="real_bugs_") as directory:
        torch.multiprocessing.start_processes(_rank_main, (ranks, settings, directory, out), ranks, start_method="fork")


def _rank_main(rank: int, ranks: int, settings: tuple[Setting, ...], directory: str, out: Path) -> None:
    import deepspeed
    import torch
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_SIZE=str(ranks))
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{directory}/rendezvous", timeout=timedelta(seconds=180), rank=rank, world_size=ranks
    )
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    train(settings, out)
    dist.barrier()
    dist.destroy_process_group()


# -- outside ---------------------------------------------------------------------------------------------------------


def environment(version: str) -> dict[str, str]:
    """Of a process that imports this version of DeepSpeed; installed on first use."""
    variables = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    variables["PYTHONPATH"] = str(ROOT)
    if version == installed_version("deepspeed"):
        return variables
    folder = laid_over(CACHE / version, (f"deepspeed=={version}",))
    variables["PYTHONPATH"] = f"{folder}{os.pathsep}{ROOT}"
    return variables


def outcomes_of(version: str, chosen: str, ranks: int) -> list[Outcome]:
    """Run all trainings of one version in fresh processes."""
    with tempfile.TemporaryDirectory(prefix="real_bugs_") as directory:
        out = Path(directory, "outcomes.json")
        command = [sys.executable, str(Path(__file__).resolve()), "--inside", chosen, str(ranks), str(out)]
        ended = subprocess.run(command, env=environment(version), capture_output=True, text=True)
        done = json.loads(out.read_text()) if out.exists() else []
        outcomes = [Outcome(**row) for row in done]
        if ended.returncode:
            outcomes.append(Outcome("the next one", failure=ended.stderr.strip()[-600:] or f"exit {ended.returncode}"))
        return outcomes


def wrong(outcome: Outcome) -> bool:
    """By plain torch: whether some step applied something else than the mean."""
    limit = APART["bf16" if "bf16" in outcome.setting else "fp32"]
    return any(not error <= limit for error in outcome.applied)


def verdict(outcome: Outcome, bug_is_known: bool | None) -> str:
    """Empty when all is as expected."""
    if outcome.failure:
        return "" if bug_is_known is None else "FAILED"
    if outcome.event is not None and not wrong(outcome):
        return "FALSE ALARM"
    if outcome.event is None and wrong(outcome):
        return "MISSED"
    if wrong(outcome) and list(outcome.unobserved) != list(outcome.applied):
        return "CHANGED BY OBSERVING"
    if bug_is_known is True and not (outcome.event == "aggregation-error" and outcome.step == 1):
        return "NOT FOUND AT STEP 1"
    if bug_is_known is False and outcome.event is not None:
        return "UNEXPECTED"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--survey", action="store_true", help="every configuration, in every version")
    parser.add_argument("--only", nargs="+", default=[""], help="configurations of the survey: parts of names")
    parser.add_argument("--versions", nargs="+", help="of DeepSpeed; the default is what the mode needs")
    parser.add_argument("--ranks", nargs="+", type=int, help="default: 2 and 4; 2 for the survey")
    parser.add_argument("--json", type=Path, help="also write the outcomes here")
    parser.add_argument("--inside", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        inside(arguments.inside[0], int(arguments.inside[1]), Path(arguments.inside[2]))
        return 0
    versions = arguments.versions or (SURVEYED if arguments.survey else (*WRONG, *RIGHT))
    failed, kept = 0, []
    for version in versions:
        for ranks in arguments.ranks or ((2,) if arguments.survey else (2, 4)):
            started = time.monotonic()
            outcomes = outcomes_of(
                version, f"survey{json.dumps(arguments.only)}" if arguments.survey else "known", ranks
            )
            print(f"\nDeepSpeed {version}, {ranks} ranks ({time.monotonic() - started:.0f} s)")
            for outcome in outcomes:
                found = verdict(outcome, None if arguments.survey else version in WRONG)
                failed += bool(found)
                kept.append({"version": version, "ranks": ranks, "verdict": found, **asdict(outcome)})
                print(row(outcome, found), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(kept, indent=1))
    print(f"\n{failed} of {len(kept)} trainings are not as expected" if failed else f"\nall {len(kept)} as expected")
    return 1 if failed else 0


def row(outcome: Outcome, found: str) -> str:
    """One line of the table, and the message below it."""
    if outcome.failure:
        return f"  {outcome.setting:<58} DeepSpeed itself: {outcome.failure[:120]} {found}"
    event = f"{outcome.event} at step {outcome.step}" if outcome.event else "no event"
    numbers = " ".join(
        f"{label} {'-' if value is None else format(value, '.2g'):<8}"
        for label, value in (
            ("error", outcome.relative_error),
            ("bound", outcome.rounding_bound),
            ("plain torch", max(outcome.applied, default=None)),
        )
    )
    plain = ""
    if wrong(outcome):
        same = list(outcome.unobserved) == list(outcome.applied)
        plain = f"applied/true {outcome.length:.3f}, cosine {outcome.cosine:.3f}{', without us too' if same else ''}"
    line = f"  {outcome.setting:<58} {event:<28} {numbers} {plain} {found}"
    return "\n      ".join((line, *outcome.told[:4]))


if __name__ == "__main__":
    sys.exit(main())
