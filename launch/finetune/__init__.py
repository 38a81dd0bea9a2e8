"""The fine-tune that ``launch/train.py`` runs: data, sampler, scenarios, training loop, checkpoints."""
