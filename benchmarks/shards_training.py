"""One training of ``shards.py`` on one rank, healthy or with a fault, and what rank 0 says of it.

    for outcome in on_ranks(train_all, (cases,), ranks=4): ...

A fault changes the last rank from a step on: its gradient before the observer sees it, its loss, or its labels.
"""

from __future__ import annotations

import json
import logging
import pickle
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from shards_data import IGNORED, ROWS, SCENARIOS, Batch, Deal
from torch import Tensor, nn

from ds_silent.drill.faults.inputs import HiddenFactor

FAULTS = ("gradient", "loss", "hidden", "labels", "noise", "clip", "phase")
CLIP = 1.0


@dataclass(frozen=True)
class Fault:
    """What happens to the last rank from ``step`` on."""

    kind: str  # of FAULTS
    size: float = 1.0  # factor of the gradient or the loss; length of the noise against the gradient's; norm to clip at
    step: int = 300

    @property
    def name(self) -> str:
        return self.kind if self.kind == "labels" else f"{self.kind} {self.size:g}"


@dataclass(frozen=True)
class Case:
    """One training."""

    scenario: str
    ranks: int
    seed: int
    steps: int
    framework: str = "ddp"
    dtype: str = "fp32"
    fault: Fault | None = None
    keep: str | None = None  # folder for the records


@dataclass(frozen=True)
class Outcome:
    """What was said of a case; reminders are the warnings and errors that go on or end."""

    case: Case
    events: tuple[dict[str, Any], ...] = field(repr=False)
    loss: float  # the last of rank 0
    seconds: float


def train_all(send: Callable[[Outcome], None], cases: tuple[Case, ...]) -> None:
    """On every rank: one training after the other."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    for case in cases:
        with tempfile.TemporaryDirectory(prefix="ds_silent_shards_") as directory:
            folder = Path(directory if case.keep is None else case.keep)
            started = time.perf_counter()
            loss = train(case, folder)
            if dist.get_rank() == 0:
                path = folder / "events.jsonl"
                lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
                events = tuple(json.loads(line) for line in lines)
                send(Outcome(case, events, loss, time.perf_counter() - started))


def train(case: Case, folder: Path) -> float:
    """The training with its observer; rank 0's folder is the one that is written to."""
    scenario, rank, ranks = SCENARIOS[case.scenario], dist.get_rank(), dist.get_world_size()
    torch.manual_seed(case.seed)
    model = scenario.model()
    torch.manual_seed(1 + case.seed + 1000 * rank)  # dropout and actions differ by rank, weights do not
    batches = scenario.deal(Deal(rank, ranks, case.seed, case.steps))
    struck = Struck(case.fault, rank == ranks - 1, case.seed)
    struck.inside(model)
    loop = {"ddp": _Loop, "fsdp2": _Loop, "zero1": _Engine}[case.framework](case, model, struck, folder)
    loss = torch.zeros(())
    with kept_inputs(folder / "judged.pickle" if case.keep is not None and rank == 0 else None):
        for step in range(1, case.steps + 1):
            struck.step = step
            micro_batches = [struck.batch(batch) for batch in islice(batches, scenario.accumulation)]
            loss = loop.train_step(micro_batches)
        loop.close()
    return float(loss.detach())


class Struck:
    """The fault on this rank, if it is the one that is struck."""

    def __init__(self, fault: Fault | None, here: bool, seed: int):
        self._fault, self._here, self.step = fault, here, 0
        self._generator = torch.Generator().manual_seed(seed + 31)

    def _is(self, kind: str) -> bool:
        return self._here and self._fault is not None and self._fault.kind == kind and self.step >= self._fault.step

    def batch(self, batch: Batch) -> Batch:
        """With labels that have nothing to do with the inputs."""
        if not self._is("labels"):
            return batch
        if batch.labels.is_floating_point():
            return Batch(batch.inputs, batch.labels.roll(1, 0), batch.ids)
        wrong = torch.randint(int(batch.labels.max()) + 1, batch.labels.shape, generator=self._generator)
        return Batch(batch.inputs, torch.where(batch.labels == IGNORED, batch.labels, wrong), batch.ids)

    def loss(self, loss: Tensor) -> Tensor:
        return loss * self._fault.size if self._fault is not None and self._is("loss") else loss

    def inside(self, model: nn.Module) -> None:
        """What the model does with its loss.

        ``hidden``: a factor; ``phase``: of two tasks in turn, one with a larger loss, this rank has the other one.
        """
        fault = self._fault
        if fault is None or fault.kind not in ("hidden", "phase"):
            return

        def act(module: nn.Module, given: Any, loss: Tensor) -> Tensor:
            strikes = self._is("hidden") if fault.kind == "hidden" else (self.step + self._is("phase")) % 2
            scaled: Tensor = HiddenFactor.apply(loss, fault.size if strikes else 1.0)  # type: ignore[no-untyped-call]
            return scaled

        model.register_forward_hook(act)

    def gradient(self, gradient: Tensor) -> Tensor:
        """A hook of every parameter, before the observer's."""
        if self._fault is None:
            return gradient
        if self._is("gradient"):
            return gradient * self._fault.size
        if self._is("clip"):  # each parameter by itself: within a backward nobody knows the whole norm
            return gradient * (self._fault.size / gradient.norm().clamp(min=1e-30)).clamp(max=1.0)
        if self._is("noise"):
            noise = torch.randn(gradient.shape, generator=self._generator).to(gradient.dtype)
            return gradient + noise * (self._fault.size * gradient.norm() / noise.norm())
        return gradient


class _Loop:
    """DistributedDataParallel or ``fully_shard``, as a script writes it."""

    def __init__(self, case: Case, model: nn.Module, struck: Struck, folder: Path):
        import ds_silent

        self._struck, self._sharded = struck, case.framework == "fsdp2"
        scenario = SCENARIOS[case.scenario]
        self._named = scenario.named
        self._model = _sharded(model, case.dtype) if self._sharded else _wrapped(model, case.dtype)
        for parameter in _leaves(self._model) if self._sharded else model.parameters():
            parameter.register_hook(struck.gradient)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=scenario.rate, weight_decay=0.01)
        self._observer = ds_silent.attach(
            self._model, block(folder), optimizer=self._optimizer, accumulation=scenario.accumulation
        )

    def train_step(self, micro_batches: list[Batch]) -> Tensor:
        loss = torch.zeros(())
        for number, batch in enumerate(micro_batches):
            if batch.ids is not None:
                self._observer.observe_batch(batch.ids)
            last = number == len(micro_batches) - 1
            if self._sharded:
                self._model.set_requires_gradient_sync(last)
            with nullcontext() if last or self._sharded else self._model.no_sync():
                loss = self._struck.loss(forward(self._model, batch, self._named))
                (loss / len(micro_batches)).backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss

    def close(self) -> None:
        self._observer.close()


def _wrapped(model: nn.Module, dtype: str) -> Any:
    return nn.parallel.DistributedDataParallel(model.to(torch.bfloat16) if dtype == "bf16" else model)


def _sharded(model: nn.Module, dtype: str) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(torch.bfloat16) if dtype == "bf16" else MixedPrecisionPolicy()
    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), mp_policy=policy)


def _leaves(model: Any) -> list[Tensor]:
    from ds_silent.frameworks.fsdp2 import fsdp_modules, plain_parameters

    return plain_parameters(model, fsdp_modules(model), [name for name, _ in model.named_parameters()])


class _Engine:
    """DeepSpeed, ZeRO stage 1."""

    def __init__(self, case: Case, model: nn.Module, struck: Struck, folder: Path):
        import deepspeed

        import ds_silent

        scenario = SCENARIOS[case.scenario]
        self._struck, self._named = struck, scenario.named
        rows = 4 * ROWS if case.scenario == "environments" else ROWS
        optimizer = {"lr": scenario.rate, "weight_decay": 0.01, "torch_adam": True}
        config = {
            "train_micro_batch_size_per_gpu": rows,
            "gradient_accumulation_steps": scenario.accumulation,
            "optimizer": {"type": "AdamW", "params": optimizer},
            "zero_optimization": {"stage": 1},
            "gradient_clipping": CLIP,
            "bf16": {"enabled": case.dtype == "bf16"},
            "steps_per_print": 10**9,
            "silent_consistency": block(folder),
        }
        self._engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
        for parameter in self._engine.module.parameters():
            parameter.register_hook(struck.gradient)
        self._observer = ds_silent.attach(self._engine)

    def train_step(self, micro_batches: list[Batch]) -> Tensor:
        loss = torch.zeros(())
        for batch in micro_batches:
            if batch.ids is not None:
                self._observer.observe_batch(batch.ids)
            loss = self._struck.loss(forward(self._engine, batch, self._named))
            self._engine.backward(loss)
            self._engine.step()
        return loss

    def close(self) -> None:
        self._observer.close()
        self._engine.destroy()


def forward(model: Any, batch: Batch, named: bool) -> Tensor:
    loss: Tensor = model(batch.inputs, labels=batch.labels) if named else model(batch.inputs, batch.labels)
    return loss


def block(folder: Path) -> dict[str, Any]:
    """All defaults; the pictures of TensorBoard show what is judged already."""
    return {"output_dir": str(folder), "tensorboard": False}


@contextmanager
def kept_inputs(path: Path | None):  # type: ignore[no-untyped-def]
    """Write what the judge is given at every step, so that it can be given to another judge: ``--replay``."""
    from ds_silent.detectors import Judge

    if path is None:
        yield
        return
    original, original_told = Judge.step, Judge.told
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:

        def step(judge: Judge, record: Any, extras: Any) -> Any:
            pickle.dump((record, extras), file)
            return original(judge, record, extras)

        def before(judge: Judge, event: Any) -> None:
            pickle.dump(event, file)
            original_told(judge, event)

        Judge.step, Judge.told = step, before  # type: ignore[method-assign]
        try:
            yield
        finally:
            Judge.step, Judge.told = original, original_told  # type: ignore[method-assign]
