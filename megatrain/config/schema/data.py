"""Settings of the data: files, and how they are split into samples."""

from dataclasses import dataclass
from typing import Final, Literal

from megatrain.config.schema.needs import conflict, none_of, off, on, one_of
from megatrain.config.schema.resume_class import LOSS, ORDER, SAFE, SILENT, STEPS
from megatrain.config.schema.setting import ARGS, EVALUATION, Section, setting
from megatrain.config.schema.values import AUTO, REQUIRED
from megatrain.config.schema.vision import VLM

SOURCES: Final = (
    "data.data_path",
    "data.data_args_path",
    "data.train_data_path",
    "data.valid_data_path",
    "data.test_data_path",
    "data.per_split_data_args_path",
    "data.mock_data",
    "data.dataset",
    "data.image_data_path",
)
"""Settings that name the data."""
MASKED_FAMILIES: Final = ("bert", "t5")
"""Families of models that learn from masked sentences."""
_GPT: Final = none_of("model.model_family", *MASKED_FAMILIES)
_MASKED: Final = one_of("model.model_family", *MASKED_FAMILIES)

_NEEDS_FILES: Final = tuple(
    conflict(path, why=", which reads no files") for path in ("data.mock_data", "data.dataset")
)
_ONE_SET: Final = tuple(
    conflict(f"data.{name}")
    for name in ("data_schedule", "phase_transition_iterations", "multiple_validation_sets")
)
_ORDERED: Final = conflict("data.dataloader_type", "cyclic", why=", which repeats all samples")
_NOT_WITH_SFT: Final = conflict("data.sft", why=", which has its own attention, positions and loss mask")
_NOT_WITH_STORED_DOCUMENTS: Final = conflict(
    "data.dataloader_inter_document_masking",
    why=", which uses the stored document boundaries, not end-of-document tokens",
)
_FIM: Final = on("data.fim_data")
_STORED_TEXT: Final = (
    *_NEEDS_FILES,
    conflict("data.sft"),
    conflict("data.pack_documents"),
    conflict("tokenizer.tokenizer_type", "NullTokenizer", why=", whose ids have no text"),
    conflict("data.dataloader_inter_document_masking", why=": rewritten text has other boundaries"),
    conflict(
        "model.model_family", *MASKED_FAMILIES, "vlm", why=", which predicts other tokens than the next one"
    ),
)
_PACKED_ALONE: Final = (
    conflict("data.dataset", why=", whose samples have one length"),
    conflict(
        "data.full_validation",
        when=off("data.multiple_validation_sets"),
        why=", whose last batch is not full",
    ),
    conflict("data.multiple_validation_sets", why=", whose last batches are not full"),
)
_WHOLE_SAMPLES: Final = (
    conflict("data.sft", why=", whose conversations stay whole"),
    conflict("data.pack_documents", why=", whose samples are documents of any length"),
    conflict("model.model_family", *MASKED_FAMILIES, "vlm", why=", whose samples are no plain text"),
    conflict("training.cuda_graph_impl", "local", "full_iteration", why=": a graph has one length"),
    *(
        conflict(f"distillation.{teacher}", why=": the teacher reads whole samples")
        for teacher in ("export_kd_teacher_load", "logits_load_dir")
    ),
)


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section, on_resume=SAFE, taken_by=EVALUATION):
    """Data: files, and how they are split into samples."""

    data_path: tuple[str, ...] = ()
    """Datasets, split by --split: prefix of a .bin and .idx file pair, or text (.jsonl, .txt, .parquet, folders of them), which the first start tokenizes; several prefixes (each read once, in proportion to their sizes), or pairs of weight and prefix."""
    data_args_path: str | None = None
    """File with the values of --data-path."""
    train_data_path: tuple[str, ...] = ()
    """Training datasets: prefixes, or pairs of weight and prefix. Replaces --data-path and --split."""
    valid_data_path: tuple[str, ...] = ()
    """Validation datasets, as --train-data-path."""
    test_data_path: tuple[str, ...] = ()
    """Test datasets, as --train-data-path."""
    per_split_data_args_path: str | None = None
    """JSON file with the datasets of train, valid and test."""
    data_schedule: str | None = setting(
        None, taken_by="", conflicts=(*_NEEDS_FILES, _ORDERED), on_resume=STEPS
    )
    """File with training data for later iterations: a list in YAML or JSON of entries `from_iteration` and `data_path`."""
    phase_transition_iterations: str | None = setting(
        None,
        joins_words=True,
        taken_by="",
        conflicts=(
            *_NEEDS_FILES,
            _ORDERED,
            conflict("data.data_schedule", why=": both change the training data"),
            *(
                conflict(
                    f"training.{other}", why=", since it counts samples as iterations * --global-batch-size"
                )
                for other in (
                    "rampup_batch_size",
                    "step_batch_size_schedule",
                    "decrease_batch_size_if_needed",
                )
            ),
        ),
        on_resume=STEPS,
    )
    """Iterations, such as 20000,30000, after which the run saves and exits, to be continued with the data flags of the next phase of training, whose samples are counted from 0."""
    split: str = setting(AUTO, joins_words=True, on_resume=ORDER)
    """Proportions of training, validation and test data, such as 969,30,1. auto: 969, 30, 1 for files, 1,1,1 for mock data."""
    mock_data: bool = setting(False, on_resume=ORDER)
    """Train on synthetic token sequences instead of files."""
    image_data_path: tuple[str, ...] = setting((), needs=VLM, conflicts=_ONE_SET)
    """vlm: conversations about images: a file of JSON Lines whose images are in its folder, tar shards of WebDataset (also as a pattern), several of them, or pairs of weight and one of them (docs/data.md). Not in Megatron-LM."""
    use_packed_sequence: bool = setting(False, on_resume=ORDER)
    """vlm: a sample holds as many conversations as fit, each with attention and positions of its own."""
    stop_at_unread_images: bool = setting(False, needs=VLM)
    """vlm: an image that cannot be read ends the run. off: it is named and counted, and its sample has no loss."""
    dataset: str | None = setting(None, on_resume=ORDER, may_move=True, taken_by="")
    """Function that returns samples, in place of files: file.py:function or module:function (docs/extending.md). Not in Megatron-LM."""
    dataset_digest: str | None = setting(AUTO, taken_by="", on_resume=STEPS)
    """Digest of the file of --dataset. auto: computed from the file."""
    seq_length: int = setting(
        REQUIRED,
        at_least=1,
        unit="tokens",
        example="1024 tokens, for example",
        on_resume=ORDER,
        taken_by=ARGS,
    )
    """Tokens per sample. vlm: of its text; those of its images are added."""
    seq_length_schedule: str | None = setting(
        None, joins_words=True, taken_by="", conflicts=_WHOLE_SAMPLES, on_resume=STEPS
    )
    """Lengths of the sequences that are trained, from given numbers of tokens on, such as '0:2048 50B:4096 80B:8192': each sample of --seq-length tokens is cut into pieces of that length, which divides it. Evaluations read whole samples. Not in Megatron-LM."""
    dataloader_seq_length: int | None = setting(
        None, at_least=1, unit="tokens", on_resume=ORDER, taken_by=ARGS, needs=VLM
    )
    """vlm: tokens of the text of a sample, in place of --seq-length."""
    dataloader_type: Literal["single", "cyclic"] = setting("single", on_resume=ORDER)
    """Order of samples. single: one pass over the shuffled index; cyclic: repeated passes, each with a new shuffle."""
    no_data_sharding: bool = setting(False, on_resume=ORDER, needs=one_of("data.dataloader_type", "cyclic"))
    """With --dataloader-type cyclic: shuffle all samples together instead of within the shard of each data-parallel rank."""
    num_workers: int = setting(2, at_least=0, on_resume=SILENT, taken_by="")
    """Prefetch threads per rank. 0: each step reads its own samples."""
    no_mmap_bin_files: bool = setting(False, taken_by="")
    """Read .idx files into memory instead of mapping them; .bin files are read with read calls in any case."""
    object_storage_cache_path: str | None = setting(None, on_resume=SILENT, taken_by="")
    """Local folder for copies of the .idx files of datasets in object stores; their .bin files are read in ranges. Required for prefixes that are URLs, such as s3://bucket/data."""
    data_cache_path: str | None = setting(AUTO, on_resume=SILENT, taken_by="")
    """Folder for the cached sample indices of large datasets, and for the datasets of text. auto: `index_cache` next to the first dataset, or in --object-storage-cache-path; `.tokenized` next to the text. `null` in a YAML file: no cache."""
    mid_level_dataset_surplus: float = setting(0.005, at_least=0, on_resume=ORDER)
    """Fraction of extra samples with which each dataset of a weighted blend is built."""
    full_validation: bool = False
    """Evaluate on all validation samples, instead of --eval-iters batches."""
    multiple_validation_sets: bool = setting(False, conflicts=_NEEDS_FILES[1])
    """Evaluate on each validation dataset separately."""
    validation_set_names: tuple[str, ...] = setting(
        (), on_resume=SAFE, needs=on("data.multiple_validation_sets")
    )
    """Names of the validation sets in logs, in the order of --valid-data-path. Default: the names of their files."""
    reset_position_ids: bool = setting(
        False,
        needs=(
            none_of(
                "model.position_embedding_type",
                "rope",
                "yarn",
                why=", as in Megatron-LM: RoPE depends only on distances",
            ),
            _GPT,
        ),
        conflicts=(_NOT_WITH_SFT, _NOT_WITH_STORED_DOCUMENTS),
        on_resume=LOSS,
    )
    """Restart position ids after each end-of-document token."""
    reset_attention_mask: bool = setting(
        False, conflicts=(_NOT_WITH_SFT, _NOT_WITH_STORED_DOCUMENTS), on_resume=LOSS
    )
    """Mask attention across end-of-document tokens."""
    eod_mask_loss: bool = setting(False, needs=_GPT, conflicts=_NOT_WITH_SFT, on_resume=LOSS)
    """Mask the loss where the input is an end-of-document token."""
    dataloader_inter_document_masking: bool = setting(False, on_resume=LOSS)
    """Mask attention across stored sequences and restart position ids at each, independent of their tokens."""
    sft: bool = setting(False, on_resume=ORDER, conflicts=_NEEDS_FILES)
    """Supervised fine-tuning: datasets are conversations of `preprocess_data.py --sft`, packed whole into samples, with loss on the assistant's tokens only."""
    pack_documents: bool = setting(False, on_resume=ORDER, needs=_GPT, conflicts=(_ORDERED, *_PACKED_ALONE))
    """Samples are whole documents (with --sft: conversations) in an order that --seed decides; one that is longer than --seq-length is cut into several. Those of a global batch are packed into micro-batches, with attention and positions of their own. Not in Megatron-LM."""
    varlen_mock_dataset_config_json: str | None = setting(
        None, on_resume=ORDER, needs=(on("data.pack_documents"), on("data.mock_data"))
    )
    """Lengths of the documents of --mock-data: JSON, or a file of it, such as {"type": "lognormal", "min_seq_len": 64, "max_seq_len": 131072, "mean_seq_len": 8192, "lognormal_sigma": 1.5}."""
    mask_prob: float = setting(0.15, above=0, at_most=1, on_resume=ORDER, needs=_MASKED)
    """BERT and T5: share of the tokens of a sample that are masked."""
    short_seq_prob: float = setting(0.1, at_least=0, at_most=1, on_resume=ORDER, needs=_MASKED)
    """BERT and T5: probability that a sample is cut for fewer tokens than it can hold."""
    fim_data: bool = setting(False, on_resume=ORDER, conflicts=_STORED_TEXT)
    """Fill in the middle: move the middle of a document after its end, with a probability. The random numbers of a sample depend on --seed and its number, in Megatron-LM on the order of reading."""
    fim_rate: float = setting(0.5, at_least=0, at_most=1, on_resume=ORDER, needs=_FIM)
    """Probability that a document is rewritten."""
    fim_spm_rate: float = setting(0.5, at_least=0, at_most=1, on_resume=ORDER, needs=_FIM)
    """Probability that a rewritten text has its suffix first."""
    fim_split_sample: str | None = setting(None, on_resume=ORDER, needs=_FIM)
    """Token at which documents are cut into pieces, each rewritten by itself. none: they are not cut."""
    fim_fragment_rate: float | None = setting(
        None, at_least=0, at_most=1, on_resume=ORDER, needs=(_FIM, on("data.fim_split_sample"))
    )
    """Probability that such a piece is rewritten. none: --fim-rate."""
    fim_no_prefix: str | None = setting(None, on_resume=ORDER, needs=_FIM)
    """Do not rewrite texts that start with this."""
    fim_prefix_token: str = setting("<fim_prefix>", on_resume=ORDER, needs=_FIM)
    """Token before the prefix."""
    fim_middle_token: str = setting("<fim_middle>", on_resume=ORDER, needs=_FIM)
    """Token before the middle."""
    fim_suffix_token: str = setting("<fim_suffix>", on_resume=ORDER, needs=_FIM)
    """Token before the suffix."""
    fim_pad_token: str = setting("<fim_pad>", on_resume=ORDER, needs=_FIM)
    """Token that fills a sample that has become shorter."""
    fim_eod_token: str | None = setting(None, on_resume=ORDER, needs=_FIM)
    """Token that ends documents. none: that of the tokenizer; <|endoftext|> in Megatron-LM."""
    allow_ambiguous_pad_tokens: bool = setting(False, on_resume=LOSS)
    """Treat the padding token of the tokenizer as padding even if it has another role."""

    @property
    def has_documents(self) -> bool:
        """True if attention stays within documents."""
        return (
            self.reset_attention_mask
            or self.dataloader_inter_document_masking
            or self.sft
            or self.use_packed_sequence
            or self.pack_documents
        )

    @property
    def separate_validation_sets(self) -> tuple[str, ...] | None:
        """Return the names of validation sets that are evaluated separately; empty: by their files; None: they are one set."""
        return self.validation_set_names if self.multiple_validation_sets else None
