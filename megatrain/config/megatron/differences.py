"""Differences from Megatron-LM: other defaults, and flags that are not settings.

DIFFERENT_DEFAULTS ──> a note in the plan of every run that uses one
                  └──> `megatrain settings --differences`, with the answers of `flag_table.py`
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from megatrain.config.megatron.flags import MegatronFlag, aliases, megatron_flags
from megatrain.config.plan import Plan
from megatrain.config.plan_note import PlanNote
from megatrain.config.schema.tree import flag_of, in_words, settings_by_path

_LEAST_SHIFT: Final = 5e-4
"""Change of the first loss by padding that the plan names: it prints losses with four digits."""


@dataclass(frozen=True)
class DifferentDefault:
    """A default that differs from Megatron-LM's."""

    path: str
    megatron_default: str
    reason: str
    requires: str | None = None
    """The setting that must be given for this one to have an effect."""
    is_noted: bool = True
    """True: the plan has a note about it."""
    requires_replicas: bool = False
    """True: it has an effect only with data parallelism."""


DIFFERENT_DEFAULTS: Final = (
    DifferentDefault(
        "model.transformer_impl", "transformer_engine", "it runs on every device without another library"
    ),
    DifferentDefault(
        "resilience.inprocess_active_world_size",
        "1",
        "in Megatron-LM it is the variable WORLD_SIZE: all processes, too",
        is_noted=False,
    ),
    DifferentDefault(
        "resilience.inprocess_soft_timeout",
        "60",
        "the progress of whole steps is watched, not of Python's instructions",
        requires="resilience.inprocess_restart",
    ),
    DifferentDefault(
        "parallel.use_distributed_optimizer", "off", "it saves memory without changing results (ZeRO-1)"
    ),
    DifferentDefault(
        "parallel.data_parallel_sharding_strategy",
        "optim_grads_params",
        "in Megatron-LM it requires --use-megatron-fsdp, with which the defaults are equal",
        is_noted=False,
    ),
    DifferentDefault(
        "training.mlp_chunks_for_training",
        "1",
        "chunks of recomputed MLPs save memory without changing results",
        is_noted=False,
    ),
    DifferentDefault(
        "data.fim_eod_token", "<|endoftext|>", "documents end with the tokenizer's own token", is_noted=False
    ),
    DifferentDefault(
        "parallel.overlap_grad_reduce",
        "off",
        "it hides communication; results are bitwise equal",
        requires_replicas=True,
    ),
    DifferentDefault(
        "parallel.overlap_param_gather",
        "off",
        "it hides communication; results are bitwise equal",
        requires_replicas=True,
    ),
    DifferentDefault(
        "parallel.distributed_backend",
        "nccl",
        "nccl on GPUs; gloo on CPUs, which nccl does not support",
        is_noted=False,
    ),
    DifferentDefault(
        "parallel.cp_comm_type",
        "p2p",
        "all_gather with sliding windows or document masks; a2a where heads divide over ranks of one host; else p2p",
        is_noted=False,
    ),
    DifferentDefault(
        "parallel.sequence_parallel",
        "off",
        "on where tensor ranks overlap communication: the same result with less memory",
        is_noted=False,
    ),
    DifferentDefault(
        "parallel.tp_comm_overlap",
        "off",
        "it hides communication; sums of more than two ranks are rounded in another order than NCCL's",
    ),
    DifferentDefault(
        "training.cuda_graph_impl",
        "none",
        "graphs where they make steps faster, which is tried",
        is_noted=False,
    ),
    DifferentDefault(
        "data.data_cache_path",
        "cache/GPTDataset_indices",
        "`index_cache` next to the first dataset; the files have a different format",
        requires="data.data_path",
    ),
    DifferentDefault(
        "resilience.rerun_mode",
        "validate_results",
        "a step that is not finite ends the run with its source and exit code 1, without another start on other devices",
        is_noted=False,
    ),
)


def default_differences(plan: Plan) -> Iterator[PlanNote]:
    """Yield notes about the defaults of this run that differ from Megatron-LM's and that the user did not set, and about padding."""
    found = []
    for different in DIFFERENT_DEFAULTS:
        value = in_words(plan.config.get(different.path))
        is_given = plan.origins[different.path].is_given_or_stored
        has_effect = different.requires is None or bool(plan.config.get(different.requires))
        has_effect &= not different.requires_replicas or plan.derived.data_parallel_size > 1
        if different.is_noted and has_effect and not is_given and value != different.megatron_default:
            found.append(f"{flag_of(different.path)} {value} (Megatron-LM: {different.megatron_default})")
    if found:
        text = f"defaults that differ from Megatron-LM: {', '.join(found)}; megatrain settings --differences has the reasons"
        yield PlanNote(text, "nothing")
    tokens, rows = plan.derived.vocab_size, plan.config.model.padded_vocab_size
    shift = math.log(rows / tokens)
    if shift >= _LEAST_SHIFT:
        text = (
            f"the softmax is over the {tokens} tokens: Megatron-LM counts the rows of padding, {rows - tokens}, too, so that its first loss"
            f" is {shift:.3f} higher (--vocab-size {rows} counts them)"
        )
        yield PlanNote(text, "result")


def docs_differences() -> str:
    """Return the differences in Markdown: `megatrain settings --differences`, and a page of the site."""
    by_path = settings_by_path()
    flags = megatron_flags().values()
    lines = [
        "# Differences from Megatron-LM's command line",
        "",
        "`megatrain settings --differences` prints this page, `megatrain settings` all settings. A flag has the same meaning as",
        "in Megatron-LM (core 0.20.0). [data.md](data.md) and [architecture.md](architecture.md) describe other differences.",
        "The learning rate in a line of the log is the one that this iteration used; Megatron-LM prints the one of the next.",
        "",
        "## Defaults",
        "",
        "All other defaults are equal. The plan printed at start names those of this list that affect the run.",
        "",
        "| flag | megatrain | Megatron-LM | reason |",
        "|---|---|---|---|",
    ]
    for item in DIFFERENT_DEFAULTS:
        ours = by_path[item.path].default_in_words
        lines.append(f"| `{flag_of(item.path)}` | {ours} | {_cell(item.megatron_default)} | {item.reason} |")
    lines += ["", "## Other names", "", "| flag | stands for |", "|---|---|"]
    lines += [
        f"| `{flag}` | `{' '.join(filter(None, (flag_of(alias.path), alias.value)))}` |"
        for flag, alias in aliases().items()
    ]
    lines += [
        "",
        "## Ignored",
        "",
        "megatrain always does what these flags ask for, or they have no meaning here. The plan has a note about each that is",
        "given. Values other than those shown are refused.",
        "",
        "| flags | reason |",
        "|---|---|",
    ]
    lines += _rows(flag for flag in flags if flag.answer.kind == "accepted")
    lines += [
        "",
        "## Without effect so far",
        "",
        "The features of these flags are missing. Results are the same without them; the plan has a note about each flag",
        "that is given.",
        "",
        "| flags | missing | so far |",
        "|---|---|---|",
    ]
    lines += _rows(flag for flag in flags if flag.answer.kind == "pending")
    lines += [
        "",
        "## Refused",
        "",
        "Each is refused by name. A value that is shown is accepted, since it asks for the behavior of megatrain.",
        "",
        "| flags | reason | remedy |",
        "|---|---|---|",
    ]
    lines += _rows(flag for flag in flags if flag.answer.is_refusal)
    return "\n".join(lines) + "\n"


def _rows(flags: Iterable[MegatronFlag]) -> list[str]:
    """Return one table row per answer."""
    by_answer: dict[str, list[MegatronFlag]] = {}
    for flag in flags:
        by_answer.setdefault(flag.answer.flags, []).append(flag)
    rows = []
    for group in by_answer.values():
        answer = group[0].answer
        cells = [", ".join(f"`{_with_values(flag)}`" for flag in group)]
        cells += [answer.feature, answer.text] if answer.kind == "pending" else [answer.text]
        if answer.is_refusal:
            cells.append(answer.instead)
        rows.append(f"| {' | '.join(_cell(text) for text in cells)} |")
    return rows


def _cell(text: str) -> str:
    """Return a text without the bars that would end its cell."""
    return text.replace("|", r"\|")


def _with_values(flag: MegatronFlag) -> str:
    if flag.takes == "nothing" or not flag.accepted:
        return flag.flag
    return f"{flag.flag} {'/'.join(value.replace(',', ' ') for value in flag.accepted)}"
