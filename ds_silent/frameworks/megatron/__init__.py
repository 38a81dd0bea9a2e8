"""The adapter of Megatron-core's ``DistributedDataParallel`` and optimizers: the only folder that touches their inside."""
