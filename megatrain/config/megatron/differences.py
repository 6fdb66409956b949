"""Where megatrain differs from Megatron-LM: defaults, flags without a setting. Told at start, and made into a page.

DIFFERENT_DEFAULTS ──> a note in the plan of each run that has one of them
                  └──> docs/differences.md, with all that `megatron_table.py` says
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from megatrain.config.megatron.flags import MegatronFlag, aliases, megatron_flags
from megatrain.config.plan import Plan
from megatrain.config.schema.tree import flag_of, settings


@dataclass(frozen=True)
class DifferentDefault:
    """A default that is not Megatron-LM's."""

    path: str
    there: str
    """Megatron-LM's."""
    why: str
    only_with: str | None = None
    """The setting without which this one plays no role."""
    is_told: bool = True
    """Whether the plan names it; not where another note does."""
    is_of_replicas: bool = False
    """Whether it plays a role with data parallelism alone."""


DIFFERENT_DEFAULTS: Final = (
    DifferentDefault(
        "model.transformer_impl", "transformer_engine", "it runs everywhere, without another library"
    ),
    DifferentDefault(
        "model.num_query_groups",
        "1",
        "one for each query head, so that --group-query-attention alone changes nothing; 1 is multi-query attention",
        only_with="model.group_query_attention",
    ),
    DifferentDefault(
        "parallel.use_distributed_optimizer", "off", "it saves memory and changes no result (ZeRO-1)"
    ),
    DifferentDefault(
        "parallel.data_parallel_sharding_strategy",
        "optim_grads_params",
        "there without effect but with --use-megatron-fsdp, with which it is the same here",
        is_told=False,
    ),
    DifferentDefault(
        "parallel.overlap_grad_reduce",
        "off",
        "it hides communication and changes no bit of the result",
        is_of_replicas=True,
    ),
    DifferentDefault(
        "parallel.overlap_param_gather",
        "off",
        "it hides communication and changes no bit of the result",
        is_of_replicas=True,
    ),
    DifferentDefault(
        "parallel.distributed_backend",
        "nccl",
        "nccl on GPUs, gloo on CPUs, which nccl cannot use",
        is_told=False,
    ),
    DifferentDefault(
        "parallel.cp_comm_type",
        "p2p",
        "p2p; all_gather with windows or documents",
        is_told=False,
    ),
    DifferentDefault(
        "data.data_cache_path",
        "cache/GPTDataset_indices",
        "files of a format of its own, beside the first dataset in `index_cache`",
        only_with="data.data_path",
    ),
)


def default_differences(plan: Plan) -> Iterator[str]:
    """One note for all defaults of this run that are not Megatron-LM's; none where the user gave those values."""
    found = []
    for different in DIFFERENT_DEFAULTS:
        value = _shown(plan.config.get(different.path))
        is_given = plan.origins[different.path].kind in ("flag", "yaml")
        plays_a_role = different.only_with is None or bool(plan.config.get(different.only_with))
        plays_a_role &= not different.is_of_replicas or plan.derived.data_parallel_size > 1
        if different.is_told and plays_a_role and not is_given and value != different.there:
            found.append(f"{flag_of(different.path)} {value} (there: {different.there})")
    if found:
        yield f"defaults that are not Megatron-LM's: {', '.join(found)}; docs/differences.md says why"


def docs_differences() -> str:
    """The page of differences, in Markdown."""
    here = {setting.path: setting for setting in settings()}
    flags = megatron_flags().values()
    lines = [
        "# Differences from Megatron-LM's command line",
        "",
        "Made from `megatrain/config/` by `docs_differences()`: change it there. A flag means what it means in Megatron-LM",
        "(core 0.20.0); [configuration.md](configuration.md) has all that are settings, [data.md](data.md) and",
        "[architecture.md](architecture.md) what else differs.",
        "",
        "## Defaults",
        "",
        "All others are Megatron-LM's. The plan that is printed at start names those of this list that a run has.",
        "",
        "| flag | here | Megatron-LM | why |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| `{flag_of(item.path)}` | {_shown(here[item.path].default).lower()} | {item.there} | {item.why} |"
        for item in DIFFERENT_DEFAULTS
    ]
    lines += ["", "## Other names", "", "| flag | stands for |", "|---|---|"]
    lines += [
        f"| `{flag}` | `{' '.join(filter(None, (flag_of(alias.path), alias.value)))}` |"
        for flag, alias in aliases().items()
    ]
    lines += [
        "",
        "## Accepted without a setting",
        "",
        "On here anyway, or without meaning here. The plan has a note for each that is given; values other than those shown",
        "are refused.",
        "",
        "| flags | because |",
        "|---|---|",
    ]
    lines += _rows(flag for flag in flags if flag.answer.kind == "accepted")
    lines += [
        "",
        "## Refused",
        "",
        "Each is refused by name. A value that is shown is accepted: it asks for what is here.",
        "",
        "| flags | because | remedy |",
        "|---|---|---|",
    ]
    lines += _rows(flag for flag in flags if flag.answer.kind == "refused")
    return "\n".join(lines) + "\n"


def _rows(flags: Iterable[MegatronFlag]) -> list[str]:
    """A row for each answer."""
    by_answer: dict[str, list[MegatronFlag]] = {}
    for flag in flags:
        by_answer.setdefault(flag.answer.flags, []).append(flag)
    rows = []
    for group in by_answer.values():
        answer = group[0].answer
        cells = [", ".join(f"`{_with_values(flag)}`" for flag in group), answer.text]
        if answer.kind == "refused":
            cells.append(answer.instead)
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def _with_values(flag: MegatronFlag) -> str:
    if flag.takes == "nothing" or not flag.accepted:
        return flag.flag
    return f"{flag.flag} {'/'.join(value.replace(',', ' ') for value in flag.accepted)}"


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None else str(value)
