"""Long numbers are shown short, and different ones never alike."""

from __future__ import annotations

import pytest

from ds_silent.preflight.items import item_of
from ds_silent.preflight.messages import events_of, short_numbers
from tests.support.preflight import outcome_of


@pytest.mark.parametrize(
    ("texts", "shown"),
    [
        (["0.15000000000000002"], ["0.15"]),
        (["0.15000000000000002", "0.3"], ["0.15", "0.3"]),
        (["[0.9, 0.9990000000000001]"], ["[0.9, 0.999]"]),
        (["-3.0000000000000004e-05"], ["-3e-05"]),
        (["0.15000000000000002", "0.15"], ["0.15000000000000002", "0.15"]),  # two values
        (["0.15, 0.15000000000000002"], ["0.15, 0.15000000000000002"]),  # of two parameter groups
        (["0.30000000000000004, 0.15", "0.15000000000000002"], ["0.3, 0.15", "0.15000000000000002"]),
        (["0.15000000000000002", "0.1500000000000001"], ["0.15000000000000002", "0.1500000000000001"]),
        (["0.15000000000000002", "0.15000001"], ["0.15", "0.15000001"]),
        (["1.000000000001e+300"], ["1.000000000001e+300"]),  # no float32
        (["0.123456789012"], ["0.12345679"]),
        (["12345678901234567890", "0.0"], ["12345678901234567890", "0.0"]),
        (["2.10", "2.4.1", "torch 2.10.0+cu12", "1e-08"], ["2.10", "2.4.1", "torch 2.10.0+cu12", "1e-08"]),
        (["10.1234567890.2", "a1.23456789012"], ["10.1234567890.2", "a1.23456789012"]),
    ],
)
def test_short_numbers(texts: list[str], shown: list[str]) -> None:
    assert short_numbers(texts) == shown


@pytest.mark.parametrize(("other", "told"), [("0.3", "0.15 on ranks 0, 1; 0.3"), ("0.15", "0.15000000000000002 on")])
def test_the_message_of_a_learning_rate(other: str, told: str) -> None:
    import numpy as np

    values = ["0.15000000000000002", "0.15000000000000002", other]
    items = [item_of("learning rate", "optimizer", value) for value in values]
    hashes = np.array([[item.hash] for item in items], dtype=np.int32)
    [event] = events_of(outcome_of(items[:1], hashes, {0: values}))
    assert told in event.message
