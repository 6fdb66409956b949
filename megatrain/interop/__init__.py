"""Weights and runs of other programs, in and out.

hf/             folders of transformers: a table of names and settings for each family
megatron/       checkpoints of Megatron-LM: tensors by canonical name, the run's settings and counters
"""
