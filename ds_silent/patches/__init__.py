"""Hooks and wrappers on foreign objects, put on one instance only and taken off again in reverse order.

patches = Patches()
patches.hook(parameter.register_hook, act)
patches.wrap(trainer, "backward", wrapper)     # wrapper(original, *args, **kwargs)
patches.around(trainer, "step", before, after) # before(*args, **kwargs), the method itself, after()
patches.before_backward(tell)                  # tell(tensor) that each backward begins with
patches.in_backward(hook)                      # the hook, left out while torch.autograd.grad runs
patches.wrap_method(GradScaler, "step", call)  # call(original, instance, *args, **kwargs), for all instances
patches.after_import("trainer", act)           # act(module) once the script imports it, or now
patches.undo()                                 # everything is as it was
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class Patches:
    """What was registered, and how to undo it."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def hook(self, register: Callable[..., Any], act: Callable[..., object], **how: Any) -> None:
        """Register ``act`` as a hook of a module, tensor or optimizer, with the arguments of ``register``."""
        of_forward = getattr(register, "__name__", "").startswith("register_forward")
        self.add(register(RegisteredHook(_untraced(act) if of_forward else act), **how))

    def add(self, handle: Any) -> None:
        """Take a handle with ``remove()``, as torch's hooks give."""
        self.also(handle.remove)

    def also(self, undo: Callable[[], None]) -> None:
        """Call ``undo`` too when everything is taken off."""
        self._undo.append(undo)

    def wrap(self, instance: Any, name: str, wrapper: Callable[..., Any]) -> None:
        """Call ``wrapper(original, *args, **kwargs)`` for ``instance.name(...)``; other instances are untouched.

        Raises:
            AttributeError: there is no such method.
        """
        self._replace(instance, name, partial(wrapper, getattr(instance, name)))

    def around(
        self,
        instance: Any,
        name: str,
        before: Callable[..., object] | None = None,
        after: Callable[[], object] | None = None,
    ) -> None:
        """Call ``before(*args, **kwargs)`` ahead of ``instance.name(...)``, and ``after()`` behind it.

        Neither may raise what must not reach the training.

        Raises:
            AttributeError: there is no such method.
        """
        original = getattr(instance, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                before(*args, **kwargs)
            result = original(*args, **kwargs)
            if after is not None:
                after()
            return result

        self._replace(instance, name, call)

    def in_backward(self, hook: Callable[..., object]) -> Callable[..., None]:
        """Return a hook of tensors that leaves out ``torch.autograd.grad``: nobody accumulates its gradients.

        Hooks of a parameter, or of a tensor between it and the root, run there too.
        """
        accumulates = [True]  # of each run of autograd's engine, the innermost last

        def runs(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            accumulates.append(kwargs.get("accumulate_grad", True))
            try:
                return original(*args, **kwargs)
            finally:
                accumulates.pop()

        def call(*args: Any) -> None:
            if accumulates[-1]:
                hook(*args)

        import torch

        # below torch.autograd.grad, which scripts import by name (torch 2.4 to 2.13)
        self.wrap(torch.autograd, "_engine_run_backward", runs)
        return call

    def before_backward(self, tell: Callable[[Any], object]) -> None:
        """Call ``tell`` with what each ``torch.autograd.backward`` begins with; ``Tensor.backward`` calls it.

        Those that lie inside another, as of a reentrant checkpoint, are left out.
        """
        depth = 0

        def backward(original: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            if not depth:
                tell(tensors[0] if isinstance(tensors, (list, tuple)) and len(tensors) == 1 else tensors)
            depth += 1
            try:
                return original(tensors, *args, **kwargs)
            finally:
                depth -= 1

        import torch  # not at the top: who reads records needs none, and the package imports this module

        self.wrap(torch.autograd, "backward", backward)

    def behind_method(self, kind: type, name: str, tell: Callable[[str], object]) -> None:
        """Call ``tell(caller)`` behind ``name`` of all instances of a class, with the name of the calling function.

        It may not raise what must not reach the training.

        Raises:
            AttributeError: there is no such method.
        """

        def behind(original: Callable[..., Any], instance: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(instance, *args, **kwargs)
            tell(sys._getframe(2).f_code.co_name)
            return result

        self.wrap_method(kind, name, behind)

    def wrap_method(self, kind: type, name: str, wrapper: Callable[..., Any], inherited: type | None = None) -> None:
        """Call ``wrapper(original, instance, *args, **kwargs)`` for ``name`` of all instances of a class.

        For objects that nobody hands over, such as a script's GradScaler. A class that is mixed in ahead of another
        has the method of that one: ``inherited``.

        Raises:
            AttributeError: there is no such method.
        """
        original = getattr(inherited or kind, name)
        own = kind.__dict__.get(name)

        def call(instance: Any, *args: Any, **kwargs: Any) -> Any:
            return wrapper(original, instance, *args, **kwargs)

        def undo() -> None:
            if own is None:
                delattr(kind, name)
            else:
                setattr(kind, name, own)

        setattr(kind, name, functools.wraps(original)(call))
        self._undo.append(undo)

    def _replace(self, instance: Any, name: str, call: Callable[..., Any]) -> None:
        own = instance.__dict__.get(name)  # somebody else's wrapper on the instance

        def undo() -> None:
            if own is None:
                instance.__dict__.pop(name, None)
            else:
                instance.__dict__[name] = own

        instance.__dict__[name] = _Instead(call, instance, name)
        self._undo.append(undo)

    def after_import(self, name: str, act: Callable[[ModuleType], None]) -> None:
        """Call ``act(module)`` as soon as the module of that name has run: before anybody has its names."""
        module = sys.modules.get(name)
        if module is not None:
            act(module)
            return
        finder = _AfterImport(name, act)
        sys.meta_path.insert(0, finder)
        self._undo.append(lambda: sys.meta_path.remove(finder))

    def undo(self) -> None:
        """Take everything off; may be called again."""
        while self._undo:
            self._undo.pop()()


def _untraced(act: Callable[..., object]) -> Callable[..., object]:
    """Return a hook that ``torch.compile`` calls as it is: traced, it would become a part of the compiled module."""
    from torch._compile import _disable_dynamo  # the optimizers' own (torch 2.4 to 2.13); it imports nothing by itself

    return _disable_dynamo(partial(act))  # a method would take no attribute, which torch sets


class RegisteredHook(partial[Any]):
    """A hook that a copy of its module, or a file with it, holds as one that does nothing: it is not observed."""

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")  # takes anything, returns None


class _Instead(partial[Any]):
    """A wrapped method of one instance, in whose copy the method itself stands."""

    _method: tuple[Any, str]

    def __new__(cls, call: Callable[..., Any], instance: Any, name: str) -> _Instead:
        made = super().__new__(cls, call)
        made._method = (instance, name)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, self._method


class _AfterImport(MetaPathFinder):
    """Finds nothing itself; what others find for the name tells when it has run."""

    def __init__(self, name: str, act: Callable[[ModuleType], None]):
        self._name, self._act, self._asks = name, act, False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name or self._asks:
            return None
        self._asks = True
        try:
            found = importlib.util.find_spec(fullname)
        finally:
            self._asks = False
        if found is not None and found.loader is not None and hasattr(found.loader, "__dict__"):
            execute = found.loader.exec_module
            found.loader.__dict__["exec_module"] = partial(self._execute, execute)
        return found

    def _execute(self, execute: Callable[[ModuleType], None], module: ModuleType) -> None:
        execute(module)
        self._act(module)


def behind_closure(act: Callable[[], object], args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Call ``act`` as an optimizer begins to apply: now, or each time the closure of its step returns.

    Args:
        args, kwargs: of the optimizer's step, as a step pre-hook gets them.

    Returns:
        what the hook returns, and torch calls the step with: the same with the closure wrapped; None without one.
    """

    def evaluated(closure: Callable[..., Any], *given: Any, **named: Any) -> Any:
        result = closure(*given, **named)
        act()
        return result

    called_with = with_closure(evaluated, args, kwargs)
    if called_with is None:
        act()
    return called_with


def with_closure(evaluate: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Let an optimizer's step call ``evaluate(closure, ...)`` for its closure.

    Args:
        args, kwargs: of the step, as a step pre-hook gets them.

    Returns:
        what the hook returns, and torch calls the step with; None without a closure.
    """
    closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
    if not callable(closure):
        return None
    evaluated = partial(evaluate, closure)
    if "closure" in kwargs:
        return args, {**kwargs, "closure": evaluated}
    return (args[0], evaluated, *args[2:]), kwargs


def outside_transforms(hook: Callable[..., None]) -> Callable[..., None]:
    """Return a hook that is not called where torch.func runs the script's function, as for each row's own gradient."""

    import torch

    @functools.wraps(hook)
    def called(*args: Any, **kwargs: Any) -> None:
        if torch._C._functorch.peek_interpreter_stack() is None:
            hook(*args, **kwargs)

    return called
