"""What outlives its collective."""

from __future__ import annotations

import gc
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
