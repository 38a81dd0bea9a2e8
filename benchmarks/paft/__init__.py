"""The study of PAFT: what gradient aggregation errors do to a training, and what each way of repairing saves of it.

``benchmarks/paft.py`` is the command; :mod:`training` runs one training, everything else is before or after it.
"""
