"""The adapter of torch's FSDP2 (``fully_shard``): the only folder that touches its inside."""
