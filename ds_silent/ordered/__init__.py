"""A reduction whose bits do not depend on how the micro-batches are spread over the ranks."""
