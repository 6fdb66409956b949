"""Modules of BERT and T5: padding, cross-attention, relative positions, the heads."""
