"""What is not installed with ``ds_silent`` alone, and the one sentence that says which extra brings it.

    needs("ds-silent drill", "deepspeed")       # MissingExtra: "ds-silent drill needs DeepSpeed, which is not ..."
    if installed("matplotlib"): ...

Only the standard library is imported here.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from functools import cache
from importlib import metadata
from types import TracebackType

VERSION = "0.1.0"  # of ds_silent, as pyproject.toml says

EXTRAS: dict[str, tuple[str, ...]] = {
    "deepspeed": ("deepspeed",),
    "megatron": ("megatron.core",),
    "finetune": ("deepspeed", "transformers", "accelerate", "datasets", "tokenizers"),
    "huggingface": ("transformers", "accelerate"),
    "lightning": ("lightning",),
    "plots": ("matplotlib",),
    "prometheus": ("prometheus_client",),
    "alerts": ("apprise",),
}
"""Extra -> the packages of it that are imported."""

FRAMEWORKS = ("torch", "deepspeed", "megatron", "ds_silent")
"""Packages whose own hooks on parameters are no hooks of a script."""
_NAMES = {"deepspeed": "DeepSpeed", "megatron.core": "megatron-core", "lightning": "Lightning"}


class MissingExtra(ImportError):
    """A package is not installed; the message is one sentence that names the extra which brings it."""


@cache  # reading it takes 7 ms, and each run asks for several
def version_of(package: str) -> str | None:
    """Return that of an installed package; None without it, or where it is imported from a directory of sources."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def installed(package: str) -> bool:
    """Tell whether ``import package`` finds something; nothing is imported."""
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # what the package is in
        return False


def needs(what: str, extra: str) -> None:
    """Raise :class:`MissingExtra` where a package of the extra is not there; ``what`` needs it.

    Where nobody catches it, the process ends with its sentence and without a traceback.
    """
    missing = [package for package in EXTRAS[extra] if not installed(package)]
    if missing:
        print_without_traceback(MissingExtra, tells=lambda _: is_first())
        raise MissingExtra(missing_sentence(what, missing, extra), name=missing[0])


def missing_sentence(what: str, missing: list[str], extra: str) -> str:
    """Return the sentence: what is missing, and what to type."""
    named = ", ".join(_NAMES.get(package, package) for package in missing)
    is_not = "is not" if len(missing) == 1 else "are not"
    return f'{what} needs {named}, which {is_not} installed: pip install "ds_silent[{extra}]"'


def is_first() -> bool:
    """Tell whether a launcher has made this process rank 0, or there is no launcher."""
    return os.environ.get("RANK", "0") == "0"


def print_without_traceback(*kinds: type[BaseException], tells: Callable[[BaseException], bool]) -> None:
    """Let an uncaught error of these kinds print its one sentence and end the process with status 1, from now on.

    Args:
        kinds: whose message is one sentence for the person who started this.
        tells: whether it is this process that prints it: one of the ranks does.
    """
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if not isinstance(error, kinds):
            previous(kind, error, traceback)
        elif tells(error):
            print(f"ds_silent: {error}", file=sys.stderr)

    sys.excepthook = hook
