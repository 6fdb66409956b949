"""`megatrain quantize`: a checkpoint as a folder of transformers whose linear layers are quantized.

plan          which tensors, and what is refused before a weight is read
calibration   samples of a dataset, which run through one layer after the other, and what they say about its inputs
layer         the rounding of one layer's tensors
folder        the files, layer by layer, and how far a stopped command came
"""
