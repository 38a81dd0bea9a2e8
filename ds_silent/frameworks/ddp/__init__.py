"""The adapter of torch's ``DistributedDataParallel``: the only folder that touches its inside."""
