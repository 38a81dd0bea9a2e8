"""Bounds on waiting, as a test wants them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ds_silent.sinks import worker as module


@pytest.fixture
def bounds(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def set_bounds(**values: float) -> None:
        for name, value in values.items():
            monkeypatch.setattr(module, name.upper(), value)

    return set_bounds
