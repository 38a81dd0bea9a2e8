"""Small trainings under DeepSpeed's parallelism other than plain data parallelism, and their naive float64 oracle.

The oracle hears each rank's gradients by hooks of its own, adds them up in float64 with the factor and over the ranks
that DeepSpeed's documentation says, and is itself held against the weights: plain SGD applies just that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import groups
from torch import Tensor, nn

import ds_silent
from benchmarks.probe import full_parameters
from ds_silent.drill.training import hash_of
from ds_silent.sinks.jsonl import read_events, read_metrics

WIDTH, LENGTH, ROWS, CLASSES, RATE = 8, 6, 2, 5, 0.1


@dataclass(frozen=True)
class Shaped:
    """One training."""

    kind: str  # ulysses, mesh, tensor, domino, pipeline, experts
    stage: int = 0
    accumulation: int = 1
    clipping: float = 0.0
    top: dict[str, Any] = field(default_factory=dict)
    harm: str | None = None
    block: dict[str, Any] = field(default_factory=dict)

    def config(self, directory: Path | None, data_ranks: int) -> dict[str, Any]:
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": ROWS,
            "gradient_accumulation_steps": self.accumulation,
            "train_batch_size": ROWS * self.accumulation * data_ranks,
            "zero_optimization": {"stage": self.stage},
            "gradient_clipping": self.clipping,
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
            **self.top,
        }
        if self.kind == "tensor":
            split = {"patterns": [r".*\.up\.weight$"], "partition_type": "column"}
            joined = {"patterns": [r".*\.down\.weight$"], "partition_type": "row"}
            plan = {"use_default_specs": False, "layer_specs": [split, joined]}
            config["tensor_parallel"] = {"autotp_size": 2, "partition_config": plan}
        if directory is not None:
            config["silent_consistency"] = {
                "output_dir": str(directory),
                "tensorboard": False,
                "integrity": {"replica_interval": 1},
                **self.block,
            }
        return config


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(torch.tanh(self.up(self.norm(hidden))))


class Domino(nn.Module):
    """A layer of Domino's, which takes the rows in two halves."""

    def __init__(self, mpu: Any):
        from deepspeed.runtime.domino import async_linear
        from deepspeed.runtime.domino.transformer import DominoTransformerLayer

        super().__init__()
        async_linear.TP_group = None  # of the training before
        self.layer = DominoTransformerLayer(
            SimpleNamespace(
                hidden_size=WIDTH,
                ffn_hidden_size=2 * WIDTH,
                kv_channels=WIDTH // 2,
                num_attention_heads=2,
                params_dtype=torch.float32,
                init_method=nn.init.xavier_normal_,
                output_layer_init_method=nn.init.xavier_normal_,
                perform_initialization=True,
                add_bias_linear=True,
                gated_linear_unit=False,
                attention_dropout=0.0,
                hidden_dropout=0.0,
                layernorm_epsilon=1e-5,
                apply_residual_connection_post_layernorm=False,
            ),
            mpu,
            None,
            1,
        )
        generator = torch.Generator().manual_seed(mpu.get_tensor_model_parallel_rank())
        for name, parameter in self.layer.named_parameters():
            if name.endswith("weight") and parameter.ndim == 2:  # the parts of a tensor are not alike
                nn.init.xavier_normal_(parameter, generator=generator)

    def forward(self, hidden: Tensor) -> Tensor:
        halves = hidden.transpose(0, 1).chunk(2, dim=1)
        return torch.cat(self.layer(halves, None), dim=1).transpose(0, 1)


class Model(nn.Module):
    """Each rank has ``LENGTH`` tokens of a row; ``sequence``: of the ranks that share it, all see the row's mean."""

    def __init__(self, sequence: Any = None, experts: int = 1, domino: Any = None):
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(Block() if domino is None else Domino(domino) for _ in range(2))
        self.sequence, self.experts = sequence, None
        if experts > 1:
            from deepspeed.moe.layer import MoE

            self.experts = MoE(WIDTH, Block(), experts, ep_size=experts, k=1, min_capacity=2, use_rts=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        if self.sequence is not None:
            import torch.distributed.nn.functional as collectives

            total = collectives.all_reduce(hidden.sum(1, keepdim=True), group=self.sequence)
            hidden = hidden + total / (LENGTH * dist.get_world_size(self.sequence))
        extra = 0.0
        if self.experts is not None:
            hidden, extra, _ = self.experts(hidden)
        loss: Tensor = loss_of(self.head(hidden), tokens) + 0.01 * extra
        return loss


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())


@dataclass
class Made:
    """An engine, and what the oracle knows of its ranks."""

    engine: Any
    row: int  # which rows this rank takes
    place: int  # of a rank's tokens in the row
    factor: float  # on the sum over the ranks
    alike: Callable[[str], list[int]]  # ranks whose gradients of a parameter are added up
    tied: list[int]  # ranks whose gradients of tied weights are added up before that


def make(shaped: Shaped, directory: Path | None) -> Made:
    """Every rank calls it; a collective."""
    forget_groups()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    given: dict[str, Any] = {}
    row, place, factor, data_ranks, first, step = rank, 0, 1.0 / ranks, ranks, 0, 1
    tied = [rank]
    if shaped.kind in ("ulysses", "mesh"):
        data_ranks, row, place, factor = ranks // 2, rank // 2, rank % 2, 2.0 / ranks
        if shaped.kind == "mesh":
            model = Model(sequence_group(rank, ranks))
            given["mesh_param"] = (data_ranks, 2)
        else:
            from deepspeed.runtime.sequence_parallel import parallel_state_sp

            parallel_state_sp._release_sequence_parallel_groups()
            parallel_state_sp.initialize_sequence_parallel(2)
            model, given["mpu"] = Model(parallel_state_sp.get_sequence_parallel_group()), parallel_state_sp
        if shaped.stage == 3:
            factor = 1.0 / ranks  # DeepSpeed's own: where it scatters gradients it forgets who shares a row
    elif shaped.kind == "tensor":
        row, factor, model = rank // 2, 2.0 / ranks, Model()  # the batch counts each row on each rank
        first, step = rank % 2, 2
    elif shaped.kind == "domino":
        groups._init_tp_mesh_device(2)
        data_ranks, row, factor, given["mpu"] = ranks // 2, rank // 2, 2.0 / ranks, groups
        first, step, model = rank % 2, 2, Model(domino=groups)
    elif shaped.kind == "pipeline":
        data_ranks, factor, model = ranks // 2, 2.0 / ranks, pipeline()
        row, tied = rank % data_ranks, [rank % data_ranks, rank % data_ranks + data_ranks]
        first = rank // data_ranks * data_ranks
    else:
        model = Model(experts=2)

    def alike(name: str) -> list[int]:
        if "deepspeed_experts" in name:
            return list(range(rank % 2, ranks, 2))
        return list(range(first, first + data_ranks if shaped.kind == "pipeline" else ranks, step))

    parameters: Any = list(model.parameters())
    if shaped.kind == "experts":
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

        parameters = split_params_into_different_moe_groups_for_optimizer({"params": parameters, "name": "all"})
    if shaped.kind == "tensor":  # their parameters are other objects once they are split
        given["optimizer"] = lambda own: torch.optim.SGD(own, lr=RATE)
    else:
        given["optimizer"] = torch.optim.SGD(parameters, lr=RATE)
    engine, *_ = ds_silent.initialize(model=model, config=shaped.config(directory, data_ranks), **given)
    return Made(engine, row, place, factor, alike, tied)


def pipeline() -> Any:
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    def logits(module: nn.Module, hidden: Tensor) -> Tensor:
        weight: Tensor = module.weight  # type: ignore[assignment]
        return hidden @ weight.T

    layers = [
        TiedLayerSpec("embedding", nn.Embedding, CLASSES, WIDTH),
        LayerSpec(Block),
        LayerSpec(Block),
        TiedLayerSpec("embedding", nn.Embedding, CLASSES, WIDTH, forward_fn=logits),
    ]
    return PipelineModule(layers, num_stages=2, loss_fn=loss_of, partition_method="uniform", base_seed=7)


def sequence_group(rank: int, ranks: int) -> Any:
    made = [dist.new_group([first, first + 1]) for first in range(0, ranks, 2)]
    return made[rank // 2]


def forget_groups() -> None:
    """What the training before has left in DeepSpeed's module of groups."""
    for name in ("mpu", "mesh_device", "_TENSOR_MODEL_PARALLEL_GROUP", "_MODEL_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP"):
        setattr(groups, name, None)
    for name in ("_EXPERT_PARALLEL_GROUP", "_EXPERT_DATA_PARALLEL_GROUP"):
        getattr(groups, name).clear()


class Oracle:
    """What this rank's gradients of a step are, in float64."""

    def __init__(self, made: Made):
        self._made = made
        named = [(name, p) for name, p in made.engine.module.named_parameters() if p.requires_grad]
        shapes = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in named}  # ZeRO-3 empties a parameter
        self._sums = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
        self._parameters = dict(named)
        for name, parameter in named:
            parameter.register_hook(lambda gradient, name=name: self._add(name, gradient))

    def _add(self, name: str, gradient: Tensor) -> None:
        self._sums[name] += gradient.detach().double()

    def step(self, before: dict[str, Tensor]) -> dict[str, Any]:
        """Of the step just taken, with this rank's weights from before it. A collective."""
        made, rank = self._made, dist.get_rank()
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, ({n: v.clone() for n, v in self._sums.items()}, made.tied))
        for value in self._sums.values():
            value.zero_()

        def local(of: int, name: str) -> Tensor:
            own, tied = everybody[of]
            if not name.startswith("tied_modules."):
                return own[name]
            return torch.stack([everybody[other][0][name] for other in tied]).sum(0)

        total = {
            name: made.factor * torch.stack([local(of, name) for of in made.alike(name)]).sum(0) for name in self._sums
        }
        moved = {name: (before[name] - after) / RATE for name, after in self.weights().items()}
        applied = max(float((moved[name] - total[name]).abs().max()) for name in total)
        norms = [float(squared({name: local(of, name) for name in self._sums}) ** 0.5) for of in made.alike("")]
        experts = [squared({n: v for n, v in total.items() if "deepspeed_experts" in n})]
        dense = squared({n: v for n, v in total.items() if "deepspeed_experts" not in n})
        all_experts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(all_experts, float(experts[0]))
        whole = dense + sum(all_experts) / len(made.alike("deepspeed_experts"))
        return {"norms": norms, "aggregated": whole**0.5, "not applied": applied, "rank": rank}

    def weights(self) -> dict[str, Tensor]:
        """This rank's; a collective under ZeRO-3."""
        held = list(self._parameters.values())
        with deepspeed.zero.GatheredParameters(held, enabled=hasattr(held[0], "ds_id")):
            return {name: p.detach().double().clone() for name, p in self._parameters.items()}


def squared(named: dict[str, Tensor]) -> float:
    return sum(float((value * value).sum()) for value in named.values())


def train(shaped: Shaped, directory: Path | None, steps: int, oracle: bool = False) -> dict[str, Any]:
    """On every rank: weights' hash, losses, the oracle's steps; on ranks that write, what they have written."""
    made = make(shaped, directory)
    engine, truth, losses = made.engine, Oracle(made) if oracle else None, []
    generator = torch.Generator().manual_seed(31 * made.row + 7 * made.place)
    told = []
    with harmed(shaped, engine):
        for step in range(steps):
            before = truth.weights() if truth is not None else {}
            losses.append(one_step(shaped, engine, generator))
            if shaped.harm in AFTER and step == 0:
                AFTER[shaped.harm](made)
            if truth is not None:
                told.append(truth.step(before))
            dist.barrier()  # the groups leave what others look for before these look the next time
    observer = ds_silent.observer_of(engine)
    where = None if observer is None else observer.output_dir
    if observer is not None:
        observer.close()
    dist.barrier()
    found: dict[str, Any] = {"weights": hash_of(full_parameters(engine)), "losses": losses}
    found |= {"oracle": told, "directory": where}
    if where is not None:
        found["records"] = list(read_metrics(Path(where, "metrics.jsonl")))
        found["events"] = [e for e in read_events(Path(where, "events.jsonl")) if is_fault(e)]
    engine.destroy()
    return found


def one_step(shaped: Shaped, engine: Any, generator: torch.Generator) -> float:
    def tokens() -> Tensor:
        return torch.randint(0, CLASSES, (ROWS, LENGTH), generator=generator)

    if shaped.kind == "pipeline":
        batches = [tokens() for _ in range(shaped.accumulation)]
        return float(engine.train_batch(iter([(batch, batch) for batch in batches])))
    total = 0.0
    for _ in range(shaped.accumulation):
        loss = engine(tokens())
        total += float(loss.detach()) / shaped.accumulation
        engine.backward(loss)
        engine.step()
    return total


def is_fault(event: dict[str, Any]) -> bool:
    return bool(event["severity"] != "info" or event["kind"] == "gradient-changed")


# -- faults ----------------------------------------------------------------------------------------------------------


@contextmanager
def harmed(shaped: Shaped, engine: Any) -> Iterator[None]:
    """Stage 0's reduction of a bucket: on the last rank half as much again goes in, or none is reduced."""
    if shaped.harm not in ("scaled", "dropped", "dropped experts"):
        yield
        return
    original = engine.allreduce_bucket
    whole = dist.get_world_size(engine.seq_data_parallel_group)

    def allreduce_bucket(bucket: Any, dp_group: Any, dp_world_size: Any = None) -> Any:
        if shaped.harm == "scaled" and dist.get_rank() == dist.get_world_size() - 1:
            for tensor in bucket:
                tensor.mul_(1.5)
        ours = dist.get_world_size(dp_group) < whole if shaped.harm == "dropped experts" else shaped.harm == "dropped"
        return engine.flatten(bucket) if ours else original(bucket, dp_group, dp_world_size)

    engine.allreduce_bucket = allreduce_bucket
    yield
    del engine.allreduce_bucket


def apart(made: Made, part: str, ranks: list[int]) -> None:
    if dist.get_rank() in ranks:
        with torch.no_grad():
            next(p for name, p in made.engine.module.named_parameters() if part in name).mul_(1.01)


AFTER: dict[str, Callable[[Made], None]] = {
    "a layer norm apart": lambda made: apart(made, "norm.weight", [1, 3]),  # of the second tensor-parallel rank
    "tied weights apart": lambda made: apart(made, "tied_modules", [2, 3]),  # of the second stage
    "experts apart": lambda made: apart(made, "deepspeed_experts", [3]),
}
