"""Train a small model in this process as R ranks would, and write its trace: what ``compare`` is tried on.

    write(Training(ranks=4), tmp_path / "a")
    write(Training(ranks=2, fault="layer-scaled", since=5), tmp_path / "b")

Each rank's share of the rows is a forward and a backward of its own, and the ranks' gradients are added one after the
other, so that another number of ranks rounds as in a real training. Nothing of ``ds_silent.comparison`` is used.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ds_silent import trace
from ds_silent.framework import layers_of
from ds_silent.maths.sketch import SketchPlan, fold, make_plan, offsets_of, sketch_of
from ds_silent.practice.model import LENGTH, VOCABULARY, PracticeModel

SIZE, LAYER_SIZE = 256, 64
INPUTS, OUTPUTS = 12, 5
FAULTS = (
    "rate",
    "layer-scaled",
    "row",
    "decay",
    "sign",
    "epsilon",
    "masters",
    "clipping",
    "accumulation",
    "reduced",
    "initial",
    "gradient-scaled",
)


@dataclass(frozen=True)
class Training:
    """One training; two that differ in ranks, accumulation or order alone are the same training."""

    ranks: int = 4
    accumulation: int = 1
    order: int = 0  # of the ranks in the sum
    steps: int = 10
    rows: int = 16  # of a step
    model: str = "gpt"  # gpt, mlp, split
    optimizer: str = "adamw"  # adamw, sgd, momentum
    lr: float = 1e-3
    clip: float = 1.0
    decay: float = 0.01
    eps: float = 1e-8
    dtype: str = "fp32"  # fp32; bf16: bf16 weights in use, gradients and reduction, fp32 masters
    seed: int = 1
    interval: int = 1
    fault: str = ""
    since: int = 1  # step of the fault
    settings: dict[str, Any] = field(default_factory=dict)
    names: Callable[[str], str] = str  # of the tensors in the trace

    def with_(self, **changes: Any) -> Training:
        return replace(self, **changes)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Linear(INPUTS, 48), nn.Linear(48, 48), nn.Linear(48, 48), nn.Linear(48, OUTPUTS)]
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in list(self.layers)[:-1]:
            x = torch.tanh(layer(x))
        return F.cross_entropy(self.layers[-1](x).float(), y)


class Split(nn.Module):
    """One block of attention whose key has a bias, a layer of its own: its gradient is nothing but rounding."""

    def __init__(self) -> None:
        super().__init__()
        width = 32
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=k != 1) for k in range(4))
        self.key = nn.Module()
        self.key.bias = nn.Parameter(torch.zeros(width))
        self.up, self.down, self.head = nn.Linear(width, 64), nn.Linear(64, width), nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        h = self.embedding(tokens)
        q, k, v = self.q(h), self.k(h) + self.key.bias, self.v(h)
        h = h + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        h = h + self.down(torch.relu(self.up(h)))
        return F.cross_entropy(self.head(h)[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())


def build(model: str, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if model != "gpt":
            return Mlp() if model == "mlp" else Split()
        made = PracticeModel()
        for module in made.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return made


def rows_of(model: str, step: int, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return the rows of a step; each has as many labels as every other."""
    generator = torch.Generator().manual_seed(1000 * seed + step)
    if model == "mlp":
        x = torch.randn(count, INPUTS, generator=generator)
        return x, (x[:, :OUTPUTS] + 0.5 * torch.randn(count, OUTPUTS, generator=generator)).argmax(1)
    tokens = torch.randint(1, VOCABULARY, (count, LENGTH), generator=generator)
    tokens[:, 1::2] = (tokens[:, ::2] * 7 + 3) % VOCABULARY  # something to learn
    return tokens, tokens.clone()


class Traced:
    """A training under way."""

    def __init__(self, training: Training):
        self.training = training
        self.model = build(training.model, training.seed)
        if training.fault == "initial":
            with torch.no_grad():
                next(self.model.parameters()).add_(1e-3)
        kind = torch.bfloat16 if training.dtype == "bf16" else torch.float32
        self.model.to(kind)
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        self.names, self.parameters = [name for name, _ in named], [p for _, p in named]
        self.masters = [p.detach().float().clone().requires_grad_(True) for p in self.parameters]
        offsets, total = offsets_of([p.numel() for p in self.parameters])
        self.offsets = offsets
        self.plan: SketchPlan = make_plan(total, 1024)
        self.layer_names, self.layers = layers_of(self.names)
        decayed = [m for m in self.masters if m.ndim > 1]
        others = [m for m in self.masters if m.ndim <= 1]
        of_others = training.decay if training.fault == "decay" else 0.0
        groups = [
            {"params": decayed, "weight_decay": training.decay},
            {"params": others, "weight_decay": of_others},
        ]
        if training.optimizer == "adamw":
            eps = 1e-6 if training.fault == "epsilon" else training.eps
            self.optimizer: Any = torch.optim.AdamW(groups, lr=training.lr, eps=eps)
        else:
            momentum = 0.9 if training.optimizer == "momentum" else 0.0
            self.optimizer = torch.optim.SGD(groups, lr=training.lr, momentum=momentum)

    def head(self) -> trace.Head:
        one = self.training
        settings = {
            "lr": one.lr,
            "gradient_clipping": 0.5 * one.clip if one.fault == "clipping" else one.clip,
            "weight_decay of group 1": one.decay if one.fault == "decay" else 0.0,
            "eps": 1e-6 if one.fault == "epsilon" else one.eps,
            "micro-batches of a step": one.accumulation,
            "precision of what the optimizer steps": "bfloat16" if one.fault == "masters" else "float32",
        }
        return trace.Head(
            interval=one.interval,
            size=SIZE,
            ranks=one.ranks,
            micro_batches=one.accumulation,
            framework="test",
            precision=one.dtype,
            rounding=(2.0**-24 if one.dtype == "fp32" else 2.0**-8) * np.sqrt(one.ranks + 2),
            layer_size=LAYER_SIZE,
            layers=tuple(trace.Layer(one.names(name)) for name in self.layer_names),
            tensors=tuple(
                trace.Tensor(
                    one.names(name),
                    tuple(p.shape),
                    str(p.dtype).removeprefix("torch."),
                    layer,
                    min(trace.SAMPLES, p.numel()),
                    place,
                )
                for place, (name, p, layer) in enumerate(zip(self.names, self.parameters, self.layers, strict=True))
            ),
            settings={name: {"value": value, "from": "yours"} for name, value in {**settings, **one.settings}.items()},
            versions={"torch": torch.__version__},
        )

    def step(self, number: int) -> trace.Step:
        one, now = self.training, number >= self.training.since
        x, y = rows_of(one.model, number, one.rows, one.seed)
        if one.fault == "row" and number == one.since:
            other = rows_of(one.model, number + 1000, one.rows, one.seed)
            x[3], y[3] = other[0][3], other[1][3]
        if x.is_floating_point():
            x = x.to(self.parameters[0].dtype)
        weights = np.concatenate(
            [
                p.detach().flatten()[torch.from_numpy(trace.sampled(p.numel(), min(16, p.numel())))].float().numpy()
                for p in self.parameters
            ]
        )
        gradients, losses = [], []
        share = len(x) // one.ranks
        for rank in range(one.ranks):
            mine = slice(rank * share, (rank + 1) * share)
            total, loss = self._local(x[mine], y[mine])
            gradients.append(total)
            losses.append(loss)
        if now:
            self._fault_local(gradients)
        order = [(rank + one.order) % one.ranks for rank in range(one.ranks)]
        reduced = []
        for place in range(len(self.parameters)):
            summed = gradients[order[0]][place].clone()
            for rank in order[1:]:
                summed += gradients[rank][place]
            reduced.append(summed / one.ranks)
        if now and one.fault == "reduced":
            reduced = [g * 1.01 if layer == 2 else g for g, layer in zip(reduced, self.layers, strict=True)]
        means = [sum(self._sketches(g) for g in gradients) / one.ranks, self._sketches(reduced)]
        exact = [torch.stack([g[k].double() for g in gradients]).mean(0) for k in range(len(self.parameters))]
        local, aggregate = self._gradient(means[0], exact), self._gradient(means[1], reduced)
        norm = float(torch.sqrt(sum((g.float() ** 2).sum() for g in reduced)))  # type: ignore[arg-type]
        clip = one.clip * (0.5 if one.fault == "clipping" and now else 1.0)
        factor = float(np.float32(min(1.0, clip / (norm + 1e-6)))) if clip else 1.0
        for group in self.optimizer.param_groups:
            group["lr"] = one.lr * (1.1 if one.fault == "rate" and now else 1.0)
        rates = tuple(group["lr"] for group in self.optimizer.param_groups)
        for master, gradient in zip(self.masters, reduced, strict=True):
            master.grad = gradient.float() * factor
        self.optimizer.step()
        with torch.no_grad():
            for p, master in zip(self.parameters, self.masters, strict=True):
                if one.fault == "masters" and now:
                    master.copy_(master.bfloat16())
                p.copy_(master)
        digest = sum(int.from_bytes(hashlib.sha256(row.numpy().tobytes()).digest()[:8], "big") for row in x.float())
        return trace.Step(
            step=number,
            samples=number * one.rows,
            rows=trace.Rows(len(x), f"{digest % 2**64:016x}"),
            loss=float(np.mean(losses)),
            losses=float(np.std(losses)),
            objective=None,
            rates=rates,
            applied=trace.Used(factor, 1e-8),
            local=local,
            reduced=aggregate,
            weights=weights,
        )

    def _local(self, x: Tensor, y: Tensor) -> tuple[list[Tensor], float]:
        one = self.training
        total, losses = [torch.zeros_like(p) for p in self.parameters], []
        for a, b in zip(x.chunk(one.accumulation), y.chunk(one.accumulation), strict=True):
            self.model.zero_grad()
            loss = self.model(a, b)
            losses.append(float(loss.detach()))
            (loss if one.fault == "accumulation" else loss / one.accumulation).backward()
            for t, p in zip(total, self.parameters, strict=True):
                t += p.grad
        return total, float(np.mean(losses))

    def _fault_local(self, gradients: list[list[Tensor]]) -> None:
        fault = self.training.fault
        for mine in gradients:
            for place, (name, layer) in enumerate(zip(self.names, self.layers, strict=True)):
                if fault == "layer-scaled" and layer == 2:
                    mine[place] = mine[place] * 1.001
                if fault == "gradient-scaled":
                    mine[place] = mine[place] * 0.5
                if fault == "sign" and name.endswith("bias") and layer == 2 and not name.endswith("norm.bias"):
                    mine[place] = -mine[place]
                    break

    def _sketches(self, gradient: list[Tensor]) -> Tensor:
        """(1 + layers, 1024), the first the whole's."""
        found = torch.zeros(1 + len(self.layer_names), 1024)
        for offset, layer, one in zip(self.offsets, self.layers, gradient, strict=True):
            found[1 + layer] += sketch_of(self.plan, one.float().flatten(), offset)
        found[0] = found[1:].sum(0)
        return found

    def _gradient(self, sketches: Tensor, whole: list[Tensor]) -> trace.Gradient:
        squares = np.zeros(len(self.layer_names))
        for layer, one in zip(self.layers, whole, strict=True):
            squares[layer] += float((one.double() ** 2).sum())
        return trace.Gradient(
            float(np.sqrt(squares.sum())),
            fold(sketches[0], SIZE).numpy(),
            np.sqrt(squares).astype(np.float32),
            fold(sketches[1:], LAYER_SIZE).numpy(),
        )


def lines(training: Training) -> Iterator[str]:
    """Yield the lines of a training's trace."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        traced = Traced(training)
        yield trace.write_head(traced.head())
        for number in range(1, training.steps + 1):
            step = traced.step(number)
            if (number - 1) % training.interval == 0:
                yield trace.write_step(step)
    finally:
        torch.set_num_threads(threads)


def write(training: Training, directory: Path) -> Path:
    """Write the trace of a training into a directory, which is returned."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / trace.NAME).write_text("".join(f"{line}\n" for line in lines(training)))
    return directory
