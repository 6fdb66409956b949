"""The words of every rule: flag, value, remedy."""

import pytest

from megatrain.config import Facts
from megatrain.config.rules import RULES

GQA = "--group-query-attention"
NULL = "--tokenizer-type NullTokenizer"
CUDA = Facts(device="cuda")

CASES = {
    "heads_divide_over_tp_ranks": [
        ("--num-attention-heads 4 --tensor-model-parallel-size 8", "", Facts(world_size=8),
         ("--num-attention-heads 4 do not divide over --tensor-model-parallel-size 8\n"
         "  fix: use --tensor-model-parallel-size 4, or --num-attention-heads 8")),
    ],
    "query_groups_divide_over_tp_ranks": [
        (f"{GQA} --num-query-groups 1 --tensor-model-parallel-size 2", "", Facts(world_size=2),
         ("--num-query-groups 1 is less than --tensor-model-parallel-size 2: copies of key and value heads are not there"
         " yet\n  fix: use --tensor-model-parallel-size 1")),
        (f"{GQA} --num-attention-heads 12 --kv-channels 4 --num-query-groups 3 --tensor-model-parallel-size 2", "",
         Facts(world_size=2),
         ("--num-query-groups 3 do not divide over --tensor-model-parallel-size 2\n"
         "  fix: use --tensor-model-parallel-size 1, or --num-query-groups 4")),
    ],
    "heads_divide_over_query_groups": [
        (f"{GQA} --num-query-groups 3", "", None,
         "--num-attention-heads 4 do not divide over --num-query-groups 3\n  fix: use --num-query-groups 2"),
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
    "rotary_channels_pair_up": [
        ("--kv-channels 15", "", None, ("--kv-channels 15 is odd, and rotary embeddings turn pairs of channels\n"
         "  fix: use --kv-channels 16")),
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
    ],
    "global_batch_divides_into_passes": [
        ("--global-batch-size 9", "", Facts(world_size=2),
         ("--global-batch-size 9 is no multiple of --micro-batch-size 2 * data-parallel size 2 = 4\n"
         "  fix: use --global-batch-size 12")),
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
    "data_has_one_source": [
        (NULL, "--mock-data", None,
         "there is nothing to train on: neither --data-path nor --mock-data is given\n  fix: give --data-path PREFIX"),
        ("--data-path a", "", None, "--data-path a and --mock-data are both given\n  fix: leave one of them out"),
    ],
    "split_has_up_to_three_shares": [
        (f"{NULL} --data-path a --split 1,2,3,4", "--mock-data", None, "--split '1,2,3,4' has 4 shares\n  fix: give up to"),
        (f"{NULL} --data-path a --split 1,-2", "--mock-data", None, "'1,-2' holds something that is no number of 0 or more"),
        (f"{NULL} --data-path a --split 0,0", "--mock-data", None, "--split '0,0' gives no data to any split"),
    ],
    "vocabulary_is_known": [
        ("--tokenizer-type HuggingFaceTokenizer", "", None,
         "HuggingFaceTokenizer is given without --tokenizer-model\n  fix: give --tokenizer-model"),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model x", "--vocab-size", None,
         "--tokenizer-model x: its size is not known\n  fix: check that the file can be read"),
        ("--tokenizer-model x", "", None,
         "--tokenizer-model x is not read with --tokenizer-type left out\n  fix: add --tokenizer-type HuggingFaceTokenizer"),
        (NULL, "--vocab-size", None, "NullTokenizer is given without --vocab-size\n  fix: give --vocab-size"),
        ("", "--vocab-size", None, "there is no tokenizer: --tokenizer-type is not given\n  fix: give --tokenizer-type"),
        ("--data-path a", "--mock-data", None, "there is no tokenizer: --tokenizer-type is not given"),
    ],
    "vocabulary_size_is_the_tokenizers": [
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model x", "", Facts(vocab_size=90),
         "--vocab-size 100 is not the size of the tokenizer, 90\n  fix: leave --vocab-size out"),
    ],
    "padded_vocabulary_holds_all_tokens": [
        ("--padded-vocab-size 99", "", None, "--padded-vocab-size 99 is too small for 100 tokens\n  fix: leave"),
    ],
    "device_is_there": [
        ("--device cuda", "", None, "--device cuda is asked for, and no GPU was found\n  fix: use --device cpu"),
    ],
    "each_rank_has_a_gpu": [
        ("", "", Facts(device="cuda", world_size=8, ranks_per_node=8, devices_per_node=4),
         "8 ranks were started on a node on which 4 GPUs are visible\n  fix: use torchrun --nproc-per-node 4"),
    ],
    "gpus_are_for_nccl": [
        ("--distributed-backend gloo", "", CUDA, "--distributed-backend gloo does not carry the collectives of --device cuda"),
    ],
    "number_formats_agree": [
        ("--bf16 --params-dtype float32", "", None, "--bf16 and --params-dtype float32 contradict each other"),
        ("--params-dtype bfloat16", "", None, "--params-dtype bfloat16 is given without --bf16\n  fix: add --bf16"),
    ],
    "save_interval_has_a_folder": [
        ("--save-interval 5", "", None, "--save-interval 5 is given without --save\n  fix: add --save FOLDER"),
    ],
    "missing_checkpoint_has_one_answer": [
        ("--load a --load-or-start --exit-on-missing-checkpoint", "", None,
         "--load-or-start and --exit-on-missing-checkpoint contradict each other"),
        ("--load-or-start", "", None, "--load-or-start is given without --load\n  fix: add --load FOLDER"),
    ],
    "features_are_there": [
        ("", "--normalization", None,
         "--normalization LayerNorm (the default, as in Megatron-LM) is not there yet\n  fix: use --normalization RMSNorm"),
        ("--normalization LayerNorm", "", None, "--normalization LayerNorm is not there yet"),
        ("", "--swiglu", None, "an MLP without --swiglu (the default, as in Megatron-LM) is not there yet\n  fix: add --swiglu"),
        ("", "--position-embedding-type", None, ("learned_absolute (the default, as in Megatron-LM) is not there yet\n"
         "  fix: use --position-embedding-type rope")),
        ("", "--disable-bias-linear", None, ("a linear layer with biases (the default, as in Megatron-LM) is not there yet\n"
         "  fix: add --disable-bias-linear")),
        ("--transformer-impl transformer_engine", "", None,
         "--transformer-impl transformer_engine is not there yet\n  fix: use --transformer-impl local"),
        ("--reset-position-ids", "", None, "--reset-position-ids is not there yet\n  fix: leave --reset-position-ids out"),
        ("--reset-attention-mask", "", None, "--reset-attention-mask is not there yet"),
    ],
    "dropout_is_off": [
        ("", "--hidden-dropout --attention-dropout", None,
         ("dropout is not there yet: --hidden-dropout 0.1 and --attention-dropout 0.1 (0.1 is the default, as in Megatron-LM)"
         "\n  fix: use --hidden-dropout 0 --attention-dropout 0")),
        ("--hidden-dropout 0.2", "", None, "dropout is not there yet: --hidden-dropout 0.2\n"),
    ],
    "blends_are_not_asked_for": [
        (f"{NULL} --data-path 0.3 a 0.7 b", "--mock-data", None,
         "--data-path 0.3 a 0.7 b: blends are not there yet\n  fix: give one prefix"),
    ],
    "deterministic_mode_is_for_cpus": [
        ("--deterministic-mode", "", Facts(device="cuda"),
         "--deterministic-mode is not there yet on a GPU\n  fix: leave it out"),
    ],
    "data_cache_is_not_asked_for": [
        ("--data-cache-path c", "", None, "--data-cache-path c: index caches are not there yet\n  fix: leave it out"),
    ],
    "optimizer_state_is_left_out_once": [
        ("--save r --load r --no-load-optim", "", None,
         "would drop the optimizer's state at every restart\n  fix: load from another folder"),
    ],
}  # fmt: skip
ELSEWHERE = {"run_is_the_stored_one", "tokenizer_is_the_stored_one"}


@pytest.mark.parametrize(
    ("flags", "without", "facts", "words"), [case for cases in CASES.values() for case in cases]
)
def test_a_rule_says_what_is_wrong_and_what_to_do(problems_of, flags, without, facts, words):
    (problem,) = problems_of(flags, without=without, facts=facts)
    assert words in problem


def test_the_working_run_breaks_no_rule(problems_of):
    assert problems_of() == []


def test_every_rule_has_a_case():
    assert set(CASES) | ELSEWHERE == {rule.__name__ for rule in RULES}
