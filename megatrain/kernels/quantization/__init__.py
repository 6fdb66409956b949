"""Quantization of the weights of linear layers: pure functions of matrices, on any device.

rounding   scales, rounding to nearest, and back        gptq, awq   weights and scales that fit the inputs of a calibration
packing    small integers in 32-bit words
"""
