"""From text to micro-batches: indexed files, GPT samples, samplers, tokenizers, preprocessing.

    text --preprocess--> .bin/.idx --indexed--> sequences --gpt--> samples --sampler, loader--> Batch

Nothing is imported here: preprocessing must start without torch.
"""
