"""A given setting that has no effect is a note, as it is in Megatron-LM; the run has the same configuration otherwise."""

import pytest

from megatrain.config import Facts
from megatrain.config.rule_list import reason_of
from megatrain.config.schema.lr_decay import LR_STYLES
from megatrain.config.schema.tree import settings

CASES = [
    ("--lora-alpha 8", "", ("--lora-alpha 8.0 has no effect", "without --lora-rank, so that all weights are trained")),
    ("--eval-tasks-interval 5", "", ("--eval-tasks-interval 5 has no effect", "without --eval-tasks")),
    ("--dsa-indexer-topk 64 --dsa-indexer-use-sparse-loss", "",
     ("--dsa-indexer-topk 64", "--dsa-indexer-use-sparse-loss", "have no effect", "--experimental-attention-variant")),
    ("--eval-with-ema", "", ("--eval-with-ema has no effect", "without --ema-decay")),
    ("--mask-prob 0.2 --short-seq-prob 0.3", "",
     ("--mask-prob 0.2, --short-seq-prob 0.3 have no effect", "--model-family is bert or t5")),
    ("--model-family bert --eod-mask-loss --reset-position-ids", "",
     ("--eod-mask-loss has no effect", "--model-family bert or t5")),
    ("--fim-rate 0.2 --fim-no-prefix x --fim-fragment-rate 0.1", "",
     ("--fim-rate 0.2, --fim-no-prefix x have no effect", "without --fim-data")),
    ("--nvtx-ranges --profile --record-memory-history", "", ("--nvtx-ranges, --record-memory-history", "--device is cuda")),
    ("--nvtx-ranges", "", ("--nvtx-ranges has no effect without --profile, and unless --device is cuda",)),
    ("--memory-snapshot-path m", "", ("--memory-snapshot-path m", "without --record-memory-history")),
    ("--qat-group-size 32", "", ("--qat-group-size 32", "--qat is int4")),
    ("--mamba-num-heads 8", "", ("--mamba-num-heads 8", "--model-family is hybrid")),
    ("--model-family hybrid --hybrid-layer-pattern *- --hybrid-mlp-ratio 0.5", "",
     ("--hybrid-mlp-ratio 0.5", "with --hybrid-layer-pattern")),
    ("--decoder-num-layers 3", "", ("--decoder-num-layers 3", "--model-family is t5 or vlm")),
    ("--model-family t5 --decoder-seq-length 32 --decoder-num-layers 6", "",
     ("--decoder-num-layers 6 has no effect", "4 layers of --encoder-num-layers")),
    ("--dataloader-seq-length 20", "", ("--dataloader-seq-length 20", "--model-family is vlm")),
    ("--model-family vlm --img-h 28 --img-w 28 --patch-dim 14 --vision-num-attention-heads 4", "",
     ("--vision-num-attention-heads 4", "--vision-model-type is clip or siglip or internvit300M")),
    ("--model-family vlm --img-h 28 --img-w 28 --patch-dim 14 --image-processor siglip", "",
     ("--image-processor siglip", "without --image-data-path")),
    ("--model-family vlm --img-h 28 --img-w 28 --patch-dim 14 --pixel-shuffle-factor 3", "",
     ("--pixel-shuffle-factor 3", "without --pixel-shuffle")),
    ("--model-family vlm --img-h 28 --img-w 28 --patch-dim 14 --max-num-tiles 3", "",
     ("--max-num-tiles 3", "without --use-tiling")),
    (("--model-family vlm --img-h 28 --img-w 28 --patch-dim 14 --tokenizer-type NullTokenizer --image-data-path talks.jsonl"
      " --use-tiling"), "--mock-data", ("--use-tiling", "with --images-per-sample 1")),
    ("--flight-recorder-dump-path dumps --distributed-backend gloo", "",
     ("--flight-recorder-dump-path dumps", "--distributed-backend is nccl")),
    (("--inprocess-active-world-size 1 --inprocess-max-iterations 3 --inprocess-soft-timeout 5 --inprocess-hard-timeout 5"
      " --inprocess-barrier-timeout 5"), "", ("--inprocess-active-world-size 1", "without --inprocess-restart")),
    ("--flight-recorder-trace-buffer-size 10", "",
     ("--flight-recorder-trace-buffer-size 10", "without --flight-recorder-dump-path")),
    ("--validation-set-names a b", "", ("--validation-set-names a b", "without --multiple-validation-sets")),
    ("--assume-gpu a100", "", ("--assume-gpu a100", "without --dry-run")),
    ("--use-packed-sequence", "", ("--use-packed-sequence has no effect with --model-family gpt",)),
    ("--max-seqlen-per-dp-cp-rank 64 --sequence-packing-scheduler first_fit", "",
     ("--max-seqlen-per-dp-cp-rank 64", "--sequence-packing-scheduler first_fit", "without --pack-documents")),
    ("--data-path d --tokenizer-type NullTokenizer --varlen-mock-dataset-config-json lengths.json", "--mock-data",
     ("--varlen-mock-dataset-config-json lengths.json", "without --mock-data")),
    ("--min-dynamic-context-parallel-size 2", "",
     ("--min-dynamic-context-parallel-size 2", "--sequence-packing-scheduler is default_dynamic_cp")),
    ("--no-data-sharding", "", ("--no-data-sharding", "--dataloader-type is cyclic")),
    ("--moe-router-topk 4", "", ("--moe-router-topk 4", "--num-experts")),
    ("--expert-tensor-parallel-size 4", "", ("--expert-tensor-parallel-size 4", "--num-experts")),
    ("--num-experts 4 --moe-router-pre-softmax --moe-router-score-function sigmoid", "",
     ("--moe-router-pre-softmax", "--moe-router-score-function")),
    ("--num-experts 4 --moe-router-load-balancing-type none --moe-aux-loss-coeff 1e-2", "",
     ("--moe-aux-loss-coeff 0.01", "--moe-router-load-balancing-type")),
    ("--num-experts 4 --moe-router-bias-update-rate 0.01", "",
     ("--moe-router-bias-update-rate 0.01", "--moe-router-enable-expert-bias")),
    (("--num-experts 4 --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.01"
     " --moe-expert-capacity-factor 1 --moe-pad-expert-input-to-capacity"), "",
     ("--moe-router-enable-expert-bias, --moe-router-bias-update-rate 0.01 have no effect",
      "--moe-pad-expert-input-to-capacity")),
    ("--num-experts 4 --moe-router-load-balancing-type sinkhorn --moe-router-topk-scaling-factor 2.5", "",
     ("--moe-router-topk-scaling-factor 2.5", "sinkhorn")),
    ("--num-experts 4 --moe-router-quantile-balancing-ema 0.5", "",
     ("--moe-router-quantile-balancing-ema 0.5", "quantile_balancing")),
    ("--num-experts 4 --moe-shared-expert-intermediate-size 64 --moe-shared-expert-overlap", "",
     ("--moe-shared-expert-overlap", "CPU")),
    ("--num-experts 4 --overlap-moe-expert-parallel-comm", "", ("--overlap-moe-expert-parallel-comm", "one rank")),
    ("--num-experts 4 --overlap-moe-expert-parallel-comm --micro-batch-size 2 --global-batch-size 2", "",
     ("--overlap-moe-expert-parallel-comm", "one micro-batch")),
    ("--num-experts 4 --moe-alltoall-ranks-per-host 2", "",
     ("--moe-alltoall-ranks-per-host 2", "--moe-token-dispatcher-type")),
    ("--num-experts 4 --moe-token-dispatcher-type alltoall --moe-alltoall-ranks-per-host 2", "",
     ("--moe-alltoall-ranks-per-host 2", "--expert-model-parallel-size 1")),
    ("--num-experts 4 --moe-token-dispatcher-type alltoall --moe-alltoall-as-allgather --moe-alltoall-ranks-per-host 1", "",
     ("--moe-alltoall-ranks-per-host 1", "--moe-alltoall-as-allgather")),
    ("--num-experts 4 --moe-alltoall-as-allgather", "",
     ("--moe-alltoall-as-allgather", "--moe-token-dispatcher-type")),
    ("--num-experts 4 --moe-upcycling-granularity 2", "", ("--moe-upcycling-granularity 2", "--moe-use-upcycling")),
    ("--moe-layer-recompute", "", ("--moe-layer-recompute", "--num-experts")),
    ("--moe-per-layer-logging", "", ("--moe-per-layer-logging", "--num-experts")),
    ("--num-experts 4 --moe-pad-expert-input-to-capacity --moe-token-drop-policy position", "",
     ("--moe-pad-expert-input-to-capacity", "--moe-token-drop-policy position", "--moe-expert-capacity-factor")),
    ("--num-experts 4 --moe-shared-expert-gate", "",
     ("--moe-shared-expert-gate", "--moe-shared-expert-intermediate-size")),
    ("--linear-attention-freq 4", "", ("--linear-attention-freq 4", "--experimental-attention-variant")),
    ("--export-kd-cfg a.yaml --kd-temperature 2", "",
     ("--export-kd-cfg a.yaml", "--kd-temperature 2", "have no effect", "without --export-kd-teacher-load")),
    ("--logits-load-kd-loss-alpha 0.5", "", ("--logits-load-kd-loss-alpha 0.5 has no effect without --logits-load-dir",)),
    ("--kd-loss-scale 2 --kd-layer-loss-scale 3", "",
     ("--kd-layer-loss-scale 3.0 has no effect without --export-kd-teacher-load, and without --no-kd-balance-losses",)),
    ("--kd-loss-scale 2", "", ("--kd-loss-scale 2.0 has no effect", "and without --no-kd-skip-lm-loss")),
    ("--tp-comm-overlap", "", ("--tp-comm-overlap", "without --sequence-parallel")),
    ("--cuda-graph-impl none --cuda-graph-warmup-steps 5", "", ("--cuda-graph-warmup-steps 5", "--cuda-graph-impl is auto")),
    ("--log-energy", "", ("--log-energy", "CPU")),
    ("--error-injection-type persistent_error", "", ("--error-injection-type persistent_error", "--error-injection-rate")),
    ("--glu-linear-offset 1", "--swiglu", ("--glu-linear-offset 1.0", "without --swiglu, --geglu or --quick-geglu")),
    ("--position-embedding-type none --use-rope-scaling", "", ("--use-rope-scaling", "--position-embedding-type")),
    ("--position-embedding-type none --no-rope-freq 4", "", ("--no-rope-freq 4", "RoPE")),
    ("--v-head-dim 64 --rope-type rope", "", ("--v-head-dim 64", "--rope-type rope", "without --multi-latent-attention")),
    ("--multi-latent-attention --use-rope-scaling", "", ("--use-rope-scaling", "with --multi-latent-attention")),
    ("--multi-latent-attention --kv-channels 32", "", ("--kv-channels 32", "with --multi-latent-attention", "192")),
    ("--multi-latent-attention --rotary-percent 0.5", "", ("--rotary-percent 0.5", "--rope-type yarn")),
    (("--position-embedding-type yarn --yarn-original-max-position-embeddings 16 --rotary-percent 0.5"
     " --rotary-seq-len-interpolation-factor 2"), "",
     ("--rotary-percent 0.5, --rotary-seq-len-interpolation-factor 2 have", "--position-embedding-type yarn")),
    ("--recompute-activations --recompute-modules mla_up_proj", "",
     ("--recompute-modules mla_up_proj", "--multi-latent-attention")),
    ("--window-attn-skip-freq 2", "", ("--window-attn-skip-freq 2", "--window-size")),
    ("--qk-layernorm-width all_heads", "", ("--qk-layernorm-width all_heads", "--qk-layernorm")),
    ("--mup-embedding-mult 2", "", ("--mup-embedding-mult 2.0", "--use-mup")),
    ("--use-mup --mup-base-head-dim 8 --softmax-scale 0.5", "", ("--mup-base-head-dim 8", "--softmax-scale")),
    ("--recompute-method block --recompute-granularity selective", "",
     ("--recompute-method block", "--recompute-granularity is full")),
    ("--recompute-norms --recompute-granularity full --recompute-method uniform --recompute-num-layers 1", "",
     ("--recompute-norms", "--recompute-granularity full")),
    ("--recompute-mlp-act --fp8-format hybrid", "", ("--recompute-mlp-act", "--fp8-format, whose layers save its input")),
    ("--recompute-modules mlp", "", ("--recompute-modules mlp", "--recompute-granularity is selective")),
    ("--recompute-activations --recompute-modules mlp moe_act", "", ("--recompute-modules moe_act", "--num-experts")),
    ("--fp8-recipe tensorwise", "", ("--fp8-recipe tensorwise", "without --fp8-format")),
    ("--fp8-margin 1 --fp8-amax-history-len 2", "", ("--fp8-margin 1, --fp8-amax-history-len 2", "without --fp8-format")),
    ("--first-last-layers-bf16", "", ("--first-last-layers-bf16", "without --fp8-format or --fp4-format")),
    ("--fp8-format hybrid --tp-comm-overlap", "", ("--tp-comm-overlap", "--fp8-format")),
    ("--fp8-format hybrid --fp8-recipe tensorwise --fp8-margin 1", "", ("--fp8-margin 1", "delayed")),
    ("--fp8-format hybrid --fp8-block-size 64", "", ("--fp8-block-size 64", "blockwise")),
    ("--fp8-format hybrid --fp8-param-gather", "", ("--fp8-param-gather", "one replica")),
    ("--num-layers-at-end-in-bf16 2", "", ("--num-layers-at-end-in-bf16 2", "--first-last-layers-bf16")),
    ("--num-layers-per-virtual-pipeline-stage 2", "",
     ("--num-layers-per-virtual-pipeline-stage 2", "--pipeline-model-parallel-size 1")),
    ("--finetune --override-opt-param-scheduler", "", ("--override-opt-param-scheduler, --finetune", "--load")),
    ("--save-interval 5", "", ("--save-interval 5", "--save")),
    ("--save s --async-ckpt-cpu-priority 5", "", ("--async-ckpt-cpu-priority 5", "--async-save")),
    ("--async-save", "", ("--async-save", "--save")),
    ("--ckpt-step 5", "", ("--ckpt-step 5", "--load", "--pretrained-checkpoint")),
    ("--use-mp-args-from-checkpoint-args", "", ("--use-mp-args-from-checkpoint-args", "--use-checkpoint-args")),
    ("--save s --keep-last 3", "", ("--keep-last 3", "--save-interval")),
    ("--non-persistent-global-ckpt-dir f", "", ("--non-persistent-global-ckpt-dir f", "global")),
    ("--non-persistent-local-ckpt-dir f", "", ("--non-persistent-local-ckpt-dir f", "local")),
    ("--replication-jump 8", "", ("--replication-jump 8", "--replication")),
    ("--decoupled-min-lr 0.1", "", ("--decoupled-min-lr 0.1", "--decoupled-lr")),
    ("--start-weight-decay 0.1", "", ("--start-weight-decay 0.1", "--weight-decay-incr-style constant")),
    ("--optimizer sgd --exp-avg-dtype bf16", "", ("--exp-avg-dtype bf16", "--optimizer sgd")),
    ("--optimizer lion --exp-avg-sq-dtype bf16 --adam-beta1 0.8", "",
     ("--adam-beta1 0.8", "--exp-avg-sq-dtype bf16", "unless --optimizer or --muon-scalar-optimizer is adam")),
    ("--optimizer muon --lion-beta1 0.8 --lion-beta2 0.8", "",
     ("--lion-beta1 0.8, --lion-beta2 0.8", "unless --optimizer or --muon-scalar-optimizer is lion")),
    ("--optimizer lion --muon-scalar-optimizer lion", "", ("--muon-scalar-optimizer lion", "--optimizer is muon")),
    ("--optimizer muon --adaptive-muon-beta2 0.9 --adaptive-muon-eps 1e-6", "",
     ("--adaptive-muon-beta2 0.9, --adaptive-muon-eps 1e-06", "unless --optimizer is adaptive_muon")),
    ("--qk-clip-alpha 0.3 --qk-clip-threshold 50", "",
     ("--qk-clip-alpha 0.3, --qk-clip-threshold 50.0", "without --qk-clip")),
    ("--high-priority-stream-groups ep --nccl-communicator-config-path f --distributed-backend gloo", "",
     ("--nccl-communicator-config-path f, --high-priority-stream-groups ep have", "--distributed-backend is nccl")),
    ("--offload-modules core_attn", "", ("--offload-modules core_attn", "--fine-grained-activation-offloading")),
    ("--min-offloaded-tensor-size 5", "",
     ("--min-offloaded-tensor-size 5", "--cpu-offloading-num-layers or --fine-grained-activation-offloading")),
    ("--optimizer-offload-fraction 0.5", "", ("--optimizer-offload-fraction 0.5", "--optimizer-cpu-offload")),
    ("--recompute-norms --norm-position post", "", ("--recompute-norms", "with --norm-position post")),
    ("--recompute-activations --recompute-modules layernorm --norm-position post", "",
     ("--recompute-modules layernorm", "with --norm-position post")),
    ("--reset-position-ids --tokenizer-type NullTokenizer", "", ("--reset-position-ids", "--position-embedding-type rope")),
    ("--sequence-parallel", "", ("--sequence-parallel", "--tensor-model-parallel-size 1")),
    ("--cp-comm-type a2a", "", ("--cp-comm-type a2a", "--context-parallel-size 1")),
    ("--hierarchical-context-parallel-sizes 2 2", "",
     ("--hierarchical-context-parallel-sizes 2 2", "without --cp-comm-type a2a+p2p")),
    ("--log-memory-to-tensorboard", "", ("--log-memory-to-tensorboard", "--tensorboard-dir, --wandb-project, --mlflow-experiment or --comet-project")),
    ("--mlflow-run-name n --comet-workspace w --comet-experiment-name x", "",
     ("--mlflow-run-name n has no effect", "without --mlflow-experiment")),
    ("--wandb-entity e --wandb-exp-name x", "", ("--wandb-exp-name x, --wandb-entity e have", "--wandb-project")),
    ("--optimizer muon --soap-shampoo-beta 0.9 --soap-precondition-frequency 5 --soap-max-preconditioner-dim 9", "",
     ("--soap-shampoo-beta 0.9, --soap-precondition-frequency 5, --soap-max-preconditioner-dim 9", "--optimizer is soap")),
    ("--optimizer sgd --muon-momentum 0.8", "", ("--muon-momentum 0.8", "--optimizer is muon")),
    ("--sgd-momentum 0.8", "", ("--sgd-momentum 0.8", "--optimizer is sgd")),
    ("--bf16 --hysteresis 3 --initial-loss-scale 65536", "", ("--initial-loss-scale 65536.0, --hysteresis 3 have", "--fp16")),
    ("--fp16 --loss-scale 8 --hysteresis 3", "", ("--hysteresis 3", "with --loss-scale")),
    ("--manual-gc-interval 5", "", ("--manual-gc-interval 5", "--manual-gc")),
    ("--straggler-minmax-count 2", "", ("--straggler-minmax-count 2", "--log-straggler")),
    ("--timing-log-option all", "", ("--timing-log-option all", "--timing-log-level")),
    ("--tensorboard-queue-size 10", "", ("--tensorboard-queue-size 10", "--tensorboard-dir")),
    ("--mtp-loss-scaling-factor 0.2", "", ("--mtp-loss-scaling-factor 0.2", "--mtp-num-layers")),
    ("--rope-scaling-factor 4", "", ("--rope-scaling-factor 4.0", "--use-rope-scaling")),
    ("--mscale 2", "", ("--mscale 2.0", "without YaRN")),
    ("--rotary-scaling-factor 2", "", ("--rotary-scaling-factor 2.0", "without YaRN")),
    ("--profile-ranks 0", "", ("--profile-ranks 0", "without --profile")),
    ("--bert-no-binary-head", "", ("--bert-no-binary-head", "unless --model-family is bert")),
    ("--decoder-seq-length 8", "", ("--decoder-seq-length 8", "unless --model-family is t5")),
    ("--relative-attention-num-buckets 8", "",
     ("--relative-attention-num-buckets 8", "unless --position-embedding-type is relative")),
]  # fmt: skip
OTHER_VALUES = {int: "7", float: "0.7"}
CASES += [
    (f"{setting.flag} {setting.choices[-1] if setting.choices else OTHER_VALUES[setting.kind]}", "",
     (setting.flag, f"--lr-decay-style is {name}"))
    for name, style in LR_STYLES.items() for setting in settings() if setting.name in style.settings
]  # fmt: skip
ENGINE = Facts(device="cuda", libraries={"transformer_engine": "2.20.2"})


@pytest.mark.parametrize(("flags", "without", "named"), CASES)
def test_a_setting_without_effect_is_a_note(plan_of, flags, without, named):
    notes = [note for note in plan_of(flags, without=without).notes if "no effect" in note]
    assert any(all(words in note for words in named) for note in notes), notes


def _notes_on_gpus(plan_of):
    flags = "--tp-comm-overlap --fp8-format hybrid --bf16"
    return plan_of(f"{flags} --transformer-impl transformer_engine", facts=ENGINE).notes


def test_every_need_has_a_case(plan_of):
    notes = [note for flags, without, _ in CASES for note in plan_of(flags, without=without).notes]
    notes += _notes_on_gpus(plan_of)
    for reason in {reason_of(need) for setting in settings() for need in setting.needs}:
        ends = (note.partition(" no effect ")[2] for note in notes)
        assert any(end.endswith(reason) or f"{reason}, and " in end for end in ends), reason


def test_all_needs_that_are_not_met_are_in_one_note(plan_of):
    flags = "--moe-router-bias-update-rate 0.01 --moe-upcycling-granularity 2"
    assert [note for note in plan_of(flags).notes if "no effect" in note] == [
        "--moe-router-bias-update-rate 0.01 has no effect without --num-experts, and without --moe-router-enable-expert-bias",
        "--moe-upcycling-granularity 2 has no effect without --num-experts, and without --moe-use-upcycling",
    ]


def test_defaults_have_no_note(plan_of):
    assert not any("no effect" in note for note in plan_of().notes)
    assert not any("no effect" in note for note in plan_of("--no-finetune --moe-router-topk 2").notes)


def test_expert_tensor_parallelism_without_experts_does_not_change_the_ranks(plan_of):
    plan = plan_of(
        "--expert-tensor-parallel-size 4 --tensor-model-parallel-size 2", facts=Facts(world_size=2)
    )
    assert plan.derived.expert_tensor_parallel_size == 2


def test_the_flex_dispatcher_is_the_all_to_all_one(plan_of):
    plan = plan_of("--num-experts 4 --moe-token-dispatcher-type flex --moe-enable-deepep")
    assert plan.config.experts.moe_token_dispatcher_type == "alltoall"
    assert any("--moe-token-dispatcher-type flex" in note for note in plan.notes)
    assert any(
        "--moe-enable-deepep is ignored: DeepEP and HybridEP are not used" in note for note in plan.notes
    )


@pytest.mark.parametrize(
    ("flags", "facts", "reason"),
    [
        ("--fp4-format e2m1", Facts(world_size=2), "without --fp8-format"),
        ("--fp8-format e4m3 --fp8-recipe blockwise", Facts(world_size=2), "recipe delayed or tensorwise"),
        ("--fp8-format e4m3 --first-last-layers-bf16 --num-layers-at-end-in-bf16 3", Facts(world_size=2),
         "recipe delayed or tensorwise"),
        ("--fp8-format hybrid", Facts(world_size=2), ""),
        ("--fp8-format hybrid", Facts(), "with one replica"),
        ("--fp8-format hybrid --bf16 --transformer-impl transformer_engine", ENGINE, "with --transformer-impl"),
    ],
)  # fmt: skip
def test_a_gather_of_codes_without_effect_has_one_note(plan_of, flags, facts, reason):
    notes = plan_of(f"{flags} --fp8-param-gather", facts=facts).notes
    found = [note for note in notes if "--fp8-param-gather has no effect" in note]
    assert [reason in note for note in found] == [True] * bool(reason), found
