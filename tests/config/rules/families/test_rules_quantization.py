"""Rules about training aware of quantization: each names its flags and a remedy."""

from megatrain.config import Facts

QAT = "--qat int4 --qat-group-size 32"
TWO = Facts(world_size=2)
CASES = {
    "qat_covers_the_layers": [
        ("--qat int8 --num-experts 4", "", None, ("--qat int8", "has experts"), ("megatrain quantize",)),
        ("--qat int8 --multi-latent-attention --qk-head-dim 16 --qk-pos-emb-head-dim 16 --v-head-dim 16", "", None,
         ("--qat int8", "latent attention"), ("megatrain quantize",)),
    ],
    "groups_divide_inputs": [
        ("--qat int4", "", None, ("--qat-group-size 128", "64 inputs"), ("--qat-group-size",)),
        ("--qat int4 --qat-group-size 100", "", None, ("--qat-group-size 100", "64 inputs"), ("use --qat-group-size 64",)),
        ("--qat int4 --qat-group-size 64 --tensor-model-parallel-size 2", "", TWO, ("--qat-group-size 64", "32 inputs"), ("use --qat-group-size 32",)),
    ],
}  # fmt: skip


def test_a_problem_names_flags_and_remedy(assert_refused, flags, without, facts, named, remedy):
    assert_refused(flags, named, remedy, without=without, facts=facts)
