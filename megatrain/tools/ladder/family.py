"""The runs of a ladder: smaller models of one shape, each trained on some tokens per parameter.

flags of the target ─> width, depth, heads and MLPs scaled ─> parameters ─> tokens, iterations, lengths of schedules ─> one YAML each

A run has schedules of its own length: the loss in the middle of a longer one is no point of the law. With --use-mup all runs have the
target's learning rate and muP's base width, so that rates and initial weights scale with the width.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import yaml

from megatrain.config import Config, Plan, Request, parse
from megatrain.config.errors import ConfigError
from megatrain.config.schema.tree import flag_of, settings
from megatrain.config.schema.values import AUTO, is_resolved
from megatrain.data.files import log_to_stderr
from megatrain.parallel.build_grid import build_grid
from megatrain.storage.files import replace_file
from megatrain.tools.subcommands import launcher_of
from megatrain.training.engine import Engine
from megatrain.training.launch.facts import gather_data_facts, plan_on_any_device
from megatrain.training.launch.ranks import grid_shape
from megatrain.training.planning.model_tree import model_tree

_MLPS: Final = (
    "model.ffn_hidden_size",
    "experts.moe_ffn_hidden_size",
    "experts.moe_shared_expert_intermediate_size",
)
_PHASES: Final = (
    "training.rampup_batch_size", "training.step_batch_size_schedule", "data.seq_length_schedule", "data.data_schedule",
    "data.phase_transition_iterations", "model.heterogeneous_layers_config_path", "model.hybrid_layer_pattern",
)  # fmt: skip
"""Settings of the target whose meaning depends on its size or length."""
_OF_THE_RUN: Final = {
    "training.train_samples", "training.train_iters", "training.eval_interval", "training.dry_run", "schedule.lr_decay_iters",
    "schedule.lr_decay_samples", "schedule.lr_warmup_iters", "schedule.lr_warmup_samples", "schedule.lr_warmup_fraction",
    "schedule.lr_wsd_decay_iters", "schedule.lr_wsd_decay_samples", "logging.metrics_file", "logging.tensorboard_dir",
    "logging.wandb_exp_name", "model.mup_width_mult",
}  # fmt: skip
"""Settings of the target that its runs do not take over, besides the sections checkpoint and parallel."""
_FEW_ITERATIONS: Final = 100


@dataclass(frozen=True)
class LadderSpec:
    """Options of `megatrain ladder write`. None: a default that depends on the target."""

    folder: Path
    widths: tuple[int, ...] | None
    tokens_per_parameter: tuple[float, ...]
    depth: str | None
    batch: int | None
    ranks: int


@dataclass(frozen=True)
class Rung:
    """One run of a ladder."""

    name: str
    parameters: int
    tokens: int
    iterations: int
    values: Mapping[str, Any]
    """Its settings, by path."""

    @property
    def yaml(self) -> str:
        """Its YAML file."""
        sections: dict[str, dict[str, Any]] = {}
        for path, value in self.values.items():
            section, name = path.split(".")
            sections.setdefault(section, {})[name] = list(value) if isinstance(value, tuple) else value
        head = f"# {self.parameters:,} parameters, {self.tokens:,} tokens\n"
        return head + yaml.safe_dump(sections, sort_keys=False)


@dataclass(frozen=True)
class Ladder:
    """The runs, and the target."""

    rungs: tuple[Rung, ...]
    parameters: int
    tokens: int
    has_mup: bool

    def notes(self) -> Iterator[str]:
        """Yield what may mislead a fit of these runs."""
        if not self.has_mup:
            yield (
                "without --use-mup all runs have the target's --lr, which suits one width: tune --lr in each YAML, or add"
                " --use-mup, --untie-embeddings-and-output-weights and the rate of a small model"
            )
        few = [rung for rung in self.rungs if rung.iterations < _FEW_ITERATIONS]
        if few:
            yield f"{few[0].name} has only {few[0].iterations} iterations: use a smaller --batch"


def plan_ladder(spec: LadderSpec, run_flags: Sequence[str]) -> Ladder:
    """Return the runs of a ladder below the model that these flags describe.

    Raises:
        ConfigError: a run could not start, or the target has settings that do not scale.
    """
    request = parse(run_flags)
    target = _plan(request, request.fewest_ranks())
    for path in _PHASES:
        if target.config.raw(path):
            raise ConfigError(
                f"{flag_of(path)} does not scale to smaller and shorter runs",
                fix=f"remove {flag_of(path)} for the ladder",
            )
    base = {path: value for path, value in _given(request) if path not in _OF_THE_RUN}
    base |= {} if spec.batch is None else {"training.global_batch_size": spec.batch}
    has_mup = target.config.model.use_mup
    widths = spec.widths or _default_widths(target.config)
    rungs = []
    for width in sorted(widths):
        depth = spec.depth or ("same" if has_mup else "scaled")
        shape = _shape(target.config, width, is_scaled=depth == "scaled")
        if has_mup and "model.mup_base_hidden_size" not in base:
            shape["model.mup_base_hidden_size"] = min(widths)
        name = f"w{width}-l{shape['model.num_layers']}"
        count = _parameters(_checked(base | shape | _lengths(target, 1), spec, name))
        rungs += [
            _rung(spec, target, base | shape, name, count, ratio) for ratio in spec.tokens_per_parameter
        ]
    tokens = target.derived.train_samples * target.config.data.seq_length
    return Ladder(tuple(rungs), _parameters(target), tokens, has_mup)


def write_ladder(ladder: Ladder, spec: LadderSpec) -> None:
    """Write a YAML file for each run, and the script that runs them."""
    spec.folder.mkdir(parents=True, exist_ok=True)
    for rung in ladder.rungs:
        replace_file(spec.folder / f"{rung.name}.yaml", [rung.yaml.encode()])
    replace_file(spec.folder / "run.sh", [script(ladder, spec).encode()])


def script(ladder: Ladder, spec: LadderSpec) -> str:
    """Return the shell script of the runs, which is also a Slurm array."""
    names = " ".join(rung.name for rung in ladder.rungs)
    launch = launcher_of(spec.ranks, most_of_node=spec.ranks)
    return f"""#!/usr/bin/env bash
# The runs of a scaling ladder; each continues where it stopped. From the folder of pretrain.py:
#   bash {shlex.quote(str(spec.folder / "run.sh"))} [NUMBER ...]     or, one job for each run:  sbatch {shlex.quote(str(spec.folder / "run.sh"))}
#SBATCH --job-name=ladder --nodes=1 --ntasks-per-node=1 --array=0-{len(ladder.rungs) - 1}
set -euo pipefail
runs=({names})
numbers=(${{SLURM_ARRAY_TASK_ID:-"$@"}})
if [ ${{#numbers[@]}} -eq 0 ]; then numbers=("${{!runs[@]}}"); fi
for number in "${{numbers[@]}}"; do
  {launch} pretrain.py --config {shlex.quote(str(spec.folder))}/"${{runs[number]}}".yaml
done
"""


def _plan(request: Request, world_size: int) -> Plan:
    return plan_on_any_device(request, gather_data_facts(request, world_size=world_size, log=log_to_stderr))


def _given(request: Request) -> Iterator[tuple[str, Any]]:
    """Yield the settings that flags and files of the target give, without its folders and its layout."""
    for setting in settings():
        value = request.config.raw(setting.path)
        is_given = request.origins[setting.path].is_given
        is_kept = setting.section not in ("checkpoint", "parallel") and (value is AUTO or is_resolved(value))
        if is_given and is_kept:
            yield setting.path, "auto" if value is AUTO else value


def _default_widths(config: Config) -> tuple[int, ...]:
    """Return four widths from an eighth to a half of the target's, in whole heads."""
    unit = config.model.hidden_size // config.model.num_attention_heads
    shares = (1 / 8, 1 / 5, 1 / 3, 1 / 2)
    return tuple(sorted({unit * max(1, round(config.model.hidden_size * share / unit)) for share in shares}))


def _shape(config: Config, width: int, *, is_scaled: bool) -> dict[str, Any]:
    """Return the settings of a model of this width, by path: the target's heads, fewer of them."""
    model = config.model
    unit, share = model.hidden_size // model.num_attention_heads, width / model.hidden_size
    heads = width // unit
    if width % unit or not heads:
        raise ConfigError(
            f"--widths {width}: heads of {unit} channels of --hidden-size do not fill it",
            fix=f"use multiples of {unit}, such as {max(1, round(width / unit)) * unit}",
        )
    groups = max(
        one
        for one in range(1, heads + 1)
        if heads % one == 0 and one <= max(1, model.num_query_groups * share)
    )
    layers = max(1, round(model.num_layers * share)) if is_scaled else model.num_layers
    found = {
        "model.hidden_size": width,
        "model.num_layers": layers,
        "model.num_attention_heads": heads,
        "model.kv_channels": model.kv_channels,
    }
    if model.group_query_attention:
        found["model.num_query_groups"] = groups
    for path in _MLPS:
        size = config.get(path)
        if size is not None and (path == _MLPS[0] or config.experts.num_experts):
            found[path] = max(8, 8 * round(size * share / 8))
    return found


def _checked(values: Mapping[str, Any], spec: LadderSpec, name: str) -> Plan:
    """Return the plan of a run; its problems name it."""
    file = spec.folder / f"{name}.yaml"
    spec.folder.mkdir(parents=True, exist_ok=True)
    replace_file(file, [Rung(name, 0, 0, 0, values).yaml.encode()])
    try:
        return _plan(parse(["--config", str(file)]), spec.ranks)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error.problems[0].text}", fix=error.problems[0].fix) from error
    finally:
        file.unlink()


def _parameters(plan: Plan) -> int:
    """Return the parameters of a model, without building it."""
    shape = grid_shape(plan)
    engines = [
        Engine(plan, build_grid(shape, rank), torch.device("meta")) for rank in shape.rank_lists("pp")[0]
    ]
    registries = [engine.model.registry for engine in engines]
    return model_tree(registries, engines[0].model.spec.routers_by_name, ep=shape.ep).parameters


def _rung(
    spec: LadderSpec, target: Plan, values: Mapping[str, Any], name: str, count: int, ratio: float
) -> Rung:
    """Return the run of a model on `ratio` tokens per parameter, in whole batches."""
    batch = spec.batch or target.config.training.global_batch_size
    batch_tokens = batch * target.config.data.seq_length
    iterations = max(1, math.ceil(ratio * count / batch_tokens))
    name = f"{name}-t{ratio:g}"
    folder = str(spec.folder / name)
    own = {"checkpoint.save": folder, "checkpoint.load": folder}
    found = {"training.global_batch_size": batch, **values, **_lengths(target, iterations), **own}
    _checked(found, spec, name)
    return Rung(name, count, iterations * batch_tokens, iterations, found)


def _lengths(target: Plan, iterations: int) -> dict[str, Any]:
    """Return the length of a run, with an evaluation at its end and the schedules of the target in proportion."""
    derived = target.derived
    found: dict[str, Any] = {"training.train_iters": iterations, "training.eval_interval": iterations}
    if derived.lr_warmup_samples:
        found["schedule.lr_warmup_fraction"] = float(
            f"{derived.lr_warmup_samples / derived.lr_decay_samples:.6g}"
        )
    if derived.lr_wsd_decay_samples is not None:
        share = derived.lr_wsd_decay_samples / derived.lr_decay_samples
        found["schedule.lr_wsd_decay_iters"] = max(1, round(share * iterations))
    return found
