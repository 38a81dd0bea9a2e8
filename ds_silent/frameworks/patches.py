"""Hooks and wrappers on foreign objects, put on one instance only and taken off again in reverse order.

patches = Patches()
patches.add(parameter.register_hook(hook))
patches.wrap(trainer, "backward", wrapper)     # wrapper(original, *args, **kwargs)
patches.around(trainer, "step", before, after) # before(*args, **kwargs), the method itself, after()
patches.wrap_method(GradScaler, "step", call)  # call(original, instance, *args, **kwargs), for all instances
patches.undo()                                 # everything is as it was
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any


class Patches:
    """What was registered, and how to undo it."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def add(self, handle: Any) -> None:
        """A handle with ``remove()``, as torch's hooks give."""
        self._undo.append(handle.remove)

    def wrap(self, instance: Any, name: str, wrapper: Callable[..., Any]) -> None:
        """Call ``wrapper(original, *args, **kwargs)`` for ``instance.name(...)``; other instances are untouched.

        Raises:
            AttributeError: there is no such method.
        """
        self._replace(instance, name, partial(wrapper, getattr(instance, name)))

    def around(
        self, instance: Any, name: str, before: Callable[..., object], after: Callable[[], object] | None = None
    ) -> None:
        """Call ``before(*args, **kwargs)`` ahead of ``instance.name(...)``, and ``after()`` behind it.

        Neither may raise what must not reach the training.

        Raises:
            AttributeError: there is no such method.
        """
        original = getattr(instance, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            before(*args, **kwargs)
            result = original(*args, **kwargs)
            if after is not None:
                after()
            return result

        self._replace(instance, name, call)

    def wrap_method(self, kind: type, name: str, wrapper: Callable[..., Any]) -> None:
        """Call ``wrapper(original, instance, *args, **kwargs)`` for ``name`` of all instances of a class.

        For objects that nobody hands over, such as a script's GradScaler.

        Raises:
            AttributeError: there is no such method.
        """
        original = getattr(kind, name)
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

        instance.__dict__[name] = call
        self._undo.append(undo)

    def undo(self) -> None:
        """Take everything off; may be called again."""
        while self._undo:
            self._undo.pop()()
