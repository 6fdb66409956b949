"""The training command of a launch script: launcher, program, flags, and the number of ranks."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from megatrain.tools.port.evaluate import Command, Evaluation, script_text
from megatrain.tools.port.words import Word, plain

FAMILIES: Final = {
    "pretrain_gpt.py": "gpt",
    "pretrain_bert.py": "bert",
    "pretrain_t5.py": "t5",
    "pretrain_vlm.py": "vlm",
    "pretrain_hybrid.py": "hybrid",
    "pretrain_mamba.py": "hybrid",
}
"""`--model-family` of Megatron-LM's programs; `scripts/megatron` has programs of these names."""
_NOT_LAUNCHERS: Final = frozenset(
    {"cat", "cp", "ls", "grep", "sed", "wc", "chmod", "rm", "mv", "head", "tail"}
)
_SBATCH: Final = re.compile(r"^#SBATCH[ \t]+([^#\n]*)", re.MULTILINE)
_NAMES: Final = {"-N": "--nodes", "-n": "--ntasks", "-J": "--job-name", "-p": "--partition", "-A": "--account",
                 "-t": "--time", "-o": "--output", "-e": "--error", "-c": "--cpus-per-task", "-G": "--gpus"}  # fmt: skip


def find_launch(found: Evaluation) -> tuple[Command | None, list[str]]:
    """Return the first command that runs a `pretrain*.py`, and a line for each other one."""
    first: Command | None = None
    others = []
    for command in found.commands:
        if command.program_at is None or plain(command.words[0]) in _NOT_LAUNCHERS:
            continue
        if first is None:
            first = command
        elif (command.launcher, command.arguments) != (first.launcher, first.arguments):
            others.append(f"{command.place}: another training command: left out")
    return first, list(dict.fromkeys(others))


def slurm_options(text: str) -> dict[str, str]:
    """Return the options of the #SBATCH lines of a script, under their long names."""
    return _options(word for line in _SBATCH.findall(text) for word in line.split())


def batch_options(launch: Command, file: str) -> dict[str, str]:
    """Return the options of a job: those of the script, of the script that it submits, and of `sbatch`."""
    inner = script_text(launch.place.rpartition(":")[0], Path(file).parent) if launch.batch else None
    text = script_text(file) or ""
    return slurm_options(text) | slurm_options(inner or "") | _options(map(plain, launch.batch[1:]))


def _options(words: Iterable[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    last = ""
    for word in words:
        if word.startswith("-"):
            name, _, value = word.partition("=")
            if not name.startswith("--") and len(name) > 2:
                name, value = name[:2], name[2:]
            last = _NAMES.get(name, name)
            found[last] = value
        elif last:
            found[last] = word
    return found


def slurm_numbers(options: Mapping[str, str]) -> dict[str, int]:
    """Return the numbers that Slurm's variables have under some options."""
    gpus = options.get("--gpus-per-node") or options.get("--gres", "")
    numbers = {
        "SLURM_NNODES": _whole(options.get("--nodes")),
        "SLURM_JOB_NUM_NODES": _whole(options.get("--nodes")),
        "SLURM_NTASKS_PER_NODE": _whole(options.get("--ntasks-per-node")),
        "SLURM_GPUS_ON_NODE": _whole(gpus.rpartition(":")[2]),
        "SLURM_GPUS_PER_NODE": _whole(gpus.rpartition(":")[2]),
        "SLURM_NTASKS": _whole(options.get("--ntasks"))
        or _product(_whole(options.get("--nodes")), _whole(options.get("--ntasks-per-node"))),
    }
    return {name: number for name, number in numbers.items() if number is not None}


def world_size(launch: Command, slurm: Mapping[str, str]) -> int | None:
    """Return the number of ranks that the launcher and the #SBATCH lines of a script name; None: it is open."""
    given, words = _options_and_words(launch, slurm)
    nodes = nodes_of_job(launch, slurm)
    per_node = gpus_of_node(launch, slurm)
    if per_node is not None or _option(words, "--nproc-per-node") is not None:
        num_nodes = _option(words, "--nnodes")
        return _product(per_node, 1 if num_nodes is None else _whole(num_nodes.partition(":")[0]) or nodes)
    tasks = _whole(_option([*given, *words], "--ntasks", "-n", "-np"))
    if tasks is not None:
        return tasks
    tasks_per_node = _whole(_option([*given, *words], "--ntasks-per-node", "--tasks-per-node"))
    is_python = Path(words[0] if words else "python").name.startswith("python")
    if tasks_per_node is None and nodes is None and is_python:
        return 1
    return _product(tasks_per_node, nodes)


def unused_nodes(launch: Command, slurm: Mapping[str, str], size: int) -> Iterator[str]:
    """Yield that a job has more nodes than torchrun needs for its ranks."""
    per_node, nodes = gpus_of_node(launch, slurm), nodes_of_job(launch, slurm)
    if per_node and nodes and nodes * per_node > size:
        yield (
            f"the job has {nodes} nodes (--nodes), and torchrun starts the {size} ranks of {-(-size // per_node)} (--nnodes): the"
            f" others are idle, or each trains a run of its own; --world-size {nodes * per_node} ports it for all, and"
            " scripts/slurm/torchrun.sh starts them"
        )


def gpus_of_node(launch: Command, slurm: Mapping[str, str]) -> int | None:
    """Return the ranks that torchrun starts on a node; None: it is open, or torchrun is not the launcher."""
    words = list(_known_words(launch.launcher, slurm_numbers(slurm)))
    return _whole(_option(words, "--nproc-per-node"))


def nodes_of_job(launch: Command, slurm: Mapping[str, str]) -> int | None:
    """Return the nodes that srun or the job's options name; None: they are open."""
    given, words = _options_and_words(launch, slurm)
    return _whole(_option([*given, *words], "--nodes", "-N"))


def _options_and_words(launch: Command, slurm: Mapping[str, str]) -> tuple[list[str], list[str]]:
    words = _known_words((*launch.wrapper, *launch.launcher), slurm_numbers(slurm))
    return [f"{name}={value}" for name, value in slurm.items()], list(words)


def _known_words(words: Sequence[Word], numbers: Mapping[str, int]) -> Iterator[str]:
    """Yield words in which open variables have the numbers that are known."""
    for word in words:
        name = re.fullmatch(r"(.*?)\\?\$\{(\w+)(?::?-[^}]*)?\}", plain(word))
        number = numbers.get(name[2]) if name else None
        yield plain(word) if name is None or number is None else f"{name[1]}{number}"


def _option(words: Sequence[str], *names: str) -> str | None:
    """Return the last value of an option, given as `--name value`, `--name=value` or with `_` for `-`."""
    value = None
    for number, word in enumerate(words):
        name, sign, text = word.partition("=")
        if name.replace("_", "-") in names:
            value = text if sign else next(iter(words[number + 1 :]), None)
    return value


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else None


def _product(first: int | None, second: int | None) -> int | None:
    return None if first is None or second is None else first * second
