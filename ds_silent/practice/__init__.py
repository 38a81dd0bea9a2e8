"""A small training of our own: the drill, the numerics and the benchmarks train it. Nothing is downloaded."""
