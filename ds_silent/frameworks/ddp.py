"""One model in ``DistributedDataParallel``: how it reduces, and whether its result is the mean.

framework = DDPFramework(ddp, optimizers, config, micro_batch_rows=4, accumulation=1)
framework.connect(moments)
framework.close(ended=True)          # the module and its optimizers are as they were

The hooks are registered by ``TorchLoop.connect`` in :mod:`ds_silent.frameworks.torch_loop`. No communication hook is
registered: torch allows one, which is the user's. The local gradient is what ``parameter.grad`` holds as the backward
ends; where the reducer writes to that earlier, it is what a leaf hook gets and what was accumulated before. Where a
parameter may take part in an earlier micro-batch only (``find_unused_parameters``), each is looked at by itself.
"""

from __future__ import annotations

import gc
import inspect
import logging
import sys
import weakref
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from ds_silent.config import SilentConsistencyConfig
from ds_silent.distributed.guard import CollectiveGuard, UnevenInputsError
from ds_silent.extras import is_first
from ds_silent.framework import Moments, Setting
from ds_silent.frameworks.torch_common import Wrapped, attach_wrapped, idle_or_refused, needing_gradient
from ds_silent.frameworks.torch_framework import TorchFramework
from ds_silent.kernels.checksums import Items
from ds_silent.maths.rounding_bound import Arithmetic, coarsest
from ds_silent.observing.observe import Given, observer_of
from ds_silent.observing.observer import Observer

logger = logging.getLogger("ds_silent")

# ----------------------------------------------------------------------------------------------------------------------
# How a ``DistributedDataParallel`` reduces: in which dtype, and whether what comes out is the mean at all.


_NARROW = {
    "fp16_compress_hook": torch.float16,
    "fp16_compress_wrapper": torch.float16,
    "FP16_COMPRESS": torch.float16,
    "bf16_compress_hook": torch.bfloat16,
    "bf16_compress_wrapper": torch.bfloat16,
}
_MARK = "ds_silent"
WHOLE = ("", "allreduce_hook", "ALLREDUCE")
_LOCAL = "post_localSGD_hook"  # reduces among some ranks: their replicas differ until they are averaged


def hook_of(ddp: Any) -> str:
    """Return the name of the communication hook; empty without one.

    Python hooks stand in ``_comm_hooks``; a built-in one only in the logging data (torch 2.4 to 2.13).
    """
    hooks = getattr(ddp, "_comm_hooks", None) or []
    if hooks:
        hook = hooks[-1][0]
        return str(getattr(hook, "__name__", None) or type(hook).__name__)
    named = ddp._get_ddp_logging_data().get("comm_hook", "") if hasattr(ddp, "_get_ddp_logging_data") else ""
    return str(named).rpartition(".")[2] if named else ""


def keeps_the_mean(ddp: Any) -> bool:
    """Tell whether the mean should come out but for rounding; hooks of unknown name may be lossy by design."""
    return hook_of(ddp) in (*WHOLE, *_NARROW)


def arithmetic_of(ddp: Any, dtypes: set[torch.dtype], elements: int, width: int) -> Arithmetic:
    """Return the reducer's: it multiplies by 1/N, which rounds too, and adds up in the gradients' or a hook's dtype.

    ``mixed_precision`` casts parameters and gradients to ``reduce_dtype``, and the result back.
    """
    own = coarsest(dtypes)
    precision = getattr(ddp, "mixed_precision", None)
    narrowed = _NARROW.get(hook_of(ddp)) or getattr(precision, "reduce_dtype", None) or own
    communication = coarsest((own, narrowed))
    return Arithmetic(
        communication,
        before=2 + (communication != own),
        after=(communication, own) if communication != own else (),
        accumulation=own,
        applied=own,
        norm=own,
        elements=elements,
        width=width,
        handed_unscaled=True,
    )


def reduced_parameters(ddp: Any) -> set[int] | None:
    """Return ``id`` of each parameter that lies in a bucket; None where that is not known.

    The reducer keeps the nodes alive that accumulate its parameters' gradients, and keeps the list of them to itself
    (torch 2.4 to 2.13): a node that is the same object a moment later has another owner than this function. That the
    owner is the reducer, and not a graph that the script holds, follows from their number.
    """
    count = ddp._get_ddp_logging_data().get("num_parameter_tensors") if hasattr(ddp, "logger") else None
    parameters = list(ddp.module.parameters())
    try:
        kept = {id(parameter) for parameter in parameters if _accumulated_elsewhere(parameter)}
    except Exception:  # whatever a tensor subclass of somebody else's raises
        kept = set()
    if len(kept) == count:
        return kept
    trainable = {id(parameter) for parameter in parameters if parameter.requires_grad}
    return trainable if len(trainable) == count else None


def _accumulated_elsewhere(parameter: Any) -> bool:
    if (
        not parameter.is_leaf
        or parameter.is_inference()
        or not (parameter.is_floating_point() or parameter.is_complex())
    ):
        return False
    with needing_gradient(parameter):
        _accumulator(parameter).metadata[_MARK] = True
        return _accumulator(parameter).metadata.pop(_MARK, False) is True


def _accumulator(parameter: Any) -> Any:
    with torch.enable_grad():
        return parameter.expand_as(parameter).grad_fn.next_functions[0][0]


def reduces_copies(ddp: Any) -> bool:
    """Tell whether ``parameter.grad`` holds the local gradient until the callbacks that end the backward.

    The reducer copies it into a bucket, and in a callback back. A gradient that is a view of its bucket is reduced in
    place; a reducer written in Python, an optimizer in the backward, and ``mixed_precision`` write to it earlier (torch
    2.4 to 2.13). Where a backward may leave parameters out, each micro-batch is looked at by itself.
    """
    otherwise = ["gradient_as_bucket_view", "find_unused_parameters", "static_graph", "mixed_precision"]
    otherwise += ["_use_python_reducer", "_delay_all_reduce_params"]
    in_backward = any(hasattr(parameter, "_in_backward_optimizers") for parameter in ddp.parameters())
    return not in_backward and not any(getattr(ddp, name, None) for name in otherwise)


class DDPFramework(TorchFramework):
    """See :class:`ds_silent.framework.Framework`. Making one is a collective."""

    def __init__(
        self,
        ddp: Any,
        optimizers: Sequence[Any],
        config: SilentConsistencyConfig,
        micro_batch_rows: int,
        accumulation: int,
    ):
        ignored = set(getattr(ddp, "parameters_to_ignore", ()))
        self.wrapper, self._reduced = ddp, reduced_parameters(ddp)
        named = [
            (name, p)
            for name, p in ddp.module.named_parameters()
            if name not in ignored and (p.requires_grad if self._reduced is None else id(p) in self._reduced)
        ]
        checks = keeps_the_mean(ddp)
        if not checks and is_first():
            logger.warning(
                "ds_silent: the communication hook %s may be lossy by design: the reduction is not checked",
                hook_of(ddp),
            )
        super().__init__(
            ddp.module,
            named,
            ddp.process_group,
            optimizers,
            config,
            micro_batch_rows,
            accumulation,
            synchronises=lambda: bool(ddp.require_backward_grad_sync),
            checks=checks,
        )
        self._ddp = ddp
        if type(ddp) is DistributedDataParallel:  # a subclass may call the module in a method of its own
            self.loop.forwards.is_past_wrapper = _is_past_wrapper
        self.reduces_every_micro_batch = bool(ddp.find_unused_parameters) or bool(ddp.static_graph)
        self.reads_together, self._graph_task = reduces_copies(ddp), -1  # outside of a backward

    def arithmetic(self, elements: int, width: int) -> Arithmetic:
        return arithmetic_of(self._ddp, {p.dtype for p in self.parameters}, elements, width)

    def reduced_ids(self) -> Set[int] | None:
        return self._reduced

    def replicated(self) -> tuple[Items, Callable[[], Items]]:
        """Return nothing where replicas differ by design."""
        return ([], list) if hook_of(self._ddp) == _LOCAL else super().replicated()

    def settings(self) -> dict[str, Setting]:
        asked = {"bucket_bytes_cap": 25 << 20, "find_unused_parameters": False, "gradient_as_bucket_view": False}
        asked |= {"static_graph": False, "broadcast_buffers": True}
        held = {name: getattr(self._ddp, name) for name in asked if hasattr(self._ddp, name)}
        found = {name: Setting(one, "default" if one == asked[name] else "yours") for name, one in held.items()}
        hook = hook_of(self._ddp)
        return {**found, "communication hook": Setting(hook or "none", "yours" if hook else "default")}

    def connect(self, moments: Moments) -> None:
        # of the module inside, whose hooks ddp.forward(x) runs, too
        self.patches.hook(self.module.register_forward_pre_hook, partial(self._refuse_join, moments.guard))
        super().connect(replace(moments, on_gradient=partial(moments.guard.local, self._gradient, moments)))
        for name in ("register_comm_hook", "_register_builtin_comm_hook"):
            self.patches.wrap(self._ddp, name, self._hook_registered)
        if hasattr(self._ddp, "reducer"):  # none where all reductions are delayed
            self.patches.wrap_method(type(self._ddp.reducer), "_delay_all_reduce", self._reduce_late)
        if (local := getattr(sys.modules.get("accelerate.local_sgd"), "LocalSGD", None)) is not None:
            self.patches.wrap_method(local, "__enter__", self._local_sgd)
            if not self._ddp.require_backward_grad_sync:  # within one that the script has entered already
                for one in [one for one in gc.get_objects() if type(one) is local]:
                    self._averages(one)

    def _gradient(self, moments: Moments, index: int, gradient: Tensor) -> None:
        """Ask for a call at the end of this run of autograd's engine, ahead of the reducer, which asks after its hook.

        A reentrant checkpoint is a run of its own, in which the reducer may ask.
        """
        if moments.on_gradient(index, gradient):
            task = torch._C._current_graph_task_id()
            if task != self._graph_task:
                self._graph_task = task
                if self.is_boundary():
                    ended = partial(moments.guard.local, self._accumulates, moments)
                    Variable._execution_engine.queue_callback(ended)
                self.script_hooks.leave_rest()

    def _accumulates(self, moments: Moments) -> None:
        self.script_hooks.take_left()
        moments.on_accumulated()

    def _hook_registered(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Check no more: the bound on rounding is that of the reduction as it was when the observer was attached."""
        before = hook_of(self._ddp)
        result = original(*args, **kwargs)
        hook = hook_of(self._ddp)
        if hook != before and not (hook in WHOLE and before in WHOLE) and self._share is not None:
            self.stop_checking()
            if is_first():
                logger.warning(
                    "ds_silent: the communication hook %s came after the observer: the reduction is not checked from "
                    "now on; register it before the observer is attached",
                    hook,
                )
        return result

    def _local_sgd(self, original: Callable[..., Any], own: Any) -> Any:
        self._averages(own)
        return original(own)

    def _averages(self, own: Any) -> None:
        """Check and compare no more: the script averages its weights every few steps, not its gradients (accelerate 1.0
        to 1.15)."""
        if own.enabled and own.model is self._ddp and not self.averages_weights:
            self.averages_weights = True
            self.stop_checking()
            if is_first():
                logger.warning(
                    "ds_silent: LocalSGD averages the weights now and then, and no gradient: from now on no reduction "
                    "is checked, and the replicas are not compared"
                )

    def _reduce_late(self, original: Callable[..., Any], reducer: Any) -> Any:
        """The first step of a static graph: torch reduces at the end of the backward, Lightning's manual optimization
        behind it (2.6.6)."""
        result = original(reducer)
        if reducer is self._ddp.reducer:
            self.loop.reduction_ended()
        return result

    def _refuse_join(self, guard: CollectiveGuard, *_: Any) -> None:
        """Inside ``ddp.join()`` a rank without rows shadows the others' reductions and takes no step: whoever exchanged
        something there would wait for it. Read is ``_join_config`` (torch 2.4 to 2.13)."""
        if self._ddp._join_config.enable and torch.is_grad_enabled():
            guard.fail(UnevenInputsError("inside DistributedDataParallel.join() nothing is observed"))


def attach_ddp(
    model: DistributedDataParallel,
    optimizer: Any,
    config: Given = None,
    *,
    loader: Any = None,
    accumulation: int = 1,
) -> Observer | None:
    """Observe a ``DistributedDataParallel`` training as :func:`ds_silent.attach` does.

    A wrapper of a module that is observed already takes the place of the former one, as where a stage unfreezes layers.
    """
    if not isinstance(model, DistributedDataParallel):
        return idle_or_refused(
            model,
            config,
            f"attach_ddp takes a torch.nn.parallel.DistributedDataParallel, got {type(model).__name__}; wrap the "
            "module first",
        )
    wrapped = Wrapped(
        name="DistributedDataParallel",
        held=model,
        module=model.module,
        group=lambda: model.process_group,
        framework=lambda optimizers, config, rows, steps: DDPFramework(model, optimizers, config, rows, steps),
        facts=lambda: {
            "find_unused_parameters": bool(model.find_unused_parameters),
            "static_graph": bool(model.static_graph),
            "the communication hook": hook_of(model),
        },
    )
    end_former(model)
    _wrappers[model.module] = weakref.ref(model)
    return attach_wrapped(wrapped, optimizer, config, loader, accumulation)


def end_former(model: DistributedDataParallel) -> None:
    """Close the observer of another wrapper of the same module; what only that has held is no training's any more."""
    former = _wrappers.get(model.module, lambda: None)()
    observer = None if former is None or former is model else observer_of(former)
    if observer is not None:
        observer.close()
        gc.collect()


_FORWARDS = {
    inspect.unwrap(DistributedDataParallel.forward).__code__,
    DistributedDataParallel._run_ddp_forward.__code__,
}
_MODULE = nn.Module._call_impl.__code__.co_filename
_FRAMES = 64  # from a forward hook of the module to the wrapper's forward it is a few


def _is_past_wrapper() -> bool:
    """Tell whether no wrapper's forward is under way where a hook of the module's forward asks.

    Compiled code has other frames, and a very deep stack is not read to its end: there it is no.
    """
    frame, of_torch, left = sys._getframe(), False, _FRAMES
    while (back := frame.f_back) is not None:
        frame, left = back, left - 1
        of_torch = of_torch or frame.f_code.co_filename == _MODULE  # which calls the hook
        if frame.f_code in _FORWARDS or (of_torch and "_dynamo" in frame.f_code.co_filename) or not left:
            return False
    return True


_wrappers: weakref.WeakKeyDictionary[nn.Module, Callable[[], DistributedDataParallel | None]] = (
    weakref.WeakKeyDictionary()
)
"""The wrapper of each module that was observed last."""
