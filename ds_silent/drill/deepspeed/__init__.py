"""A short real training under DeepSpeed with one fault in it."""
