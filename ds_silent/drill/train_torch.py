"""Train as scripts write it themselves, under DistributedDataParallel, FSDP2 or Megatron-core; break its reduction.

What a fault does to data, model, loss, gradient and update it does in the script's own lines.
"""

from __future__ import annotations

import importlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import ds_silent
from ds_silent.drill.faults.injection import Batch
from ds_silent.drill.megatron_on_cpu import parallel
from ds_silent.drill.setting import DrillSetting
from ds_silent.drill.training import LARGEST_BUCKET, LEARNING_RATE, WEIGHT_DECAY, DrillTraining, Hooks, Script
from ds_silent.frameworks.fsdp2 import fsdp_modules, plain_parameters
from ds_silent.frameworks.megatron.buffers import inner_optimizers
from ds_silent.observing.observer import Observer


class LoopTraining(DrillTraining):
    """A loop of forward, backward, ``optimizer.step()`` and ``zero_grad()``.

    Attributes:
        model: what it calls.
        outer: the wrapper around the optimizer, where there is one.
    """

    model: Any
    outer: Any = None

    def reduces(self, last: bool) -> AbstractContextManager[object]:
        """Surround forward and backward of a micro-batch, which is reduced if it is the step's last."""
        context: AbstractContextManager[object] = nullcontext() if last else self.model.no_sync()
        return context

    @abstractmethod
    def break_reduction(self) -> None:
        """Run every collective of the gradients through :meth:`reduce`."""

    def reduce(
        self, sent: Tensor, got: Tensor, run: Callable[[], object], among: Callable[[dist.ProcessGroup], object]
    ) -> None:
        """Run one collective of the gradients: what this rank puts in and gets, and how a group reduces."""
        self.hooks.collective("reduction", got, run, sent=sent.view(-1), among=among)

    def reduce_scatter(self, sent: Tensor, got: Tensor, run: Callable[[], object], divisor: int = 1) -> None:
        """Run a collective that brings this rank's piece of the sum, divided."""

        def among(group: dist.ProcessGroup) -> None:
            whole = sent.clone()
            dist.all_reduce(whole, group=group)
            got.copy_(own_piece(whole) / divisor)

        self.reduce(sent, got, run, among)

    @contextmanager
    def spared(self, bucket: Iterable[tuple[Tensor, Tensor]]) -> Iterator[None]:
        """Let parameters that take no part in a reduction go on with what this rank has of their gradients."""
        hooks, names = self.hooks, {id(leaf): name for name, leaf in self.leaves}
        own = [part for parameter, part in bucket if hooks.act("left_out", names[id(parameter)], hooks.step)]
        kept = [part.clone() for part in own]
        yield
        for part, before in zip(own, kept, strict=True):
            part.copy_(before)

    def attach(self, block: dict[str, Any]) -> Observer | None:
        given: dict[str, Any] = {"loader": self.script.loader, "accumulation": self.setting.accumulation}
        return ds_silent.attach(self.model, block, optimizer=self.outer or self.optimizer, **given)

    def reach_below(self) -> None:
        injection, hooks = self.hooks.injection, self.hooks
        if self.script.trial.anywhere("reduction", "left_out"):  # the ranks' ways of reducing must be the same
            self.break_reduction()
        if injection.loss is not None:  # the model computes the loss, and on this rank another one
            self.module.register_forward_hook(lambda module, given, loss: hooks.act("loss", loss, hooks.step))
        if injection.updated is not None:
            self.optimizer.register_step_post_hook(
                lambda optimizer, *given: hooks.act("updated", self.module, optimizer, hooks.step)
            )

    def train(self, batch: Batch, count: int) -> Tensor:
        with self.reduces(self.hooks.last):
            loss: Tensor = self.model(batch.tokens, batch.labels)
            (loss / count).backward()  # type: ignore[no-untyped-call]
        return loss

    def update(self) -> None:
        self.hooks.act("update", self.optimizer, self.optimizer.step, self.hooks.step)
        if not self.hooks.act("kept", self.hooks.step):
            self.optimizer.zero_grad()


def own_piece(whole: Tensor) -> Tensor:
    return whole.view(dist.get_world_size(), -1)[dist.get_rank()]


def adamw(script: Script, model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(script.groups(model), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)


class DDPTraining(LoopTraining):
    """Under DistributedDataParallel; in bf16 the module is bf16 as a whole."""

    def __init__(self, setting: DrillSetting, script: Script) -> None:
        model = script.model()
        if setting.dtype == "bf16":
            model.to(torch.bfloat16)
        width = next(model.parameters()).element_size()
        options = script.trial.wrapper_options("ddp")
        self.model = DistributedDataParallel(model, bucket_cap_mb=LARGEST_BUCKET * width / 2**20, **options)
        super().__init__(setting, script, Hooks(script.injection), model, adamw(script, self.model))

    def break_reduction(self) -> None:
        """Register a communication hook that does what torch does without one: divide the gradient, then add up."""

        def allreduce_hook(state, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations, not texts
            values = bucket.buffer().div_(dist.get_world_size())
            reduce = partial(dist.all_reduce, values)
            with self.spared(zip(bucket.parameters(), bucket.gradients(), strict=True)):
                self.reduce(values, values, reduce, lambda group: reduce(group=group))
            done: torch.futures.Future[Tensor] = torch.futures.Future()
            done.set_result(values)
            return done

        self.model.register_comm_hook(None, allreduce_hook)


class FSDP2Training(LoopTraining):
    """Under FSDP2; in bf16 its shards stay fp32, and forward, gradients and their reduction are bf16."""

    def __init__(self, setting: DrillSetting, script: Script) -> None:
        model = script.model()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
        policy = MixedPrecisionPolicy(torch.bfloat16) if setting.dtype == "bf16" else MixedPrecisionPolicy()
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        self.model = fully_shard(model, mesh=mesh, mp_policy=policy)
        super().__init__(setting, script, Hooks(script.injection), model, adamw(script, model))

    def trainable(self) -> list[tuple[str, Tensor]]:
        names = [name for name, parameter in self.module.named_parameters() if parameter.requires_grad]
        return list(zip(names, plain_parameters(self.module, fsdp_modules(self.module), names), strict=True))

    def reduces(self, last: bool) -> AbstractContextManager[object]:
        self.model.set_requires_gradient_sync(last)
        return nullcontext()

    def break_reduction(self) -> None:
        """Patch what FSDP2 looks up for each group of parameters, and nobody else uses.

        That is ``reduce_scatter_tensor`` (torch 2.6), later ``reduce_scatter_single`` (2.13).
        """

        def scatter(original: Callable[..., Any], output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Any:
            divisor = dist.get_world_size() if kwargs.get("op") == dist.ReduceOp.AVG else 1
            output.copy_(own_piece(input) / divisor)  # what it holds where nothing runs
            self.reduce_scatter(input, output, partial(original, *args, output=output, input=input, **kwargs), divisor)

        for name in ("reduce_scatter_tensor", "reduce_scatter_single"):
            if hasattr(dist, name):
                self.hooks.patches.wrap(dist, name, scatter)


class MegatronTraining(LoopTraining):
    """Under Megatron-core's wrapper, with its plain optimizer (stage 0) or its distributed one (1).

    What differs from the loop of plain torch: a bucket is reduced as its last gradient comes, by Megatron's own code;
    the gradient lies in ``main_grad``; and Megatron's optimizer holds the one that steps.

    Foreign names, as megatron-core 0.15 and 0.16 have them in ``param_and_grad_buffer``: ``_coalescing_manager``, which
    holds collectives back until several can be sent together, ``dist_reduce_scatter_func``, ``dist_all_gather_func``
    and, for whole gradients, ``torch.distributed.all_reduce``, which others use too: so it is told by its bucket.
    """

    surroundings = parallel

    def __init__(self, setting: DrillSetting, script: Script) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer import TransformerConfig

        model, half, distributed = script.model(), setting.dtype == "bf16", setting.stage == 1
        changes = script.injection.config
        transformer = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
        options: dict[str, Any] = {"overlap_grad_reduce": True, **script.trial.wrapper_options("megatron")}
        wrapping = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=distributed, bucket_size=LARGEST_BUCKET, **options
        )
        self.model = DistributedDataParallel(transformer, wrapping, model.to(torch.bfloat16) if half else model)
        updating = OptimizerConfig(
            optimizer="adam",
            lr=LEARNING_RATE,
            weight_decay=WEIGHT_DECAY,
            bf16=half,
            clip_grad=0.0 if changes is None else float(changes({})["gradient_clipping"]),
            use_distributed_optimizer=distributed,
        )
        self.outer = get_megatron_optimizer(updating, [self.model])
        [(_, inner)] = inner_optimizers(self.outer)
        self._buffers = importlib.import_module("megatron.core.distributed.param_and_grad_buffer")
        self._missing: dict[int, Tensor] = {}  # what never reaches the reduction, by the parameter
        super().__init__(setting, script, Hooks(script.injection), model, inner)

    def break_reduction(self) -> None:
        """Behind :meth:`_run_at_once`, and before an observer is attached."""
        held = [(buffer, bucket) for buffer in self.model.buffers for bucket in buffer.buckets]
        buckets = {bucket.grad_data.data_ptr(): (buffer, bucket) for buffer, bucket in held}

        def spared(sent: Tensor) -> AbstractContextManager[None]:
            buffer, bucket = buckets[sent.data_ptr()]
            places = [(parameter, buffer.param_index_map[parameter]) for parameter in bucket.params_list]
            return self.spared((parameter, buffer.grad_data[start:end]) for parameter, (start, end, _) in places)

        def all_reduce(original: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if tensor.data_ptr() not in buckets:
                return original(tensor, *args, **kwargs)
            with spared(tensor):
                run = partial(original, tensor, op=dist.ReduceOp.SUM)
                self.reduce(tensor, tensor, partial(run, group=kwargs["group"]), lambda group: run(group=group))
            return None

        def scatter(original: Callable[..., Any], output: Tensor, sent: Tensor, **kwargs: Any) -> None:
            """The output is this rank's part of what is sent."""
            with spared(sent):
                run = partial(original, output, sent, op=dist.ReduceOp.SUM, group=kwargs["group"])
                self.reduce_scatter(sent, output, run)

        self.hooks.patches.wrap(dist, "all_reduce", all_reduce)
        self.hooks.patches.wrap(self._buffers, "dist_reduce_scatter_func", scatter)

    def reach_below(self) -> None:
        patches, anywhere = self.hooks.patches, self.script.trial.anywhere
        if self.hooks.injection.captured is not None:  # the reduction gets another gradient than the one looked at
            for name, leaf in self.leaves:
                patches.hook(leaf.register_hook, partial(self._lose, name, leaf))
            for group in self.model.bucket_groups:
                patches.wrap(group, "start_grad_sync", partial(self._reduce_without_lost, group))
        if anywhere("reduction", "left_out", "gathering"):
            self._run_at_once()
        if anywhere("gathering"):
            patches.wrap(self._buffers, "dist_all_gather_func", self._gather)
        super().reach_below()

    def reach_behind(self) -> None:
        """Reach the optimizer's step; what strikes behind the capture does so below it, as the reduction begins."""
        if self.hooks.injection.update is not None:
            self.hooks.patches.wrap(self.optimizer, "step", self._inner_step)

    def update(self) -> None:
        self.model.finish_grad_sync()
        self.outer.step()
        if not self.hooks.act("kept", self.hooks.step):
            self.model.zero_grad_buffer()
        for group in self.model.bucket_groups:  # else Megatron waits for gradients that have come already, and ends
            group.reset()

    def _run_at_once(self) -> None:
        """Hold nothing back, nor beside the backward; on every rank, because that changes the collectives."""

        def held(original: Callable[..., Any], *args: Any, **kwargs: Any) -> AbstractContextManager[object]:
            return nullcontext(SimpleNamespace(wait=lambda: None))  # it has run already

        def now(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return original(*args, **{**kwargs, "async_op": False})

        self.hooks.patches.wrap(self._buffers, "_coalescing_manager", held)
        for name in ("dist_reduce_scatter_func", "dist_all_gather_func"):
            self.hooks.patches.wrap(self._buffers, name, now)

    def _gather(self, original: Callable[..., Any], whole: Tensor, own: Tensor, **kwargs: Any) -> None:
        self.hooks.collective("gathering", whole, lambda: original(whole, own, group=kwargs["group"]))

    def _inner_step(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        return self.hooks.act("update", self.optimizer, partial(original, *args, **kwargs), self.hooks.step)

    def _lose(self, name: str, leaf: Tensor, gradient: Tensor) -> None:
        other = self.hooks.captured(name, gradient)
        if other is not None:
            self._missing[id(leaf)] = (gradient - other).detach()

    def _reduce_without_lost(self, group: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
        for leaf in group.params:
            lost = self._missing.pop(id(leaf), None)
            if lost is not None:
                leaf.main_grad.sub_(lost)
        return original(*args, **kwargs)
