"""What the world outside the command line says: ranks, devices, the tokenizer, the checkpoint, the libraries.

Rank 0 gathers them (`training/launch/facts.py`) and hands them to all ranks as JSON, so that every rank resolves the same plan.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from megatrain.config.derive.custom_layers import CustomLayers
from megatrain.config.derive.layer_sizes import LayerSizes
from megatrain.config.errors import Problem


@dataclass(frozen=True, kw_only=True)
class DatasetFacts:
    """A pair of .bin and .idx files that a run reads."""

    split: str
    """`all` where --split shares it out, else the one of train, valid and test that reads it."""
    prefix: str
    weight: float | None
    """In its blend, as given; None: by size."""
    num_sequences: int
    num_tokens: int
    digest: str
    """Equal for equal contents, wherever the files lie."""


@dataclass(frozen=True, kw_only=True)
class StoredRun:
    """The checkpoint that a run continues."""

    path: str
    iteration: int
    consumed_train_samples: int
    consumed_valid_samples: int = 0
    is_evaluation_left: bool = False
    """Whether a stop came before the evaluation at this iteration was done."""
    pass_size: int | None = None
    """Samples that all its ranks together read in a micro-batch."""
    config: Mapping[str, Mapping[str, Any]]
    """The resolved configuration that it was saved with, as `Config.to_dict` gives it."""
    tokenizer_fingerprint: str | None = None
    data_plans: Mapping[str, Sequence[int | None]] = field(default_factory=dict)
    """Samples that the order of each split was made for, plan by plan."""
    datasets: tuple[DatasetFacts, ...] = ()
    schedule: Mapping[str, Any] | None = None
    """What its schedules followed, as `ScheduleValues.to_dict` gives it; None: they are not taken up."""
    has_optimizer: bool = True
    """Whether it holds more than weights."""
    is_start: bool = False
    """Whether a run begins with its weights, and does not continue it."""

    @property
    def weights_only(self) -> StoredRun:
        """What it means to a run that begins with its weights."""
        stored = {
            "model": self.config.get("model", {}),
            "tokenizer": {
                name: value
                for name, value in self.config.get("tokenizer", {}).items()
                if name == "vocab_size"
            },
        }
        return StoredRun(path=self.path, iteration=0, consumed_train_samples=0, config=stored, is_start=True)

    @classmethod
    def from_state(cls, state: Mapping[str, Any], **values: Any) -> StoredRun:
        """From what a checkpoint keeps beside its tensors."""
        return cls(
            tokenizer_fingerprint=state.get("tokenizer_fingerprint"),
            consumed_valid_samples=state.get("consumed_valid_samples", 0),
            is_evaluation_left=state.get("is_evaluation_left", False),
            pass_size=state.get("pass_size"),
            data_plans=state.get("data_plans", {}),
            datasets=tuple(DatasetFacts(**dataset) for dataset in state.get("datasets", ())),
            schedule=state.get("schedule"),
            has_optimizer=state.get("has_optimizer", True),
            **values,
        )


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Equal on all ranks. None: not known."""

    world_size: int = 1
    device: Literal["cpu", "cuda"] = "cpu"
    device_name: str | None = None
    device_capability: tuple[int, int] | None = None
    """Of a GPU: Hopper's is (9, 0)."""
    cublas_workspace: str | None = None
    """CUBLAS_WORKSPACE_CONFIG, if it is set."""
    devices_per_node: int | None = None
    """GPUs that a node's processes can see."""
    ranks_per_node: int | None = None
    vocab_size: int | None = None
    """Tokens of the tokenizer, before padding."""
    eod_id: int | None = None
    pad_id: int = -1
    """The tokenizer's padding id; -1: it has none."""
    special_ids: tuple[int, ...] = ()
    """Its ids with a role other than padding."""
    tokenizer_fingerprint: str | None = None
    tokenizer_note: str | None = None
    """What a user should hear about it, such as how its end-of-document token was found."""
    checkpoint: StoredRun | None = None
    custom_layers: CustomLayers | None = None
    """What --spec gives."""
    layers_config: str | None = None
    """What --heterogeneous-layers-config-path names holds."""
    datasets: tuple[DatasetFacts, ...] = ()
    """What --data-path and its kin name, split by split in their order; empty for mock data."""
    data_problems: tuple[Problem, ...] = ()
    """What was found wrong with input files."""
    has_triton: bool = True
    """Whether Triton, which compiles kernels for GPUs, can be imported."""
    libraries: Mapping[str, str] = field(default_factory=dict)
    """Version of each library that is installed."""

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Facts:
        values = json.loads(text)
        if values["checkpoint"] is not None:
            stored = values["checkpoint"]
            stored["datasets"] = tuple(DatasetFacts(**dataset) for dataset in stored["datasets"])
            values["checkpoint"] = StoredRun(**stored)
        if values["custom_layers"] is not None:
            own = values["custom_layers"]
            layers, differences = map(LayerSizes.from_dict, own["layers"]), own["differences"]
            values["custom_layers"] = CustomLayers(
                **{**own, "layers": tuple(layers), "differences": tuple(differences)}
            )
        values["datasets"] = tuple(DatasetFacts(**dataset) for dataset in values["datasets"])
        if values["device_capability"] is not None:
            values["device_capability"] = tuple(values["device_capability"])
        values["special_ids"] = tuple(values["special_ids"])
        values["data_problems"] = tuple(Problem(**problem) for problem in values["data_problems"])
        return cls(**values)
