"""transformers' Trainer and accelerate, observed: losses as plainly computed, the same weights, and a resume."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

import ds_silent
from ds_silent.capture.forwards import mean_of, times_its_share
from ds_silent.config import ConfigError
from ds_silent.observing.observe import given_block
from ds_silent.practice.ranks import RankBroke
from ds_silent.sinks.jsonl import read_events, read_metrics
from tests.frameworks.test_ways_in import free_port, run
from tests.integrations.hf_training import HFCase, HFTrace, Rows, as_launched, model_of, train, trainer_of
from tests.support.distributed import run_on_kept_ranks
from tests.support.interpreter import interpreter

DISPATCHED = {"use_configured_state": True, "dispatch_batches": True, "split_batches": False}
EXAMPLE = Path(__file__).parents[2] / "launch" / "examples" / "huggingface.py"
CASES = {
    "one micro-batch": HFCase(),
    "rows of like lengths together": HFCase(grouped=True),
    "batches that rank 0 deals": HFCase(rows=70, epochs=3, named={"accelerator_config": DISPATCHED}),
    "accumulation": HFCase(accumulation=2, dropout=0.1),
    "a last step of fewer micro-batches": HFCase(accumulation=3, rows=64),
    "rows that even_batches repeats": HFCase(rows=70, epochs=3),
    "unused parameters are not looked for": HFCase(accumulation=2, named={"ddp_find_unused_parameters": False}),
    "a loss of one's own": HFCase(accumulation=3, rows=64, loss="given", uneven=False),
}


def ran(function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """On 2 ranks, observed. What a release before transformers 5 breaks without ds_silent too is skipped."""
    try:
        return run_on_kept_ranks(function, 2, (*arguments, True), timeout=280)
    except RankBroke:
        if int(version("transformers").split(".")[0]) >= 5:
            raise
        try:
            run_on_kept_ranks(function, 2, (*arguments, False), timeout=280)
        except RankBroke as error:
            pytest.skip(f"breaks without ds_silent too: {str(error).strip().splitlines()[-1]}")
        raise


def both(cases: tuple[HFCase, ...], directory: str, observed: bool) -> list[tuple[HFTrace, HFTrace]]:
    """On every rank: each case observed, and not."""
    return [
        (train(case, Path(directory, f"{place}-on"), observed), train(case, Path(directory, f"{place}-off"), False))
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
    counts_right = int(version("transformers").split(".")[0]) >= 5  # 4 counts the first labels of rows, too
    for place, record in enumerate(records):
        assert record["loss"]["per_rank"] == pytest.approx([rank[0].losses[place] for rank in ranks], rel=1e-5)
        assert record["integrity"]["relative_error"] <= record["integrity"]["rounding_bound"]
        if counts_right:  # each label of the step counts alike, whoever holds it
            objective = record["objective"]
            assert objective["weight_sum"] == pytest.approx(1.0, rel=1e-4)
            assert objective["weight_max"] == pytest.approx(objective["weight_min"], rel=1e-4)
    told = [(event["kind"], event["severity"], event["where"]) for event in ranks[0][0].events]
    assert set(told) <= (set() if counts_right else {("objective-mismatch", "info", "loss")})


def quartered(directory: str, observed: bool) -> HFTrace:
    """On rank 1 the loss is a quarter of what the Trainer makes it."""
    from transformers import Trainer

    original = Trainer.compute_loss

    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        return (0.25 * found[0], *found[1:]) if isinstance(found, tuple) else 0.25 * found

    if torch.distributed.get_rank() == 1:
        Trainer.compute_loss = compute_loss
    try:
        return train(HFCase(accumulation=2, steps=3), Path(directory), observed)
    finally:
        Trainer.compute_loss = original


def test_a_loss_of_a_quarter_on_one_rank_is_told_at_the_first_step(tmp_path: Path) -> None:
    found = [event for event in ran(quartered, str(tmp_path))[0].events if event["severity"] != "info"]
    assert [(e["kind"], e["step"], e["ranks"]) for e in found] == [("objective-mismatch", 1, [0, 1])]
    assert "MulBackward0 x 0.25" in found[0]["message"]


UNDER_DEEPSPEED = {
    "stage 0, the callback's block": HFCase(stage=0, accumulation=2),
    "stage 2, the callback's block": HFCase(stage=2, accumulation=3),
    "stage 1, a loss of one's own": HFCase(stage=1, accumulation=2, loss="given", uneven=False),
}


def resumed(case: HFCase, directory: str, observed: bool) -> list[HFTrace]:
    """On every rank: 4 steps and a checkpoint, the rest in a new Trainer; then all of it at once, unobserved."""
    saved = {**case.named, "save_strategy": "steps", "save_steps": 4}
    first = replace(case, steps=4, named={**saved, "lr_scheduler_type": "constant"})
    folder = Path(directory)
    return [
        train(first, folder, observed),
        train(replace(first, steps=8), folder, observed, resume=True),
        train(replace(first, steps=8), folder / "plain", False),
    ]


@pytest.mark.parametrize("stage", [None, 1])
@pytest.mark.long
def test_a_checkpoint_goes_on(stage: int | None, tmp_path: Path) -> None:
    """Records, steps and rows go on behind the checkpoint; nothing is said that the whole training would not say."""
    found = ran(resumed, HFCase(accumulation=2, stage=stage, epochs=3), str(tmp_path))
    first, second, plain = found[0]
    assert [record["step"] for record in first.records] == [1, 2, 3, 4]
    assert [record["step"] for record in second.records] == list(range(1, 9))
    assert [record["samples"] for record in second.records] == [16 * step for step in range(1, 9)]
    assert second.events == ()
    assert [rank[1].weights for rank in found] == [rank[2].weights for rank in found]
    assert first.losses + second.losses == plain.losses
    for place, record in enumerate(second.records):
        assert record["loss"]["per_rank"] == pytest.approx([rank[2].losses[place] for rank in found], rel=1e-5)


def from_unobserved(directory: str, observed: bool) -> HFTrace:
    case = HFCase(steps=4, named={"save_strategy": "steps", "save_steps": 4})
    train(case, Path(directory), False)
    return train(replace(case, steps=8), Path(directory), observed, resume=True)


def test_a_checkpoint_of_an_unobserved_training(tmp_path: Path) -> None:
    """The Trainer asks such a checkpoint for the callback's state, and cannot save again where there is none."""
    trace = ran(from_unobserved, str(tmp_path))[0]
    assert [record["step"] for record in trace.records] == [5, 6, 7, 8]
    assert trace.records[0]["samples"] == 5 * 8
    assert trace.events == ()


def ds_config_goes_first(directory: str) -> tuple[bool, bool]:
    """On every rank: whether records are where the ds_config's block says, and where the callback's does."""
    from ds_silent.integrations.huggingface import SilentConsistencyCallback

    as_launched(deepspeed=True)
    own, other = Path(directory, "own"), Path(directory, "other")
    callback = SilentConsistencyCallback({"output_dir": str(other)})
    block = {"output_dir": str(own), "tensorboard": False}
    trainer_of(HFCase(stage=1, steps=2), Path(directory), [callback], block).train()
    return own.exists(), other.exists()


def test_the_block_of_the_ds_config_goes_first(tmp_path: Path) -> None:
    assert run_on_kept_ranks(ds_config_goes_first, 2, (str(tmp_path),), timeout=280)[0] == (True, False)


def auto_and_the_log(directory: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[str]]:
    """On every rank: the Trainer's log, what a reporter was given, and the records' directories."""
    from transformers import TrainerCallback

    from ds_silent.integrations.huggingface import SilentConsistencyCallback

    class Reporter(TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.given: list[dict[str, Any]] = []

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            self.given.append(dict(logs))

    as_launched(deepspeed=True)
    reporter = Reporter()
    block = {
        "output_dir": f"{directory}/own",
        "interval": "auto",
        "tensorboard": False,
        "direction": {"method": "auto"},
    }
    case = HFCase(stage=1, steps=4, named={"logging_steps": 1})
    trainer = trainer_of(case, Path(directory), [reporter, SilentConsistencyCallback(log=True)], block)
    trainer.train()
    return trainer.state.log_history, reporter.given, [str(one) for one in Path(directory).glob("**/metrics.jsonl")]


def test_auto_is_the_default_and_the_log_has_the_numbers(tmp_path: Path) -> None:
    found = run_on_kept_ranks(auto_and_the_log, 2, (str(tmp_path),), timeout=280)
    history, given, written = found[0]
    assert written == [str(tmp_path / "own" / "metrics.jsonl")]
    records = list(read_metrics(tmp_path / "own" / "metrics.jsonl"))
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    for logged in (history, given):
        stds = [one["silent/loss/std"] for one in logged if "silent/loss/std" in one]
        assert stds == pytest.approx([record["loss"]["std"] for record in records[:3]])  # a record comes one step later
        assert not [key for one in logged for key in one if key.startswith("silent/per_")]
    assert not [key for one in found[1][0] for key in one if key.startswith("silent/")]  # the rank that writes has them


def alone(directory: str) -> list[HFTrace]:
    case = HFCase(steps=2)
    return [train(case, Path(directory, "on"), True), train(case, Path(directory, "off"), False)]


def test_one_process_is_told_and_trains_on(tmp_path: Path) -> None:
    observed, plain = run_on_kept_ranks(alone, 1, (str(tmp_path),), timeout=120)[0]
    assert observed.weights == plain.weights
    assert not (tmp_path / "on" / "silent").exists()


def test_the_trainer_under_deepspeed(tmp_path: Path) -> None:
    cases = tuple(UNDER_DEEPSPEED.values())
    found = ran(both, cases, str(tmp_path))
    for place, case in enumerate(cases):
        check(case, [rank[place] for rank in found])


def test_the_trainer_under_ddp(tmp_path: Path) -> None:
    cases = tuple(CASES.values())
    found = ran(both, cases, str(tmp_path))
    for place, case in enumerate(cases):
        check(case, [rank[place] for rank in found])


def by_hand(directory: str) -> dict[str, Any]:
    """On every rank: a loop of accelerate's, saved after 3 steps and gone on in a second one; rank 0's records."""
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    as_launched(deepspeed=False)
    from accelerate.tracking import GeneralTracker, on_main_process

    class Kept(GeneralTracker):  # type: ignore[misc]
        name, requires_logging_directory, tracker = "kept", False, None
        seen: dict[int, dict[str, float]] = {}  # noqa: RUF012 - of both accelerators

        @on_main_process
        def log(self, values: dict[str, float], step: int | None = None, **_: Any) -> None:
            self.seen.setdefault(int(step or 0), {}).update(values)

        def store_init_configuration(self, values: dict[str, Any]) -> None:
            pass

    losses, events = [], []
    for begins, ends in ((0, 3), (3, 6)):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, log_with=Kept())
        accelerator.init_trackers("test")
        model = model_of()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader = DataLoader(Rows(96), batch_size=4)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        block = {"output_dir": directory, "tensorboard": False}
        observer = ds_silent.attach(model, block, optimizer=optimizer, loader=loader, accumulation=2)
        assert observer is not None
        accelerator.register_for_checkpointing(observer)
        if begins:
            accelerator.load_state(f"{directory}/saved")
        micro = []
        for batch in itertools.islice(loader, 2 * begins, 2 * ends):
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                micro.append(float(loss.detach()))
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                if accelerator.sync_gradients and observer.last_record is not None:
                    accelerator.log(observer.scalars, step=observer.last_record.step)
        losses += [sum(pair) / 2 for pair in zip(micro[::2], micro[1::2], strict=True)]
        if not begins:
            accelerator.save_state(f"{directory}/saved")
        observer.close()
    records = []
    if accelerator.is_main_process:
        records = list(read_metrics(Path(directory, "metrics.jsonl")))
        events = [event for event in read_events(Path(directory, "events.jsonl")) if event["severity"] != "info"]
    return {"losses": losses, "records": records, "events": events, "tracked": Kept.seen}


def test_a_loop_of_accelerates_own(tmp_path: Path) -> None:
    found = run_on_kept_ranks(by_hand, 2, (str(tmp_path),), timeout=200)
    assert [record["step"] for record in found[0]["records"]] == list(range(1, 7))
    for place, record in enumerate(found[0]["records"]):
        assert record["loss"]["per_rank"] == pytest.approx([rank["losses"][place] for rank in found], rel=1e-6)
        assert record["samples"] == 16 * (place + 1)
    assert found[0]["events"] == []
    tracked = found[0]["tracked"]
    assert list(tracked) == [1, 2, 4, 5]  # a record comes one step later
    assert all(
        one["silent/loss/std"] == pytest.approx(found[0]["records"][step - 1]["loss"]["std"])
        for step, one in tracked.items()
    )


@pytest.mark.long
def test_the_example_under_torchrun(tmp_path: Path) -> None:
    command = [interpreter(), "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", free_port()]
    status, said = run([*command, str(EXAMPLE), "--epochs", "1", "--output-dir", str(tmp_path / "out")], tmp_path)
    assert status == 0, said
    records = list(read_metrics(tmp_path / "out" / "metrics.jsonl"))
    assert [record["step"] for record in records] == list(range(1, 9))
    assert all(abs(record["loss"]["mean"] - 4.2) < 0.5 for record in records)  # log 64 = 4.16, and not half of it
    assert [
        event["kind"] for event in read_events(tmp_path / "out" / "events.jsonl") if event["severity"] != "info"
    ] == []


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("ignored", [0, 3])
def test_the_mean_of_a_share(reduction: str, ignored: int) -> None:
    """Models that are given ``num_items_in_batch`` divide by it; some take the mean all the same."""
    labels, logits = torch.arange(8), torch.randn(8, 10, requires_grad=True)
    labels[:ignored] = -100
    loss = torch.nn.functional.cross_entropy(logits, labels, reduction=reduction) / (40 if reduction == "sum" else 1)
    factor = times_its_share(torch.nn.Linear(1, 1), {"num_items_in_batch": torch.tensor(40), "labels": labels})
    expected = -torch.stack([logits.detach()[i].log_softmax(0)[i] for i in range(ignored, 8)]).mean()
    torch.testing.assert_close(mean_of(loss, factor), expected)


def test_auto_in_the_block_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r'interval.*"auto"'):
        given_block({"interval": "auto"})
