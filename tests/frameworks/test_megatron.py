"""Megatron-core: every number against the oracle, every weight against a training without the block."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ds_silent.framework import StepCounts
from tests.frameworks.test_oracle import check, chunks, run_cases
from tests.support.distributed import run_distributed
from tests.support.megatron_training import MegatronCase, train_megatron

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

COVERING = (
    MegatronCase(),
    MegatronCase(accumulation=3),
    MegatronCase(overlap=True, accumulation=2),
    MegatronCase(distributed=True),
    MegatronCase(distributed=True, overlap=True, accumulation=2),
    MegatronCase(dtype="bf16", accumulation=2),
    MegatronCase(dtype="bf16", distributed=True, overlap=True),
    MegatronCase(dtype="bf16", reduce_in_own=True, accumulation=2),
    MegatronCase(dtype="fp16"),
    MegatronCase(dtype="fp16", distributed=True, clipping=0.1),
    MegatronCase(clipping=0.1, accumulation=2),
    MegatronCase(distributed=True, clipping=0.1),
    MegatronCase(unused="rank"),
    MegatronCase(unused="micro", accumulation=2),
    MegatronCase(checkpointing="reentrant"),
    MegatronCase(method="exact", accumulation=2),
    MegatronCase(exact_interval=2, per_layer=True, distributed=True),
    MegatronCase(method="off"),
    MegatronCase(interval=3, overlap=True),
)


@pytest.mark.parametrize("cases", chunks(COVERING, 5), ids=lambda cases: f"{len(cases)}-cases")
@pytest.mark.long
def test_records_match_the_oracle_and_weights_are_untouched(cases: tuple[MegatronCase, ...], tmp_path: Path) -> None:
    check(cases, run_distributed(run_cases, 2, (cases, str(tmp_path), train_megatron), timeout=280))


def test_the_loop_of_megatron_has_counted_the_rows_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    from ds_silent.frameworks.megatron.megatron_framework import taken_by_script

    arguments = SimpleNamespace(iteration=7, consumed_train_samples=90, data_parallel_size=4)  # it began with 3
    script = SimpleNamespace(_GLOBAL_ARGS=arguments)
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", script)  # type: ignore[arg-type]
    counts = StepCounts(data_ranks=4)
    counts.load_state_dict(taken_by_script())
    assert (counts.step, counts.samples) == (8, 90)
