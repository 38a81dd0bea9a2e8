"""Pure functions of small tensors: sketches, statistics over ranks, rounding bounds, what is missing from a sum."""
