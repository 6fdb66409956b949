"""Facts from outside the command line: ranks, devices, tokenizer, checkpoint, data files, libraries.

Rank 0 gathers the facts (`training/launch/facts.py`) and sends them to all ranks as JSON, so that every rank resolves the
same plan.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from megatrain.config.derive.custom_layers import Layers
from megatrain.config.errors import Problem
from megatrain.config.schema.resume_class import FUNCTION, SHAPE
from megatrain.config.schema.tree import paths_of


@dataclass(frozen=True, kw_only=True)
class DatasetFacts:
    """A dataset of the run: a pair of .bin and .idx files, or a source of --image-data-path, whose rows are its sequences."""

    split: str
    """`all` if --split splits the dataset, else train, valid or test."""
    prefix: str
    weight: float | None
    """Weight in its blend, as given; None: in proportion to its size."""
    num_sequences: int
    num_tokens: int
    digest: str
    """Digest of the contents, independent of the path."""
    from_iteration: int = 0
    """Completed iterations at which training begins to read it: that of its phase in --data-schedule, or 0."""
    num_documents: int = 0
    """Documents, which --split divides for BERT and T5. 0: written before they were counted."""
    has_loss_mask: bool = False
    """True if it has conversations: the loss mask that preprocess_data.py --sft writes is next to it."""
    chat_template: str | None = None
    """Jinja template that writes its conversations, with --sft."""

    @property
    def size(self) -> str:
        """Its size in words. Tokens of conversations about images are not counted."""
        tokens = f" with {self.num_tokens} tokens" if self.num_tokens else ""
        return f"{self.num_sequences} sequences{tokens}"


@dataclass(frozen=True, kw_only=True)
class DataPhase:
    """A part of training that reads other data than the first part (--data-schedule)."""

    from_iteration: int
    """Completed iterations at which the phase starts."""
    start: int
    """First sample of the phase."""
    plan: tuple[int, ...]
    """Samples of each plan of its data; empty: the run ends before the phase."""

    def __str__(self) -> str:
        """Return the phase as the plan shows it."""
        samples = " + ".join(map(str, self.plan)) or "no"
        return f"{samples} samples from iteration {self.from_iteration} (sample {self.start}) on;"


FIRST_START: Final = ("finetune", "no_load_optim")
"""Settings of `checkpoint` that apply to the first start of a run with one folder for --save and --load, not to its restarts."""


@dataclass(frozen=True, kw_only=True)
class StoredRun:
    """The checkpoint from which a run starts."""

    path: str
    iteration: int
    consumed_train_samples: int
    consumed_valid_samples: int = 0
    is_evaluation_left: bool = False
    """True if the run stopped before the evaluation at this iteration."""
    pass_size: int | None = None
    """Samples of one micro-batch on all replicas."""
    config: Mapping[str, Mapping[str, Any]]
    """Resolved configuration of the saved run, from `Config.to_dict`."""
    tokenizer_fingerprint: str | None = None
    data_plans: Mapping[str, Any] = field(default_factory=dict)
    """Samples of each plan, by split; `phases`: the fields of the later phases of training; `start`: see `train_start`."""
    datasets: tuple[DatasetFacts, ...] = ()
    scheduled_samples: int | None = None
    """Samples of the steps that were not skipped, by which schedules go; None: not known."""
    schedule: Mapping[str, Any] | None = None
    """Schedules of the saved run, from `ScheduleValues.to_dict`; None: they are not resumed."""
    has_optimizer: bool = True
    """True if the checkpoint contains optimizer state."""
    is_of_megatron: bool = False
    """True if Megatron-LM wrote it."""
    is_start: bool = False
    """True if the run starts from these weights instead of resuming."""
    is_upcycled: bool = False
    """True if they are of a dense model, and the run upcycles them (--moe-use-upcycling)."""
    started: tuple[str, ...] = ()
    """Settings of `FIRST_START` that this run had applied before it wrote the checkpoint, and that no longer apply."""
    sources: tuple[str, ...] = ()
    """Folders in which the checkpoint was looked for, or the one checkpoint that the user chose."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings that the run takes from the checkpoint (--use-checkpoint-args), by path."""

    @property
    def train_start(self) -> int:
        """The first training sample of the data that the stored run read (--phase-transition-iterations)."""
        return int(self.data_plans.get("start", 0))

    @property
    def later_phases(self) -> tuple[DataPhase, ...]:
        """The phases of training data after the first one."""
        phases = self.data_plans.get("phases", ())
        return tuple(DataPhase(**{**phase, "plan": tuple(phase["plan"])}) for phase in phases)

    @property
    def weights_only(self) -> StoredRun:
        """The checkpoint as seen by a run that only starts from its weights: the sections on which they or their function depend."""
        sections = {path.partition(".")[0] for path in paths_of(SHAPE, FUNCTION)}
        kept = {"model"} if self.is_upcycled else sections
        stored = {name: values for name, values in self.config.items() if name in kept}
        stored["tokenizer"] = {
            name: value for name, value in self.config.get("tokenizer", {}).items() if name == "vocab_size"
        }
        return StoredRun(
            path=self.path,
            iteration=0,
            consumed_train_samples=0,
            config={"model": {}, **stored},
            is_of_megatron=self.is_of_megatron,
            is_start=True,
            is_upcycled=self.is_upcycled,
            sources=self.sources,
            settings=self.settings,
        )

    @classmethod
    def of(cls, manifest: Any, **values: Any) -> StoredRun:
        """Build from the manifest of a checkpoint, or what was loaded of it."""
        state = manifest.state
        return cls(
            iteration=manifest.iteration,
            consumed_train_samples=manifest.consumed_train_samples,
            config=manifest.config,
            tokenizer_fingerprint=state.get("tokenizer_fingerprint"),
            consumed_valid_samples=state.get("consumed_valid_samples", 0),
            is_evaluation_left=state.get("is_evaluation_left", False),
            pass_size=state.get("pass_size"),
            data_plans=state.get("data_plans", {}),
            datasets=tuple(DatasetFacts(**dataset) for dataset in state.get("datasets", ())),
            scheduled_samples=state.get("scheduled_samples"),
            schedule=state.get("schedule"),
            has_optimizer=state.get("has_optimizer", True),
            **values,
        )


@dataclass(frozen=True, kw_only=True)
class TeacherFacts:
    """The checkpoint of a teacher (--export-kd-teacher-load)."""

    path: str
    """Its folder, or hf:FOLDER."""
    iteration: int
    config: Mapping[str, Mapping[str, Any]]
    """Sections `model` and `experts` of its configuration, from `Config.to_dict`."""
    num_rows: int
    """Rows of its word embedding: its tokens, and for those that other programs wrote also their padding."""
    is_ours: bool
    tokenizer_fingerprint: str | None
    """None: not known."""
    checksum: int
    """Checksum of its list of tensors."""
    described: Mapping[str, Any] = field(default_factory=dict)
    """Settings of its model in the file of --export-kd-teacher-model-config, by name."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """All facts, equal on all ranks. None: not known."""

    world_size: int = 1
    device: Literal["cpu", "cuda"] = "cpu"
    device_name: str | None = None
    device_capability: tuple[int, int] | None = None
    """Compute capability of the GPU: (9, 0) for Hopper."""
    cublas_workspace: str | None = None
    """CUBLAS_WORKSPACE_CONFIG; None: not set."""
    devices_per_node: int | None = None
    """Visible GPUs per node."""
    ranks_per_node: int | None = None
    vocab_size: int | None = None
    """Number of tokens of the tokenizer, before padding."""
    eod_id: int | None = None
    pad_id: int = -1
    """Padding token id of the tokenizer; -1: none."""
    special_ids: tuple[int, ...] = ()
    """Token ids with a role other than padding."""
    tokenizer_fingerprint: str | None = None
    tokenizer_note: str | None = None
    """Note on the tokenizer for the user, such as the source of its end-of-document token."""
    checkpoint: StoredRun | None = None
    teacher: TeacherFacts | None = None
    cached_logits: Mapping[str, Any] = field(default_factory=dict)
    """Manifest of the folder of --logits-load-dir; empty without one."""
    distillation_settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings that the file of --export-kd-cfg gives, by path."""
    described_settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings that the run takes from a config.json (--from-hf), by path."""
    described_by: str = ""
    """That file."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """Digests of the files of the user's functions, by the setting that names the function."""
    custom_layers: Layers | None = field(default=None, compare=False)
    """The function of --spec, which each rank loads from its own file."""
    layers_config: str | None = None
    """Contents of the file of --heterogeneous-layers-config-path."""
    module_precision: str | None = None
    """Contents of the file of --te-precision-config-file."""
    nccl_options: str | None = None
    """Contents of the file of --nccl-communicator-config-path."""
    datasets: tuple[DatasetFacts, ...] = ()
    """Datasets of --data-path and the flags per split, in order; empty for mock data."""
    untokenized: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Text that has to be tokenized first, with its size, by split as in `DatasetFacts`; `datasets` is empty then."""
    data_problems: tuple[Problem, ...] = ()
    """Problems of input files."""
    has_triton: bool = True
    """True if Triton, which compiles kernels for GPUs, can be imported."""
    libraries: Mapping[str, str] = field(default_factory=dict)
    """Versions of installed libraries."""

    def to_json(self) -> str:
        """Return all facts, without the function of --spec: each rank loads its own."""
        return json.dumps(dataclasses.asdict(dataclasses.replace(self, custom_layers=None)))

    @classmethod
    def from_json(cls, text: str) -> Facts:
        values = json.loads(text)
        if values["checkpoint"] is not None:
            stored = values["checkpoint"]
            stored["sources"], stored["started"] = tuple(stored["sources"]), tuple(stored["started"])
            stored["datasets"] = tuple(DatasetFacts(**dataset) for dataset in stored["datasets"])
            values["checkpoint"] = StoredRun(**stored)
        if values["teacher"] is not None:
            values["teacher"] = TeacherFacts(**values["teacher"])
        values["datasets"] = tuple(DatasetFacts(**dataset) for dataset in values["datasets"])
        if values["device_capability"] is not None:
            values["device_capability"] = tuple(values["device_capability"])
        values["special_ids"] = tuple(values["special_ids"])
        values["untokenized"] = {split: tuple(names) for split, names in values["untokenized"].items()}
        values["data_problems"] = tuple(Problem(**problem) for problem in values["data_problems"])
        return cls(**values)
