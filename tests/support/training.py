"""A small real training under DeepSpeed, and the naive float64 oracle of everything a record says about it.

The model is the benchmarks' too (``benchmarks.probe``).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine
from packaging.version import Version
from torch import Tensor, nn

import ds_silent
from benchmarks.probe import DTYPES, LENGTH, ROWS, VOCABULARY, Probe, full_parameters
from ds_silent.drill.training import hash_of
from ds_silent.exchange.layout import GATHER_LIMIT
from ds_silent.sinks.jsonl import read_events, read_metrics
from tests.support.distributed import gather_limit_of

REPLICA_INTERVAL = 4
READS_LABELS = Version(torch.__version__) >= Version("2.7")  # older ones hide whether hooks packed what a loss saves


@dataclass(frozen=True)
class Case:
    """One cell of the matrix."""

    stage: int = 0
    dtype: str = "fp32"
    accumulation: int = 1
    zero: dict[str, Any] = field(default_factory=dict)
    top: dict[str, Any] = field(default_factory=dict)
    method: str = "sketch"
    exact_interval: int = 0
    per_layer: bool = False
    interval: int = 1
    checkpointing: str | None = None  # "reentrant" or "non-reentrant"
    torch_style: bool = False
    no_sync: bool = False
    unused: str | None = None  # "rank": odd ranks skip a layer; "micro": the boundary micro-batch skips it
    clipping: float = 0.0
    optimizer: str = "AdamW"
    reduction: str = "native"

    @property
    def looks_at_each(self) -> bool:
        """Whether nobody holds the whole local gradient: each micro-batch is looked at by itself."""
        return self.stage >= 2

    @property
    def sums_exactly(self) -> bool:
        """Whether a reduction of few ranks may round nothing: its terms have fewer digits than its sums."""
        return False

    @property
    def unscaled_wrongly(self) -> bool:
        """DeepSpeed unscales stage 0's fp16 gradients, which were never scaled, since it has ``engine.scale``."""
        return self.dtype == "fp16" and self.stage == 0 and hasattr(DeepSpeedEngine, "scale")

    @property
    def adds_in_fp32(self) -> bool:
        """Whether accumulation rounds nothing of the dtype: ``grad_accum_dtype`` fp32, where DeepSpeed minds it."""
        return bool(self.top) and not Version("0.17.6") <= Version(version("deepspeed")) <= Version("0.18.3")

    def block(self, output_dir: Path) -> dict[str, Any]:
        return {
            "output_dir": str(output_dir),
            "interval": self.interval,
            "tensorboard": False,
            "integrity": {"replica_interval": REPLICA_INTERVAL},
            "reduction": self.reduction,
            "direction": {
                "method": self.method,
                "sketch_size": 1024,
                "exact_interval": self.exact_interval,
                "exact_memory_mb": 1,
                "per_layer": self.per_layer,
            },
        }

    def config(self, output_dir: Path, enabled: bool) -> dict[str, Any]:
        world_size = dist.get_world_size()
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": ROWS,
            "gradient_accumulation_steps": 1 if self.no_sync else self.accumulation,
            "train_batch_size": ROWS * world_size * (1 if self.no_sync else self.accumulation),
            "optimizer": {"type": self.optimizer, "params": {"lr": 1e-2, "torch_adam": True}},
            "zero_optimization": {"stage": self.stage, **self.zero},
            "gradient_clipping": self.clipping,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 10**9,
            **self.top,
        }
        if self.dtype == "bf16":
            config.setdefault("bf16", {"enabled": True})
        if self.dtype == "fp16":
            config.setdefault("fp16", {"enabled": True, "initial_scale_power": 8})
        if enabled:
            config["silent_consistency"] = self.block(output_dir)
        return config


def build(case: Case, output_dir: Path, enabled: bool = True, gather_limit: int = GATHER_LIMIT) -> Any:
    return engine_of(case.config(output_dir, enabled), case.checkpointing, gather_limit)


def engine_of(config: dict[str, Any], checkpointing: str | None = None, gather_limit: int = GATHER_LIMIT) -> Any:
    """Give the probe, with the same weights each time, to ``ds_silent.initialize``."""
    if "fp16" in config:  # DeepSpeed's CPU accelerator refuses fp16 although torch computes it
        get_accelerator().is_fp16_supported = lambda: True
    torch.manual_seed(1234)
    model = Probe(checkpointing)
    with gather_limit_of(gather_limit):
        return ds_silent.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def one_step(engine: Any, generator: torch.Generator) -> None:
    loss = engine(torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator), False)
    engine.backward(loss)
    engine.step()


@dataclass(frozen=True)
class Trace:
    """What one rank saw of one training."""

    weights: str  # hash of every parameter's bits, after the last step
    optimizer: str  # hash of this rank's optimizer state
    losses: tuple[float, ...]
    records: tuple[dict[str, Any], ...]  # rank 0: metrics.jsonl
    oracle: tuple[dict[str, Any], ...]  # rank 0: the naive computation, if asked for
    layers: tuple[dict[str, Any], ...] = ()
    events: tuple[dict[str, Any], ...] = ()  # rank 0: events.jsonl


def train(
    case: Case, output_dir: Path, steps: int, enabled: bool, oracle: bool = False, gather_limit: int = GATHER_LIMIT
) -> Trace:
    """Train ``steps`` optimizer steps; with ``oracle``, recompute every rank's gradient with a plain torch copy."""
    engine, copy = build(case, output_dir, enabled, gather_limit), Probe(None)
    generator = torch.Generator().manual_seed(99 + dist.get_rank())
    losses, expected = [], []
    for step in range(steps):
        batches = batches_of(case, generator)
        if oracle:
            scaled = case.dtype == "fp16" and not case.unscaled_wrongly
            scale = float(engine.optimizer.loss_scale) if scaled else 1.0
            expected.append(oracle_step(full_parameters(engine), copy, batches, case, step + 1, scale))
        for micro, (tokens, skip) in enumerate(batches):
            losses.append(float(_micro_step(engine, case, tokens, skip, micro)))
        if case.no_sync:
            engine.step()
    observer = ds_silent.observer_of(engine)
    if enabled:
        assert observer is not None
        observer.close()
    states = getattr(engine.optimizer, "optimizer", engine.optimizer).state.values()
    trace = trace_of(case, output_dir if enabled else None, full_parameters(engine), states, losses, expected)
    engine.destroy()
    return trace


def batches_of(case: Case, generator: torch.Generator) -> list[tuple[Tensor, bool]]:
    """The tokens of each micro-batch of this rank's step, and whether it skips a layer."""
    skips = [case.unused == "rank" and dist.get_rank() % 2 == 1] * case.accumulation
    skips[-1] = skips[-1] or case.unused == "micro"
    return [(torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator), skip) for skip in skips]


def whole(value: Tensor) -> Tensor:
    """A clone of a tensor, of all ranks' shards. A collective."""
    full = value.full_tensor() if hasattr(value, "full_tensor") else value
    return full.detach().clone()


def trace_of(
    case: Case,
    output_dir: Path | None,
    weights: Iterable[Tensor],
    states: Iterable[Mapping[str, Any]],
    losses: list[float],
    expected: list[dict[str, Any]],
) -> Trace:
    """What a training has left behind, whose observer is closed.

    Args:
        output_dir: None without an observer.
        states: of the optimizer, for each parameter.
        expected: what the oracle says of each step; empty on ranks above 0.
    """
    records = layers = events = tuple[dict[str, Any], ...]()
    if output_dir is not None and dist.get_rank() == 0:
        records = tuple(read_metrics(output_dir / "metrics.jsonl"))
        events = tuple(read_events(output_dir / "events.jsonl"))
        if case.per_layer:
            layers = tuple(map(json.loads, (output_dir / "layers.jsonl").read_text().splitlines()))
    items = [item for state in states for item in sorted(state.items())]
    optimizer = hash_of(part for name, value in items if isinstance(value, Tensor) for part in (name, whole(value)))
    truth = tuple(each for each in expected if each)
    return Trace(hash_of(map(whole, weights)), optimizer, tuple(losses), records, truth, layers, events)


def _micro_step(engine: Any, case: Case, tokens: Tensor, skip: bool, micro: int) -> Tensor:
    if case.no_sync and micro < case.accumulation - 1:
        with engine.no_sync():
            loss = engine(tokens, skip)
            engine.backward(loss)
        return loss.detach()
    loss = engine(tokens, skip)
    if case.torch_style:
        (engine.scale(loss) if case.dtype == "fp16" else loss).backward()
    else:
        engine.backward(loss)
    if not case.no_sync:
        engine.step()
    return loss.detach()


def oracle_step(
    parameters: list[Tensor], copy: nn.Module, batches: list[Any], case: Case, step: int, scale: float = 1.0
) -> dict[str, Any]:
    """Every rank's loss and gradient of this step by plain torch, gathered to rank 0, in float64."""
    copy.to(DTYPES[case.dtype])
    with torch.no_grad():
        for own, theirs in zip(copy.parameters(), parameters, strict=True):
            own.copy_(theirs)
    sums = {name: torch.zeros(p.numel(), dtype=torch.float64) for name, p in copy.named_parameters() if p.requires_grad}
    losses = []
    for tokens, skip in batches:
        copy.zero_grad(set_to_none=True)
        loss = copy(tokens, skip)
        divisor = 1 if case.no_sync else case.accumulation
        ((loss / divisor) * scale).backward()
        losses.append(float(loss.detach()))
        for name, parameter in copy.named_parameters():
            if parameter.grad is not None:
                sums[name] += parameter.grad.double().flatten() / scale
    gathered: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object((sum(losses) / len(losses), sums), gathered)
    if gathered is None:
        return {}
    samples = ROWS * len(gathered) * (1 if case.no_sync else case.accumulation)
    return oracle([loss for loss, _ in gathered], [grads for _, grads in gathered], step, samples)


def oracle(losses: list[float], gradients: list[dict[str, Tensor]], step: int, samples: int) -> dict[str, Any]:
    """The definitions, written out naively from the formulas, with loops and float64."""
    count = len(losses)
    vectors = [torch.cat(list(grads.values())) for grads in gradients]
    norms = [float((v * v).sum()) ** 0.5 for v in vectors]
    cosine = [
        [float((a * b).sum()) / (norms[i] * norms[j]) for j, b in enumerate(vectors)] for i, a in enumerate(vectors)
    ]
    pairs = [(i, j) for i in range(count) for j in range(i + 1, count)]
    mean_gradient = sum(vectors) / count
    squared_mean = float((mean_gradient * mean_gradient).sum())
    mean_squared = sum(n * n for n in norms) / count
    small, big = samples / count, samples
    noise = None
    if count > 1:
        signal = (big * squared_mean - small * mean_squared) / (big - small)
        noise = (mean_squared - squared_mean) / (1 / small - 1 / big) / signal
    with_others = []
    for i, vector in enumerate(vectors):
        others = sum(v for j, v in enumerate(vectors) if j != i) / max(count - 1, 1)
        with_others.append(
            float((vector * others).sum()) / (norms[i] * float((others * others).sum()) ** 0.5) if count > 1 else None
        )

    def spread(values: list[float]) -> dict[str, float]:
        mean = sum(values) / count
        std = (sum((v - mean) ** 2 for v in values) / count) ** 0.5
        return {"mean": mean, "std": std, "range": max(values) - min(values)}

    return {
        "step": step,
        "samples": step * samples,
        "loss": {**spread(losses), "per_rank": losses},
        "grad_norm": {**spread(norms), "per_rank": norms, "aggregated": squared_mean**0.5},
        "cosine": cosine,
        "mean_cosine": sum(cosine[i][j] for i, j in pairs) / max(len(pairs), 1),
        "per_rank_cosine": with_others,
        "noise_scale": noise,
        "layers": [{name: v.clone() for name, v in grads.items()} for grads in gradients],
    }


def _hash_weights(engine: Any) -> str:
    return hash_of(full_parameters(engine))


def oracle_layers(gradients: list[dict[str, Tensor]]) -> dict[str, tuple[float, float, float]]:
    """Layer name -> (mean norm, norm CV, mean pairwise cosine), from the parameters whose names the layer begins."""
    truth = {}
    for layer in ("embedding", "layers.0", "layers.1", "sometimes", "norm"):
        own = [{n: v for n, v in grads.items() if n.startswith(layer + ".")} for grads in gradients]
        numbers = oracle([0.0] * len(own), own, 1, len(own))
        norm = numbers["grad_norm"]
        truth[layer] = (norm["mean"], norm["std"] / norm["mean"], numbers["mean_cosine"])
    return truth
