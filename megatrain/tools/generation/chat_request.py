r"""A request of OpenAI's chat API for a model of conversations about images, in the words of its training.

messages ─> USER: <image>\nWhat is it? ASSISTANT: ─> tokens, with places of images
image parts ─> data: URLs, or file: URLs below --image-folder ─> pixels; nothing is fetched from a network
"""

from __future__ import annotations

import binascii
from base64 import b64decode
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from megatrain.config.errors import InputError
from megatrain.config.model_spec.model import ModelSpec
from megatrain.data.images.conversations import written
from megatrain.data.images.pixels import Tiling
from megatrain.data.images.rows import MARK
from megatrain.data.tokenizers.build import Tokenizer
from megatrain.inference.image_vectors import prompt_images, with_places
from megatrain.tools.generation.completion_request import (
    OF_CHAT,
    CompletionRequest,
    RequestError,
    chat_request,
    read_fields,
)

_ROLES: Final = ("system", "user", "assistant")
_MOST_IMAGES: Final = 64


@dataclass(frozen=True)
class ChatFormat:
    """Reader of conversations, in the words of training.

    Attributes:
        folder: local images may be read below it; None: none may.
    """

    spec: ModelSpec
    tokenizer: Tokenizer
    tiling: Tiling
    eod: int | None
    folder: Path | None = None

    def read(self, body: bytes, *, model: str, max_tokens: int) -> CompletionRequest:
        """Check a request.

        Raises:
            RequestError: with the field that is wrong.
        """
        fields = read_fields(body, OF_CHAT, model)
        fields["max_tokens"] = fields.get("max_completion_tokens") or fields.get("max_tokens")
        files: list[tuple[bytes, str]] = []
        ids: list[int] = []
        try:
            turns = list(self._turns(fields.get("messages"), files))
            images = prompt_images(files, self.spec, self.tiling) if files else None
            left = [] if images is None else images.tokens
            for text, is_answer in turns:
                count = text.count(MARK)
                ids += with_places(text, left[:count], self.tokenizer)
                ids += [self.eod] if is_answer and self.eod is not None else []
                left = left[count:]
        except InputError as error:
            raise RequestError(error.problems[0].text, param="messages") from error
        except ValueError as error:
            raise RequestError(str(error), param="messages") from error
        tiles = None if images is None else images.tiles
        return chat_request(fields, ids, max_tokens=max_tokens, images=tiles)

    def _turns(self, messages: Any, files: list[tuple[bytes, str]]) -> Iterator[tuple[str, bool]]:
        """Yield the text of each message, and whether it is an answer; add its images to `files`."""
        if not isinstance(messages, list) or not messages:
            raise RequestError("messages is not a list of messages", param="messages")
        for number, one in enumerate(messages):
            role = one.get("role") if isinstance(one, dict) else None
            if role not in _ROLES or (number == len(messages) - 1 and role != "user"):
                raise RequestError(
                    f"messages[{number}] has the role {str(role)[:50]!r}: write {', '.join(_ROLES)}, and user last",
                    param="messages",
                )
            content = one.get("content")
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
            if not isinstance(parts, list):
                raise RequestError(f"messages[{number}] has no content", param="messages")
            text = "".join(self._part(part, f"messages[{number}]", files) for part in parts)
            yield written(role, text), role == "assistant"

    def _part(self, part: Any, where: str, files: list[tuple[bytes, str]]) -> str:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            if MARK in part["text"]:
                raise RequestError(
                    f"{where} has {MARK} in its text: send an image_url part", param="messages"
                )
            return str(part["text"])
        url = part.get("image_url") if kind == "image_url" else None
        url = url.get("url") if isinstance(url, dict) else url
        if not isinstance(url, str):
            raise RequestError(f"{where} has a part that is neither text nor image_url", param="messages")
        if len(files) == _MOST_IMAGES:
            raise RequestError(f"messages have more than {_MOST_IMAGES} images", param="messages")
        files.append((self._bytes(url, where), f"the image of {where}"))
        return f"{MARK}\n"

    def _bytes(self, url: str, where: str) -> bytes:
        """Return the content of a URL that needs no network."""
        head, _, data = url.partition(",")
        if head.startswith("data:") and head.endswith(";base64"):
            try:
                return b64decode(data, validate=True)
            except binascii.Error as error:
                raise RequestError(f"{where}: its data: URL is not base64", param="messages") from error
        if not url.startswith("file:"):
            raise RequestError(
                f"{where}: {url[:50]!r} is not fetched; send data:image/png;base64,...", param="messages"
            )
        path = Path(unquote(urlsplit(url).path)).resolve()
        if self.folder is None or not path.is_relative_to(self.folder.resolve()) or not path.is_file():
            raise RequestError(f"{where}: no such file below --image-folder of the server", param="messages")
        return path.read_bytes()
