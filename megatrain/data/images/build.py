"""The samples of --image-data-path: sources opened, checked, split, packed and blended.

talks.jsonl                    its rows
a.tar b.tar, 'shards/*.tar'    their samples; several sources without weights are read in one order
0.8 talks.jsonl 0.2 text.jsonl a blend
"""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatrain.config.derive.datasets import SPLIT_NAMES, parse_blend, split_ranges
from megatrain.config.errors import InputError
from megatrain.config.facts import DatasetFacts
from megatrain.data.images.conversations import Encoder, ImageConversations, row_of
from megatrain.data.images.packing import RowOrder, packed_order
from megatrain.data.images.pixels import require_pillow
from megatrain.data.images.rows import Rows, Shards, open_rows
from megatrain.data.samples.blend import BlendedDataset, build_blend_index
from megatrain.data.samples.build import SamplePlans, SplitDatasets
from megatrain.data.samples.index_cache import Arrays, IndexCache

if TYPE_CHECKING:
    from megatrain.config.schema.data import DataConfig
    from megatrain.data.samples.dataset import SampleDataset

_FLAG = "--image-data-path"
_TRIED = 64
"""Rows whose images are looked for before a run."""
Parts = tuple[tuple[Rows, range], ...]


def image_facts(data: DataConfig, *, most_images: int, log: Callable[[str], None]) -> list[DatasetFacts]:
    """Return the facts of the sources, after every row was checked.

    Raises:
        ConfigError: Pillow is missing, or a weight is wrong.
        InputError: a source cannot be read, or a row is wrong.
    """
    require_pillow()
    blend = parse_blend(data.image_data_path, _FLAG)
    cache = IndexCache(cache_folder(data), log)
    facts = []
    for number, source in enumerate(blend.prefixes):
        rows = opened(source, cache)
        _check(rows, most_images, cache)
        _check_folder(rows)
        facts.append(
            DatasetFacts(
                split="all",
                prefix=source,
                weight=None if blend.weights is None else blend.weights[number],
                num_sequences=len(rows),
                num_tokens=0,
                digest=rows.digest,
            )
        )
    return facts


def cache_folder(data: DataConfig) -> str | None:
    """Return the folder of indices: that of --data-cache-path, or one next to the first source."""
    given = data.data_cache_path
    if isinstance(given, str) and given != "auto":
        return given
    first = parse_blend(data.image_data_path, _FLAG).prefixes[0]
    return str(Path(first).parent / "index_cache")


def opened(source: str, cache: IndexCache) -> Rows:
    """Open a source: a file of JSON Lines, a tar shard, or a pattern of shards.

    Raises:
        InputError: it cannot be read.
    """
    found = sorted(glob.glob(source)) if glob.has_magic(source) else [source]  # noqa: PTH207
    paths = [Path(one) for one in found]
    if not paths or (len(paths) > 1 and any(path.suffix != ".tar" for path in paths)):
        raise InputError(
            f"{_FLAG} {source}: {len(paths)} files have such names",
            fix="name tar shards, or one file of JSON Lines",
        )
    if paths[0].is_dir():
        kind = "a dataset of Megatron-Energon" if (paths[0] / ".nv-meta").is_dir() else "a folder"
        raise InputError(
            f"{_FLAG} {source} is {kind}",
            fix=f"name its tar shards, such as {_FLAG} '{source.rstrip('/')}/*.tar'",
        )
    return open_rows(paths, cache)


def _check(rows: Rows, most_images: int, cache: IndexCache) -> None:
    """Raise InputError for the first wrong row. A large source is checked once."""

    def build() -> Arrays:
        for number in range(len(rows)):
            rows[number].checked(most_images)
        return {"rows": np.array([len(rows)], np.int64)}

    cache.arrays("checked", len(rows), {"digest": rows.digest, "images": most_images}, build)


def _check_folder(rows: Rows) -> None:
    """Raise InputError if no image of the first rows exists: all names are then relative to another folder."""
    if isinstance(rows, Shards):
        return
    first = range(min(len(rows), _TRIED))
    images = [rows.path.parent / image for number in first for image in rows[number].images]
    if images and not any(os.path.exists(image) for image in images):  # noqa: PTH110 (False for a null byte)
        raise InputError(
            f"{_FLAG} {rows.path}: no image of its first {len(first)} rows exists, such as {images[0]}",
            fix=f"name images relative to the folder of the file, {rows.path.parent}, or move the file",
        )


@dataclass(frozen=True, kw_only=True)
class ImageBuilder:
    """Builds the samples of the splits."""

    encoder: Encoder
    cache: IndexCache
    seed: int
    is_packed: bool
    tokenizer_fingerprint: str

    def build(
        self, words: Sequence[str], split: str, plans: SamplePlans, digests: Sequence[str] | None
    ) -> SplitDatasets:
        """Build the splits, each with a part of the rows of each source.

        Args:
            words: of --image-data-path.
            digests: of the sources on rank 0; None: not compared.
        """
        blend = parse_blend(words, _FLAG)
        sources = [opened(source, self.cache) for source in blend.prefixes]
        for name, rows, digest in zip(blend.prefixes, sources, digests or [], strict=False):
            if rows.digest != digest:
                raise InputError(
                    f"{name}: the file on this host differs from rank 0's: {len(rows)} rows here",
                    fix="give all hosts the same files",
                )
        found: dict[str, SampleDataset | None] = dict.fromkeys(SPLIT_NAMES)
        ranges = [split_ranges(split, len(rows)) for rows in sources]
        for number, name in enumerate(SPLIT_NAMES):
            counts = getattr(plans, name)
            own = [
                (rows, places)
                for rows, parts in zip(sources, ranges, strict=True)
                if (places := parts[number])
            ]
            if counts == (0,) or not own:
                continue
            count = None if None in counts else sum(counts)
            if blend.weights is None or count is None:
                found[name] = self._samples(tuple(own), count)
                continue
            weights = [one for one, parts in zip(blend.weights, ranges, strict=True) if parts[number]]
            index = build_blend_index(weights, count)
            taken = index.counts(len(own)).tolist()
            parts = [self._samples((part,), max(most, 1)) for part, most in zip(own, taken, strict=True)]
            found[name] = BlendedDataset(parts, index)
        return SplitDatasets(found["train"], found["valid"], found["test"])

    def _samples(self, parts: Parts, count: int | None) -> ImageConversations:
        order = RowOrder(sum(len(places) for _, places in parts), self.seed)
        if self.is_packed:
            sizes = self.encoder.options.text_length, self.encoder.options.most_images
            order = packed_order(self._lengths(parts), sizes, seed=self.seed, num_samples=count)
            assert order.ends is not None
            count = len(order.ends)
        return ImageConversations(parts, order, count or order.num_rows, self.encoder)

    def _lengths(self, parts: Parts) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        """Return the tokens of the text and images of each row, [rows, 2]."""
        num_rows = sum(len(places) for _, places in parts)

        def build() -> Arrays:
            found = [self.encoder.lengths(row_of(parts, number)) for number in range(num_rows)]
            return {"lengths": np.array(found, np.int64).reshape(num_rows, 2)}

        options = self.encoder.options
        key = {
            "rows": [[rows.digest, places.start, places.stop] for rows, places in parts],
            "tokenizer": hashlib.sha256(self.tokenizer_fingerprint.encode()).hexdigest(),
            "tiling": vars(replace(options.tiling)),
            "text_length": options.text_length,
            "images": options.most_images,
        }
        return self.cache.arrays("lengths", num_rows, key, build)["lengths"]
