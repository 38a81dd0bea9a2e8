"""What each rank sends and remembers, from what all ranks know: the configuration, their number and the adapter."""

from __future__ import annotations

from ds_silent.config import SilentConsistencyConfig
from ds_silent.exchange.gather import Layout, gathers_sketches
from ds_silent.frameworks.base import Capture
from ds_silent.maths.micro_batches import LARGEST
from ds_silent.replicas.history import Replicas

REMEMBERED = 10
"""Times between two comparisons of the replicas at which checksums are remembered, to find the first bad step by."""


def layout_of(config: SilentConsistencyConfig, ranks: int, capture: Capture) -> Layout:
    """What each rank sends, from what all ranks know."""
    direction, groups = config.direction, len(capture.layer_names)
    size = 0 if direction.method == "off" else direction.sketch_size
    exact = direction.method == "exact" or (direction.exact_interval > 0 and size > 0)
    aggregation = config.integrity.aggregation and size > 0
    places = aggregation and gathers_sketches(ranks)
    layers = groups if size and (direction.per_layer or places) else 0
    # Layers share about one sketch more; folding a sketch further gives the sketch of the smaller size. To find a
    # fault's place and the rank behind it, a few numbers per rank do.
    layer_size = max(256, 1 << (size // layers).bit_length() - 1) if layers else 0
    if layers and not direction.per_layer:
        layer_size = min(layer_size, place_size(size, ranks))
    steps = capture.micro_batches if places else 0
    return Layout(
        size,
        groups,
        capture.id_size,
        layers,
        min(layer_size, size),
        ranks * ranks if exact else 0,
        layer_aggregates=places,
        layer_records=direction.per_layer,
        hashes=1 + (groups if capture.aggregate_replicated else 0),
        micro_batches=steps if 1 < steps <= LARGEST // max(1, layers * layer_size) else 0,
    )


def place_size(sketch_size: int, ranks: int) -> int:
    """Numbers of a layer's sketch from which N ranks' shares in it can be solved, with some to spare."""
    return min(sketch_size, max(64, 1 << (4 * ranks - 1).bit_length()))


def replicas_of(config: SilentConsistencyConfig, capture: Capture) -> Replicas | None:
    """The checksums of the replica, or None where ranks have none, or nobody wants them."""
    parameters, others = capture.replicated()
    interval = config.integrity.replica_interval
    if not interval or not parameters:
        return None
    return Replicas(parameters, others, history=REMEMBERED + 2)
