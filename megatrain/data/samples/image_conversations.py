r"""Conversations about images, from a file of JSON Lines as LLaVA has them.

    {"id": "7", "image": "cat.jpg", "conversations": [{"from": "human", "value": "<image>\nWhat is it?"}, {"from": "gpt", "value": "A cat."}]}

    USER: image \nWhat is it? ASSISTANT: A cat. eod          only the answers, and the end after each, have a loss

`image` is a name or a list of names below the folder of the file; a sample without it is text. Sample k is a row that k and the
seed decide: every epoch reads all rows of the split in another order.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from megatrain.config.errors import InputError
from megatrain.data.samples.dataset import MaskedSample
from megatrain.data.samples.image_dataset import IMAGE_TOKEN, NO_LABEL, place_images
from megatrain.data.samples.image_files import read_image

if TYPE_CHECKING:
    from megatrain.data.samples.dataset import TokenSpan
    from megatrain.data.tokenizers.build import Tokenizer

MARK: Final = "<image>"
_ROLES: Final = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
}
_BEFORE: Final = {"user": "USER: ", "assistant": " ", "system": ""}
_AFTER: Final = {"user": " ASSISTANT:", "assistant": "", "system": " "}


@dataclass(frozen=True, kw_only=True)
class ImageSamples:
    """Sizes of samples, and how images are read."""

    image_shape: tuple[int, int, int, int]
    tokens_per_image: int
    text_length: int
    """Tokens of the text of a sample; later ones are cut off."""
    length: int
    """Tokens of a sample."""
    processor: str
    stops: bool
    """An image that cannot be read ends the run; else its sample has no loss."""


@dataclass(frozen=True)
class ImageConversations:
    """The samples of a split.

    Attributes:
        rows: offsets of the rows in the file.
        count: number of samples.
        unread: names of images that could not be read.
    """

    path: Path
    rows: npt.NDArray[np.int64]
    count: int
    seed: int
    options: ImageSamples
    tokenizer: Tokenizer
    eod: int
    log: Callable[[str], None]
    unread: set[str] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.count

    def __getitem__(self, k: int) -> MaskedSample:
        """Return sample k. Raises InputError, which names it."""
        if not 0 <= k < self.count:
            raise IndexError(f"sample {k} of {self.count}")
        row, name = self._row(k)
        names = row.get("image", [])
        names = [names] if isinstance(names, str) else list(names or [])
        tokens, labels = self._tokens(row, name, len(names))
        options = self.options
        images = np.zeros(options.image_shape, np.float32)
        is_read = all(self._read(images[place], one, name) for place, one in enumerate(names))
        # The label of a token is the one after it; the last one has none.
        following = np.append(labels[1:], NO_LABEL)
        arrays = place_images(
            tokens, following, ((following >= 0) & is_read).astype(np.float32), np.arange(len(tokens)),
            tokens_per_image=options.tokens_per_image, length=options.length,
        )  # fmt: skip
        return MaskedSample({**arrays, "images": images})

    def spans(self, k: int) -> list[TokenSpan]:  # noqa: ARG002
        """See `SampleDataset`: they are not stored."""
        return []

    def _row(self, k: int) -> tuple[Mapping[str, Any], str]:
        """Return the row of sample k, and its name for messages."""
        epoch, place = divmod(k, len(self.rows))
        number = int(np.random.default_rng([self.seed, epoch]).permutation(len(self.rows))[place])
        with self.path.open("rb") as file:
            file.seek(self.rows[number])
            text = file.readline()
        where = f"{self.path}, byte {self.rows[number]}"
        try:
            row = json.loads(text)
            found = row if isinstance(row, dict) else None
        except ValueError as error:
            raise InputError(f"{where}: no JSON: {error}", fix="correct the line") from error
        if found is None:
            raise InputError(f"{where}: no object", fix="write a sample on each line (docs/data.md)")
        return found, f"sample {found['id']} ({where})" if "id" in found else f"the sample of {where}"

    def _tokens(
        self, row: Mapping[str, Any], name: str, num_images: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the tokens, with one for each image, and the labels at their own places."""
        tokens: list[int] = []
        labels: list[int] = []
        marks = 0
        for role, text in self._turns(row, name):
            pieces = f"{_BEFORE[role]}{text}{_AFTER[role]}".split(MARK)
            marks += len(pieces) - 1
            for number, piece in enumerate(pieces):
                ids = [IMAGE_TOKEN] * (number > 0) + (self.tokenizer.encode(piece) if piece else [])
                tokens += ids
                labels += ids if role == "assistant" else [NO_LABEL] * len(ids)
            if role == "assistant":
                tokens.append(self.eod)
                labels.append(self.eod)
        if marks != num_images:
            raise InputError(
                f"{name} has {marks} {MARK} in its text and {num_images} images",
                fix=f"write one {MARK} for each image",
            )
        if num_images > self.options.image_shape[0]:
            raise InputError(
                f"{name} has {num_images} images, more than --images-per-sample {self.options.image_shape[0]}",
                fix=f"use --images-per-sample {num_images}, or leave images out",
            )
        found = np.array(tokens, np.int64)
        num_text = np.cumsum(found != IMAGE_TOKEN)
        kept = int(np.searchsorted(num_text, self.options.text_length, side="right"))
        return found[:kept], np.array(labels, np.int64)[:kept]

    def _turns(self, row: Mapping[str, Any], name: str) -> Iterator[tuple[str, str]]:
        turns = row.get("conversations", row.get("messages"))
        for turn in turns if isinstance(turns, list) else [None]:
            given = turn if isinstance(turn, dict) else {}
            role, text = given.get("from", given.get("role")), given.get("value", given.get("content"))
            if role not in _ROLES or not isinstance(text, str):
                raise InputError(
                    f"{name} has a turn without a role or a text",
                    fix="write conversations of objects with `from` (human, gpt) and `value`",
                )
            yield _ROLES[role], text

    def _read(self, out: npt.NDArray[np.float32], image: str, name: str) -> bool:
        """Read an image into `out`; return False, and say so once, if it cannot be read."""
        height, width = out.shape[1:]
        path = self.path.parent / image
        try:
            out[:] = read_image(path, height=height, width=width, processor=self.options.processor)
        except InputError as error:
            if self.options.stops:
                raise InputError(f"{name}: {error.problems[0].text}", fix=error.problems[0].fix) from error
            with self.lock:
                is_new = image not in self.unread
                self.unread.add(image)
                if is_new:
                    self.log(
                        f"{name} has no loss: {error.problems[0].text} ({len(self.unread)} images so far)"
                    )
            return False
        return True


def row_offsets(path: Path) -> npt.NDArray[np.int64]:
    """Return the offset of each line that is not empty. Raises InputError if there is none."""
    offsets, at = [], 0
    try:
        with path.open("rb") as file:
            for line in file:
                if line.strip():
                    offsets.append(at)
                at += len(line)
    except OSError as error:
        raise InputError(
            f"--image-data-path {path}: {error.strerror}", fix="name a file of JSON Lines"
        ) from error
    if not offsets:
        raise InputError(f"--image-data-path {path} has no samples", fix="write a sample on each line")
    return np.array(offsets, np.int64)
