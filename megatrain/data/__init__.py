"""From text to micro-batches: indexed files, GPT samples, samplers, tokenizers, preprocessing.

    text --preprocess--> .bin/.idx --indexed--> sequences --gpt_dataset--> samples --sampler, loader--> Batch

This file imports nothing: preprocessing must start without torch.
"""
