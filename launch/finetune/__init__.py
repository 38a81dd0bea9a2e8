"""The fine-tune: data, sampler, scenarios, training loop, checkpoints.

python launch/train.py --help     # the command, with what it needs
"""
