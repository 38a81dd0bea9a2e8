"""The sketch: linear wherever it is cut, and as exact as its theory says on gradients of real layers."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from torch import nn

from ds_silent.kernels.accumulator import Accumulator
from ds_silent.maths import sketch

SIZE = 256


def naive(plan: sketch.SketchPlan, flat: torch.Tensor, offset: int = 0) -> torch.Tensor:
    """The definition, element by element, in float64."""
    out = torch.zeros(plan.size, dtype=torch.float64)
    for position, value in enumerate(flat.tolist(), start=offset):
        row, column = divmod(position, plan.width)
        out[column % plan.size] += float(plan.signs[8 * row + column]) * value
    return out


def test_sketch_is_its_definition() -> None:
    plan = sketch.make_plan(3 * 2008 + 100, SIZE)
    assert plan.width == 2008  # 8 * 251
    flat = torch.randn(5000, generator=torch.Generator().manual_seed(1))
    for offset in (0, 8, 1999, 2008):
        ours = sketch.sketch_of(plan, flat[: plan.numel - offset], offset)
        torch.testing.assert_close(
            ours.double(), naive(plan, flat[: plan.numel - offset], offset), atol=1e-5, rtol=1e-5
        )


@pytest.mark.parametrize("cuts", [(1,), (2008,), (2007, 2009), (5, 6, 4000, 4016, 6500)])
def test_parts_add_up_to_the_whole(cuts: tuple[int, ...]) -> None:
    flat = torch.randn(7000, generator=torch.Generator().manual_seed(2), dtype=torch.float64).float()
    plan = sketch.make_plan(7000, SIZE)
    edges = [0, *cuts, 7000]
    parts = sum(sketch.sketch_of(plan, flat[a:b], a) for a, b in itertools.pairwise(edges))
    torch.testing.assert_close(parts, sketch.sketch_of(plan, flat), atol=1e-5, rtol=1e-5)


def test_blocks_of_rows_are_the_same_sketch() -> None:
    """What an accelerator does in one kernel is what the CPU does row by row."""
    flat = torch.randn(2008 * 7 + 500, generator=torch.Generator().manual_seed(5))
    plan = sketch.make_plan(flat.numel(), SIZE)
    blocks = dataclasses.replace(plan, block_rows=3)
    assert max(piece.rows for piece in blocks.pieces(100, flat.numel() - 100)) == 3
    for weight in (1.0, -1.0):
        tables = []
        for each in (plan, blocks):
            table, scratch = each.new_tables()[0], each.new_scratch()
            for piece in each.pieces(100, flat.numel() - 100):
                sketch.add(sketch.place(each, table, piece), flat[piece.begin : piece.end], scratch, weight)
            tables.append(table)
        torch.testing.assert_close(tables[0], tables[1], atol=1e-5, rtol=1e-5)


def test_folding_a_sketch_gives_the_smaller_sketch() -> None:
    flat = torch.randn(9000, generator=torch.Generator().manual_seed(3))
    plan = sketch.make_plan(9000, 1024)
    small = sketch.fold(sketch.sketch_of(plan, flat), 256)
    direct = torch.zeros(256, dtype=torch.float64)
    for position, value in enumerate(flat.tolist()):
        row, column = divmod(position, plan.width)
        direct[column % 256] += float(plan.signs[8 * row + column]) * value
    torch.testing.assert_close(small.double(), direct, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_accumulator_sums_in_the_accumulating_dtype_and_gives_the_exact_norm(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    numels = [5000, 7, 2008 * 5]
    offsets, total = sketch.offsets_of(numels)
    plan = sketch.make_plan(total, SIZE)
    accumulator = Accumulator(plan, offsets, numels, groups=[0, 1, 1])
    before = [torch.randn(n, generator=generator).to(dtype) for n in numels]
    now = [torch.randn(n, generator=generator).to(dtype) for n in numels]
    for index in (2, 0, 1):  # any order
        accumulator.add(index, now[index], previous=before[index])
    sketches, squares = accumulator.take()
    held = [(a.clone().add_(b)).double() for a, b in zip(before, now, strict=True)]  # what accumulation leaves
    assert squares.tolist() == pytest.approx(
        [float(held[0].square().sum()), float(sum(h.square().sum() for h in held[1:]))], rel=1e-6
    )
    whole = sum(naive(plan, flat.float(), offset) for flat, offset in zip(held, offsets, strict=True))
    torch.testing.assert_close(sketches.sum(0).double(), whole, atol=1e-4, rtol=1e-5)
    again, none = accumulator.take()
    assert not again.any()
    assert not none.any()


def test_error_on_gradients_of_a_language_model() -> None:
    """Cosines and norms of real gradients, over many seeds of the signs: the error is the theory's, not more."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(512, 192),
        nn.Linear(192, 768),
        nn.GELU(),
        nn.Linear(768, 192),
        nn.LayerNorm(192),
        nn.Linear(192, 512),
    )
    numels = [p.numel() for p in model.parameters()]
    offsets, total = sketch.offsets_of(numels)
    gradients = []
    for _ in range(4):
        tokens = torch.randint(0, 64, (8, 33))  # few of the tokens: gradients of the embedding are sparse
        model.zero_grad()
        nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        gradients.append([p.grad.flatten().clone() for p in model.parameters() if p.grad is not None])
    flat = torch.stack([torch.cat(g) for g in gradients]).double()
    true_norms = flat.norm(dim=1)
    true_cosines = flat @ flat.T / torch.outer(true_norms, true_norms)
    first, second = torch.triu_indices(4, 4, offset=1)
    for size in (256, 1024, 4096):
        cosine_scores, norm_scores = [], []
        for seed in range(40):
            plan = sketch.make_plan(total, size, seed=seed)
            ours = torch.stack(
                [sum(sketch.sketch_of(plan, g, o) for g, o in zip(own, offsets, strict=True)) for own in gradients]
            ).double()
            norms = ours.norm(dim=1)
            cosines = ours @ ours.T / torch.outer(norms, norms)
            for i, j in zip(first.tolist(), second.tolist(), strict=True):
                expected = sketch.cosine_error(float(true_cosines[i, j]), size)
                cosine_scores.append(float(cosines[i, j] - true_cosines[i, j]) / expected)
            norm_scores += ((norms / true_norms - 1) / (2.0 * sketch.effective_size(size)) ** -0.5).tolist()
        for scores in (cosine_scores, norm_scores):
            values = torch.tensor(scores)
            # 40 independent seeds: the root mean square of a unit normal lies within 1 +- 4/sqrt(80)
            assert 0.5 < float(values.square().mean().sqrt()) < 1 + 4 / math.sqrt(80), size
            assert float(values.abs().max()) < 5, size
            assert abs(float(values.mean())) < 5 / math.sqrt(40), size
