"""A training of the drill as scripts write it themselves around Megatron-core's wrapper, its buckets and its optimizer.

What differs from the loop of plain torch: a bucket is reduced as its last gradient comes, by Megatron's own code; the
gradient lies in ``main_grad``; and Megatron's optimizer holds the one that steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ds_silent.config import BLOCK
from ds_silent.drill.arriving import damage_repairs
from ds_silent.drill.faults.injection import Collective
from ds_silent.drill.megatron.collectives import at_once, gathers_through, reduces_through
from ds_silent.drill.setting import LARGEST_BUCKET, LEARNING_RATE, WEIGHT_DECAY
from ds_silent.drill.torch_loop.setting import TorchSetting
from ds_silent.drill.torch_loop.training import TorchTraining, anywhere
from ds_silent.drill.torch_loop.wrapped import LeftOut, Reduce
from ds_silent.drill.training import Script
from ds_silent.frameworks.megatron.attach import attach_megatron
from ds_silent.frameworks.megatron.buffers import inner_optimizers
from ds_silent.observing.observer import Observer
from ds_silent.patches import Patches
from ds_silent.practice.megatron_gpt import parallel
from ds_silent.practice.model import PracticeModel

ONE_BUCKET = ("layer-without-gradient",)
"""Faults that need a reduction behind the backward: Megatron ends where a bucket waits for a gradient that is none."""


class WrappedByMegatron:
    """See :class:`ds_silent.drill.torch_loop.wrapped.Wrapped`."""

    def __init__(self, setting: TorchSetting, model: PracticeModel, clip: float, overlap: bool) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer import TransformerConfig

        half, distributed = setting.dtype == "bf16", setting.stage == 1
        transformer = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
        options = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=overlap,
            use_distributed_optimizer=distributed,
            bucket_size=LARGEST_BUCKET,
        )
        self.chunk = DistributedDataParallel(transformer, options, model.to(torch.bfloat16) if half else model)
        settings = OptimizerConfig(
            optimizer="adam",
            lr=LEARNING_RATE,
            weight_decay=WEIGHT_DECAY,
            bf16=half,
            clip_grad=clip,
            use_distributed_optimizer=distributed,
        )
        self.optimizer = get_megatron_optimizer(settings, [self.chunk])
        [(_, self.inner)] = inner_optimizers(self.optimizer)
        self.model: nn.Module = self.chunk
        self.module: nn.Module = model

    def leaves(self) -> list[tuple[str, Tensor]]:
        return [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]

    def reduces(self, last: bool) -> AbstractContextManager[object]:
        return nullcontext() if last else self.chunk.no_sync()

    def break_reduction(self, patches: Patches, reduce: Reduce, left_out: LeftOut) -> None:
        reduces_through(patches, self.chunk, reduce, left_out)

    def observed(self, optimizer: Any, block: dict[str, Any], loader: Any, accumulation: int) -> Observer | None:
        return attach_megatron([self.chunk], self.optimizer, block, loader=loader, accumulation=accumulation)


class MegatronTraining(TorchTraining):
    """See :class:`ds_silent.drill.training.Training`."""

    def __init__(self, wrapped: WrappedByMegatron, script: Script) -> None:
        super().__init__(wrapped, wrapped.inner, script)
        self._chunk, self._outer = wrapped.chunk, wrapped.optimizer
        self._missing: dict[int, Tensor] = {}  # what never reaches the reduction, by the parameter

    def behind_observer(self, patches: Patches) -> None:
        """The optimizer's step; what strikes behind the capture does so below it, as the reduction begins."""
        patches.wrap(self._optimizer, "step", self._inner_step)
        if self._injection.repair is not None:
            damage_repairs(patches, partial(self._arrived, self._injection.repair), lambda: self._inside)

    def below_observer(self, patches: Patches) -> None:
        """What the reduction gets is another gradient than the one that was looked at."""
        if self._injection.captured is None:
            return
        for name, leaf in self._leaves:
            hook = partial(self._lose, self._injection.captured, name, leaf)
            patches.add(leaf.register_hook(hook))  # type: ignore[no-untyped-call]
        for group in self._chunk.bucket_groups:
            patches.wrap(group, "start_grad_sync", partial(self._reduce_without_lost, group))

    def update(self, step: int) -> None:
        self._chunk.finish_grad_sync()
        self._outer.step()

    def clear(self, kept: bool) -> None:
        if not kept:
            self._chunk.zero_grad_buffer()
        for group in self._chunk.bucket_groups:  # else Megatron waits for gradients that have come already, and ends
            group.reset()

    def gather(self, gathered: Tensor, run: Any) -> None:
        """One collective of the updated weights."""
        self._act("gathering", Collective(gathered.view(-1), run, self._step, (0, 0), True))

    def _inner_step(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        return self._act("update", self._optimizer, partial(original, *args, **kwargs), self._step)

    def _lose(self, captured: Any, name: str, leaf: Tensor, gradient: Tensor) -> None:
        other = captured(name, gradient, self._last, self._step)
        if other is not None:
            self._missing[id(leaf)] = (gradient - other).detach()

    def _reduce_without_lost(self, group: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
        for leaf in group.params:
            lost = self._missing.pop(id(leaf), None)
            if lost is not None:
                leaf.main_grad.sub_(lost)
        return original(*args, **kwargs)


@contextmanager
def train(setting: TorchSetting, script: Script) -> Iterator[MegatronTraining]:
    """The training with its observer, until it is over."""
    with parallel():
        yield from _train(setting, script)


def _train(setting: TorchSetting, script: Script) -> Iterator[MegatronTraining]:
    changes = script.injection.config
    clip = 0.0 if changes is None else float(changes({})["gradient_clipping"])
    wrapped = WrappedByMegatron(setting, script.model(), clip, overlap=script.trial.name not in ONE_BUCKET)
    training, patches = MegatronTraining(wrapped, script), Patches()

    def reach_below() -> None:
        training.below_observer(patches)
        if anywhere(script.trial, "reduction", "left_out", "gathering"):
            at_once(patches)
        if anywhere(script.trial, "reduction", "left_out"):
            wrapped.break_reduction(patches, training.reduce, training.left_out)
        if anywhere(script.trial, "gathering"):
            gathers_through(patches, training.gather)

    script.before_observer(wrapped.module, wrapped.inner, reach_below)
    training.before_observer()
    block = {**setting.config[BLOCK], "output_dir": str(script.output_dir)}
    observer = wrapped.observed(wrapped.inner, block, script.loader, setting.accumulation)
    assert observer is not None  # the setting's block is active
    training.observer = observer
    training.behind_observer(patches)
    try:
        yield training
    finally:
        patches.undo()
    observer.close()
