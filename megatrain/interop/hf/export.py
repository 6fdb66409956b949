"""A checkpoint of ours as a reader of their tensors, with the small files of a folder of transformers.

manifest ─> Config ─> the family that computes the same function ─> config.json, names and shapes
read_box ─> the parts of a tensor, read one after the other
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from megatrain.checkpoint.adaptation import merged
from megatrain.checkpoint.errors import MismatchError
from megatrain.checkpoint.manifest import DTYPES, Manifest, StoredKind
from megatrain.checkpoint.reader import TensorReader
from megatrain.checkpoint.stored_tokenizer import StoredTokenizer, stored_tokenizer
from megatrain.checkpoint.stored_values import stored_section
from megatrain.config.derive.vision import sample_length
from megatrain.config.errors import InputError, MegatrainError
from megatrain.config.schema.data import MASKED_FAMILIES, DataConfig
from megatrain.config.schema.experts import ExpertsConfig
from megatrain.config.schema.model import ModelConfig
from megatrain.config.schema.tokenizer import TokenizerConfig
from megatrain.config.schema.tree import Config
from megatrain.config.schema.vision import VisionConfig
from megatrain.data.tokenizers.files import read_json
from megatrain.interop.foreign_run import rows_to_copy
from megatrain.interop.hf.config_file import CONFIG_NAME
from megatrain.interop.hf.families.table import FAMILIES
from megatrain.interop.hf.processor_files import processor_files
from megatrain.interop.hf.settings import MTP, bias_shapes, fitting_family, has_tensor, shapes_of
from megatrain.interop.hf.tensors import Part, their_tensors, unused_tensors, zero_tensors
from megatrain.interop.hf.tokenizer_files import json_bytes, tokenizer_files
from megatrain.model.gpt import EMBEDDING_NAME
from megatrain.optim.sharded import WEIGHT
from megatrain.parallel.layout import Box, whole_box

_IMAGE: Final = "<image>"
_GENERATION: Final = "generation_config.json"
_DTYPE_NAMES: Final = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}


class HfExport(TensorReader):
    """Their tensors, read from a checkpoint of ours.

    Args:
        architecture: class of transformers; None: the first that computes the same function.
        image_token: token that stands for an image; None: --image-token-id of the run, or <image> of its tokenizer.

    Raises:
        InputError: no family computes the function of the model, or its tokenizer cannot be exported.
        MismatchError: the checkpoint's tensors do not fit its configuration.
    """

    def __init__(
        self, reader: TensorReader, architecture: str | None = None, *, image_token: int | None = None
    ) -> None:
        reader = merged(reader)
        self._reader, self.path = reader, reader.path
        manifest = reader.manifest
        self._biases = manifest.state.get("expert_biases", {})
        model: ModelConfig = stored_section(reader.path, manifest.config, "model", ModelConfig)
        experts: ExpertsConfig = stored_section(reader.path, manifest.config, "experts", ExpertsConfig)
        if model.spec:
            raise InputError(
                f"{reader.path}: its model has custom layers (--spec), which no family of transformers has",
                fix=f"export the weights alone: megatrain checkpoint export-weights {reader.path} TARGET",
            )
        data: DataConfig = stored_section(reader.path, manifest.config, "data", DataConfig)
        vision: VisionConfig = stored_section(reader.path, manifest.config, "vision", VisionConfig)
        self._has_images = bool(data.image_data_path)
        if model.max_position_embeddings is None:  # which every config.json has
            length = sample_length(Config(model=model, data=data, vision=vision))
            model = replace(model, max_position_embeddings=length)
        if EMBEDDING_NAME not in manifest.tensors:
            raise MismatchError(f"{reader.path}: has no {EMBEDDING_NAME}", fix="export another checkpoint")
        self.vocab_size = manifest.tensors[EMBEDDING_NAME].shape[0]
        self.tokenizer_config: TokenizerConfig = stored_section(
            reader.path, manifest.config, "tokenizer", TokenizerConfig
        )
        self.tokenizer = self._stored_tokenizer()
        is_tower = architecture in FAMILIES and FAMILIES[architecture].is_tower
        if image_token is not None or (
            model.model_family == "vlm" and vision.image_token_id is None and not is_tower
        ):
            vision = replace(vision, image_token_id=self._image_token(image_token))
        self.config = Config(model=model, experts=experts, vision=vision)
        self.family, self._keys = fitting_family(self.config, self.vocab_size, reader.path, architecture)
        self._check_tensors(manifest)
        own = {name: one.shape for name, one in manifest.model_tensors.items() if not name.startswith(MTP)}
        self.has_mtp = len(own) < len(manifest.model_tensors)
        ours = {name: shape for name, shape in own.items() if has_tensor(self.family, name)}
        biases = bias_shapes(self.config, self.vocab_size)
        self.tensors = {
            **their_tensors(
                self.family.modules,
                ours | biases,
                vars(model),
                layers_per_block=self.family.layers_per_block,
            ),
            **zero_tensors(self.family.zeros, model.hidden_size),
            **unused_tensors(self.family.unused, vision.vision_hidden_size or 0),
        }

    @property
    def manifest(self) -> Manifest:
        """Return the manifest of the checkpoint, with our names."""
        return self._reader.manifest

    def kind(self, name: str, shape: tuple[int, ...], kind: str) -> StoredKind:
        """Return the dtype of one of their tensors; it has no chunks."""
        theirs = self.tensors[name]
        assert theirs.shape == shape, name
        first = theirs.parts[0].name if theirs.parts and not theirs.offset else EMBEDDING_NAME
        if first in self._biases:
            return StoredKind("F32", ())
        return StoredKind(self._reader.kind(first, self.manifest.tensors[first].shape, kind).dtype, ())

    def dtype_of(self, name: str, wanted: str | None) -> str:
        """Return the dtype in which one of their tensors is written: biases that select experts stay in fp32, as in transformers."""
        theirs = self.tensors[name]
        is_bias = any(part.name in self._biases for part in theirs.parts)
        return self.kind(name, theirs.shape, WEIGHT).dtype if is_bias or wanted is None else wanted

    def read_box(self, out: Tensor, *, kind: str, name: str, shape: tuple[int, ...], box: Box) -> None:
        """Copy rows of one of their tensors into `out`; all of them, if its weight is transposed."""
        theirs, (low, high) = self.tensors[name], box[0]
        assert box[1:] == whole_box(shape)[1:], name
        if not theirs.parts:
            out.fill_(theirs.offset)
        elif theirs.offset:
            values = torch.empty(out.shape, dtype=torch.promote_types(out.dtype, torch.float32))
            self._read(theirs.parts[0], kind, values, low)
            out.copy_(values + theirs.offset)
            return
        for part in theirs.parts:
            if part.place is None:
                shape = part.shape if theirs.is_flat else (len(out), *part.shape[1:])
                self._read(part, kind, out.t() if theirs.is_transposed else out.view(shape), low)
            elif low <= part.place < high:
                rows = out[part.place - low]
                self._read(part, kind, rows.t() if theirs.is_transposed else rows, 0)

    def _read(self, part: Part, kind: str, out: Tensor, first: int) -> None:
        """Copy the rows of a part into `out`, which begins with the row `first` of the tensor."""
        for own, found in rows_to_copy(part.rows, whole_box(part.shape)):
            low, high = max(found.start, first), min(found.stop, first + len(out))
            if low >= high:
                continue
            start = own.start + low - found.start
            edge = (start, own.stop if found.step > 1 else start + high - low)  # rows in turns are read whole
            rows = out[low - first : high - first : found.step]
            values = rows if rows.is_contiguous() else torch.empty(rows.shape, dtype=out.dtype)
            if part.name in self._biases:
                values.copy_(torch.tensor(self._biases[part.name][slice(*edge)]))
            else:
                box = (edge, *whole_box(part.shape)[1:])
                self._reader.read_box(values, kind=kind, name=part.name, shape=part.shape, box=box)
            if values is not rows:
                rows.copy_(values)

    def is_read_whole(self, name: str) -> bool:
        """Return whether `read_box` reads a tensor only as a whole."""
        theirs = self.tensors[name]
        return theirs.is_flat or (theirs.is_transposed and theirs.parts[0].place is None)

    def small_files(self, dtype: str | None) -> dict[str, bytes]:
        """Return names and contents of config.json, generation_config.json and the files of tokenizer and processor.

        Args:
            dtype: name of the weights' dtype in safetensors; None: as stored.
        """
        stored = [self.kind(name, theirs.shape, WEIGHT).dtype for name, theirs in self.tensors.items()]
        widest = max(stored, key=lambda one: DTYPES[one].itemsize)
        files = {} if self.tokenizer is None else tokenizer_files(self.tokenizer)
        if self.tokenizer is not None:
            architecture, vision = self.family.architecture, self.config.vision
            files |= processor_files(
                architecture, vision, self.tokenizer.tokenizer, is_trained=self._has_images
            )
        ends = self._end_ids()
        end = ends[0] if len(ends) == 1 else ends or None
        pad = 0 if self.config.model.model_family in MASKED_FAMILIES else None  # their attention masks it
        ids = {"bos_token_id": None, "eos_token_id": end, "pad_token_id": pad}
        starts = self._start_of_decoder()
        keys = {**self._keys, "torch_dtype": _DTYPE_NAMES[dtype or widest], **ids, **starts}
        generation = self._generation_config() | {"eos_token_id": end, **starts}
        return {CONFIG_NAME: json_bytes(keys), _GENERATION: json_bytes(generation), **files}

    def _image_token(self, given: int | None) -> int:
        """Return the token that stands for an image: the given one, or that of the tokenizer.

        Raises:
            InputError: there is none in the vocabulary.
        """
        if given is not None and not 0 <= given < self.vocab_size:
            raise InputError(
                f"--image-token-id {given}: the vocabulary has ids 0 to {self.vocab_size - 1}",
                fix="give --image-token-id N, a token of the vocabulary that no text has",
            )
        if given is not None:
            return given
        ids = [] if self.tokenizer is None else self.tokenizer.tokenizer.encode(_IMAGE)
        if len(ids) != 1:
            raise InputError(
                f"{self._reader.path}: no token stands for an image in transformers: --image-token-id is none, and the"
                f" tokenizer has no {_IMAGE}",
                fix="add --image-token-id N, a token of the vocabulary that no text has",
            )
        return ids[0]

    def _stored_tokenizer(self) -> StoredTokenizer | None:
        """Return the tokenizer of the run; None: it has no text.

        Raises:
            InputError: its files are missing, have changed, or describe more tokens than the vocabulary has rows.
        """
        path, manifest = self._reader.path, self.manifest
        if self.tokenizer_config.tokenizer_type in (None, "NullTokenizer"):
            return None
        try:
            found = stored_tokenizer(path, manifest)
        except MegatrainError as error:
            raise InputError(
                f"the tokenizer of the checkpoint: {error.problems[0].text}",
                fix="restore its files, which config.json and the exported folder need",
            ) from error
        if found.tokenizer.vocab_size > self.vocab_size:
            raise InputError(
                f"{path}: the tokenizer has {found.tokenizer.vocab_size} tokens, and the vocabulary {self.vocab_size} rows",
                fix="restore the tokenizer of the training run",
            )
        return found

    def _end_ids(self) -> list[int]:
        """Return the tokens that end a text."""
        if self.tokenizer is not None:
            return list(self.tokenizer.end_ids)
        eod = self.tokenizer_config.null_tokenizer_eod_id
        found = [*([] if eod is None else [eod]), *self.manifest.state.get("end_token_ids", ())]
        return list(dict.fromkeys(found))

    def _start_of_decoder(self) -> dict[str, int | None]:
        """Return the key of the token with which the decoder of a model with an encoder begins."""
        if self.config.model.model_family != "t5":
            return {}
        stored = self.manifest.state.get("decoder_start_id")
        return {"decoder_start_token_id": stored if self.tokenizer is None else self.tokenizer.start_id}

    def _generation_config(self) -> dict[str, Any]:
        """Return the settings of the folder that the tokenizer comes from."""
        file = Path(self.tokenizer_config.tokenizer_model or "") / _GENERATION
        content = read_json(file) if self.tokenizer_config.tokenizer_model and file.is_file() else {}
        return content if isinstance(content, dict) and content else {"_from_model_config": True}

    def _check_tensors(self, manifest: Manifest) -> None:
        expected = shapes_of(None, self.config, self.vocab_size)
        found = {name: tensor.shape for name, tensor in manifest.model_tensors.items()}
        wrong = sorted(
            name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)
        )
        if wrong:
            raise MismatchError(
                f"{self._reader.path}: {', '.join(wrong)}: not the tensors of its configuration",
                fix="export another checkpoint of the run",
            )
