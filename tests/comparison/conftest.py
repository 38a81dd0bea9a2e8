"""Traces of small trainings, each of which is trained once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.traced import Training, write

Trained = Callable[..., Path]
"""Train, or take what was trained: the directory of its trace."""


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    base, known = tmp_path_factory.mktemp("traces"), dict[str, Path]()

    def train(**changes: object) -> Path:
        training = Training().with_(**changes)
        key = repr(training)
        if key not in known:
            known[key] = write(training, base / f"{len(known)}")
        return known[key]

    return train
