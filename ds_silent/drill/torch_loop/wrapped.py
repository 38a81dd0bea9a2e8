"""How a framework wraps the model, and how its reduction is broken: all that differs between the two loops.

    wrapped = wrap(setting, model, options={})
    wrapped.model(tokens, labels)                        # what the script calls
    wrapped.break_reduction(patches, reduce, left_out)   # from then on reduce(collective without its place) runs each
    with wrapped.reduces(last): loss.backward()

A further framework is one more class here, see :class:`Wrapped`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from ds_silent.drill.setting import LARGEST_BUCKET
from ds_silent.frameworks.ddp import attach_ddp
from ds_silent.frameworks.fsdp2 import attach_fsdp2, fsdp_modules, plain_parameters
from ds_silent.observing.observer import Observer
from ds_silent.patches import Patches
from ds_silent.practice.model import PracticeModel

if TYPE_CHECKING:
    from ds_silent.drill.torch_loop.setting import TorchSetting

Among = Callable[[dist.ProcessGroup], object]
Reduce = Callable[[Tensor, Tensor, Callable[[], object], Among], None]
"""Of one collective: what this rank puts in, what it gets, its run, and the same among a group of other ranks."""
LeftOut = Callable[[str], bool]
"""Whether a parameter, by its name, takes no part in the reduction under way."""


class Wrapped(Protocol):
    """One model, wrapped. Everything is the same on every rank."""

    model: nn.Module  # that the script calls
    module: nn.Module  # whose names its parameters go by

    def leaves(self) -> list[tuple[str, Tensor]]:
        """The trainable parameters that a backward sees. A collective."""

    def reduces(self, last: bool) -> AbstractContextManager[object]:
        """Around forward and backward of a micro-batch, which is reduced if it is the step's last."""

    def break_reduction(self, patches: Patches, reduce: Reduce, left_out: LeftOut) -> None:
        """Run every collective of the gradients through ``reduce``, until the patches are undone."""

    def observed(self, optimizer: Any, block: dict[str, Any], loader: Any, accumulation: int) -> Observer | None:
        """With an observer."""


class _DDP:
    def __init__(self, setting: TorchSetting, model: PracticeModel, options: dict[str, Any]) -> None:
        if setting.dtype == "bf16":
            model.to(torch.bfloat16)
        width = next(model.parameters()).element_size()
        self._ddp = DistributedDataParallel(model, bucket_cap_mb=LARGEST_BUCKET * width / 2**20, **options)
        self.model: nn.Module = self._ddp
        self.module: nn.Module = model

    def leaves(self) -> list[tuple[str, Tensor]]:
        return [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]

    def reduces(self, last: bool) -> AbstractContextManager[object]:
        return nullcontext() if last else self._ddp.no_sync()

    def break_reduction(self, patches: Patches, reduce: Reduce, left_out: LeftOut) -> None:
        """By a communication hook that does what torch does without one: the gradient is divided, then added up."""
        names = {id(parameter): name for name, parameter in self.leaves()}

        def allreduce_hook(state, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations, not texts
            values = bucket.buffer().div_(dist.get_world_size())
            parts = zip(bucket.parameters(), bucket.gradients(), strict=True)
            kept = [(part, part.clone()) for parameter, part in parts if left_out(names[id(parameter)])]
            reduce(values, values, lambda: dist.all_reduce(values), lambda group: dist.all_reduce(values, group=group))
            for part, own in kept:
                part.copy_(own)
            done: torch.futures.Future[Tensor] = torch.futures.Future()
            done.set_result(values)
            return done

        self._ddp.register_comm_hook(None, allreduce_hook)

    def observed(self, optimizer: Any, block: dict[str, Any], loader: Any, accumulation: int) -> Observer | None:
        return attach_ddp(self._ddp, optimizer, block, loader=loader, accumulation=accumulation)


class _FSDP2:
    def __init__(self, setting: TorchSetting, model: PracticeModel) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
        policy = MixedPrecisionPolicy(torch.bfloat16) if setting.dtype == "bf16" else MixedPrecisionPolicy()
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        self._sharded = fully_shard(model, mesh=mesh, mp_policy=policy)
        self.model: nn.Module = model
        self.module: nn.Module = model

    def leaves(self) -> list[tuple[str, Tensor]]:
        names = [name for name, parameter in self.module.named_parameters() if parameter.requires_grad]
        return list(zip(names, plain_parameters(self.module, fsdp_modules(self.module), names), strict=True))

    def reduces(self, last: bool) -> AbstractContextManager[object]:
        self._sharded.set_requires_gradient_sync(last)
        return nullcontext()

    def break_reduction(self, patches: Patches, reduce: Reduce, left_out: LeftOut) -> None:
        """At what FSDP2 looks up for each group of parameters: ``reduce_scatter_tensor`` (torch 2.6), later
        ``reduce_scatter_single`` (2.13). Nobody else uses either."""

        def scatter(original: Callable[..., Any], output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Any:
            ranks, me = dist.get_world_size(), dist.get_rank()
            divisor = ranks if kwargs.get("op") == dist.ReduceOp.AVG else 1

            def among(group: dist.ProcessGroup) -> None:
                whole = input.clone()
                dist.all_reduce(whole, group=group)
                output.copy_(whole.view(ranks, -1)[me] / divisor)

            output.copy_(input.view(ranks, -1)[me] / divisor)  # what it holds where nothing runs
            reduce(input, output, lambda: original(output=output, input=input, *args, **kwargs), among)  # noqa: B026

        for name in ("reduce_scatter_tensor", "reduce_scatter_single"):
            if hasattr(dist, name):
                patches.wrap(dist, name, scatter)

    def observed(self, optimizer: Any, block: dict[str, Any], loader: Any, accumulation: int) -> Observer | None:
        return attach_fsdp2(self.model, optimizer, block, loader=loader, accumulation=accumulation)


def wrap(setting: TorchSetting, model: PracticeModel, options: dict[str, Any]) -> Wrapped:
    """``options``: of DistributedDataParallel."""
    return _DDP(setting, model, options) if setting.framework == "ddp" else _FSDP2(setting, model)
