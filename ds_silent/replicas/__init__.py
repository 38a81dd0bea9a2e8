"""Compare replicas bit by bit, and make them equal again."""
