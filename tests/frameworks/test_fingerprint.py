"""Fingerprints of weights: equal wherever the same values are, and different where one value is not."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ds_silent
from tests.support.distributed import run_on_kept_ranks


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)


class Model(nn.Module):
    """Two blocks, a tied head, a running statistic."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList([Attention(), Attention()])
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embed(rows))
        for block in self.blocks:
            hidden = hidden + block.q_proj(hidden) + torch.cat((block.k_proj(hidden), block.v_proj(hidden)), -1)
        return self.head(hidden)


def test_one_changed_value_is_named_and_equal_models_are_equal() -> None:
    own, other = ds_silent.fingerprint(Model()), Model()
    assert own == ds_silent.fingerprint(other)
    with torch.no_grad():
        other.blocks[1].k_proj.weight.view(torch.int32)[2, 3] += 1  # a unit in the last place
    changed = ds_silent.fingerprint(other)
    assert own != changed
    assert own.differs(changed) == changed.differs(own) == ["blocks.1.k_proj.weight"]
    assert own.differs(ds_silent.fingerprint(Model(seed=1))) == sorted(
        name for name in own.tensors if not name.startswith("norm.")
    )


def test_layers_that_changed_places_are_not_equal() -> None:
    swapped = Model()
    swapped.blocks[0], swapped.blocks[1] = swapped.blocks[1], swapped.blocks[0]
    names = ds_silent.fingerprint(Model()).differs(ds_silent.fingerprint(swapped))
    assert names == [
        f"blocks.{i}.{part}_proj.{which}" for i in (0, 1) for part in "kqv" for which in ("bias", "weight")
    ]


def test_names_of_wrappers_tied_and_fused_weights_and_wider_types_make_no_difference() -> None:
    model = Model().bfloat16()
    own = ds_silent.fingerprint(model)
    other: dict[str, Any] = {f"module._orig_mod.{name}": value.float() for name, value in model.state_dict().items()}
    del other["module._orig_mod.head.weight"]
    for block in (0, 1):
        for which in ("weight", "bias"):
            parts = [other.pop(f"module._orig_mod.blocks.{block}.{part}_proj.{which}") for part in "qkv"]
            other[f"module._orig_mod.blocks.{block}.qkv.{which}"] = torch.cat(parts)
    assert own.differs(ds_silent.fingerprint(other)) == []
    assert ds_silent.fingerprint({"model": other}) == own
    other["module._orig_mod.blocks.1.qkv.weight"][9, 0] += 1.0
    assert own.differs(ds_silent.fingerprint(other)) == [
        *(f"blocks.1.{part}_proj.weight" for part in "kq"),
        "blocks.1.qkv.weight",
        "blocks.1.v_proj.weight",
    ]


@pytest.mark.parametrize("wrapper", ["_forward_module", "_original_module", "_fsdp_wrapped_module"])
def test_a_weight_that_differs_below_a_wrapper_has_one_name(wrapper: str) -> None:
    state = Model().state_dict()
    other = {f"{wrapper}.{name}": value.clone() for name, value in state.items()}
    other[f"{wrapper}.blocks.0.v_proj.bias"] += 1.0
    assert ds_silent.fingerprint(dict(state)).differs(ds_silent.fingerprint(other)) == ["blocks.0.v_proj.bias"]


def test_other_tensors_of_a_checkpoint_and_complex_ones_and_many_alike_are_no_trouble() -> None:
    state = dict(Model().state_dict())
    own = ds_silent.fingerprint(state)
    assert ds_silent.fingerprint({"model": state, "rng_state": torch.get_rng_state()}) == own
    loop: dict[str, Any] = {}
    loop["model"] = loop
    with pytest.raises(ValueError, match="no weights"):
        ds_silent.fingerprint(loop)
    angles = torch.view_as_complex(torch.randn(40_000, 2))
    turned = angles.clone()
    turned[39_999] = turned[39_999].conj()
    assert ds_silent.fingerprint({"freqs": angles}).differs(ds_silent.fingerprint({"freqs": turned})) == ["freqs"]
    many = {f"net.{i}.weight": torch.full((4, 3), float(i)) for i in range(200)}
    other = {f"net.{i}.weight": value for i, value in enumerate([torch.full((8, 3), -1.0), *list(many.values())[1:]])}
    assert ds_silent.fingerprint(many).differs(ds_silent.fingerprint(other)) == ["net.0.weight"]
    placeholders = {name: torch.empty(0) for name in state}
    with pytest.raises(ValueError, match="give the engine or model itself"):
        ds_silent.fingerprint(placeholders)


def test_parts_of_a_model_in_several_files_are_refused(tmp_path: Path) -> None:
    for rank in (0, 1):
        torch.save(
            {"module": {"up.weight": torch.full((2, 2), float(rank))}}, tmp_path / f"mp_rank_0{rank}_model_states.pt"
        )
    with pytest.raises(ValueError, match=r"up\.weight is in several files"):
        ds_silent.fingerprint(tmp_path)


def test_a_name_that_only_one_side_has_is_a_difference() -> None:
    smaller = dict(Model().state_dict())
    del smaller["blocks.0.v_proj.bias"]
    assert ds_silent.fingerprint(Model()).differs(ds_silent.fingerprint(smaller)) == ["blocks.0.v_proj.bias"]


def test_files_directories_and_steps(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = Model()
    own = ds_silent.fingerprint(model, step=7)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    folder = tmp_path / "checkpoint-500"
    folder.mkdir()
    half = len(state) // 2
    save_file(dict(list(state.items())[:half]), str(folder / "model-00001-of-00002.safetensors"))
    save_file(dict(list(state.items())[half:]), str(folder / "model-00002-of-00002.safetensors"))
    (folder / "optimizer.pt").write_bytes(b"not read")
    assert ds_silent.fingerprint(folder) == own
    assert (ds_silent.fingerprint(folder).step, ds_silent.fingerprint(folder, step=3).step, own.step) == (500, 3, 7)
    torch.save({"model_state_dict": state, "epoch": 3}, tmp_path / "weights.pt")
    assert ds_silent.fingerprint(str(tmp_path / "weights.pt")) == own
    own.save(tmp_path / "own.json")
    saved = ds_silent.fingerprint(tmp_path / "own.json")
    assert (saved == own, saved.step, dict(saved.tensors)) == (True, 7, dict(own.tensors))


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("made-by-a-pickle",)


def test_what_cannot_be_read_is_one_sentence_and_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.pt").write_bytes(pickle.dumps(Evil()))
    torch.save({"w": torch.ones(2), "evil": Evil()}, tmp_path / "evil2.pt")
    (tmp_path / "torn.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}")
    (tmp_path / "other.json").write_text('{"a": 1}')
    (tmp_path / "newer.json").write_text('{"ds_silent_fingerprint": 99, "tensors": {}}')
    (tmp_path / "empty").mkdir()
    for name, said in (
        ("evil.pt", "cannot be read as weights alone"),
        ("evil2.pt", "cannot be read as weights alone"),
        ("torn.safetensors", "safetensors"),
        ("other.json", "is not a fingerprint that ds_silent wrote"),
        ("newer.json", "format 99"),
        ("missing", "does not exist"),
        ("empty", "has no .safetensors"),
    ):
        with pytest.raises(ValueError, match=said) as raised:
            ds_silent.fingerprint(tmp_path / name)
        assert name in str(raised.value)
        assert "\n" not in str(raised.value)
    assert not (tmp_path / "made-by-a-pickle").exists()
    for nothing in (nn.Identity(), {}, 3):
        with pytest.raises(ValueError, match=r"ds_silent\.fingerprint"):
            ds_silent.fingerprint(nothing)


def sharded() -> dict[str, Any]:
    """Fingerprints of one model in each form that a rank may hold it in."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard
    from torch.nn.parallel import DistributedDataParallel

    found = {"plain": ds_silent.fingerprint(Model()), "ddp": ds_silent.fingerprint(DistributedDataParallel(Model()))}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for name, dimension in (("rows", 0), ("columns", 1)):
        model = Model()
        options: dict[str, Any] = {"mesh": mesh}
        if dimension:
            options["shard_placement_fn"] = lambda p: Shard(1) if p.ndim > 1 else Shard(0)
        for block in model.blocks:
            fully_shard(block, **options)
        found[name] = ds_silent.fingerprint(fully_shard(model, **options))
    changed = Model()
    with torch.no_grad():
        changed.blocks[0].v_proj.weight[3, 7] += 1e-6
    found["changed"] = ds_silent.fingerprint(fully_shard(changed, mesh=mesh))
    return found


def test_shards_of_fsdp2_have_the_fingerprint_of_the_whole() -> None:
    for rank in run_on_kept_ranks(sharded, world_size=2):
        plain = rank.pop("plain")
        assert plain.differs(rank.pop("changed")) == ["blocks.0.v_proj.weight"]
        assert {name: plain.differs(one) for name, one in rank.items()} == {"ddp": [], "rows": [], "columns": []}


def observed(directory: str) -> list[int | None]:
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(Model())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    steps = [ds_silent.fingerprint(model).step]
    with ds_silent.observe(model, optimizer, config={"output_dir": directory, "tensorboard": False}):
        for _ in range(3):
            model(torch.arange(8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            steps.append(ds_silent.fingerprint(model).step)
    return steps


def test_the_step_is_the_observers_on_every_rank(tmp_path: Path) -> None:
    assert run_on_kept_ranks(observed, 2, (str(tmp_path),)) == [[None, 1, 2, 3]] * 2


def partitioned() -> tuple[Any, ...]:
    import deepspeed

    def engine_of(stage: int) -> Any:
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "zero_allow_untested_optimizer": True,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        }
        model = Model()
        return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]

    engines = {stage: engine_of(stage) for stage in (0, 3)}
    before = [ds_silent.fingerprint(engine) for engine in engines.values()]
    for engine in engines.values():
        rows = torch.arange(8).reshape(2, 4)[dist.get_rank()] if dist.get_world_size() > 1 else torch.arange(8)
        engine.backward(engine(rows).square().mean())
        engine.step()
    after = {stage: ds_silent.fingerprint(engine) for stage, engine in engines.items()}
    still_partitioned = all(p.ds_tensor.numel() < p.ds_numel for p in engines[3].parameters() if p.ds_numel > 2)
    return before, after, still_partitioned


def test_partitions_of_zero_3_have_the_fingerprint_of_the_whole() -> None:
    for before, after, still_partitioned in run_on_kept_ranks(partitioned, world_size=2):
        assert before[0] == before[1]
        assert before[0].step == 0
        assert set(before[0].differs(after[0])) == {
            name for name in before[0].tensors if not name.endswith("num_batches_tracked")
        } | {"norm.num_batches_tracked"}
        assert after[3].step == 1
        assert still_partitioned
