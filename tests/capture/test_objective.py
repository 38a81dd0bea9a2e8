"""How much each label counts, read from the graphs of real losses.

The expected weights are worked out by hand from the formula of each loss; whoever shares no line with the reading.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from ds_silent.capture.loss_graph import NODES, terms_of
from ds_silent.capture.objective import NO_OTHERS, LocalObjective
from ds_silent.capture.step import StepMoments
from ds_silent.patches.script_hooks import ScriptHooks

CLASSES, ROWS, STEPS = 8, 6, 12

# -- one graph ---------------------------------------------------------------------------------------------------------

TARGETS = torch.tensor([3, -100, 1, 7, 0, -100])
CLASS_WEIGHTS = torch.arange(1.0, 1.0 + CLASSES)
MASK = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0])


class _Two(torch.autograd.Function):
    """Hands two losses through, as a wrapper of several outputs does."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, second: Tensor) -> Any:
        return first.clone(), second.clone()

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> Any:
        return first, second


def _logits() -> Tensor:
    return torch.randn(ROWS, CLASSES, generator=torch.Generator().manual_seed(1)).requires_grad_()


def _each(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits, TARGETS, reduction="none")


READ: dict[str, tuple[Callable[[Tensor], Tensor], tuple[float, float, float, float]]] = {
    # sum, smallest and largest weight of a label, and labels
    "mean": (lambda x: F.cross_entropy(x, TARGETS), (1, 1 / 4, 1 / 4, 4)),
    "mean of parts": (lambda x: F.cross_entropy(x, TARGETS) / 4, (1 / 4, 1 / 16, 1 / 16, 4)),
    "times": (lambda x: 3 * F.cross_entropy(x, TARGETS) / 2, (3 / 2, 3 / 8, 3 / 8, 4)),
    "sum": (lambda x: F.cross_entropy(x, TARGETS, reduction="sum"), (4, 1, 1, 4)),
    "sum over a tensor": (
        lambda x: F.cross_entropy(x, TARGETS, reduction="sum") / torch.tensor(16),
        (1 / 4, 1 / 16, 1 / 16, 4),
    ),
    "masked by hand": (lambda x: (_each(x) * MASK).sum() / MASK.sum(), (1, 1 / 3, 1 / 3, 3)),
    "weighed by hand": (lambda x: (_each(x) * torch.tensor([1.0, 0, 2, 3, 4, 5])).mean(), (10 / 6, 1 / 6, 4 / 6, 4)),
    "ignored labels in a sum by hand": (lambda x: _each(x).sum() / 4, (1, 1 / 4, 1 / 4, 4)),
    "ignored labels of an image": (
        lambda x: (
            F.cross_entropy(x.view(1, ROWS, CLASSES, 1).transpose(1, 2), TARGETS[None, :, None], reduction="none")
            .view(-1)
            .mean()
        ),
        (4 / 6, 1 / 6, 1 / 6, 4),
    ),
    "of an image": (
        lambda x: F.cross_entropy(x.view(1, ROWS, CLASSES).transpose(1, 2), TARGETS[None]),
        (1, 1 / 4, 1 / 4, 4),
    ),
    "two means": (
        lambda x: torch.stack([F.cross_entropy(x[:2], TARGETS[:2]), F.cross_entropy(x[2:], TARGETS[2:])]).mean(),
        (1, 1 / 6, 1 / 2, 4),
    ),
    "squares": (lambda x: F.mse_loss(x, torch.zeros(ROWS, CLASSES)), (1, 1 / 48, 1 / 48, 48)),
    "squares by hand": (lambda x: (x - 1.0).square().mean() / 2, (1 / 2, 1 / 96, 1 / 96, 48)),
    "sum by hand": (lambda x: (x - 1.0).square().sum() / 2, (24, 1 / 2, 1 / 2, 48)),
    "binary": (
        lambda x: F.binary_cross_entropy_with_logits(x, torch.zeros(ROWS, CLASSES)),
        (1, 1 / 48, 1 / 48, 48),
    ),
    "smooth l1": (lambda x: F.smooth_l1_loss(x, torch.zeros(ROWS, CLASSES), reduction="sum"), (48, 1, 1, 48)),
    "smoothed": (lambda x: F.cross_entropy(x, TARGETS, label_smoothing=0.1), (1.0, 0.25, 0.25, 4)),
    "with another": (lambda x: F.cross_entropy(x, TARGETS) + 0.1 * x.square().mean(), (1, 1 / 4, 1 / 4, 4)),
    "class weights": (
        lambda x: F.cross_entropy(x, TARGETS, weight=CLASS_WEIGHTS, reduction="sum") / 15,
        (4 / 15, 1 / 15, 1 / 15, 4),
    ),
    "the second of two": (
        lambda x: _Two.apply(F.cross_entropy(x, TARGETS), F.cross_entropy(x, TARGETS, reduction="sum"))[1],
        (4, 1, 1, 4),
    ),
    "negative": (lambda x: -x.log_softmax(1).gather(1, TARGETS.clamp(0)[:, None]).mean(), (1, 1 / 6, 1 / 6, 6)),
    "negative of a loss": (lambda x: -F.cross_entropy(x, TARGETS), (-1, -1 / 4, -1 / 4, 4)),
}


def _numbers(objective: LocalObjective) -> tuple[float, ...]:
    found = objective.numbers()
    return tuple(float(value) for value in (found.weight, found.smallest, found.largest, found.labels))


def _backward(objective: LocalObjective, loss: Tensor, reached: bool = True) -> None:
    objective.begins(loss)
    loss.backward()
    objective.reached = reached


@pytest.mark.parametrize("name", READ)
def test_the_weight_of_a_label_is_what_the_formula_says(name: str) -> None:
    loss, expected = READ[name]
    objective, logits = LocalObjective(), _logits()
    _backward(objective, loss(logits))
    assert objective.numbers().known == 1.0
    assert _numbers(objective) == pytest.approx(expected, rel=1e-6)
    plain = _logits()
    loss(plain).backward()
    assert torch.equal(logits.grad, plain.grad)  # type: ignore[arg-type]


OTHER_LABELS = torch.full((ROWS, CLASSES), 1 / CLASSES)
SCALED = {
    "none": (lambda x: F.cross_entropy(x, TARGETS), "none"),
    "a temperature": (lambda x: F.cross_entropy(x / 2.0, TARGETS), "NllLossBackward0 (mean) > DivBackward0 x 0.5"),
    "of a distillation": (
        lambda x: 4 * F.kl_div(F.log_softmax(x / 2.0, -1), OTHER_LABELS, reduction="batchmean"),
        "MulBackward0 > DivBackward0 x 0.5",
    ),
    "of the second term": (
        lambda x: F.cross_entropy(x, TARGETS) + F.mse_loss(x.float().mul(0.1).view(-1), torch.zeros(ROWS * CLASSES)),
        "MseLossBackward0 (mean) > MulBackward0 x 0.1",
    ),
    "of two": (
        lambda x: F.binary_cross_entropy_with_logits(30.0 * x.flatten() / 7.0, torch.zeros(ROWS * CLASSES)),
        "BinaryCrossEntropyWithLogitsBackward0 (mean) > DivBackward0 x 0.142857 > MulBackward0 x 30",
    ),
    "within a layer": (lambda x: F.cross_entropy((x * 3.0).relu(), TARGETS), "none"),
    "of a tensor": (lambda x: F.cross_entropy(x * torch.tensor(3.0), TARGETS), "none"),
    "of a fused loss": (lambda x: _Two.apply(x.sum(), x.sum())[0], "none"),
}


@pytest.mark.parametrize("name", SCALED)
def test_the_scripts_own_numbers_in_what_a_loss_is_made_of_are_read(name: str) -> None:
    loss, expected = SCALED[name]
    objective = LocalObjective()
    assert objective.inputs == ""
    _backward(objective, loss(_logits()))
    assert objective.inputs == expected


def test_micro_batches_add_up_and_another_models_backward_does_not_count() -> None:
    objective = LocalObjective()
    for reached in (True, False, True):
        _backward(objective, F.cross_entropy(_logits(), TARGETS) / 2, reached)
    assert _numbers(objective) == pytest.approx((1, 1 / 8, 1 / 8, 8))
    assert objective.numbers().count == 2.0
    objective.start()
    assert objective.numbers().known == objective.numbers().count == 0.0


class _Kept:
    """What a graph has saved of a tensor, and dies with it."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor.detach()  # an output that keeps its own graph would never die


def test_nothing_of_a_graph_outlives_its_backward() -> None:
    kept: list[weakref.ref[_Kept]] = []

    def pack(tensor: Tensor) -> _Kept:
        packed = _Kept(tensor)
        kept.append(weakref.ref(packed))
        return packed

    objective = LocalObjective()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed.tensor):
        loss = smoother(_logits())
    objective.begins(loss, own=True)
    loss.backward(retain_graph=True)  # else the backward itself lets it go
    assert any(one() is not None for one in kept)
    del loss
    gc.collect()
    assert [one() for one in kept] == [None] * len(kept)
    assert objective.structure


def test_a_graph_that_is_kept_counts_once_for_each_backward() -> None:
    objective, logits = LocalObjective(), _logits()
    loss = F.cross_entropy(logits, TARGETS)
    for root in (loss, 3 * loss):
        objective.begins(root)
        root.backward(retain_graph=True)
        objective.reached = True
    assert _numbers(objective) == pytest.approx((4, 1 / 4, 3 / 4, 8))


MASKED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "multiplied": lambda each, mask: (each * mask).sum() / mask.sum(),
    "multiplied, mean": lambda each, mask: (each * mask).mean(),
    "filled, mean": lambda each, mask: each.masked_fill(mask == 0, 0.0).mean(),
    "filled, and more": lambda each, mask: (each.masked_fill(mask == 0, 0.0) + each).sum() / mask.sum(),
    "multiplied, and more": lambda each, mask: (each + each * mask).sum() / mask.sum(),
    "filled twice": lambda each, mask: each.masked_fill(mask == 0, 0.0).masked_fill(mask > 1, 0.0).sum() / mask.sum(),
    "where": lambda each, mask: torch.where(mask > 0, each, 0.0).mean(),
}


@pytest.mark.parametrize("name", MASKED)
@pytest.mark.parametrize("fused", [False, True])
def test_how_many_labels_a_mask_leaves_is_not_guessed(name: str, fused: bool) -> None:
    """The graph does not show which elements of a loss by hand, or of a fused one, are labels."""
    objective, logits = LocalObjective(), _logits()
    each = _EachFused.apply(logits) if fused else -logits.log_softmax(1).gather(1, TARGETS.clamp(0)[:, None])[:, 0]
    _backward(objective, MASKED[name](each, MASK))
    assert objective.numbers().known == 0.0
    if fused:
        objective.start()
        _backward(objective, _EachFused.apply(_logits()).sum())
        assert objective.numbers().known == 0.0


@pytest.mark.parametrize("fused", [False, True])
def test_a_sum_by_hand_counts_what_one_mask_has_not_filled(fused: bool) -> None:
    """TRL's SFT fills with 0 what is no label, behind a function of its own."""
    objective, logits = LocalObjective(), _logits()
    each = _EachFused.apply(logits) if fused else logits.log_softmax(1).gather(1, TARGETS.clamp(0)[:, None])[:, 0]
    _backward(objective, -each.masked_fill(MASK == 0, 0.0).sum() / torch.tensor(6.0))
    assert objective.numbers().known == 1.0
    assert _numbers(objective) == pytest.approx((1 / 2, 1 / 6, 1 / 6, 3))


class _EachFused(torch.autograd.Function):
    """Mask inside, as chunked losses do."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return logits.sum(1) * MASK

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (logits,) = ctx.saved_tensors
        return (gradients[0] * MASK)[:, None].expand_as(logits)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return logits.square().mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (logits,) = ctx.saved_tensors
        return gradient * 2 * logits / logits.numel()


def test_what_cannot_be_read_is_not_known() -> None:
    def too_deep(logits: Tensor) -> Tensor:
        loss = F.cross_entropy(logits, TARGETS)
        for _ in range(NODES):
            loss = loss * 1.0
        return loss

    def masked(logits: Tensor) -> Tensor:
        return ((logits - 1.0).square().mean(1) * MASK).sum() / 4  # of how many rows the mask is 1, nobody knows

    for make in (_Fused.apply, too_deep, masked, lambda logits: logits[0, 0] * 0.0 + logits.sum() * 0.0):
        objective = LocalObjective()
        _backward(objective, make(_logits()))
        found = objective.numbers()
        assert (found.known, found.weight, found.labels) == (0.0, 0.0, 0.0)
    objective = LocalObjective()
    objective.begins([_logits().sum(), _logits().sum()])
    objective.reached = True
    assert objective.structure == ()


def test_what_hooks_have_packed_is_not_unpacked() -> None:
    """Else a checkpoint would compute its part twice, and what lies on the host would come back."""
    runs = []

    def part(logits: Tensor) -> Tensor:
        runs.append(1)
        return F.cross_entropy(logits, TARGETS)

    objective, logits = LocalObjective(), _logits()
    loss = checkpoint(part, logits, use_reentrant=False)
    objective.begins(loss)
    assert len(runs) == 1
    loss.backward()
    objective.reached = True
    assert len(runs) == 2
    assert objective.numbers().known == 0.0
    with save_on_cpu():
        loss = F.cross_entropy(_logits(), TARGETS, reduction="sum") * 0.5
    _backward(objective := LocalObjective(), loss)
    assert objective.factor == 0.5  # a number of Python's is never packed
    assert objective.numbers().known == 0.0
    with save_on_cpu():
        loss = _each(_logits()).sum() / 4
    _backward(objective := LocalObjective(), loss)
    assert objective.numbers().known == 0.0, "which labels are ignored is packed"


def test_a_graph_that_breaks_the_reading_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(way: Any, name: str) -> Any:
        raise AttributeError("another release's node")

    monkeypatch.setattr("ds_silent.capture.loss_graph._loss", broken)
    _backward(objective := LocalObjective(), F.cross_entropy(_logits(), TARGETS))
    assert objective.structure == ()
    assert objective.numbers().known == 0.0


def test_only_numbers_of_the_script_are_its_factor() -> None:
    for factor, expected in ((0.25, 0.25), (4, 4.0), (torch.tensor(0.25), 1.0), (torch.tensor(0.25).double(), 1.0)):
        objective = LocalObjective()
        _backward(objective, F.cross_entropy(_logits(), TARGETS) * factor)
        assert objective.factor == expected


def test_nothing_is_read_where_nothing_is_measured() -> None:
    objective, loss = LocalObjective(), F.cross_entropy(_logits(), TARGETS)
    nothing = cast(Any, SimpleNamespace(step=1, script_hooks=ScriptHooks(), leave=None))
    settings = cast(Any, SimpleNamespace(objective=objective))
    moments = StepMoments(nothing, nothing, nothing, nothing, nothing, settings, keep=None)
    moments.root(loss)
    loss.backward()
    objective.reached = True
    assert objective.structure == ()
    assert objective.numbers().count == 0.0


def test_a_factor_that_changes_within_a_step_is_none() -> None:
    objective = LocalObjective()
    for factor in (0.5, 0.25):
        _backward(objective, F.cross_entropy(_logits(), TARGETS) * factor)
    assert objective.factor == 0.0
    assert objective.constants is None
    assert _numbers(objective) == pytest.approx((0.75, 0.25 / 4, 0.5 / 4, 8))


@pytest.mark.parametrize(("losses", "known"), [(8, 1.0), (9, 0.0)])
def test_a_backward_of_very_many_losses_is_not_hooked(losses: int, known: float) -> None:
    objective = LocalObjective()
    _backward(objective, torch.stack([F.cross_entropy(_logits(), TARGETS) for _ in range(losses)]).mean())
    assert objective.numbers().known == known


def test_what_a_wrapper_multiplies_by_below_its_loss_counts_for_that_loss_alone() -> None:
    objective = LocalObjective()
    loss = F.cross_entropy(_logits(), TARGETS)
    objective.handed(loss, None, below=0.25)
    _backward(objective, loss)
    assert _numbers(objective) == pytest.approx((1 / 4, 1 / 16, 1 / 16, 4))
    _backward(objective, F.cross_entropy(_logits(), TARGETS))
    assert _numbers(objective) == pytest.approx((5 / 4, 1 / 16, 1 / 4, 8))


def test_what_a_wrapper_divides_below_its_loss_is_not_undivided() -> None:
    for below, undivided in ((1.0, True), (0.25, False)):
        objective = LocalObjective()
        for _ in range(4):
            loss = F.cross_entropy(_logits(), TARGETS)
            objective.handed(loss, None, below)
            _backward(objective, loss)
        assert objective.is_undivided(4) == undivided


def test_a_hook_that_breaks_makes_the_step_unknown_and_ends_no_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    objective, logits = LocalObjective(), _logits()
    _backward(objective, _each(logits).mean())
    monkeypatch.setattr("ds_silent.capture.objective._of_each", lambda *_: 1 / 0)
    _backward(objective, _each(logits).mean())
    assert torch.count_nonzero(logits.grad)  # type: ignore[arg-type]
    assert (objective.numbers().known, objective.numbers().count) == (0.0, 2.0)


def test_a_mean_of_no_labels_has_no_infinite_weight() -> None:
    objective = LocalObjective()
    _backward(objective, F.cross_entropy(_logits(), torch.full_like(TARGETS, -100)))
    assert _numbers(objective) == (1.0, 1.0, 1.0, 0.0)


def _items(objective: LocalObjective, loss: Callable[[Tensor, Any], Tensor], items: Any, given: Any = None) -> bool:
    """Whether a loss is seen to be divided by the items that the forward was given."""
    objective.items = items if given is None else given
    _backward(objective, loss(_logits(), items))
    assert objective.constants is not None
    return objective.constants.by_items


def _summed(logits: Tensor, items: Any) -> Tensor:
    return F.cross_entropy(logits, TARGETS, reduction="sum") / items


def test_a_division_by_the_items_is_known_from_any_other() -> None:
    for items in (torch.tensor(4), torch.tensor(4.0), 4):
        objective = LocalObjective()
        assert _items(objective, lambda x, n: 3 * _summed(x, n), items)
        assert objective.constants is not None
        assert (objective.constants.times, objective.constants.divisors) == (3.0, ())
        assert not objective.constants.by_tensor
    for items, given in ((torch.tensor(4), torch.tensor(4)), (torch.tensor(4), 4), (4, torch.tensor(4)), (4, 5)):
        assert not _items(LocalObjective(), _summed, items, given), (items, given)
    assert not _items(LocalObjective(), lambda x, n: (x - 1.0).square().sum() / n, torch.tensor(4)), "elements"
    assert not _items(LocalObjective(), lambda x, n: F.mse_loss(x, x * 0.0, reduction="sum") / n, torch.tensor(4))
    twice = LocalObjective()
    assert _items(twice, lambda x, n: _summed(x, n) / n, torch.tensor(4))
    assert twice.constants is not None
    assert twice.constants.by_tensor


def smoother(logits: Tensor, epsilon: float = 0.1, items: Any = None) -> Tensor:
    """transformers' LabelSmoother, as its Trainer calls it; before 5.13 it had no ``items``."""
    log = -logits.log_softmax(1)
    padding = TARGETS.eq(-100)[:, None]
    own, every = log.gather(1, TARGETS.clamp(0)[:, None]), log.sum(1, keepdim=True, dtype=torch.float32)
    own.masked_fill_(padding, 0.0)
    every.masked_fill_(padding, 0.0)
    count = padding.numel() - padding.long().sum() if items is None else items
    return (1 - epsilon) * (own.sum() / count) + epsilon * (every.sum() / (count * CLASSES))


def test_a_smoothed_label_weighs_its_own_and_what_its_classes_do() -> None:
    """By hand: the cross-entropy of each of the 4 labels with its soft target counts once in the sum."""
    for epsilon in (0.1, 0.4):
        _backward(objective := LocalObjective(), 3 * smoother(_logits(), epsilon))
        assert _numbers(objective) == pytest.approx((3, 3 / 4, 3 / 4, 4), rel=1e-6)
        assert objective.numbers().others == NO_OTHERS
        assert objective.numbers().factor == pytest.approx(3.0)
    objective, items = LocalObjective(), torch.tensor(16)
    assert _items(objective, lambda x, n: 2 * smoother(x, items=n), items)
    assert _numbers(objective) == pytest.approx((1 / 2, 1 / 8, 1 / 8, 4), rel=1e-6)
    assert objective.constants is not None
    assert (objective.constants.times, objective.constants.by_tensor) == (pytest.approx(2.0), False)
    other = TARGETS.eq(1)[:, None]
    each = _logits().log_softmax(1)
    gathered, summed = each.gather(1, TARGETS.clamp(0)[:, None]), each.sum(1, keepdim=True)
    another_mask = gathered.masked_fill(TARGETS.eq(-100)[:, None], 0.0).sum() + summed.masked_fill(other, 0.0).sum()
    entropy = (each.exp() * each).sum(1, keepdim=True).masked_fill(other, 0.0).sum()
    for apart in (another_mask, gathered.masked_fill(other, 0.0).sum() + entropy):
        terms = terms_of(apart)
        assert terms is not None
        assert [term.smoothing for term in terms] == [None, None]


def test_how_often_a_term_counts_beside_labels_that_the_items_divide() -> None:
    def counted(loss: Callable[[Tensor, Any], Tensor], backwards: int = 4, ranks: int = 3) -> int:
        objective, items = LocalObjective(), torch.tensor(16)
        objective.items = items
        for _ in range(backwards):
            _backward(objective, loss(_logits(), items))
        return objective.counted_beside(ranks)

    def routed(logits: Tensor) -> Tensor:
        return (logits.softmax(1).mean(0) * torch.ones(CLASSES)).sum() * CLASSES

    assert counted(lambda x, n: 3 * (_summed(x, n) + 0.02 * routed(x))) == 4 * 3
    assert counted(lambda x, n: 3 * (_summed(x, n) + 0.02 * routed(x)), backwards=1) == 3
    assert counted(lambda x, n: _summed(x, n) + 0.02 * routed(x)) == 4
    silent: dict[str, Callable[[Tensor, Any], Tensor]] = {
        "divided": lambda x, n: 3 * _summed(x, n) + 0.02 * routed(x) / 4,
        "divided by a tensor": lambda x, n: 3 * (_summed(x, n) + routed(x) / torch.tensor(4.0)),
        "the labels alone are multiplied": lambda x, n: 3 * _summed(x, n) + 0.02 * routed(x),
        "the labels alone are divided": lambda x, n: 3 * (_summed(x, n) / 4 + 0.02 * routed(x)),
        "no other": lambda x, n: 3 * _summed(x, n),
        "no items": lambda x, n: 3 * (F.cross_entropy(x, TARGETS) + 0.02 * routed(x)),
        "a loss scale": lambda x, n: torch.tensor(8.0) * (_summed(x, n) + 0.02 * routed(x)),
        "smoothed": lambda x, n: 3 * smoother(x, items=n),
    }
    for name, loss in silent.items():
        assert counted(loss) == 0, name


def _preferred(logits: Tensor) -> Tensor:
    """A pair of rows, as DPO's: one number, of which the mean is taken."""
    log = logits.log_softmax(1)[:, :1].sum(1)
    return F.logsigmoid(0.1 * (log[:1] - log[1:2]))


UNDIVIDED: dict[str, Callable[[Tensor], Tensor]] = {
    "DPO": lambda x: (-_preferred(x) * (1 - 0.0) - F.logsigmoid(-_preferred(x)) * 0.0).mean(),
    "ORPO": lambda x: F.cross_entropy(x, TARGETS) - (0.1 * _preferred(x)).mean(),
    "with another": lambda x: F.cross_entropy(x, TARGETS) + 0.1 * x.square().mean(),
    "a mean by hand": lambda x: (x - 1.0).square().mean(),
}
PERHAPS_DIVIDED: dict[str, Callable[[Tensor], Tensor]] = {
    **{f"{name}, divided": lambda x, of=of: of(x) / 4 for name, of in UNDIVIDED.items()},  # type: ignore[misc]
    **{f"{name}, a quarter": lambda x, of=of: of(x) * 0.25 for name, of in UNDIVIDED.items()},  # type: ignore[misc]
    **{f"{name}, a tensor": lambda x, of=of: of(x) * torch.tensor(0.25) for name, of in UNDIVIDED.items()},  # type: ignore[misc]
    **{f"{name}, a function": lambda x, of=of: _Shared.apply(of(x)) for name, of in UNDIVIDED.items()},  # type: ignore[misc]
    "one of two, by another number": lambda x: F.cross_entropy(x, TARGETS) / 3 + x.square().mean(),
    "one of two, a quarter": lambda x: F.cross_entropy(x, TARGETS) * 0.25 + x.square().mean(),
    "one of two": lambda x: F.cross_entropy(x, TARGETS) / 4 + x.square().mean(),
    "no whole mean": lambda x: 0.9 * F.cross_entropy(x, TARGETS) + 0.1 * x.square().mean(),
    "a share of the items": lambda x: F.cross_entropy(x, TARGETS) * (4 / 17),
    "a sum": lambda x: F.cross_entropy(x, TARGETS, reduction="sum"),
    "a sum by hand": lambda x: (x - 1.0).square().sum(),
    "a sum of means": lambda x: torch.stack([F.cross_entropy(x, TARGETS)] * 2).sum(),
    "fused": lambda x: _Fused.apply(x),
    "fused, and a mean": lambda x: _Fused.apply(x) + x.square().mean(),
    "divided below": lambda x: (_each(x) / 4).mean(),
}


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        return loss / 4

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / 4


def _is_undivided(loss: Callable[[Tensor], Tensor], backwards: int = 4) -> bool:
    objective = LocalObjective()
    for _ in range(backwards):
        _backward(objective, loss(_logits()))
    return objective.is_undivided(4)


def test_a_loss_that_nothing_divides_is_known_from_one_that_may_be() -> None:
    for name, loss in UNDIVIDED.items():
        assert _is_undivided(loss), name
        assert not _is_undivided(loss, backwards=2), f"{name}: a short window"
    for name, loss in PERHAPS_DIVIDED.items():
        assert not _is_undivided(loss), name
    objective = LocalObjective()
    _backward(objective, UNDIVIDED["a mean by hand"](_logits()))
    assert not objective.is_undivided(1), "nothing is accumulated"
    objective.start()
    for divisor in (1, 1, 1, 4):
        _backward(objective, UNDIVIDED["DPO"](_logits()) / divisor)
    assert not objective.is_undivided(4)


@pytest.mark.parametrize("parts", [1, 2, 3, 6])
def test_a_mean_of_means_has_no_factor_however_many_they_are(parts: int) -> None:
    def losses(logits: Tensor) -> list[Tensor]:
        return [F.cross_entropy(x, y.clamp(0)) for x, y in zip(logits.chunk(parts), TARGETS.chunk(parts), strict=True)]

    for make in (lambda x: torch.stack(losses(x)).mean(), lambda x: sum(losses(x)) / parts):
        objective = LocalObjective()
        _backward(objective, make(_logits()))
        assert objective.factor == pytest.approx(1.0)
    _backward(
        objective := LocalObjective(), sum(F.cross_entropy(x, TARGETS, reduction="sum") for x in [_logits()] * parts)
    )
    assert objective.factor == 1.0  # of several sums each label counts alone


@pytest.mark.parametrize("ignored", [-100, 2])
def test_what_cross_entropy_smooths_by_itself_is_the_labels_own(ignored: int) -> None:
    """The part that is smoothed over the classes was another term, so that no promise was checked."""
    targets = TARGETS.where(TARGETS >= 0, torch.tensor(ignored))
    loss = F.cross_entropy(_logits(), targets, label_smoothing=0.1, ignore_index=ignored) / 4
    [term] = terms_of(loss) or []
    assert (term.constants.divisors, term.constants.times) == ((4.0,), 1.0)
    assert term.factor == pytest.approx(0.25)
    both = F.cross_entropy(_logits(), TARGETS, label_smoothing=0.1) + F.cross_entropy(_logits(), TARGETS) * 0.9
    assert len(terms_of(both) or []) == 2, "another loss beside it stays"
