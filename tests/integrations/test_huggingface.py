"""transformers' Trainer and accelerate, observed: losses as plainly computed, the same weights, and a resume."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed import run_distributed
from tests.integrations.hf_training import HFCase, HFTrace, train

CASES = {
    "one micro-batch": HFCase(),
    "accumulation": HFCase(accumulation=2, dropout=0.1),
    "a last step of fewer micro-batches": HFCase(accumulation=3, rows=64),
    "rows that even_batches repeats": HFCase(rows=70, epochs=3),
    "unused parameters are not looked for": HFCase(accumulation=2, named={"ddp_find_unused_parameters": False}),
}


def both(cases: tuple[HFCase, ...], directory: str) -> list[tuple[HFTrace, HFTrace]]:
    """On every rank: each case observed, and not."""
    return [
        (train(case, Path(directory, f"{place}-on"), True), train(case, Path(directory, f"{place}-off"), False))
        for place, case in enumerate(cases)
    ]


def check(case: HFCase, ranks: list[tuple[HFTrace, HFTrace]]) -> None:
    """Weights are bit-identical; every record's losses are each rank's own."""
    for observed, plain in ranks:
        assert observed.weights == plain.weights
        assert observed.losses == plain.losses
    records = ranks[0][0].records
    steps = len(ranks[0][0].losses)
    assert [record["step"] for record in records] == list(range(1, steps + 1))
    for place, record in enumerate(records):
        assert record["loss"]["per_rank"] == pytest.approx([rank[0].losses[place] for rank in ranks], rel=1e-5)
        assert record["integrity"]["relative_error"] <= record["integrity"]["rounding_bound"]
    assert ranks[0][0].events == ()


def test_the_trainer_under_ddp(tmp_path: Path) -> None:
    cases = tuple(CASES.values())
    found = run_distributed(both, 2, (cases, str(tmp_path)), timeout=280)
    for place, case in enumerate(cases):
        check(case, [rank[place] for rank in found])
