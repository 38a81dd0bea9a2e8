"""What outlives its collective."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from typing import Any

from ds_silent.exchange.collectives import _KEPT, kept


class Work:
    pass


def test_the_newest_live_as_long_as_the_process_and_older_ones_are_freed() -> None:
    works: list[Any] = [Work() for _ in range(_KEPT + 1)]
    before = sys.getrefcount(works[-1])
    for place in range(len(works)):
        kept(works[place])
    after = sys.getrefcount(works[-1])  # not in the assertion, which holds one more
    assert after == before + 2  # one of those that are kept, one that nothing gives back
    oldest, second = weakref.ref(works[0]), weakref.ref(works[1])
    works.clear()
    gc.collect()
    assert oldest() is None
    assert second() is not None


def test_gloo_gets_its_time_once_and_after_the_observers_have_closed() -> None:
    script = """
import atexit, sys, time
from ds_silent.exchange.collectives import let_gloo_end_first
sys.version_info = (3, 13)
time.sleep = lambda seconds: print("gloo has", seconds)
for observer in (1, 2):
    let_gloo_end_first()
    atexit.register(print, "closed", observer)
"""
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert said.splitlines() == ["closed 2", "closed 1", "gloo has 0.2"]
