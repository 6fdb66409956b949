"""Micro-batches of BERT, T5 and vision-language models, from the arrays of their samples."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megatrain.parallel.batch import Batch, EncoderTokens
from megatrain.parallel.documents import Documents


def family_batch(family: str, arrays: Mapping[str, Tensor], documents: Documents | None = None) -> Batch:
    """Return a micro-batch from the arrays of its samples, [b, ...] each, which have Megatron-LM's names. Others are not read.

    bert    text  types  labels  is_random  loss_mask  padding_mask
    t5      text_enc  text_dec  labels  loss_mask  enc_mask             masks: 1 where no padding
    vlm     tokens  labels  loss_mask  position_ids  images             with a token for each vector of an image
    """
    labels, loss_mask = arrays["labels"].long(), arrays["loss_mask"].float()
    if family == "bert":
        tokens = arrays["text"].long()
        return Batch(
            tokens=tokens,
            labels=labels,
            loss_mask=loss_mask,
            position_ids=_positions(tokens),
            is_token=_are_tokens(arrays["padding_mask"]),
            types=arrays["types"].long(),
            are_swapped=arrays["is_random"].long(),
        )
    if family == "vlm":
        return Batch(
            tokens=arrays["tokens"].long(),
            labels=labels,
            loss_mask=loss_mask,
            position_ids=arrays["position_ids"].long(),
            images=arrays["images"].float(),
            documents=documents,
        )
    assert family == "t5", family
    tokens, of_encoder = arrays["text_dec"].long(), arrays["text_enc"].long()
    return Batch(
        tokens=tokens,
        labels=labels,
        loss_mask=loss_mask,
        position_ids=_positions(tokens),
        encoder=EncoderTokens(of_encoder, _positions(of_encoder)),
        is_token=_are_tokens(arrays["enc_mask"]),
    )


def _are_tokens(mask: Tensor) -> Tensor:
    """Return True for keys to attend to: the first of a sample too that is all padding, as queries need a key."""
    first = torch.arange(mask.shape[1], device=mask.device) == 0
    return mask.bool() | first


def _positions(tokens: Tensor) -> Tensor:
    return torch.arange(tokens.shape[1], device=tokens.device).repeat(len(tokens), 1)
