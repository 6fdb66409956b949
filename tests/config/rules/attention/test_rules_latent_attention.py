"""Rules of multi-latent attention: each fires, names its flags and a remedy."""

import pytest

MLA = "--multi-latent-attention"

CASES = {
    "yarn_has_an_original_length": [
        (f"{MLA} --position-embedding-type yarn", "", None,
         ("--position-embedding-type yarn", MLA), ("--position-embedding-type rope --rope-type yarn",)),
        (f"{MLA} --yarn-original-max-position-embeddings none", "", None,
         ("--rope-type yarn", "--yarn-original-max-position-embeddings"),
         ("--yarn-original-max-position-embeddings 4096",)),
    ],
    "rotary_channels_of_latents_are_even": [
        (f"{MLA} --qk-pos-emb-head-dim 7", "", None,
         ("--qk-pos-emb-head-dim 7",), ("--qk-pos-emb-head-dim 8",)),
        (f"{MLA} --rope-type rope --qk-pos-emb-head-dim 8 --rotary-percent 0.4", "", None,
         ("--qk-pos-emb-head-dim 8", "--rotary-percent 0.4", "3 channels"), ("remove --rotary-percent",)),
    ],
    "values_are_not_wider_than_keys": [
        (f"{MLA} --qk-head-dim 8 --qk-pos-emb-head-dim 8 --v-head-dim 32", "", None,
         ("--v-head-dim 32", "--qk-head-dim 8", "--qk-pos-emb-head-dim 8"), ("--v-head-dim 16",)),
    ],
}  # fmt: skip


def test_a_problem_names_flags_and_remedy(assert_refused, flags, without, facts, named, remedy):
    assert_refused(flags, named, remedy, without=without, facts=facts)


@pytest.mark.parametrize(
    "flags",
    [
        MLA,
        f"{MLA} --rope-type rope --rotary-percent 0.5",
        f"{MLA} --position-embedding-type none",
        f"{MLA} --position-embedding-type learned_absolute --max-position-embeddings 128",
        f"{MLA} --q-lora-rank 8 --recompute-granularity selective --recompute-modules mla_up_proj core_attn",
        f"{MLA} --tensor-model-parallel-size 1 --softmax-scale 0.1",
        f"{MLA} --hidden-size 60 --num-attention-heads 7",
    ],
)
def test_other_combinations_resolve(problems_of, flags):
    assert problems_of(flags) == []
