"""One training on the ranks of a process group, and what it came to.

    for result in on_ranks(train_all, (trainings,), ranks=4): ...     # dicts, from rank 0, in order

A real DeepSpeed engine (ZeRO stage 0, fp32), the method's own block, the errors at DeepSpeed's own all-reduce. The
learning rate falls linearly to zero unless it is said to be constant.
"""

from __future__ import annotations

import json
import logging
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ds_silent
import ds_silent.exchange.rows
from ds_silent.drill.faults.injection import Injection
from ds_silent.drill.train_deepspeed import EngineHooks
from ds_silent.drill.training import hash_of
from ds_silent.patches import Patches

from .errors import Error, Errors
from .methods import METHODS
from .tasks import TASKS

RANKS = 4
COLLECTIVES = (
    *((dist, name) for name in ("all_reduce", "all_gather", "all_gather_into_tensor", "broadcast", "reduce")),
    (ds_silent.exchange.rows, "all_gather"),  # the observations' own, under whichever name this torch has
)


@dataclass(frozen=True)
class Training:
    """One training; ``steps`` is one less than a multiple of every H, so that it ends just before an averaging."""

    task: str
    optimizer: str  # sgd (momentum 0.9), plain (SGD without) or adam
    learning_rate: float
    steps: int
    method: str
    error: Error
    seed: int
    constant_rate: bool = False
    divergence: bool = False  # record it at every step

    @property
    def key(self) -> str:
        kind = type(self.error).__name__
        return json.dumps({**asdict(self), "error": [kind, self.error and asdict(self.error)]}, sort_keys=True)


def train_all(send: Callable[[Any], None], trainings: tuple[Training, ...]) -> None:
    """Every training in turn, on this rank; rank 0 sends each result."""
    logging.disable(logging.WARNING)
    for training in trainings:
        send(train(training))


def train(training: Training) -> dict[str, Any]:
    """A collective. The result, as JSON can hold it; means over the ranks where it says nothing else."""
    with tempfile.TemporaryDirectory(prefix="paft_") as folder:
        return _train(training, folder)


def _train(training: Training, folder: str) -> dict[str, Any]:
    rank, ranks, task = dist.get_rank(), dist.get_world_size(), TASKS[training.task]
    engine = make_engine(training, folder)
    parameters = list(engine.module.parameters())
    errors = Errors(training.error, training.seed, rank, ranks)
    torch.manual_seed(1_000 * training.seed + rank)  # dropout
    divergences: list[float] = []
    started = time.perf_counter()
    with counted_bytes() as sent, EngineHooks(engine, Injection(reduction=errors.reduce)) as hooks:
        for step in range(1, training.steps + 1):
            if not training.constant_rate:
                for group in engine.optimizer.param_groups:
                    group["lr"] = training.learning_rate * (1.0 - (step - 1) / training.steps)
            loss = engine(*task.batch(training.seed, step, rank, ranks))
            with hooks.backward(step, 0, last=True):  # a reduction may be repeated as late as in engine.step
                engine.backward(loss)
                engine.step()
            if training.divergence:
                divergences.append(divergence(parameters))
    seconds = time.perf_counter() - started
    observer = ds_silent.observer_of(engine)
    if observer is not None:
        observer.close()
    own = task.score(engine.module)
    hashes = everywhere(hash_of(parameters)[:16])
    apart = divergence(parameters)
    average_in_place(parameters)
    together = task.score(engine.module)
    engine.destroy()
    return {
        "key": training.key,
        "scores": everywhere(own),  # of each rank's own replica
        "score_of_mean": together,  # of the mean of the replicas
        "divergence": apart,
        "hash": hashes[0] if len(set(hashes)) == 1 else hashes,
        "relative_noise": (errors.noise_square / max(errors.gradient_square, 1e-300)) ** 0.5,
        "attempts": errors.attempts / training.steps,
        "bytes_per_step": sum(sent.values()) / training.steps,
        "seconds": seconds,
        "divergences": divergences,
        **said(Path(folder)),
    }


def make_engine(training: Training, folder: str) -> Any:
    """A DeepSpeed engine with the method's block; the same weights on every rank."""
    task = TASKS[training.task]
    model = task.model(training.seed)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": task.micro_batch,
        "zero_optimization": {"stage": 0},
        "gradient_clipping": 0.0,
        "prescale_gradients": True,  # the all-reduce's result is the mean, so what is added to it is added to the mean
        "steps_per_print": 10**9,
    }
    block = METHODS[training.method].block(folder)
    if block is not None:
        config["silent_consistency"] = block
    engine, *_ = ds_silent.initialize(
        model=model, model_parameters=trained, optimizer=make_optimizer(training, trained), config=config
    )
    return engine


def make_optimizer(training: Training, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    rate = training.learning_rate
    if training.optimizer == "adam":
        return torch.optim.Adam(parameters, lr=rate)
    return torch.optim.SGD(parameters, lr=rate, momentum={"sgd": 0.9, "plain": 0.0}[training.optimizer])


def said(folder: Path) -> dict[str, Any]:
    """How often each kind of event was told, on rank 0, and the steps of the first repairs."""
    path = folder / "events.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    repaired = [event for event in events if event["kind"] == "repaired"]
    return {
        "events": dict(Counter(event["kind"] for event in events)),
        "repaired_steps": [event["step"] for event in repaired],
        "repaired_message": repaired[-1]["message"] if repaired else "",
    }


# -- over the ranks --------------------------------------------------------------------------------------------------


def everywhere(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def mean_over_ranks(values: Tensor) -> Tensor:
    total = values.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def divergence(parameters: list[nn.Parameter]) -> float:
    """Mean over the ranks of |mean theta - theta_m|^2, in float64."""
    own = torch.cat([parameter.detach().double().reshape(-1) for parameter in parameters])
    return float(mean_over_ranks((own - mean_over_ranks(own)).square().sum().view(1)))


def average_in_place(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.data.copy_(mean_over_ranks(parameter.data))


@contextmanager
def counted_bytes() -> Iterator[Counter[str]]:
    """Bytes that this rank hands to torch's collectives, by their name: DeepSpeed's reduction among them."""
    sent: Counter[str] = Counter()
    patches = Patches()

    def counting(name: str) -> Callable[..., Any]:
        given = 1 if "all_gather" in name else 0  # a gather's result comes first

        def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            tensor = args[given] if len(args) > given else next(v for v in kwargs.values() if isinstance(v, Tensor))
            sent[name] += tensor.numel() * tensor.element_size()
            return original(*args, **kwargs)

        return call

    for module, name in COLLECTIVES:
        patches.wrap(module, name, counting(name))
    try:
        yield sent
    finally:
        patches.undo()
