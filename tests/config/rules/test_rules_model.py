"""Rules about the model and recomputation: each fires, names its flags and a remedy."""

from megatrain.config import Facts
from megatrain.config.model_spec.attention import AttentionSpec

CUDA = Facts(device="cuda")
A100 = Facts(
    device="cuda", device_name="NVIDIA A100", device_capability=(8, 0), libraries={"flash-attn-4": "4.0.0b36"}
)
TE = Facts(device="cuda", device_capability=(9, 0), libraries={"transformer_engine": "2.20.2"})
TWO = Facts(device="cuda", world_size=2)
WIDE_HEADS = AttentionSpec(num_heads=4, num_query_groups=4, head_dim=136)


CASES = {
    "mlp_chunks_are_supported": [
        ("--mlp-chunks-for-training 2 --bf16 --transformer-impl transformer_engine", "", TE,
         ("--mlp-chunks-for-training", "--transformer-impl transformer_engine"), ("--transformer-impl local",)),
        ("--mlp-chunks-for-training 2 --bf16 --fp8-format hybrid", "", None,
         ("--mlp-chunks-for-training", "FP8"), ("remove --mlp-chunks-for-training",)),
        ("--mlp-chunks-for-training 2 --tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap", "", TWO,
         ("--mlp-chunks-for-training", "--tp-comm-overlap"), ("remove --tp-comm-overlap",)),
        ("--mlp-chunks-for-training 2 --seq-length 64 --seq-length-schedule 0:16", "", None,
         ("--mlp-chunks-for-training", "--seq-length-schedule"), ("remove --mlp-chunks-for-training",)),
    ],
    "mlp_has_one_activation": [
        ("--squared-relu", "", None, ("--swiglu", "--squared-relu"), ("one of them",)),
    ],
    "clamp_is_of_quick_geglu": [
        ("--activation-func-clamp-value 7", "", None,
         ("--activation-func-clamp-value 7.0", "--quick-geglu"), ("--activation-func-clamp-value", "--quick-geglu")),
    ],
    "learned_positions_have_a_length": [
        ("", "--position-embedding-type", None,
         ("--position-embedding-type learned_absolute", "--max-position-embeddings"),
         ("--max-position-embeddings 128", "--position-embedding-type rope")),
        ("--position-embedding-type learned_absolute", "", None,
         ("--position-embedding-type learned_absolute", "--max-position-embeddings"),
         ("--max-position-embeddings 128", "--position-embedding-type rope")),
    ],
    "yarn_has_an_original_length": [
        ("--position-embedding-type yarn", "", None,
         ("--position-embedding-type yarn", "--yarn-original-max-position-embeddings"),
         ("--yarn-original-max-position-embeddings 4096",)),
    ],
    "rotary_channels_are_even": [
        ("--kv-channels 15", "", None, ("--kv-channels 15",), ("--kv-channels 16",)),
        ("--rotary-percent 0.2", "", None,
         ("--rotary-percent 0.2", "--kv-channels 16", "3 channels"), ("--rotary-percent 0.25",)),
    ],
    "layer_patterns_are_valid": [
        ("--no-rope-freq [1]*3", "", None, ("--no-rope-freq", "3 entries", "4 layers"), ("--no-rope-freq",)),
        ("--window-size 8,0 --window-attn-skip-freq x", "", None,
         ("--window-attn-skip-freq", "'x'"), ("--window-attn-skip-freq",)),
        ("--window-size 8,0 --window-attn-skip-freq 0", "", None,
         ("--window-attn-skip-freq",), ("--window-attn-skip-freq",)),
    ],
    "window_is_causal": [
        ("--window-size 128", "", None, ("--window-size", "'128'"), ("--window-size 128,0",)),
        ("--window-size 128,4", "", None, ("--window-size", "'128,4'"), ("--window-size 128,0",)),
    ],
    "mup_width_mult_matches_sizes": [
        ("--use-mup --mup-base-hidden-size 32 --mup-width-mult 4", "", None,
         ("--mup-width-mult 4", "--hidden-size 64", "--mup-base-hidden-size 32"), ("--mup-width-mult 2",)),
        ("--use-mup --mup-base-hidden-size none --mup-width-mult 1 --mup-output-mult 1", "", None,
         ("--mup-base-hidden-size none", "--use-mup"), ("--mup-base-hidden-size",)),
    ],
    "recomputation_is_complete": [
        ("--recompute-granularity full", "", None,
         ("--recompute-granularity full", "--recompute-method", "--recompute-num-layers"),
         ("--recompute-method uniform", "--recompute-num-layers 1")),
        ("--recompute-granularity full --recompute-method block", "", None,
         ("--recompute-granularity full", "--recompute-num-layers"),
         ("--recompute-method uniform", "--recompute-num-layers 1")),
        ("--recompute-activations --recompute-granularity full --recompute-method block --recompute-num-layers 1", "", None,
         ("--recompute-granularity full", "--recompute-activations"), ("remove --", ", or --")),
    ],
    "attention_backend_is_there": [
        ("--attention-backend flash4", "", None,
         ("--attention-backend flash4", "float32", "cpu"), ("--attention-backend auto",)),
        ("--attention-backend flash4 --bf16", "", CUDA,
         ("--attention-backend flash4", "not installed"), ("pip install", "--attention-backend auto")),
        ("--attention-backend flash4 --bf16", "", Facts(device="cuda", libraries={"flash-attn-4": "4.0.0b9"}),
         ("--attention-backend flash4", "4.0.0b9"), ("pip install", "--attention-backend auto")),
        ("--attention-backend flash4 --bf16 --no-compile", "", Facts(device="cuda", libraries={"flash-attn-4": "4.0.0b36"}),
         ("--attention-backend flash4", "--no-compile"), ("--attention-backend auto",)),
        ("--attention-backend flash4 --bf16", "", A100,
         ("--attention-backend flash4", "A100", "8.0"), ("--attention-backend auto",)),
        ("--attention-backend cudnn --bf16 --deterministic-mode", "", CUDA,
         ("--attention-backend cudnn", "--deterministic-mode"), ("--attention-backend auto",)),
        ("--attention-backend cudnn --bf16", "", Facts(device="cuda", device_name="Tesla V100", device_capability=(7, 0)),
         ("--attention-backend cudnn", "V100", "7.0"), ("--attention-backend auto",)),
        ("--attention-backend cudnn --bf16 --spec my.py:layers", "", Facts(device="cuda", digests={"model.spec": "1"}, custom_layers=lambda _, layers: tuple(one.with_part(WIDE_HEADS) for one in layers)),
         ("--attention-backend cudnn", "layer 0", "136"), ("--attention-backend auto",)),
        ("--attention-backend cudnn --bf16 --window-size 8,0 --reset-attention-mask", "", CUDA,
         ("--attention-backend cudnn", "documents", "windows"), ("--attention-backend auto",)),
        ("--attention-backend flash2 --bf16 --attention-dropout 0.1", "attention-dropout", CUDA,
         ("--attention-backend flash2", "--attention-dropout 0.1"),
         ("--attention-dropout 0", "--attention-backend auto")),
        ("--attention-backend sdpa --attn-logit-softcapping 50", "", None,
         ("--attention-backend sdpa", "--attn-logit-softcapping 50.0"), ("--attention-backend auto",)),
        ("--attention-backend sdpa --softmax-type off-by-one", "", CUDA,
         ("--attention-backend sdpa", "float32", "sinks"), ("--attention-backend auto",)),
        ("--attention-backend cudnn --kv-channels 192 --bf16", "", CUDA,
         ("--attention-backend cudnn", "--kv-channels", "192"), ("--attention-backend auto",)),
    ],
    "attention_has_a_kernel": [
        ("--kv-channels 100 --bf16 --softmax-type off-by-one --attention-dropout 0", "", CUDA,
         ("--attention-backend auto", "--kv-channels", "sinks", "100"), ("--attention-backend math",)),
        ("--attention-backend flash --bf16 --window-size 8,0", "", Facts(device="cuda", device_capability=(7, 5)),
         ("--attention-backend flash", "windows", "7.5"), ("--attention-backend math",)),
    ],
}  # fmt: skip


def test_a_problem_names_flags_and_remedy(assert_refused, flags, without, facts, named, remedy):
    assert_refused(flags, named, remedy, without=without, facts=facts)
