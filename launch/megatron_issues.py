"""Train a small GPT under Megatron-core on four CPU ranks, with one thing wrong that happened to somebody.

    with training_of(SCENARIOS["layer-norms"], {"output_dir": "runs/x"}) as training:
        loss = training.step()           # the same on all ranks

The faults are those of public issues of Megatron-LM, made again in this process; ``make demo-megatron`` trains them.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

import ds_silent
from ds_silent.drill.megatron_on_cpu import parallel
from ds_silent.observing.observer import Observer
from ds_silent.records import EventKind
from megatron_gpt import GptShape, gpt_models, take_step

MICRO_BATCHES, ROWS, LENGTH, VOCABULARY = 2, 4, 32, 128
CLIP = 0.5
Damage = Callable[[Any], AbstractContextManager[Any]]
"""Of the first chunk, once it is wrapped: what is wrong until the training ends."""


def _factor(times: float, experts: bool = False) -> Damage:
    def fault(chunk: Any) -> AbstractContextManager[Any]:
        for group in chunk.expert_parallel_bucket_groups if experts else chunk.bucket_groups:
            for bucket in group.buckets:
                bucket.gradient_scaling_factor *= times
        return nullcontext()

    return fault


def _without(name: str) -> Damage:
    """A part of ``finalize_model_grads`` that does nothing."""

    def fault(chunk: Any) -> AbstractContextManager[Any]:
        module = importlib.import_module("megatron.core.distributed.finalize_model_grads")
        return patch.object(module, name, lambda *args, **kwargs: None)

    return fault


def _router_alone(chunk: Any) -> AbstractContextManager[Any]:
    """The router's weights lack the mark by which their gradients are added up over tensor-parallel ranks."""
    for name, parameter in chunk.module.named_parameters():
        if "router" in name:
            parameter.sequence_parallel = False
    return nullcontext()


def _smaller_norm(chunk: Any) -> AbstractContextManager[Any]:
    from megatron.core.optimizer import optimizer

    original = optimizer.clip_grad_by_total_norm_fp32

    def clip(*args: Any, total_norm: float, **kwargs: Any) -> None:
        original(*args, total_norm=0.7 * total_norm, **kwargs)

    return patch.object(optimizer, "clip_grad_by_total_norm_fp32", clip)


def _never_gathered(chunk: Any) -> AbstractContextManager[Any]:
    """Each rank goes on with the old weights where another rank has updated them."""
    return patch.object(chunk.bucket_groups[0], "start_param_sync", lambda *args, **kwargs: None)


def _left_in_buffer(chunk: Any) -> AbstractContextManager[Any]:
    """What was gathered of the weights stays in the buffer that is the gradients' next."""
    original = chunk.zero_grad_buffer

    def zero_grad_buffer() -> None:
        original()
        for parameter in chunk.module.parameters():
            parameter.main_grad.copy_(parameter.detach())

    return patch.object(chunk, "zero_grad_buffer", zero_grad_buffer)


@dataclass(frozen=True)
class Scenario:
    """One training.

    ``who``, ``says``, ``first_step``: whom the first event must name, words of it, and the step of the fault.
    ``healthy``: the training without the fault. ``late``: a layer becomes trainable when the model is wrapped.
    ``together``: experts lie in the buffers of all other parameters.
    """

    title: str
    healthy: str
    shape: GptShape = field(default_factory=GptShape)
    fault: Damage = nullcontext  # nothing is wrong
    expected: EventKind | None = None  # kind of the first event; None: none
    issue: str = ""  # of NVIDIA/Megatron-LM
    who: Literal["nobody", "all ranks"] = "nobody"
    says: tuple[str, ...] = ()
    first_step: int = 1
    distributed: bool = False  # optimizer
    late: bool = False
    together: bool = False
    same_rows: bool = False


PLAIN, TENSOR, PIPELINE = GptShape(), GptShape(tensor=2, sequence=True), GptShape(pipeline=2)
EXPERTS, ROUTER = GptShape(experts=2), GptShape(tensor=2, sequence=True, experts=2)
_WRONG: EventKind = "aggregation-error"
# fmt: off
SCENARIOS: Mapping[str, Scenario] = {
    "healthy-plain": Scenario("healthy, DP 4", "healthy-plain", PLAIN),
    "healthy-tensor": Scenario("healthy, TP 2 x DP 2", "healthy-tensor", TENSOR, distributed=True),
    "healthy-pipeline": Scenario("healthy, PP 2 x DP 2, tied", "healthy-pipeline", PIPELINE, distributed=True),
    "healthy-experts": Scenario("healthy, EP 2 in DP 4", "healthy-experts", EXPERTS),
    "healthy-router": Scenario("healthy, EP 2 and TP 2 x DP 2", "healthy-router", ROUTER),
    "no-division": Scenario("no division by DP", "healthy-tensor", TENSOR, _factor(2.0), _WRONG, "#3023",
                            says=("2 times the mean",)),
    "expert-factor": Scenario("experts divided by their own group", "healthy-experts", EXPERTS,
                              _factor(2.0, experts=True), _WRONG, "#7165"),
    "experts-in-dense-group": Scenario("experts in the group of all", "healthy-experts", EXPERTS, nullcontext,
                                       "initial-weights-mismatch", "#6080, #1622, #7289", together=True,
                                       first_step=0),
    "layer-norms": Scenario("layer norms of a TP rank not reduced", "healthy-tensor", TENSOR,
                            _without("_allreduce_non_tensor_model_parallel_grads"), "replica-drift", "#1446"),
    "router": Scenario("the router of a TP rank not reduced", "healthy-router", ROUTER, _router_alone,
                       "replica-drift", "#619", says=("router",)),
    "embeddings": Scenario("embeddings of PP not tied", "healthy-pipeline", PIPELINE,
                           _without("_allreduce_word_embedding_grads"), "replica-drift", "#656",
                           says=("tied embeddings",)),
    "no-buffer": Scenario("parameters in no buffer", "healthy-plain", PLAIN, nullcontext, "unreduced-gradient", "#565",
                          late=True, says=("No gradient buffer",)),
    "left-in-buffer": Scenario("gathered weights left in the gradients' buffer", "healthy-plain", PLAIN,
                               _left_in_buffer, _WRONG, "#4609", first_step=2, says=("not cleared",)),
    "norm": Scenario("a norm of a part of the model", "healthy-tensor", TENSOR, _smaller_norm, _WRONG, "#5916"),
    "stale-weights": Scenario("a bucket of weights that is never gathered", "healthy-tensor", PLAIN, _never_gathered,
                              "replica-drift", "#950", distributed=True),
    "same-rows": Scenario("the same rows on all ranks", "healthy-plain", PLAIN, nullcontext, "duplicate-data",
                          "#7299", who="all ranks", same_rows=True),
}
# fmt: on
"""By name."""


class ScenarioTraining:
    """One rank's; ``chunk`` is its only one, ``observer`` that of its data-parallel group."""

    def __init__(self, chunk: Any, optimizer: Any, observer: Observer, batches: Iterator[Tensor]):
        self.chunk, self.optimizer, self.observer, self._batches = chunk, optimizer, observer, batches

    def step(self) -> float:
        """Take one optimizer step; return the mean loss of all ranks that compute one. A collective."""
        seen = torch.zeros(2)

        def hear(loss: Tensor) -> None:
            seen.add_(torch.stack((loss.detach(), torch.ones(()))))

        take_step([self.chunk], self.optimizer, self._batches, MICRO_BATCHES, (ROWS, LENGTH), hear=hear)
        dist.all_reduce(seen)
        return float(seen[0] / seen[1])


@contextmanager
def training_of(scenario: Scenario, block: Mapping[str, Any]) -> Iterator[ScenarioTraining]:
    """Train, observed with this block, and with the scenario's fault in it, until the training ends. A collective."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    shape = scenario.shape
    sizes = {"expert_model_parallel_size": shape.experts} if shape.experts else {}
    with ExitStack() as stack:
        stack.enter_context(parallel(shape.tensor, shape.pipeline, **sizes))
        torch.manual_seed(1)
        [model], config = gpt_models(shape, VOCABULARY, LENGTH)
        distributed = scenario.distributed
        options = DistributedDataParallelConfig(
            use_distributed_optimizer=distributed, overlap_grad_reduce=True, bucket_size=20000
        )
        _make_experts_differ(model, marked=not scenario.together)
        late = [p for name, p in model.named_parameters() if scenario.late and "layers.1" in name]
        for parameter in late:
            parameter.requires_grad_(False)
        chunk = DistributedDataParallel(config, options, model)
        for parameter in late:
            parameter.requires_grad_(True)
        settings = OptimizerConfig(lr=1e-3, clip_grad=CLIP, use_distributed_optimizer=distributed)
        optimizer = get_megatron_optimizer(settings, [chunk])
        share, shares = (0, 1) if scenario.same_rows else (chunk.dp_group.rank(), chunk.dp_group.size())
        stack.enter_context(scenario.fault(chunk))
        observer = stack.enter_context(ds_silent.observe([chunk], optimizer, dict(block), accumulation=MICRO_BATCHES))
        assert observer is not None  # the block is active
        yield ScenarioTraining(chunk, optimizer, observer, _batches(share, shares))


def _make_experts_differ(model: Any, marked: bool) -> None:
    """Other experts on each rank, as seeds of their own make them; ``marked`` as what other ranks lack, or not."""
    from megatron.core import parallel_state

    for parameter in model.parameters():
        if not getattr(parameter, "allreduce", True):
            parameter.allreduce = not marked
            with torch.no_grad():
                parameter.add_(0.01 * parallel_state.get_expert_model_parallel_rank())


def _batches(share: int, shares: int) -> Iterator[Tensor]:
    """Bytes of sums and products, cut into rows of which none comes twice: this rank's share, over and over."""
    pairs = itertools.product(range(2, 40), repeat=2)
    text = " ".join(f"{a} plus {b} is {a + b}, {a} times {b} is {a * b}." for a, b in pairs).encode()
    pieces = dict.fromkeys(text[start : start + LENGTH] for start in range(0, len(text) - LENGTH, LENGTH))
    rows = torch.tensor([list(piece) for piece in list(pieces)[share::shares]]) % VOCABULARY
    while True:
        for first in range(0, len(rows), ROWS):
            yield rows[first : first + ROWS]
