"""The drill under Megatron-core: its loop, its buckets, and the public faults that only its groups can have."""
