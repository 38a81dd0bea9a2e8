"""What outlives its last collective."""

from __future__ import annotations

import gc
import sys
import weakref

from ds_silent.exchange.collectives import keep_to_the_end


class Buffers:
    pass


def test_the_newest_lives_as_long_as_the_process() -> None:
    first, second = Buffers(), Buffers()
    ends = weakref.ref(first)
    keep_to_the_end(first)
    before = sys.getrefcount(second)
    keep_to_the_end(second)
    assert sys.getrefcount(second) == before + 2  # one of the list, one that nothing gives back
    del first
    gc.collect()
    assert ends() is None
