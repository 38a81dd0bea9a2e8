"""Train around Megatron-core's wrapper, its buckets and its optimizer.

What differs from the loop of plain torch: a bucket is reduced as its last gradient comes, by Megatron's own code; the
gradient lies in ``main_grad``; and Megatron's optimizer holds the one that steps.

Foreign names, as megatron-core 0.15 and 0.16 have them in ``param_and_grad_buffer``: ``_coalescing_manager``, which
holds collectives back until several can be sent together, ``dist_reduce_scatter_func``, ``dist_all_gather_func`` and,
for whole gradients, ``torch.distributed.all_reduce``, which others use too: so it is told by its bucket.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_silent.drill.megatron_on_cpu import parallel
from ds_silent.drill.setting import DrillSetting
from ds_silent.drill.train_torch import LoopTraining
from ds_silent.drill.training import LARGEST_BUCKET, LEARNING_RATE, WEIGHT_DECAY, Hooks, Script
from ds_silent.frameworks.megatron.buffers import inner_optimizers


class MegatronTraining(LoopTraining):
    """Under Megatron-core's wrapper, with its plain optimizer (stage 0) or its distributed one (1)."""

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
