"""Real trainings with the ordered reduction, bit by bit: every split, the oracle, retry, refusals."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ds_silent
from ds_silent.drill.training import hash_of
from tests.frameworks.test_oracle import check_events, check_integrity, check_record
from tests.ordered.test_ordered import PAIRINGS, by_recursion
from tests.support.distributed import run_on_kept_ranks
from tests.support.training import Case, Trace, train

# -- real trainings -------------------------------------------------------------------------------------------------

ROWS, LENGTH, VOCABULARY = 4, 11, 37


class Model(nn.Module):
    """Odd sizes, so that partitions end anywhere; ``skip`` leaves a layer out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 19)
        self.sometimes = nn.Linear(19, 19)
        self.inner, self.outer = nn.Linear(19, 33), nn.Linear(33, VOCABULARY)

    def forward(self, tokens: Tensor, skip: bool) -> Tensor:
        hidden = self.embedding(tokens)
        if not skip:
            hidden = hidden + self.sometimes(hidden)
        logits = self.outer(torch.tanh(self.inner(hidden))).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())


Cell = tuple[str, int, str, float, str]
"""(pairing, ZeRO stage, dtype, gradient clipping, reduction)."""


def config_of(cell: Cell, steps: int, bucket: int, directory: str, **block: Any) -> dict[str, Any]:
    pairing, stage, dtype, clipping, reduction = cell
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": steps,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": bucket},
        "bf16": {"enabled": dtype == "bf16"},
        "gradient_clipping": clipping,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "silent_consistency": {
            "output_dir": directory,
            "tensorboard": False,
            "preflight": False,
            "reduction": reduction,
            "ordered": {"micro_batches": pairing, "memory_mb": 1},
            **block,
        },
    }


def engine_of(cell: Cell, steps: int, bucket: int, directory: str, **block: Any) -> Any:
    torch.manual_seed(0)
    model = Model()
    config = config_of(cell, steps, bucket, directory, **block)
    engine, *_ = ds_silent.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


def micro_step(engine: Any, cell: Cell, step: int, a: int, steps: int) -> None:
    """The micro-batch with the number that this rank's a-th has in the global batch."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    number = rank * steps + a if cell[0] == "contiguous" else a * ranks + rank
    tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1000 * step + number))
    # DeepSpeed's own reduction of stage 1 sends buckets of different sizes where ranks skip a layer, and hangs
    skip = cell[4] == "ordered" and (number % 3 == 1 or step == 2)
    engine.backward(engine(tokens, skip))
    engine.step()


def hash_of_engine(engine: Any) -> str:
    """Weights; and in stage 0, where every rank holds them, the optimizer's state."""
    tensors = list(engine.module.parameters())
    if engine.zero_optimization_stage() == 0:
        states = engine.basic_optimizer.state.values()
        tensors += [state[name] for state in states for name in ("exp_avg", "exp_avg_sq")]
    return hash_of(tensors)


def train_cells(cells: tuple[Cell, ...], micro_batches: int, length: int, directory: str) -> list[Any]:
    """Of each cell, on every rank: the hash at the end, the events, and the largest error as a share of its bound."""
    steps = micro_batches // dist.get_world_size()
    outcome = []
    for number, cell in enumerate(cells):
        folder = Path(directory, f"{steps}-{number}")
        engine = engine_of(cell, steps, 500 * (steps + 1), str(folder))
        for step in range(length):
            for a in range(steps):
                micro_step(engine, cell, step, a, steps)
        observer = ds_silent.observer_of(engine)
        assert observer is not None
        observer.close()
        kinds, worst = [], 0.0
        if dist.get_rank() == 0:
            from ds_silent.sinks.jsonl import read_events, read_metrics

            # the same micro-batches skip the layer at every step, so that its ranks do differ: that may be told
            # nor is it a fault that DeepSpeed's stage 0 has counted an empty step in bf16
            meant = ("sometimes", "step counter")
            kinds = [e["kind"] for e in read_events(folder / "events.jsonl") if e["where"] not in meant]
            for record in read_metrics(folder / "metrics.jsonl"):
                found = record["integrity"]
                worst = max(worst, found["relative_error"] / found["rounding_bound"])
        outcome.append((hash_of_engine(engine), kinds, worst))
        engine.destroy()
    return outcome


def check_splits(
    cells: tuple[Cell, ...], worlds: tuple[int, ...], micro_batches: int, length: int, folder: str
) -> None:
    hashes: list[set[str]] = [set() for _ in cells]
    for ranks in worlds:
        results = run_on_kept_ranks(train_cells, ranks, (cells, micro_batches, length, folder), timeout=1500)
        for number, cell in enumerate(cells):
            assert len({of_rank[number][0] for of_rank in results}) == 1, cell  # the replicas agree
            found, kinds, worst = results[0][number]
            hashes[number].add(found)
            assert set(kinds) <= {"zero-gradient"}, (cell, kinds)  # layers that were skipped
            assert 0.0 <= worst < 1.0, cell
    for cell, found in zip(cells, hashes, strict=True):
        if cell[4] == "ordered":
            assert len(found) == 1, cell
        else:
            assert len(found) > 1, cell  # else this test could not fail


QUICK: tuple[Cell, ...] = (
    ("contiguous", 0, "fp32", 0.05, "ordered"),
    ("interleaved", 0, "bf16", 0.05, "ordered"),
    ("contiguous", 1, "bf16", 0.05, "ordered"),
    ("interleaved", 1, "fp32", 0.05, "ordered"),
    ("contiguous", 0, "fp32", 0.0, "native"),
)


@pytest.mark.long
def test_weights_do_not_depend_on_the_split(tmp_path: Path) -> None:
    check_splits(QUICK, (1, 2, 4), 4, 4, str(tmp_path))


@pytest.mark.matrix
@pytest.mark.timeout(3000)
def test_the_whole_matrix(tmp_path: Path) -> None:
    cells = tuple(itertools.product(PAIRINGS, (0, 1), ("fp32", "bf16"), (0.0, 0.05), ("ordered",)))
    native = tuple(("contiguous", stage, dtype, 0.05, "native") for stage in (0, 1) for dtype in ("fp32", "bf16"))
    check_splits((*cells, *native), (1, 2, 4, 8), 8, 20, str(tmp_path))


# -- DeepSpeed's side -----------------------------------------------------------------------------------------------


def averaged_gradients(cell: Cell, contiguous: bool, directory: str) -> None:
    """What the optimizer is about to use, bit by bit against the recursion over all leaves."""
    steps, ranks = 4, dist.get_world_size()
    engine = engine_of(cell, steps, 700, directory)
    engine.optimizer.contiguous_gradients = contiguous
    leaves: list[dict[str, Tensor]] = []
    for name, parameter in engine.module.named_parameters():
        parameter.register_hook(lambda gradient, name=name: leaves[-1].__setitem__(name, gradient.clone()))
    for step in range(3):
        leaves.clear()
        for a in range(steps):
            leaves.append({})
            if a == steps - 1:
                original = engine._take_model_step
                seen: dict[str, Tensor] = {}

                def look(*args: Any, seen: Any = seen, original: Any = original, **kwargs: Any) -> Any:
                    for name, parameter in engine.module.named_parameters():
                        stage_0 = engine.zero_optimization_stage() == 0
                        full = parameter.grad if stage_0 else deepspeed.utils.safe_get_full_grad(parameter)
                        seen[name] = full.clone()
                    return original(*args, **kwargs)

                engine._take_model_step = look
            micro_step(engine, cell, step, a, steps)
        engine._take_model_step = original
        everybody: list[Any] = [None] * ranks
        dist.all_gather_object(everybody, leaves)
        ordered = [everybody[r][a] for r in range(ranks) for a in range(steps)]
        if cell[0] == "interleaved":
            ordered = [everybody[r][a] for a in range(steps) for r in range(ranks)]
        for name, parameter in engine.module.named_parameters():
            zeros = torch.zeros(parameter.shape)
            mean = by_recursion([leaf.get(name, zeros) for leaf in ordered], cell[0]) / ranks
            assert torch.equal(seen[name].float(), mean.to(parameter.dtype).float()), (cell, step, name)
    engine.destroy()


def check_averaged(directory: str) -> None:
    for number, cell in enumerate(QUICK[:4]):
        averaged_gradients(cell, True, f"{directory}/{number}")
    averaged_gradients(QUICK[3], False, f"{directory}/not-contiguous")


def test_the_optimizer_gets_the_ordered_mean(tmp_path: Path) -> None:
    run_on_kept_ranks(check_averaged, 2, (str(tmp_path),))


ORACLE = (
    Case(reduction="ordered", accumulation=2, method="exact"),
    Case(reduction="ordered", stage=1, accumulation=4, exact_interval=2, checkpointing="reentrant"),
    Case(reduction="ordered", stage=1, dtype="bf16", accumulation=2, torch_style=True, unused="micro"),
    Case(reduction="ordered", dtype="bf16", checkpointing="non-reentrant", unused="rank", clipping=1.0),
    Case(reduction="ordered", stage=1, torch_style=True, unused="rank", interval=3),
)


def train_with_oracle(directory: str) -> list[Trace]:
    return [train(case, Path(directory, str(n)), 10, enabled=True, oracle=True) for n, case in enumerate(ORACLE)]


def test_records_match_the_oracle(tmp_path: Path) -> None:
    results = run_on_kept_ranks(train_with_oracle, 2, (str(tmp_path),), timeout=200)
    for number, case in enumerate(ORACLE):
        trace = results[0][number]
        assert len({of_rank[number].weights for of_rank in results}) == 1, case
        assert [record["step"] for record in trace.records] == [n for n in range(1, 11) if n % case.interval == 0]
        for record in trace.records:
            check_record(case, record, trace.oracle[record["step"] - 1])
            check_integrity(case, record, 2)
        check_events(case, trace)


# -- what happens around it -----------------------------------------------------------------------------------------


def train_and_break(directory: str) -> list[str]:
    """Trainings that must end alike: watched, broken, retried; and one whose observer is closed, which must differ."""
    cells = {stage: ("contiguous", stage, "fp32", 0.05, "ordered") for stage in (0, 1)}
    hashes, steps = [], 4
    for stage, way in itertools.product((0, 1), ("plain", "broken", "retried", "closed")):
        block = {"respond": {"on_aggregation_error": "retry"}} if way == "retried" else {}
        engine = engine_of(cells[stage], steps, 900, f"{directory}/{stage}-{way}", **block)
        untouched = set(vars(engine.module))
        observer = ds_silent.observer_of(engine)
        assert observer is not None
        capture = observer._capture
        if way == "retried":
            engine._take_model_step = retry_of(engine, capture)
        for step in range(6):
            if way == "broken" and step == 2 and dist.get_rank() == 1:
                capture._local.observe_accumulated = None
            if way == "closed" and step == 3:
                micro_step(engine, cells[stage], step, 0, steps)
                assert {p.grad is None for p in engine.module.parameters()} == {True}
                observer.close()
                assert False in {p.grad is None for p in engine.module.parameters()}
            for a in range(way == "closed" and step == 3, steps):
                micro_step(engine, cells[stage], step, a, steps)
        if way == "broken":
            assert not observer._steps.observing
            assert "allreduce_gradients" in vars(engine)
            observer.close()
        if way in ("broken", "closed"):
            wrapped = {"allreduce_gradients", "_take_model_step", "no_sync", "clip_fp32_gradients", "destroy"}
            assert not wrapped & set(vars(engine))
            assert not {"average_tensor", "scaled_global_norm"} & set(vars(engine.optimizer))
            assert set(vars(engine.module)) == untouched
        hashes.append(hash_of_engine(engine))
        engine.destroy()
    return hashes


def retry_of(engine: Any, capture: Any) -> Any:
    """Before the optimizer step, spoil what was reduced and repeat the reduction."""
    original = engine._take_model_step

    def retry(*args: Any, **kwargs: Any) -> Any:
        for _, _, part in capture.framework.aggregated():
            part.fill_(7.0)
        assert capture.framework._ordered.local_bytes > 0
        capture.framework._ordered.reduce()
        return original(*args, **kwargs)

    return retry


def test_the_arithmetic_outlives_the_observer_and_a_retry_repeats_it(tmp_path: Path) -> None:
    results = run_on_kept_ranks(train_and_break, 2, (str(tmp_path),))
    assert results[0] == results[1]
    for plain, broken, retried, closed in (results[0][:4], results[0][4:]):
        assert plain == broken == retried
        assert closed != plain


def refuse_while_training(directory: str) -> list[str]:
    sentences = []
    engine = engine_of(QUICK[0], 2, 900, f"{directory}/no-sync")
    with pytest.raises(ds_silent.config.ConfigError) as refused, engine.no_sync():
        pass
    sentences.append(str(refused.value))
    engine = engine_of(QUICK[0], 2, 900, f"{directory}/boundary")
    engine.set_gradient_accumulation_boundary(True)
    with pytest.raises(ds_silent.config.ConfigError) as refused:
        micro_step(engine, QUICK[0], 0, 0, 2)
    sentences.append(str(refused.value))
    config = config_of(QUICK[0], 3, 900, f"{directory}/three")
    del config["gradient_accumulation_steps"]
    config["train_batch_size"] = 3 * ROWS * dist.get_world_size()
    model = Model()
    with pytest.raises(ds_silent.config.ConfigError) as refused:
        ds_silent.initialize(model=model, model_parameters=model.parameters(), config=config)
    sentences.append(str(refused.value))
    config = config_of(("contiguous", 1, "fp32", 0.0, "ordered"), 2, 900, f"{directory}/part")
    with pytest.raises(ds_silent.config.ConfigError) as refused:
        ds_silent.initialize(model=model, model_parameters=model.inner.parameters(), config=config)
    sentences.append(str(refused.value))
    return sentences


def test_what_cannot_work_is_refused_on_all_ranks(tmp_path: Path) -> None:
    first, second = run_on_kept_ranks(refuse_while_training, 2, (str(tmp_path),))
    assert first == second
    no_sync, boundary, three, part = first
    assert "no_sync()" in no_sync
    assert "gradient_accumulation_steps" in no_sync
    assert "per step, 2, got 1;" in boundary
    assert "gradient_accumulation_steps 3" in three
    assert "such as 2 or 4" in three
    assert "give the optimizer all trainable parameters" in part
