"""Settings that --use-checkpoint-args takes from a checkpoint, where neither the command line nor a YAML file gives them.

    model, experts     all settings on which the weights or the function of the model depend, and dropout
    data, tokenizer    the sequence length; the tokenizer, unless a flag names one
    parallel           the layout, with --use-mp-args-from-checkpoint-args

With --eval-only also the data, unless a flag names some, and what training computed with: batch sizes, precision, optimizer.

Code is never taken: a model of --spec needs the flag again. Settings with their default values are not listed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from megatrain.config.facts import StoredRun
from megatrain.config.request import Request
from megatrain.config.schema.resume_class import FUNCTION, SHAPE
from megatrain.config.schema.tree import Origin, paths_of, settings

_MODEL: Final = (
    *paths_of(SHAPE, FUNCTION),
    "model.max_position_embeddings",
    "model.make_vocab_size_divisible_by",
    "model.hidden_dropout",
    "model.attention_dropout",
    "data.seq_length",
)
_LAYOUT: Final = tuple(
    f"parallel.{name}"
    for name in (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "num_virtual_stages_per_pipeline_rank",
        "num_layers_per_virtual_pipeline_stage",
        "context_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "sequence_parallel",
    )
)

_TRAINING_SECTIONS: Final = ("optimizer", "schedule", "precision")
_DATA_SOURCES: Final = (
    "data.data_path",
    "data.data_args_path",
    "data.train_data_path",
    "data.valid_data_path",
    "data.test_data_path",
    "data.per_split_data_args_path",
    "data.mock_data",
)
_TRAINING: Final = (
    *_DATA_SOURCES,
    *(
        f"data.{name}"
        for name in (
            "split",
            "full_validation",
            "multiple_validation_sets",
            "dataloader_type",
            "no_data_sharding",
            "mid_level_dataset_surplus",
            "eod_mask_loss",
            "reset_position_ids",
            "reset_attention_mask",
            "dataloader_inter_document_masking",
            "sft",
            "allow_ambiguous_pad_tokens",
        )
    ),
    *(
        f"training.{name}"
        for name in (
            "train_iters",
            "train_samples",
            "micro_batch_size",
            "global_batch_size",
            "rampup_batch_size",
            "step_batch_size_schedule",
            "decrease_batch_size_if_needed",
            "calculate_per_token_loss",
            "seed",
            "eval_interval",
            "eval_iters",
            "eval_global_batch_size",
            "start_eval_at_iter",
        )
    ),
)


def stored_settings(
    stored: Mapping[str, Mapping[str, Any]],
    request: Request,
    *,
    with_layout: bool,
    with_training: bool = False,
) -> dict[str, Any]:
    """Return the settings to take from the configuration of a checkpoint, by path. Reading the checkpoint has checked them."""
    names = {*_MODEL, *(_LAYOUT if with_layout else ())}
    names_tokenizer = any(
        path.startswith("tokenizer.") and origin.kind in ("flag", "yaml", "folder")
        for path, origin in request.origins.items()
    )
    if with_training:
        names_data = any(_is_given(request, path) for path in (*_DATA_SOURCES, "data.split"))
        wanted = [path for path in _TRAINING if not (names_data and path in (*_DATA_SOURCES, "data.split"))]
        names |= {*wanted, *(one.path for one in settings() if one.section in _TRAINING_SECTIONS)}
    names |= {one.path for one in settings() if one.section == "tokenizer" and not names_tokenizer}
    taken: dict[str, Any] = {}
    for setting in settings():
        if setting.path not in names or setting.name not in stored.get(setting.section, {}):
            continue
        value = stored[setting.section][setting.name]
        if not _is_given(request, setting.path) and _as_setting(value) != setting.default:
            taken[setting.path] = value
    return taken


def with_stored_settings(request: Request, stored: StoredRun | None) -> Request:
    """Return the request with the settings of the checkpoint, which are empty without --use-checkpoint-args."""
    if stored is None:
        return request
    return with_settings(request, stored.settings, Origin("checkpoint", stored.path))


def with_settings(request: Request, taken: Mapping[str, Any], origin: Origin) -> Request:
    """Return the request with settings that are taken from elsewhere, by path."""
    values = {path: _as_setting(value) for path, value in taken.items()}
    origins = dict.fromkeys(values, origin)
    return replace(request, config=request.config.with_values(values), origins={**request.origins, **origins})


def _is_given(request: Request, path: str) -> bool:
    return request.origins[path].kind in ("flag", "yaml")


def _as_setting(value: Any) -> Any:
    """Return a JSON value as a setting has it."""
    return tuple(value) if isinstance(value, list) else value
