"""Weights and runs of other programs, in and out.

megatron/       checkpoints of Megatron-LM: tensors by canonical name, the run's settings and counters
"""
