"""Distillation: the model of the teacher, its split over the ranks of the run, and the losses against it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator
from typing import Any

from megatrain.config.derive.custom_layers import layer_function
from megatrain.config.derive.distillation import parse_pair
from megatrain.config.errors import Problem
from megatrain.config.facts import Facts, TeacherFacts
from megatrain.config.model_spec.distillation import DistillationSpec, LayerPair
from megatrain.config.model_spec.model import ModelSpec
from megatrain.config.module_precision import Recipe
from megatrain.config.plan import Derived, DerivedValue, Draft, Plan
from megatrain.config.registry import Notes, Problems, derives, note, rule
from megatrain.config.schema.distillation import DistillationConfig
from megatrain.config.schema.experts import ExpertsConfig
from megatrain.config.schema.model import ModelConfig
from megatrain.config.schema.tokenizer import is_same_tokenizer
from megatrain.config.schema.tree import Config
from megatrain.config.schema.values import UnresolvedError
from megatrain.config.subjects.attention_kernel import attention_backend
from megatrain.config.subjects.fp8 import MXFP8_BLOCK, PRODUCT_MULTIPLE, gemm_sizes
from megatrain.config.subjects.model_spec import describe_model
from megatrain.config.subjects.pipeline import balanced_split

FLAG, CACHE = "--export-kd-teacher-load", "--logits-load-dir"
_TP = "--tensor-model-parallel-size"


@derives("derived.distillation")
def distillation(draft: Draft) -> DerivedValue:
    """Derive the teacher and its losses. Rules report what does not fit."""
    config, settings = draft.config, draft.config.distillation
    if settings.export_kd_teacher_load is None and settings.logits_load_dir is None:
        return DerivedValue(None, f"{FLAG} is not given")
    if config.training.only_evaluates:
        return DerivedValue(None, "evaluations have no teacher")
    if settings.export_kd_teacher_load is None:
        return DerivedValue(_cached(settings), CACHE)
    teacher = _teacher(draft)
    pairs = tuple(filter(None, map(parse_pair, settings.kd_layer_pairs)))
    is_mixed = not settings.kd_skip_lm_loss
    spec = DistillationSpec(
        teacher=teacher,
        path=settings.export_kd_teacher_load,
        is_reversed=settings.kd_loss == "reverse_kl",
        temperature=settings.kd_temperature,
        lm_weight=float(is_mixed),
        kd_weight=settings.kd_loss_scale if is_mixed else 1.0,
        layer_weight=settings.kd_layer_loss_scale,
        is_balanced=settings.kd_balance_losses,
        pairs=pairs,
        attention=attention_backend(_with_model(draft, teacher)).value,
        stages=_stages(draft, teacher),
    )
    return DerivedValue(spec, FLAG)


def _cached(settings: DistillationConfig) -> DistillationSpec:
    """Return the losses against cached outputs."""
    alpha = settings.logits_load_kd_loss_alpha
    return DistillationSpec(
        teacher=None,
        path=str(settings.logits_load_dir),
        is_reversed=False,
        temperature=1.0,
        lm_weight=1 - alpha,
        kd_weight=alpha,
        layer_weight=1.0,
        is_balanced=False,
        pairs=(),
    )


def samples_digest(config: Config, derived: Derived, facts: Facts) -> str:
    """Return a digest of the training samples and their order."""
    names = ("reset_attention_mask", "reset_position_ids", "dataloader_inter_document_masking", "sft")
    datasets = [one for one in facts.datasets if one.split in ("all", "train")]
    parts = (
        [(one.digest, one.weight, one.from_iteration) for one in datasets],
        [getattr(config.data, name) for name in ("mock_data", "split", "seq_length", *names)],
        config.training.seed,
        derived.train_plan,
        derived.train_start,
        [vars(phase) for phase in derived.later_phases],
        facts.digests.get("data.dataset"),
    )
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@rule
def cached_outputs_are_of_this_run(draft: Draft) -> Problems:
    folder, stored = draft.config.distillation.logits_load_dir, draft.facts.cached_logits
    if folder is None or draft.config.training.only_evaluates:
        return
    if not stored:
        raise UnresolvedError  # `data_problems` has the reason
    length, vocab_size = draft.config.data.seq_length, draft.derived.vocab_size
    remedy = "write another folder with `megatrain cache-logits` and the flags of this run, or use those of the folder"
    if stored["vocab_size"] != vocab_size:
        yield Problem(
            f"{CACHE} {folder} is for {stored['vocab_size']} tokens, and the run has {vocab_size}", remedy
        )
    elif stored["seq_length"] != length:
        yield Problem(
            f"{CACHE} {folder} has samples of {stored['seq_length']} tokens, and --seq-length is {length}",
            remedy,
        )
    elif not _is_same(draft.facts.tokenizer_fingerprint, stored["tokenizer_fingerprint"]):
        yield Problem(f"{CACHE} {folder} is for another tokenizer than that of the run", remedy)
    elif stored["num_samples"] < draft.derived.train_samples:  # which also changes their order
        yield Problem(
            f"{CACHE} {folder} has the outputs for {stored['num_samples']} samples, and the run reads {draft.derived.train_samples}",
            remedy,
        )
    elif stored["data_digest"] != samples_digest(draft.config, draft.derived, draft.facts):
        yield Problem(f"{CACHE} {folder} is for other samples, or for another order of them", remedy)


def _facts(draft: Draft) -> TeacherFacts:
    """Return the facts of the teacher. Raises UnresolvedError if the run has none, or `data_problems` has the reason."""
    facts = draft.facts.teacher
    if facts is None or draft.config.training.only_evaluates:
        raise UnresolvedError
    return facts


def _section(facts: TeacherFacts, name: str, kind: type[Any]) -> Any:
    values = facts.config.get(name, {})
    return kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})


def _teacher(draft: Draft) -> ModelSpec:
    """Return the model of the teacher, with the vocabulary of the student and without what only training needs."""
    facts, student = _facts(draft), draft.derived.model_spec
    model: ModelConfig = _section(facts, "model", ModelConfig)
    if layer_function(model.spec) is not None or model.model_family != "gpt":
        raise UnresolvedError  # a rule reports it
    model = model.replaced({"padded_vocab_size": student.padded_vocab_size})
    experts: ExpertsConfig = _section(facts, "experts", ExpertsConfig)
    spec = describe_model(model, experts, vocab_size=student.vocab_size)
    return dataclasses.replace(spec, mtp=None, z_loss_coeff=0.0, hidden_dropout=0.0)


def _with_model(draft: Draft, teacher: ModelSpec) -> Draft:
    """Return the draft of a run of the teacher, for the choice of its attention kernel."""
    facts = _facts(draft)
    model: ModelConfig = _section(facts, "model", ModelConfig)
    model = model.replaced(
        {
            "attention_backend": draft.config.model.attention_backend,
            "padded_vocab_size": teacher.padded_vocab_size,
        }
    )
    config = dataclasses.replace(draft.config, model=model, experts=_section(facts, "experts", ExpertsConfig))
    return dataclasses.replace(draft, config=config, derived=draft.derived.replaced({"model_spec": teacher}))


def _stages(draft: Draft, teacher: ModelSpec) -> tuple[int, ...]:
    """Return the layers of each pipeline rank, balanced by the teacher's own FLOPs."""
    stages = draft.config.parallel.pipeline_model_parallel_size
    layers, head = teacher.flops_per_token(draft.config.data.seq_length)
    if len(layers) < stages:
        raise UnresolvedError  # a rule reports it
    return balanced_split(layers, head, stages)[1]


@rule
def teacher_is_a_gpt(draft: Draft) -> Problems:
    facts = _facts(draft)
    model: ModelConfig = _section(facts, "model", ModelConfig)
    if model.model_family != "gpt":
        yield Problem(f"{FLAG} {facts.path} is a {model.model_family}", "name the checkpoint of a GPT")
    if layer_function(model.spec) is not None:
        yield Problem(
            f"{FLAG} {facts.path} has custom layers, and no code is run that only a checkpoint names",
            "name a teacher whose layers flags describe",
        )
    for name, value in facts.described.items():
        stored = facts.config["model"].get(name)
        if stored is not None and stored != value:
            yield Problem(
                f"--export-kd-teacher-model-config: {name} is {value}, and {stored} in {facts.path}",
                "correct the file, or remove it: the checkpoint describes its model",
            )


@rule
def teacher_has_the_vocabulary(draft: Draft) -> Problems:
    facts = _facts(draft)
    size, own = draft.derived.vocab_size, draft.facts.tokenizer_fingerprint
    if facts.num_rows < size or (facts.is_ours and facts.num_rows != size):
        yield Problem(
            f"{FLAG} {facts.path} has {facts.num_rows} tokens, and the run has {size}",
            "use the tokenizer of the teacher, or a teacher with the tokenizer of the run",
        )
    elif not _is_same(own, facts.tokenizer_fingerprint):
        yield Problem(
            f"{FLAG} {facts.path} was trained with another tokenizer than the one of the run",
            "use the tokenizer of the teacher",
        )


@rule
def teacher_divides_over_ranks(draft: Draft) -> Problems:
    facts = _facts(draft)
    teacher, parallel, data = _teacher(draft), draft.config.parallel, draft.config.data
    for size, count, flag, ranks in _indivisible(draft, teacher):
        yield Problem(
            f"{FLAG} {facts.path}: its {size} do not divide over {flag} {ranks}",
            f"use {flag} {math.gcd(count, ranks)}",
        )
        return
    has_experts = any(layer.experts is not None for layer in teacher.layers)
    if has_experts and parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel:
        yield Problem(
            f"{FLAG} {facts.path} has experts, which --tensor-model-parallel-size"
            f" {parallel.tensor_model_parallel_size} supports with --sequence-parallel alone",
            "add --sequence-parallel",
        )
    tp = parallel.tensor_model_parallel_size
    if max(1, tp // _fewest_groups(teacher)) != draft.derived.kv_copies:
        fewest = [_fewest_groups(spec) for spec in (teacher, draft.derived.model_spec)]
        yield Problem(
            f"{FLAG} {facts.path} has at least {fewest[0]} query groups a layer, and the model {fewest[1]}: over"
            f" --tensor-model-parallel-size {tp} they would have other copies of keys and values",
            f"use --tensor-model-parallel-size {math.gcd(tp, *fewest)}",
        )
    if len(teacher.layers) < parallel.pipeline_model_parallel_size:
        yield Problem(
            f"{FLAG} {facts.path} has {len(teacher.layers)} layers for --pipeline-model-parallel-size"
            f" {parallel.pipeline_model_parallel_size}",
            f"use --pipeline-model-parallel-size {len(teacher.layers)} or less",
        )
    if teacher.num_positions is not None and teacher.num_positions < data.seq_length:
        yield Problem(
            f"{FLAG} {facts.path} has {teacher.num_positions} learned positions, and --seq-length is {data.seq_length}",
            f"use --seq-length {teacher.num_positions}",
        )


def _indivisible(draft: Draft, teacher: ModelSpec) -> Iterator[tuple[str, int, str, int]]:
    """Yield the sizes of the teacher that do not divide: in words, the number, the flag of the ranks and their number."""
    parallel, etp = draft.config.parallel, draft.derived.expert_tensor_parallel_size
    tp, ep = parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size
    for layer in teacher.layers:
        count = ep if layer.experts is None else layer.experts.num_experts
        if count % ep:
            yield f"{count} experts", count, "--expert-model-parallel-size", ep
        for linear in layer.linears(teacher.hidden_size):
            flag, ranks = ("--expert-tensor-parallel-size", etp) if linear.num_experts else (_TP, tp)
            for piece in linear.pieces if linear.split == "outputs" else ():
                if not piece.divides_over(ranks):
                    unit = piece.unit if piece.heads else "columns"
                    yield f"{piece.count} {unit}", piece.count, flag, ranks
            if linear.split == "inputs" and linear.inputs % ranks:
                yield f"{linear.inputs} inputs of {linear.weight}", linear.inputs, flag, ranks


def _fewest_groups(spec: ModelSpec) -> int:
    groups = [layer.attention.num_query_groups for layer in spec.layers if layer.attention is not None]
    return min(groups, default=1 << 30)


@rule
def layer_pairs_exist(draft: Draft) -> Problems:
    teacher, student = _teacher(draft), draft.derived.model_spec
    pp = draft.config.parallel.pipeline_model_parallel_size
    for word in draft.config.distillation.kd_layer_pairs:
        pair = parse_pair(word)
        if pair is None:
            yield Problem(
                f"--kd-layer-pairs {word} is not of the form STUDENT:TEACHER:LOSS",
                "use --kd-layer-pairs final:final:cosine, or numbers of layers from 0 in place of final, and mse",
            )
            continue
        for whose, number, spec in (("model", pair.student, student), ("teacher", pair.teacher, teacher)):
            if number is not None and number >= len(spec.layers):
                yield Problem(
                    f"--kd-layer-pairs {word}: the {whose} has layers 0 to {len(spec.layers) - 1}",
                    f"use --kd-layer-pairs {word.replace(str(number), str(len(spec.layers) - 1))}",
                )
        if pp > 1 and pair != LayerPair(None, None, pair.loss):
            yield Problem(
                f"--kd-layer-pairs {word} is not supported together with --pipeline-model-parallel-size {pp}: both layers"
                " may be on different ranks",
                f"use --pipeline-model-parallel-size 1, or --kd-layer-pairs final:final:{pair.loss}",
            )


def _is_same(fingerprint: str | None, other: str | None) -> bool:
    """Return whether two tokenizers are the same, as far as both are known."""
    return fingerprint is None or other is None or is_same_tokenizer(fingerprint, other)


def recipe_of_teacher(draft: Draft | Plan) -> Recipe | None:
    """Return the FP8 recipe of the teacher, without a history: it has no steps of training. None: it has no FP8."""
    precision = draft.config.precision
    if precision.fp8_format is None or not draft.config.distillation.kd_teacher_fp8:
        return None
    return Recipe(
        "tensorwise" if precision.fp8_recipe == "delayed" else precision.fp8_recipe, precision.fp8_format
    )


@rule
def fp8_products_of_the_teacher_can_run(draft: Draft) -> Problems:
    recipe = recipe_of_teacher(draft)
    if recipe is None or draft.config.training.device != "cuda":
        return
    teacher = _teacher(draft)
    run = _with_model(draft, teacher)
    layers = tuple(range(len(teacher.layers)))
    run = dataclasses.replace(run, derived=run.derived.replaced({"fp8_layers": layers}))
    multiple = MXFP8_BLOCK if recipe.name == "mxfp8" else PRODUCT_MULTIPLE
    for what, _, size in dict.fromkeys(gemm_sizes(run)):
        if size % multiple:
            yield Problem(
                f"--kd-teacher-fp8: {size:g} {what} of the teacher are not a multiple of {multiple}, as FP8 products require",
                "remove --kd-teacher-fp8",
            )


@note("result")
def teacher_is_frozen(draft: Draft) -> Notes:
    spec = draft.derived.distillation
    if spec is not None:
        dtype = "FP8" if recipe_of_teacher(draft) else draft.config.precision.params_dtype
        how = f"; it computes in {dtype}, without gradients" if spec.teacher else ""
        yield f"{FLAG if spec.teacher else CACHE}: {spec}{how}"
