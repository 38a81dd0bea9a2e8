"""Do replicas hold the same bits, and how they are made equal again. Does not know why anybody asks."""
