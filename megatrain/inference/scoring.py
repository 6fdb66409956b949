"""Scores of the tokens that follow contexts, by a loaded model: whole rows in one pass, without a cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatrain.config.errors import ConfigError
from megatrain.data.tasks.requests import Request, Score, batch_of, round_scores, rounds
from megatrain.inference.cached_model import hidden_states
from megatrain.inference.stored_model import LoadedModel
from megatrain.model.families.token_scores import noted_scores
from megatrain.model.head import Head
from megatrain.parallel.batch import PassInfo


def require_text_model(loaded: LoadedModel) -> None:
    """Raise ConfigError for a model that does not continue text alone."""
    spec = loaded.model.spec
    if spec.head.has_accuracy or spec.vision is not None:
        kind = "reads images" if spec.vision is not None else "has an encoder"
        raise ConfigError(
            f"{loaded.path}: the model {kind}, and tasks are scored by models of text",
            fix="give the checkpoint of a GPT",
        )


@torch.no_grad()
def score(
    loaded: LoadedModel, requests: Sequence[Request], *, batch_size: int, device: torch.device
) -> list[Score]:
    """Return the score of each request; all tensor ranks call it alike."""
    model, found = loaded.model, dict[int, Score]()
    head = model.segments[-1]
    assert isinstance(head, Head)
    for one in rounds(requests, max_length=loaded.max_context, batch_size=batch_size, per_round=1):
        rows = [requests[number] for number in one.microbatches[0]]
        batch = batch_of(rows, length=one.length, size=len(rows), device=device)
        info = PassInfo(is_training=False)
        with noted_scores(head) as noted:
            head(hidden_states(model, batch, info), batch, info)
        found |= round_scores(requests, one, noted[0].values[None].cpu())
    return [found[number] for number in range(len(requests))]
