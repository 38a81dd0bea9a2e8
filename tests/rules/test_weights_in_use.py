"""The weights in use are the rounded masters, wherever DeepSpeed keeps them; a write that passes them by is told."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ds_silent
from ds_silent.drill.training import hash_of
from ds_silent.framework import GatheredPiece, WeightCopy
from ds_silent.patches import Patches
from ds_silent.rules import weights_in_use
from ds_silent.rules.batch import EVERY, LOOKED_AT
from ds_silent.rules.weights_in_use import SAMPLES, GatheredWeights, WeightsInUse, unequal_samples
from ds_silent.sinks.jsonl import read_events
from tests.support.distributed import run_on_kept_ranks

CASES = ((0, "bf16"), (0, "fp16"), (1, "bf16"), (2, "bf16"), (2, "fp16"), (3, "bf16"), (3, "fp16"))
WIDTH = 24


def engine_of(stage: int, dtype: str, block: dict[str, Any] | None = None, **more: Any) -> Any:
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **more},
        **({dtype: {"enabled": True, **({"loss_scale": 8.0} if dtype == "fp16" else {})}} if dtype != "fp32" else {}),
        **({"silent_consistency": block} if block else {}),
    }
    initialize = ds_silent.initialize if block else deepspeed.initialize
    return initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def step(engine: Any, dtype: str) -> None:
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    engine.backward(engine(torch.randn(2, WIDTH).to(kind)).float().square().mean())
    engine.step()


def write(engine: Any, stage: int) -> None:
    """Write one weight behind the masters' back."""
    weight = engine.module[0].weight
    (weight.ds_tensor if stage == 3 else weight).data.view(-1).mul_(1.25)


def look(stage: int, dtype: str, **more: Any) -> tuple[int, list[list[str]]]:
    """Return the elements that are compared on this rank, and what was found after each of four steps."""
    from ds_silent.frameworks.deepspeed.masters import masters_of

    engine = engine_of(stage, dtype, **more)
    framework: Any = SimpleNamespace(step=1, copies=lambda: masters_of(engine))
    rule, found = WeightsInUse(framework), []
    for number in range(LOOKED_AT):
        if number == LOOKED_AT - 1:
            write(engine, stage)
        else:
            step(engine, dtype)
        found.append([breach.where for breach in rule.breaches()])
    elements = sum(copy.weights.numel() for copy in masters_of(engine))
    assert all(copy.masters.dtype == torch.float32 for copy in masters_of(engine))
    return elements, found


def looked(directory: Path) -> tuple[Any, ...]:
    torch.manual_seed(dist.get_rank())
    return (
        [look(stage, dtype) for stage, dtype in CASES],
        look(1, "fp32")[0],
        look(1, "bf16", round_robin_gradients=True)[0],
    )


def test_each_element_is_compared_with_its_master_in_every_stage(tmp_path: Path) -> None:
    ranks = run_on_kept_ranks(looked, 2, (tmp_path,))
    whole = 2 * 3 * WIDTH * WIDTH + 4 * WIDTH
    for number, (stage, dtype) in enumerate(CASES):
        elements = [cases[number][0] for cases, *_ in ranks]
        assert sum(elements) == (whole if stage else 2 * whole), (stage, dtype, elements)
        found = [cases[number][1] for cases, *_ in ranks]
        assert all(one[:-1] == [[]] * (LOOKED_AT - 1) for one in found), (stage, dtype, found)
        assert ["0.weight"] in [one[-1] for one in found], (stage, dtype, found)
    assert [(fp32, dealt) for _, fp32, dealt in ranks] == [(0, 0), (0, 0)]


def train(directory: Path, watched: bool, writes: bool) -> Any:
    block = {"output_dir": str(directory), "tensorboard": False} if watched else None
    engine = engine_of(2, "bf16", block)
    torch.manual_seed(dist.get_rank())
    for number in range(7):
        if number == 2 and writes:
            write(engine, 2)
        step(engine, "bf16")
    if watched:
        engine.destroy()
    return hash_of(engine.module.state_dict().values())


def test_a_write_that_the_next_update_undoes_is_an_event(tmp_path: Path) -> None:
    watched = run_on_kept_ranks(train, 2, (tmp_path, True, True))
    events = [e for e in read_events(tmp_path / "events.jsonl") if e["kind"] == "weights-mismatch"]
    assert [(e["step"], e["phase"], e["where"], e["severity"]) for e in events][:1] == [
        (3, "started", "0.weight", "error")
    ]
    assert events[-1]["phase"] == "ended", "the update has written the masters' own"
    assert watched == run_on_kept_ranks(train, 2, (tmp_path, False, True))


def pieces(weights: Tensor, masters: Tensor) -> Any:
    return SimpleNamespace(step=1, copies=lambda: [WeightCopy("w", weights, masters)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_samples_are_rounded_to_nearest_and_even(dtype: torch.dtype) -> None:
    masters = torch.randn(1000, generator=torch.Generator().manual_seed(1)) * 10
    masters[7], masters[8] = float("nan"), 1e30
    exact = masters.double()
    weights = masters.to(dtype)
    assert all(not unequal_samples([WeightCopy("w", weights, masters)], n).any() for n in range(20))
    low = torch.nextafter(weights, torch.zeros_like(weights))
    truncated = torch.where(weights.double().abs() > exact.abs(), low, weights)  # toward 0
    wrong = int((truncated != weights).sum()) - int(weights.isnan().sum())
    stride = 1000 // SAMPLES
    found = sum(int(unequal_samples([WeightCopy("w", truncated, masters)], n).sum()) for n in range(stride))
    covered = sum(int((truncated != weights)[n::stride][:SAMPLES].sum()) for n in range(stride))
    assert found == covered - int(weights.isnan().sum())
    assert found > 0.9 * wrong, "other elements at each look: nearly all of them"


def test_looks_come_again_and_what_is_mended_is_over() -> None:
    masters = torch.linspace(-1, 1, 10)
    weights = masters.bfloat16()
    rule = WeightsInUse(pieces(weights, masters))
    found = []
    for measured in range(2 * EVERY + LOOKED_AT):
        if measured == 10:
            weights[3] = 7.0
        if measured == EVERY + 10:
            weights.copy_(masters)
        found.append(len(rule.breaches()))
    assert found == [0] * EVERY + [1] * EVERY + [0] * LOOKED_AT


def test_pieces_of_several_dtypes_are_named_each(monkeypatch: pytest.MonkeyPatch) -> None:
    together: list[str] = []

    def unequal(copies: list[WeightCopy], look: int) -> Tensor:
        together.append("".join(copy.name for copy in copies))
        return unequal_samples(copies, look)

    monkeypatch.setattr(weights_in_use, "unequal_samples", unequal)
    masters = {name: torch.linspace(-3, 3, size) for name, size in (("a", 5), ("b", 200), ("c", 7), ("d", 64))}
    copies = [
        WeightCopy(name, values.to(torch.float16 if name in "bd" else torch.bfloat16), values)
        for name, values in masters.items()
    ]
    framework: Any = SimpleNamespace(step=1, copies=lambda: copies)
    rule = WeightsInUse(framework)
    assert rule.breaches() == ()
    copies[2].weights[6] = 9.0
    assert [(breach.where, breach.since) for breach in rule.breaches()] == [("c", 1)]
    assert together == ["ac", "bd"] * 2, "a comparison for each dtype, and not for each piece"


def test_whole_groups_are_cut_into_their_parameters() -> None:
    """DeepSpeed takes this wrapper of stage 0 with its own FusedAdam, on an accelerator."""
    from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer

    from ds_silent.frameworks.deepspeed.masters import masters_of

    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)).half()
    optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), static_loss_scale=8.0)
    engine = SimpleNamespace(optimizer=optimizer, module=model, zero_optimization_stage=lambda: 0)
    copies = masters_of(engine)
    assert [copy.name for copy in copies] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    for copy, weight in zip(copies, model.parameters(), strict=True):
        assert torch.equal(copy.masters, weight.detach().float().flatten())


def test_a_difference_keeps_the_step_at_which_it_was_found() -> None:
    masters = torch.linspace(-1, 1, 10)
    framework = pieces(masters.bfloat16() + 1, masters)
    rule, since = WeightsInUse(framework), []
    for framework.step in range(5, 5 + LOOKED_AT):
        since += [breach.since for breach in rule.breaches()]
    assert since == [5] * LOOKED_AT


class Gathers:
    """A module that has gathered a weight, and what this rank's shard holds."""

    def __init__(self) -> None:
        self.module, self.used, self.shard, self.asked = nn.Identity(), torch.ones(6), torch.ones(6), 0
        framework: Any = SimpleNamespace(step=1, gathered=lambda: [GatheredPiece("w", self.module, self.own)])
        self.framework, self.rule, self.patches = framework, GatheredWeights(framework), Patches()
        self.rule.connect(self.patches, lambda function, *given: function(*given))

    def own(self) -> tuple[Tensor, Tensor]:
        self.asked += 1
        return self.used, self.shard

    def step(self, number: int, forwards: int = 2) -> list[int]:
        """Return since when the gathered weights are others."""
        for self.framework.step in range(number, number + forwards):
            self.module(torch.ones(1))
        return [breach.since for breach in self.rule.breaches()]


def test_a_gathered_weight_is_looked_at_once_in_a_step_and_is_over_when_it_is_mended() -> None:
    gathers = Gathers()
    assert gathers.step(1) == []
    assert gathers.asked == 1
    gathers.used[4] = 3.0
    assert gathers.step(11) == [11]
    assert gathers.step(21) == [11]
    gathers.used[4] = 1.0
    assert gathers.step(31) == []
    gathers.patches.undo()


def test_a_rank_without_a_piece_of_a_weight_says_nothing() -> None:
    gathers = Gathers()
    gathers.used = gathers.shard = torch.ones(0)
    gathers.module(torch.ones(1))
    assert gathers.asked == 1
    assert gathers.rule._names == []
    gathers.patches.undo()


def test_a_look_at_several_modules_is_of_the_step_of_the_first() -> None:
    modules, shard = [nn.Identity(), nn.Identity()], torch.zeros(6)
    gathered = [GatheredPiece(name, one, lambda: (shard + 1, shard)) for name, one in zip("ab", modules, strict=True)]
    framework: Any = SimpleNamespace(step=5, gathered=lambda: gathered)
    rule, patches = GatheredWeights(framework), Patches()
    rule.connect(patches, lambda function, *given: function(*given))
    modules[0](shard)
    framework.step = 6
    modules[1](shard)
    assert [(breach.where, breach.since) for breach in rule.breaches()] == [("a", 5)]
    assert ": a, b." in rule.breaches()[0].message
    patches.undo()
