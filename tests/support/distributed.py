"""The package's own spawner, as the tests call it: a plain function on N real gloo ranks, and what each returned.

results = run_distributed(function, world_size=2, arguments=(case,))      # results[rank]
results = run_distributed(each, 2, (function, {"a name": (case,)}))       # results[rank]["a name"]

A rank that raises, dies or takes too long fails the test with its own traceback.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from ds_silent.exchange import layout
from ds_silent.practice.ranks import PRELOADED, results_of

PRELOADED.append("pytest")  # ranks import the test's module for its function: 0.4 s of CPU on each
FRAMEWORKS = ("transformers.trainer", "lightning.pytorch", "megatron.core")


def run_distributed(
    function: Callable[..., Any],
    world_size: int,
    arguments: tuple[Any, ...] = (),
    timeout: float = 120.0,
    may_die: tuple[int, ...] = (),
) -> list[Any]:
    """Call ``function(*arguments)`` on ``world_size`` ranks of one gloo process group."""
    # what the tests that were collected have imported, some ranks import too: 0.5 to 3 s of CPU on each
    PRELOADED.extend(name for name in FRAMEWORKS if name in sys.modules and name not in PRELOADED)
    return results_of(function, arguments, world_size, timeout, may_die)


def each(function: Callable[..., Any], cases: Mapping[Any, tuple[Any, ...]]) -> dict[Any, Any]:
    """Call ``function`` for one case after the other: a start of the ranks costs more than a small training."""
    return {name: function(*arguments) for name, arguments in cases.items()}


def gather_limit_of(ranks: int) -> AbstractContextManager[object]:
    """With more than ``ranks`` ranks, observers that are attached inside do without everybody's sketches."""
    return patch.object(layout, "GATHER_LIMIT", ranks)


def wait_for(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Return as soon as it holds; fail when it does not in time."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"not so after {seconds:.0f} s"
        time.sleep(0.005)
