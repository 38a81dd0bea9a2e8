"""A training of the drill as scripts write it themselves: forward, backward, ``optimizer.step()``, ``zero_grad()``.

What a fault does to data, model, loss, gradient and update it does in the script's own lines; what it does to the
reduction goes through :mod:`ds_silent.drill.torch_loop.wrapped`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_silent.config import BLOCK
from ds_silent.drill.arriving import damage_repairs
from ds_silent.drill.faults.injection import HEALTHY, Batch, Collective
from ds_silent.drill.setting import LEARNING_RATE, WEIGHT_DECAY
from ds_silent.drill.torch_loop.wrapped import Among, Wrapped, wrap
from ds_silent.drill.training import Script, Trial, state_of
from ds_silent.observing.observer import Observer
from ds_silent.patches import Patches

if TYPE_CHECKING:
    from ds_silent.drill.torch_loop.setting import TorchSetting

OPTIONS: dict[str, dict[str, bool]] = {
    "layer-without-gradient": {"find_unused_parameters": True},
    "buffer-changed": {"broadcast_buffers": False},  # else the next forward heals it, with rank 0's
}
"""By fault: what DistributedDataParallel must be told for the fault to mean something."""


class TorchTraining:
    """See :class:`ds_silent.drill.training.Training`."""

    observer: Observer

    def __init__(self, wrapped: Wrapped, optimizer: torch.optim.Optimizer, script: Script) -> None:
        self._wrapped, self._optimizer, self._script = wrapped, optimizer, script
        self._injection, self._leaves = script.injection, wrapped.leaves()
        self._step, self._micro_batch, self._last, self._buckets = 1, 0, True, 0
        self._inside = False

    def before_observer(self) -> None:
        """Hooks whose effect the observer sees."""
        injection = self._injection
        if injection.gradient is not None:
            for name, leaf in self._leaves:
                leaf.register_hook(partial(self._corrupted, injection.gradient, name))  # type: ignore[no-untyped-call]
        if injection.loss is not None:
            self._wrapped.module.register_forward_hook(partial(self._lost, injection.loss))
        if injection.updated is not None:
            self._optimizer.register_step_post_hook(partial(self._updated, injection.updated))

    def behind_observer(self, patches: Patches) -> None:
        """What strikes behind the capture of the local gradient."""
        injection = self._injection
        if injection.captured is not None:  # hooks run in the order of registration
            for name, leaf in self._leaves:
                hook = partial(self._after_capture, injection.captured, name)
                patches.add(leaf.register_hook(hook))  # type: ignore[no-untyped-call]
        if injection.repair is not None:
            damage_repairs(patches, partial(self._arrived, injection.repair), lambda: self._inside)

    def step(self, batches: list[Batch], step: int) -> float:
        injection, wrapped, optimizer = self._injection, self._wrapped, self._optimizer
        self._step, self._inside = step, True
        if injection.before is not None:
            injection.before(wrapped.module, optimizer, step)
        total = 0.0
        for number, batch in enumerate(batches):
            self._micro_batch, self._last, self._buckets = number, number == len(batches) - 1, 0
            if self._script.trial.ids:
                self.observer.observe_batch(batch.ids)
            with wrapped.reduces(self._last):
                loss = wrapped.model(batch.tokens, batch.labels)
                (loss / len(batches)).backward()
            total += float(loss.detach())
        self.update(step)
        self.clear(kept=bool(self._act("kept", step)))
        self._inside = False
        if injection.afterwards is not None:
            injection.afterwards(wrapped.module, optimizer, step)
        return total / len(batches)

    def update(self, step: int) -> None:
        """Behind the step's last backward."""
        self._act("update", self._optimizer, self._optimizer.step, step)

    def clear(self, kept: bool) -> None:
        """The gradients, when the step is over; unless they are ``kept``."""
        if not kept:
            self._optimizer.zero_grad()

    def state(self) -> str:
        return state_of(self._wrapped.module, self._optimizer)

    def reduce(self, sent: Tensor, got: Tensor, run: Callable[[], object], among: Among) -> None:
        """One collective of the gradients."""
        place, self._buckets = (self._micro_batch, self._buckets), self._buckets + 1
        under_way = Collective(got.view(-1), run, self._step, place, self._last, sent=sent.view(-1), among=among)
        self._act("reduction", under_way)

    def left_out(self, name: str) -> bool:
        return bool(self._act("left_out", name, self._step))

    def _act(self, what: str, *given: Any) -> Any:
        return (getattr(self._injection, what) or HEALTHY[what])(*given)

    def _corrupted(self, corrupt: Callable[..., Tensor], name: str, gradient: Tensor) -> Tensor:
        return corrupt(name, gradient, self._step)

    def _lost(self, change: Callable[[Tensor, int], Tensor], module: Any, given: Any, loss: Tensor) -> Tensor:
        """The model computes the loss, and on this rank another one."""
        return change(loss, self._step)

    def _after_capture(self, captured: Callable[..., Tensor | None], name: str, gradient: Tensor) -> Tensor | None:
        return captured(name, gradient, self._last, self._step)

    def _updated(self, change: Callable[..., None], optimizer: Any, *args: Any) -> None:
        change(self._wrapped.module, optimizer, self._step)

    def _arrived(self, damage: Callable[[Tensor, int], None], tensor: Tensor) -> None:
        damage(tensor.view(-1), self._step)


@contextmanager
def train(setting: TorchSetting, script: Script) -> Iterator[TorchTraining]:
    """The training with its observer, until it is over."""
    wrapped = wrap(setting, script.model(), OPTIONS.get(script.trial.name, {}))
    trained = [parameter for parameter in wrapped.model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    training, patches = TorchTraining(wrapped, optimizer, script), Patches()

    def reach_below() -> None:
        if anywhere(
            script.trial, "reduction", "left_out"
        ):  # on every rank: the ranks' ways of reducing must be the same
            wrapped.break_reduction(patches, training.reduce, training.left_out)

    script.before_observer(wrapped.module, optimizer, reach_below)
    training.before_observer()
    block = {**setting.config[BLOCK], "output_dir": str(script.output_dir)}
    observer = wrapped.observed(optimizer, block, script.loader, setting.accumulation)
    assert observer is not None  # the setting's block is active
    training.observer = observer
    training.behind_observer(patches)
    try:
        yield training
    finally:
        patches.undo()
    observer.close()


def anywhere(trial: Trial, *places: str) -> bool:
    """Whether the fault sets one of these places of an injection on any rank."""
    everyone = range(dist.get_world_size())
    return trial.fault is not None and any(
        getattr(trial.fault.inject(trial.strike, rank), place) is not None for rank in everyone for place in places
    )
