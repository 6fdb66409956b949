"""A folder of transformers as a reader of canonical tensors: what the rest of the program reads of a checkpoint of ours."""

from __future__ import annotations

import functools
import re
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from torch import Tensor

from megatrain.checkpoint.manifest import Manifest, StoredKind, StoredTensor
from megatrain.checkpoint.reader import TensorReader
from megatrain.config.errors import InputError, MegatrainError
from megatrain.config.schema.tokenizer import TokenizerConfig
from megatrain.data.tokenizers.build import load_tokenizer
from megatrain.data.tokenizers.special_tokens import listed_end_ids
from megatrain.interop.foreign_run import rows_to_copy, stored_state
from megatrain.interop.hf.config_file import CONFIG_NAME, RESTORE, ConfigFile
from megatrain.interop.hf.families.table import family_of
from megatrain.interop.hf.family import COUNT, Not
from megatrain.interop.hf.folder import TOKENIZER_NAME, HfFolder, name_text
from megatrain.interop.hf.settings import bias_shapes, flags_of, plan_of, read_settings, shapes_of
from megatrain.interop.hf.tensors import Part, Shape, TheirTensor, factor_of, their_tensors, zero_tensors
from megatrain.model.gpt import EMBEDDING_NAME, OUTPUT_BIAS_NAME, OUTPUT_NAME
from megatrain.optim.sharded import WEIGHT
from megatrain.parallel.layout import Box
from megatrain.storage.untrusted_json import integer

_WITH_ROWS: Final = (EMBEDDING_NAME, OUTPUT_NAME, OUTPUT_BIAS_NAME)
"""Tensors with a row per id."""
_TIED: Final = "tie_word_embeddings"
_MAX_LISTED: Final = 1000
_ROWS_AT_A_TIME: Final = 4096


class HfCheckpoint(TensorReader):
    """Reads boxes of canonical tensors; has the manifest of a checkpoint at iteration 0 with weights alone.

    Args:
        path: a folder with config.json and safetensors files.
        vocab_size: rows of the vocabulary's tensors to keep; None: those of the tokenizer's tokens, or all if it has more or
            cannot be read.
        is_tower: the folder has a vision tower alone.

    Raises:
        InputError: the folder is damaged, of a model that megatrain lacks, or (not) a tower alone.
    """

    def __init__(self, path: Path, vocab_size: int | None = None, *, is_tower: bool = False) -> None:
        self.path = path
        self._folder = HfFolder(path)
        source = self._folder.config
        self.family = family_of(source)
        if source.has_mxfp4 and not self.family.has_mxfp4:
            raise source.refusal("quant_method", "mxfp4")
        if self.family.is_tower != is_tower:
            raise _wrong_part(source, is_tower=is_tower)
        self.settings = read_settings(self.family, source)
        self._check_sizes()
        self.num_rows: int = (
            1 if is_tower else self.family.text_config(source).checked("vocab_size", check=COUNT)
        )
        tokens = self.num_rows if is_tower else self.tokenizer_size or self.num_rows
        self.vocab_size = min(tokens, self.num_rows) if vocab_size is None else vocab_size
        if not 1 <= self.vocab_size <= self.num_rows:
            raise InputError(
                f"--vocab-size {self.vocab_size}: the vocabulary of {path} has {self.num_rows} rows",
                fix=f"use --vocab-size {self.num_rows} or less",
            )
        self.plan = plan_of(self.settings, self.vocab_size, source.path)
        self._shapes, self._biases = self._canonical_shapes()
        self._stored_names = self._names_in_files()
        self._add_copies()
        self._theirs: dict[str, tuple[TheirTensor, Part]] = {}
        self.left_out = self._layers_left_out()
        """Numbers of layers in the files that the model of transformers leaves out."""
        self._check_tensors()
        self.unread_keys, self.notes = source.unread, source.notes
        self._whole = functools.lru_cache(1)(self._read_whole)

    @property
    def flags(self) -> list[str]:
        """Return the flags of the model."""
        return flags_of(self.settings)

    @functools.cached_property
    def tokenizer(self) -> TokenizerConfig:
        """Settings of the folder's tokenizer if its size equals the vocabulary's, else of one without text."""
        if self.tokenizer_size == self.vocab_size:
            return self._text_tokenizer
        return TokenizerConfig(
            tokenizer_type="NullTokenizer",
            vocab_size=self.vocab_size,
            null_tokenizer_eod_id=next(iter(self.end_ids), None),
        )

    @property
    def _text_tokenizer(self) -> TokenizerConfig:
        return TokenizerConfig(
            tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(self.path.resolve())
        )

    @functools.cached_property
    def end_ids(self) -> tuple[int, ...]:
        """Ids of the vocabulary that config.json and generation_config.json list as ends of a text."""
        return tuple(number for number in listed_end_ids(self.path) if number < self.vocab_size)

    @functools.cached_property
    def tokenizer_size(self) -> int | None:
        """Number of tokens of the folder's tokenizer; None: it has none that can be read."""
        if not (self.path / TOKENIZER_NAME).is_file():
            return None
        try:
            return load_tokenizer(self._text_tokenizer).vocab_size
        except MegatrainError as error:
            raise InputError(
                f"{self.path}: its tokenizer: {error.problems[0].text}",
                fix="repair tokenizer.json, or convert a copy of the folder without it",
            ) from error

    @property
    def homes(self) -> dict[str, TheirTensor]:
        """Their tensor that holds each of ours."""
        return {name: theirs for name, (theirs, _) in self._theirs.items()}

    @functools.cached_property
    def manifest(self) -> Manifest:
        """Counters, state, configuration and tensors, without files."""
        plan = self.plan
        config = plan.config.to_dict()
        config["tokenizer"] = vars(self.tokenizer) | {
            "tokenizer_special_tokens": list(self.tokenizer.tokenizer_special_tokens)
        }
        tensors = {
            name: StoredTensor(shape, {WEIGHT: self._kind(name)}) for name, shape in self._shapes.items()
        }
        return Manifest.of_weights(
            state=stored_state(plan, expert_biases=self._expert_biases(), end_token_ids=list(self.end_ids))
            | self._decoder_start(),
            config=config,
            tensors=tensors,
            checksum=zlib.crc32(repr((config["model"], config["experts"], tensors)).encode()),
        )

    def _decoder_start(self) -> dict[str, int]:
        """Return the token with which the decoder of a model with an encoder begins."""
        if self.plan.config.model.model_family != "t5":
            return {}
        check, names = integer(0, self.vocab_size - 1), ("decoder_start_token_id", "pad_token_id")
        found = self._folder.config.checked(*names, check=check, default=0, is_optional=True)
        return {"decoder_start_id": found or 0}

    def read_box(self, out: Tensor, *, kind: str, name: str, shape: tuple[int, ...], box: Box) -> None:  # noqa: ARG002 (as CheckpointReader)
        """Copy a box into `out`, which has the shape of the box and any float dtype."""
        theirs, part = self._theirs[name]
        rest = tuple(slice(*edge) for edge in box[1:])
        stored = self._stored_names[theirs.name]
        is_plain = not theirs.is_transposed and not theirs.is_flat and part.place is None
        is_plain = is_plain and out.shape[1:] == part.shape[1:]
        is_plain = (
            is_plain
            and not theirs.offset
            and not theirs.scale
            and part.factor == 1.0
            and out.is_cpu
            and out.dtype == self._folder.dtype(stored)
        )
        for own, found in rows_to_copy(part.rows, box):
            if is_plain and found.step == 1 and out[own].is_contiguous():
                self._folder.read_rows(stored, found.start, out[own])
            else:
                rows = self._rows(theirs, part.place, found).reshape(len(found), *part.shape[1:])
                rows = rows[(slice(None), *rest)]
                if theirs.offset:
                    rows = rows - theirs.offset
                if theirs.scale:
                    factors = self._folder.rows(self._stored_names[theirs.scale], found.start, found.stop)
                    rows = rows.float() * factors.float().view(-1, *[1] * (rows.dim() - 1))
                if part.factor != 1.0:
                    rows = rows.float() * part.factor
                out[own].copy_(rows)

    def _rows(self, theirs: TheirTensor, place: int | None, rows: range) -> Tensor:
        if not theirs.is_transposed and not theirs.is_flat and place is None and rows.step == 1:
            return self._folder.rows(self._stored_names[theirs.name], rows.start, rows.stop)
        whole = self._whole(theirs.name, place)
        if theirs.is_flat:
            whole = whole.view(theirs.parts[0].shape)
        return (whole.t() if theirs.is_transposed else whole)[rows.start : rows.stop : rows.step]

    def _read_whole(self, name: str, place: int | None) -> Tensor:
        """Return a whole tensor, or the tensor of an expert."""
        stored = self._stored_names[name]
        if place is not None:
            return self._folder.rows(stored, place, place + 1)[0]
        return self._folder.rows(stored, 0, self._folder.tensors[stored].shape[0])

    def _expert_biases(self) -> dict[str, list[float]]:
        return {name: self.values(name, shape).tolist() for name, shape in self._biases.items()}

    def _kind(self, name: str) -> StoredKind:
        theirs, part = self._theirs[name]
        if theirs.offset or theirs.scale or part.factor != 1.0:
            return StoredKind("F32", ())  # a difference or a product needs more digits
        return StoredKind(self._folder.tensors[self._stored_names[theirs.name]].dtype, ())

    def _check_sizes(self) -> None:
        """Check numbers that a model is built from against the tensors, before it is built."""
        num_tensors = len(self._folder.tensors)
        for path in ("model.num_layers", "experts.num_experts"):
            value: int = self.settings.get(path, 0)
            if value > num_tensors:
                raise InputError(
                    f"{self._folder.config.path}: {value} {path.split('.')[1]} for {num_tensors} tensors",
                    fix=RESTORE,
                )

    def _canonical_shapes(self) -> tuple[dict[str, Shape], dict[str, Shape]]:
        """Return the shapes of the model's tensors, and of its biases that select experts."""
        try:
            config = self.plan.config
            return shapes_of(self.family, config, self.vocab_size), bias_shapes(config, self.vocab_size)
        except (AssertionError, MegatrainError, OverflowError, RuntimeError, TypeError, ValueError) as error:
            raise InputError(
                f"{self._folder.config.path}: describes no model ({str(error)[:200]})",
                fix=RESTORE,
            ) from error

    def _names_in_files(self) -> dict[str, str]:
        """Return the names in the files by their names in the family's table."""
        prefix, names = self.family.optional_prefix, self._folder.tensors
        if self.family.renamed:
            return {_renamed(name, self.family.renamed): name for name in names}
        if not prefix or any(name.startswith(prefix) for name in names):
            return {name: name for name in names}
        head = self._their_name(OUTPUT_NAME)
        return {name if name == head else prefix + name: name for name in names}

    def _add_copies(self) -> None:
        """Read a tensor that the files leave out from the one that it equals."""
        for name, source in self.family.copies.items():
            if name not in self._stored_names and source in self._stored_names:
                self._stored_names[name] = self._stored_names[source]
                self._folder.config.notes.append(
                    f"the files have no {name}: it begins as a copy of {source}, as transformers ties them, and is trained apart"
                )

    def _their_name(self, ours: str) -> str:
        module, _, kind = ours.rpartition(".")
        homes = (f"{theirs}.{kind}" for theirs, name in self.family.modules.items() if name == module)
        return next(homes, "")  # a tower has none

    def _check_tensors(self) -> None:
        """Compare the model's tensors with the tensors of the files.

        Raises:
            InputError: some are missing, unused or have another shape; all of them are named.
        """
        expected, head = self._expected(), self._their_name(OUTPUT_NAME)
        found = {name: self._folder.tensors[stored].shape for name, stored in self._stored_names.items()}
        left_out = self._not_read(head)
        problems = [f"missing: {name}" for name in sorted(expected.keys() - found.keys())]
        problems += [
            f"unused: {name_text(name)}"
            for name in sorted(found.keys() - expected.keys())
            if not any(pattern.fullmatch(name) for pattern in left_out)
        ]
        problems += [
            f"shape {list(found[name])} instead of {list(theirs.shape)}: {name}"
            for name, theirs in sorted(expected.items())
            if found.get(name, theirs.shape) != theirs.shape
        ]
        if problems:
            raise self._other_tensors(problems, head)
        factors = self.family.factors(self._folder.config)
        for theirs in expected.values():
            self._folder.dtype(self._stored_names[theirs.name])
            self._theirs |= {
                part.name: (theirs, replace(part, factor=factor_of(part.name, factors)))
                for part in theirs.parts
            }
            if (
                not theirs.parts
                and not theirs.offset
                and bool(self._rows(theirs, None, range(theirs.shape[0])).any())
            ):
                raise InputError(
                    f"{self.path}: {theirs.name} is not 0, and the models here have no such tensor",
                    fix="models of this kind are not converted; see docs/weights.md",
                )
        if OUTPUT_NAME not in self._shapes and head in found:
            self._check_tied(self._stored_names[head])

    def _other_tensors(self, problems: list[str], head: str) -> InputError:
        listed = "".join(f"\n  {problem}" for problem in problems[:_MAX_LISTED])
        fix = "restore the folder from the model's source, or correct config.json"
        may_be_tied = any(isinstance(part, Not) and part.theirs == _TIED for part in self.family.config)
        if problems == [f"missing: {head}"] and may_be_tied:
            fix = f'set "{_TIED}" to true in {CONFIG_NAME} if the output layer is the embedding, or restore the folder'
        return InputError(
            f"{self.path}: its tensors are not those of the {self.family.architecture} that {CONFIG_NAME} describes:{listed}",
            fix=fix,
        )

    def _not_read(self, head: str) -> list[re.Pattern[str]]:
        """Return the names of tensors that files may have and that are not read. `head`: tensor of the output layer."""
        patterns = [*self.family.buffers, *map(re.escape, (head, *self.family.unused))]
        if self.family.more_layers is not None:
            layers = re.escape(self.family.more_layers.layers)
            patterns += [rf"{layers}\.{number}\..*" for number in self.left_out]
        return [re.compile(pattern) for pattern in patterns]

    def _layers_left_out(self) -> range:
        more = self.family.more_layers
        return range(0) if more is None else more.numbers(self._folder.config, self.plan.config)

    def _expected(self) -> dict[str, TheirTensor]:
        """Return the tensors that the files of this model have; the vocabulary's with all rows."""
        rows = {
            name: (self.num_rows, *shape[1:]) if name in _WITH_ROWS else shape
            for name, shape in (self._shapes | self._biases).items()
        }
        try:
            model = self.plan.config.model
            found = their_tensors(
                self.family.modules, rows, vars(model), layers_per_block=self.family.layers_per_block
            )
            return found | zero_tensors(self.family.zeros, model.hidden_size)
        except KeyError as error:
            raise InputError(
                f"{self._folder.config.path}: the model has {error.args[0]}, and {self.family.architecture} does not",
                fix=RESTORE,
            ) from error

    def _check_tied(self, head: str) -> None:
        """Check that an output weight which is stored although it is tied equals the embedding."""
        embedding = self._stored_names[self._their_name(EMBEDDING_NAME)]
        one, other = (self._folder.tensors[name] for name in (embedding, head))
        is_equal = (one.shape, one.dtype) == (other.shape, other.dtype) and all(
            bool((self._folder.rows(embedding, row, stop) == self._folder.rows(head, row, stop)).all())
            for row in range(0, self.num_rows, _ROWS_AT_A_TIME)
            for stop in (min(row + _ROWS_AT_A_TIME, self.num_rows),)
        )
        if not is_equal:
            raise InputError(
                f"{self.path}: {CONFIG_NAME} ties the output layer to the embedding, and {head} differs from it",
                fix=f'set "{_TIED}" to false in {CONFIG_NAME} if the model was trained so',
            )


def _renamed(name: str, prefixes: Mapping[str, str]) -> str:
    """Return a name with the first of these prefixes that it has replaced."""
    found = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
    return prefixes.get(found, "") + name.removeprefix(found)


def _wrong_part(source: ConfigFile, *, is_tower: bool) -> InputError:
    found = (
        f"{source.path}: {source.architecture} is {'no vision tower' if is_tower else 'a vision tower alone'}"
    )
    return InputError(
        found,
        fix="name a folder of CLIPVisionModel or SiglipVisionModel"
        if is_tower
        else "join it with a language model: megatrain convert combine TOWER LANGUAGE TARGET",
    )
