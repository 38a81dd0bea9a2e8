"""Every setting of DeepSpeed and habit of a script that changes a healthy reduction's or optimizer's arithmetic.

One table: what ``tests/frameworks/test_healthy_settings.py`` trains with and without the observer, with and without a
fault in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import torch_autocast
from deepspeed.utils import safe_get_full_grad, safe_set_full_grad
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ds_silent
from benchmarks.probe import LENGTH, ROWS, VOCABULARY, WIDTH, Probe
from ds_silent.exchange.layout import GATHER_LIMIT
from ds_silent.patches import Patches
from ds_silent.sinks.jsonl import read_events, read_metrics
from tests.support.distributed import gather_limit_of
from tests.support.repairs import state_of
from tests.support.training import Case

STEPS = 7
SUM = {"gradient_allreduce_op": "sum"}
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
AUTOCAST_FP16 = {"torch_autocast": {"enabled": True, "dtype": "float16"}}
ALL_LINEAR = {"torch_autocast": {**AUTOCAST["torch_autocast"], "lower_precision_safe_modules": ["torch.nn.Linear"]}}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
BF16_STATES = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
FP32_ACCUMULATION = {"data_types": {"grad_accum_dtype": "fp32"}}


class Healthy(Probe):
    """Every layer takes part."""

    def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(tokens, False)


class LowRank(nn.Module):
    """A frozen base with adapters, made by hand: B A is added to two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Healthy(None).requires_grad_(False)
        self.down = nn.ModuleList(nn.Linear(WIDTH, 4, bias=False) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(4, WIDTH, bias=False) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.base.embedding(tokens[:, :-1])
        for layer, down, up in zip(self.base.layers, self.down, self.up, strict=True):
            hidden = hidden + layer(hidden) + up(down(hidden))
        logits = self.base.head(self.base.norm(hidden))
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


class Checkpointed(Healthy):
    """One block's activations are computed again."""

    def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
        hidden = self.embedding(tokens[:, :-1])
        hidden = hidden + checkpoint(self.layers[0], hidden, use_reentrant=False)
        hidden = hidden + self.layers[1](hidden)
        logits = self.head(self.norm(hidden))
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def whole() -> nn.Module:
    return Healthy(None)


def checkpointed() -> nn.Module:
    return Checkpointed(None)


# -- what scripts do to gradients between backward and step ----------------------------------------------------------


def clip(engine: Any) -> None:
    torch.nn.utils.clip_grad_norm_(engine.module.parameters(), 0.05)


def clip_value(engine: Any) -> None:
    torch.nn.utils.clip_grad_value_(engine.module.parameters(), 1e-3)


def scale_data(engine: Any) -> None:
    """As scripts from before 0.4 do: behind autograd's back."""
    for parameter in engine.module.parameters():
        if parameter.grad is not None:
            parameter.grad.data.mul_(0.25)


def add_noise(engine: Any) -> None:
    """The same on all ranks."""
    generator = torch.Generator().manual_seed(int(engine.global_steps))
    for parameter in engine.module.parameters():
        if parameter.grad is not None:
            parameter.grad.add_(1e-3 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))


def freeze_rows(engine: Any) -> None:
    """Old rows of an embedding stay as they are: a common way to train new tokens only."""
    weight = engine.module.embedding.weight
    if weight.grad is not None:
        weight.grad[: VOCABULARY // 2] = 0.0


def replace(engine: Any) -> None:
    """Another tensor takes the gradient's place."""
    for parameter in engine.module.parameters():
        if parameter.grad is not None:
            parameter.grad = 0.5 * parameter.grad


def halve_one_layer(engine: Any) -> None:
    """DeepSpeed's own functions, which work in every stage."""
    for parameter in engine.module.layers[0].parameters():
        gradient = safe_get_full_grad(parameter)
        if gradient is not None:
            safe_set_full_grad(parameter, 0.5 * gradient)


# -- optimizers of the script's own ----------------------------------------------------------------------------------

Groups = Any


def two_groups(model: nn.Module) -> Groups:
    decayed = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    others = [p for p in model.parameters() if p.requires_grad and p.ndim <= 1]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 3e-3}]


class Lion(torch.optim.Optimizer):
    """Written by the user (Chen et al. 2023)."""

    def __init__(self, groups: Groups, lr: float = 1e-3):
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    mean = state.setdefault("mean", torch.zeros_like(parameter))
                    parameter.add_((0.9 * mean + 0.1 * parameter.grad).sign_(), alpha=-group["lr"])
                    mean.mul_(0.99).add_(parameter.grad, alpha=0.01)


CLIENTS: dict[str, Callable[[Groups], torch.optim.Optimizer]] = {
    "AdamW": partial(torch.optim.AdamW, lr=1e-2),
    "SGD": partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
    "Lion": Lion,
}


def in_bf16() -> nn.Module:
    """As a checkpoint of that dtype is loaded; DeepSpeed is told nothing of it and keeps no fp32 masters."""
    return whole().bfloat16()


# -- the table ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """One healthy training."""

    name: str
    case: Case = field(default_factory=Case)
    travels: str = "fp32"  # the coarsest dtype in which gradients are added up or kept
    between: Callable[[Any], None] | None = None
    client: str | None = None
    model: Callable[[], nn.Module] = whole
    groups: bool = False
    curriculum: bool = False  # sequences grow from step to step
    short: bool = False  # the last batch of an epoch has one row on some ranks
    steep: bool = False  # the loss is so steep that the first loss scales overflow
    quick: bool = False
    noted: bool = False  # an information says what cannot be compared, or that bf16 moments never fall

    def __str__(self) -> str:
        return self.name


def _staged(name: str, stages: tuple[int, ...], quick: tuple[int, ...] = (), **of_all: Any) -> Iterator[Setting]:
    case = {key: of_all.pop(key) for key in ("dtype", "accumulation", "zero", "top", "clipping") if key in of_all}
    for stage in stages:
        zero = {} if stage == 0 else case.get("zero", {})
        own = Case(stage=stage, **{**case, "zero": zero})
        yield Setting(f"{name}-stage{stage}", own, quick=stage in quick, **of_all)


_NO_SCATTER = {"reduce_scatter": False}
SETTINGS: tuple[Setting, ...] = (
    # the operator and its scaling
    *_staged("sum", (0, 1, 2), quick=(0, 1, 2), top=SUM, clipping=1.0),
    *_staged("sum-bf16", (0, 1, 2), quick=(0,), top=SUM, dtype="bf16", travels="bf16"),
    *_staged("sum-accumulated", (0, 1, 2), top=SUM, accumulation=4),
    *_staged("sum-unscattered", (1, 2), top=SUM, zero=_NO_SCATTER),
    *_staged("sum-predivide", (0, 1, 2), top={**SUM, "gradient_predivide_factor": 3.0}),
    *_staged("prescale", (0,), quick=(0,), top={"prescale_gradients": True}),
    *_staged("prescale-unscattered", (1, 2, 3), top={"prescale_gradients": True}, zero=_NO_SCATTER),
    *_staged("predivide", (0,), quick=(0,), top={"gradient_predivide_factor": 7.0}),
    *_staged("predivide-unscattered", (1, 2, 3), top={"gradient_predivide_factor": 7.0}, zero=_NO_SCATTER),
    *_staged("predivide-bf16", (0, 1), top={"gradient_predivide_factor": 7.0}, zero=_NO_SCATTER, dtype="bf16",
             travels="bf16"),
    # dtypes
    *_staged("communication-bf16", (0, 1, 2, 3), quick=(0, 2), top={"communication_data_type": "bf16"},
             travels="bf16"),
    *_staged("communication-fp16", (0, 1, 2, 3), top={"communication_data_type": "fp16"}, travels="fp16"),
    *_staged("communication-fp32-of-bf16", (0, 1, 2, 3), quick=(1,), top={"communication_data_type": "fp32"},
             dtype="bf16", travels="bf16"),
    *_staged("sequence-parallel-communication", (0, 1, 2, 3),
             top={"seq_parallel_communication_data_type": "bf16"}),
    *_staged("accumulated-fp32", (1, 2, 3), quick=(1,), top=FP32_ACCUMULATION, dtype="bf16", accumulation=4,
             travels="bf16"),
    *_staged("accumulated-bf16", (1, 2, 3), top={"data_types": {"grad_accum_dtype": "bf16"}}, dtype="bf16",
             accumulation=2, travels="bf16"),
    *_staged("accumulated-bf16-of-fp32", (1, 2, 3), top={"data_types": {"grad_accum_dtype": "bf16"}},
             accumulation=2, travels="bf16"),
    *_staged("immediate-update", (1,), top={**FP32_ACCUMULATION, "bf16": {"enabled": True,
             "immediate_grad_update": True}}, dtype="bf16", accumulation=2, travels="bf16"),
    *_staged("autocast", (0,), quick=(0,), top=AUTOCAST),
    *_staged("autocast", (1, 2, 3), quick=(1, 2), top=AUTOCAST, travels="bf16"),
    *_staged("autocast-accumulated", (0,), top=AUTOCAST, accumulation=4),
    *_staged("autocast-accumulated", (1, 2, 3), top=AUTOCAST, accumulation=4, travels="bf16"),
    *_staged("autocast-modules", (1, 2, 3), quick=(1,), top=ALL_LINEAR, travels="bf16"),
    *_staged("autocast-overlapped", (1, 2, 3), top=AUTOCAST, zero={"overlap_comm": True}, travels="bf16"),
    *_staged("autocast-sum", (0,), top={**AUTOCAST, **SUM}),
    *_staged("autocast-sum", (1, 2), top={**AUTOCAST, **SUM}, travels="bf16"),
    *_staged("autocast-fp16", (0,), quick=(0,), top=AUTOCAST_FP16),
    *_staged("autocast-fp16", (1, 2, 3), quick=(1,), top=AUTOCAST_FP16, travels="fp16"),
    *_staged("autocast-fp16-overflowing", (0,), top=AUTOCAST_FP16, steep=True),
    *_staged("fp16-static", (1, 2, 3), top={"fp16": {"enabled": True, "loss_scale": 128.0}}, dtype="fp16",
             travels="fp16"),
    *_staged("fp16-dynamic", (1, 2, 3), top={"fp16": {"enabled": True, "initial_scale_power": 17,
             "hysteresis": 1}}, dtype="fp16", travels="fp16"),
    *_staged("bf16-states", (1, 2, 3), quick=(2,), top=BF16_STATES, dtype="bf16", travels="bf16"),
    *_staged("bf16-model-without-block", (0,), quick=(0,), model=in_bf16, clipping=0.1, travels="bf16",
             noted=True),
    # buckets
    *_staged("small-buckets", (1, 2, 3), quick=(2,), zero={"reduce_bucket_size": 2000}),
    *_staged("not-contiguous", (1, 2, 3), zero={"contiguous_gradients": False}),
    *_staged("round-robin", (1, 2), quick=(1,), zero={"round_robin_gradients": True}),
    *_staged("multi-rank-buckets-off", (1, 2), zero={"use_multi_rank_bucket_allreduce": False}),
    *_staged("overlapped", (1, 2, 3), zero={"overlap_comm": True, "reduce_bucket_size": 2000}, accumulation=2),
    *_staged("all-gather-buckets", (1, 2), zero={"allgather_bucket_size": 1000, "allgather_partitions": False}),
    # where things lie
    *_staged("offloaded", (1, 2, 3), quick=(2,), zero=OFFLOAD, accumulation=2),
    *_staged("offloaded-parameters", (3,), zero={**OFFLOAD, "offload_param": {"device": "cpu"}}),
    *_staged("sub-groups", (3,), zero={"sub_group_size": 1000}),
    *_staged("secondary-partition", (3,), zero={"zero_hpz_partition_size": 1}),
    *_staged("secondary-partition-of-two", (3,), zero={"zero_hpz_partition_size": 2}),
    # the optimizer
    *_staged("clipped", (0, 1, 2, 3), clipping=0.1),
    *_staged("clipped-bf16", (0, 1, 2, 3), clipping=0.1, dtype="bf16", travels="bf16"),
    *_staged("groups", (0, 1, 2, 3), quick=(2,), groups=True),
    *_staged("groups-bf16", (0, 1, 2, 3), groups=True, dtype="bf16", travels="bf16"),
    *(setting for client in CLIENTS
      for setting in _staged(f"client-{client}", (0, 1, 2, 3), quick=(1,) if client == "Lion" else (),
                             client=client, groups=True)),
    # the data and the model
    *_staged("curriculum", (0, 1, 2, 3), quick=(0,), curriculum=True, accumulation=2),
    *_staged("short-batches", (0, 1, 2, 3), quick=(0,), short=True, accumulation=2),
    *_staged("low-rank", (0, 1, 2, 3), quick=(0,), model=LowRank),
    *_staged("low-rank-bf16", (0, 1, 2, 3), model=LowRank, dtype="bf16", travels="bf16"),
    *_staged("checkpointed", (0, 1, 2, 3), model=checkpointed),
    # the script's own hands
    *_staged("own-clipping", (0,), quick=(0,), between=clip),
    *_staged("own-clipping-accumulated", (0,), between=clip, accumulation=4),
    *_staged("own-clipping-and-deepspeeds", (0,), quick=(0,), between=clip, clipping=0.04),
    *_staged("own-clipping-of-a-sum", (0,), between=clip, top=SUM),
    *_staged("own-clipping-bf16", (0, 1), quick=(0,), between=clip, dtype="bf16", travels="bf16"),
    *_staged("own-clipping-autocast", (0,), between=clip, top=AUTOCAST, travels="bf16"),
    *_staged("own-clipping-of-values", (0,), quick=(0,), between=clip_value),
    *_staged("own-scaling", (0,), quick=(0,), between=scale_data, noted=True),
    *_staged("own-noise", (0,), between=add_noise),
    *_staged("own-frozen-rows", (0,), quick=(0,), between=freeze_rows),
    *_staged("own-gradients", (0,), between=replace),
    *_staged("own-layer-rates", (0,), between=halve_one_layer),
    *_staged("own-layer-rates-partitioned", (1, 2, 3), quick=(1,), between=halve_one_layer, noted=True),
)  # fmt: skip


# -- one training ------------------------------------------------------------------------------------------------------

Fault = Callable[[Any, Patches], None]


@dataclass(frozen=True)
class Trace:
    """What one rank saw."""

    state: str  # hash of weights, optimizer state and counters
    records: tuple[dict[str, Any], ...] = ()  # rank 0
    events: tuple[dict[str, Any], ...] = ()


def train(
    setting: Setting,
    folder: Path,
    block: dict[str, Any] | None,
    fault: Fault | None = None,
    gather_limit: int = GATHER_LIMIT,
) -> Trace:
    """``STEPS`` optimizer steps on this rank."""
    forget_autocast()
    case = setting.case
    if case.dtype == "fp16" or setting.travels == "fp16":  # DeepSpeed's CPU accelerator refuses it; torch computes it
        get_accelerator().is_fp16_supported = lambda: True
    torch.manual_seed(1234)
    model = setting.model()
    groups = two_groups(model) if setting.groups else [p for p in model.parameters() if p.requires_grad]
    config = case.config(folder, enabled=False)
    if setting.client is not None:
        del config["optimizer"]
    if block is not None:
        config["silent_consistency"] = {**block, "output_dir": str(folder)}
    client = None if setting.client is None else CLIENTS[setting.client](groups)
    parameters = None if client else groups
    with gather_limit_of(gather_limit):
        engine, *_ = ds_silent.initialize(model=model, optimizer=client, model_parameters=parameters, config=config)
    patches = Patches()
    try:
        if fault is not None:
            fault(engine, patches)
        for tokens in _batches(setting):
            engine.backward(engine(tokens) * (10.0 if setting.steep else 1.0))
            if setting.between is not None and engine.is_gradient_accumulation_boundary():
                setting.between(engine)
            engine.step()
        state = state_of(engine)
        observer = ds_silent.observer_of(engine)
        if observer is not None:
            observer.close()
    finally:
        patches.undo()
        engine.destroy()
        forget_autocast()
    if block is None or dist.get_rank():
        return Trace(state)
    return Trace(state, tuple(read_metrics(folder / "metrics.jsonl")), tuple(read_events(folder / "events.jsonl")))


def _batches(setting: Setting) -> Iterator[Tensor]:
    rank, accumulation = dist.get_rank(), setting.case.accumulation
    generator = torch.Generator().manual_seed(99 + rank)
    for number in range(STEPS * accumulation):
        last = (number + 1) % accumulation == 0
        ends = number // accumulation % 3 == 2  # an epoch of three steps; its last batch is short on some ranks
        rows = 1 if setting.short and last and ends and rank % 2 else ROWS
        length = 4 + number // accumulation if setting.curriculum else LENGTH
        yield torch.randint(0, VOCABULARY, (rows, length), generator=generator)


def forget_autocast() -> None:
    """DeepSpeed keeps it for the whole process: the next engine would reduce in it too."""
    torch_autocast.TORCH_AUTOCAST_INITIALIZED = False
    torch_autocast.TORCH_AUTOCAST_DTYPE = None
