"""A short real training in a loop of torch's own, under DistributedDataParallel or FSDP2, with one fault in it."""
