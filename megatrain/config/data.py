"""What the model is trained on: the data files and how they are cut into samples."""

from dataclasses import dataclass, field
from typing import Literal

from megatrain.config.values import AUTO, REQUIRED, in_range


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Data: files and how they become samples."""

    data_path: tuple[str, ...] = ()
    """Prefix of a .bin and .idx file pair."""
    split: str = AUTO
    """Shares of training, validation and test data, such as 969,30,1. Left open: 969, 30, 1 for files, 1,1,1 for mock data."""
    mock_data: bool = False
    """Train on made-up token sequences instead of files."""
    seq_length: int = field(default=REQUIRED, metadata=in_range(at_least=1))
    """Tokens of a sample."""
    dataloader_type: Literal["single"] = "single"
    """Order in which samples are read: single goes once through the shuffled index."""
    no_mmap_bin_files: bool = False
    """Read .bin files with ordinary reads instead of mapping them into memory."""
    data_cache_path: str | None = None
    """Folder for the sample indices. Not there yet: the index is built at every start."""
    reset_position_ids: bool = False
    """Count positions anew after each end-of-document token."""
    reset_attention_mask: bool = False
    """Keep tokens from attending across an end-of-document token."""
    eod_mask_loss: bool = False
    """Leave out the loss where the input is an end-of-document token."""
