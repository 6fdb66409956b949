"""The words of every rule: flag, value, remedy."""

import pytest

from megatrain.config import Facts
from megatrain.config.derive.custom_layers import CustomLayers
from megatrain.config.derive.layer_sizes import ExpertSizes, LayerSizes
from megatrain.config.facts import DatasetFacts
from megatrain.config.rules.rule_list import RULES

GQA = "--group-query-attention"
NULL = "--tokenizer-type NullTokenizer"
CUDA = Facts(device="cuda")
A100 = Facts(
    device="cuda", device_name="NVIDIA A100", device_capability=(8, 0), libraries={"flash-attn-4": "4.0.0b36"}
)
WIDE_HEADS = LayerSizes(num_heads=4, num_query_groups=4, head_channels=136, ffn_hidden_size=64)
OF_EXPERTS = LayerSizes(
    num_heads=4, num_query_groups=4, head_channels=16,
    experts=ExpertSizes(num_experts=6, top_k=2, ffn_hidden_size=16, shared_ffn_hidden_size=0),
)  # fmt: skip
ENGINE = "--transformer-impl transformer_engine"
WITH_ENGINE = Facts(device="cuda", libraries={"transformer_engine": "2.20.2"})
TWO_WITH_ENGINE = Facts(device="cuda", world_size=2, libraries={"transformer_engine": "2.20.2"})


def dataset(prefix, num_sequences, *, split="all", weight=None):
    return DatasetFacts(
        split=split, prefix=prefix, weight=weight, num_sequences=num_sequences, num_tokens=9, digest=prefix
    )


LAYERS = "--heterogeneous-layers-config-encoded-json"


def layers(groups, width, other_groups="4"):
    """A layer with these sizes, and three others."""
    sizes = [(groups, width), *[(other_groups, "96")] * 3]
    parts = [f'{{"attention":{{"num_query_groups":{g}}},"mlp":{{"ffn_hidden_size":{f}}}}}' for g, f in sizes]
    return f'{{"block_configs":[{",".join(parts)}]}}'


THREE = "--tensor-model-parallel-size 3 --hidden-size 48 --num-attention-heads 12 --ffn-hidden-size 96"
FULL, EMPTY = '{"attention":{},"mlp":{}}', '{"attention":{"no_op":true},"mlp":{"no_op":true}}'
NO_SECOND = f'{{"block_configs":[{FULL},{EMPTY},{FULL},{FULL}]}}'

FOUR = "--num-experts 4"

CASES = {
    "heads_divide_over_tp_ranks": [
        ("--num-attention-heads 4 --tensor-model-parallel-size 8", "", Facts(world_size=8),
         ("--num-attention-heads 4 do not divide over --tensor-model-parallel-size 8\n"
         "  fix: use --tensor-model-parallel-size 4, or --num-attention-heads 8")),
    ],
    "query_groups_divide_over_tp_ranks": [
        (f"{GQA} --num-attention-heads 12 --kv-channels 4 --num-query-groups 4 --tensor-model-parallel-size 6 --hidden-size 48 --ffn-hidden-size 96", "",
         Facts(world_size=6),
         ("--num-query-groups 4 are not held by equally many of --tensor-model-parallel-size 6 ranks each\n"
         "  fix: use --tensor-model-parallel-size 4, or --num-query-groups 3")),
        (f"{GQA} --num-attention-heads 12 --kv-channels 4 --num-query-groups 3 --tensor-model-parallel-size 2", "",
         Facts(world_size=2),
         ("--num-query-groups 3 do not divide over --tensor-model-parallel-size 2\n"
         "  fix: use --tensor-model-parallel-size 1, or --num-query-groups 4")),
    ],
    "heads_divide_over_query_groups": [
        (f"{GQA} --num-query-groups 3", "", None,
         "--num-attention-heads 4 do not divide over --num-query-groups 3\n  fix: use --num-query-groups 2"),
    ],
    "moments_require_adam": [
        ("--optimizer sgd --exp-avg-sq-dtype bf16", "", None,
         ("--exp-avg-sq-dtype bf16 has no effect with --optimizer sgd, which keeps no such mean\n"
          "  fix: leave --exp-avg-sq-dtype out, or use --optimizer adam")),
    ],
    "attention_backend_is_there": [
        ("--attention-backend flash4", "", None,
         ("--attention-backend flash4 computes in bf16 or fp16 on a GPU, and this run in float32 on cpu\n"
         "  fix: use --attention-backend auto")),
        ("--attention-backend flash4 --bf16", "", CUDA,
         ("--attention-backend flash4: flash-attn-4 is not installed\n"
         "  fix: install it (pip install 'flash-attn-4>=4.0.0b36'), or use --attention-backend auto")),
        ("--attention-backend flash4 --bf16", "", Facts(device="cuda", libraries={"flash-attn-4": "4.0.0b9"}),
         ("--attention-backend flash4: flash-attn-4 4.0.0b9 is older than 4.0.0b36\n"
         "  fix: install it (pip install 'flash-attn-4>=4.0.0b36'), or use --attention-backend auto")),
        ("--attention-backend flash4 --bf16 --no-compile", "", Facts(device="cuda", libraries={"flash-attn-4": "4.0.0b36"}),
         ("--attention-backend flash4: flash-attn-4 is compiled where it runs, which --no-compile rules out\n"
          "  fix: use --attention-backend auto")),
        ("--attention-backend flash4 --bf16", "", A100,
         ("--attention-backend flash4: flash-attn-4 does not run on NVIDIA A100 (compute capability 8.0)\n"
         "  fix: use --attention-backend auto")),
        ("--attention-backend cudnn --bf16 --deterministic-mode", "", CUDA,
         ("--attention-backend cudnn: cuDNN's attention gives other bits each time in its backward pass (--deterministic-mode)\n"
         "  fix: use --attention-backend auto")),
        ("--attention-backend cudnn --bf16", "", Facts(device="cuda", device_name="Tesla V100", device_capability=(7, 0)),
         ("--attention-backend cudnn: cuDNN's attention does not run on Tesla V100 (compute capability 7.0)\n"
         "  fix: use --attention-backend auto")),
        ("--attention-backend cudnn --bf16 --spec my.py:layers", "",
         Facts(device="cuda", custom_layers=CustomLayers(digest="1", layers=(WIDE_HEADS,) * 4, differences=())),
         ("--attention-backend cudnn: cuDNN's attention takes heads of at most 128 channels in multiples of 8, and layer 0 (from 0) has 136\n"
         "  fix: use --attention-backend auto")),
        ("--attention-backend cudnn --bf16 --window-size 8,0 --reset-attention-mask", "", CUDA,
         ("--attention-backend cudnn: cuDNN's attention is not for documents and windows\n"
          "  fix: use --attention-backend auto")),
        ("--attention-backend flash2 --bf16 --attention-dropout 0.1", "attention-dropout", CUDA,
         ("--attention-backend flash2: no fused kernel has --attention-dropout 0.1\n"
          "  fix: use --attention-dropout 0, or --attention-backend auto, which holds scores in memory")),
        ("--attention-backend sdpa --attn-logit-softcapping 50", "", None,
         ("--attention-backend sdpa: no fused kernel has --attn-logit-softcapping 50.0\n"
          "  fix: use --attention-backend auto, which holds scores in memory")),
        ("--attention-backend sdpa --softmax-type off-by-one", "", CUDA,
         ("--attention-backend sdpa: no fused kernel of float32 on a GPU is for sinks\n"
          "  fix: use --attention-backend auto, which holds scores in memory")),
        ("--attention-backend cudnn --kv-channels 192 --bf16", "", CUDA,
         ("--attention-backend cudnn: cuDNN's attention takes heads of at most 128 channels in multiples of 8, and --kv-channels is 192\n"
         "  fix: use --attention-backend auto")),
    ],
    "query_groups_are_given": [
        (GQA, "", None, "--group-query-attention is on, and --num-query-groups is missing\n  fix: give --num-query-groups"),
        (f"{GQA} --num-query-groups auto", "", None, "--num-query-groups is missing"),
    ],
    "query_groups_have_an_effect": [
        ("--num-query-groups 2", "", None,
         ("--num-query-groups 2 has no effect without --group-query-attention (Megatron-LM ignores it silently)\n"
         "  fix: add --group-query-attention")),
    ],
    "expert_settings_have_an_effect": [
        ("--moe-router-topk 4", "", None,
         ("--moe-router-topk has no effect without --num-experts\n"
          "  fix: add --num-experts, or leave this out")),
    ],
    "expert_layers_are_valid": [
        ("--num-experts 4 --moe-layer-freq [0]*2+[1]", "", None,
         ("--moe-layer-freq: [0]*2+[1] has 3 entries, and there are 4 layers\n"
          "  fix: give a number N for every Nth layer, or a list such as [0]*1+[1]*3")),
        ("--num-experts 4 --moe-layer-freq [0]*4", "", None,
         ("--moe-layer-freq [0]*4 leaves no layer with experts, and --num-experts is 4\n"
          "  fix: give at least one layer an entry of 1, or leave --num-experts out")),
    ],
    "experts_have_a_width": [
        ("--num-experts 4 --moe-ffn-hidden-size none", "", None,
         "--moe-ffn-hidden-size none leaves experts without a width\n  fix: leave it out"),
    ],
    "topk_fits_num_experts": [
        ("--num-experts 4 --moe-router-topk 6", "", None,
         "--moe-router-topk 6 is more than --num-experts 4\n  fix: use --moe-router-topk 2"),
    ],
    "top1_routing_has_a_gradient": [
        ("--num-experts 4 --moe-router-topk 1", "", None,
         ("its weight is always 1, and the router never learns\n"
          "  fix: add --moe-router-pre-softmax, or use --moe-router-score-function sigmoid")),
    ],
    "expert_groups_are_valid": [
        ("--num-experts 6 --moe-router-num-groups 4 --moe-router-group-topk 2", "", None,
         "--num-experts 6 do not divide into --moe-router-num-groups 4\n  fix: use --moe-router-num-groups 3"),
        ("--num-experts 8 --moe-router-num-groups 4 --moe-router-group-topk 5", "", None,
         "--moe-router-group-topk 5 is more than --moe-router-num-groups 4\n  fix: use --moe-router-group-topk 4"),
        ("--num-experts 8 --moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk 3", "", None,
         ("--moe-router-topk 3 does not divide over --moe-router-group-topk 2 groups of 2 experts\n"
          "  fix: use --moe-router-topk 2")),
        ("--num-experts 8 --moe-router-num-groups 4", "", None,
         ("--moe-router-num-groups is given without --moe-router-group-topk\n"
          "  fix: give both, such as --moe-router-num-groups 2 --moe-router-group-topk 1")),
    ],
    "pre_softmax_requires_softmax": [
        ("--num-experts 4 --moe-router-pre-softmax --moe-router-score-function sigmoid", "", None,
         ("--moe-router-pre-softmax has no effect with --moe-router-score-function sigmoid\n"
          "  fix: leave one of them out")),
    ],
    "load_balancing_is_valid": [
        ("--num-experts 4 --moe-router-load-balancing-type even", "", None,
         ("--moe-router-load-balancing-type even: not there\n"
          "  fix: use some of aux_loss seq_aux_loss global_aux_loss, or sinkhorn, or none")),
        ("--num-experts 4 --moe-router-load-balancing-type aux_loss none --moe-aux-loss-coeff 1e-2 0", "", None,
         ("--moe-router-load-balancing-type aux_loss none do not go together\n"
          "  fix: use one of them, or different ones of aux_loss seq_aux_loss global_aux_loss")),
        ("--num-experts 4 --moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 1e-2", "", None,
         ("--moe-router-load-balancing-type names 2 and --moe-aux-loss-coeff 1 of them\n"
          "  fix: give one factor for each, such as --moe-aux-loss-coeff 1e-2 1e-2")),
        ("--num-experts 4 --moe-router-load-balancing-type none --moe-aux-loss-coeff 1e-2", "", None,
         ("--moe-aux-loss-coeff 0.01 has no effect with --moe-router-load-balancing-type none\n"
          "  fix: leave it out, or use --moe-router-load-balancing-type aux_loss")),
        ("--num-experts 4 --moe-aux-loss-coeff -1", "", None,
         "--moe-aux-loss-coeff -1.0 rewards uneven loads\n  fix: use 1e-2"),
    ],
    "expert_bias_requires_sigmoid": [
        ("--num-experts 4 --moe-router-enable-expert-bias", "", None,
         ("--moe-router-enable-expert-bias does not go with --moe-router-score-function softmax, as in Megatron-LM\n"
          "  fix: use --moe-router-score-function sigmoid")),
        ("--num-experts 4 --moe-router-bias-update-rate 0.01", "", None,
         "--moe-router-bias-update-rate 0.01 has no effect without --moe-router-enable-expert-bias\n  fix: add that"),
    ],
    "sinkhorn_settings_have_an_effect": [
        (("--num-experts 4 --moe-router-load-balancing-type sinkhorn --moe-router-enable-expert-bias"
          " --moe-router-score-function sigmoid"), "", None,
         "both decide which experts a token goes to\n  fix: use one of them"),
        ("--num-experts 4 --moe-router-load-balancing-type sinkhorn --moe-router-topk-scaling-factor 2.5", "", None,
         ("--moe-router-topk-scaling-factor has no effect with --moe-router-load-balancing-type sinkhorn\n"
          "  fix: leave this out, or use --moe-router-load-balancing-type aux_loss")),
    ],
    "custom_experts_divide_over_ranks": [
        ("--spec my.py:layers", "", Facts(custom_layers=CustomLayers(digest="1", layers=(OF_EXPERTS,) * 4, differences=())),
         ("--spec gives layer 0 (from 0) 6 experts, and --num-experts is left out\n"
          "  fix: use --num-experts 6, and as many experts in each layer that has any")),
    ],
    "attention_has_a_kernel": [
        ("--kv-channels 100 --bf16 --softmax-type off-by-one --attention-dropout 0", "", CUDA,
         ("--attention-backend auto: FlashAttention-2 of torch, which is left for sinks, takes heads of at most 256 channels"
          " in multiples of 8, and --kv-channels is 100\n"
          "  fix: use --attention-backend math, which holds all scores of a block in memory")),
        ("--attention-backend flash --bf16 --window-size 8,0", "", Facts(device="cuda", device_capability=(7, 5)),
         ("--attention-backend flash: FlashAttention-2 of torch, which is left for windows, does not run on the GPU (compute"
          " capability 7.5)\n  fix: use --attention-backend math, which holds all scores of a block in memory")),
    ],
    "capacity_settings_have_an_effect": [
        ("--num-experts 4 --moe-pad-expert-input-to-capacity --moe-token-drop-policy position", "", None,
         ("--moe-pad-expert-input-to-capacity and --moe-token-drop-policy position have no effect without"
          " --moe-expert-capacity-factor: nothing is dropped\n  fix: add --moe-expert-capacity-factor 1.25")),
    ],
    "shared_expert_has_a_size": [
        ("--num-experts 4 --moe-shared-expert-gate", "", None,
         ("--moe-shared-expert-gate has no effect without --moe-shared-expert-intermediate-size\n"
          "  fix: give the width of the shared MLP, or leave the gate out")),
    ],
    "dispatcher_is_supported": [
        ("--num-experts 4 --moe-token-dispatcher-type flex", "", None,
         ("--moe-token-dispatcher-type flex stands for libraries (DeepEP, HybridEP) that are not used here\n"
          "  fix: use --moe-token-dispatcher-type alltoall")),
    ],
    "experts_have_no_biases": [
        ("--num-experts 4", "--disable-bias-linear", None,
         "--num-experts with biases of linear layers is not there yet\n  fix: add --disable-bias-linear"),
    ],
    "experts_require_uniform_layers": [
        (f"--num-experts 4 {LAYERS} {layers('4', '96')}", "", None,
         ("--num-experts and --heterogeneous-layers-config-path do not go together yet: the file names no experts\n"
          "  fix: use --moe-layer-freq")),
    ],
    "experts_require_sequence_parallel": [
        ("--num-experts 4 --tensor-model-parallel-size 2", "", Facts(world_size=2),
         ("a layer with experts under --tensor-model-parallel-size 2 needs --sequence-parallel, as in Megatron-LM\n"
          "  fix: add --sequence-parallel")),
    ],
    "shared_expert_divides_over_tp_ranks": [
        (("--num-experts 4 --moe-shared-expert-intermediate-size 33 --tensor-model-parallel-size 2"
          " --sequence-parallel"), "", Facts(world_size=2),
         ("--moe-shared-expert-intermediate-size 33 does not divide over --tensor-model-parallel-size 2\n"
          "  fix: use --moe-shared-expert-intermediate-size 34")),
    ],
    "hidden_size_divides_over_heads": [
        ("--hidden-size 62", "", None,
         "--hidden-size 62 does not divide over --num-attention-heads 4\n  fix: use --hidden-size 64"),
    ],
    "hidden_size_divides_over_tp_ranks": [
        ("--num-attention-heads 6 --kv-channels 2 --ffn-hidden-size 9 --tensor-model-parallel-size 3", "",
         Facts(world_size=3),
         ("--hidden-size 64 does not divide over --tensor-model-parallel-size 3\n"
         "  fix: use --hidden-size 66, or --tensor-model-parallel-size 2")),
    ],
    "ffn_size_divides_over_tp_ranks": [
        ("--ffn-hidden-size 101 --tensor-model-parallel-size 2", "", Facts(world_size=2),
         "--ffn-hidden-size 101 does not divide over --tensor-model-parallel-size 2\n  fix: use --ffn-hidden-size 102"),
    ],
    "ffn_size_is_positive": [
        ("--hidden-size 16", "", None, "gives an MLP of width 0, down to a multiple of 64\n  fix: give --ffn-hidden-size"),
    ],
    "rotary_channels_are_even": [
        ("--kv-channels 15", "", None, ("--kv-channels 15 is odd, and rotary embeddings turn pairs of channels\n"
         "  fix: use --kv-channels 16")),
        ("--rotary-percent 0.2", "", None, ("--rotary-percent 0.2 of --kv-channels 16 is 3 channels, and rotary embeddings"
         " turn pairs of them\n  fix: use --rotary-percent 0.25")),
    ],
    "layers_divide_over_stages": [
        ("--pipeline-model-parallel-size 3", "", Facts(world_size=3),
         ("--num-layers 4 do not divide over --pipeline-model-parallel-size 3\n"
         "  fix: use --pipeline-model-parallel-size 2, or --num-layers 6")),
    ],
    "ranks_hold_whole_replicas": [
        ("--pipeline-model-parallel-size 2", "", Facts(world_size=3),
         ("3 ranks were started, which is no multiple of --tensor-model-parallel-size 1 * --pipeline-model-parallel-size 2"
         " = 2\n  fix: start 4 ranks")),
        ("--pipeline-model-parallel-size 2 --dry-run --world-size 3", "", Facts(world_size=3),
         ("--world-size 3 is no multiple of --tensor-model-parallel-size 1 * --pipeline-model-parallel-size 2 = 2\n"
          "  fix: use --world-size 4")),
        ("--context-parallel-size 3 --seq-length 48", "", Facts(world_size=4),
         ("4 ranks were started, which is no multiple of --tensor-model-parallel-size 1 * --context-parallel-size 3 *"
          " --pipeline-model-parallel-size 1 = 3\n  fix: start 6 ranks")),
    ],
    "ranks_hold_all_experts": [
        (f"{FOUR} --expert-model-parallel-size 4 --pipeline-model-parallel-size 2", "", Facts(world_size=12),
         ("12 ranks were started, which is no multiple of --expert-tensor-parallel-size 1 *"
          " --expert-model-parallel-size 4 * --pipeline-model-parallel-size 2 = 8\n  fix: start 16 ranks")),
    ],
    "expert_ranks_match_dense_ranks": [
        ((f"{FOUR} --sequence-parallel --expert-model-parallel-size 4 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
          " --expert-tensor-parallel-size 1 --use-tp-pp-dp-mapping"), "", Facts(world_size=8),
         ("--expert-tensor-parallel-size 1 * --expert-model-parallel-size 4 = 4 must be --tensor-model-parallel-size 2 *"
          " --context-parallel-size 1 = 2\n  fix: leave --use-tp-pp-dp-mapping out, or make them equal"
          " (--expert-tensor-parallel-size 1 --expert-model-parallel-size 2)")),
        (f"{FOUR} --context-parallel-size 2 --pipeline-model-parallel-size 2 --use-tp-pp-dp-mapping", "",
         Facts(world_size=4), "--expert-model-parallel-size 1 = 1 must be --tensor-model-parallel-size 1 * --context-parallel-size 2 = 2"),
    ],
    "expert_ranks_have_experts": [
        ("--expert-model-parallel-size 2", "", Facts(world_size=2),
         "--expert-model-parallel-size 2 has no effect without --num-experts\n  fix: add --num-experts"),
        ("--expert-tensor-parallel-size 2", "", Facts(world_size=2), "--expert-tensor-parallel-size 2 has no effect"),
    ],
    "experts_divide_over_ep_ranks": [
        (f"{FOUR} --expert-model-parallel-size 3", "", Facts(world_size=3),
         ("--num-experts 4 do not divide over --expert-model-parallel-size 3\n"
          "  fix: use --expert-model-parallel-size 2, or --num-experts 6")),
    ],
    "expert_width_divides_over_etp_ranks": [
        (f"{FOUR} --moe-ffn-hidden-size 33 --expert-tensor-parallel-size 2", "", Facts(world_size=2),
         ("--moe-ffn-hidden-size 33 does not divide over the 2 ranks of --expert-tensor-parallel-size (left out:"
          " --tensor-model-parallel-size)\n  fix: use --expert-tensor-parallel-size 1, or --moe-ffn-hidden-size 34")),
    ],
    "world_size_is_for_dry_runs": [
        ("--world-size 8", "", None,
         ("--world-size 8 is for --dry-run alone: a run has the ranks that are started\n"
          "  fix: add --dry-run, or leave --world-size out and start the ranks")),
    ],
    "global_batch_divides_into_passes": [
        ("--global-batch-size 9", "", Facts(world_size=2),
         ("--global-batch-size 9 is no multiple of --micro-batch-size 2 * data-parallel size 2 = 4\n"
         "  fix: use --global-batch-size 12")),
        ("--global-batch-size 3 --decrease-batch-size-if-needed", "", Facts(world_size=2),
         ("--global-batch-size 3 is less than --micro-batch-size 2 * data-parallel size 2 = 4:"
         " --decrease-batch-size-if-needed leaves nothing of it\n  fix: use --global-batch-size 4")),
    ],
    "sharding_settings_agree": [
        ("--no-use-distributed-optimizer --data-parallel-sharding-strategy optim_grads", "", Facts(world_size=4),
         ("--data-parallel-sharding-strategy optim_grads spreads optimizer state, and --no-use-distributed-optimizer does"
          " not\n  fix: leave one of them out")),
        ("--no-use-distributed-optimizer --use-megatron-fsdp", "", Facts(world_size=4),
         "--use-megatron-fsdp spreads optimizer state, and --no-use-distributed-optimizer does not"),
        ("--use-distributed-optimizer --data-parallel-sharding-strategy no_shard", "", Facts(world_size=4),
         "--data-parallel-sharding-strategy no_shard spreads nothing, and --use-distributed-optimizer does"),
    ],
    "instances_divide_replicas_of_experts": [
        (f"{FOUR} --expert-model-parallel-size 4 --num-distributed-optimizer-instances 2", "", Facts(world_size=4),
         ("--num-distributed-optimizer-instances 2 do not divide 1 replicas of experts (4 ranks / (expert-model-parallel 4 *"
          " expert-tensor-parallel 1 * pipeline-model-parallel 1))\n  fix: use --num-distributed-optimizer-instances 1")),
    ],
    "instances_divide_replicas": [
        ("--num-distributed-optimizer-instances 3", "", Facts(world_size=4),
         ("--num-distributed-optimizer-instances 3 do not divide 4 data-parallel ranks\n"
          "  fix: use --num-distributed-optimizer-instances 2")),
        ("--num-distributed-optimizer-instances 3 --context-parallel-size 2", "", Facts(world_size=4),
         ("--num-distributed-optimizer-instances 3 do not divide 4 replicas (data-parallel 2 * context-parallel 2)\n"
          "  fix: use --num-distributed-optimizer-instances 2")),
    ],
    "cp_comm_type_is_known": [
        ("--cp-comm-type ring", "", None,
         ("--cp-comm-type ring is none of p2p, all_gather, a2a, a2a+p2p, a2a+all_gather\n"
          "  fix: use --cp-comm-type p2p")),
    ],
    "levels_multiply_to_context_ranks": [
        ("--cp-comm-type a2a+p2p --context-parallel-size 4", "", Facts(world_size=4),
         ("--cp-comm-type a2a+p2p needs two sizes of at least 2 whose product is --context-parallel-size 4, not none\n"
          "  fix: use --hierarchical-context-parallel-sizes 2 2")),
        ("--cp-comm-type a2a+p2p --context-parallel-size 8 --hierarchical-context-parallel-sizes 3 2", "",
         Facts(world_size=8),
         ("--context-parallel-size 8, not --hierarchical-context-parallel-sizes 3 2\n"
          "  fix: use --hierarchical-context-parallel-sizes 2 4")),
        ("--cp-comm-type a2a+p2p --context-parallel-size 2 --hierarchical-context-parallel-sizes 2 1", "",
         Facts(world_size=2), "not --hierarchical-context-parallel-sizes 2 1\n  fix: use --cp-comm-type p2p"),
    ],
    "heads_divide_over_context_ranks": [
        ("--cp-comm-type a2a --context-parallel-size 8", "", Facts(world_size=8),
         ("layer 0 (from 0) has 4 heads and 4 query groups per tensor-parallel rank, which do not divide over them\n"
          "  fix: use --cp-comm-type p2p")),
    ],
    "cp_comm_type_is_given_per_layer": [
        ("--cp-comm-type all_gather all_gather all_gather", "", None,
         ("--cp-comm-type has 3 entries for 4 layers\n"
          "  fix: give one for all layers, such as --cp-comm-type all_gather, or one for each layer")),
    ],
    "chunk_means_exclude_per_token_loss": [
        ("--context-parallel-chunk-means --calculate-per-token-loss", "", None,
         "--calculate-per-token-loss averages all tokens\n  fix: leave one of them out"),
    ],
    "sequence_divides_over_context_ranks": [
        ("--context-parallel-size 4 --seq-length 20", "", Facts(world_size=4),
         ("--seq-length 20 is no multiple of 8: --context-parallel-size 4 needs two chunks per rank\n"
          "  fix: use --seq-length 24")),
        ("--context-parallel-size 2 --tensor-model-parallel-size 4 --sequence-parallel --seq-length 12", "",
         Facts(world_size=8),
         ("--seq-length 12 is no multiple of 8: --context-parallel-size 2 needs two chunks per rank and"
          " --sequence-parallel over --tensor-model-parallel-size 4\n  fix: use --seq-length 16")),
    ],
    "bf16_reduction_requires_bf16_weights": [
        ("--grad-reduce-in-bf16", "", None, "--grad-reduce-in-bf16 with float32 weights: sums over ranks would have fewer digits"),
    ],
    "sequence_divides_over_tp_ranks": [
        ("--seq-length 127 --tensor-model-parallel-size 2 --sequence-parallel", "", Facts(world_size=2),
         ("--seq-length 127 does not divide over --tensor-model-parallel-size 2, as --sequence-parallel needs\n"
         "  fix: use --seq-length 128")),
    ],
    "padded_vocabulary_divides_over_tp_ranks": [
        ("--padded-vocab-size 101 --tensor-model-parallel-size 2", "", Facts(world_size=2),
         "--padded-vocab-size 101 does not divide over --tensor-model-parallel-size 2\n  fix: use --padded-vocab-size 102"),
    ],
    "sequence_fits_the_model": [
        ("--max-position-embeddings 64", "", None,
         "--seq-length 128 is longer than --max-position-embeddings 64\n  fix: use --max-position-embeddings 128"),
    ],
    "training_has_one_length": [
        ("", "--train-iters", None, "neither --train-iters nor --train-samples is given\n  fix: say how long to train"),
        ("--train-samples 50", "", None,
         "--train-iters 10 and --train-samples 50 both say how long to train\n  fix: give one of them"),
    ],
    "kernels_can_be_compiled": [
        ("", "", Facts(device="cuda", has_triton=False),
         ("Triton, which compiles the kernels of a run on GPUs, is not installed\n"
         "  fix: install the triton that this torch names as its requirement, or use --no-compile, which is slower")),
    ],
    "samples_fill_a_batch": [
        ("--train-samples 1 --eval-iters 0", "--train-iters", None,
         "--train-samples 1 do not fill one --global-batch-size 2\n  fix: use --train-samples 2 or more"),
    ],
    "warmup_has_one_length": [
        ("--lr-warmup-fraction 0.1 --lr-warmup-iters 1", "", None,
         "--lr-warmup-fraction 0.1 and --lr-warmup-iters 1 all say how long warm-up takes\n  fix: give one of them"),
    ],
    "decay_has_one_length": [
        ("--lr-decay-iters 9 --lr-decay-samples 18", "", None,
         "--lr-decay-iters 9 and --lr-decay-samples 18 both say when the decay ends\n  fix: give one of them"),
    ],
    "warmup_ends_before_decay": [
        ("--lr-warmup-iters 10", "", None, "warm-up takes 20 samples, and the decay ends at 20\n  fix: shorten warm-up"),
    ],
    "learning_rates_are_in_order": [
        ("--min-lr 1", "", None, "--min-lr 1.0 is above --lr 0.001\n  fix: use --min-lr 0.001 or less"),
        ("--lr-warmup-init 1", "", None, "--lr-warmup-init 1.0 is above --lr 0.001"),
    ],
    "batch_sizes_are_valid": [
        ("--global-batch-size 16 --rampup-batch-size 4 4 --train-samples 99", "--train-iters", None,
         "--rampup-batch-size 4 4: these are not three whole numbers\n  fix: give start, increment and samples"),
        ("--global-batch-size 16 --rampup-batch-size 4 0 9 --train-samples 99", "--train-iters", None, "a number is 0"),
        ("--global-batch-size 16 --rampup-batch-size 16 4 9 --train-samples 99", "--train-iters", None,
         "starts at --global-batch-size 16 or above\n  fix: start lower"),
        ("--global-batch-size 16 --rampup-batch-size 4 5 9 --train-samples 99", "--train-iters", None,
         "steps of 5 do not lead from 4 to --global-batch-size 16\n  fix: use an increment that divides 12"),
        ("--global-batch-size 16 --rampup-batch-size 4 3 9 --train-samples 99", "--train-iters", None,
         ("--rampup-batch-size comes to a batch of 7, which is no multiple of --micro-batch-size 2 * data-parallel size 1"
         " = 2\n  fix: use batches that are multiples of 2, or add --decrease-batch-size-if-needed")),
        ("--step-batch-size-schedule 0:4,1k:5 --train-samples 99 --eval-global-batch-size 4", "--train-iters", None,
         ("--step-batch-size-schedule comes to a batch of 5, which is no multiple of --micro-batch-size 2 * data-parallel"
         " size 1 = 2\n  fix: use batches that are multiples of 2")),
        ("--step-batch-size-schedule 0:4,1k:8 --train-samples 99 --global-batch-size 8", "--train-iters", None,
         "--step-batch-size-schedule and --global-batch-size both say how large a batch is\n  fix: give one of them"),
        ("--step-batch-size-schedule 1k:8 --train-samples 99", "--train-iters", None,
         "--step-batch-size-schedule '1k:8': no threshold is 0\n  fix: say which batch comes first"),
    ],
    "changing_batches_require_samples": [
        ("--global-batch-size 16 --rampup-batch-size 4 4 9", "", None,
         ("--train-iters 10 counts iterations, which differ in size with --rampup-batch-size\n"
         "  fix: use --train-samples, as Megatron-LM asks for too")),
        ("--step-batch-size-schedule 0:4,1k:8 --train-samples 99 --lr-warmup-iters 1", "--train-iters", None,
         "--lr-warmup-iters 1 counts iterations, which differ in size with --step-batch-size-schedule\n  fix: use --lr-w"),
    ],
    "wsd_decay_has_one_length": [
        ("--lr-decay-style WSD", "", None,
         "--lr-decay-style WSD does not say how long the decay at its end takes\n  fix: give --lr-wsd-decay-iters"),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 2 --lr-wsd-decay-samples 4", "", None,
         "--lr-wsd-decay-iters 2 and --lr-wsd-decay-samples 4 both say how long the decay takes\n  fix: give one"),
    ],
    "wsd_decay_fits_the_schedule": [
        ("--lr-decay-style WSD --lr-wsd-decay-iters 20", "", None,
         "the decay of WSD takes 40 samples, and ends at sample 20\n  fix: shorten it"),
    ],
    "weight_decay_schedule_is_complete": [
        ("--start-weight-decay 0.1", "", None,
         ("--start-weight-decay 0.1 is given, and --weight-decay-incr-style is constant\n"
         "  fix: use --weight-decay-incr-style linear or cosine")),
        ("--weight-decay-incr-style linear", "", None,
         "--weight-decay-incr-style linear does not say from where to where\n  fix: give --start-weight-decay"),
        ("--weight-decay-incr-style linear --start-weight-decay 0.2 --end-weight-decay 0.1", "", None,
         "--end-weight-decay 0.1 is below --start-weight-decay 0.2"),
    ],
    "decoupled_rates_are_in_order": [
        ("--decoupled-min-lr 0.1", "", None, "--decoupled-min-lr 0.1 has no effect without --decoupled-lr"),
        ("--decoupled-lr 1e-4 --min-lr 5e-4", "", None,
         "--min-lr 0.0005 is above --decoupled-lr 0.0001\n  fix: use --decoupled-min-lr 0.0001 or less"),
        ("--decoupled-lr 1e-4 --decoupled-min-lr 1e-3", "", None, "--decoupled-min-lr 0.001 is above --decoupled-lr 0.0001"),
    ],
    "offload_fraction_requires_offload": [
        ("--optimizer-offload-fraction 0.5", "", None,
         "--optimizer-offload-fraction 0.5 has no effect without --optimizer-cpu-offload\n  fix: add --optimizer-cpu-offload"),
    ],
    "schedules_have_one_source": [
        ("--override-opt-param-scheduler --use-checkpoint-opt-param-scheduler", "", None,
         "--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler contradict each other"),
    ],
    "loss_scale_is_in_range": [
        ("--fp16 --initial-loss-scale 4 --min-loss-scale 8", "", None,
         "--min-loss-scale 8 is above --initial-loss-scale 4\n  fix: use --min-loss-scale 4 or less"),
    ],
    "exit_signal_is_valid": [
        ("--exit-signal SIGKILL", "", None, "--exit-signal SIGKILL is no signal that can be caught\n  fix: use a name"),
        ("--exit-signal 99", "", None, "--exit-signal 99 is no signal that can be caught"),
    ],
    "data_has_one_source": [
        (NULL, "--mock-data", None,
         "there is nothing to train on: neither --data-path nor --mock-data is given\n  fix: give --data-path PREFIX"),
        ("--data-path a", "", None,
         "--data-path and --mock-data both name what to train on\n  fix: keep one of them (only --train-data-path"),
        (f"{NULL} --data-path a --train-data-path b", "--mock-data", None,
         "--data-path and --train-data-path both name what to train on"),
        (f"{NULL} --valid-data-path a", "--mock-data", None,
         "there is nothing to train on: --train-data-path is not given\n  fix: give --train-data-path"),
    ],
    "blends_have_positive_weights": [
        (f"{NULL} --data-path 1 a 0 b", "--mock-data", None,
         "--data-path: the weight of b is 0\n  fix: give every dataset a weight above 0"),
        (f"{NULL} --train-data-path 1 a -2 b", "--mock-data", None, "--train-data-path: the weight of b is -2"),
        (f"{NULL} --data-path nan a 1 b", "--mock-data", None, "--data-path: the weight of a is nan"),
        (f"{NULL} --data-path 1e308 a 1e308 b", "--mock-data", None, "--data-path: the weights add up to infinity"),
    ],
    "splits_hold_sequences": [
        (f"{NULL} --data-path d", "--mock-data", Facts(datasets=(dataset("d", 300),)),
         ("--split '969, 30, 1' of the 300 sequences of d is train 291, valid 9, test 0: samples are asked of test, which"
         " has none\n  fix: --split 290,9,1, or ask for no samples there (--eval-iters 0)")),
        (f"{NULL} --data-path 1 d 1 e --split 0,1,1", "--mock-data", Facts(datasets=(dataset("d", 300), dataset("e", 400))),
         "train 0, valid 150, test 150: samples are asked of train, which has none (1 other datasets"),
    ],
    "full_validation_excludes_weights": [
        (f"{NULL} --data-path 1 d --full-validation", "--mock-data", Facts(datasets=(dataset("d", 9999, weight=1.0),)),
         "--full-validation reads validation data whole, and weights ask for shares of a number of samples\n  fix: leave out"),
    ],
    "validation_sets_are_separate": [
        (f"{NULL} --data-path d --full-validation --multiple-validation-sets", "--mock-data", Facts(datasets=(dataset("d", 9999),)),
         "--multiple-validation-sets is given, but no validation data of its own\n  fix: name the sets with --valid-data-path"),
        (f"{NULL} --train-data-path d --valid-data-path e --multiple-validation-sets", "--mock-data",
         Facts(datasets=(dataset("d", 9, split="train"), dataset("e", 9, split="valid"))),
         "--multiple-validation-sets is given without --full-validation\n  fix: add --full-validation"),
    ],
    "document_ends_have_one_source": [
        ("--dataloader-inter-document-masking --reset-attention-mask", "", None,
         "--dataloader-inter-document-masking takes documents as they are stored"),
    ],
    "seed_is_in_range": [
        (f"--seed {2**32}", "", None, "--seed 4294967296 is too large to shuffle data by\n  fix: use a number from 0 to 4294967295"),
    ],
    "no_data_sharding_requires_cyclic": [
        ("--no-data-sharding", "", None,
         "--no-data-sharding has no effect with --dataloader-type single\n  fix: add --dataloader-type cyclic"),
    ],
    "evaluation_batch_divides_into_passes": [
        ("--eval-global-batch-size 7", "", None,
         "--eval-global-batch-size 7 is no multiple of --micro-batch-size 2 * data-parallel size 1 = 2\n  fix: use"),
    ],
    "split_is_valid": [
        (f"{NULL} --data-path a --split 1,2,3,4", "--mock-data", None, "--split '1,2,3,4' has 4 shares\n  fix: give up to"),
        (f"{NULL} --data-path a --split 1,-2", "--mock-data", None, "'1,-2' holds something that is no number of 0 or more"),
        (f"{NULL} --data-path a --split 0,0", "--mock-data", None, "--split '0,0' gives no data to any split"),
    ],
    "vocabulary_is_known": [
        ("--tokenizer-type HuggingFaceTokenizer", "", None,
         "HuggingFaceTokenizer is given without --tokenizer-model\n  fix: give --tokenizer-model"),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model x", "--vocab-size", None,
         "HuggingFaceTokenizer: the size of its vocabulary is not known\n  fix: check that its files can be read"),
        ("--tokenizer-model x", "", None,
         "--tokenizer-model x is given without --tokenizer-type\n  fix: add --tokenizer-type HuggingFaceTokenizer, Sent"),
        ("--vocab-file v --merge-file m", "", None,
         ("--vocab-file v and --merge-file m are given without --tokenizer-type\n"
          "  fix: add --tokenizer-type GPT2BPETokenizer")),
        ("--tokenizer-type GPT2BPETokenizer --vocab-file v", "", None,
         "GPT2BPETokenizer is given without --merge-file\n  fix: give --merge-file, the merges.txt that belongs to it"),
        (f"{NULL} --merge-file m", "", None,
         ("--merge-file m is not read by --tokenizer-type NullTokenizer\n"
          "  fix: leave it out, or use --tokenizer-type GPT2BPETokenizer")),
        ("--tokenizer-type SFTTokenizer --tokenizer-model x", "", None,
         "--tokenizer-type SFTTokenizer is not there\n  fix: use --tokenizer-type HuggingFaceTokenizer"),
        (NULL, "--vocab-size", None, "NullTokenizer is given without --vocab-size\n  fix: give --vocab-size"),
        ("", "--vocab-size", None, "there is no tokenizer: --tokenizer-type is not given\n  fix: give --tokenizer-type"),
        ("--data-path a", "--mock-data", None, "there is no tokenizer: --tokenizer-type is not given"),
    ],
    "end_of_document_is_known": [
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model x --data-path a --eod-mask-loss", "--mock-data",
         Facts(vocab_size=100), ("--eod-mask-loss needs an end-of-document token, and x names none\n"
         '  fix: put {"eos_token": "..."} with a token of the vocabulary into tokenizer_config.json')),
        ("--tokenizer-type Llama2Tokenizer --tokenizer-model x", "", Facts(vocab_size=100),
         "--mock-data needs an end-of-document token, and x names none\n  fix: use a model that was trained with an end"),
    ],
    "padded_vocabulary_holds_all_tokens": [
        ("--padded-vocab-size 99", "", None, "--padded-vocab-size 99 is too small for 100 tokens\n  fix: leave"),
    ],
    "device_is_available": [
        ("--device cuda", "", None, "--device cuda is asked for, and no GPU was found\n  fix: use --device cpu"),
    ],
    "each_rank_has_a_gpu": [
        ("", "", Facts(device="cuda", world_size=8, ranks_per_node=8, devices_per_node=4),
         "8 ranks were started on a node on which 4 GPUs are visible\n  fix: use torchrun --nproc-per-node 4"),
    ],
    "gpus_require_nccl": [
        ("--distributed-backend gloo", "", CUDA, "--distributed-backend gloo does not carry the collectives of --device cuda"),
    ],
    "dtypes_agree": [
        ("--bf16 --params-dtype float32", "", None, "--bf16 and --params-dtype float32 contradict each other"),
        ("--params-dtype bfloat16", "", None, "--params-dtype bfloat16 is given without --bf16\n  fix: add --bf16"),
        ("--params-dtype float16", "", None, "--params-dtype float16 is given without --fp16\n  fix: add --fp16"),
        ("--fp16 --params-dtype float32", "", None, "--fp16 and --params-dtype float32 contradict each other"),
        ("--fp16 --bf16", "", None, "--bf16 and --fp16 contradict each other\n  fix: leave one of them out"),
    ],
    "save_interval_has_a_folder": [
        ("--save-interval 5", "", None, "--save-interval 5 is given without --save\n  fix: add --save FOLDER"),
    ],
    "missing_checkpoint_has_one_answer": [
        ("--load a --load-or-start --exit-on-missing-checkpoint", "", None,
         "--load-or-start and --exit-on-missing-checkpoint contradict each other"),
        ("--load-or-start", "", None, "--load-or-start is given without --load\n  fix: add --load FOLDER"),
    ],
    "optional_packages_are_installed": [
        ("--tensorboard-dir tb", "", None,
         "--tensorboard-dir tb needs the package tensorboard, which is not installed\n  fix: pip install tensorboard, or"),
        ("--wandb-project p", "", Facts(libraries={"tensorboard": "2"}),
         "--wandb-project p needs the package wandb, which is not installed\n  fix: pip install wandb, or"),
    ],
    "profiled_iterations_and_ranks_exist": [
        ("--profile --profile-step-start 5 --profile-step-end 5", "", None,
         "--profile-step-end 5 is not above --profile-step-start 5\n  fix: use --profile-step-end 7"),
        ("--profile --profile-ranks 0 2", "", None,
         "--profile-ranks names rank 2, and there are 1 ranks\n  fix: name ranks from 0 to 0"),
    ],
    "transformer_engine_is_installed": [
        (f"{ENGINE} --bf16", "", CUDA,
         ("--transformer-impl transformer_engine: Transformer Engine is not installed\n"
         "  fix: install it (pip install --no-build-isolation transformer_engine[pytorch],")),
        (f"{ENGINE} --bf16", "", Facts(device="cuda", libraries={"transformer_engine": "2.9.0"}),
         ("--transformer-impl transformer_engine: Transformer Engine 2.9.0 is installed, and 2.20 or later is needed\n"
         "  fix: install a later one, or use --transformer-impl local")),
    ],
    "transformer_engine_supports_this": [
        (f"{ENGINE} --bf16 --context-parallel-size 2 --reset-attention-mask", "", TWO_WITH_ENGINE,
         ("--transformer-impl transformer_engine does not have documents in attention with --context-parallel-size 2: it"
         " divides each of them over the ranks, which hold parts of whole samples here\n"
         "  fix: leave --context-parallel-size out, or use --transformer-impl local")),
        (f"{ENGINE} --bf16 --context-parallel-size 2 --cp-comm-type a2a --group-query-attention --num-query-groups 1", "",
         TWO_WITH_ENGINE,
         ("--transformer-impl transformer_engine does not have --cp-comm-type a2a between 2 ranks with 1 query groups on each"
         " tensor rank (layer 0, from 0): it copies no keys and values\n"
         "  fix: use --cp-comm-type p2p, or use --transformer-impl local")),
        (f"{ENGINE} --bf16 --context-parallel-size 4 --cp-comm-type a2a+all_gather --hierarchical-context-parallel-sizes 2 2",
         "", Facts(device="cuda", world_size=4, libraries={"transformer_engine": "2.20.2"}),
         ("--transformer-impl transformer_engine does not have --cp-comm-type a2a+all_gather, which windows make of a2a+p2p,"
         " too\n  fix: use --cp-comm-type all_gather, or use --transformer-impl local")),
        (f"{ENGINE} --bf16", "", Facts(libraries={"transformer_engine": "2.20.2"}),
         ("--transformer-impl transformer_engine computes on GPUs, and this run on cpu\n"
         "  fix: use --transformer-impl local")),
        (ENGINE, "", WITH_ENGINE,
         ("--transformer-impl transformer_engine computes in bf16 or fp16, and this run in float32\n"
         "  fix: add --bf16, or use --transformer-impl local")),
        *[(f"{ENGINE} --bf16 {flags}", without, WITH_ENGINE,
           f"--transformer-impl transformer_engine does not have {said}")
          for flags, without, said in (
            ("--attention-dropout 0.1", "--attention-dropout",
             ("--attention-dropout 0.1 that is the same under every layout\n"
             "  fix: use --attention-dropout 0, or use --transformer-impl local")),
            ("--attn-logit-softcapping 30", "", "--attn-logit-softcapping 30.0 in its fused kernels\n  fix: leave it out"),
            ("--softmax-type learnable", "", "--softmax-type learnable here\n  fix: use --softmax-type vanilla"),
            ("", "--swiglu", "exact GELU, which this run has without --swiglu and its like\n  fix: leave out what asks"),
            ("--quick-geglu --activation-func-clamp-value 7", "--swiglu",
             "--activation-func-clamp-value 7.0\n  fix: leave it out"),
            ("--quick-geglu --glu-linear-offset 1", "--swiglu", "--glu-linear-offset 1.0\n  fix: leave it out"),
            ("--qk-layernorm --qk-layernorm-width all_heads", "",
             "--qk-layernorm-width all_heads, a norm over heads of several ranks\n  fix: use --qk-layernorm-width head"),
            ("--fp32-residual-connection", "", "--fp32-residual-connection: its norms read"),
            ("--recompute-norms", "", "--recompute-norms: its norms keep what they give\n  fix: leave it out"),
            ("--recompute-granularity selective --recompute-modules layernorm", "",
             "--recompute-modules layernorm: its norms keep what they give\n  fix: use --recompute-modules core_attn mlp"),
            ("--attention-backend flash", "",
             "--attention-backend flash: it chooses itself, or by NVTE_FLASH_ATTN and its like\n  fix: use --attention-backend auto, with"),
          )],
    ],
    "mlp_has_one_activation": [
        ("--squared-relu", "", None, "--swiglu and --squared-relu all say how the MLP is activated\n  fix: give one of them"),
    ],
    "gate_settings_have_an_effect": [
        ("--activation-func-clamp-value 7", "", None,
         ("--activation-func-clamp-value 7.0 has no effect without --quick-geglu, as in Megatron-LM\n"
         "  fix: leave it out, or add --quick-geglu")),
        ("--glu-linear-offset 1", "--swiglu", None,
         "--glu-linear-offset 1.0 has no effect on an MLP without a gate\n  fix: leave it out, or add --quick-geglu"),
    ],
    "learned_positions_have_a_length": [
        ("", "--position-embedding-type", None,
         ("--position-embedding-type learned_absolute (the default, as in Megatron-LM) has no number of positions\n"
         "  fix: give --max-position-embeddings 128, or use --position-embedding-type rope")),
        ("--position-embedding-type learned_absolute", "", None, "learned_absolute has no number of positions"),
    ],
    "rotary_settings_have_an_effect": [
        ("--position-embedding-type none --use-rope-scaling", "", None,
         "--use-rope-scaling has no effect with --position-embedding-type none\n  fix: leave it out, or use"),
        ("--position-embedding-type none --no-rope-freq 4", "", None,
         "--no-rope-freq 4 has no effect with --position-embedding-type none"),
    ],
    "yarn_has_an_original_length": [
        ("--position-embedding-type yarn", "", None,
         ("--position-embedding-type yarn is given without --yarn-original-max-position-embeddings\n"
         "  fix: give the longest sequence that the model was trained on before")),
    ],
    "layer_patterns_are_valid": [
        ("--no-rope-freq [1]*3", "", None,
         ("--no-rope-freq: [1]*3 has 3 entries, and there are 4 layers\n"
         "  fix: give a number N for every Nth layer, or a list such as [1]*3+[0]")),
        ("--window-size 8,0 --window-attn-skip-freq x", "", None,
         "--window-attn-skip-freq: 'x' is neither a number nor a list"),
        ("--window-size 8,0 --window-attn-skip-freq 0", "", None, "--window-attn-skip-freq: 0 is not 1 or more"),
    ],
    "window_is_causal": [
        ("--window-size 128", "", None, ("--window-size: '128' is not two numbers, tokens to the left and to the right\n"
         "  fix: give the tokens to the left and 0, such as --window-size 128,0")),
        ("--window-size 128,4", "", None, "'128,4' looks ahead: tokens to the right must be 0"),
        ("--window-attn-skip-freq 2", "", None,
         "--window-attn-skip-freq 2 has no effect without --window-size\n  fix: add --window-size"),
    ],
    "all_heads_norm_is_rms": [
        ("--qk-layernorm-width all_heads", "", None,
         "--qk-layernorm-width all_heads has no effect without --qk-layernorm\n  fix: add --qk-layernorm"),
        ("--qk-layernorm --qk-layernorm-width all_heads --normalization LayerNorm", "", None,
         ("--qk-layernorm-width all_heads is not there for --normalization LayerNorm\n"
         "  fix: use --normalization RMSNorm")),
    ],
    "layer_sizes_are_valid": [
        (f"{LAYERS} [{{}}]", "", None, "--heterogeneous-layers-config-encoded-json: there is no list `block_configs`"),
    ],
    "layers_divide_over_tp_ranks": [
        (f"{LAYERS} {layers('6', '64')}", "", None,
         "layer 0 (from 0) has 6 query groups, which do not divide its 4 heads\n  fix: use a divisor"),
        (f"{LAYERS} {layers('4', '65')} --tensor-model-parallel-size 2", "", Facts(world_size=2),
         ("layer 0 (from 0) has an MLP of width 65, which does not divide over --tensor-model-parallel-size 2\n"
         "  fix: use 66")),
        (f"{LAYERS} {layers('4', '96', '3')} {THREE}", "", Facts(world_size=3),
         "layer 0 (from 0) has 4 query groups, which do not divide over --tensor-model-parallel-size 3"),
        (f"{LAYERS} {layers('1', '64', '2')} --tensor-model-parallel-size 4", "", Facts(world_size=4),
         ("the query groups 1 (layer 0) and 2 (layer 1) are both fewer than --tensor-model-parallel-size 4, and key and"
         " value heads with different numbers of copies are not there yet\n  fix: use --tensor-model-parallel-size 1")),
    ],
    "stages_are_not_empty": [
        (f"{LAYERS} {NO_SECOND} --pipeline-model-parallel-size 4 --global-batch-size 8", "", Facts(world_size=4),
         ("layers 1 to 1 (from 0) have no parts, and are all of stage 1 of --pipeline-model-parallel-size 4\n"
         "  fix: use fewer stages")),
    ],
    "spec_names_a_function": [
        ("--spec gpt", "", None, "--spec gpt names no function of yours\n  fix: give file.py:function"),
        ("--spec a b c", "", None, "--spec a b c names no function of yours"),
        ("--spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec", "", None,
         "mamba_stack_spec names no function of yours"),
        ("--spec my.py:layers --spec-digest 12", "", Facts(custom_layers=CustomLayers(digest="34", layers=(), differences=())),
         ("--spec my.py:layers: the file has digest 34, and --spec-digest (of the saved configuration) is 12: it has"
         " changed since\n  fix: use the file of that run, or leave --spec-digest out")),
    ],
    "mup_settings_have_an_effect": [
        ("--mup-embedding-mult 2", "", None,
         "--mup-embedding-mult 2.0 has no effect without --use-mup\n  fix: add --use-mup"),
        ("--mup-base-hidden-size 32", "", None, "--mup-base-hidden-size 32 has no effect without --use-mup"),
        ("--use-mup --mup-base-head-dim 8 --softmax-scale 0.5", "", None,
         "--mup-base-head-dim 8 has no effect with --softmax-scale 0.5\n  fix: give one of them"),
    ],
    "mup_width_mult_matches_sizes": [
        ("--use-mup --mup-base-hidden-size 32 --mup-width-mult 4", "", None,
         ("--mup-width-mult 4 is not --hidden-size 64 / --mup-base-hidden-size 32 (Megatron-LM ignores it silently)\n"
         "  fix: leave it out, or use --mup-width-mult 2")),
        ("--use-mup --mup-base-hidden-size none --mup-width-mult 1 --mup-output-mult 1", "", None,
         "--mup-base-hidden-size none leaves --use-mup without a base"),
    ],
    "recomputation_is_complete": [
        ("--recompute-granularity full", "", None,
         ("--recompute-granularity full is given without --recompute-method and --recompute-num-layers\n"
         "  fix: add --recompute-method uniform --recompute-num-layers 1")),
        ("--recompute-granularity full --recompute-method block", "", None,
         "--recompute-granularity full is given without --recompute-num-layers"),
        ("--recompute-method block --recompute-granularity selective", "", None,
         "--recompute-method block has no effect without --recompute-granularity full\n  fix: add --recompute-granularity full"),
        ("--recompute-num-layers 1", "", None, "--recompute-num-layers 1 has no effect without --recompute-granularity full"),
        ("--recompute-norms --recompute-granularity full --recompute-method uniform --recompute-num-layers 1", "", None,
         ("--recompute-norms has no effect with --recompute-granularity full, which computes them twice anyway\n"
          "  fix: leave one of them out")),
        ("--recompute-activations --recompute-granularity full --recompute-method block --recompute-num-layers 1", "", None,
         "--recompute-granularity full and --recompute-activations (which is selective) contradict each other"),
    ],
    "recompute_modules_are_supported": [
        ("--recompute-modules mlp", "", None, "--recompute-modules mlp has no effect without --recompute-granularity selective"),
        ("--recompute-activations --recompute-modules mlp mla_up_proj", "", None,
         ("--recompute-modules mla_up_proj: not there yet\n"
          "  fix: use some of --recompute-modules core_attn mlp layernorm moe shared_experts moe_act")),
        ("--recompute-activations --recompute-modules mlp moe_act", "", None,
         "--recompute-modules moe_act has no effect without --num-experts\n  fix: leave it out, or use mlp"),
    ],
    "cublas_is_deterministic": [
        ("--deterministic-mode", "", Facts(device="cuda", cublas_workspace=":0:0"),
         ("--deterministic-mode: CUBLAS_WORKSPACE_CONFIG is ':0:0', with which matrix products may give other bits each"
          " time\n  fix: unset CUBLAS_WORKSPACE_CONFIG, or set it to :4096:8")),
    ],
    "implementation_is_deterministic": [
        ("--deterministic-mode --transformer-impl transformer_engine --bf16", "",
         Facts(device="cuda", libraries={"transformer_engine": "2.20.2"}),
         ("--deterministic-mode with --transformer-impl transformer_engine is not there yet on a GPU\n"
          "  fix: use --transformer-impl local, or leave --deterministic-mode out")),
    ],
    "restarts_keep_training_state": [
        ("--save r --load r --no-load-optim", "", None,
         "would drop the optimizer's state at every restart\n  fix: load from another folder"),
        ("--save r --load r --finetune", "", None,
         "would begin at iteration 0 at every restart\n  fix: load from another folder, or leave out --finetune"),
    ],
    "finetune_requires_load": [
        ("--finetune", "", None, "--finetune is given without --load\n  fix: add --load FOLDER"),
    ],
}  # fmt: skip
ELSEWHERE = {
    "cyclic_pass_size_matches_checkpoint",
    "data_matches_checkpoint",
    "settings_match_checkpoint",
    "tokenizer_matches_checkpoint",
    "schedules_match_checkpoint",
    "checkpoint_has_optimizer_state",
    "features_are_verified",
}


@pytest.mark.parametrize(
    ("flags", "without", "facts", "words"), [case for cases in CASES.values() for case in cases]
)
def test_a_rule_says_what_is_wrong_and_what_to_do(problems_of, flags, without, facts, words):
    problems = problems_of(flags, without=without, facts=facts)
    (problem,) = [one for one in problems if "not there yet" not in one] or problems
    assert words in problem


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            "--num-experts 4 --moe-router-load-balancing-type none",
            "--num-experts 4 here\n  fix: leave it out",
        ),
        ("--spec no.where:layers", "layers of one's own (--spec no.where:layers)\n  fix: leave --spec out"),
    ],
)
def test_layers_of_other_kinds_are_not_transformer_engines(problems_of, flags, words):
    """Other rules have something to say about these too."""
    found = problems_of(f"{ENGINE} --bf16 {flags}", facts=WITH_ENGINE)
    assert any(f"{ENGINE} does not have {words}" in problem for problem in found)


def test_the_working_run_breaks_no_rule(problems_of):
    assert problems_of() == []


def test_every_rule_has_a_case():
    assert set(CASES) | ELSEWHERE == {rule.__name__ for rule in RULES}
