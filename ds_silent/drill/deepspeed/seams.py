"""Where the drill reaches into a running DeepSpeed: between the reduction's input and output, and around the update.

    reach_below(engine, injection)               # before the observer is attached
    with Seams(engine, injection) as seams:
        seams.forward(step)
        with seams.backward(step, micro_batch, last=True):
            engine.backward(loss)
        with seams.update(step):
            engine.step()

Foreign functions, as DeepSpeed 0.16.9 and 0.19.8 have them. ``deepspeed.comm.all_reduce`` and ``reduce`` are what
``DeepSpeedEngine.allreduce_bucket`` (stage 0) and ``DeepSpeedZeroOptimizer`` (stages 1 and 2) look up at each call, and
during a backward they reduce gradients only; ``deepspeed.comm.all_gather_into_tensor`` collects the updated weights in
``all_gather_dp_groups``. The observer communicates through ``torch.distributed`` and is not touched. Everything is put
back on exit.

Responses run inside ``engine.step()``. A reduction that is repeated goes through
``DeepSpeedEngine.buffered_allreduce_fallback`` (stage 0) or ``DeepSpeedZeroOptimizer.reduce_gradients`` (stage 1), by
which it is told from DeepSpeed's other collectives there; it runs clean unless the injection says otherwise. Repairs
of replicas use ``torch.distributed.broadcast`` and asynchronous ``all_reduce``, which nobody else does during a step
(up to 64 ranks); an ordered reduction uses ``all_to_all_single``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import deepspeed.comm
import torch.distributed as dist
from torch import Tensor

from ds_silent.drill.arriving import damage_repairs
from ds_silent.drill.faults.injection import Collective, Injection
from ds_silent.patches import Patches


class Seams:
    """The patches of one training on this rank; nothing is patched where the injection changes nothing."""

    def __init__(self, engine: Any, injection: Injection) -> None:
        self._engine, self._injection = engine, injection
        self._patches = Patches()
        self._step, self._micro_batch, self._last, self._buckets, self._attempt = 0, 0, True, 0, 0
        self._inside: Literal["backward", "update", "repetition"] | None = None

    def __enter__(self) -> Seams:
        injection = self._injection
        if injection.reduction is not None or injection.repetition is not None:
            self._patches.wrap(deepspeed.comm, "all_reduce", self._reduce)
            self._patches.wrap(deepspeed.comm, "reduce", self._reduce)
        if injection.repetition is not None:
            self._patches.wrap(self._engine, "buffered_allreduce_fallback", self._repeat)
            if hasattr(self._engine.optimizer, "reduce_gradients"):
                self._patches.wrap(self._engine.optimizer, "reduce_gradients", self._repeat)
        if injection.pieces is not None:
            self._patches.wrap(dist, "all_to_all_single", self._exchange)
        if injection.repair is not None:
            arrived = partial(self._arrived, injection.repair)
            damage_repairs(self._patches, arrived, lambda: self._inside == "update")
        if injection.gathering is not None:
            self._patches.wrap(deepspeed.comm, "all_gather_into_tensor", self._gather)
        if injection.update is not None or injection.updated is not None:
            self._patches.wrap(self._engine.basic_optimizer, "step", self._apply)
        if injection.captured is not None:  # hooks run in the order of registration: the observer has seen the gradient
            for name, parameter in self._engine.module.named_parameters():
                if parameter.requires_grad:
                    self._patches.add(parameter.register_hook(self._after_capture(name)))
        return self

    def __exit__(self, *error: object) -> None:
        self._patches.undo()

    def forward(self, step: int) -> None:
        """Before a step's first forward."""
        if self._injection.before is not None:
            self._injection.before(self._engine.module, self._engine.basic_optimizer, step)

    @contextmanager
    def backward(self, step: int, micro_batch: int, last: bool) -> Iterator[None]:
        """Around ``engine.backward`` of one micro-batch, counted from 0."""
        self._step, self._micro_batch, self._last = step, micro_batch, last
        self._buckets, self._attempt, self._inside = 0, 0, "backward"
        yield
        self._inside = None

    @contextmanager
    def update(self, step: int) -> Iterator[None]:
        """Around ``engine.step``; then whatever happens to a rank's memory after the update."""
        self._step, self._inside = step, "update"
        yield
        self._inside = None
        if self._last and self._injection.afterwards is not None:
            self._injection.afterwards(self._engine.module, self._engine.basic_optimizer, step)

    def _reduce(self, original: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        injection = self._injection
        hit = {"backward": injection.reduction, "repetition": injection.repetition}.get(self._inside or "")
        if hit is None:
            return original(tensor, *args, **kwargs)
        place, self._buckets = (self._micro_batch, self._buckets), self._buckets + 1
        run = partial(original, tensor, *args, **kwargs)
        hit(Collective(tensor.view(-1), run, self._step, place, self._last, self._attempt))
        return None

    def _repeat(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._inside != "update":
            return original(*args, **kwargs)
        self._buckets, self._attempt, self._inside = 0, self._attempt + 1, "repetition"
        result = original(*args, **kwargs)
        self._inside = "update"
        return result

    def _exchange(self, original: Callable[..., Any], received: Tensor, *args: Any, **kwargs: Any) -> Any:
        injection = self._injection
        if self._inside != "backward" or injection.pieces is None:
            return original(received, *args, **kwargs)
        run = partial(original, received, *args, **kwargs)
        injection.pieces(Collective(received.view(-1), run, self._step, (self._micro_batch, 0), self._last))
        return None

    def _arrived(self, damage: Callable[[Tensor, int], None], tensor: Tensor) -> None:
        damage(tensor.view(-1), self._step)

    def _gather(self, original: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        injection = self._injection
        if self._inside != "update" or injection.gathering is None:
            return original(tensor, *args, **kwargs)
        run = partial(original, tensor, *args, **kwargs)
        injection.gathering(Collective(tensor.view(-1), run, self._step, (0, 0), True))
        return None

    def _apply(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        injection, optimizer = self._injection, self._engine.basic_optimizer
        run = partial(original, *args, **kwargs)
        result = run() if injection.update is None else injection.update(optimizer, run, self._step)
        if injection.updated is not None:
            injection.updated(self._engine.module, optimizer, self._step)
        return result

    def _after_capture(self, name: str) -> Callable[[Tensor], Tensor | None]:
        captured = self._injection.captured
        assert captured is not None
        return lambda gradient: captured(name, gradient, self._last, self._step)


def reach_below(engine: Any, injection: Injection) -> None:
    """What is changed before the observer comes, so that it lies below the observer: until the engine's end."""
    if injection.left_out is not None:
        _leave_out(engine, injection.left_out)
    if injection.kept is not None:
        _keep_gradients(engine, injection.kept)


def _leave_out(engine: Any, left_out: Callable[[str, int], bool]) -> None:
    """Some parameters take no part in the reduction: each rank goes on with its own gradient.

    Stage 0 (and ``BF16_Optimizer``, which has buffers of its own and is not reached): the list that
    ``DeepSpeedEngine._get_gradients_for_reduction`` makes. Stages 1 and 2:
    ``DeepSpeedZeroOptimizer.reduce_independent_p_g_buckets_and_remove_grads``, called once per parameter.
    """
    patches = Patches()  # on this engine, which ends with the training

    def left() -> list[Any]:
        step = engine.global_steps + 1
        return [parameter for name, parameter in engine.module.named_parameters() if left_out(name, step)]

    def without(original: Callable[..., Any]) -> Any:
        dense, experts = original()
        held = {parameter.grad.data_ptr() for parameter in left() if parameter.grad is not None}
        return [gradient for gradient in dense if gradient.data_ptr() not in held], experts

    def skip(original: Callable[..., Any], reduced: Any, *args: Any, **kwargs: Any) -> Any:
        out = any(reduced is parameter for parameter in left())
        return None if out else original(reduced, *args, **kwargs)

    if engine.zero_optimization_stage() == 0:
        patches.wrap(engine, "_get_gradients_for_reduction", without)
    else:
        patches.wrap(engine.optimizer, "reduce_independent_p_g_buckets_and_remove_grads", skip)


def _keep_gradients(engine: Any, kept: Callable[[int], bool]) -> None:
    """``zero_grad`` forgets its work: of the engine (stage 0 in fp32) or of its optimizer wrapper (in bf16)."""
    patches = Patches()

    def forgetful(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return None if kept(engine.global_steps + 1) else original(*args, **kwargs)

    for owner in {id(owner): owner for owner in (engine, engine.optimizer)}.values():
        patches.wrap(owner, "zero_grad", forgetful)
