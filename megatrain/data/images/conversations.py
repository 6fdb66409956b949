r"""Samples of conversations about images.

    USER: image \nWhat is it? ASSISTANT: A cat. eod          only the answers, and the end after each, have a loss
    conversation | conversation | padding                    packed: attention and positions restart with each

An image is one or several tiles, each with its vectors. Sample k is rows that k and the seed decide (`packing`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from megatrain.config.errors import InputError
from megatrain.data.images.packing import RowOrder
from megatrain.data.images.pixels import ReadImage, Tiling, open_image, read_image, tokens_of
from megatrain.data.images.rows import MARK, Row, Rows
from megatrain.data.images.vectors import IMAGE_TOKEN, NO_LABEL, place_images
from megatrain.data.samples.dataset import FamilySample

if TYPE_CHECKING:
    from megatrain.data.samples.dataset import TokenSpan
    from megatrain.data.tokenizers.build import Tokenizer

_BEFORE: Final = {"user": "USER: ", "assistant": " ", "system": "", "text": ""}
_AFTER: Final = {"user": " ASSISTANT:", "assistant": "", "system": " ", "text": ""}
_LEARNED: Final = ("assistant", "text")


def written(role: str, text: str) -> str:
    """Return the text of a turn as the model reads it; an end-of-document token follows what it learns."""
    return f"{_BEFORE[role]}{text}{_AFTER[role]}"


Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class ImageSamples:
    """Sizes of samples, and how images are read."""

    image_shape: tuple[int, int, int, int]
    text_length: int
    """Tokens of the text of a sample; later ones are cut off."""
    length: int
    """Tokens of a sample."""
    tiling: Tiling
    stops: bool
    """An image that cannot be read ends the run; else its conversation has no loss."""

    @property
    def most_images(self) -> int:
        """Tiles of a sample."""
        return self.image_shape[0]


@dataclass(frozen=True)
class Unlearned:
    """The samples of a run without a loss: those of images that could not be read, and those whose answers are cut off."""

    log: Callable[[str], None]
    images: set[tuple[str, str]] = field(default_factory=set)
    cut: set[str] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add_image(self, sample: str, image: str, problem: str) -> None:
        """Name an image and its sample, and count it."""
        with self.lock:
            if (sample, image) not in self.images:
                self.images.add((sample, image))
                self.log(f"{sample} has no loss: {problem} ({len(self.images)} images so far)")

    def add_cut(self, sample: str, length: int) -> None:
        """Count a sample without an answer before the cut; name the first, the tenth, the hundredth ..."""
        with self.lock:
            if sample in self.cut:
                return
            self.cut.add(sample)
            count = len(self.cut)
            if count == 10 ** (len(str(count)) - 1):
                self.log(
                    f"{sample} has no loss: no answer begins within its first {length} tokens of text; a larger --seq-length"
                    f" keeps more ({count} such samples so far)"
                )


@dataclass(frozen=True)
class Encoder:
    """Makes tokens and pixels of rows."""

    options: ImageSamples
    tokenizer: Tokenizer
    eod: int
    unlearned: Unlearned

    def lengths(self, row: Row) -> tuple[int, int]:
        """Return the tokens of the text of a row in a sample, and its tiles, from the headers of its images."""
        tokens, _ = self._tokens(row)
        num_images = int((tokens == IMAGE_TOKEN).sum())
        return len(tokens) - num_images, sum(self._num_tiles(row, one) for one in row.images[:num_images])

    def conversation(self, row: Row) -> tuple[dict[str, Ids], list[ReadImage]]:
        """Return the arrays of a row, with one entry for each token and image, and its images."""
        read = [self._image(row, one) for one in row.images]
        tokens, labels = self._tokens(row)
        # The label of a token is the one after it; the last one has none.
        following = np.append(labels[1:], NO_LABEL)
        has_label = following >= 0
        if not has_label.any():
            self.unlearned.add_cut(row.name, self.options.text_length)
        is_learned = has_label & all(one is not None for one in read)
        blank = np.zeros((1, *self.options.image_shape[1:]), np.float32)
        unread = ReadImage(blank, np.arange(self.options.tiling.num_vectors))
        arrays = {
            "tokens": tokens,
            "labels": following,
            "loss_mask": is_learned,
            "position_ids": np.arange(len(tokens)),
        }
        return arrays, [one or unread for one in read[: int((tokens == IMAGE_TOKEN).sum())]]

    def _tokens(self, row: Row) -> tuple[Ids, Ids]:
        """Return the tokens, with one for each image, and the labels at their own places."""
        tokens: list[int] = []
        labels: list[int] = []
        for turn in row.turns:
            is_learned = turn.role in _LEARNED
            pieces = written(turn.role, turn.text).split(MARK)
            for number, piece in enumerate(pieces):
                images = [IMAGE_TOKEN] if number else []
                ids = self.tokenizer.encode(piece) if piece else []
                tokens += images + ids
                labels += [NO_LABEL] * len(images) + (ids if is_learned else [NO_LABEL] * len(ids))
            if is_learned:
                tokens.append(self.eod)
                labels.append(self.eod)
        found = np.array(tokens, np.int64)
        num_text = np.cumsum(found != IMAGE_TOKEN)
        kept = int(np.searchsorted(num_text, self.options.text_length, side="right"))
        return found[:kept], np.array(labels, np.int64)[:kept]

    def _most_tiles(self, row: Row) -> int:
        """Return the tiles that each image of a row may have."""
        return self.options.most_images // len(row.images)

    def _num_tiles(self, row: Row, image: str) -> int:
        tiling = self.options.tiling
        if tiling.is_single:
            return 1
        try:
            return tiling.num_tiles(open_image(_bytes_of(row, image), image).size, self._most_tiles(row))
        except InputError:  # `_image` reports it
            return 1

    def _image(self, row: Row, image: str) -> ReadImage | None:
        """Return an image; None, and a line in the log, if it cannot be read."""
        try:
            return read_image(_bytes_of(row, image), image, self.options.tiling, self._most_tiles(row))
        except InputError as error:
            problem = error.problems[0]
            if self.options.stops:
                raise InputError(f"{row.name}: {problem.text}", fix=problem.fix) from error
            self.unlearned.add_image(row.name, image, problem.text)
            return None


def _bytes_of(row: Row, image: str) -> bytes:
    try:
        return row.read(image)
    except (OSError, ValueError) as error:  # ValueError: no name that a file may have
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(
            f"{image}: no image: {reason}", fix="replace the file, or remove its sample"
        ) from error


@dataclass(frozen=True)
class ImageConversations:
    """The samples of a split.

    Attributes:
        parts: rows of the split: of each source the first one and their number.
        count: number of samples.
    """

    parts: tuple[tuple[Rows, range], ...]
    order: RowOrder
    count: int
    encoder: Encoder

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.count

    def __getitem__(self, k: int) -> FamilySample:
        """Return sample k. Raises InputError, which names it."""
        if not 0 <= k < self.count:
            raise IndexError(f"sample {k} of {self.count}")
        options = self.encoder.options
        found: list[dict[str, Ids]] = []
        read: list[ReadImage] = []
        starts = [0]
        for row in self.rows(k):
            arrays, of_row = self.encoder.conversation(row)
            found.append(arrays)
            read += of_row
            starts.append(starts[-1] + len(arrays["tokens"]) + sum(len(one.rows) - 1 for one in of_row))
        joined: dict[str, Any] = {name: np.concatenate([one[name] for one in found]) for name in found[0]}
        vectors = tokens_of(read, options.tiling)
        placed = place_images(**joined, vectors=vectors, length=options.length)
        images = np.zeros(options.image_shape, np.float32)
        for place, tile in enumerate(tile for one in read for tile in one.tiles):
            images[place] = tile
        return FamilySample({**placed, "images": images}, np.array(starts[:-1], np.int64))

    def rows(self, k: int) -> list[Row]:
        """Return the rows of sample k."""
        return [row_of(self.parts, number) for number in self.order.rows(k)]

    def spans(self, k: int) -> list[TokenSpan]:  # noqa: ARG002
        """See `SampleDataset`: they are not stored."""
        return []


def row_of(parts: Sequence[tuple[Rows, range]], number: int) -> Row:
    """Return a row of several sources, whose rows follow one another."""
    for rows, places in parts:
        if number < len(places):
            return rows[places[number]]
        number -= len(places)
    raise IndexError(number)
