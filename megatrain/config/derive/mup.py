"""Maximal update parametrization (muP): hyperparameters found at a base width hold at another one.

With m = hidden size / base hidden size, as in Megatron-LM (core 0.20.0):

                       initial values   Adam             SGD       forward
    matrices           std / sqrt(m)    lr / m, eps / m  lr
    vectors, tables    std              lr               lr * m    embedding's output * embedding multiplier
    own output layer   std              lr / m, eps / m  lr        logits * output multiplier, 1 / m
    attention                                                      scores * sqrt(base head channels) / channels ** power

A rate of --decoupled-lr is taken as it is. Source: Yang et al., arXiv:2203.03466, table 8, which has lr for Adam's own
output layer too.
"""

from megatrain.config.schema.model import ModelConfig


def attention_scale(model: ModelConfig) -> tuple[float | None, str]:
    """Factor of attention's scores, None for the usual one, and why."""
    if model.softmax_scale is not None or not model.use_mup:
        return model.softmax_scale, "equals --softmax-scale"
    base, power = model.mup_base_head_dim, model.mup_attn_scale_power
    root = 1.0 if base is None else base**0.5
    said = "1" if base is None else f"sqrt(base head channels {base:g})"
    return root / model.kv_channels**power, f"{said} / kv channels {model.kv_channels} ** {power:g}"


def matrix_init_std(model: ModelConfig) -> tuple[float, str]:
    """Standard deviation of the matrices' initial values, before what the depth asks for, and why."""
    if not model.use_mup or model.mup_width_mult == 1:
        return model.init_method_std, "equals --init-method-std"
    reason = f"--init-method-std {model.init_method_std:g} / sqrt(width multiplier {model.mup_width_mult:g})"
    return model.init_method_std / model.mup_width_mult**0.5, f"muP: {reason}"
