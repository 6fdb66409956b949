"""A flag of Megatron-LM is a setting, or is ignored with a note, or is refused by name with a remedy."""

import pytest

from megatrain.config.megatron.flags import megatron_flags
from megatrain.config.schema.tree import settings


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--use-mcore-models", "--use-mcore-models is ignored: "),
        ("--use_flash_attn", "--use-flash-attn is ignored: --attention-backend"),
        ("--ckpt-format torch_dist", "--ckpt-format torch_dist is ignored: "),
        ("--max-tokens-to-oom 12000", "--max-tokens-to-oom 12000 is ignored: "),
        ("--tensor-parallel-num-weight-shards=1", "--tensor-parallel-num-weight-shards 1 has no effect: "),
        ("--fp16-lm-cross-entropy", "--fp16-lm-cross-entropy is ignored: "),
        ("--no-position-embedding", "--no-position-embedding is ignored: --position-embedding-type"),
        ("--logging-level 40", "--logging-level 40 is ignored: "),
        ("--empty-unused-memory-level 2", "--empty-unused-memory-level 2 is ignored: "),
        ("--no-ckpt-fully-parallel-save", "--no-ckpt-fully-parallel-save is ignored: "),
        ("--async-strategy nvrx", "--async-strategy nvrx is ignored: --async-save"),
        ("--cuda-graph-modules attn mlp", "has no effect so far: CUDA graphs of parts of a model"),
        ("--tp-comm-overlap-cfg a.yaml", "has no effect so far: a choice of the layers whose"),
        ("--moe-flex-dispatcher-backend deepep", "--moe-flex-dispatcher-backend deepep is ignored: DeepEP"),
        ("--moe-grouped-gemm=false", "--moe-grouped-gemm false has no effect"),
        ("--dist_ckpt_strictness log_all", "--dist-ckpt-strictness log_all is ignored: "),
        ("--encoder-seq-length 64", "--encoder-seq-length is --seq-length"),
        ("--use-rotary-position-embeddings", "--use-rotary-position-embeddings is --position-embedding-type rope"),
    ],
)  # fmt: skip
def test_an_accepted_flag_has_a_note(notes_and_problems, argv, words):
    (note,), problems = notes_and_problems(*argv.split())
    assert problems == []
    assert words in note


def test_the_last_value_of_a_repeated_flag_counts(notes_and_problems):
    notes, problems = notes_and_problems(
        *"--mtp-hsm false --gdp-num-householder 8 --gdp-num-householder none".split()
    )
    assert len(notes) == len(problems) == 1


NOT_SUPPORTED = {
    "--torch-fsdp2-no-reshard-after-forward": "--data-parallel-sharding-strategy optim_grads",
    "--outer-dp-sharding-strategy optim": "--num-distributed-optimizer-instances",
    "--megatron-fsdp-grad-comm-dtype bf16": "--grad-reduce-in-bf16",
    "--retro-add-retriever": "train a GPT",
    "--vision-pretraining": "train a GPT",
    "--biencoder-shared-query-context-model": "remove the flag",
    "--no-pad-vocab-size": "--make-vocab-size-divisible-by 1",
    "--ckpt-format zarr": "use torch_dist",
    "--perform-rl-step": "remove the flag",
    "--override-ckpt-iteration 5": "--ckpt-step",
}


# Flags in older scripts that Megatron-LM has renamed or removed.
REMOVED = {
    "--batch-size 4": "use --micro-batch-size",
    "--model-parallel-size 2": "use --tensor-model-parallel-size",
    "--warmup 0.01": "use --lr-warmup-fraction",
    "--checkpoint-activations": "use --recompute-activations, or --recompute-granularity full",
    "--distribute-checkpointed-activations": "use --recompute-granularity",
    "--checkpoint-num-layers 1": "use --recompute-num-layers",
    "--activations-checkpoint-method uniform": "use --recompute-method",
    "--num-unique-layers 2": "use --num-layers",
    "--param-sharing-style spaced": "use --num-layers",
    "--layernorm-epsilon 1e-5": "use --norm-epsilon",
    "--override-lr-scheduler": "use --override-opt-param-scheduler",
    "--use-checkpoint-lr-scheduler": "use --use-checkpoint-opt-param-scheduler",
    "--no-load-lr-state": "--override-opt-param-scheduler",
    "--dynamic-loss-scale": "--fp16 without --loss-scale",
    "--resume-dataloader": "remove the flag",
    "--use-npy-data-loader": "use preprocess_data.py",
    "--train-data corpus.json": "use --train-data-path",
    "--cache-dir cache": "use --data-cache-path",
    "--cpu-torch-adam": "--optimizer-cpu-offload",
    "--no-contiguous-buffers-in-local-ddp": "remove the flag",
    "--DDP-impl torch": "use --DDP-impl local",
    "--data-impl lazy": "use --data-impl mmap",
    "--use-legacy-models": "remove the flag",
    "--fp8-hybrid": "use --fp8-format hybrid",
    "--tiktoken-special-tokens <s> </s>": "use --tokenizer-special-tokens",
    "--deepspeed_config ds.json": "--data-parallel-sharding-strategy",
}


@pytest.mark.parametrize(("argv", "remedy"), [*NOT_SUPPORTED.items(), *REMOVED.items()])
def test_a_refused_flag_is_named_with_a_remedy(notes_and_problems, argv, remedy):
    notes, problems = notes_and_problems(*argv.split())
    assert notes == []
    assert len(problems) == 1
    assert problems[0].startswith((argv, argv.replace("_", "-")))
    assert remedy in problems[0].split("fix:")[1]


@pytest.mark.parametrize("argv", REMOVED)
def test_yaml_refuses_removed_flags(notes_and_problems, argv, tmp_path):
    flag, *values = argv.split()
    name = flag[2:].replace("-", "_")
    (tmp_path / "run.yaml").write_text(f"training:\n  {name}: {values or 'true'}\n")
    _, (problem,) = notes_and_problems("--config", str(tmp_path / "run.yaml"))
    assert f"run.yaml:2: {name}: " in problem
    assert REMOVED[argv] in problem.split("fix:")[1]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--optimizer dist_muon", "use --optimizer muon; "),
        ("--fp8-recipe custom", "delayed"),
        ("--cpu-optimizer", "use --optimizer-cpu-offload"),
        ("--delay-grad-reduce", "--overlap-grad-reduce"),
        ("--delay-param-gather", "--overlap-param-gather"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_alternative(notes_and_problems, argv, words):
    _, (problem,) = notes_and_problems(*argv.split())
    text, fix = problem.split("fix:")
    assert argv in text
    assert words in fix


def test_flags_of_one_feature_are_one_problem(notes_and_problems):
    flags = "--gdp-num-householder 8 --gdp-num-chunk-states-to-recompute 16 --lr fast --gdp-cutedsl-kernel"
    _, (lr, gdp) = notes_and_problems(*flags.split())
    assert lr.startswith("--lr fast ")
    assert gdp.startswith(
        "--gdp-num-householder 8, --gdp-num-chunk-states-to-recompute 16 and --gdp-cutedsl-kernel: "
    )
    assert "fix: remove the flag" in gdp
    (note,), _ = notes_and_problems("--no-rope-fusion", "--no-gradient-accumulation-fusion")
    assert note.startswith("--no-rope-fusion and --no-gradient-accumulation-fusion are ignored: ")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--use-mcore-models 3", "--use-mcore-models 3 has a value"),
        ("--ckpt-format", "--ckpt-format has no value"),
        ("--attention-backend flsh", "--attention-backend flsh"),
        ("--use-rotary-position-embeddings 1", "--use-rotary-position-embeddings 1 has a value"),
        ("--encoder-seq-length x", "--encoder-seq-length x is not a whole number"),
        ("--max-tokens-to-oom 1 2", "2 "),
    ],
)  # fmt: skip
def test_mistakes_in_these_flags_are_problems(notes_and_problems, argv, words):
    _, problems = notes_and_problems(*argv.split())
    assert len(problems) == 1
    assert words in problems[0]


def test_every_flag_of_the_table_gets_its_answer(notes_and_problems):
    for flag in megatron_flags().values():
        notes, problems = notes_and_problems(
            flag.flag, *{"nothing": [], "one": ["x"], "several": ["x", "y"]}[flag.takes]
        )
        assert len(notes + problems) == 1
        assert (notes or problems)[0].startswith(flag.flag)
        assert len(notes) == (flag.accepted is None)


# ---- YAML


@pytest.mark.parametrize("place", ["", "model:\n  ", "logging:\n  "])
def test_yaml_files_get_the_same_answers(notes_and_problems, tmp_path, place):
    file = tmp_path / "run.yaml"
    line = 2 if place else 1
    file.write_text(f"{place}use_mcore_models: true\n")
    (note,), problems = notes_and_problems("--config", str(file))
    assert note.startswith(f"{file}:{line}: use_mcore_models: true is ignored: ")
    assert problems == []
    file.write_text(f"{place}mtp_hybrid_override_pattern: 64\n")
    _, (problem,) = notes_and_problems("--config", str(file))
    assert problem.startswith(f"{file}:{line}: mtp_hybrid_override_pattern: 64: ")
    file.write_text(f"{place}encoder_seq_length: 64\n")
    _, (problem,) = notes_and_problems("--config", str(file))
    assert "encoder_seq_length" in problem
    assert "`seq_length: 64` below `data:`" in problem


def test_yaml_files_hold_lists_text_and_nothing(notes_and_problems, tmp_path):
    file = tmp_path / "run.yaml"
    for value in ("fp32", "[fp32]"):
        file.write_text(f"model:\n  main_grads_dtype: {value}\n")
        (note,), problems = notes_and_problems("--config", str(file))
        assert note.startswith(f"{file}:2: main_grads_dtype: fp32 has no effect: ")
        assert problems == []
    file.write_text("model:\n  gdp_num_householder:\n")
    assert notes_and_problems("--config", str(file)) == (
        [f"{file}:2: gdp_num_householder: null has no effect"],
        [],
    )
    file.write_text("model:\n  use_mcore_model: true\n")
    _, (problem,) = notes_and_problems("--config", str(file))
    assert problem.endswith("fix: did you mean use_mcore_models?")


def test_a_flag_takes_precedence_over_yaml(notes_and_problems, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("parallel:\n  wgrad_deferral_limit: 2\n")
    assert notes_and_problems("--config", str(file), "--wgrad-deferral-limit", "0")[1] == []


# ---- typos

TYPOS = {
    "--num-layer": "--num-layers", "--hidden-sise": "--hidden-size", "--num-attention-head": "--num-attention-heads",
    "--ffn-hiden-size": "--ffn-hidden-size", "--seq-len": "--seq-length", "--sequence-length": "--seq-length",
    "--micro-batchsize": "--micro-batch-size", "--globalbatch-size": "--global-batch-size", "--train-iter": "--train-iters",
    "--train-sample": "--train-samples", "--min_lrs": "--min-lr", "--lr-warmup-iter": "--lr-warmup-iters",
    "--lr-decay-stile": "--lr-decay-style", "--weight_decays": "--weight-decay", "--clip-gradient": "--clip-grad",
    "--adam-beta-1": "--adam-beta1", "--tensor-model-parallel": "--tensor-model-parallel-size",
    "--pipeline-parallel-size": "--pipeline-model-parallel-size", "--sequence-paralel": "--sequence-parallel",
    "--use-distributed-optimiser": "--use-distributed-optimizer", "--no-use-distributed-optimiser": "--no-use-distributed-optimizer",
    "--hiden-size": "--hidden-size", "--microbatch-size": "--micro-batch-size", "--log_inteval": "--log-interval",
    "--pipline_model_parallel_size": "--pipeline-model-parallel-size", "--recompute-granulairty": "--recompute-granularity",
    "--cache-dirs": "--cache-dir", "--data-paths": "--data-path", "--tokenizer-typ": "--tokenizer-type", "--tokeniser-model": "--tokenizer-model",
    "--save-intervall": "--save-interval", "--log-intervals": "--log-interval", "--BF-16": "--bf16", "--swi-glu": "--swiglu",
    "--use-flash-attention": "--use-flash-attn", "--use-mcore-model": "--use-mcore-models",
    "--context-parallel-sise": "--context-parallel-size", "--moe-groupedgemm": "--moe-grouped-gemm",
    "--encoder-seq-len": "--encoder-seq-length", "--attention-backends": "--attention-backend",
}  # fmt: skip


@pytest.mark.parametrize("typo", TYPOS)
def test_a_typo_gets_the_right_flag(notes_and_problems, typo):
    _, (problem,) = notes_and_problems(typo)
    assert problem.startswith(f"{typo} ")
    assert problem.endswith(f"did you mean {TYPOS[typo]}?")


@pytest.mark.parametrize(("begun", "meant"), [("--lora", "--lora-rank"), ("--ema", "--ema-decay"), ("--qat-group", "--qat-group-size")])  # fmt: skip
def test_the_beginning_of_flags_gets_the_shortest(notes_and_problems, begun, meant):
    _, (problem,) = notes_and_problems(begun)
    assert problem.endswith(f"did you mean {meant}?")


@pytest.mark.parametrize("typo", TYPOS)
def test_a_typo_in_yaml_gets_the_right_name(notes_and_problems, typo, tmp_path):
    """The name is below its section, or any section if it has none."""
    typed, meant = (flag[2:].replace("-", "_") for flag in (typo, TYPOS[typo]))
    section = next((setting.section for setting in settings() if setting.name == meant), "logging")
    (tmp_path / "run.yaml").write_text(f"{section}:\n  {typed}: 1\n")
    _, (problem,) = notes_and_problems("--config", str(tmp_path / "run.yaml"))
    assert f"run.yaml:2: section {section} " in problem
    assert problem.endswith(f"did you mean {meant}?")
