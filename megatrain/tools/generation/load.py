"""Load a model for text generation, in one process or on the tensor ranks of torchrun, and plan its cache."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

from megatrain.checkpoint.find import Candidate, is_of_megatron, list_candidates
from megatrain.checkpoint.reader import TensorReader
from megatrain.config.environment import LaunchEnvironment, read_environment
from megatrain.config.errors import ConfigError, MegatrainError
from megatrain.config.schema.training import HF_PREFIX
from megatrain.inference.cache import CachePlan
from megatrain.inference.stored_model import LoadedModel, ModelOptions, TensorRanks, load_model, load_tensors
from megatrain.inference.texts import plan_cache
from megatrain.interop.hf.checkpoint import HfCheckpoint
from megatrain.interop.hf.config_file import CONFIG_NAME
from megatrain.interop.megatron.checkpoint import MegatronCheckpoint, padding_notes
from megatrain.parallel.messages import Messages
from megatrain.parallel.process_groups import make_group
from megatrain.process.available_memory import available_bytes
from megatrain.tools.checkpoint.source import opened
from megatrain.tools.subcommands import CommandParser
from megatrain.training.launch.ranks import check_launch, join_store, local_gpu
from megatrain.training.liveness.rank_watch import RankWatch
from megatrain.training.logging.console import Console

_DTYPES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_GROUP_TIMEOUT: Final = timedelta(minutes=30)


@dataclass(frozen=True)
class Process:
    """This process: its device, and its place among tensor ranks."""

    device: torch.device
    ranks: TensorRanks
    has_plain_output: bool
    """Standard output has nothing but results: notes are printed to standard error."""

    def note(self, text: str) -> None:
        """Print a line for the user, on rank 0."""
        if self.ranks.rank == 0:
            print(f"> {text}", file=sys.stderr if self.has_plain_output else sys.stdout, flush=True)

    def messages(self) -> Messages:
        """Return the messages of all ranks, which are in the same order on each."""
        size, rank, make_handle = self.ranks.size, self.ranks.rank, self.ranks.make_handle
        handle = None if make_handle is None else make_handle("messages", [range(size)])
        return Messages(rank, size, handle)


def add_checkpoint_flags(parser: CommandParser) -> None:
    """Add the flags of the model."""
    parser.add(
        "--load FOLDER",
        "--save folder of a run, one of its iter_NNNNNNN folders, a folder of transformers (hf:FOLDER, or the FOLDER with"
        " config.json), or a checkpoint of Megatron-LM (torch_dist)",
        required=True,
    )
    parser.add(
        "--spec WORD ...",
        "function with the custom layers of the model, as in training: its code is never taken from a checkpoint",
        (),
    )
    parser.add(
        "--spec-digest DIGEST",
        "digest of the file of --spec, if it has changed since training (default: that of the checkpoint)",
    )
    parser.add("--device", "device (default: cuda where there is a GPU, else cpu)", choices=("cpu", "cuda"))
    parser.add(
        "--dtype",
        "dtype of weights and cache (default: bf16 on GPUs, fp32 on the CPU)",
        choices=("bf16", "fp16", "fp32"),
    )


def add_model_flags(parser: CommandParser) -> None:
    """Add the flags of the model and its memory."""
    add_checkpoint_flags(parser)
    parser.add(
        "--cache-gb GB",
        "limit of the cache of keys and values (default: 80%% of the free memory of a GPU, half of that of a host)",
        of=float,
        above=0,
    )
    parser.add(
        "--max-sequences N",
        "maximum number of sequences that are computed together",
        64,
        at_least=1,
        at_most=4096,
    )
    parser.add(
        "--termination-id ID",
        "token that ends a text (default: the tokenizer's end-of-document token, and each eos_token_id of a model's"
        " config.json and generation_config.json)",
        of=int,
    )
    parser.add(
        "--decoder-start-id ID",
        "first token of the decoder of a model whose encoder reads the prompt (default: [CLS] of the tokenizer, or the"
        " decoder_start_token_id of a model's config.json)",
        of=int,
    )


@contextmanager
def joined_process(arguments: argparse.Namespace, *, has_plain_output: bool = False) -> Iterator[Process]:
    """Join the tensor ranks that a launcher has started, or run alone.

    Raises:
        MegatrainError: they cannot be joined.
    """
    environment = read_environment()
    check_launch(environment, Console(is_quiet=environment.rank != 0 or has_plain_output))
    device = chosen_device(arguments.device, environment)
    if environment.world_size == 1:
        yield Process(device, TensorRanks(), has_plain_output)
        return
    store = join_store(environment)
    watch = RankWatch(environment, store)
    try:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=environment.rank,
            world_size=environment.world_size,
            timeout=_GROUP_TIMEOUT,
            device_id=device if device.type == "cuda" else None,
        )
        make = functools.partial(make_group, timeout=_GROUP_TIMEOUT)
        ranks = TensorRanks(environment.world_size, environment.rank, make)
        yield Process(device, ranks, has_plain_output)
        dist.barrier()
    except BaseException as error:
        watch.fail(error)  # returns on the rank that is to print its error
        raise
    watch.leave()


def read_model(name: str, options: ModelOptions, note: Callable[[str], None]) -> LoadedModel:
    """Read the model of --load; `note` gets lines about rows of the vocabulary."""
    foreign = foreign_reader(name, note)
    return load_model(Path(name), options) if foreign is None else load_tensors(foreign, options)


def load(arguments: argparse.Namespace, process: Process) -> LoadedModel:
    """Load the model of --load; print what was loaded."""
    default = "bf16" if process.device.type == "cuda" else "fp32"
    options = ModelOptions(
        device=process.device,
        dtype=_DTYPES[arguments.dtype or default],
        spec=tuple(arguments.spec),
        spec_digest=arguments.spec_digest,
        ranks=process.ranks,
        is_unlimited=True,
        is_rounded=True,
    )
    loaded = read_model(arguments.load, options, process.note)
    for line in loaded.skipped:
        process.note(line)
    process.note(f"{loaded.path}, iteration {loaded.iteration}")
    return loaded


@dataclass(frozen=True)
class Generation:
    """A loaded model that generates text in this process, as the flags of `add_model_flags` say."""

    arguments: argparse.Namespace
    process: Process
    loaded: LoadedModel

    @property
    def context(self) -> int:
        """Context that the text is in: of the decoder, if an encoder reads the prompt."""
        return self.loaded.model.spec.stacks[-1].seq_length or self.loaded.max_context

    @functools.cached_property
    def end_ids(self) -> tuple[int, ...]:
        """Tokens that end a text: --termination-id, checked against the vocabulary, or those of the model."""
        size, chosen = self.loaded.model.spec.vocab_size, self.arguments.termination_id
        if chosen is None:
            return self.loaded.end_ids
        if not 0 <= chosen < size:
            raise ConfigError(
                f"--termination-id {chosen}: the vocabulary has ids 0 to {size - 1}",
                fix="give a --termination-id in it",
            )
        return (chosen,)

    @functools.cached_property
    def start_id(self) -> int | None:
        """First token of a decoder whose encoder reads the prompt; None: the prompt is continued."""
        spec, given = self.loaded.model.spec, self.arguments.decoder_start_id
        if len(spec.stacks) == 1:
            if given is not None:
                raise ConfigError(
                    f"--decoder-start-id {given}: the model has no decoder after an encoder",
                    fix="remove --decoder-start-id",
                )
            return None
        start: int | None = self.loaded.start_id if given is None else given
        if start is None or not 0 <= start < spec.vocab_size:
            problem = "the tokenizer has no [CLS], with which the decoder begins"
            if given is not None:
                problem = f"--decoder-start-id {given}: the vocabulary has ids 0 to {spec.vocab_size - 1}"
            raise ConfigError(
                problem,
                fix="give --decoder-start-id the token of the vocabulary with which the decoder's samples begin",
            )
        return start

    def plan(self, *, max_tokens: int, max_prompt: int, num_sequences: int) -> CachePlan:
        """Plan the cache, and print the plan.

        Args:
            max_prompt: most tokens of a prompt that an encoder reads.
            num_sequences: at most --max-sequences of them are computed together.
        """
        plan = plan_cache(
            self.loaded.model,
            dtype=self.loaded.dtype,
            max_tokens=max_tokens,
            max_memory=0 if self.start_id is None else max_prompt,
            num_sequences=min(num_sequences, self.arguments.max_sequences),
            limit_bytes=self._cache_limit(),
        )
        self.process.note(plan.description)
        return plan

    def _cache_limit(self) -> int:
        """Return the bytes that a cache may take on each rank: all ranks get the same number."""
        device = self.process.device
        if self.arguments.cache_gb is not None:
            return int(self.arguments.cache_gb * 1e9)
        limit = int((0.8 if device.type == "cuda" else 0.5) * free_bytes(device))
        if self.process.ranks.size > 1:
            least = torch.tensor([limit], device=device)
            dist.all_reduce(least, op=dist.ReduceOp.MIN)
            limit = int(least)
        return limit


def free_bytes(device: torch.device) -> int:
    """Return the free memory of a GPU, or of the host."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_bytes()


def foreign_reader(name: str, note: Callable[[str], None]) -> TensorReader | None:
    """Return a reader of --load if it is a folder of transformers (hf:FOLDER, or one with config.json) or of Megatron-LM.

    Args:
        note: gets lines about rows of the vocabulary.
    """
    folder = Path(name.removeprefix(HF_PREFIX))
    if name.startswith(HF_PREFIX) or (folder / CONFIG_NAME).is_file():
        return _transformers_folder(folder, note)
    newest = next(iter(list_candidates(folder)), Candidate(0, folder))
    if not is_of_megatron(newest.path):
        return None
    reader = MegatronCheckpoint(newest.path)
    reader.run_vocab_size = reader.vocab_size
    for line in padding_notes(reader.padded_vocab_size, reader.vocab_size):
        note(line)
    return reader


def opened_source(name: str, say: Callable[[str], None]) -> AbstractContextManager[TensorReader]:
    """Open a checkpoint of ours, or what `foreign_reader` reads. `say` prints a line."""
    foreign = foreign_reader(name, lambda text: say(f"> {text}"))
    return opened(Path(name)) if foreign is None else closing(foreign)


def _transformers_folder(folder: Path, note: Callable[[str], None]) -> HfCheckpoint:
    """Return a reader of a folder of transformers."""
    reader = HfCheckpoint(folder)
    size = reader.tokenizer_size
    if size is None or size > reader.num_rows:
        why = "it has no tokenizer.json" if size is None else f"its tokenizer has {size} tokens"
        note(f"{folder}: {why}, the vocabulary {reader.num_rows} rows: prompts and text are ids")
    return reader


def chosen_device(wanted: str | None, environment: LaunchEnvironment) -> torch.device:
    """Return the device of --device, or the default one, for this rank."""
    name = wanted or ("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no GPU", fix="use --device cpu")
    device, count = local_gpu(environment), torch.cuda.device_count()
    if device.index >= count:
        raise MegatrainError(
            f"local rank {environment.local_rank} has no GPU of its own: this host has {count}",
            fix="start one process per GPU (--nproc-per-node of torchrun)",
        )
    torch.cuda.set_device(device)
    return device
