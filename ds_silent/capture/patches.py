"""Hooks and wrappers on foreign objects, put on one instance only and taken off again in reverse order.

patches = Patches()
patches.add(parameter.register_hook(hook))
patches.wrap(engine, "backward", wrapper)      # wrapper(original, *args, **kwargs)
patches.undo()                                 # everything is as it was
"""

from __future__ import annotations

from collections.abc import Callable
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
        own = instance.__dict__.get(name)  # somebody else's wrapper on the instance
        original = getattr(instance, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            return wrapper(original, *args, **kwargs)

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
