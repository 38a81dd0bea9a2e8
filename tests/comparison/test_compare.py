"""Where two trainings part: faults that were put in, and healthy trainings that round otherwise."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds_silent import trace
from ds_silent.comparison import ComparisonError, TraceError, TrainingComparison, compare
from ds_silent.comparison.defaults import SHARES, SettingDifference, explaining, setting_differences
from tests.comparison.conftest import Trained
from tests.support.traced import Training, write

MLP = {"model": "mlp", "lr": 3e-3}
FAULTS = {
    "rate": ("rates", None, 1.1, "another rate of every group"),
    "layer-scaled": ("local", "layers.0", 1.001, "this layer's gradient alone, {shown} times A's"),
    "row": ("rows", None, None, "other rows in this step alone"),
    "sign": ("local", "layers.0", None, "this layer's gradient alone, in another direction"),
    "masters": ("update", "embedding", None, "B keeps 8 binary digits of the weights (bf16)"),
    "clipping": ("applied", None, None, "A uses 1 of it, B clips to 0.5"),
    "reduced": ("reduced", "layers.0", 1.01, "B's reduced gradient is not the mean of its ranks' gradients, but 1.01"),
    "gradient-scaled": ("local", "norm", 0.5, "the gradient of every layer is 0.5 times A's"),
}
FROM_THE_START = {
    "decay": ("update", "layers.0", "as a weight decay that is 0.01 larger in B does"),
    "epsilon": (
        "update",
        "embedding",
        "every element moves less in B, each by a share of its own, as with a larger eps",
    ),
    "initial": ("weights", "embedding", "other initial weights, in 1 of 28 tensors"),
}


@pytest.mark.parametrize("ranks", [4, 2])
@pytest.mark.parametrize("since", [1, 6])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_at_its_step(trained: Trained, fault: str, since: int, ranks: int) -> None:
    link, layer, factor, cause = FAULTS[fault]
    found = compare(trained(), trained(fault=fault, since=since, ranks=ranks))
    assert (found.parted, found.step, found.link, found.layer) == (True, since, link, layer)
    assert found.cause is not None
    if "{shown}" in cause:  # a factor whose last digits are the CPU's
        cause = cause.format(shown=f"{found.factor:.8g}")
    assert found.cause.startswith(cause) or cause in found.cause
    if factor is not None:
        assert found.factor == pytest.approx(factor, rel=1e-4)
    assert f" at step {since}" in found.sentence
    assert layer is None or layer in found.sentence


@pytest.mark.parametrize("fault", FROM_THE_START)
def test_a_fault_of_the_whole_training_is_named_at_its_first_step(trained: Trained, fault: str) -> None:
    link, layer, cause = FROM_THE_START[fault]
    found = compare(trained(), trained(fault=fault, ranks=2))
    assert (found.step, found.link, found.layer) == (1, link, layer)
    assert cause in str(found.cause)


def test_accumulation_that_is_not_divided_is_counted(trained: Trained) -> None:
    found = compare(trained(), trained(fault="accumulation", accumulation=4, ranks=2))
    assert (found.step, found.link, len(found.layers)) == (1, "local", 7)
    assert found.factor == pytest.approx(4.0, rel=1e-5)
    assert "4 times A's, as many as B's micro-batches, as if B did not divide by them" in str(found.cause)


@pytest.mark.parametrize("model", ["gpt", "mlp", "split"])
@pytest.mark.parametrize("optimizer", ["adamw", "momentum"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.long
def test_healthy_repetitions_do_not_part(trained: Trained, model: str, optimizer: str, dtype: str) -> None:
    training = {"model": model, "optimizer": optimizer, "dtype": dtype, "lr": 1e-3 if optimizer == "adamw" else 0.1}
    for seed in (1, 2):
        a = trained(seed=seed, **training)
        for changes in ({"ranks": 2}, {"ranks": 8}, {"ranks": 2, "accumulation": 2}, {"order": 1}):
            found = compare(a, trained(seed=seed, **training, **changes))
            assert not found.parted, found.sentence
            assert found.compared == 10
            assert max(one.share for one in found.links) < 0.5


def test_the_growth_of_rounding_by_chaos_is_no_fault(trained: Trained) -> None:
    """With this rate the trainings are as far apart after 25 steps as two seeds: each step up to ten times further."""
    chaotic = {"model": "mlp", "optimizer": "momentum", "lr": 1.0, "clip": 0.0, "steps": 32}
    for seed in (1, 2, 3):
        found = compare(trained(seed=seed, **chaotic), trained(seed=seed, ranks=2, **chaotic))
        assert not found.parted, found.sentence
        assert found.blind_from is not None
        assert "rounding has grown too large to judge gradients by" in found.sentence
        later = compare(trained(seed=seed, **chaotic), trained(seed=seed, ranks=2, fault="rate", since=30, **chaotic))
        assert (later.link, later.step) == ("rates", 30)  # what is exact is judged all the same


def test_every_number_the_same(trained: Trained) -> None:
    found = compare(trained(), trained())
    assert found.sentence == "The trainings do not part: 10 steps (1 to 10) with every number the same."
    assert {one.state for one in found.links} == {"equal"}
    assert (found.step, found.layer, found.link, found.factor, found.cause) == (None,) * 5


def test_settings_that_move_no_number_are_listed_and_part_nothing(trained: Trained) -> None:
    found = compare(trained(), trained(settings={"gradient_clipping": 0.75, "zero_optimization.stage": 2}))
    assert not found.parted
    assert {one.name: one.shares for one in found.settings} == {
        "gradient_clipping": False,
        "zero_optimization.stage": True,
    }
    later = compare(trained(), trained(fault="rate", settings={"lr": 1.1e-3}))
    assert str(later.cause).endswith("(lr: 0.001 in A, 0.0011 in B)")


def test_a_setting_that_differs_is_named_where_nothing_parts(trained: Trained) -> None:
    together = "The trainings do not part: 10 steps (1 to 10) agree within rounding"
    shares = {"zero_optimization.stage": 2, "bucket_bytes_cap": 1}
    assert compare(trained(), trained(ranks=2, settings=shares)).sentence == f"{together}."
    other = trained(ranks=2, settings={**shares, "foreach": True, "autocast": "bfloat16"})
    assert compare(trained(settings={"foreach": False, "autocast": "off"}), other).sentence == (
        f'{together}; a setting differs (and 1 more): autocast: "off" in A, "bfloat16" in B.'
    )


def test_a_default_that_only_one_framework_has_is_listed_and_not_named(tmp_path: Path, trained: Trained) -> None:
    def having(origin: str) -> Callable[[trace.Head], trace.Head]:
        setting = {"find_unused_parameters": {"value": False, "from": origin}}
        return lambda head: replace(head, settings={**head.settings, **setting})

    by_default, by_hand = (
        compare(changed(trained(), tmp_path / origin, lambda step: step, having(origin)), trained(ranks=2))
        for origin in ("default", "yours")
    )
    assert [one.name for one in by_default.settings] == ["find_unused_parameters"]
    assert by_default.sentence == "The trainings do not part: 10 steps (1 to 10) agree within rounding."
    assert by_hand.sentence.endswith("a setting differs: find_unused_parameters: false in A, not named in B.")


def test_a_setting_that_one_training_lists_by_group_is_that_of_each_group_in_the_other(trained: Trained) -> None:
    listed = {
        "weight_decay of group 0": 0.1,
        "weight_decay of group 1": 0.0,
        "betas of group 0": 1,
        "betas of group 1": 1,
    }
    head = trace.read_trace(trained()).head
    one, other = (
        replace(head, settings={name: {"value": value, "from": "yours"} for name, value in settings.items()})
        for settings in (listed, {"weight_decay": 0.1, "betas": 1})
    )
    for a, b, values in ((one, other, "0.0 in A, 0.1 in B"), (other, one, "0.1 in A, 0.0 in B")):
        assert [found.sentence for found in setting_differences(a, b)] == [f"weight_decay of group 1: {values}"]


def test_another_kind_of_optimizer_explains_more_than_its_own_settings(trained: Trained) -> None:
    adam = trained(settings={"optimizer": "AdamW"})
    found = compare(adam, trained(optimizer="sgd", settings={"optimizer": "SGD", "momentum": 0.0}))
    assert (found.step, found.link) == (1, "update")
    assert str(found.cause).endswith('(optimizer: "AdamW" in A, "SGD" in B)')


def test_the_groups_whose_rate_differs_are_named(tmp_path: Path, trained: Trained) -> None:
    def slower(factors: tuple[float, ...]) -> Change:
        def change(step: trace.Step) -> trace.Step:
            return replace(step, rates=tuple(1e-3 * factor for factor in factors))

        return change

    a = changed(trained(), tmp_path / "a", slower((1.0, 1.0, 1.0)))
    for name, factors, said in (
        ("one", (1.0, 1.0, 2.0), "another rate of group 2: 0.001 in A, 0.002 in B"),
        ("two", (2.0, 1.0, 2.0), "another rate of groups 0, 2: 0.001 in A, 0.002 in B"),
        ("all", (2.0, 3.0, 4.0), "another rate of every group: 0.001 in A, 0.002 in B, as group 0's"),
    ):
        assert compare(a, changed(trained(), tmp_path / name, slower(factors))).cause == said


def test_a_direction_that_is_the_same_in_all_digits_is_not_called_another(tmp_path: Path, trained: Trained) -> None:
    def turn(step: trace.Step) -> trace.Step:
        assert step.local is not None
        noise = np.random.default_rng(1).standard_normal(step.local.layer_sketches.shape)
        size = np.linalg.norm(step.local.layer_sketches, axis=1, keepdims=True) / 8.0
        sketches = (step.local.layer_sketches + 0.002 * size * noise).astype(np.float32)
        return replace(step, local=replace(step.local, layer_sketches=sketches))

    found = compare(trained(), changed(trained(), tmp_path / "b", turn))
    assert (found.step, found.link) == (1, "local")
    assert found.cause == "the same loss, and another gradient in all layers, by 0.0019 of its length"


def test_a_loss_that_is_another_multiple_is_no_multiple_of_the_gradient(tmp_path: Path, trained: Trained) -> None:
    found = compare(
        trained(), changed(trained(), tmp_path / "b", lambda one: replace(one, loss=1.005 * (one.loss or 0)))
    )
    assert (found.step, found.link) == (1, "loss")
    assert "every gradient" not in str(found.cause)


def test_dropout_is_named_where_the_forward_differs(tmp_path: Path, trained: Trained) -> None:
    def other(step: trace.Step) -> trace.Step:
        return replace(step, loss=1.03 * (step.loss or 0.0))

    def dropping(head: trace.Head) -> trace.Head:
        return replace(head, settings={**head.settings, "dropout": {"value": "0.1 in 2 modules", "from": "yours"}})

    a = changed(trained(), tmp_path / "a", lambda step: step, dropping)
    both, one = (
        compare(a, changed(trained(), tmp_path / n, other, h)) for n, h in (("b", dropping), ("c", lambda h: h))
    )
    assert (both.link, one.link) == ("loss", "loss")
    masks = "; dropout (0.1 in 2 modules) draws other masks with another seed or number of ranks"
    assert str(both.cause).endswith(f"another forward or another loss{masks}")
    assert str(one.cause).endswith('another forward or another loss (dropout: "0.1 in 2 modules" in A, not named in B)')


def test_a_parameter_that_one_of_the_two_does_not_train_is_named(tmp_path: Path, trained: Trained) -> None:
    """Its gradient is compared with none; what it did not learn parts the others' at the next step."""

    def frozen(head: trace.Head) -> trace.Head:
        return replace(head, tensors=head.tensors[:-1])

    def without(step: trace.Step) -> trace.Step:
        assert step.weights is not None
        return replace(step, weights=step.weights[: -last.samples])

    last = trace.read_trace(trained()).head.tensors[-1]
    found = compare(trained(), changed(trained(fault="layer-scaled", since=2), tmp_path / "b", without, frozen))
    assert (found.step, found.link) == (2, "local")
    assert str(found.cause).endswith(f"; only A trains {last.name}")
    late = compare(trained(), changed(trained(fault="layer-scaled", since=3), tmp_path / "c", without, frozen))
    assert (late.step, "only A" in str(late.cause)) == (3, False)


def test_where_only_one_trains_a_tensor_no_other_forward_is_suspected(tmp_path: Path, trained: Trained) -> None:
    """B's loss is another at the next step, because its weights are."""

    def frozen(head: trace.Head) -> trace.Head:
        return replace(head, tensors=head.tensors[:-1])

    def without(step: trace.Step) -> trace.Step:
        assert step.weights is not None
        assert step.loss is not None
        loss = 1.2337 * step.loss if step.step == 2 else step.loss
        return replace(step, weights=step.weights[: -last.samples], loss=loss)

    last = trace.read_trace(trained()).head.tensors[-1]
    found = compare(trained(), changed(trained(), tmp_path / "b", without, frozen))
    assert (found.step, found.link) == (2, "loss")
    one = trace.read_trace(trained()).at(2).loss
    assert one is not None
    assert found.cause == f"only A trains {last.name}; the loss {one:.7g} is {1.2337 * one:.7g} in B"


def test_a_setting_of_the_model_explains_its_forward_and_not_the_optimizer(tmp_path: Path, trained: Trained) -> None:
    def of_model(eps: float) -> Callable[[trace.Head], trace.Head]:
        setting = {"model: eps": {"value": str(eps), "from": "framework"}}
        return lambda head: replace(head, settings={**setting, **head.settings})

    def louder(step: trace.Step) -> trace.Step:
        return replace(step, loss=1.03 * (step.loss or 0.0))

    a = changed(trained(), tmp_path / "a", lambda step: step, of_model(1e-5))
    forward = compare(a, changed(trained(), tmp_path / "b", louder, of_model(1e-12)))
    assert str(forward.cause).endswith('another forward or another loss (model: eps: "1e-05" in A, "1e-12" in B)')
    assert compare(trained(), a).settings == ()  # an older trace has none
    update = compare(a, changed(trained(fault="epsilon"), tmp_path / "c", lambda step: step, of_model(1e-12)))
    assert update.link == "update"
    assert str(update.cause).endswith("(eps: 1e-08 in A, 1e-06 in B)")


def test_other_rows_are_counted(tmp_path: Path, trained: Trained) -> None:
    """Of some files of the data that changed: here and there."""

    def at(*steps: int) -> Change:
        def change(step: trace.Step) -> trace.Step:
            assert step.rows is not None
            return replace(step, rows=replace(step.rows, hash="0" * 16)) if step.step in steps else step

        return change

    for name, steps, said in (
        ("one", (2,), "other rows in this step alone; the next 8 have the same"),
        ("some", (2, 6, 9), "other rows in this step and in 2 of the next 8, as where some of the data changed"),
        ("all", (2, 3, 5, 6, 7), "other rows from this step on"),
    ):
        found = compare(trained(), changed(trained(), tmp_path / name, at(*steps)))
        assert (found.step, found.link, found.cause) == (2, "rows", said)


def test_a_default_that_changed_is_named(tmp_path: Path, trained: Trained) -> None:
    def by_default(path: Path) -> Path:
        lines = (path / trace.NAME).read_text().splitlines()
        head = json.loads(lines[0])
        head["settings"]["gradient_clipping"]["from"] = "default"
        head["versions"]["deepspeed"] = "0.18.5" if path == trained() else "0.19.3"
        target = tmp_path / path.name
        target.mkdir()
        (target / trace.NAME).write_text("\n".join([json.dumps(head), *lines[1:]]) + "\n")
        return target

    found = compare(by_default(trained()), by_default(trained(fault="clipping")))
    assert found.link == "applied"
    changed = "(gradient_clipping: 1.0 by default in A, 0.5 by default in B, a default that changed)"
    assert str(found.cause).endswith(changed)
    assert found.versions == ("deepspeed 0.18.5 in A, 0.19.3 in B",)


def test_a_bias_within_the_bound_is_found_over_the_steps(trained: Trained) -> None:
    """1 % of one layer is below what bf16 may round to at one step."""
    training = {**MLP, "dtype": "bf16", "steps": 40}
    found = compare(trained(**training), trained(fault="reduced", since=7, ranks=2, **training))
    assert (found.link, found.layer) == ("reduced", "layers.2")
    assert abs(found.step - 7) <= 1  # type: ignore[operator]
    assert found.factor == pytest.approx(1.01, rel=2e-3)
    assert "leans to one side from here on" in str(found.cause)
    assert not compare(
        trained(**training), trained(fault="reduced", since=7, ranks=2, **training), tolerance=0.02
    ).parted
    assert not compare(trained(**training), trained(ranks=2, **training)).parted


def test_a_repetition_of_a_says_how_far_apart_they_may_be(trained: Trained) -> None:
    chaotic = {"model": "mlp", "optimizer": "momentum", "lr": 1.0, "clip": 0.0, "steps": 24}
    a, again, b = trained(**chaotic), trained(order=1, **chaotic), trained(ranks=2, **chaotic)
    assert not compare(a, b, again).parted
    faulty = trained(ranks=2, fault="layer-scaled", since=6, **chaotic)
    assert (compare(a, faulty, again).step, compare(a, faulty, again).link) == (6, "local")
    assert compare(a, faulty, a).step == 6  # every bit of A: growth is then measured from A and B


def test_a_tolerance_widens_the_bound(trained: Trained) -> None:
    scaled = trained(fault="layer-scaled")
    assert compare(trained(), scaled).parted
    assert not compare(trained(), scaled, tolerance=0.02).parted
    assert compare(trained(), trained(fault="gradient-scaled"), tolerance=0.02).parted
    with pytest.raises(ComparisonError, match=r"tolerance must be a relative difference from 0 to below 1, got 1\.5"):
        compare(trained(), scaled, tolerance=1.5)


def test_other_names_are_no_other_training(trained: Trained) -> None:
    renamed = trained(ranks=2, names=_renamed)
    found = compare(trained(), renamed)
    assert not found.parted
    assert found.left_out == ()
    scaled = compare(trained(), trained(fault="layer-scaled", since=4, names=_renamed))
    assert (scaled.step, scaled.layer) == (4, "layers.0")


def _renamed(name: str) -> str:
    return f"module.base.{name}".replace("layers", "h").replace("weight", "w")


# -- traces that are changed by hand -----------------------------------------------------------------------------------

Change = Callable[[trace.Step], trace.Step]


def changed(source: Path, target: Path, change: Change, head: Callable[[trace.Head], trace.Head] = lambda h: h) -> Path:
    """A copy of a trace with other steps."""
    found = trace.read_trace(source)
    target.mkdir()
    lines = [trace.write_head(head(found.head)), *(trace.write_step(change(step)) for step in found)]
    (target / trace.NAME).write_text("".join(f"{line}\n" for line in lines))
    return target


def test_a_choice_that_rounding_tips_is_no_parting(tmp_path: Path, trained: Trained) -> None:
    def tip(step: trace.Step) -> trace.Step:
        if step.step != 5 or step.local is None:
            return step
        noise = np.random.default_rng(1).standard_normal(step.local.layer_sketches.shape)
        size = np.linalg.norm(step.local.layer_sketches, axis=1, keepdims=True) / 8.0
        sketches = (step.local.layer_sketches + 0.005 * size * noise).astype(np.float32)
        return replace(step, local=replace(step.local, layer_sketches=sketches))

    found = compare(trained(), changed(trained(ranks=2), tmp_path / "b", tip))
    assert not found.parted
    assert (
        "step 5: a small difference that was gone at the next, as a choice tipped by rounding makes" in found.left_out
    )


def test_rows_in_another_order(tmp_path: Path, trained: Trained) -> None:
    rows = {step.step: step.rows for step in trace.read_trace(trained())}

    def shifted(step: trace.Step) -> trace.Step:
        return replace(step, rows=rows.get(step.step + 1, step.rows) if step.step >= 4 else step.rows)

    found = compare(trained(), changed(trained(), tmp_path / "b", shifted))
    assert (found.step, found.link) == (4, "rows")
    assert found.cause == "B's rows of this step are those of A's step 5: the order is shifted"

    def larger(step: trace.Step) -> trace.Step:
        return replace(step, rows=replace(step.rows, count=32, hash="0" * 16), samples=2 * (step.samples or 0))

    other = compare(trained(), changed(trained(), tmp_path / "c", larger))
    assert (other.step, other.link, other.paired_by) == (2, "rows", "samples")
    assert other.cause == "a step takes 16 rows in A (4 ranks, 1 micro-batch) and 32 rows in B (4 ranks, 1 micro-batch)"


def test_steps_that_are_numbered_otherwise_are_paired_by_the_rows(tmp_path: Path, trained: Trained) -> None:
    def later(step: trace.Step) -> trace.Step:
        return replace(step, step=step.step + 100)

    found = compare(trained(), changed(trained(ranks=2), tmp_path / "b", later))
    assert (found.parted, found.paired_by, found.compared) == (False, "samples", 10)
    fault = trained(ranks=2, fault="rate", since=6)
    late = compare(trained(), changed(fault, tmp_path / "c", later))
    assert (late.step, late.step_of_b) == (6, 106)
    assert "at step 6 (106 of B)" in late.sentence


def test_a_run_that_broke_off_is_not_called_the_same_without_a_word(tmp_path: Path, trained: Trained) -> None:
    text = (trained() / trace.NAME).read_text()
    (tmp_path / trace.NAME).write_text(text[: int(0.75 * len(text))])
    found = compare(trained(), tmp_path)
    assert found.beyond == ("3 steps of A that B has not", "1 torn or foreign line of B's trace")
    said = "The trainings do not part: 7 steps (1 to 7) with every number the same; left out: "
    assert found.sentence == f"{said}{', '.join(found.beyond)}."


def test_a_trace_of_every_third_step(trained: Trained) -> None:
    found = compare(trained(), trained(ranks=2, interval=3))
    assert (found.parted, found.compared) == (False, 4)
    assert found.left_out == ("6 steps of A that B has not",)
    assert found.sentence.endswith("agree within rounding; left out: 6 steps of A that B has not.")
    assert (late := compare(trained(), trained(interval=3, fault="decay"))).link == "update"
    assert late.step == 1


@pytest.mark.parametrize("gone", ["rows", "loss", "local", "reduced", "applied", "weights", "rates"])
def test_what_is_not_known_is_left_out(tmp_path: Path, trained: Trained, gone: str) -> None:
    def forget(step: trace.Step) -> trace.Step:
        return replace(step, **{gone: () if gone == "rates" else None})

    found = compare(trained(), changed(trained(ranks=2), tmp_path / "b", forget))
    assert not found.parted
    assert any(line.endswith("not in both traces") and gone in line for line in found.left_out)
    assert {one.link for one in found.links if one.state == "unknown"} >= {gone}
    fault = "rate" if gone != "rates" else "layer-scaled"
    assert compare(trained(), changed(trained(fault=fault, since=3), tmp_path / "c", forget)).step == 3


def test_not_a_number_in_one_of_the_two(tmp_path: Path, trained: Trained) -> None:
    def lost(step: trace.Step) -> trace.Step:
        return replace(step, loss=float("nan")) if step.step == 4 else step

    found = compare(trained(), changed(trained(), tmp_path / "b", lost))
    assert (found.step, found.link) == (4, "loss")
    assert "in A and nan in B" in str(found.cause)
    both = compare(changed(trained(), tmp_path / "a", lost), tmp_path / "b")
    assert not both.parted


def test_weights_that_another_checkpoint_brought(tmp_path: Path, trained: Trained) -> None:
    """B goes on at step 6 with the weights of another training."""
    lines, other = [], trace.read_trace(trained(seed=2))
    for step in trace.read_trace(trained()):
        if step.step == 6:
            lines.append(trace.write_head(trace.read_trace(trained()).head))
        lines.append(trace.write_step(replace(step, weights=other.at(step.step).weights) if step.step >= 6 else step))
    path = tmp_path / "b" / trace.NAME
    path.parent.mkdir()
    path.write_text("\n".join([trace.write_head(other.head), *lines]) + "\n")
    found = compare(trained(), path)
    assert (found.step, found.link, found.layer) == (6, "weights", "embedding")
    assert str(found.cause).startswith("other weights, in ")
    assert str(found.cause).endswith("; B went on from a checkpoint right before")


def test_a_healthy_restart(tmp_path: Path, trained: Trained) -> None:
    found = trace.read_trace(trained(ranks=2))
    lines = [trace.write_head(found.head)]
    for step in found:
        lines += [trace.write_head(found.head)] * (step.step == 6) + [trace.write_step(step)]
    (tmp_path / trace.NAME).write_text("\n".join(lines) + "\n")
    assert not compare(trained(), tmp_path).parted


def test_runs_that_both_went_on_from_a_checkpoint(tmp_path: Path, trained: Trained) -> None:
    def later(source: Path, target: Path) -> Path:
        found = trace.read_trace(source)
        target.mkdir()
        lines = [trace.write_head(found.head), *(trace.write_step(found.at(n)) for n in range(5, 11))]
        (target / trace.NAME).write_text("".join(f"{line}\n" for line in lines))
        return target

    a = later(trained(), tmp_path / "a")
    assert not compare(a, later(trained(ranks=2), tmp_path / "b")).parted
    other = compare(a, later(trained(fault="decay"), tmp_path / "c"))
    assert (other.step, other.link) == (5, "update")
    seed = compare(a, later(trained(fault="initial"), tmp_path / "d"))
    assert (seed.step, seed.link) == (5, "weights")


def test_models_that_have_nothing_in_common(tmp_path: Path, trained: Trained) -> None:
    found = compare(trained(), trained(**MLP))
    assert (found.parted, found.step, found.link) == (True, 1, "settings")
    assert found.sentence.startswith("The trainings part before step 1, in the settings: the models have no tensor in")


def test_what_cannot_be_compared_is_one_sentence(tmp_path: Path, trained: Trained) -> None:
    with pytest.raises(TraceError, match="does not exist"):
        compare(trained(), tmp_path / "nothing")
    far = changed(trained(), tmp_path / "far", lambda step: replace(step, step=step.step + 500, samples=None))
    with pytest.raises(ComparisonError) as raised:
        compare(trained(), far)
    assert str(raised.value) == (
        "A and B have no step in common: steps 1 to 10 in A, steps 501 to 510 in B; trace the same steps"
    )
    for text, wrong in (("[1]", "is no object of names"), ("{", "is not JSON")):
        (tmp_path / "map.json").write_text(text)
        with pytest.raises(ComparisonError, match=wrong):
            compare(trained(), trained(), names=tmp_path / "map.json")
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / trace.NAME).write_text(trace.write_head(trace.read_trace(trained()).head) + "\n")
    with pytest.raises(ComparisonError, match="none in B"):
        compare(trained(), empty)


def test_the_result_is_frozen_and_complete(trained: Trained) -> None:
    found = compare(trained(), trained(fault="sign", since=6))
    assert isinstance(found, TrainingComparison)
    fields: dict[str, Any] = vars(found)
    assert {"parted", "step", "layer", "link", "factor", "cause", "left_out", "sentence"} <= set(fields)
    with pytest.raises(AttributeError):
        found.step = 1  # type: ignore[misc]
    assert found.equal_until == 5
    states = {one.link: (one.state, one.step) for one in found.links}
    assert states["loss"][0] in ("rounding", "follows", "equal")
    assert states["local"] == ("parts", 6)
    assert states["reduced"] == ("follows", 6)
    assert states["rates"] == ("equal", None)


def test_one_training_is_enough_for_a_test_of_the_writer(tmp_path: Path) -> None:
    one = write(Training(steps=2, model="mlp"), tmp_path / "a")
    assert not compare(one, one).parted


@pytest.mark.parametrize(
    ("name", "shares"),
    [
        ("lora rank", False),
        ("model: logit_scale", False),
        ("model: output_dropout", False),
        ("ranks", True),
        ("LOCAL_RANK", True),
        ("output_dir", True),
        ("logging_steps", True),
        ("hosts_file", True),
    ],
)
def test_a_setting_that_only_shares_the_work_is_known_by_whole_words(name: str, shares: bool) -> None:
    assert bool(SHARES.search(name)) is shares


def test_a_word_of_a_setting_is_no_part_of_another() -> None:
    """ "eps" stands in "steps", which said that the schedule's length has moved an update."""
    found = [SettingDifference(name, 1, 2, "yours", "yours", False) for name in ("total_num_steps", "optimizer eps")]
    named = explaining("update", found)
    assert named is not None
    assert named.name == "optimizer eps"
    assert explaining("update", found[:1]) is None
