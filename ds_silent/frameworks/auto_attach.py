"""Trainings of a script that nobody edits: each is attached as its first training forward begins.

    auto_attach = AutoAttach(block)      # before the script runs
    auto_attach.unobserved()             # what came by and could not be observed, and why
    auto_attach.undo()

Then everything is made: the wrapper of the model, which every rank of its group calls, the optimizers, the loader. The
one place that all such forwards go through is ``__call__`` of the wrapper's class: before torch has collected the hooks
that it is to call. What a script has not imported is not imported here.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ds_silent.capture.loaders import LoaderMemory
from ds_silent.config import SilentConsistencyConfig
from ds_silent.extras import is_first
from ds_silent.frameworks import closures
from ds_silent.frameworks.attach import attach, is_megatron
from ds_silent.frameworks.ddp import end_former
from ds_silent.frameworks.torch_common import parameters_of_optimizer
from ds_silent.frameworks.trainers import Trainers
from ds_silent.observing.observe import anything_observed, observer_of
from ds_silent.observing.observer import Observer
from ds_silent.observing.start import alone
from ds_silent.patches import Patches
from ds_silent.rules.loads import watch_loads
from ds_silent.text import NOTHING_CAME_BY

logger = logging.getLogger("ds_silent")
_MEGATRON_OPTIMIZERS = ("megatron.core.optimizer", "megatron.core.optimizer.muon")

_SAID_AFTER = 3  # optimizer steps: soon, and not where an optimizer is made late
_NOTHING_AFTER = 20  # optimizer steps by which something wraps the model, if anything does
_ALONE = (
    "several processes were started, and the script has made no process group so far: each trains alone; call "
    "torch.distributed.init_process_group, or let the trainer do so (accelerate does on CPUs with "
    "ACCELERATE_USE_CPU=true)"
)
_UNCALLED = (
    "a DistributedDataParallel was made, but it was never called in training, so it reduces no gradient: call ddp(x), "
    "not ddp.module(x)"
)
_COMPILED = (
    "no call of a DistributedDataParallel in training was seen: where torch.compile hides it, call ds_silent.attach in "
    "the script; where there is none, its gradients are not reduced: call ddp(x), not ddp.module(x)"
)


class AutoAttach:
    """Watches the whole process, for one block."""

    def __init__(self, config: SilentConsistencyConfig):
        self._config, self._patches = config, Patches()
        self._optimizers: list[weakref.ref[Any]] = []
        self._of_megatron: list[tuple[Any, Sequence[Any]]] = []  # what get_megatron_optimizer has made, and of what
        self._seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # observed, or not to be
        self._uncalled: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # DistributedDataParallels, in training
        self._stepped: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # those whose optimizer has begun a step
        self._forward_runs = False  # of a training
        self._unobserved: dict[str, str] = {}  # by class
        self._observers: list[Observer] = []
        self._steps_without = 0  # optimizer steps while a model is called that no optimizer holds, and none is observed
        self._steps = 0  # optimizer steps
        self._trainers = Trainers(self._patches)
        self._loaders = LoaderMemory()
        self._wrappers: tuple[type, ...] = (DistributedDataParallel,)
        patches = self._patches
        patches.add(self._loaders)
        watch_loads(patches)
        patches.wrap_method(torch.optim.Optimizer, "__init__", self._optimizer_made)
        patches.add(register_optimizer_step_pre_hook(self._stepping))
        patches.add(register_optimizer_step_pre_hook(closures.follow))
        patches.wrap_method(DistributedDataParallel, "__init__", self._ddp_made)
        patches.wrap_method(DistributedDataParallel, "__call__", self._called)
        patches.wrap_method(DistributedDataParallel, "forward", self._forward)
        patches.around(dist, "destroy_process_group", self._process_group_ends)
        patches.after_import("torch._dynamo.eval_frame", self._watch_compiled)
        patches.after_import("torch.distributed.fsdp", self._watch_fsdp2)
        patches.after_import("megatron.core.distributed.data_parallel_base", self._watch_megatron)
        for name in _MEGATRON_OPTIMIZERS:
            patches.after_import(name, self._watch_megatron_optimizers)

    def undo(self) -> None:
        """Leave the classes as they were; what is observed goes on."""
        self._patches.undo()

    def unobserved(self) -> list[str]:
        """Return what is wrong and what to do, for each kind of training that came by unobserved."""
        return list(self._unobserved.values())

    # -- what the script makes -----------------------------------------------------------------------------------

    def _optimizer_made(self, original: Callable[..., None], optimizer: Any, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        self._optimizers.append(weakref.ref(optimizer))

    def _ddp_made(self, original: Callable[..., None], ddp: nn.Module, *args: Any, **kwargs: Any) -> None:
        original(ddp, *args, **kwargs)
        self._uncalled.add(ddp)

    def _stepping(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Find models that are stepped and were not called: they are trained past their wrapper, or compiled."""
        if torch.compiler.is_compiling():
            return
        self._steps += 1
        if self._steps == _NOTHING_AFTER and not (self._unobserved or anything_observed() or alone()):
            if not dist.is_initialized():
                self._unobserved["alone"] = _ALONE
            elif is_first():
                said = "ds_silent: nothing is observed so far, after %d optimizer steps: %s"
                logger.warning(said, self._steps, NOTHING_CAME_BY)
        if self._unobserved and not self._observers:
            self._steps_without += 1
            if self._steps_without == _SAID_AFTER and is_first():
                logger.warning("ds_silent: %s", "; ".join(self.unobserved()))
        for ddp in [ddp for ddp in self._uncalled if _trainable(ddp) & parameters_of_optimizer(optimizer)]:
            self._uncalled.discard(ddp)
            self._stepped.add(ddp)
            self._unobserved["uncalled"] = _COMPILED if _anything_compiled() else _UNCALLED

    def _watch_fsdp2(self, fsdp: ModuleType) -> None:
        if hasattr(fsdp, "FSDPModule"):  # torch 2.6
            self._wrappers += (fsdp.FSDPModule,)
            self._patches.wrap_method(fsdp.FSDPModule, "__call__", self._called, inherited=nn.Module)

    def _watch_compiled(self, module: ModuleType) -> None:
        self._patches.wrap_method(module.OptimizedModule, "__call__", self._compiled_called, inherited=nn.Module)

    def _watch_megatron(self, module: ModuleType) -> None:
        self._wrappers += (module._BaseDataParallel,)
        self._patches.wrap_method(module._BaseDataParallel, "__call__", self._called)

    def _watch_megatron_optimizers(self, module: ModuleType) -> None:
        for name in [name for name in vars(module) if name.startswith("get_megatron") and name.endswith("optimizer")]:
            self._patches.wrap(module, name, self._megatron_optimizer_made)

    def _megatron_optimizer_made(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        optimizer = original(*args, **kwargs)
        chunks = kwargs["model_chunks"] if "model_chunks" in kwargs else args[1]
        self._of_megatron.append((optimizer, list(chunks)))
        return optimizer

    # -- the forward ---------------------------------------------------------------------------------------------

    def _called(self, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Take the outermost wrapper as the training; those called inside, as blocks under fully_shard, are of it."""
        if torch.compiler.is_compiling():
            return original(module, *args, **kwargs)
        if self._forward_runs:
            self._seen.add(module)  # a checkpoint calls it again in the backward, where nothing is around it
        if self._forward_runs or not torch.is_grad_enabled():
            return original(module, *args, **kwargs)
        self._begins(module)
        self._forward_runs = True
        try:
            return original(module, *args, **kwargs)
        finally:
            self._forward_runs = False

    def _compiled_called(self, original: Callable[..., Any], compiled: Any, *args: Any, **kwargs: Any) -> Any:
        """Take a wrapper that ``torch.compile`` was given as the training: what is called inside may not be seen."""
        module: nn.Module = compiled._orig_mod
        outside = not (self._forward_runs or torch.compiler.is_compiling())
        if outside and isinstance(module, self._wrappers) and torch.is_grad_enabled():
            self._begins(module)
        return original(compiled, *args, **kwargs)

    def _begins(self, module: nn.Module) -> None:
        self._uncalled.discard(module)
        if module in self._stepped:  # it is called within that step, by its closure
            self._stepped.discard(module)
            if not self._stepped:
                self._unobserved.pop("uncalled", None)
        if module not in self._seen:
            _broadcast_buffers(module)
            self._look_at(module)

    def _forward(self, original: Callable[..., Any], ddp: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call a forward that the script calls past ``__call__``, ``ddp.forward(x)``, through it."""
        straight = not self._forward_runs and torch.is_grad_enabled() and not torch.compiler.is_compiling()
        return ddp(*args, **kwargs) if straight else original(ddp, *args, **kwargs)

    def _look_at(self, module: nn.Module) -> None:
        """Attach, where somebody steps its parameters. The same on every rank of its group, as the forward is."""
        kind = type(module).__name__
        if isinstance(module, DistributedDataParallel):
            end_former(module)  # and with it its optimizer
        held, optimizer = self._trained(module)
        if observer_of(module) is not None:
            self._seen.add(module)
        elif optimizer:
            self._unobserved.pop(kind, None)
            for one in held if isinstance(held, list) else [held]:
                self._seen.add(one)
            self._begin(held, optimizer)
        else:
            self._unobserved[kind] = (
                f"the script trains a {kind}, but no optimizer of its parameters was made "
                f"{'by get_megatron_optimizer ' if is_megatron(module) else ''}before its forward; "
                "make it of the parameters of the very model that is wrapped, not of one that was copied, converted or "
                "loaded anew; if the script steps them itself, or masters of them, call ds_silent.attach in it"
            )

    def _trained(self, module: nn.Module) -> tuple[Any, Any]:
        """Return what :func:`ds_silent.attach` takes: the module or its chunks, and their parameters' optimizers."""
        if is_megatron(module):
            made = [(list(chunks), one) for one, chunks in self._of_megatron if any(own is module for own in chunks)]
            return made[-1] if made else (module, None)
        if not isinstance(module, DistributedDataParallel):
            from ds_silent.frameworks.fsdp2 import reshard

            reshard(module)
        own = set(map(id, module.parameters()))  # some of which may be frozen for one optimizer's turn
        alive = [optimizer for optimizer in (reference() for reference in self._optimizers) if optimizer is not None]
        inside = {id(vars(one).get(name)) for one in alive for name in ("optim", "optimizer")}
        outer = [one for one in alive if id(one) not in inside]
        return module, [optimizer for optimizer in outer if own & parameters_of_optimizer(optimizer)]

    def _begin(self, held: Any, optimizer: Any) -> None:
        observer = attach(held, self._config, optimizer=optimizer, loader=self._loaders.newest())
        taken = None
        if isinstance(held, list):
            from ds_silent.frameworks.megatron.megatron_framework import taken_by_script

            taken = taken_by_script()
        if observer is not None:
            self._observers.append(observer)
            if (promise := self._trainers.promise()) is not None:
                observer.promised(promise)
            if taken:
                observer.load_state_dict({"counted": taken})

    def _process_group_ends(self, group: Any = None) -> None:
        """Close the observers: what the last step has sent is under way in the group."""
        if group is None or group is dist.group.WORLD:
            for observer in reversed(self._observers):  # as patches are taken off
                observer.close()


def _broadcast_buffers(ddp: nn.Module) -> None:
    """Do what the forward under way would begin with, before anybody waits for the other ranks.

    One of them may evaluate alone, through its ``DistributedDataParallel``: it waits for this broadcast there, and its
    next forward has none (torch 2.4 to 2.13).
    """
    if isinstance(ddp, DistributedDataParallel) and ddp._check_sync_bufs_pre_fwd():  # type: ignore[no-untyped-call]
        ddp._sync_buffers()  # type: ignore[no-untyped-call]
        ddp.require_forward_param_sync = False


def _trainable(module: nn.Module) -> set[int]:
    """Return the ids of its parameters."""
    return {id(parameter) for parameter in module.parameters() if parameter.requires_grad}


def _anything_compiled() -> bool:
    """Tell whether anything was: nothing of ours runs inside, so a module that is called there is not seen."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return bool(counters.get("frames"))
