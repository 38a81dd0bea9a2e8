"""Reduce gradients to bits that do not depend on how the micro-batches are spread over the ranks."""
