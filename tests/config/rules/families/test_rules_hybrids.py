"""Rules about hybrids: each fires, names its flags and a remedy."""

from megatrain.config import Facts

HYBRID = "--model-family hybrid --mamba-head-dim 2 --mamba-num-groups 2"
SPEC = "--spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec"
STAGES = "--pipeline-model-parallel-size 2"


def pattern(text: str, *more: str) -> str:
    return " ".join((f"{HYBRID} --hybrid-layer-pattern {text}", *more))


CASES = {
    "pattern_is_of_a_hybrid": [
        ("--hybrid-layer-pattern M*", "", None, ("--hybrid-layer-pattern M*", "gpt"), ("--model-family hybrid",)),
        (f"{HYBRID} --hybrid-attention-ratio 0.6 --hybrid-mlp-ratio 0.6", "", None,
         ("--hybrid-attention-ratio 0.6", "--hybrid-mlp-ratio 0.6"), ("use --hybrid-layer-pattern M-",)),
        (pattern("MX"), "--num-layers", None, ("--hybrid-layer-pattern", "'X'"),
         ("use --hybrid-layer-pattern M-", "G gated delta net", "P Mamba-2 and attention side by side")),
        (HYBRID, "--num-layers", None, ("has no --hybrid-layer-pattern",), ("use --hybrid-layer-pattern M-",)),
        (pattern("/M"), "", None, ("--hybrid-layer-pattern '/M' has no layers",), ("use --hybrid-layer-pattern M/M", "a letter for each layer")),
        (pattern("MD"), "", None, ("DeepSeek sparse attention (D)",), ("use --hybrid-layer-pattern M+",)),
        (pattern("ME"), "", None, ("experts (E)", "--num-experts"), ("add --num-experts 8",)),
        (pattern("M*", "--multi-latent-attention"), "", None, ("attention (*)", "--multi-latent-attention"),
         ("use multi-latent attention (+)",)),
        (pattern("P-", "--multi-latent-attention"), "", None, ("side by side (P)", "--multi-latent-attention"), ("use --hybrid-layer-pattern M+-",)),
        (pattern("P-", "--norm-position both"), "", None, ("side by side (P)", "--norm-position"), ("use --hybrid-layer-pattern M*-",)),
        (pattern("P", "--mamba-num-heads 3"), "", None, ("--mamba-num-heads 3",), ("use --mamba-num-groups 1",)),
        (pattern("M", "--mamba-num-heads 3"), "", None, ("--mamba-num-heads 3", "--mamba-num-groups 2"),
         ("use --mamba-num-groups 1",)),
        (pattern("M", "--mamba-num-groups 7"), "", None, ("2 * --hidden-size", "--mamba-num-groups 7"),
         ("use --mamba-num-heads 63",)),
        (pattern("M*/M", "--mtp-num-layers 2 --position-embedding-type rope"), "", None,
         ("1 depths", "--mtp-num-layers is 2"), ("as often as --mtp-num-layers",)),
    ],
    "pipeline_is_valid": [
        (pattern("M|*|-", STAGES), "", Facts(world_size=2), ("3 stages (|)", "--pipeline-model-parallel-size 2"),
         ("--pipeline-model-parallel-size 1", "end 2 stages")),
        (pattern("M|*", STAGES, "--num-virtual-stages-per-pipeline-rank 2"), "", Facts(world_size=2),
         ("2 stages (|)", "--num-virtual-stages-per-pipeline-rank"), ("or the signs | of the pattern",)),
        (pattern("M|*", STAGES, "--pipeline-schedule dualpipe-v"), "", Facts(world_size=2),
         ("2 model chunks per rank, not 1",), ("--hybrid-layer-pattern by `|` into 4 stages",)),
    ],
    "spec_is_of_the_family": [
        (SPEC, "", None, (SPEC, "--model-family hybrid", "gpt"), ("use --model-family hybrid", "remove --spec")),
    ],
}  # fmt: skip


def test_a_problem_names_flags_and_remedy(assert_refused, flags, without, facts, named, remedy):
    assert_refused(flags, named, remedy, without=without, facts=facts)
