"""Tokenizers, by Megatron-LM's tokenizer types."""
