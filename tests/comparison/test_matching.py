"""Which tensor is whose: by names, by first weights, by shape and order; and what is said of the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from ds_silent.comparison.matching import ALIGNMENT, ComparisonError, Pairs, Side, coarse, pair_tensors
from ds_silent.framework import layers_of
from ds_silent.maths.sketch import offsets_of
from ds_silent.trace import SAMPLES, Head, Layer, Tensor, sampled

RNG = np.random.default_rng(3)
Named = tuple[str, np.ndarray]


def side(
    tensors: Sequence[Named], dtype: str = "float32", orders: Sequence[int] | None = None
) -> tuple[Head, np.ndarray]:
    """A head, and what its first step would hold of these whole tensors."""
    layers, numbers = layers_of([name for name, _ in tensors])
    found = [
        Tensor(
            name,
            values.shape,
            dtype,
            layer,
            min(SAMPLES, values.size),
            None if orders is None else orders[place],
        )
        for place, ((name, values), layer) in enumerate(zip(tensors, numbers, strict=True))
    ]
    weights = [v.reshape(-1)[sampled(v.size, t.samples)] for (_, v), t in zip(tensors, found, strict=True)]
    head = Head(1, 256, 2, 1, "", "fp32", 1e-7, 64, tuple(map(Layer, layers)), tuple(found), 1024)
    return head, np.concatenate(weights).astype(np.float32)


def paired(a: Sequence[Named], b: Sequence[Named], names: dict[str, str] | None = None) -> Pairs:
    (head_a, weights_a), (head_b, weights_b) = side(a), side(b)
    return pair_tensors(head_a, head_b, weights_a, weights_b, names or {})


def of(pairs: Pairs) -> dict[str, tuple[str, str]]:
    return {one.name: (one.other, one.how) for one in pairs.tensors}


def random(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def model() -> list[Named]:
    return [
        ("embed.weight", random(20, 8)),
        ("layers.0.q.weight", random(8, 8)),
        ("layers.0.q.bias", np.zeros(8, np.float32)),
        ("layers.1.q.weight", random(8, 8)),
        ("layers.1.q.bias", np.zeros(8, np.float32)),
        ("head.weight", random(20, 8)),
    ]


def test_equal_names() -> None:
    pairs = paired(model(), model())  # with other weights
    assert of(pairs) == {name: (name, "name") for name, _ in model()}
    assert [one.name for one in pairs.layers] == ["embed", "layers.0", "layers.1", "head"]
    assert all(one.sketched for one in pairs.layers)
    assert pairs.left_out == ()


def test_prefixes_of_wrappers_and_of_a_model_inside_another() -> None:
    ours = model()
    wrapped = [
        (f"module._orig_mod.{name.replace('layers.0.', 'layers.0._checkpoint_wrapped_module.')}", v) for name, v in ours
    ]
    assert of(paired(ours, wrapped))["layers.0.q.bias"] == (wrapped[2][0], "prefix")
    inside = [(f"transformer.model.{name}", values) for name, values in ours]
    for pairs in (paired(ours, inside), paired(inside, ours)):
        assert {how for _, how in of(pairs).values()} == {"prefix"}
        assert len(pairs.tensors) == len(ours)
        assert pairs.left_out == ()


def test_other_names_and_another_order_are_paired_by_the_first_weights() -> None:
    ours = model()
    other = [("out.w", ours[5][1]), ("h.1.w", ours[3][1]), ("h.0.w", ours[1][1]), ("wte.w", ours[0][1])]
    pairs = paired([one for one in ours if one[1].any()], other)
    assert of(pairs) == {
        "embed.weight": ("wte.w", "weights"),
        "layers.0.q.weight": ("h.0.w", "weights"),
        "layers.1.q.weight": ("h.1.w", "weights"),
        "head.weight": ("out.w", "weights"),
    }
    assert not any(one.sketched for one in pairs.layers)
    assert "norms only" in pairs.left_out[0]
    (_, weights_a), (_, weights_b) = side([one for one in ours if one[1].any()]), side(other)
    for one in pairs.tensors:
        assert (weights_a[one.here] == weights_b[one.there]).all()


def test_equal_first_weights_in_fewer_digits() -> None:
    values = [("a.weight", random(9, 8)), ("b.weight", random(9, 8))]
    rounded = [("y.weight", torch.tensor(values[1][1]).bfloat16().float().numpy()), ("x.weight", coarse(values[0][1]))]
    (head_a, weights_a), (head_b, weights_b) = side(values), side(rounded, "bfloat16")
    pairs = pair_tensors(head_a, head_b, weights_a, weights_b, {})
    assert of(pairs) == {"a.weight": ("x.weight", "weights"), "b.weight": ("y.weight", "weights")}


def test_coarse_rounds_as_torch_does() -> None:
    values = np.concatenate([random(1000), np.array([1.00390625, 1.01171875, -3.0e38, 1e-40], np.float32)])
    assert (coarse(values) == torch.tensor(values).bfloat16().float().numpy()).all()


def fused(*sizes: int) -> tuple[list[Named], list[Named]]:
    parts = [(f"layers.0.{name}.weight", random(size, 8)) for name, size in zip("qkv", sizes, strict=True)]
    return parts, [("layers.0.qkv.weight", np.concatenate([values for _, values in parts]))]


def test_fused_q_k_and_v() -> None:
    parts, whole = fused(8, 8, 8)
    for a, b in ((parts, whole), (whole, parts)):
        pairs, (_, weights_a), (_, weights_b) = paired(a, b), side(a), side(b)
        assert [one.how for one in pairs.tensors] == ["fused"] * 3
        shared = [(weights_a[one.here], weights_b[one.there]) for one in pairs.tensors]
        assert sum(len(one) for one, _ in shared) == SAMPLES
        for one, other in shared:
            assert (one == other).all()
        assert [one.sketched for one in pairs.layers] == [False]  # their places in the sketch are not known to agree
    assert paired([(name, random(*values.shape)) for name, values in parts], whole).tensors == ()


def test_fused_tensors_of_other_sizes_share_no_sampled_element() -> None:
    parts, whole = fused(16, 4, 4)
    pairs = paired(parts, whole)
    assert pairs.tensors == ()
    assert pairs.lonely == "only A trains layers.0.q.weight, layers.0.k.weight, layers.0.v.weight"


def test_what_is_left_is_paired_by_shape_and_order() -> None:
    ours = model()
    other = [(name.replace("layers", "h").replace("q", "z"), random(*values.shape)) for name, values in ours]
    pairs = paired(ours, other)
    assert of(pairs)["layers.1.q.weight"] == ("h.1.z.weight", "order")
    assert of(pairs)["layers.0.q.bias"] == ("h.0.z.bias", "order")
    assert pairs.left_out == ()


def test_a_transposed_tensor_has_its_norm_only() -> None:
    values = random(12, 8)
    pairs = paired([("a.weight", values)], [("b.weight", values.T.copy())])
    assert of(pairs) == {"a.weight": ("b.weight", "transposed")}
    assert len(pairs.tensors[0].here) == 0
    assert [one.sketched for one in pairs.layers] == [False]
    assert "weights of a.weight: laid out otherwise" in pairs.left_out[1]


def test_tied_in_one_training_only() -> None:
    embedding, block = random(20, 8), ("block.weight", random(8, 8))
    tied, untied = (
        [("embed.weight", embedding), block],
        [("embed.weight", embedding), block, ("head.weight", embedding)],
    )
    for pairs in (paired(tied, untied), paired(untied, tied)):
        assert [one.name for one in pairs.layers] == ["block"]
        assert pairs.left_out[1].startswith("gradients of weights that are tied in one training only")
        assert pairs.lonely.endswith("trains head.weight")


def test_a_tensor_without_a_counterpart_takes_its_layers_gradient_with_it() -> None:
    ours = model()
    pairs = paired(ours, ours[:-2] + ours[-1:])
    assert [one.name for one in pairs.layers] == ["embed", "layers.0", "head"]
    assert pairs.left_out[0] == "only A trains layers.1.q.bias"
    assert not pairs.layers[-1].sketched  # it lies elsewhere in the sketch
    assert next(one for one in pairs.tensors if one.name == "layers.1.q.weight").layer == -1


def test_the_map_comes_first() -> None:
    ours = [("a.0.w", random(8, 8)), ("a.1.w", random(8, 8))]
    other = [("b.0.w", ours[0][1]), ("b.1.w", ours[1][1])]
    assert of(paired(ours, other, {"a.0": "b.1", "a.1.w": "b.0.w"})) == {
        "a.0.w": ("b.1.w", "map"),
        "a.1.w": ("b.0.w", "map"),
    }
    for names, wrong in (
        ({"c": "b"}, "--map names 'c', which A has not; its first tensor is 'a.0.w'"),
        ({"a.0": "c"}, "--map names 'c.w', which B has not; its first tensor is 'b.0.w'"),
        ({"a.0.w": "b.0.w", "a.1.w": "b.0.w"}, "--map names one tensor of B for two of A; give each its own"),
    ):
        with pytest.raises(ComparisonError) as raised:
            paired(ours, other, names)
        assert str(raised.value) == wrong


def test_layers_come_in_the_order_of_the_forward() -> None:
    head, weights = side(model(), orders=[5, 3, 4, 1, 2, 0])
    pairs = pair_tensors(head, head, weights, weights, {})
    assert [one.name for one in sorted(pairs.layers, key=lambda one: one.order)] == [
        "head",
        "layers.1",
        "layers.0",
        "embed",
    ]


def test_sketches_of_another_size_or_place_do_not_subtract() -> None:
    head, weights = side(model())
    assert not any(
        one.sketched for one in pair_tensors(head, replace(head, sketch_size=512), weights, weights, {}).layers
    )
    assert not any(one.sketched for one in pair_tensors(head, replace(head, layer_size=0), weights, weights, {}).layers)


def test_offsets_are_those_of_the_sketch() -> None:
    numels = [1, 7, 8, 9, 24, 3]
    head, _ = side([(f"t{n}.weight", random(n)) for n in numels])
    assert Side(head, None).offsets() == offsets_of(numels)[0]
    assert offsets_of([1])[1] == ALIGNMENT


def test_without_weights_nothing_is_paired_by_them() -> None:
    (a, _), (b, _) = side([("a.weight", random(4, 4)), ("c.weight", random(5, 5))]), side([("b.weight", random(4, 4))])
    pairs = pair_tensors(a, b, None, None, {})
    assert of(pairs) == {"a.weight": ("b.weight", "order")}
