"""What a forward gathers is this rank's shard in its own part: healthy trainings are silent, stale weights are told."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ds_silent
from ds_silent.drill.training import hash_of
from ds_silent.frameworks.fsdp2 import reshard
from ds_silent.rules import weights_in_use
from ds_silent.sinks.jsonl import read_events
from tests.support.distributed import run_distributed
from tests.support.healthy import AUTOCAST, forget_autocast

STEPS, WIDTH, PARAMETERS = 40, 24, 7
FSDP2 = ("fp32", "nested", "nested, bf16", "kept after the forward", "checkpointed", "accumulated", "replicas")
ZERO3 = ("fp32", "bf16", "fp16", "persistent", "checkpointed", "autocast", "persistent, autocast")
STALE = ("stale, fp32", "stale, bf16")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """Has a parameter of one element, of which only the first rank holds a piece."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.block, self.head = Block(), nn.Linear(WIDTH, 5)
        self.scale, self.checkpointed = nn.Parameter(torch.ones(1)), checkpointed

    def forward(self, x: Tensor) -> Tensor:
        made: Any = checkpoint(self.block, x, use_reentrant=False) if self.checkpointed else self.block(x)
        return self.head(made) * self.scale


def make_stale(module: nn.Module, layer: Any) -> None:
    """From the third forward on, a layer's weight is what the first has gathered."""
    held: list[Tensor] = []

    def replace(*_: Any) -> None:
        held.append(layer.weight.detach().clone())
        if len(held) > 2:
            layer.weight.data.copy_(held[0])

    module.register_forward_pre_hook(replace)


def train(held: Any, optimizer: Any, case: str, directory: str, observed: bool) -> tuple[Any, ...]:
    """Parameters that were looked at in each step, and what was told, on rank 0."""
    looked: list[int] = []
    original = weights_in_use.GatheredWeights.breaches

    def breaches(rule: Any) -> Any:
        looked.append(len(rule._unequal))
        return original(rule)

    weights_in_use.GatheredWeights.breaches = breaches  # type: ignore[method-assign]
    weights_in_use.LOOKED_AT = weights_in_use.EVERY
    accumulation = 2 if case == "accumulated" else 1
    given = {} if optimizer is None else {"optimizer": optimizer, "accumulation": accumulation}
    block = {"output_dir": directory, "tensorboard": False, "preflight": False}
    generator = torch.Generator().manual_seed(dist.get_rank())
    dtype = next(held.module.parameters()).dtype if optimizer is None else torch.float32
    with ds_silent.observe(held, config=block, **given) if observed else nullcontext():
        for step in range(1, STEPS + 1):
            for micro in range(accumulation):
                if optimizer is not None:
                    held.set_requires_gradient_sync(micro + 1 == accumulation)
                    held.set_reshard_after_backward(case != "never resharded" or step < 3)
                loss = held(torch.randn(4, WIDTH, generator=generator).to(dtype)).float().square().mean()
                loss.backward() if optimizer is not None else held.backward(loss)
            if optimizer is None:
                held.step()
            else:
                optimizer.step()
                optimizer.zero_grad()
    weights_in_use.GatheredWeights.breaches, weights_in_use.LOOKED_AT = original, 4  # type: ignore[method-assign]
    path = Path(directory, "events.jsonl")
    events = read_events(path) if dist.get_rank() == 0 and observed else []
    return looked, [(e["step"], e["kind"], e["where"]) for e in events if e["severity"] != "info"]


def fsdp2(case: str, directory: str, observed: bool) -> tuple[Any, ...]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.manual_seed(3)
    model, named = Model(case == "checkpointed"), dict[str, Any]()
    if case.endswith("bf16"):
        named["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if case == "kept after the forward":
        named["reshard_after_forward"] = False
    if case == "replicas":
        named["mesh"] = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    if case != "fp32":
        fully_shard(model.block, **named)
    fully_shard(model, **named)
    if case in STALE:
        make_stale(model.block, model.block.down)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = train(model, optimizer, case, directory, observed)
    reshard(model)
    return *found, hash_of(parameter.full_tensor().detach() for parameter in model.parameters())  # type: ignore[attr-defined]


def zero3(case: str, directory: str, observed: bool) -> tuple[Any, ...]:
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True
    torch.manual_seed(3)
    model = Model(case == "checkpointed")
    dtype = next((one for one in ("bf16", "fp16") if case.endswith(one)), "")
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 10**6 * case.startswith("persistent")},
        **(AUTOCAST if case.endswith("autocast") else {}),
        **({dtype: {"enabled": True, **({"initial_scale_power": 8} if dtype == "fp16" else {})}} if dtype else {}),
    }
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    if case in STALE:
        make_stale(model.block.down, model.block.down)
    found = train(engine, None, case, directory, observed)
    forget_autocast()
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return *found, hash_of(parameter.detach().clone() for parameter in model.parameters())


def train_all(directory: str) -> dict[str, tuple[Any, ...]]:
    """Each case observed, and each healthy one without."""
    found = {}
    for make, cases in ((fsdp2, (*FSDP2, "never resharded", *STALE)), (zero3, (*ZERO3, *STALE))):
        for case in cases:
            name = f"{make.__name__}: {case}"
            found[name] = make(case, f"{directory}/{name}", True)
            if case not in STALE:
                found[name] += (make(case, "", False)[-1],)
    return found


@pytest.mark.long
def test_healthy_weights_are_silent_and_stale_ones_are_told(tmp_path: Path) -> None:
    ranks = run_distributed(train_all, 2, (str(tmp_path),), timeout=280)
    for name in ranks[0]:
        looked, told, observed, *alone = ranks[0][name]
        assert alone in ([], [observed]), f"{name}: the weights are those of a training without ds_silent"
        assert looked == [PARAMETERS] * STEPS, name
        assert ranks[1][name][0] == [PARAMETERS - (name != "fsdp2: replicas")] * STEPS, name
        if "stale" in name:
            assert told[0] == (3, "weights-mismatch", "block.down.weight"), name
        elif "never" in name:
            assert told[0][:2] == (4, "weights-mismatch"), name
        else:
            assert told == [], name
