"""From what all ranks sent to numbers: on the host, in float64, for one record."""
