"""The adapter of Megatron-core's ``DistributedDataParallel``: the only folder that touches its inside."""
