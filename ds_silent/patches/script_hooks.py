"""A script's own hooks on gradients: which of them change a gradient, and by how much.

hooks.register(patches, "0.weight", parameter, act)     # ``act`` sees what the script's hooks have made of it
hooks.follow()                                          # as a step's first backward begins: those registered since
hooks.changed, hooks.observed()                         # so far; of the step
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from functools import partial
from types import BuiltinFunctionType
from typing import Any

from ds_silent.extras import FRAMEWORKS
from ds_silent.patches import Patches, RegisteredHook


class ScriptHooks:
    """A script's own hooks on gradients, ahead of the observer's and behind them.

    Attributes:
        names: of all.
        changed: those that have changed a gradient, each with the first parameter at which it has.
        change: 1 where one has done so in this step; 2: behind the observer's. As in
            :class:`ds_silent.exchange.observation.Local`.
        adds_up: micro-batches add up where a gradient is read.
        left: numbers of the parameters whose gradients were noted; None where none are.
        on_left: takes these numbers, when :meth:`take_left` gives them away.
    """

    on_left: Callable[[Collection[int]], object]

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.changed: dict[str, str] = {}
        self.change, self.adds_up = 0, True
        self.left: dict[int, None] | None = None
        self._watched: list[_Watched] = []
        self._norms: list[tuple[Any, Any]] | None = None  # before and behind the hooks, of a measured step
        self._came: set[int] = set()  # of those that were in this step
        self._none_behind: bool | None = None  # no hook is, as this step's first backward began

    def register(
        self, patches: Patches, name: str, parameter: Any, act: Callable[..., object], stored: Any = None
    ) -> None:
        """Register ``act`` as a hook of a parameter behind those that it has, and look behind each of these.

        Args:
            stored: what holds the gradient, where that is another parameter, as of a shard; its hooks run there.
        """
        watched = _Watched(self, patches, name, parameter, parameter if stored is None else stored)
        watched.look_behind(parameter._backward_hooks or {}, parameter.register_hook)
        patches.hook(parameter.register_hook, act)
        watched.own = next(reversed(parameter._backward_hooks))
        watched.known.add(watched.own)
        self._watched.append(watched)
        patches.also(partial(self._watched.remove, watched))

    def follow(self) -> None:
        """Look behind the hooks that were registered since, as the first backward of a measured step begins."""
        if self._norms is None:
            self._norms = []
            for watched in self._watched:
                watched.follow()

    def is_behind(self, index: int) -> bool:
        """Tell whether a hook is behind the observer's of the parameter that was registered as number ``index``."""
        if not self._watched:
            return False
        watched = self._watched[index]
        parameter = watched.parameter
        return next(reversed(parameter._backward_hooks)) != watched.own or bool(parameter._post_accumulate_grad_hooks)

    def leave_rest(self) -> None:
        """Let :meth:`notes` note the gradients of the backward under way, if none is changed behind its hook."""
        if self._none_behind is None:
            self._none_behind = not any(map(self.is_behind, range(len(self._watched))))
        if self._none_behind:
            self.left = {}

    def notes(self, index: int) -> bool:
        """Note that a gradient has come, where that is all, and it is read when all have; return whether it is.

        It is not where a gradient comes twice in a backward, or finds what no backward of this step has left: then
        those that were noted before are given away first.
        """
        left, adds = self.left, self.adds_up and index in self._came
        if left is None:
            return False
        if index in left or not (adds or self._watched[index].parameter.grad is None):
            self.take_left()
            return False
        left[index] = None
        return True

    def take_left(self, goes_on: bool = False) -> None:
        """Give away which gradients were noted, and note no more of this backward, unless it ``goes_on``."""
        left, self.left = self.left, {} if goes_on and self.left is not None else None
        if left:
            self._came.update(left)
            self.on_left(left)

    def observed(self) -> dict[str, Any]:
        """Return the step's numbers by their names in :class:`ds_silent.exchange.observation.Local`."""
        import torch

        changed = {"hooked": float(self.change)}
        if not self._norms:
            return changed
        before, behind = (torch.stack(norms).square().sum() for norms in zip(*self._norms, strict=True))
        return {**changed, "hooked_before": before, "hooked_behind": behind}

    def start_step(self) -> None:
        """Forget what hooks have done in the step that was taken."""
        self.change, self._norms = 0, None
        self._came.clear()
        self._none_behind = None

    def take_change(self, ahead: bool) -> None:
        """Take in that a hook has changed a gradient in this step, or may have."""
        self.change = max(self.change, 1 if ahead else 2)

    def add(self, before: Any, behind: Any) -> None:
        """Take in a gradient's norms."""
        if self._norms is not None and before is not None and behind is not None:
            self._norms.append((before, behind))


class _Watched:
    """A parameter, with a look behind each of the script's hooks.

    Attributes:
        own: key of the observer's hook.
        known: keys of the hooks that are there.
    """

    own: int

    def __init__(self, hooks: ScriptHooks, patches: Patches, name: str, parameter: Any, stored: Any):
        self._hooks, self._patches, self._name = hooks, patches, name
        self.parameter, self._stored = parameter, stored
        self.known: set[int] = set()
        self._changes = False  # its gradient was changed before: its norms are of interest

    def follow(self) -> None:
        """Look behind what was registered since (torch 2.4 to 2.13)."""
        held, accumulated = self.parameter._backward_hooks, self._stored._post_accumulate_grad_hooks
        if held and next(reversed(held)) not in self.known:
            self.look_behind(held, self.parameter.register_hook, ahead=False)
        if accumulated and next(reversed(accumulated)) not in self.known:
            self.look_behind(accumulated, self._stored.register_post_accumulate_grad_hook, ahead=False)

    def look_behind(self, held: Any, register: Callable[..., Any], ahead: bool = True) -> None:
        """Look behind the hooks that are not known yet: torch calls them in the order in which ``held`` was filled."""
        new = [key for key in held if key not in self.known]
        self.known.update(new)
        others = {key: held[key] for key in new if _is_scripts(held[key])}
        if not others:
            return
        names = tuple(map(name_of_hook, others.values()))
        self._hooks.names.update(names)
        came: Any = None
        norm: Any = None

        def look(behind: str | None, last: bool, gradient: Any) -> None:
            nonlocal came, norm
            gradient = gradient.grad if gradient is self._stored else gradient
            before, came = came, _identity_of(gradient)
            if behind is not None and came != before:
                self._changes = True
                self._hooks.changed.setdefault(behind, self._name)
                self._hooks.take_change(ahead)
            elif behind is not None and came is not None and not came[-1]:  # nobody can tell: the others do
                self._hooks.take_change(ahead)
            if self._changes and behind is None:
                norm = _norm_of(gradient)
            elif last:
                self._hooks.add(norm, None if norm is None else _norm_of(gradient))
                norm = None

        last = len(names) - 1
        for place, hook in enumerate((None, *names), -1):
            self._patches.hook(register, partial(look, hook, place == last))
        held = self.parameter._backward_hooks if ahead else held
        first, *looks = [key for key in held if key not in self.known]
        self.known.update((first, *looks))
        filled = {key: held[key] for key in held if key not in others and key not in (first, *looks)}
        filled[first] = held[first]
        for key, looks_behind in zip(others, looks, strict=True):
            filled |= {key: held[key], looks_behind: held[looks_behind]}
        held.clear()
        held.update(filled)


def _is_scripts(hook: Any) -> bool:
    """Tell whether a hook is neither the observer's nor a framework's own, which is no builtin (torch.zeros_like)."""
    function = _function_of(hook)
    room = str(getattr(function, "__module__", "")).partition(".")[0]
    of_framework = room in FRAMEWORKS and not isinstance(function, BuiltinFunctionType)
    return not (isinstance(hook, RegisteredHook) or of_framework)


def _function_of(hook: Any) -> Any:
    while isinstance(hook, partial):
        hook = hook.func
    return hook


def _norm_of(gradient: Any) -> Any:
    """Return its norm, a 0-dim fp32 tensor; None where nobody can tell."""
    import torch

    try:
        local = getattr(gradient, "_local_tensor", gradient).detach()
        return torch.linalg.vector_norm(local, dtype=torch.float32)
    except Exception:
        return None


def _identity_of(gradient: Any) -> tuple[Any, ...] | None:
    """Return what tells whether it is the same, unwritten; None where nobody can tell, as while it is traced."""
    try:
        local = getattr(gradient, "_local_tensor", gradient)  # a DTensor's own version counts what is written to it
        return local.data_ptr(), local._version, gradient._version, local.stride(), local.numel()
    except Exception:
        return None


def name_of_hook(hook: Any) -> str:
    """Return a function's name, with its file and line."""
    hook = _function_of(hook)
    if isinstance(hook, BuiltinFunctionType):
        return f"{hook.__module__}.{hook.__name__}"
    code = getattr(hook, "__code__", None)
    name = getattr(hook, "__qualname__", type(hook).__name__).rpartition("<locals>.")[2]
    return f"{name} ({os.path.basename(code.co_filename)}, line {code.co_firstlineno})" if code else name
