"""Checkpoints of Megatron-LM in the format `torch_dist`, read without running any code that they name.

.metadata, *.distcp ─> inert_pickle ─> torch_dist ─> names ─> run (a reader of canonical tensors, with a manifest)
                                                     arguments ─┘
"""
