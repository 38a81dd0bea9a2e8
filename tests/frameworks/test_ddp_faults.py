"""What is told of DistributedDataParallel and FSDP2 trainings in which something is wrong, and of what looks so."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp  # fully_shard is in it from torch 2.6 on
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ds_silent
from benchmarks.probe import LENGTH, ROWS, VOCABULARY
from ds_silent.frameworks.torch_common import masters_of
from ds_silent.runs import read_run, verdict_of
from ds_silent.sinks.jsonl import read_events, read_metrics
from tests.support.ddp_training import DDPCase, FSDP2Case, build, build_fsdp2
from tests.support.distributed import each, run_on_kept_ranks
from tests.support.training import READS_LABELS

STEPS = 6
Hook = Callable[[Any, Any], Any]


def mean_but_for_one(state, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations, not their texts
    """A communication hook that forgets to reduce the last bucket."""
    if bucket.is_last():
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future
    buffer = bucket.buffer().div_(dist.get_world_size())
    return dist.all_reduce(buffer, async_op=True).get_future().then(lambda done: done.value()[0])


mean_but_for_one.__name__ = "allreduce_hook"  # says of itself that it is the plain mean


def clip(module: nn.Module, norm: float) -> None:
    nn.utils.clip_grad_norm_(module.parameters(), norm)


def scale_unseen(module: nn.Module, norm: float) -> None:
    """What torch does not count as a write."""
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad.data.mul_(norm)


def reduce_anew(module: nn.Module, _: float) -> None:
    """As gradient surgery does: the mean of the ranks' gradients, put in their place."""
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad.clone()
            dist.all_reduce(parameter.grad.div_(dist.get_world_size()))


@dataclass(frozen=True)
class Fault:
    """What goes wrong; ``kind`` and ``ranks`` of the first event that is no note, None: nothing is told."""

    kind: str | None
    ranks: tuple[int, ...] = ()
    step: int = 1
    hook: Hook | None = None
    bypassed: bool = False  # the script calls ddp.module
    unsynchronised: bool = False  # the script stays in no_sync() at the step's last backward
    reduced_early: bool = False  # and has left it for another backward of the step before
    again: bool = False  # each second step is one more backward of the same forward, which DDP does not reduce
    same_rows: bool = False
    drift: int = 0  # step after which rank 2's weights change
    scaled: float = 1.0  # rank 2's loss
    between: Callable[[nn.Module, float], None] | None = None  # what the script does behind the backward, by a norm
    norm: float = 0.01  # on rank 2; 0.1 elsewhere
    says: tuple[str, ...] = ()
    case: DDPCase = field(default_factory=DDPCase)


FAULTS = {
    "healthy": Fault(None),
    "healthy, fully_shard": Fault(None, case=FSDP2Case()),
    "a hook that rounds": Fault(None, case=DDPCase(hook="fp16_compress_hook")),
    "a bucket that is not reduced": Fault("unreduced-gradient", hook=mean_but_for_one),
    "a forward around DDP": Fault("unreduced-gradient", bypassed=True),
    "a step inside no_sync": Fault(
        "unreduced-gradient", unsynchronised=True, says=("No backward of this step was reduced", "outside of no_sync()")
    ),
    "a reduction before the step's last backward": Fault(
        "unreduced-gradient",
        unsynchronised=True,
        reduced_early=True,
        says=("those behind the reduced one were not reduced in all", "Run the last backward of each step"),
    ),
    "a reduction before a backward around DDP": Fault(
        "unreduced-gradient",
        bypassed=True,
        reduced_early=True,
        says=("those behind the reduced one were not reduced in all", "not of its .module"),
    ),
    "a second backward": Fault("unreduced-gradient", step=2, again=True, says=("nothing was reduced",)),
    "a second backward that the script reduces": Fault(None, again=True, between=reduce_anew),
    "the same rows": Fault("duplicate-data", (0, 1, 2, 3), same_rows=True),
    "the same rows, fully_shard": Fault("duplicate-data", (0, 1, 2, 3), same_rows=True, case=FSDP2Case()),
    "a replica drifts": Fault("replica-drift", (2,), step=4, drift=2),
    "clipped alike": Fault(None, between=clip, norm=0.1),
    "clipped alike, fully_shard": Fault(None, between=clip, norm=0.1, case=FSDP2Case()),
    "scaled alike, unseen, fully_shard": Fault(None, between=scale_unseen, norm=0.1, case=FSDP2Case()),
    "a rank clips by another norm": Fault("aggregation-error", (2,), between=clip, says=("rank 2 applied", "Clip by")),
    "a rank clips by another norm, fully_shard": Fault(
        "aggregation-error",
        (2,),
        between=clip,
        says=("ranks 0, 1 and 3 applied", "rank 2 applied", "Clip by"),
        case=FSDP2Case(),
    ),
    "a rank clips by another norm, fully_shard, bf16": Fault(
        "aggregation-error",
        (2,),
        between=clip,
        says=("ranks 0, 1 and 3 applied", "rank 2 applied", "Clip by"),
        case=FSDP2Case(dtype="bf16"),
    ),
    "a rank scales, unseen": Fault(
        "aggregation-error", (2,), between=scale_unseen, says=("The script has changed", "Look first for code")
    ),
    "a rank scales, unseen, fully_shard": Fault(
        "aggregation-error",
        (2,),
        between=scale_unseen,
        says=("rank 2 applied 0.01 times", "applied 0.1 times"),
        case=FSDP2Case(),
    ),
    "a loss times 50": Fault("objective-mismatch", (2,), step=1, scaled=50.0),
    "a loss times 50, fully_shard": Fault("objective-mismatch", (2,), step=1, scaled=50.0, case=FSDP2Case()),
}


FAULTS = {
    name: fault
    for name, fault in FAULTS.items()
    if READS_LABELS or (fault.kind != "objective-mismatch" and not isinstance(fault.case, FSDP2Case))
}  # before torch 2.7 what labels count is not read; fully_shard has been public since 2.6


def train(directory: str, fault: Fault) -> dict[str, Any]:
    """On every rank; what rank 0 has written."""
    sharded = isinstance(fault.case, FSDP2Case)
    model, optimizer = build_fsdp2(fault.case) if isinstance(fault.case, FSDP2Case) else build(fault.case)
    if fault.hook is not None:
        model.register_comm_hook(None, fault.hook)
    block = {"output_dir": directory, "tensorboard": False, "integrity": {"replica_interval": 2}}
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(0 if fault.same_rows else rank)
    with ds_silent.observe(model, optimizer, config=block):
        for step in range(1, (STEPS // 2 if fault.again else STEPS) + 1):
            tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)
            if fault.reduced_early:
                model(torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator), False).backward()
            with model.no_sync() if fault.unsynchronised else nullcontext():
                loss = (model.module if fault.bypassed else model)(tokens, False)
                (loss * (fault.scaled if rank == 2 else 1.0)).backward(retain_graph=fault.again)
            if fault.again:
                optimizer.zero_grad()
                loss.backward()
            if fault.between is not None:
                fault.between(model, fault.norm if rank == 2 else 0.1)
            optimizer.step()
            optimizer.zero_grad()
            if step == fault.drift and rank == 2 and not sharded:
                with torch.no_grad():
                    model.module.norm.weight[0] += 1e-3
    if rank:
        return {}
    every = list(read_events(Path(directory, "events.jsonl")))
    events = [event for event in every if event["severity"] != "info" or event["kind"] == "gradient-changed"]
    return {"events": events, "records": list(read_metrics(Path(directory, "metrics.jsonl")))}


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What rank 0 has written, by the fault's name."""
    directory = tmp_path_factory.mktemp("faulty")
    cases = {name: (str(directory / name), fault) for name, fault in FAULTS.items()}
    return dict(run_on_kept_ranks(each, 4, (train, cases), timeout=280)[0])


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_wrong_is_told_as_it_is(name: str, faulty: dict[str, dict[str, Any]]) -> None:
    fault, found = FAULTS[name], faulty[name]
    assert [record["step"] for record in found["records"]] == list(range(1, STEPS + 1))
    if fault.kind is None:
        assert found["events"] == []
        return
    first = found["events"][0]
    assert (first["kind"], first["step"]) == (fault.kind, fault.step), first
    if fault.ranks:
        assert tuple(first["ranks"]) == fault.ranks, first
    for words in fault.says:
        assert words in first["message"] + first["remedy"], first
    if fault.between is not None:
        assert len(found["events"]) == 1, found["events"]


def signs(state, bucket):  # type: ignore[no-untyped-def]
    """A communication hook that keeps the signs alone, as sign SGD does."""
    buffer = bucket.buffer()
    buffer.copy_(buffer.sign())
    return dist.all_reduce(buffer, async_op=True).get_future().then(lambda done: done.value()[0])


def lossy(directory: str) -> dict[str, Any]:
    model, optimizer = build(DDPCase())
    model.register_comm_hook(None, signs)
    return train_plainly(model, optimizer, directory)


def local_sgd(directory: str) -> dict[str, Any]:
    model, optimizer = build(DDPCase())
    alone, _ = dist.new_subgroups(1)
    model.register_comm_hook(PostLocalSGDState(None, alone, start_localSGD_iter=1), post_localSGD_hook)
    return train_plainly(model, optimizer, directory)


def weights_averaged(directory: str, entered: bool) -> dict[str, Any]:
    """Average weights every second step, and no gradient, with accelerate's ``LocalSGD``, entered before or behind."""
    from accelerate.local_sgd import LocalSGD
    from accelerate.utils import DistributedType

    def mean(tensor: Tensor, reduction: str) -> Tensor:
        dist.all_reduce(tensor)
        return tensor / dist.get_world_size()

    model, optimizer = build(DDPCase())
    members = {"wait_for_everyone": dist.barrier, "autocast": nullcontext, "reduce": mean}
    accelerator: Any = SimpleNamespace(distributed_type=DistributedType.MULTI_CPU, **members)
    averaged = LocalSGD(accelerator, model, 2)
    before = dict.fromkeys(range(1, STEPS), averaged.step)
    if not entered:
        return train_plainly(model, optimizer, directory, before, averaged)
    with averaged:
        return train_plainly(model, optimizer, directory, before)


def averaged_by_hand(directory: str, block: Mapping[str, Any]) -> dict[str, Any]:
    """Average no gradient; the weights' turn would come later."""
    model, optimizer = build(DDPCase())
    return train_plainly(model, optimizer, directory, None, model.no_sync(), block)


def lossy_later(directory: str, after: int, hook: Hook) -> dict[str, Any]:
    model, optimizer = build(DDPCase())
    return train_plainly(model, optimizer, directory, {after: lambda: model.register_comm_hook(None, hook)})


def train_plainly(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    directory: str,
    before: Mapping[int, Callable[[], object]] | None = None,
    within: AbstractContextManager[Any] | None = None,
    integrity: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """``before``: what the script does before the step with that number; ``within``: what it trains in."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    block = {"output_dir": directory, "tensorboard": False, "integrity": integrity or {"replica_interval": 2}}
    with ds_silent.observe(model, optimizer, config=block), within or nullcontext():
        for step in range(STEPS):
            (before or {}).get(step, int)()
            model(torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator), False).backward()
            optimizer.step()
            optimizer.zero_grad()
    if dist.get_rank():
        return {}
    events = [event for event in read_events(Path(directory, "events.jsonl")) if event["severity"] != "info"]
    records = list(read_metrics(Path(directory, "metrics.jsonl")))
    return {"events": events, "records": records, "run": json.loads(Path(directory, "run.json").read_text())}


def replaced(directory: str) -> dict[str, Any]:
    """Give the model another layer behind its optimizer, with other numbers on each rank: DDP sends the new one's."""
    model, optimizer = build(DDPCase())
    torch.manual_seed(dist.get_rank())
    held = nn.Parameter(torch.randn(4))
    optimizer.add_param_group({"params": [held]})
    return train_plainly(model, optimizer, directory)


def dealt(directory: str) -> dict[str, Any]:
    """The optimizer holds a table of this rank's own too, as recommenders deal their embeddings to the ranks."""
    model, optimizer = build(DDPCase())
    torch.manual_seed(dist.get_rank())
    table = nn.Parameter(torch.randn(4 + dist.get_rank(), 3))
    optimizer.add_param_group({"params": [table], "lr": 0.01 * (1 + dist.get_rank())})
    optimizer.register_step_pre_hook(lambda *_: setattr(table, "grad", torch.ones_like(table)))
    return train_plainly(model, optimizer, directory)


PLAIN: dict[str, Callable[[str], dict[str, Any]]] = {
    "lossy": lossy,
    "local SGD": local_sgd,
    "averaged, entered later": partial(weights_averaged, entered=False),
    "averaged, entered before": partial(weights_averaged, entered=True),
    "averaged by hand": partial(averaged_by_hand, block={}),
    "averaged by hand, as told": partial(averaged_by_hand, block={"aggregation": False, "replica_interval": 0}),
    "lossy from 0": partial(lossy_later, after=0, hook=signs),
    "lossy from 3": partial(lossy_later, after=3, hook=signs),
    "the mean from 2": partial(lossy_later, after=2, hook=allreduce_hook),
    "replaced": replaced,
    "dealt": dealt,
}


def train_each_plainly(directory: str) -> dict[str, dict[str, Any]]:
    return {name: trains(f"{directory}/{name}") for name, trains in PLAIN.items()}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What rank 0 has written, by the name in the table."""
    directory = str(tmp_path_factory.mktemp("plain"))
    return dict(run_on_kept_ranks(train_each_plainly, 2, (directory,), timeout=280)[0])


def test_a_lossy_hook_is_not_checked_and_not_called_wrong(plain: dict[str, dict[str, Any]]) -> None:
    found = plain["lossy"]
    assert found["events"] == []
    assert len(found["records"]) == STEPS
    assert {record["integrity"]["relative_error"] for record in found["records"]} == {None}
    assert all(record["direction"]["mean_cosine"] is not None for record in found["records"])


def test_replicas_that_differ_by_design_are_not_compared(plain: dict[str, dict[str, Any]]) -> None:
    found = plain["local SGD"]
    assert found["events"] == []
    assert {record["integrity"]["replica_groups"] for record in found["records"]} == {None}
    assert found["run"]["observed"]["replicas"] is False


def test_weights_that_are_averaged_instead_of_gradients_are_no_fault(plain: dict[str, dict[str, Any]]) -> None:
    """By hand: what the remedy says is to be set."""
    for entered in ("later", "before"):
        found = plain[f"averaged, entered {entered}"]
        assert found["events"] == []
        assert {record["integrity"]["replica_groups"] for record in found["records"]} == {None}
    one = plain["averaged by hand"]["events"]
    assert {event["kind"] for event in one} == {"unreduced-gradient"}
    assert 'set "integrity": {"aggregation": false, "replica_interval": 0}' in one[0]["remedy"]
    assert plain["averaged by hand, as told"]["events"] == []


def test_a_lossy_hook_that_comes_later_ends_the_check(plain: dict[str, dict[str, Any]]) -> None:
    """torch takes one hook per module, and takes it between two steps too."""
    for after in (0, 3):
        found = plain[f"lossy from {after}"]
        assert found["events"] == []
        errors = [record["integrity"]["relative_error"] for record in found["records"]]
        assert [error is not None for error in errors] == [step < after for step in range(STEPS)]


def test_a_hook_that_comes_later_and_changes_nothing_is_checked_on(plain: dict[str, dict[str, Any]]) -> None:
    found = plain["the mean from 2"]
    assert found["events"] == []
    assert all(record["integrity"]["relative_error"] is not None for record in found["records"])


def test_a_parameter_that_only_an_optimizer_still_has_is_no_replica(plain: dict[str, dict[str, Any]]) -> None:
    """It has no gradient and no state: the module has another one in its place."""
    found = plain["replaced"]
    assert [event for event in found["events"] if event["kind"] == "replica-drift"] == []
    assert [[0, 1]] in [record["integrity"]["replica_groups"] for record in found["records"]]


def test_parameters_that_are_dealt_to_the_ranks_are_no_replicas_and_need_not_agree(
    plain: dict[str, dict[str, Any]],
) -> None:
    found = plain["dealt"]
    assert found["events"] == []
    assert [[0, 1]] in [record["integrity"]["replica_groups"] for record in found["records"]]


def test_masters_are_what_an_optimizer_has_in_the_place_of_the_modules_own() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    masters = [nn.Parameter(one.detach().clone()) for one in module.parameters()]
    for one in (*masters, *module.parameters()):
        one.grad = torch.ones_like(one)
    named = [f"master weights 0.{place}" for place in range(4)]
    assert [name for name, _ in masters_of(module, [torch.optim.SGD(masters)])] == named
    both = torch.optim.SGD([*masters, *module.parameters()])
    assert masters_of(module, [both]) == [], "the module's own are there: the others are no copies of them"


AT = 5  # the step at which rank 2 does something else


def once_unlike(directory: str, what: str) -> tuple[list[dict[str, Any]], str, int]:
    """Rank 2 is off for a step, long before the replicas are due to be compared."""
    model, optimizer = build(DDPCase())
    generator = torch.Generator().manual_seed(dist.get_rank())
    with ds_silent.observe(model, optimizer, config={"output_dir": directory, "tensorboard": False}):
        for step in range(1, AT + 6):
            model(torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator), False).backward()
            off = dist.get_rank() == 2 and step == AT
            optimizer.param_groups[0]["lr"] = 0.03 if off and what == "learning rate" else 0.01
            if off and what == "another gradient":
                scale_unseen(model, 1.5)
            if not (off and what == "no step"):
                optimizer.step()
            optimizer.zero_grad()
    if dist.get_rank():
        return [], "", 0
    compared = [record["integrity"]["replica_groups"] for record in read_metrics(Path(directory, "metrics.jsonl"))]
    events = list(read_events(Path(directory, "events.jsonl")))
    return events, verdict_of(read_run(directory)).sentence, sum(groups is not None for groups in compared)


def test_what_can_part_the_replicas_has_them_compared_at_the_next_step(tmp_path: Path) -> None:
    cases = {what: (str(tmp_path / what), what) for what in ("no step", "another gradient", "learning rate", "")}
    *faults, healthy = run_on_kept_ranks(each, 3, (once_unlike, cases))[0].values()
    for events, sentence, _ in faults:
        [drift] = [event for event in events if event["kind"] == "replica-drift"]
        assert drift["step"] <= AT + 2, drift
        assert (drift["severity"], drift["ranks"]) == ("info", [2]), drift
        assert drift["message"].startswith("Follows from the "), drift
        ends = [event["message"] for event in events if event["message"].startswith("Ended: ")]
        assert all("What it has left behind goes on: replica-drift" in end for end in ends), ends
        assert sentence.endswith(f"since step {AT}, now as replica-drift."), sentence
    events, _, compared = healthy
    assert compared == 1  # the parameters, at a tenth of the interval
    assert [event for event in events if event["severity"] != "info"] == []


# -- a gradient that is missing or exactly zero in one parameter of one rank ----------------------------------------


class Untrained(nn.Module):
    """Two blocks and a head."""

    how = ""  # the second block's weight is used on this rank; of the class: a number of the module would be compared

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(nn.Linear(8, 8) for _ in range(2)), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            weight = block.weight
            if number == 1 and self.how == "times zero":
                weight = weight * 0.0 + weight.detach()
            elif number == 1 and self.how == "detached":
                weight = weight.detach()
            x = nn.functional.gelu(nn.functional.linear(x, weight, block.bias))
            if number == 1 and self.how == "block times zero":
                x = x.detach() + 0.0 * x
        return self.head(x)


def train_untrained(directory: str, how: str, sharded: bool = False, accumulation: int = 1) -> list[str]:
    """12 steps with rows dealt at random; return what was told of rank 1, as "step where"."""
    torch.manual_seed(0)
    rank = dist.get_rank()
    module, Untrained.how = Untrained(), how if rank == 1 else ""
    data = TensorDataset(torch.randn(384, 8), torch.arange(384) % 3)
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data, seed=3), drop_last=True)
    unused = how == "detached"
    model = fsdp.fully_shard(module) if sharded else DistributedDataParallel(module, find_unused_parameters=unused)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    config = {"output_dir": directory, "tensorboard": False}
    batches = iter(loader)
    with ds_silent.observe(model, optimizer, config=config) as observer:
        for _ in range(12):
            for micro_batch in range(accumulation):
                x, y = next(batches)
                last = micro_batch == accumulation - 1
                with nullcontext() if sharded or last else model.no_sync():
                    (nn.functional.cross_entropy(model(x), y) / accumulation).backward()
            optimizer.step()
            optimizer.zero_grad()
        observer.flush()
        dist.barrier()
        told = read_events(Path(directory) / "events.jsonl")
    return [f"{event['step']} {event['kind']} {event['ranks']} {event['where']}: {event['message']}" for event in told]


ONE = "8 zero-gradient [1] blocks.1.weight: The gradient of blocks.1.weight is exactly zero on rank 1 since step 1,"
BLOCKS = "8 zero-gradient [1] blocks.0: The gradient of blocks.0, blocks.1 is exactly zero on rank 1 since step 1,"
NONE = (
    "8 zero-gradient [1] parameters: Rank 1 got no gradient for 1 trainable parameter that other ranks do train: "
    "blocks.1.weight, since step 1."
)
UNTRAINED: dict[str, tuple[tuple[Any, ...], list[str]]] = {
    "healthy": (("",), []),
    "times zero": (("times zero",), [ONE]),
    "times zero, accumulated": (("times zero", False, 2), [ONE]),
    "times zero, fully_shard": (("times zero", True), [ONE]),
    "block times zero": (("block times zero",), [BLOCKS]),
    "detached": (("detached",), [NONE]),
}
if not READS_LABELS:
    del UNTRAINED["times zero, fully_shard"]


def test_a_rank_that_does_not_train_a_parameter_is_named_with_it(tmp_path: Path) -> None:
    cases = {name: (str(tmp_path / name), *case) for name, (case, _) in UNTRAINED.items()}
    told, _ = run_on_kept_ranks(each, 2, (train_untrained, cases))
    for name, (_, begins) in UNTRAINED.items():
        assert len(told[name]) == len(begins), (name, told[name])
        assert all(map(str.startswith, told[name], begins)), (name, told[name])
