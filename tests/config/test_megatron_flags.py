"""Megatron-LM's flags: each is a setting, or is accepted with a line, or is refused by name with a remedy."""

import csv
import re
from collections import Counter

import pytest

from megatrain.config import parse, render_plan
from megatrain.config.cli.parse_value import load_value
from megatrain.config.megatron.differences import DIFFERENT_DEFAULTS
from megatrain.config.megatron.flag_table import ALIASES, ANSWERS, REPLACED_CHOICES, UNSUPPORTED_CHOICES
from megatrain.config.megatron.flags import aliases, megatron_flags
from megatrain.config.megatron.removed_flags import FORMER_FLAGS
from megatrain.config.schema.tree import flag_of, settings
from megatrain.config.schema.values import AUTO, REQUIRED

TABLE = [word.partition("=")[0] for answer in ANSWERS for word in answer.flags.split()]
SETTINGS = {setting.flag: setting for setting in settings()}
SWITCHES_OFF = {setting.opposite_flag: setting for setting in settings() if setting.kind is bool}


@pytest.fixture(scope="session")
def megatron(pytestconfig):
    """Rows of Megatron-LM's own flags, by flag; skips the test where the recording was not given."""
    golden = pytestconfig.getoption("golden")
    path = golden and golden.parent / "megatron-flag-frequency.tsv"
    if not path or not path.is_file():
        pytest.skip("needs the list of flags: run with --golden DIR")
    with path.open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file, delimiter="\t") if row["parser"] == "core"]
    return {row["flag"].replace("_", "-"): row for row in rows if row["flag"] not in ("-h", "--help")}


def told(*argv):
    """Notes and problems of these arguments alone, as texts."""
    request = parse(argv)
    return list(request.notes), [str(problem) for problem in request.problems]


# ---- the table


def test_no_flag_is_in_the_table_twice():
    assert [flag for flag, count in Counter([*TABLE, *ALIASES]).items() if count > 1] == []


def test_no_setting_is_in_the_table():
    taken = [flag for flag in (*TABLE, *ALIASES) if flag in SETTINGS or flag in SWITCHES_OFF]
    assert taken == [], "these are settings now: delete them from megatron_table.py"


def test_every_answer_says_why_and_what_to_do():
    assert all(answer.flags.split() for answer in ANSWERS), "delete answers without flags"
    assert all(answer.text and (answer.instead or answer.kind == "accepted") for answer in ANSWERS)
    paths = {setting.path: setting for setting in settings()}
    for alias in ALIASES.values():
        assert alias.value is None or load_value(paths[alias.path], alias.value) is not None


def test_remedies_name_flags_that_exist():
    for answer in ANSWERS:
        named = re.findall(r"--[a-z][a-z0-9-]+", f"{answer.text} {answer.instead}")
        known = {*SETTINGS, *SWITCHES_OFF, *TABLE, "--config", "--max-restarts"}
        assert [flag for flag in named if flag not in known] == []


def test_every_flag_of_megatron_is_answered(megatron):
    known = {*SETTINGS, *SWITCHES_OFF, *aliases(), *megatron_flags()}
    assert sorted(set(megatron) - known) == []
    assert sorted(set(megatron_flags()) - set(megatron) - FORMER_FLAGS) == []


def test_flags_take_as_many_values_as_in_megatron(megatron):
    for flag in set(megatron) & set(megatron_flags()):
        row = megatron[flag]
        takes = "nothing" if row["type"].startswith("flag") else "several" if row["nargs"] else "one"
        assert (flag, megatron_flags()[flag].takes) == (flag, takes)


def test_settings_take_what_megatrons_take(megatron):
    for flag in set(megatron) & set(SETTINGS):
        row, setting = megatron[flag], SETTINGS[flag]
        assert (flag, setting.kind is bool) == (flag, row["type"].startswith("flag"))
        assert (flag, setting.is_list) == (flag, bool(row["nargs"]))
        choices = filter(None, row["choices"].split("|")) if setting.choices else []
        others = {*UNSUPPORTED_CHOICES.get(flag, ()), *REPLACED_CHOICES.get(flag, ())}
        assert set(choices) <= {*setting.choices, *others}


# Where Megatron-LM decides later what the default is, or spells it otherwise.
DECIDED_LATER = {
    "--dataloader-type": "single", "--tiktoken-pattern": "v2", "--exit-signal": "SIGTERM",
    "--yarn-beta-fast": "32", "--yarn-beta-slow": "1", "--yarn-correction-range-round-to-int": "True",
    "--cp-comm-type": "p2p", "--mup-width-mult": "None", "--mup-output-mult": "None",  # 1, which it replaces by what follows from the sizes
}  # fmt: skip


def test_every_default_that_differs_is_listed(megatron):
    differing = {}
    for setting in settings():
        row = megatron.get(setting.flag) or megatron.get(setting.opposite_flag)
        if row is None or setting.default is REQUIRED:
            continue
        there = DECIDED_LATER.get(setting.flag) or row["default"].strip("'")
        is_off_switch = row["type"] == "flag(store_false)" and row["flag"] == setting.flag
        if is_off_switch:
            there = str(there != "True")
        if not is_same_default(setting.default, there):
            differing[setting.path] = there
    listed = {
        item.path: {"off": "False", "on": "True"}.get(item.there, item.there) for item in DIFFERENT_DEFAULTS
    }
    assert differing.items() <= listed.items()
    assert all(SETTINGS[flag_of(path)].default is AUTO for path in listed.keys() - differing.keys())


def is_same_default(here, there):
    here = None if here is AUTO or here is False or here == () else here
    here = here[0] if isinstance(here, tuple) and len(here) == 1 else here
    there = None if there in ("None", "False", "[]") else there
    try:
        return float(here) == float(there)
    except (TypeError, ValueError):
        return str(here) == str(there)


# ---- what a user reads


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--use-mcore-models", "--use-mcore-models: there is one model definition here"),
        ("--use_flash_attn", "--use-flash-attn: --attention-backend picks"),
        ("--ckpt-format torch_dist", "--ckpt-format torch_dist: checkpoints are written in megatrain's own format"),
        ("--max-tokens-to-oom 12000", "--max-tokens-to-oom 12000: Megatron-LM does not read it either"),
        ("--num-virtual-stages-per-pipeline-rank=1", "--num-virtual-stages-per-pipeline-rank 1: as it is here; more than one"),
        ("--cpu-offloading-num-layers 0", "--cpu-offloading-num-layers 0: as it is here"),
        ("--moe-grouped-gemm=false", "--moe-grouped-gemm false: as if it were left out"),
        ("--dist_ckpt_strictness log_all", "--dist-ckpt-strictness log_all: here a checkpoint always has to hold"),
        ("--encoder-seq-length 64", "--encoder-seq-length is --seq-length"),
        ("--use-rotary-position-embeddings", "--use-rotary-position-embeddings is --position-embedding-type rope"),
        ("--kv-lora-rank 8 --kv-lora-rank none --mtp-num-layers 0", None),
    ],
)  # fmt: skip
def test_what_is_here_anyway_is_accepted_with_a_line(argv, words):
    notes, problems = told(*argv.split())
    if words is None:
        assert len(notes) == len(problems) == 1
    else:
        assert problems == []
        assert len(notes) == 1
        assert words in notes[0]


NOT_HERE = {
    "--hybrid-context-parallel": "--sequence-parallel",
    "--yaml-cfg run.yaml": "use --config FILE",
    "--fp16-lm-cross-entropy": "leave this out",
    "--torch-fsdp2-no-reshard-after-forward": "--data-parallel-sharding-strategy optim_grads",
    "--outer-dp-sharding-strategy optim": "--num-distributed-optimizer-instances",
    "--megatron-fsdp-grad-comm-dtype bf16": "--grad-reduce-in-bf16",
    "--moe-shared-expert-overlap": "results are the same",
    "--moe-flex-dispatcher-backend deepep": "--moe-token-dispatcher-type alltoall",
    "--moe-layer-recompute": "--recompute-modules moe",
    "--moe-paged-stash": "--recompute-modules moe_act",
    "--async-save": "the run waits while it saves",
    "--retro-add-retriever": "train a GPT",
    "--vision-pretraining": "train a GPT",
    "--bert-no-binary-head": "train a GPT",
    "--no-pad-vocab-size": "--make-vocab-size-divisible-by 1",
    "--ckpt-format zarr": "use torch_dist",
    "--perform-rl-step": "leave this out",
    "--use-checkpoint-args": "give --config FOLDER/config.yaml",
    "--no-position-embedding": "use --position-embedding-type none",
}


# What scripts of former years carry, which Megatron-LM has renamed or given up.
OF_LONG_AGO = {
    "--batch-size 4": "use --micro-batch-size",
    "--model-parallel-size 2": "use --tensor-model-parallel-size",
    "--warmup 0.01": "use --lr-warmup-fraction",
    "--checkpoint-activations": "use --recompute-activations, or --recompute-granularity full",
    "--distribute-checkpointed-activations": "use --recompute-granularity; with --sequence-parallel",
    "--checkpoint-num-layers 1": "use --recompute-num-layers",
    "--activations-checkpoint-method uniform": "use --recompute-method",
    "--num-unique-layers 2": "use --num-layers alone",
    "--param-sharing-style spaced": "use --num-layers alone",
    "--lazy-mpu-init": "leave this out",
    "--layernorm-epsilon 1e-5": "use --norm-epsilon",
    "--override-lr-scheduler": "use --override-opt-param-scheduler",
    "--use-checkpoint-lr-scheduler": "use --use-checkpoint-opt-param-scheduler",
    "--no-load-lr-state": "--override-opt-param-scheduler for this run's schedule",
    "--dynamic-loss-scale": "--fp16 without --loss-scale",
    "--resume-dataloader": "leave this out",
    "--use-npy-data-loader": "use preprocess_data.py",
    "--train-data corpus.json": "use --train-data-path",
    "--cache-dir cache": "use --data-cache-path",
    "--cpu-torch-adam": "--optimizer-cpu-offload",
    "--no-contiguous-buffers-in-local-ddp": "leave this out",
    "--DDP-impl torch": "use --DDP-impl local",
    "--data-impl lazy": "use --data-impl mmap",
    "--use-legacy-models": "leave this out",
    "--fp8-hybrid": "use --bf16",
    "--tiktoken-special-tokens <s> </s>": "use --tokenizer-special-tokens",
    "--deepspeed_config ds.json": "--data-parallel-sharding-strategy has the stages of ZeRO",
}


@pytest.mark.parametrize(("argv", "remedy"), [*NOT_HERE.items(), *OF_LONG_AGO.items()])
def test_what_is_not_here_is_refused_by_name(argv, remedy):
    notes, problems = told(*argv.split())
    assert notes == []
    assert len(problems) == 1
    assert problems[0].startswith((argv, argv.replace("_", "-")))
    assert remedy in problems[0].split("fix:")[1]


@pytest.mark.parametrize("argv", OF_LONG_AGO)
def test_yaml_refuses_what_is_of_long_ago(argv, tmp_path):
    flag, *values = argv.split()
    name = flag[2:].replace("-", "_")
    (tmp_path / "run.yaml").write_text(f"training:\n  {name}: {values or 'true'}\n")
    _, (problem,) = told("--config", str(tmp_path / "run.yaml"))
    assert f"run.yaml:2: {name}: " in problem
    assert OF_LONG_AGO[argv] in problem.split("fix:")[1]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--optimizer dist_muon", "--optimizer dist_muon is no choice of its own here\n  fix: use --optimizer muon; "),
        ("--optimizer soap", "--optimizer soap is not there yet"),
        ("--cpu-optimizer", "fix: use --optimizer-cpu-offload"),
        ("--delay-grad-reduce", "as it would change no result\n  fix: leave this out; --overlap-grad-reduce and"),
        ("--delay-param-gather", "--overlap-param-gather are on by default"),
    ],
)  # fmt: skip
def test_a_refusal_names_what_is_there_instead(argv, words):
    _, (problem,) = told(*argv.split())
    assert words in problem


def test_flags_of_one_feature_are_one_problem():
    _, problems = told("--mtp-num-layers", "1", "--mtp-loss-scaling-factor", "2", "--lr", "fast", "--mtp-hsm")
    assert problems == [
        "--lr fast is not a number\n  fix: --lr takes a number above 0 and at most 1e+30",
        (
            "--mtp-num-layers 1, --mtp-loss-scaling-factor 2, --mtp-hsm: multi-token prediction (MTP) is not there yet\n"
            "  fix: leave this out"
        ),
    ]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--use-mcore-models 3", "--use-mcore-models 3 has a value, and takes none"),
        ("--ckpt-format", "--ckpt-format has no value\n  fix: give --ckpt-format a value"),
        ("--attention-backend flsh", "--attention-backend flsh"),
        ("--use-rotary-position-embeddings 1", "1 has a value, and takes none\n  fix: use --position-embedding-type rope"),
        ("--encoder-seq-length x", "--encoder-seq-length x is not a whole number"),
        ("--max-tokens-to-oom 1 2", "2 stands alone, without a flag before it"),
    ],
)  # fmt: skip
def test_mistakes_in_these_flags_are_problems(argv, words):
    _, problems = told(*argv.split())
    assert len(problems) == 1
    assert words in problems[0]


def test_every_flag_of_the_table_gets_its_answer():
    for flag in megatron_flags().values():
        notes, problems = told(flag.flag, *{"nothing": [], "one": ["x"], "several": ["x", "y"]}[flag.takes])
        assert len(notes + problems) == 1
        assert (notes or problems)[0].startswith(flag.flag)
        assert len(notes) == (flag.accepted is None)


# ---- YAML


@pytest.mark.parametrize("place", ["", "model:\n  ", "logging:\n  "])
def test_yaml_files_get_the_same_answers(tmp_path, place):
    file = tmp_path / "run.yaml"
    line = 2 if place else 1
    file.write_text(f"{place}use_mcore_models: true\n")
    assert told("--config", str(file)) == (
        [f"{file}:{line}: use_mcore_models: true: there is one model definition here"],
        [],
    )
    file.write_text(f"{place}max_seqlen_per_dp_cp_rank: 64\n")
    _, (problem,) = told("--config", str(file))
    assert problem.startswith(f"{file}:{line}: max_seqlen_per_dp_cp_rank: 64: context parallelism")
    file.write_text(f"{place}encoder_seq_length: 64\n")
    _, (problem,) = told("--config", str(file))
    assert problem.endswith("encoder_seq_length is an old name\n  fix: write `seq_length: 64` below `data:`")


def test_yaml_files_hold_lists_text_and_nothing(tmp_path):
    file = tmp_path / "run.yaml"
    for value in ("0.0", "[0.0]"):
        file.write_text(f"model:\n  moe_router_quantile_balancing_ema: {value}\n")
        (note,), problems = told("--config", str(file))
        assert note.startswith(f"{file}:2: moe_router_quantile_balancing_ema: 0.0: as it is here")
        assert problems == []
    file.write_text("model:\n  mtp_num_layers:\n")
    assert told("--config", str(file)) == ([f"{file}:2: mtp_num_layers: null: as if it were left out"], [])
    file.write_text("model:\n  use_mcore_model: true\n")
    assert told("--config", str(file))[1][0].endswith(
        "no field use_mcore_model\n  fix: did you mean use_mcore_models?"
    )


def test_a_flag_wins_over_yaml(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("parallel:\n  wgrad_deferral_limit: 2\n")
    assert told("--config", str(file), "--wgrad-deferral-limit", "0")[1] == []


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
def test_a_typo_gets_the_right_flag(typo):
    _, problems = told(typo)
    assert problems == [f"{typo} is not a flag\n  fix: did you mean {TYPOS[typo]}?"]


@pytest.mark.parametrize("typo", TYPOS)
def test_a_typo_in_yaml_gets_the_right_name(typo, tmp_path):
    """Below the section that the name belongs to; whatever the section is where it belongs to none."""
    typed, meant = (flag[2:].replace("-", "_") for flag in (typo, TYPOS[typo]))
    section = next((setting.section for setting in settings() if setting.name == meant), "logging")
    (tmp_path / "run.yaml").write_text(f"{section}:\n  {typed}: 1\n")
    _, (problem,) = told("--config", str(tmp_path / "run.yaml"))
    assert f"run.yaml:2: section {section} has no field {typed}\n  fix: did you mean {meant}?" in problem


# ---- argument lists as launch scripts have them

GPT2_345M = """
    --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024
    --micro-batch-size 4 --global-batch-size 8 --lr 0.00015 --train-iters 500000 --lr-decay-iters 320000
    --lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 1e-2 --lr-warmup-fraction .01 --clip-grad 1.0 --fp16
    --data-path my-gpt2_text_document --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt --data-impl mmap
    --split 949,50,1 --log-interval 100 --save-interval 10000 --eval-interval 1000 --eval-iters 10
    --distributed-backend nccl --save ckpt --load ckpt --attention-softmax-in-fp32 --no-masked-softmax-fusion
"""
LLAMA3_8B = """
    --use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --kv-channels 128 --seq-length 8192 --max-position-embeddings 8192
    --position-embedding-type rope --rotary-base 1000000 --rotary-percent 1.0 --attention-dropout 0.0
    --hidden-dropout 0.0 --swiglu --init-method-std 0.0134 --attention-backend fused --apply-layernorm-1p
    --untie-embeddings-and-output-weights --disable-bias-linear --normalization RMSNorm --micro-batch-size 1
    --global-batch-size 128 --train-samples 1953125000 --lr-decay-samples 1949218748 --lr-warmup-samples 3906252
    --lr 0.00015 --min-lr 0.00001 --decoupled-lr 5.0e-4 --decoupled-min-lr 4.5e-5 --lr-decay-style cosine
    --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --bf16 --grad-reduce-in-bf16
    --cross-entropy-loss-fusion --calculate-per-token-loss --manual-gc --empty-unused-memory-level 1
    --exit-duration-in-mins 235 --fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max
    --fp8-param-gather --tensor-model-parallel-size 1 --context-parallel-size 1 --sequence-parallel
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --mock-data
    --tokenizer-type NullTokenizer --vocab-size 128256 --tiktoken-pattern v2 --split 99,1,0
    --no-create-attention-mask-in-dataloader --no-mmap-bin-files --num-workers 1 --log-interval 1 --eval-iters 32
    --eval-interval 100 --save-interval 1000 --log-throughput --profile --profile-step-start 4 --profile-step-end 6
    --ckpt-format torch_dist --distributed-timeout-minutes 60 --save ckpt --load ckpt --tensorboard-dir tb
"""
MIXTRAL_8X7B = """
    --use-mcore-models --disable-bias-linear --seq-length 4096 --max-position-embeddings 32768 --num-layers 32
    --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --init-method-std 0.01
    --attention-dropout 0.0 --hidden-dropout 0.0 --normalization RMSNorm --position-embedding-type rope --swiglu
    --untie-embeddings-and-output-weights --group-query-attention --num-query-groups 8 --no-masked-softmax-fusion
    --no-position-embedding --rotary-base 1000000 --num-experts 8 --moe-router-topk 2
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall --overlap-param-gather --overlap-grad-reduce
    --tokenizer-type Llama2Tokenizer --tokenizer-model tokenizer.model --data-path text_document --split 99990,8,2
    --micro-batch-size 1 --global-batch-size 256 --lr 1e-4 --train-iters 500000 --lr-decay-iters 320000
    --lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 0.1 --lr-warmup-iters 500 --clip-grad 1.0 --bf16
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 --expert-model-parallel-size 8
    --use-distributed-optimizer --sequence-parallel --num-layers-per-virtual-pipeline-stage 8 --log-interval 1
    --save-interval 10000 --eval-interval 1000 --eval-iters 10 --save ckpt --load ckpt --tensorboard-dir tb
    --no-load-optim --no-load-rng --wandb-project Mixtral --wandb-exp-name Mixtral_8x7B --moe-permute-fusion
"""
DEEPSEEK_V3 = """
    --use-mcore-models --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128
    --kv-channels 128 --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128
    --qk-pos-emb-head-dim 64 --v-head-dim 128 --rotary-scaling-factor 40 --mscale 1.0 --mscale-all-dim 1.0
    --qk-layernorm --num-experts 256 --moe-layer-freq ([0]*3+[1]*58) --moe-ffn-hidden-size 2048
    --moe-shared-expert-intermediate-size 2048 --moe-router-topk 8 --moe-router-score-function sigmoid
    --moe-router-num-groups 8 --moe-router-group-topk 4 --moe-router-topk-scaling-factor 2.5
    --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3 --moe-router-dtype fp32
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4 --moe-token-dispatcher-type flex
    --mtp-num-layers 1 --mtp-loss-scaling-factor 0.1 --recompute-granularity selective
    --recompute-modules mla_up_proj mlp --expert-model-parallel-size 64 --expert-tensor-parallel-size 1
    --pipeline-model-parallel-size 16 --pipeline-model-parallel-layout Et*3|(tt|)*29,m|L --manual-gc
    --manual-gc-interval 10 --bf16 --swiglu --disable-bias-linear --normalization RMSNorm --norm-epsilon 1e-6
    --seq-length 4096 --micro-batch-size 1 --global-batch-size 8192 --train-samples 585937500 --lr 7.3e-6
    --position-embedding-type rope --rotary-base 10000 --no-rope-fusion --no-bias-swiglu-fusion
    --hidden-dropout 0 --attention-dropout 0 --data-path text_document --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model folder --dist-ckpt-strictness log_all --async-save --use-persistent-ckpt-worker
    --auto-detect-ckpt-format --ckpt-fully-parallel-load --log-timers-to-tensorboard --log-memory-to-tensorboard
    --log-num-zeros-in-grad --log-params-norm --log-validation-ppl-to-tensorboard --timing-log-level 0
"""
LLAMA2_MEGATRON = """
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 1 --seq-length 4096 --max-position-embeddings 4096
    --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 11008 --tokenizer-type Llama2Tokenizer
    --tokenizer-model tokenizer.model --load llama --exit-on-missing-checkpoint --use-checkpoint-args --no-load-optim
    --no-load-rng --untie-embeddings-and-output-weights --use-rotary-position-embeddings --normalization RMSNorm
    --no-position-embedding --no-masked-softmax-fusion --attention-softmax-in-fp32 --swiglu --use-flash-attn --bf16
    --micro-batch-size 1 --train-iters 100 --lr 1e-4 --disable-bias-linear --make-vocab-size-divisible-by 1
    --no-async-tensor-model-parallel-allreduce --recompute-activations --finetune --encoder-num-layers 32
"""
FUNCTIONAL_TEST = """
    --num-layers 12 --hidden-size 512 --num-attention-heads 8 --log-params-norm --log-num-zeros-in-grad
    --log-validation-ppl-to-tensorboard --log-timers-to-tensorboard --tensorboard-dir tb --micro-batch-size 4
    --global-batch-size 32 --seq-length 1024 --max-position-embeddings 1024 --train-iters 50 --timing-log-level 0
    --lr-decay-iters 320000 --save ckpt --load ckpt --data-path text_document --vocab-file vocab.json
    --merge-file merges.txt --split 949,50,1 --distributed-backend nccl --lr 0.00015 --lr-decay-style cosine
    --min-lr 1.0e-5 --weight-decay 1e-2 --clip-grad 1.0 --lr-warmup-fraction .01 --log-interval 1
    --save-interval 10000 --eval-interval 1000 --eval-iters 10 --transformer-impl local --no-gradient-accumulation-fusion
    --attention-softmax-in-fp32 --use-checkpoint-opt_param-scheduler --use-mcore-models --ckpt-format torch_dist
    --dist-ckpt-strictness assume_ok_unexpected --dist-ckpt-optim-fully-reshardable --data-cache-path cache --bf16
    --attention-backend unfused --log-memory-to-tensorboard --deterministic-mode --apply-query-key-layer-scaling
    --no-ckpt-fully-parallel-save --no-bias-gelu-fusion --async-save --use-persistent-ckpt-worker
"""
SCRIPTS = {
    "GPT-2 345M": GPT2_345M, "Llama 3 8B": LLAMA3_8B, "Mixtral 8x7B": MIXTRAL_8X7B, "DeepSeek V3": DEEPSEEK_V3,
    "Llama 2 7B": LLAMA2_MEGATRON, "functional test": FUNCTIONAL_TEST,
}  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_flag_of_a_script_is_understood(name):
    argv = SCRIPTS[name].split()
    request = parse(argv)
    said = "\n".join((*request.notes, *map(str, request.problems)))
    assert "is not a flag" not in said
    assert "stands alone" not in said
    for word in argv:
        flag = word.replace("_", "-")
        if word.startswith("--"):
            assert flag in said or any(origin.detail == flag for origin in request.origins.values())


def test_the_plan_names_its_defaults_that_are_not_megatrons(plan_of):
    words = "note: defaults that are not Megatron-LM's: --transformer-impl local (there: transformer_engine)"
    assert words in " ".join(render_plan(plan_of()).split())
    said = "--transformer-impl local --use-distributed-optimizer --distributed-backend gloo"
    assert "defaults that are not" not in render_plan(plan_of(said))


def test_the_plan_has_the_lines_of_accepted_flags(plan_of):
    assert "--use-mcore-models: there is one model definition here" in plan_of("--use-mcore-models").notes
