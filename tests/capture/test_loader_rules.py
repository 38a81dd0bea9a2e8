"""What a forward takes is compared with what the loader gave: rows that were changed on the way are still its rows."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ds_silent.capture.loader_rules import LEARNED, GivenRows
from ds_silent.capture.loaders import LoaderWatch
from ds_silent.device import ReadLater


class Loaders:
    """A training's loaders, of which one feeds it."""

    fetches_ahead = False

    def feeds_training(self, iterator: Any) -> bool:
        return iterator == "training"


class Run:
    """A loop: a batch is given, and something is forwarded, as its newest tensors or once more."""

    def __init__(self) -> None:
        self.step, self.loaders = 1, Loaders()
        self.rows = GivenRows(cast(LoaderWatch, self.loaders), lambda: self.step)

    def gives(self, batch: Any, iterator: str = "training") -> None:
        self.rows.advanced(iterator, batch)

    def takes(self, *tensors: Tensor, same: bool = False) -> bool:
        others = self.rows.forward(tensors, same)
        self.step += 1
        return others


def images(rows: int = 4) -> Tensor:
    return torch.rand(rows, 5, 6, 3, generator=torch.Generator().manual_seed(1)) + 0.1


def tokens(rows: int = 4, length: int = 24) -> Tensor:
    return torch.randint(3, 900, (rows, length), generator=torch.Generator().manual_seed(2))


def masked(batch: Tensor) -> Tensor:
    places = torch.arange(batch.shape[1]) % 4 == 0
    return torch.where(places, 1, batch)


ROWS: dict[str, tuple[Any, Any]] = {
    "as given": ({"x": images()}, lambda batch: batch["x"]),
    "in bf16": (images(), lambda batch: batch.bfloat16().float() * 0.5),
    "normalised": (images(), lambda batch: (batch - 0.4) / 0.3),
    "bytes, normalised": ((images() * 200).byte(), lambda batch: batch.float() / 255.0),
    "channels first": (images(), lambda batch: batch.permute(0, 3, 1, 2)),
    "a chunk": (tokens(8), lambda batch: batch[4:]),
    "without the last": (tokens(), lambda batch: batch[:, :-1]),
    "behind a first token": (tokens(), lambda batch: torch.cat((torch.full((4, 1), 1), batch[:, :-1]), 1)),
    "masked": (tokens(), masked),
    "joined": (tokens(), lambda batch: torch.cat((tokens(4, 24) + 1, batch[:0], batch))[4:]),
    "padded": ([one[: 8 + place] for place, one in enumerate(tokens())], lambda batch: pad_sequence(batch, True)),
    "one number": (torch.arange(4) + 7, lambda batch: batch[:, None]),
    "zeros": (torch.zeros(4, 8), lambda batch: batch),
    "words": (["a", "b"], lambda batch: tokens()),
}


@pytest.mark.parametrize("case", ROWS)
def test_rows_that_were_changed_on_the_way_are_the_loaders(case: str) -> None:
    batch, made = ROWS[case]
    run = Run()
    for _ in range(LEARNED + 2):
        run.gives(batch)
        assert run.takes(made(batch)) is False


@pytest.mark.parametrize(
    "other",
    [
        torch.cartesian_prod(torch.linspace(-1, 1, 4), torch.linspace(-1, 1, 4)),
        torch.randn(40, 16, generator=torch.Generator().manual_seed(3)),
        torch.full((4, 24), 901),
        torch.randn(4, 90, generator=torch.Generator().manual_seed(4)),
    ],
    ids=["places", "nodes", "a prompt", "noise"],
)
@pytest.mark.parametrize("anew", [False, True])
def test_a_constant_is_none_of_the_loaders_rows(other: Tensor, anew: bool) -> None:
    run = Run()
    for step in range(LEARNED + 2):
        run.gives({"x": images(), "y": tokens()})
        assert run.takes(other.clone() if anew else other, same=step > 0 and not anew) is True
    assert run.rows.breaches() == ()


def test_one_of_the_tensors_is_enough_and_other_kinds_may_be_rows() -> None:
    run, constant = Run(), torch.randn(40, 16)
    for _ in range(LEARNED):
        run.gives(images())
        assert run.takes(constant, images()) is False
    assert run.takes(constant) is True
    assert run.takes(torch.randn(3, 16)) is True  # the last of them
    assert run.takes(images(3)) is False
    assert run.takes(torch.arange(3)) is False  # nobody has seen such a one


def test_the_first_forward_waits_for_the_device_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    arrived, waits = False, 0

    def waited(later: ReadLater) -> None:
        nonlocal waits
        waits += 1

    monkeypatch.setattr(ReadLater, "ready", property(lambda later: arrived))
    monkeypatch.setattr(ReadLater, "wait", waited)
    run, constant = Run(), torch.randn(40, 16)
    run.gives(images())
    assert run.takes(images()) is False
    assert waits == 2  # for the batch, and for what is forwarded
    for _ in range(LEARNED):
        run.gives(images())
        assert run.takes(constant) is False  # not known yet
    assert waits == 2
    arrived = True
    assert run.takes(constant) is True
    assert run.takes(images()) is False


def test_batches_ahead_and_evaluations() -> None:
    run = Run()
    for step in range(3):
        run.gives(tokens() + step)
    assert run.takes(tokens()) is False  # the oldest
    assert run.loaders.fetches_ahead
    with torch.no_grad():
        run.gives(torch.randn(40, 16))
    assert run.takes(torch.randn(40, 16)) is True


@pytest.mark.parametrize(
    ("given", "told"),
    [("each", True), ("none", False), ("of another loader", False)],
)
def test_a_batch_that_is_trained_again_while_the_loader_goes_on_is_told(given: str, told: bool) -> None:
    run, batch = Run(), tokens()
    run.gives(batch)
    run.takes(batch)
    for _ in range(9):
        if given != "none":
            run.gives(tokens() + 1, "training" if given == "each" else "other")
        run.takes(batch, same=True)
    assert [one.key for one in run.rows.breaches()] == ["kept"] * told
    for _ in range(9):
        run.gives(batch)
        run.takes(batch)
    assert run.rows.breaches() == ()  # it is over


def test_a_batch_that_is_trained_several_times_is_no_fault() -> None:
    run, batch = Run(), tokens()
    for ahead in range(8):
        run.gives(batch + ahead)
    for step in range(20):
        run.gives(batch + 8 + step)
        for times in range(3):
            run.takes(batch + step, same=times > 0)
    assert run.rows.breaches() == ()
