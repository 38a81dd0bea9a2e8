"""DistributedDataParallel: every number against the oracle, every weight against a training without the block."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.test_oracle import check, chunks, run_cases
from tests.support.ddp_training import DDPCase, train_ddp
from tests.support.distributed import run_distributed

COVERING = (
    DDPCase(),
    DDPCase(accumulation=3),
    DDPCase(accumulation=2, reduces_each=True),
    DDPCase(views=True, accumulation=2),
    DDPCase(static=True),
    DDPCase(unused="rank"),
    DDPCase(unused="micro", accumulation=2),
    DDPCase(dtype="bf16", accumulation=2),
    DDPCase(clipping=0.1, accumulation=2),
    DDPCase(clipping=0.1, accumulation=2, closure=True),
    DDPCase(scaled=True),
    DDPCase(scaled=True, clipping=0.1),
    DDPCase(checkpointing="reentrant"),
    DDPCase(checkpointing="non-reentrant", views=True),
    DDPCase(method="exact", accumulation=2),
    DDPCase(exact_interval=2, per_layer=True),
    DDPCase(method="off"),
    DDPCase(interval=3),
)


@pytest.mark.parametrize("cases", chunks(COVERING, 9), ids=lambda cases: f"{len(cases)}-cases")
def test_records_match_the_oracle_and_weights_are_untouched(cases: tuple[DDPCase, ...], tmp_path: Path) -> None:
    check(cases, run_distributed(run_cases, 2, (cases, str(tmp_path), train_ddp), timeout=280))


@pytest.mark.long
def test_four_ranks(tmp_path: Path) -> None:
    cases = (DDPCase(accumulation=2), DDPCase(dtype="bf16"), DDPCase(unused="rank"), DDPCase(method="exact"))
    check(cases, run_distributed(run_cases, 4, (cases, str(tmp_path), train_ddp), timeout=280))


@pytest.mark.matrix
def test_eight_ranks(tmp_path: Path) -> None:
    cases = (DDPCase(accumulation=2), DDPCase(dtype="bf16"), DDPCase(unused="rank"))
    check(cases, run_distributed(run_cases, 8, (cases, str(tmp_path), train_ddp), timeout=280))
