"""Whatever is exchanged of each layer, a trace can be folded from it: its own size follows from the layers alone."""

from __future__ import annotations

from itertools import product

from ds_silent.config import parse
from ds_silent.exchange.layout import ExchangeShape, layout_of
from ds_silent.trace import layer_size


def test_what_is_exchanged_of_a_layer_is_folded_to_what_a_trace_holds() -> None:
    layers = (1, 2, 5, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 500, 2048, 2049, 5000)
    for count, ranks, per_layer, size in product(layers, (1, 16, 17, 64, 65, 256, 4096), (False, True), (256, 16_384)):
        block = {"trace": {"size": 64}, "direction": {"per_layer": per_layer, "sketch_size": size}}
        for aggregation in (False, True):
            config = parse({"silent_consistency": block | {"integrity": {"aggregation": aggregation}}})
            assert config is not None
            layout = layout_of(config, ExchangeShape(ranks, count, 4, 1, False, weights=10))
            assert layout.layers == count
            assert layout.layer_aggregates
            assert layout.layer_size % layer_size(count) == 0
            assert (layout.weights, layout.rows) == (11, 6)


def test_without_a_trace_nothing_more_is_exchanged() -> None:
    config = parse({"silent_consistency": {"integrity": {"aggregation": False}}})
    assert config is not None
    layout = layout_of(config, ExchangeShape(4, 3, 4, 1, False, weights=10))
    assert (layout.layers, layout.layer_aggregates, layout.weights, layout.rows) == (0, False, 0, 0)
