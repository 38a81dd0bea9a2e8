"""Sequence, tensor, pipeline and expert parallelism of DeepSpeed: the oracle's numbers, the same bits, what is told."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

import ds_silent
from ds_silent.frameworks.deepspeed.refusals import refuse_unsupported_config
from tests.support.distributed import run_distributed
from tests.support.interpreter import interpreter
from tests.support.shapes_training import ROWS, Shaped, make, train

STEPS = 3
HEALTHY_ON_2 = {
    "ulysses": Shaped("ulysses"),
    "ulysses, stage 1": Shaped("ulysses", stage=1, accumulation=2, clipping=0.5),
    "ulysses, stage 2": Shaped("ulysses", stage=2, accumulation=2),
    "ulysses, stage 3": Shaped("ulysses", stage=3, accumulation=2),
}
HEALTHY_ON_4 = {
    "ulysses on 4": Shaped("ulysses", accumulation=2),
    "tensor": Shaped("tensor", accumulation=2),
    "tensor, stage 1": Shaped("tensor", stage=1, clipping=0.5),
    "domino": Shaped("domino", accumulation=2),
    "pipeline": Shaped("pipeline", accumulation=2),
    "pipeline, stage 1": Shaped("pipeline", stage=1, accumulation=2),
    "experts": Shaped("experts", accumulation=2),
    "experts, stage 1": Shaped("experts", stage=1),
    "experts, stage 2": Shaped("experts", stage=2, accumulation=2),
}
BF16: dict[str, Any] = {"bf16": {"enabled": True}}
FP32_SUMS: dict[str, Any] = {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}
MORE = {
    **{
        f"{kind}, bf16": Shaped(kind, accumulation=2, top=BF16) for kind in ("ulysses", "tensor", "pipeline", "experts")
    },
    **{f"{kind}, bf16, stage 1": Shaped(kind, 1, 2, top=BF16) for kind in ("ulysses", "tensor", "pipeline", "experts")},
    **{f"{kind}, fp32 sums": Shaped(kind, 1, 2, top=FP32_SUMS) for kind in ("tensor", "pipeline", "experts")},
    **{f"{kind}, clipped": Shaped(kind, 1, 2, clipping=0.1) for kind in ("tensor", "pipeline", "experts")},
    "tensor, stage 2": Shaped("tensor", 2, 2),
    "domino, stage 1": Shaped("domino", 1, 2),
    "pipeline, overlap": Shaped("pipeline", 1, 2, top={"zero_optimization": {"stage": 1, "overlap_comm": True}}),
    "ulysses, stage 2, all_reduce": Shaped(
        "ulysses", 2, 2, top={"zero_optimization": {"stage": 2, "reduce_scatter": False}}
    ),
    "ulysses, stage 3, all_reduce": Shaped(
        "ulysses", 3, 2, top={"zero_optimization": {"stage": 3, "reduce_scatter": False}}
    ),
    "ulysses, sums": Shaped("ulysses", top={"gradient_allreduce_op": "sum"}),
}
"""In the matrix: no event, and the same bits."""
WRONG_SUMS = ("aggregation-error", "unreduced-gradient")
HARMED_ON_2 = {
    "ulysses, one rank's times 1.5": (Shaped("ulysses", harm="scaled"), {".": WRONG_SUMS}),
    "ulysses, not reduced": (Shaped("ulysses", harm="dropped"), {".": WRONG_SUMS}),
    "mesh": (Shaped("mesh"), {".": WRONG_SUMS}),
    "mesh, stage 1": (Shaped("mesh", stage=1), {".": WRONG_SUMS}),
    "mesh, stage 2": (Shaped("mesh", stage=2), {".": WRONG_SUMS}),
}
HARMED_ON_4 = {
    "tensor, one rank's times 1.5": (Shaped("tensor", harm="scaled"), {"tp0": ("replica-drift",), "tp1": WRONG_SUMS}),
    "tensor, not reduced": (Shaped("tensor", harm="dropped"), {"tp0": WRONG_SUMS, "tp1": WRONG_SUMS}),
    "tensor, a layer norm apart": (Shaped("tensor", harm="a layer norm apart"), {"tp0": ("replica-drift",), "tp1": ()}),
    "domino, a layer norm apart": (
        Shaped("domino", harm="a layer norm apart"),
        {"tp0": ("replica-drift",), "tp1": ()},
    ),
    "pipeline, one rank's times 1.5": (Shaped("pipeline", harm="scaled"), {"pp1": WRONG_SUMS}),
    "pipeline, not reduced": (Shaped("pipeline", harm="dropped"), {"pp0": WRONG_SUMS, "pp1": WRONG_SUMS}),
    "pipeline, tied weights apart": (
        Shaped("pipeline", harm="tied weights apart"),
        {"pp0": ("replica-drift",), "pp1": ()},
    ),
    "experts, one rank's times 1.5": (Shaped("experts", harm="scaled"), {".": WRONG_SUMS}),
    "experts, not reduced": (Shaped("experts", harm="dropped experts"), {".": WRONG_SUMS}),
    "experts, other weights": (Shaped("experts", harm="experts apart"), {".": ("replica-drift",)}),
}
"""(the training, the kinds of the first event of each group that is listed)."""
REFUSED = {
    'respond.on_aggregation_error "retry" does not work with sequence parallelism': Shaped(
        "ulysses", block={"respond": {"on_aggregation_error": "retry"}}
    ),
    'reduction "ordered" does not work with sequence parallelism': Shaped("ulysses", block={"reduction": "ordered"}),
    'resync.mode "periodic" does not work with mixture-of-experts layers': Shaped(
        "experts", block={"resync": {"mode": "periodic"}}
    ),
}


def train_healthy(directory: str, ranks: int) -> dict[str, Any]:
    """On every rank: each healthy one observed and not."""
    found: dict[str, Any] = {}
    for name, shaped in (HEALTHY_ON_2 if ranks == 2 else HEALTHY_ON_4).items():
        observed = train(shaped, Path(directory, name), STEPS, oracle=True)
        found[name] = observed, train(shaped, None, STEPS)
    return found


def train_harmed(directory: str, ranks: int) -> dict[str, Any]:
    """On every rank: each harmed one observed; on 2 what is refused, on 4 one that is healthy."""
    wrong = HARMED_ON_2 if ranks == 2 else HARMED_ON_4
    found: dict[str, Any] = {name: train(shaped, Path(directory, name), STEPS) for name, (shaped, _) in wrong.items()}
    if ranks == 2:
        return found | {name: refused(shaped, directory) for name, shaped in REFUSED.items()}
    return found | {"pipeline": train(HEALTHY_ON_4["pipeline"], Path(directory, "pipeline"), STEPS)}


def refused(shaped: Shaped, directory: str) -> str:
    with pytest.raises(ds_silent.ConfigError) as caught:
        make(shaped, Path(directory, "refused"))
    return str(caught.value)


def trained(made: pytest.TempPathFactory, what: Any, ranks: int) -> tuple[Path, list[dict[str, Any]]]:
    directory = made.mktemp(f"ranks{ranks}")
    return directory, run_distributed(what, ranks, (str(directory), ranks), timeout=280)


@pytest.fixture(scope="module")
def on_2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    return trained(tmp_path_factory, train_harmed, 2)


@pytest.fixture(scope="module")
def on_4(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    return trained(tmp_path_factory, train_harmed, 4)


@pytest.mark.parametrize(("table", "ranks"), [(HEALTHY_ON_2, 2), (HEALTHY_ON_4, 4)], ids=["2", "4"])
@pytest.mark.long
def test_records_match_the_oracle_and_weights_are_untouched(
    table: dict[str, Shaped], ranks: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    _, results = trained(tmp_path_factory, train_healthy, ranks)
    for name, shaped in table.items():
        for rank, of_rank in enumerate(results):
            observed, plain = of_rank[name]
            assert observed["weights"] == plain["weights"], (name, rank)
            assert observed["losses"] == plain["losses"], (name, rank)
            assert observed["events"] == [], (name, rank)
            assert [record["step"] for record in observed["records"]] == list(range(1, STEPS + 1)), (name, rank)
            for record, truth in zip(observed["records"], observed["oracle"], strict=True):
                check(shaped, record, truth, len(results), (name, rank))


def check(shaped: Shaped, record: dict[str, Any], truth: dict[str, Any], ranks: int, where: Any) -> None:
    """fp32: sums of some hundred products are good to 1e-6; weights move by 0.1 of a gradient, rounded to 2^-24."""
    group = ranks if shaped.kind in ("ulysses", "experts") else ranks // 2
    rows = ranks if shaped.kind == "experts" else ranks // 2
    if not shaped.clipping:
        assert truth["not applied"] < 5e-6, where
    error = 0.2 if record["grad_norm"]["method"] == "sketch" else 1e-6
    assert record["grad_norm"]["per_rank"] == pytest.approx(truth["norms"], rel=error), where
    assert record["grad_norm"]["aggregated"] == pytest.approx(truth["aggregated"], rel=1e-6), where
    assert record["integrity"]["relative_error"] < record["integrity"]["rounding_bound"] < 16 * 2.0**-24, where
    assert record["integrity"]["replica_groups"] == (None if shaped.stage == 3 else [list(range(group))]), where
    assert record["world_size"] == group
    assert record["samples"] == record["step"] * ROWS * shaped.accumulation * rows, where
    first_stage = shaped.kind == "pipeline" and where[1] < ranks // 2
    assert (record["loss"]["per_rank"] is None) == first_stage, where
    comparable = shaped.kind in ("tensor", "domino", "pipeline")
    assert (record["noise_scale"] is not None) == comparable, where


def test_the_loss_of_a_pipeline_is_that_of_its_last_stage(on_4: tuple[Path, list[dict[str, Any]]]) -> None:
    for rank in (2, 3):  # the last stage; an engine returns the mean over its data-parallel ranks
        observed = on_4[1][rank]["pipeline"]
        means = [record["loss"]["mean"] for record in observed["records"]]
        assert means == pytest.approx(observed["losses"], rel=1e-6)


@pytest.mark.parametrize(("table", "found"), [(HARMED_ON_2, "on_2"), (HARMED_ON_4, "on_4")], ids=["2", "4"])
def test_what_is_wrong_is_told_where_it_is(table: Any, found: str, request: pytest.FixtureRequest) -> None:
    directory, results = request.getfixturevalue(found)
    for name, (_, told) in table.items():
        by_group = {
            Path(of_rank[name]["directory"]).relative_to(directory / name).as_posix(): of_rank[name]["events"]
            for of_rank in results
        }
        for group, kinds in told.items():
            events = by_group[group]
            assert [event["kind"] in kinds for event in events[:1]] == [True] * bool(kinds), (name, group, events)
            if kinds == WRONG_SUMS:
                assert events[0]["step"] == 1, (name, group, events)
            for event in events if group == "tp1" else []:  # ranks 1 and 3
                assert event.get("global_ranks", []) == [2 * rank + 1 for rank in event["ranks"]], (name, event)


def test_the_mesh_is_shown_without_the_observer(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "mesh_param_drift.py"
    done = subprocess.run(
        [interpreter(), str(script), "--ranks", "2"], capture_output=True, text=True, cwd=tmp_path, timeout=120
    )
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith(("mpu", "mesh_param"))]
    assert [row[:2] for row in rows] == [[way, str(step)] for way in ("mpu", "mesh_param") for step in (1, 2, 3)]
    apart = [float(row[2]) for row in rows]
    assert apart[:3] == [0.0] * 3
    assert min(apart[3:]) > 1e-3
    assert done.returncode == 1, done.stderr


def test_a_mesh_that_is_not_reduced_over_is_told_with_the_remedy(on_2: tuple[Path, list[dict[str, Any]]]) -> None:
    events = {event["kind"]: event for event in on_2[1][0]["mesh"]["events"]}
    assert set(events) == {"aggregation-error", "replica-drift"}
    assert "rank 0 2.00 times, rank 1 0.00 times" in events["aggregation-error"]["message"]
    assert "instead of mesh_param" in events["aggregation-error"]["remedy"]
    assert "rank 0; rank 1" in events["replica-drift"]["message"]


def test_responses_are_refused_in_one_sentence(on_2: tuple[Path, list[dict[str, Any]]]) -> None:
    for of_rank in on_2[1]:
        for name in REFUSED:
            assert of_rank[name].startswith(f"silent_consistency.{name}, where other ranks take part"), of_rank[name]
            assert "\n" not in of_rank[name]


def test_experts_that_deepspeed_makes_itself_are_refused() -> None:
    with pytest.raises(ds_silent.ConfigError, match=r"cannot observe expert_parallel\.enabled true"):
        refuse_unsupported_config({"expert_parallel": {"enabled": True, "autoep_size": 2}})


def train_more(directory: str) -> dict[str, tuple[Any, Any]]:
    return {
        name: (train(shaped, Path(directory, name), STEPS), train(shaped, None, STEPS)) for name, shaped in MORE.items()
    }


@pytest.mark.matrix
def test_more_settings(tmp_path: Path) -> None:
    for of_rank in run_distributed(train_more, 4, (str(tmp_path),), timeout=280):
        for name, (observed, plain) in of_rank.items():
            assert observed["weights"] == plain["weights"], name
            assert observed["events"] == [], name
            for record in observed["records"]:
                assert 0.0 < record["integrity"]["relative_error"] < record["integrity"]["rounding_bound"], name
