"""``ds-silent numerics``: errors and their bounds, weights, what is read, and what is said."""

from __future__ import annotations

import copy
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils import parameters_to_vector
from typer.testing import CliRunner

from ds_silent.cli import app
from ds_silent.config import ConfigError
from ds_silent.numerics.gradient_errors import (
    ROWS,
    gradient_of,
    practice_gradients,
    read_flat,
    read_gradients,
    trainable,
)
from ds_silent.numerics.program import Options, measure, to_json
from ds_silent.numerics.report import bits_sentence, cost_sentence, error_sentence, percent, real_sentence, share
from ds_silent.numerics.rounding import (
    DTYPES,
    ORDERS,
    Rounding,
    arithmetic_of_mean,
    changed_bits,
    measure_rounding,
    reference_mean,
    relative_error,
    spread,
    terms_of_mean,
)
from ds_silent.numerics.weights import OPTIMIZERS, measure_weights, reducer, train
from ds_silent.numerics.wire import AGAIN, RealReduction, timings_of
from ds_silent.practice.model import PracticeModel, make_rows
from tests.numerics.test_orders import BITS, gradients_of

# -- errors and bounds -------------------------------------------------------------------------------------------------


def rows_of(micro_batches: Tensor, *sizes: int, scale: float | None = None) -> list[Rounding]:
    return list(measure_rounding(micro_batches, torch.float32, sizes, tuple(DTYPES), scale))


def test_errors_grow_with_the_unit_roundoff_and_stay_below_the_bound() -> None:
    micro_batches = gradients_of(24, 5003)
    rows = {(row.dtype, row.world_size): row for row in rows_of(micro_batches, 2, 3, 8)}
    assert len(rows) == 9
    for (dtype, size), row in rows.items():
        terms = terms_of_mean(spread(micro_batches, size), DTYPES[dtype], row.loss_scale)
        expected = relative_error(ORDERS["ring"](terms), reference_mean(spread(micro_batches, size)), row.loss_scale)
        assert row.error == expected
        assert 0.1 < row.error / 2.0 ** -BITS[dtype] < 3
        assert row.holds
        assert row.bound < 8 * 2.0 ** -BITS[dtype]
        # the sketch sees what the elements show, where its own fp32 rounding does not hide it
        if dtype != "fp32":
            assert 1.0 < row.ratio < 5.0
            assert row.seen == pytest.approx(max(row.errors.values()), rel=0.1)
    assert rows["bf16", 8].changed_by_world_size is None
    two, eight = (ORDERS["ring"](terms_of_mean(spread(micro_batches, n), torch.bfloat16)) for n in (2, 8))
    assert rows["bf16", 2].changed_by_world_size == changed_bits(two, eight) > 0.2


def test_a_fault_is_above_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgets_a_rank(terms: Tensor) -> Tensor:
        return ORDERS["ring"](terms[:-1])

    monkeypatch.setattr("ds_silent.numerics.rounding.ORDERS", dict(ORDERS) | {"tree": forgets_a_rank})
    rows = rows_of(gradients_of(4, 5003), 4)
    assert not any(row.holds for row in rows)
    assert "does NOT hold for fp32 over 4 ranks, bf16 over 4 ranks, fp16 over 4 ranks" in error_sentence(rows)


def test_what_the_terms_round() -> None:
    for ranks, kept, dtype, before in [
        (4, torch.float32, torch.bfloat16, 1),
        (3, torch.float32, torch.bfloat16, 2),
        (4, torch.bfloat16, torch.bfloat16, 0),
        (4, torch.bfloat16, torch.float16, 1),  # another range
        (4, torch.bfloat16, torch.float32, 0),
        (6, torch.float32, torch.float32, 1),
    ]:
        assert arithmetic_of_mean(torch.zeros(ranks, 10), kept, dtype).before == before


def test_fp16_overflow_and_underflow_are_said() -> None:
    (row,) = (row for row in rows_of(gradients_of(4, 503), 4, scale=2.0**20) if row.dtype == "fp16")
    assert not math.isfinite(row.error)
    assert row.holds  # that is no rounding, and somebody else's finding
    assert "fp16 overflowed: give a smaller --loss-scale than 1.04858e+06" in error_sentence([row])
    (row,) = (row for row in rows_of(1e-7 * gradients_of(4, 503), 4) if row.dtype == "fp16")
    assert row.unscaled_error is not None
    assert row.unscaled_error > 0.1 > row.error
    assert "Without loss scaling fp16 would be" in error_sentence([row])


# -- the weights -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_reference_training_is_a_plain_one(optimizer: str) -> None:
    torch.manual_seed(0)
    model = PracticeModel()
    start = copy.deepcopy(model.state_dict())
    weights = train(model, reducer("fp64", "ring"), optimizer, world_size=2, steps=3, seed=4)
    assert all(torch.equal(value, start[name]) for name, value in model.state_dict().items())
    assert torch.equal(weights, train(model, reducer("fp64", "ring"), optimizer, world_size=2, steps=3, seed=4))

    plain = copy.deepcopy(model)
    stepper = OPTIMIZERS[optimizer](trainable(plain))
    rows = make_rows(3 * 2 * ROWS, 4)
    for step in range(3):
        means = None
        for number in (2 * step, 2 * step + 1):
            chosen = slice(number * ROWS, (number + 1) * ROWS)
            torch.manual_seed(4 * 1_000_003 + number)
            plain.zero_grad()
            plain(rows.tokens[chosen], rows.labels[chosen]).backward()
            own = [p.grad.double() for p in trainable(plain) if p.grad is not None]
            means = own if means is None else [(a + b) / 2 for a, b in zip(means, own, strict=True)]
        assert means is not None
        for parameter, mean in zip(trainable(plain), means, strict=True):
            parameter.grad = mean.float()
        stepper.step()
    assert torch.equal(weights, parameters_to_vector(trainable(plain)).detach())


def test_distances_are_relative_to_the_way_travelled() -> None:
    torch.manual_seed(0)
    model = PracticeModel()
    found = list(measure_weights(model, ("fp32", "bf16"), world_size=3, steps=2, seed=4))
    distances = {(row.optimizer, row.one, row.other): row.relative for row in found}
    assert len(distances) == len(found) == 8
    start = parameters_to_vector(trainable(model)).detach().double()
    exact, coarse = (
        train(model, reducer(dtype, "ring"), "SGD", world_size=3, steps=2, seed=4).double()
        for dtype in ("fp64", "bf16")
    )
    expected = float((coarse - exact).norm() / (exact - start).norm())
    assert distances["SGD", "bf16, ring", "fp64"] == pytest.approx(expected, rel=1e-9)
    for optimizer in OPTIMIZERS:
        fine = distances[optimizer, "fp32, ring", "fp64"]
        assert 0 < fine < distances[optimizer, "bf16, ring", "fp64"] < distances[optimizer, "fp64, other rows", "fp64"]
        assert distances[optimizer, "fp32, ring", "fp32, tree"] > 0


def test_practice_gradients_follow_from_the_seed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = PracticeModel()
    one, again = (practice_gradients(model, 3, 5, tmp_path) for _ in range(2))
    other = practice_gradients(model, 3, 6, tmp_path / "..")
    assert torch.equal(one.micro_batches, again.micro_batches)
    assert not torch.equal(one.micro_batches, other.micro_batches)
    assert not torch.equal(one.micro_batches[0], one.micro_batches[1])
    assert all(torch.equal(read_flat(path), flat) for path, flat in zip(one.files, one.micro_batches, strict=True))
    rows = make_rows(3 * ROWS, 5)
    rows = type(rows)(rows.tokens[ROWS : 2 * ROWS], rows.labels[ROWS : 2 * ROWS])
    assert torch.equal(gradient_of(model, rows, (5, 1)), one.micro_batches[1])


# -- what is read ------------------------------------------------------------------------------------------------------


def save(folder: Path, count: int, dtype: torch.dtype = torch.float32, **changes: Any) -> str:
    """``changes``: of the last file."""
    folder.mkdir(exist_ok=True)
    for rank in range(count):
        flat = gradients_of(count, 5000, seed=7)[rank].to(dtype)
        tensors: dict[str, Tensor] = {"b": flat[:4000].view(40, 100), "a": flat[4000:]}
        if rank == count - 1:
            tensors |= changes
        kept = {name: value.contiguous() for name, value in tensors.items() if value is not None}
        save_file(kept, folder / f"rank_{rank}.safetensors")
    return str(folder)


def test_files_are_read_in_the_order_of_their_ranks(tmp_path: Path) -> None:
    read = read_gradients(save(tmp_path / "g", 12, torch.bfloat16))
    assert [path.stem for path in read.files] == [f"rank_{rank}" for rank in range(12)]
    assert read.kept == torch.bfloat16
    assert read.micro_batches.dtype == torch.float32
    stored = gradients_of(12, 5000, seed=7)[11].bfloat16()
    assert torch.equal(read.micro_batches[11], torch.cat([stored[4000:], stored[:4000]]).float())  # a, then b


@pytest.mark.parametrize(
    ("count", "changes", "said"),
    [
        (1, {}, "must hold at least 2 *.safetensors files, got 1"),
        (3, {"a": torch.zeros(7)}, "but 'a' is [7] float32 in .*rank_2.safetensors' and [1000] float32 in"),
        (3, {"a": None}, "but 'a' is missing in .*rank_2.safetensors' and [1000] float32 in .*rank_0"),
        (3, {"c": torch.zeros(1)}, "but 'c' is [1] float32 in .*rank_2.safetensors' and missing in"),
        (3, {"a": torch.zeros(1000).half()}, "but 'a' is [1000] float16 in"),
        (3, {"a": torch.zeros(1000).double()}, "must be fp32, bf16 or fp16 (F32, BF16, F16), got F64"),
        (3, {"a": torch.full((1000,), math.nan)}, "rank_2.safetensors' holds NaN or infinity"),
        (3, {"a": None, "b": None}, "rank_2.safetensors' holds no tensor"),
    ],
)
def test_a_mistake_in_the_files_is_one_sentence(tmp_path: Path, count: int, changes: Any, said: str) -> None:
    refused(["--gradients", save(tmp_path / "g", count, **changes)], said)


def test_what_is_no_gradient_is_one_sentence(tmp_path: Path) -> None:
    refused(["--gradients", str(tmp_path / "none")], "must be a directory with one safetensors file per rank")
    folder = save(tmp_path / "g", 2)
    (tmp_path / "g" / "rank_1.safetensors").write_bytes(b"\x80\x04pickle")
    refused(["--gradients", folder], "rank_1.safetensors' cannot be read as safetensors:")
    for rank in range(2):
        save_file({"a": torch.zeros(3)}, tmp_path / "g" / f"rank_{rank}.safetensors")
    refused(["--gradients", folder], "the mean gradient is zero")


def test_a_mistake_in_the_options_is_one_sentence(tmp_path: Path) -> None:
    folder = save(tmp_path / "g", 6)
    refused(["--gradients", folder, "--world-size", "4"], "--world-size must divide the 6 files in .*, got 4")
    sizes = [item for size in ("5", "7", "8") for item in ("--world-size", size)]
    refused(sizes, "evenly over all of 5, 7 and 8, which takes 280 of them; at most 64 are possible")
    refused(["--dtype", "fp8"], "--dtype must be fp32, bf16 or fp16, got 'fp8'")
    refused(["--loss-scale", "inf"], "--loss-scale must be a finite number of at least 1, got inf")
    refused(["--json", str(tmp_path)], "--json .* cannot be written; give a file in a directory that can")
    for option, value in [("--world-size", "1"), ("--steps", "-1"), ("--loss-scale", "0.5"), ("--elements", "0")]:
        assert CliRunner().invoke(app, ["numerics", option, value]).exit_code == 2


def refused(options: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["numerics", *options])
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("ds-silent: --")
    assert re.search(".*".join(map(re.escape, said.split(".*"))), result.stderr), result.stderr


# -- the whole ---------------------------------------------------------------------------------------------------------


def test_the_command_on_the_users_gradients(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    options = ["--gradients", save(tmp_path / "g", 4), "--steps", "0", "--rounds", "3", "--elements", "1000"]
    result = CliRunner().invoke(app, ["numerics", *options, "--json", str(path)])
    assert result.exit_code == 0, result.output
    said = " ".join(result.stdout.split())
    assert "4 micro-batches, 5000 elements" in said
    assert "so rounding raises no alarm" in said
    assert "The real all-reduce is, bit for bit, the simulated one: ring reversed. All ranks got the same bits." in said
    assert "fp32 sends twice the bytes of bf16" in said
    assert "After 0 steps" not in said

    found = json.loads(path.read_text())
    assert found["sound"] is True
    assert found["options"]["world_sizes"] == [2, 4]
    assert [(row["dtype"], row["world_size"]) for row in found["rounding"]] == [(d, n) for d in DTYPES for n in (2, 4)]
    assert all(row["bound_over_seen"] > 1 for row in found["rounding"])
    for row in found["reductions"]:
        assert row["same_on_all_ranks"] is True
        assert row["equals"] == (list(ORDERS) if row["world_size"] == 2 else ["ring reversed"])
    assert [row["bytes_sent"] for row in found["timings"] if row["dtype"] == "fp32"] == [4000.0, 6000.0]


def test_without_processes_and_without_trainings_little_is_left(tmp_path: Path) -> None:
    options = Options(save(tmp_path / "g", 6), dtypes=("bf16",), steps=0, processes=False)
    heard: list[str] = []
    findings = measure(options, heard.append)
    assert findings.options.world_sizes == (2, 6)
    assert findings.reductions == findings.timings == findings.weights == ()
    assert heard == ["the simulated orders"]
    assert json.loads(json.dumps(to_json(findings), allow_nan=False))["elements"] == 5000
    with pytest.raises(ConfigError, match="got 5"):
        measure(Options(options.gradients, world_sizes=(2, 5)))


def test_all_but_the_times_follows_from_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds_silent.numerics.program.warm_up", lambda model: None)
    options = [Options(None, (2,), ("bf16",), steps=1, processes=False, seed=seed) for seed in (1, 1, 2)]
    one, again, other = (measure(chosen) for chosen in options)
    assert one == again
    assert one.rounding != other.rounding
    assert one.weights != other.weights


def test_the_help_says_the_exit_status() -> None:
    result = CliRunner().invoke(app, ["numerics", "--help"])
    assert result.exit_code == 0
    assert "Exit status: 0" in result.stdout
    assert "communication_data_type" in result.stdout


def test_times_become_ratios_of_the_same_round() -> None:
    seconds = {"fp32": [2.0, 4.0, 6.0], "bf16": [1.0, 4.0, 2.0], AGAIN: [2.0, 4.0, 6.0]}
    rows = {row.dtype: row for row in timings_of(seconds, world_size=4, elements=1000)}
    assert rows["bf16"].fp32_ratio == (1.5, 2.0, 2.5)
    assert rows["bf16"].seconds == 2.0
    assert rows["bf16"].bytes_sent == 2 * 3 / 4 * 1000 * 2
    assert rows["fp32"].bytes_sent == rows[AGAIN].bytes_sent == 2 * rows["bf16"].bytes_sent
    said = cost_sentence(list(rows.values()))
    assert "2.00 times as long (quartiles 1.50 to 2.50; fp32 against itself 1.00 to 1.00)" in said
    assert "hides" not in said
    noisy = {row.dtype: row for row in timings_of(seconds | {AGAIN: [1.0, 4.0, 6.0]}, world_size=4, elements=1000)}
    assert "a difference that the noise of this machine hides" in cost_sentence(list(noisy.values()))


def test_a_real_all_reduce_that_no_simulated_order_explains() -> None:
    good = RealReduction(4, "fp32", True, {"ring": 0.8, "tree": 1.0})
    assert "bit for bit, the simulated one: tree. All ranks got the same bits." in real_sentence([good])
    other = RealReduction(8, "bf16", True, {"ring": 0.9996, "tree": 0.5})
    said = real_sentence([good, other])
    assert "an order that is not simulated here: bf16 over 8 ranks has the bits of the nearest one (ring)" in said
    apart = RealReduction(8, "bf16", False, {"ring": 0.5, "tree": 1.0})
    assert "did NOT all get the same bits: bf16 over 8 ranks" in real_sentence([good, apart])


def test_numbers_for_people() -> None:
    assert [percent(value) for value in (0.0, 1e-9, 0.5, 1 - 1e-9, 1.0)] == [
        "0 %",
        "0.01 %",
        "50.00 %",
        "99.99 %",
        "100 %",
    ]
    assert [share(value) for value in (0.00361, 5.1e-8)] == ["0.36 %", "5.1e-08"]
    (row,) = measure_rounding(gradients_of(2, 100), torch.float32, (2,), ("fp32",))
    assert bits_sentence([row]).startswith("Here no order changes a bit")
