"""Shrink a command line of Megatron-LM to a model of two layers (four with virtual stages) on two ranks; all other flags stay.

A hybrid keeps a layer of each kind, and the stages and heads of its pattern.

    python scripts/shrink_command_line.py gpt/gpt3_mcore_te_tp2_pp2_cp2_1node     a recorded case (tests/golden/command-lines)
    python scripts/shrink_command_line.py --num-layers 12 --hidden-size 512 ...   any flags

Sizes become smaller: layers, widths, experts, vocabulary, sequence, batches, iterations, schedules. One axis of the grid keeps
two ranks, the rarest one that is used: context, expert, pipeline, tensor.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Final

NUM_RANKS: Final = 2
NUM_ITERATIONS: Final = 5
_BATCH: Final = 8
_LIMITS: Final = {
    # the model
    "--num-layers": 2,
    "--encoder-num-layers": 2,
    "--decoder-num-layers": 2,
    "--hidden-size": 64,
    "--ffn-hidden-size": 128,
    "--num-attention-heads": 8,
    "--kv-channels": 8,
    "--vocab-size": 256,
    "--make-vocab-size-divisible-by": 128,
    "--seq-length": 64,
    "--encoder-seq-length": 64,
    "--decoder-seq-length": 32,
    "--dataloader-seq-length": 60,  # and an image of 4 patches
    "--img-h": 28,
    "--img-w": 28,
    "--max-position-embeddings": 64,
    "--q-lora-rank": 32,
    "--kv-lora-rank": 16,
    "--qk-head-dim": 8,
    "--qk-pos-emb-head-dim": 8,
    "--v-head-dim": 8,
    "--mamba-num-heads": 8,
    "--linear-key-head-dim": 8,
    "--linear-value-head-dim": 8,
    # experts
    "--num-experts": 8,
    "--moe-ffn-hidden-size": 32,
    "--moe-shared-expert-intermediate-size": 32,
    "--moe-latent-size": 32,
    "--moe-router-topk": 4,
    "--moe-router-num-groups": 4,
    "--moe-router-group-topk": 2,
    # length and batches
    "--micro-batch-size": 2,
    "--global-batch-size": _BATCH,
    "--train-iters": NUM_ITERATIONS,
    "--train-samples": NUM_ITERATIONS * _BATCH,
    "--lr-decay-iters": 2 * NUM_ITERATIONS,
    "--lr-decay-samples": 2 * NUM_ITERATIONS * _BATCH,
    "--lr-warmup-iters": 1,
    "--lr-warmup-samples": _BATCH,
    "--lr-wsd-decay-iters": NUM_ITERATIONS,
    "--lr-wsd-decay-samples": NUM_ITERATIONS * _BATCH,
    "--eval-iters": 1,
    # stages
    "--decoder-first-pipeline-num-layers": 1,
    "--decoder-last-pipeline-num-layers": 1,
    "--num-layers-per-virtual-pipeline-stage": 1,
    "--num-virtual-stages-per-pipeline-rank": 2,
    "--microbatch-group-size-per-virtual-pipeline-stage": 2,
}
"""Largest value of each size."""
_AXES: Final = (
    "--context-parallel-size",
    "--expert-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--tensor-model-parallel-size",
)
_ONLY_WITH_STAGES: Final = (
    "--decoder-first-pipeline-num-layers",
    "--decoder-last-pipeline-num-layers",
    "--num-layers-per-virtual-pipeline-stage",
    "--num-virtual-stages-per-pipeline-rank",
    "--microbatch-group-size-per-virtual-pipeline-stage",
    "--pipeline-model-parallel-layout",
)
_VIRTUAL_STAGES: Final = (
    "--num-layers-per-virtual-pipeline-stage",
    "--num-virtual-stages-per-pipeline-rank",
)
_COUNTED_AS_LAYERS: Final = (
    "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split",
)

_PATTERNS: Final = ("--hybrid-layer-pattern", "--hybrid-override-pattern")
_MAMBA_SIZES: Final = {"--mamba-head-dim": "8", "--mamba-num-groups": "2", "--mamba-state-dim": "16"}
"""Sizes that every hybrid gets: defaults are larger than the hidden size."""

Flags = dict[str, tuple[str, ...]]
"""Values of each flag, in the order of the command line; of a repeated flag the last ones."""


def shrink(words: Sequence[str]) -> list[str]:
    """Return the words of a command line for `NUM_RANKS` ranks and `NUM_ITERATIONS` iterations."""
    flags = _split(words)
    grid = _grid(flags)
    changes = {name: str(min(int(flags[name][0]), limit)) for name, limit in _LIMITS.items() if name in flags}
    changes |= {name: str(size) for name, size in grid.items() if name in flags}
    has_stages = grid["--pipeline-model-parallel-size"] > 1
    if has_stages:
        changes["--num-layers"] = str(_num_layers(flags))
    changes |= _query_groups(flags, changes) | _layers(flags) | _step_batch_sizes(flags) | _loss_scale(flags)
    changes |= _hybrid(flags, has_stages=has_stages)
    shrunk = flags | {name: tuple(value.split()) for name, value in changes.items()}
    return [
        word
        for name, values in shrunk.items()
        if has_stages or name not in _ONLY_WITH_STAGES
        for word in (name, *values)
    ]


def _split(words: Sequence[str]) -> Flags:
    flags: Flags = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, *value = word.split("=", 1)
            flags[name] = tuple(value)
        else:
            flags[name] += (word,)
    return flags


def _grid(flags: Flags) -> dict[str, int]:
    """Return the sizes of the grid: two ranks on the first axis that has several."""
    sizes = {name: int(flags.get(name, ("1",))[0]) for name in _AXES}
    kept = next((name for name in _AXES if sizes[name] > 1), None)
    grid = {name: NUM_RANKS if name == kept else 1 for name in _AXES}
    grid["--expert-tensor-parallel-size"] = grid["--tensor-model-parallel-size"]
    # Two replicas are left only without an axis of several ranks.
    grid["--num-distributed-optimizer-instances"] = NUM_RANKS if kept is None else 1
    return {name: min(size, int(flags[name][0])) if name in flags else size for name, size in grid.items()}


def _num_layers(flags: Flags) -> int:
    """Return the smallest number of layers, two at least, that pipeline stages and their model chunks divide."""
    chunks = NUM_RANKS * (2 if any(name in flags for name in _VIRTUAL_STAGES) else 1)
    counted = sum(name in flags for name in _COUNTED_AS_LAYERS)
    return next(layers for layers in range(2, 2 + chunks) if (layers + counted) % chunks == 0)


def _query_groups(flags: Flags, changes: Mapping[str, str]) -> dict[str, str]:
    """Keep the number of heads of a query group, with at least two groups."""
    if "--num-query-groups" not in flags:
        return {}
    heads, groups = int(flags["--num-attention-heads"][0]), int(flags["--num-query-groups"][0])
    return {"--num-query-groups": str(max(2, int(changes["--num-attention-heads"]) * groups // heads))}


def _layers(flags: Flags) -> dict[str, str]:
    """Return the patterns of layers and stages for two layers on two stages."""
    changes = {}
    if "[" in flags.get("--moe-layer-freq", ("",))[0]:
        changes["--moe-layer-freq"] = "([0]*1+[1]*1)"
    if "--pipeline-model-parallel-layout" in flags:
        has_mtp = "m" in flags["--pipeline-model-parallel-layout"][0]
        changes["--pipeline-model-parallel-layout"] = f"Et|t{'m' if has_mtp else ''}L"
    return changes


def _hybrid(flags: Flags, *, has_stages: bool) -> dict[str, str]:
    """Return a pattern with each letter of the hybrid's once, or a letter for each stage, and small sizes of Mamba-2."""
    name = next((name for name in _PATTERNS if name in flags), None)
    if name is None:
        return {}
    main, *heads = flags[name][0].split("/")
    letters = "".join(dict.fromkeys(main.replace("|", "")))
    num_stages = main.count("|") + 1 if has_stages else 1
    stages = (letters[stage::num_stages] or letters[stage % len(letters)] for stage in range(num_stages))
    heads = ["".join(dict.fromkeys(head)) for head in heads]
    return {name: "/".join(["|".join(stages), *heads])} | _MAMBA_SIZES


def _step_batch_sizes(flags: Flags) -> dict[str, str]:
    """Shrink the batches of a schedule by tokens; its steps are after the end."""
    name = "--step-batch-size-schedule"
    steps = [step.split(":") for step in flags.get(name, ())]
    return {name: " ".join(f"{start}:{min(int(batch), _BATCH)}" for start, batch in steps)} if steps else {}


def _loss_scale(flags: Flags) -> dict[str, str]:
    """Start fp16 with a loss scale that it would otherwise take more iterations to find."""
    return {"--initial-loss-scale": "4096"} if "--fp16" in flags else {}


def main(words: Sequence[str]) -> None:
    """Print the command."""
    if words and not words[0].startswith("--"):
        from command_lines import recorded_command_lines

        words = next(line.flags for line in recorded_command_lines() if line.case == words[0])
    print(f"torchrun --nproc-per-node {NUM_RANKS} pretrain.py {shlex.join(shrink(words))}")


if __name__ == "__main__":
    main(sys.argv[1:])
