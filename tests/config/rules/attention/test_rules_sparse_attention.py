"""Rules of sparse attention: each fires, names its flags and a remedy."""

from megatrain.config import Facts

DSA = "--experimental-attention-variant dsa"
MLA = "--multi-latent-attention"
CASES = {
    "sparse_attention_has_latents": [
        (DSA, "", None, (DSA, MLA), (f"add {MLA}",)),
        (f"{DSA} {MLA} --dsa-indexer-head-dim 32", "", None,
         ("--dsa-indexer-head-dim 32", "--qk-pos-emb-head-dim 64"), ("--dsa-indexer-head-dim 64",)),
        (f"{DSA} {MLA} --attention-backend flash2 --bf16", "", Facts(device="cuda"), ("--attention-backend flash2", DSA), ("auto",)),
    ],
    "parts_read_whole_samples": [
        (f"{DSA} {MLA} --context-parallel-size 2", "", Facts(world_size=2),
         ("--context-parallel-size 2", DSA), ("--context-parallel-size 1",)),
        (f"{DSA} {MLA} --reset-attention-mask --reset-position-ids", "", None, ("--reset-attention-mask", DSA), ("remove",)),
    ],
}  # fmt: skip


def test_a_problem_names_flags_and_remedy(assert_refused, flags, without, facts, named, remedy):
    assert_refused(flags, named, remedy, without=without, facts=facts)


def test_the_plan_says_what_sparse_attention_costs(plan_of):
    notes = plan_of(f"{DSA} {MLA}").notes
    assert [note.grade for note in notes if "plain operators" in note] == ["cost"]
    assert any("--dsa-indexer-loss-coeff 0" in note for note in notes)
    trained = plan_of(f"{DSA} {MLA} --dsa-indexer-loss-coeff 0.01").notes
    assert not any("--dsa-indexer-loss-coeff" in note for note in trained)
