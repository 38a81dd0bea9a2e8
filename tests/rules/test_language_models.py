"""Which models are causal language models by their own word, and which are compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ds_silent.rules.language_models import causal_model, is_compiled
from tests.rules.small_models import model_of


def test_the_one_model_below_wrappers_is_found() -> None:
    model = model_of("llama")
    assert causal_model(nn.Sequential(nn.Identity(), nn.ModuleList([model]))) is model
    assert causal_model(nn.ModuleList([model, model_of("llama")])) is None, "there are two"
    assert causal_model(nn.Linear(2, 2)) is None


def test_a_model_without_a_head_is_not_asked_for_its_loss(caplog: pytest.LogCaptureFixture) -> None:
    inner: Any = model_of("llama").model
    type(inner).loss_function = property(lambda self: pytest.fail("asked"))
    try:
        assert causal_model(inner) is None
    finally:
        del type(inner).loss_function


def own_loss(model: Any) -> None:
    model.loss_function = nn.functional.cross_entropy


def encodes(model: Any) -> None:
    model.config.is_encoder_decoder = True


def says_nothing(model: Any) -> None:
    for module in model.modules():
        vars(module).pop("is_causal", None)


def one_says_no(model: Any) -> None:
    next(module for module in model.modules() if hasattr(module, "is_causal")).is_causal = False


@pytest.mark.parametrize("change", [own_loss, encodes, says_nothing, one_says_no])
def test_a_model_that_does_not_say_so_is_none(change: Any) -> None:
    model = model_of("llama")
    assert causal_model(model) is model
    change(model)
    assert causal_model(model) is None


def test_either_way_to_compile_is_known() -> None:
    inside = nn.Linear(2, 2)
    inside.compile()
    assert is_compiled(nn.Sequential(inside))
    assert is_compiled(nn.Sequential(torch.compile(nn.Linear(2, 2))))
    assert not is_compiled(nn.Sequential(nn.Linear(2, 2)))
