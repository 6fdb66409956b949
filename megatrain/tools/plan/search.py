"""The search for the best layouts of a run.

    all layouts ─> estimates of time and memory ─> those that may fit, the fastest first
                ─> rules of a real start, memory as --dry-run plans it, simulated pipeline ─> `Found`

Each combination of tensor, context, pipeline and expert parallelism appears once, with its fastest schedule,
micro-batch, sharding and recomputation that fit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatrain.config import ConfigError, Facts, Plan, Request, parse, resolve
from megatrain.config.environment import read_environment
from megatrain.config.schema.values import REQUIRED
from megatrain.tools.plan.hardware import Cluster
from megatrain.tools.plan.layouts import AXES, Layout, Workload, layouts
from megatrain.tools.plan.memory import estimated_bytes, planned_bytes
from megatrain.tools.plan.step_time import StepTime, step_time
from megatrain.training.launch.facts import gather_facts

_ESTIMATE_MARGIN = 1.1
"""Estimates of memory above this fraction of the limit are not planned exactly."""
_MAX_PLANNED = 60
"""Layouts whose memory is planned exactly at most."""
_IF_MISSING = {"training.micro_batch_size": "--micro-batch-size 1", "optimizer.lr": "--lr 1e-4"}
"""Settings that a plan needs no value of."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """A layout with its predicted cost."""

    layout: Layout
    time: StepTime
    memory_bytes: int
    flags: str
    mfu: float


@dataclass(frozen=True)
class Run:
    """The run to plan, on a cluster."""

    words: Sequence[str]
    """The flags of pretrain.py."""
    request: Request
    facts: Facts
    cluster: Cluster
    added: frozenset[str] = frozenset()
    """Settings that the flags lack, and that got a value in `words`."""
    keeps_layout: bool = True
    """False: layouts of other values than those of the flags are searched too (`--search`)."""

    @classmethod
    def of(cls, words: Sequence[str], cluster: Cluster) -> Run:
        """Read the flags of a run and gather its facts, as a dry run does."""
        request = parse(words, program="megatrain plan")
        missing = [path for path in _IF_MISSING if request.config.raw(path) is REQUIRED]
        words = [*words, *(word for path in missing for word in _IF_MISSING[path].split())]
        request = parse(words, program="megatrain plan")
        environment = dataclasses.replace(read_environment(), world_size=cluster.num_gpus)
        facts = dataclasses.replace(
            gather_facts(request, environment),
            device="cuda",
            device_name=f"NVIDIA {cluster.gpu.name}",
            device_capability=cluster.gpu.capability,
            devices_per_node=None,
            ranks_per_node=None,
            has_triton=True,
        )
        return cls(words, request, facts, cluster, frozenset(missing))

    def plan(self, layout: Layout | None = None) -> Plan:
        """Resolve the run, with the settings of a layout if one is given; raise ConfigError if it would not start."""
        if layout is None:
            return resolve(self.request, self.facts)
        words = [*self.words, *layout.flags(self.request)]
        return resolve(parse(words, program="megatrain plan"), self.facts)

    def workload(self) -> Workload:
        """Return the model and the batch. The layout of the flags need not be possible on these GPUs."""
        if self.request.known("training.global_batch_size") is None:
            if self.request.problems:
                raise ConfigError.of(self.request.problems)
            raise ConfigError(
                "--global-batch-size is not set: the best layout depends on it",
                fix="give --global-batch-size the samples of an iteration",
            )
        # One GPU as a stand-in: nothing that a layout changes is read from this plan.
        words = [*self.words, *Layout().flags(self.request)]
        one = dataclasses.replace(self.facts, world_size=1)
        return Workload(resolve(parse(words, program="megatrain plan"), one))

    def kept(self) -> Mapping[str, object]:
        """Return the axes that flags of the command line give, with their values."""
        return {
            axis: self.request.known(path)
            for axis, path in AXES.items()
            if self.keeps_layout and self.request.origins[path].kind == "flag" and path not in self.added
        }


def best_layouts(run: Run, workload: Workload, limit_bytes: float, num_wanted: int) -> list[Found]:
    """Return the fastest layouts that fit, the fastest first."""
    cluster, kept = run.cluster, run.kept()
    ratios: dict[tuple[object, ...], float] = {}
    """Planned to estimated memory, of the last layout of a family: its schedule, recomputation and sharding."""
    found: dict[tuple[int, ...], Found] = {}
    num_planned = 0
    for layout in _fastest_first(workload, cluster, kept, limit_bytes * _ESTIMATE_MARGIN):
        key = (layout.tp, layout.cp, layout.pp, layout.ep)
        estimate = estimated_bytes(workload, layout)
        family = (layout.schedule, layout.recompute, layout.modules, layout.sharding)
        if key in found or estimate * ratios.get(family, 0.0) > limit_bytes:
            continue
        if len(found) == num_wanted or num_planned == _MAX_PLANNED:
            break
        try:
            plan = run.plan(layout)
        except ConfigError:
            continue  # a rule forbids this combination
        num_planned += 1
        memory = planned_bytes(workload, layout, plan, limit_bytes)
        ratios[family] = memory / estimate
        if memory <= limit_bytes:
            found[key] = evaluate(run, workload, layout, memory)
    return sorted(found.values(), key=lambda one: one.time.total)


def _fastest_first(
    workload: Workload, cluster: Cluster, kept: Mapping[str, object], limit_bytes: float
) -> list[Layout]:
    """Return the layouts with the values of `kept` that may fit, the fastest first by formula."""
    times: dict[Layout, float] = {}
    given = kept.get("micro_batch")
    sizes = {"micro_batches": (given,)} if isinstance(given, int) else {}
    for layout in layouts(workload, cluster.num_gpus, cluster.gpus_per_node, **sizes):
        is_kept = all(getattr(layout, axis) == value for axis, value in kept.items())
        if is_kept and estimated_bytes(workload, layout) <= limit_bytes:
            times[layout] = step_time(workload, layout, cluster, is_simulated=False).total
    return sorted(times, key=times.__getitem__)


def evaluate(run: Run, workload: Workload, layout: Layout, memory_bytes: int) -> Found:
    """Return a layout with its simulated time."""
    time = step_time(workload, layout, run.cluster, is_simulated=True)
    peak = run.cluster.num_gpus * run.cluster.gpu.peak
    return Found(
        layout=layout,
        time=time,
        memory_bytes=memory_bytes,
        flags=" ".join(layout.flags(run.request)),
        mfu=workload.flops / (time.total * peak),
    )
