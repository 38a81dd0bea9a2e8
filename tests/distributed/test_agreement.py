"""All ranks agree before they observe: who has what is one sentence on every rank, and nobody waits for ever."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import deepspeed
import torch
import torch.distributed as dist

import ds_silent
from ds_silent.distributed import agreement
from ds_silent.distributed.agreement import Statement, Verdict, agree
from ds_silent.observing import start as observing_start
from ds_silent.sinks.jsonl import read_events, read_metrics
from ds_silent.text import TORCH
from tests.support.distributed import run_on_kept_ranks
from tests.support.training import Case, Probe, engine_of, one_step

REFUSED = (ds_silent.ConfigError, ds_silent.SinkError)
INVALID = {"direction": {"sketch_size": 1000}}


# -- blocks that differ ------------------------------------------------------------------------------


DIFFERENT: list[tuple[dict[str, Any] | None, str]] = [  # the block of rank 1, and what is said of it
    (INVALID, "rank 1: silent_consistency.direction.sketch_size must"),
    (None, "rank 1: no silent_consistency block"),
    ({"enabled": False}, "rank 1: no silent_consistency block"),
    ({"direction": {"sketch_size": 256}}, "silent_consistency.direction.sketch_size is 1024 on"),
    ({"interval": 7}, "silent_consistency.interval is 1 on ranks 0, 2, 7 on rank 1"),
    ({"preflight": False}, "silent_consistency.preflight is true on ranks 0, 2, false on rank 1"),
    ({"respond": {"on_aggregation_error": "retry"}}, 'on_aggregation_error is "report" on ranks 0, 2, "retry" on'),
    ({"resync": {"mode": "periodic"}, "reduction": "ordered"}, 'silent_consistency.reduction is "native" on'),
]


def refused(config: dict[str, Any]) -> tuple[str | None, bool | None]:
    """What starting raises here, and whether this rank is the one that tells."""
    try:
        engine_of(config)
    except REFUSED as error:
        return str(error), getattr(error, "teller", None)
    return None, None


def blocks(directory: str) -> list[tuple[str | None, bool | None]]:
    """Rank 1 has another block, the others a good one."""
    said = []
    for of_rank_1, _ in DIFFERENT:
        config = Case().config(Path(directory), enabled=True)
        if dist.get_rank() == 1 and of_rank_1 is None:
            del config["silent_consistency"]
        elif dist.get_rank() == 1:
            config["silent_consistency"] |= of_rank_1
        said.append(refused(config))
    return said


def test_blocks_that_differ_end_all_ranks_with_the_same_sentence(tmp_path: Path) -> None:
    ranks = run_on_kept_ranks(blocks, 3, (str(tmp_path),), timeout=120)
    for (_, sentence), results in zip(DIFFERENT, zip(*ranks, strict=True), strict=True):
        (said, *others), tells = zip(*results, strict=True)
        assert said is not None
        assert sentence in said
        assert "\n" not in said
        assert "rank 1" in said
        assert others == [said] * 2
        assert tells.count(True) == 1


def stages_of_one_rank(directory: str) -> list[str | None]:
    """What stands beside the block is refused on one rank only."""
    said = []
    for stage in (1, 3):
        config = Case(stage=stage).config(Path(directory), enabled=True)
        if dist.get_rank() == 1:
            config["silent_consistency"]["respond"] = {"on_replica_drift": "majority"}
        said.append(refused(config)[0])
    return said


def test_a_refusal_of_one_rank_is_that_of_all(tmp_path: Path) -> None:
    first, second = run_on_kept_ranks(stages_of_one_rank, 2, (str(tmp_path),), timeout=60)
    assert first == second
    for said in first:
        assert "rank 1: silent_consistency.respond.on_replica_drift" in said
        assert "rank 0: nothing wrong" in said


def output_dirs(directory: str) -> Any:
    config = Case().config(Path(directory) / f"rank-{dist.get_rank()}", enabled=True)
    engine = engine_of(config)
    one_step(engine, torch.Generator().manual_seed(dist.get_rank()))
    observer = ds_silent.observer_of(engine)
    assert observer is not None
    observer.close()
    return sorted(os.listdir(directory))


def test_only_the_writing_rank_s_output_dir_counts(tmp_path: Path) -> None:
    run_on_kept_ranks(output_dirs, 2, (str(tmp_path),))
    assert os.listdir(tmp_path) == ["rank-0"]
    assert [record["step"] for record in read_metrics(tmp_path / "rank-0" / "metrics.jsonl")] == [1]
    assert not list(read_events(tmp_path / "rank-0" / "events.jsonl"))


def writers_own(directory: str) -> list[Any]:
    """A map that rank 0 cannot read, an address that it does not have, and either beside a true difference."""
    said = []
    for number, more in enumerate(({}, {}, {"interval": 1 + dist.get_rank()})):
        config = Case().config(Path(directory, str(number)), enabled=True)
        key, value = ("places", f"{directory}/none.json") if number == 0 else ("alerts", [{"to": "env:NO_SUCH_NAME"}])
        config["silent_consistency"] |= {key: value, **more}
        said.append(refused(config))
    return said


def test_what_only_the_writing_rank_looks_at_is_no_disagreement(tmp_path: Path) -> None:
    first, second = run_on_kept_ranks(writers_own, 2, (str(tmp_path),), timeout=60)
    (places, tells), (alerts, _), (both, _) = first
    assert places.startswith(f'silent_consistency.places "{tmp_path}/none.json" cannot be read (No such file')
    assert alerts.startswith(
        "silent_consistency.alerts[0].to must name an environment variable that is set on the host"
    )
    assert both.startswith("the ranks do not agree on silent_consistency, so none of them starts: rank 0: silent")
    assert [text for text, _ in first] == [text for text, _ in second]
    assert [tells, second[0][1]] == [True, False]


def versions(directory: str) -> str | None:
    with patch.object(observing_start, "VERSION", "9.9" if dist.get_rank() == 2 else observing_start.VERSION):
        return refused(Case().config(Path(directory), enabled=True))[0]


def test_another_version_on_one_rank_is_told(tmp_path: Path) -> None:
    for said in run_on_kept_ranks(versions, 3, (str(tmp_path),), timeout=60):
        assert said is not None
        assert '"9.9" on rank 2' in said


def other_parameters(directory: str) -> None:
    """Rank 1 trains one parameter and freezes all others."""
    torch.manual_seed(1234)
    model = Probe(None)
    for parameter in list(model.parameters())[1:] if dist.get_rank() else []:
        parameter.requires_grad_(False)
    config = Case().config(Path(directory), enabled=True)
    engine, *_ = ds_silent.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    observer = ds_silent.observer_of(engine)
    assert observer is not None
    observer.close()


def test_parameters_that_only_some_ranks_train_are_named(tmp_path: Path) -> None:
    """There were two hashes."""
    run_on_kept_ranks(other_parameters, 2, (str(tmp_path),), timeout=60)
    [event] = [event for event in read_events(tmp_path / "events.jsonl") if event["kind"] == "observer-off"]
    assert event["message"].startswith(
        "Nothing is observed, because the ranks would not send the same: parameter layers.0.0.bias is "
        '"trainable, 96" on rank 0, "frozen" on rank 1; parameter layers.0.0.weight is "trainable, 96x24" on rank 0'
    )
    assert event["message"].endswith('"frozen" on rank 1; and 9 more parameters differ.')
    assert event["message"].count('is "trainable') == 3
    assert event["remedy"].endswith("start every rank with the same model and configuration.")


# -- ranks that do not come ---------------------------------------------------------------------------


def attach_on_some(directory: str, seconds: str) -> str | None:
    os.environ[agreement.TIMEOUT_VARIABLE] = seconds
    config = Case().config(Path(directory), enabled=False)
    model = Probe(None)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    said = None
    if dist.get_rank() != 1:
        try:
            ds_silent.attach(engine, {"output_dir": str(Path(directory) / "on"), "tensorboard": False})
        except REFUSED as error:
            said = str(error)
    one_step(engine, torch.Generator().manual_seed(1))  # the training itself is not harmed
    return said


def test_attach_on_some_ranks_only_names_who_did_not_come(tmp_path: Path) -> None:
    first, second, third = run_on_kept_ranks(attach_on_some, 3, (str(tmp_path), "2"), timeout=60)
    assert second is None
    assert first == third
    assert first is not None
    assert first.startswith("rank 1 did not come to ds_silent within 2 s, ranks 0, 2 did")
    assert agreement.TIMEOUT_VARIABLE in first


def without_block_on_some(directory: str) -> list[Any]:
    """Nobody has a block, and one rank does not come through ds_silent: DeepSpeed's behaviour, whatever it takes."""
    os.environ[agreement.TIMEOUT_VARIABLE] = "1"
    config = Case().config(Path(directory), enabled=False)
    torch.manual_seed(1234)
    model = Probe(None)
    make = deepspeed.initialize if dist.get_rank() else ds_silent.initialize
    engine, *_ = make(model=model, model_parameters=model.parameters(), config=config)
    one_step(engine, torch.Generator().manual_seed(1))
    return [ds_silent.observer_of(engine), "backward" in engine.__dict__]


def test_without_a_block_nobody_is_refused(tmp_path: Path) -> None:
    assert run_on_kept_ranks(without_block_on_some, 2, (str(tmp_path),), timeout=60) == [[None, False]] * 2


# -- the protocol by itself ---------------------------------------------------------------------------


class Counting:
    """A store that counts its operations."""

    def __init__(self, store: Any):
        self._store, self.operations = store, 0

    def __getattr__(self, name: str) -> Any:
        self.operations += 1
        return getattr(self._store, name)


def meet(statements: list[Statement]) -> tuple[list[Verdict], list[int]]:
    """Every statement in a thread of its own, over one store in this process."""
    shared = dist.HashStore()
    verdicts: list[Any] = [None] * len(statements)
    stores = [Counting(shared) for _ in statements]

    def one(rank: int) -> None:
        meeting = agreement._Meeting(stores[rank], "test", len(statements), rank, TORCH)
        verdicts[rank] = meeting.hold(statements[rank])

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(statements))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    return verdicts, [store.operations for store in stores]


def test_agreement_takes_a_handful_of_operations_per_rank() -> None:
    counts = {}
    for ranks in (2, 64):
        verdicts, operations = meet([Statement(True, values={"a": 1})] * ranks)
        assert verdicts == [Verdict()] * ranks
        counts[ranks] = max(operations)
    assert counts[2] == counts[64] <= 10


def test_one_of_many_is_named_and_only_one_rank_reads_everybody() -> None:
    statements = [Statement(True, values={"a": 1, "b": 2 if rank == 41 else 3}) for rank in range(64)]
    verdicts, operations = meet(statements)
    assert set(verdicts) == {verdicts[0]}
    assert verdicts[0].odd == (41,)
    assert verdicts[0].sentence == "b is 3 on ranks 0, 1, 2, 3, 4, 5, 6, 7 and 55 more, 2 on rank 41"
    assert sorted(operations)[-2] <= 10 < max(operations)


def test_where_no_majority_exists_nobody_is_odd() -> None:
    verdicts, _ = meet([Statement(True, values={"a": rank}) for rank in range(2)])
    assert verdicts[0].odd == ()
    assert verdicts[0].sentence == "a is 0 on rank 0, 1 on rank 1"


def alone() -> Any:
    return agree(dist.group.WORLD, "block", Statement(True, refusal="no"))


def test_a_single_rank_needs_nobody() -> None:
    assert run_on_kept_ranks(alone, 1) == [Verdict("no", refused=True)]
