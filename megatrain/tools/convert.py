"""`megatrain convert`: checkpoints of other programs as checkpoints of megatrain, and back."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatrain.checkpoint.errors import MismatchError
from megatrain.checkpoint.find import TRACKER_NAME, folder_name, newest_of_megatron
from megatrain.config.errors import ConfigError, NoCheckpointError
from megatrain.interop.hf.checkpoint import HfCheckpoint
from megatrain.interop.hf.export import HfExport
from megatrain.interop.hf.joined import JoinedModel
from megatrain.interop.hf.peft_adapters import PeftCheckpoint, peft_files
from megatrain.interop.megatron.checkpoint import MegatronCheckpoint, padding_notes
from megatrain.interop.megatron.export import MegatronExport
from megatrain.optim.sharded import WEIGHT
from megatrain.parallel.layout import whole_box
from megatrain.storage.disk import Disk, write_file
from megatrain.storage.files import replace_file
from megatrain.tools.checkpoint.rewrite import (
    DTYPE_NAMES,
    new_folder,
    require_absent,
    write_checkpoint,
    write_weights,
)
from megatrain.tools.checkpoint.source import Progress, TensorPart, opened, size_text
from megatrain.tools.compare_logits import compare_logits
from megatrain.tools.compare_tokenizers import compare_tokenizers
from megatrain.tools.subcommands import RUN_FOLDER, CommandParser, add_command, add_file_options


def add_flags(commands: Any) -> None:
    """Add `megatrain convert ...`."""
    convert = add_command(
        commands,
        "convert",
        description="Convert checkpoints from and to checkpoints of other programs, without a GPU. No code that they name is run.",
    )
    directions = convert.add_subparsers(dest="action", required=True, metavar="DIRECTION")
    _add_combine(directions)
    parser = _add_direction(directions, megatrain_to_peft)
    parser.add(
        "--base MODEL",
        "name or folder of transformers of the model that they adapt, for adapter_config.json (default: none)",
    )
    parser = _add_direction(directions, peft_to_megatrain, "folder that save_pretrained of peft wrote")
    parser.add("--base FOLDER", "folder of transformers of the model that it adapts", of=Path, required=True)
    megatron = "--save folder of Megatron-LM, or one of its iter_NNNNNNN folders"
    parser = _add_direction(directions, megatron_to_megatrain, megatron)
    parser.add(
        "--allow-pickle",
        "also read the format torch (mp_rank_*), whose files are pickled; no code in them is run",
    )
    rows = "tokens to keep, without padding (default: --vocab-size of the run, or all rows if it had none)"
    _add_sizes(parser, rows)
    _add_direction(directions, megatrain_to_megatron)
    folder = "folder that save_pretrained wrote, or of a download"
    parser = _add_direction(directions, hf_to_megatrain, folder)
    rows = "rows of the vocabulary to keep (default: as many as the tokenizer of the folder has tokens, or all without one)"
    _add_sizes(parser, rows)
    parser = _add_direction(directions, megatrain_to_hf)
    parser.add(
        "--architecture NAME",
        "class of transformers, such as MistralForCausalLM (default: the first that computes the same)",
    )
    parser.add(
        "--image-token-id N",
        "token that stands for an image, which no text has (default: --image-token-id of the run, else <image> of the"
        " tokenizer)",
        of=int,
    )
    parser.add("--no-compare", "do not load both models to compare their logits")
    add_file_options(parser)


def _add_direction(
    directions: Any, run: Callable[[argparse.Namespace], None], source: str = RUN_FOLDER
) -> CommandParser:
    """Add a direction with one source. `source`: help text of its path."""
    parser = add_command(directions, run.__name__.replace("_", "-"), run)
    parser.add("source PATH", source, of=Path)
    parser.add("target TARGET", "folder to write to", of=Path)
    return parser


def _add_sizes(parser: CommandParser, rows: str) -> None:
    """Add the flags of a checkpoint that is written. `rows`: help text of --vocab-size."""
    parser.add("--vocab-size N", rows, of=int, at_least=1)
    parser.add("--files N", "number of files (default: of 5 GB each)", of=int, at_least=1)


def _add_combine(directions: Any) -> None:
    parser = add_command(directions, "combine", combine)
    towers = "folder of CLIPVisionModel, CLIPModel, SiglipVisionModel or SiglipModel"
    parser.add("tower TOWER", towers, of=Path)
    parser.add("language LANGUAGE", "folder of a language model, such as LlamaForCausalLM", of=Path)
    parser.add("target TARGET", "folder to write to", of=Path)
    parser.add(
        "--feature-layer N",
        "layer of the tower whose output the projector reads, counted from the end (default: -2 for CLIP, as in LLaVA,"
        " -1 for SigLIP); later layers are left out",
        of=int,
    )
    parser.add("--seed N", "seed of the projector", 1234)
    _add_sizes(
        parser,
        "rows of the vocabulary to keep (default: as many as the tokenizer of the language model has tokens)",
    )


def combine(arguments: argparse.Namespace) -> None:
    """Write a vision tower and a language model, with a new projector, as a checkpoint of megatrain, to start from."""
    reader = JoinedModel(
        arguments.tower,
        arguments.language,
        vocab_size=arguments.vocab_size,
        feature_layer=arguments.feature_layer,
        seed=arguments.seed,
    )
    write_checkpoint(reader, arguments.target, arguments.files)
    print(" ".join(reader.flags))
    print(
        f"train the projector first: --pretrained-checkpoint {arguments.target} --load RUN --save RUN --freeze-LM --freeze-ViT, with"
        " --use-checkpoint-args for the flags of the model; then more parts with --pretrained-checkpoint RUN"
    )


def megatron_to_megatrain(arguments: argparse.Namespace) -> None:
    """Write a checkpoint of Megatron-LM as one of megatrain."""
    source, target = _newest(arguments.source), arguments.target
    reader = MegatronCheckpoint(source, arguments.vocab_size, allows_format_torch=arguments.allow_pickle)
    if reader.has_buckets:
        raise MismatchError(
            f"{source}: the state of its optimizer is stored by buckets, whose order only Megatron-LM knows",
            fix="save once more there with --ckpt-format torch_dist --dist-ckpt-optim-fully-reshardable, or start from"
            f" the weights alone: pretrain.py --load {arguments.source} with --no-load-optim or --finetune",
        )
    reader.run_vocab_size = reader.vocab_size
    write_checkpoint(reader, target, arguments.files)
    manifest = reader.manifest
    print(f"iteration {manifest.iteration}, {manifest.consumed_train_samples} samples consumed")
    for note in padding_notes(reader.padded_vocab_size, reader.vocab_size):
        print(
            f"{note}; for equal losses keep them with --vocab-size {reader.padded_vocab_size}, here and in training"
        )
    if not manifest.state["has_optimizer"]:
        print("it has no optimizer state: start from the weights with --finetune, or add --no-load-optim")
    print("the states of random generators are left out: dropout draws other masks than Megatron-LM would")
    print(
        f"continue the run with --load {target} and --vocab-size {reader.vocab_size}, or the tokenizer of that size;"
        " `megatrain port SCRIPT.sh` translates the launch script"
    )


def megatrain_to_megatron(arguments: argparse.Namespace) -> None:
    """Write a checkpoint as one of Megatron-LM (torch_dist), with which its runs continue."""
    target, disk = arguments.target, Disk()
    with opened(arguments.source) as reader:
        export = MegatronExport(reader)
        final = target / folder_name(reader.manifest.iteration)
        if final.exists():
            raise ConfigError(f"{final} exists", fix="name another target folder")
        with (
            new_folder(final, export.num_bytes, disk) as temporary,
            Progress("writing", export.num_bytes) as progress,
        ):
            export.write(temporary, progress.add)
        replace_file(target / TRACKER_NAME, [str(reader.manifest.iteration).encode()])
        num_plans = len(reader.manifest.state.get("data_plans", {}).get("train", ()))
    if num_plans > 1:
        times = "once" if num_plans == 2 else f"{num_plans - 1} times"
        print(
            f"WARNING: --train-iters has changed {times} in this run; Megatron-LM orders samples by its last value"
            " alone, so a run that continues there reads others, and some again"
        )
    print(f"{final}: {len(export.tensors)} parameters, {size_text(export.num_bytes)}")
    print(f"continue the run in Megatron-LM with --load {target} --ckpt-format torch_dist --no-load-rng")


def hf_to_megatrain(arguments: argparse.Namespace) -> None:
    """Write a folder of transformers (config.json, safetensors) as a checkpoint of megatrain, to start from."""
    target = arguments.target
    reader = HfCheckpoint(arguments.source, arguments.vocab_size)
    write_checkpoint(reader, target, arguments.files)
    print(f"{reader.family.architecture}: {shlex.join(reader.flags)}")
    for note in reader.notes:
        print(note)
    if reader.unread_keys:
        print(f"keys of config.json that are not read: {', '.join(reader.unread_keys)}")
    if reader.left_out and reader.family.more_layers is not None:
        print(f"{len(reader.left_out)} {reader.family.more_layers.words} are left out, as in transformers")
    size, rows = reader.tokenizer_size, reader.num_rows
    if size is not None and size != reader.vocab_size:
        print(
            f"the tokenizer has {size} tokens, and the vocabulary {reader.vocab_size} rows: a run needs another tokenizer, or data"
            " of ids"
        )
    elif reader.vocab_size < rows:
        print(
            f"the {size} rows of the tokenizer's tokens are kept, the other {rows - reader.vocab_size} are not; --vocab-size {rows}"
            " keeps them, for data of ids"
        )
    print(
        f"start from the weights with --pretrained-checkpoint {target} --load RUN --save RUN, or --load {target} --finetune;"
        " --use-checkpoint-args takes the flags of the model, the sequence length and the tokenizer from it"
    )


def megatrain_to_hf(arguments: argparse.Namespace) -> None:
    """Write the weights of a checkpoint as a folder that from_pretrained of transformers reads."""
    target, dtype = arguments.target, DTYPE_NAMES.get(arguments.dtype)
    with opened(arguments.source) as reader:
        export = HfExport(reader, arguments.architecture, image_token=arguments.image_token_id)
        weights = [
            TensorPart(
                name,
                WEIGHT,
                one.shape,
                export.dtype_of(name, dtype),
                whole_box(one.shape),
            )
            for name, one in export.tensors.items()
        ]
        small = export.small_files(dtype)
        compared_tokenizers = (
            "the run's tokenizer has no text: the folder has none"
            if export.tokenizer is None
            else compare_tokenizers(small, export.tokenizer.tokenizer, num_rows=export.vocab_size)
        )
        write_weights(
            export,
            weights,
            target,
            max_file_gb=arguments.max_file_gb,
            others=small,
            is_read_whole=export.is_read_whole,
        )
        print(f"{export.family.architecture}; also {', '.join(small)}")
        print(compared_tokenizers)
        if export.has_mtp:
            print("the layers of multi-token prediction are left out, as in transformers")
        if export.family.is_tower:
            print("logits were not compared: a vision tower has none")
        if arguments.no_compare or export.family.is_tower:
            return
        compared = compare_logits(
            reader,
            target,
            vocab_size=export.vocab_size,
            dtype=dtype,
            auto_class=export.family.auto_class,
        )
    print(compared)


def megatrain_to_peft(arguments: argparse.Namespace) -> None:
    """Write the adapters of --lora-rank as a folder that peft reads."""
    target, disk = arguments.target, Disk()
    require_absent(target)
    with opened(arguments.source) as reader:
        files = peft_files(reader, arguments.base)
    num_bytes = sum(map(len, files.values()))
    with new_folder(target, num_bytes, disk) as temporary:
        for name, data in files.items():
            write_file(disk, temporary / name, data)
    print(f"{target}: {', '.join(files)}, {size_text(num_bytes)}")


def peft_to_megatrain(arguments: argparse.Namespace) -> None:
    """Write a folder of peft, with the model that it adapts, as a checkpoint of megatrain, to start from."""
    target = arguments.target
    reader = PeftCheckpoint(arguments.source, HfCheckpoint(arguments.base))
    write_checkpoint(reader, target, None)
    print(
        f"train the adapters on with --pretrained-checkpoint {target} --use-checkpoint-args {shlex.join(reader.flags)};"
        " megatrain generate and megatrain-to-hf merge them"
    )


def _newest(path: Path) -> Path:
    """Return the newest checkpoint of Megatron-LM in a folder, or the one at `path`.

    Raises:
        NoCheckpointError: there is none.
    """
    found = newest_of_megatron(path)
    if found is not None:
        return found
    raise NoCheckpointError(
        f"{path} has no checkpoint of Megatron-LM",
        fix="name its --save folder, or one of its iter_NNNNNNN folders",
    )
