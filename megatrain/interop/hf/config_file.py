"""A config.json: untrusted values by key, with checks, and a record of the keys that were read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from megatrain.config.errors import InputError
from megatrain.storage.untrusted_json import Check, InvalidError, shown

CONFIG_NAME: Final = "config.json"
RESTORE: Final = "restore the file from the model's source"
INERT: Final = frozenset(
    """
    architectures model_type torch_dtype dtype transformers_version use_cache bos_token_id eos_token_id pad_token_id
    initializer_range _name_or_path output_router_logits router_aux_loss_coef router_jitter_noise pretraining_tp vocab_size
    task_specific_params classifier_dropout summary_activation summary_first_dropout summary_proj_to_labels summary_type
    summary_use_proj n_ctx id2label label2id return_dict output_attentions output_hidden_states cache_implementation
    is_decoder max_window_layers layer_types sliding_window original_max_position_embeddings embd_pdrop resid_pdrop
    _attn_implementation_autoset reorder_and_upcast_attn rope_scaling rope_theta
    """.split()
)
"""Keys without effect on the function of a model, or only together with others that are checked."""
_CODE: Final = "auto_map"
_QUANTIZED: Final = "quantization_config"


class ConfigFile:
    """The values of a config.json.

    Raises:
        InputError: it names code, or weights in a format that is not read.
    """

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path, self._values = path, values
        self.read: set[str] = set()
        self.notes: list[str] = []
        """Sentences for a conversion: what is left out, and what transformers computes in another way than the models here."""
        self._nested: dict[str, ConfigFile] = {}
        if _CODE in values:
            raise InputError(
                f"{path}: {_CODE} names code of its own, which is not run",
                fix=f"remove {_CODE} if the model is the one of the same name in the transformers library",
            )
        quantized = self.get(_QUANTIZED)
        self.has_mxfp4 = isinstance(quantized, dict) and quantized.get("quant_method") == "mxfp4"
        """Some weights are stored in MXFP4."""
        if quantized is not None and not self.has_mxfp4:
            raise InputError(
                f"{path}: {_QUANTIZED} describes quantized weights, which are not read",
                fix="take weights in bf16, fp16 or fp32: load it with transformers, dequantized, and write it with save_pretrained",
            )

    @property
    def architecture(self) -> str:
        """Return the name of the model's class; empty if there is none."""
        names = self._values.get("architectures")
        found = names[0] if isinstance(names, list) and names else None
        return found if isinstance(found, str) else ""

    @property
    def unread(self) -> list[str]:
        """Return keys that may matter and that no part of the family's table has read."""
        found = set(self._values) - self.read - INERT
        return sorted(found | {f"{key}.{name}" for key, one in self._nested.items() for name in one.unread})

    def nested(self, key: str, defaults: Mapping[str, Any] = MappingProxyType({})) -> ConfigFile:
        """Return the config.json under a key; `defaults`: values of absent keys of it, of the first call."""
        value = self.get(key)
        if not isinstance(value, dict):
            raise InputError(f"{self.path}: has no object {key}", fix=RESTORE)
        if key not in self._nested:
            self._nested[key] = ConfigFile(Path(f"{self.path} ({key})"), {**defaults, **value})
        return self._nested[key]

    def get(self, *names: str, default: Any = None) -> Any:
        """Return the value of the first of these keys that is present."""
        self.read.update(names)
        return next((self._values[name] for name in names if name in self._values), default)

    def checked(self, *names: str, check: Check, default: Any = None, is_optional: bool = False) -> Any:
        """Return the value of a key, checked; None only if `is_optional`."""
        value = self.get(*names, default=default)
        if value is None and is_optional:
            return None
        if value is None:
            raise InputError(f"{self.path}: has no {names[0]}", fix=RESTORE)
        try:
            check(value, names[0])
        except InvalidError as error:
            raise InputError(f"{self.path}: {error}", fix=RESTORE) from error
        return value

    def refusal(self, name: str, value: Any, reason: str = "") -> InputError:
        """Return the error for a value of a model that only one of transformers and megatrain has."""
        return InputError(
            f"{self.path}: {name} is {shown(value)}, which has no counterpart{reason and f': {reason}'}",
            fix="models of this kind are not converted; see docs/weights.md",
        )
