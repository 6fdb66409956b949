"""The parts of a launch script around its training command: exported variables, Slurm's options, other commands."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from megatrain.tools.port.evaluate import Command, Evaluation
from megatrain.tools.port.launch import gpus_of_node
from megatrain.tools.port.words import Part, Word, plain, printable, quoted, without_quotes, without_start

NODE_GPUS: Final = 8
"""GPUs of a node unless a script names their number."""


@dataclass(frozen=True)
class _Exported:
    """Variables of one kind: whether the run here needs them, and why."""

    names: str
    is_kept: bool
    reason: str


_EXPORTED: Final = (
    _Exported(r"(TORCH_)?NCCL_\w+|UCX_\w+|FI_\w+|GLOO_\w+|OMPI_\w+", True, "the cluster's network"),
    _Exported(r"PWD", True, "relative paths start there"),
    _Exported(r"NVTE_\w+", True, "Transformer Engine reads it"),
    _Exported(r"CUDA_DEVICE_MAX_CONNECTIONS", False, "nothing here depends on the number of a GPU's work queues"),
    _Exported(r"PYTHONPATH|MEGATRON_\w+|TRITON_CACHE_MANAGER", False, "Megatron-LM's modules are not imported"),
    _Exported(r"(PYTORCH|TORCH|CUDA|CUBLAS|TRITON)\w*|OMP_NUM_THREADS", True, "PyTorch and CUDA read it"),
    _Exported(r"(WANDB|MLFLOW|COMET|HF|TRANSFORMERS|TOKENIZERS|TIKTOKEN|HTTPS?|NO)_\w+|https?_proxy", True, "libraries read it"),
    _Exported(r"MASTER_\w+|WORLD_SIZE|(NODE_|LOCAL_|GROUP_)?RANK|SLURM_\w+", True, "launchers read it"),
    _Exported(r"(LD_\w+|PATH|\w+_(HOME|PATH|ROOT|PREFIX)|CONDA\w*|VIRTUAL_ENV)", True, "if megatrain runs in this environment"),
)  # fmt: skip
_TEMPLATE: Final = {
    "--ntasks-per-node": "ranks or torchruns of a node",
    "--ntasks": "ranks or torchruns of a node",
    "--signal": "the time limit",
    "--requeue": "the time limit",
    "--open-mode": "the time limit",
}
"""Options that scripts/slurm sets itself, and their purpose."""
_ENVIRONMENT: Final = frozenset({"module", "ulimit", "umask", "ml", "conda", "spack"})
_MOST_LINES: Final = 20
_CONTAINER: Final = {"--container-image": "CONTAINER_IMAGE", "--container-mounts": "CONTAINER_MOUNTS"}
"""Options of srun, and the variables that scripts/slurm reads for them."""


def inner_exports(launch: Command) -> str:
    """Return the exports of the wrapper's own text, before its command."""
    exports = launch.inner_exports.items()
    return "".join(f"{_set(name, value)}; " for name, value in exports if _known(name).is_kept)


def _set(name: str, value: Word) -> str:
    return f"cd {quoted(value)}" if name == "PWD" else f"export {name}={quoted(value)}"


def _known(name: str) -> _Exported:
    known = (one for one in _EXPORTED if re.fullmatch(one.names, name))
    return next(known, _Exported("", True, "a program may read it"))


def exported(launch: Command) -> tuple[list[str], list[str], list[str]]:
    """Return `export` and `cd` commands to keep, a line on each kept variable, and a line on each that is not needed."""
    commands, kept, left_out = [], [], []
    for name, value in (*launch.exports.items(), *launch.inner_exports.items()):
        text, known = _set(name, value), _known(name)
        if not known.is_kept:
            left_out.append(f"{text}: not needed: {known.reason}")
            continue
        kept.append(f"{text if name == 'PWD' else f'export {name}'}: {known.reason}")
        if launch.exports.get(name) is value:
            commands.append(text)
    return commands, kept, left_out


def other_commands(found: Evaluation, used: str) -> tuple[list[str], list[str]]:
    """Return lines on commands that set up the environment, and on all others, which are left out.

    Args:
        used: the shell text of the printed command, which may have commands in `$(...)`.
    """
    environment, others = [], []
    for command in found.commands:
        if command.program_at is not None or without_quotes(command.text) in used:
            continue
        text = f"{command.place}: {command.text}"
        name = plain(command.words[0])
        if name.startswith("-"):
            continue
        if name in _ENVIRONMENT:
            environment.append(f"{text}: of the environment: run it before the command")
        else:
            others.append(f"{text}: not part of training")
    others = list(dict.fromkeys(others))
    if len(others) > _MOST_LINES:
        others[_MOST_LINES:] = [f"and {len(others) - _MOST_LINES} more commands"]
    return list(dict.fromkeys(environment)), others


def slurm_line(launch: Command, slurm: Mapping[str, str], size: int, *, is_known: bool) -> Iterator[str]:
    """Yield the `sbatch` command of scripts/slurm for a launch, and a line on each option that it leaves out.

    Args:
        size: ranks; `is_known` is false if nothing names their number.
    """
    words = [plain(word) for word in (*launch.wrapper, *launch.launcher)]
    is_torchrun = any("torchrun" in word or "torch.distributed" in word for word in words)
    per_node = gpus_of_node(launch, slurm) or _gpus(slurm) or min(size, NODE_GPUS)
    nodes = -(-size // per_node)
    if not is_known and slurm.get("--nodes", "").isdigit():
        nodes = int(slurm["--nodes"])
    script = ("one_node.sh" if nodes == 1 else "torchrun.sh") if is_torchrun or nodes == 1 else "srun.sh"
    options = {"--nodes": str(nodes), "--gpus-per-node": str(per_node)}
    if script == "srun.sh":
        options["--ntasks-per-node"] = str(per_node)
    kept = {
        name: value for name, value in slurm.items() if name not in {*_TEMPLATE, *options, "--gres", "--gpus"}
    }
    line = " ".join([*_container(launch), "sbatch", *map(_option, (options | kept).items())])
    yield printable(f"{line} scripts/slurm/{script} FLAGS, with the flags after pretrain.py")
    for one in slurm.items():
        if one[0] in _TEMPLATE:
            yield printable(
                f"#SBATCH {_option(one)}: scripts/slurm/{script} sets what it needs for {_TEMPLATE[one[0]]}"
            )


def _option(option: tuple[str, str]) -> str:
    return "=".join(filter(None, option))


def _container(launch: Command) -> Iterator[str]:
    """Yield the variables of scripts/slurm for the container of `srun`."""
    words = (*launch.wrapper, *launch.launcher)
    for word, following in zip(words, (*words[1:], (Part(""),)), strict=True):
        name, sign, _ = plain(word).partition("=")
        if name in _CONTAINER:
            value = without_start(word, len(name) + 1) if sign else following
            yield f"{_CONTAINER[name]}={quoted(value)}"


def _gpus(slurm: Mapping[str, str]) -> int | None:
    number = (slurm.get("--gpus-per-node") or slurm.get("--gres", "")).rpartition(":")[2]
    tasks = slurm.get("--ntasks-per-node", "")
    return next((int(text) for text in (number, tasks) if text.isdigit() and int(text) > 1), None)
