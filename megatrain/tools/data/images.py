"""Samples with images: their text, and a picture of them.

data sample     the tokens that the model reads, image by image, and the tiles as it sees them
data inspect    the rows of a file of JSON Lines or of tar shards, and one row with its images
"""

from __future__ import annotations

import itertools
import json
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from megatrain.config import Plan
from megatrain.config.errors import ConfigError
from megatrain.config.model_spec.vision import NEWLINE
from megatrain.data.files import report_write_errors
from megatrain.data.images.build import opened
from megatrain.data.images.pixels import Tiling, decode, require_pillow, tiling_of
from megatrain.data.images.rows import Row
from megatrain.data.samples.dataset import FamilySample
from megatrain.data.samples.index_cache import IndexCache
from megatrain.data.tokenizers.build import Tokenizer
from megatrain.tools.data.inspect import printable, shown_ids

if TYPE_CHECKING:
    from PIL.Image import Image

_SIDE: Final = 336
"""Largest side of an image in a picture, in pixels."""
_COLUMNS: Final = 100
_LINE: Final = 14
_MARGIN: Final = 8
SUFFIXES: Final = (".jsonl", ".json", ".tar")
"""Names of sources of --image-data-path."""


def described_images(
    sample: FamilySample, plan: Plan, tokenizer: Tokenizer | None, picture: str | None
) -> str:
    """Return the text of a sample with images, conversation by conversation, and write its picture."""
    arrays, vision = sample.arrays, plan.derived.model_spec.vision
    assert vision is not None
    tokens, size = arrays["tokens"], vision.tokens_per_image
    last = [np.flatnonzero(tokens).max(initial=-1), np.flatnonzero(arrays["loss_mask"]).max(initial=-2) + 1]
    end = min(int(max(last)) + 1, len(tokens))  # padding has id 0, as a token may have
    num_tiles = -int(tokens[tokens > NEWLINE].min(initial=0) // size)
    learned = int(arrays["loss_mask"].sum())
    lines = [
        f"tokens         {end:,} of {len(tokens):,}; loss on {learned:,}; {num_tiles} images of {size} tokens"
    ]
    starts = [start for start in sample.document_starts.tolist() if start < end]
    texts = []
    for start, stop in itertools.pairwise([*starts, end]):
        text = "".join(_parts(tokens[start:stop].tolist(), size, tokenizer))
        if len(starts) > 1:
            lines.append(f"\nconversation at token {start}")
        lines += ["", printable(text)]
        texts.append(text)
    if picture is not None:
        tiling = tiling_of(plan.config.vision)
        draw([_image_of(tiling, one) for one in arrays["images"][:num_tiles]], "\n".join(texts), picture)
        lines += ["", f"picture        {picture}"]
    return "\n".join(lines)


def _parts(ids: Sequence[int], size: int, tokenizer: Tokenizer | None) -> Iterator[str]:
    """Yield the text between images, and a mark for each image."""
    for is_image, run in itertools.groupby(ids, key=lambda one: one < 0):
        found = list(run)
        if is_image:
            numbers = dict.fromkeys((-1 - one) // size + 1 for one in found if one != NEWLINE)
            yield "".join(f"[image {number}]" for number in numbers)
        else:
            yield tokenizer.decode(found) if tokenizer is not None else f" {shown_ids(found)} "


def _image_of(tiling: Tiling, pixels: Any) -> Image:
    from PIL.Image import fromarray  # noqa: PLC0415

    return fromarray(tiling.colours(pixels))


def inspect_rows(source: str, number: int | None, picture: str | None, *, as_json: bool) -> None:
    """Count the rows of a source of conversations about images, and show one. Raises InputError for a wrong row."""
    require_pillow()
    rows = opened(source, IndexCache(None))
    if number is not None and not 0 <= number < len(rows):
        raise ConfigError(
            f"--document {number}: {source} has {len(rows)} rows",
            fix=f"give a number from 0 to {len(rows) - 1}",
        )
    counts = Counter(len(rows[place].checked(len(rows[place].images)).images) for place in range(len(rows)))
    found: dict[str, Any] = {"rows": len(rows), "images": dict(sorted(counts.items())), "digest": rows.digest}
    row = None if number is None else rows[number]
    if row is not None:
        found["row"] = {"name": row.name, "turns": [vars(turn) for turn in row.turns], "images": row.images}
    if as_json:
        print(json.dumps(found))
    else:
        by_images = ", ".join(f"{count:,} with {images}" for images, count in sorted(counts.items()))
        print(f"{source}\n  rows         {len(rows):,}\n  images       {by_images}")
    if row is not None:
        _show(row, picture, is_silent=as_json)


def _show(row: Row, picture: str | None, *, is_silent: bool) -> None:
    text = "\n".join(f"{turn.role}: {turn.text}" for turn in row.turns)
    images = [decode(row.read(name), name) for name in row.images]
    if not is_silent:
        print(f"\n{row.name}")
        for name, image in zip(row.images, images, strict=True):
            print(f"  {name}: {image.width} x {image.height} pixels")
        print(printable(text))
    if picture is not None:
        draw(images, text, picture)
        if not is_silent:
            print(f"  picture      {picture}")


def draw(images: Sequence[Image], text: str, path: str) -> None:
    """Write a picture of images side by side above a text. Raises MegatrainError if it cannot be written."""
    from PIL import Image, ImageDraw  # noqa: PLC0415

    for image in images:
        image.thumbnail((_SIDE, _SIDE))
    lines = [part for line in text.split("\n") for part in textwrap.wrap(line, _COLUMNS) or [""]]
    plain = [line.encode("latin-1", "replace").decode("latin-1") for line in lines]
    widths = [image.width + _MARGIN for image in images]
    top = max((image.height for image in images), default=0) + 2 * _MARGIN
    canvas = Image.new(
        "RGB", (max(sum(widths) + _MARGIN, _COLUMNS * 7), top + _LINE * len(plain) + _MARGIN), "white"
    )
    for left, image in zip(itertools.accumulate([_MARGIN, *widths]), images, strict=False):
        canvas.paste(image, (left, _MARGIN))
    pen = ImageDraw.Draw(canvas)
    for number, line in enumerate(plain):
        pen.text((_MARGIN, top + number * _LINE), line, fill="black")
    with report_write_errors(Path(path)):
        canvas.save(path, "png")
