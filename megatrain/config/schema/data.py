"""What the model is trained on: the data files and how they are cut into samples."""

from dataclasses import dataclass, field
from typing import Literal

from megatrain.config.schema.values import AUTO, REQUIRED, CheckedSection, in_range


@dataclass(frozen=True, kw_only=True)
class DataConfig(CheckedSection):
    """Data: files and how they become samples."""

    data_path: tuple[str, ...] = ()
    """Prefixes of .bin and .idx file pairs, which --split shares out: one, several (each read once, in proportion to their sizes), or pairs of weight and prefix."""
    data_args_path: str | None = None
    """File with the words that --data-path would be given."""
    train_data_path: tuple[str, ...] = ()
    """Prefixes, or pairs of weight and prefix, of training data alone; --split plays no role then."""
    valid_data_path: tuple[str, ...] = ()
    """The same of validation data."""
    test_data_path: tuple[str, ...] = ()
    """The same of test data."""
    per_split_data_args_path: str | None = None
    """JSON file with the words for each of train, valid and test."""
    split: str = AUTO
    """Shares of training, validation and test data, such as 969,30,1. Left open: 969, 30, 1 for files, 1,1,1 for mock data."""
    mock_data: bool = False
    """Train on made-up token sequences instead of files."""
    seq_length: int = field(default=REQUIRED, metadata=in_range(at_least=1))
    """Tokens of a sample."""
    dataloader_type: Literal["single", "cyclic"] = "single"
    """Order in which samples are read: single goes once through the shuffled index, cyclic goes round and shuffles each round anew."""
    no_data_sharding: bool = False
    """With --dataloader-type cyclic: share out one permutation, instead of giving each data-parallel rank samples of its own."""
    num_workers: int = field(default=2, metadata=in_range(at_least=0))
    """Threads of each rank that read ahead. 0: a step reads what it needs when it needs it."""
    no_mmap_bin_files: bool = False
    """Read .bin files with ordinary reads instead of mapping them into memory."""
    data_cache_path: str | None = AUTO
    """Folder for the sample indices of large datasets. Left open: `index_cache` beside the first dataset. `null` in a YAML file: none is kept."""
    mid_level_dataset_surplus: float = field(default=0.005, metadata=in_range(at_least=0))
    """Share by which each dataset of a weighted blend is built longer than its weight asks for."""
    full_validation: bool = False
    """Evaluate on all validation samples, whatever --eval-iters says."""
    multiple_validation_sets: bool = False
    """Evaluate on each validation dataset on its own."""
    reset_position_ids: bool = False
    """Count positions anew after each end-of-document token."""
    reset_attention_mask: bool = False
    """Keep tokens from attending across an end-of-document token."""
    eod_mask_loss: bool = False
    """Leave out the loss where the input is an end-of-document token."""
    dataloader_inter_document_masking: bool = False
    """Keep attention and positions inside of stored sequences, whatever tokens they hold."""
    allow_ambiguous_pad_tokens: bool = False
    """Let the tokenizer's padding token count as padding even if it has another role too."""
