"""The fine-tune: data, sampler, scenarios, training loop, checkpoints.

python -m ds_silent.finetune --help     # the command, with what it needs; launch/train.py is the same
"""
