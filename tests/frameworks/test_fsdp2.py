"""FSDP2: every number against the oracle, every weight against a training without the block."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.test_oracle import check, chunks, run_cases
from tests.support.ddp_training import FSDP2Case, train_ddp
from tests.support.distributed import run_distributed

COVERING = (
    FSDP2Case(),
    FSDP2Case(accumulation=2),
    FSDP2Case(accumulation=2, reduces_each=True),
    FSDP2Case(dtype="bf16"),
    FSDP2Case(clipping=0.1),
    FSDP2Case(checkpointing="non-reentrant"),
    FSDP2Case(method="exact", accumulation=2),
    FSDP2Case(interval=3),
)


@pytest.mark.parametrize("cases", chunks(COVERING, 8), ids=lambda cases: f"{len(cases)}-cases")
def test_records_match_the_oracle_and_weights_are_untouched(cases: tuple[FSDP2Case, ...], tmp_path: Path) -> None:
    results = run_distributed(run_cases, 2, (cases, str(tmp_path), train_ddp), timeout=280)
    check(cases, results)
    kinds = {event["kind"] for observed, _ in results[0] for event in observed.events}
    assert "gradient-changed" not in kinds  # one factor on all ranks is clipping


@pytest.mark.long
def test_four_ranks_and_replicas_of_shards(tmp_path: Path) -> None:
    cases = (FSDP2Case(accumulation=2), FSDP2Case(replicas=2), FSDP2Case(replicas=2, accumulation=2))
    check(cases, run_distributed(run_cases, 4, (cases, str(tmp_path), train_ddp), timeout=280))
