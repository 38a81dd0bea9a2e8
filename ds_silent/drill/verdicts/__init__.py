"""Was a fault found, and was it repaired? Pure: events and states in, a judgement out."""
