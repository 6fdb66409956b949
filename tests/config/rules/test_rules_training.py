"""Rules about the length of training, batch sizes, the optimizer, dtypes: each fires, names its flags and a remedy."""

from megatrain.config import Facts

CASES = {
    "offloaded_modules_fit": [
        ("--fine-grained-activation-offloading", "", None, ("--offload-modules",), ("--offload-modules core_attn",)),
        ("--fine-grained-activation-offloading --offload-modules attn_proj", "", None,
         ("--offload-modules attn_proj", "core_attn"), ("--offload-modules core_attn attn_proj",)),
        ("--fine-grained-activation-offloading --offload-modules layer_input", "", None,
         ("layer_input", "--recompute-granularity full"), ("--recompute-method uniform", "remove layer_input")),
    ],
    "evaluation_has_a_checkpoint": [
        ("--eval-only", "", None, ("--eval-only",), ("--load FOLDER",)),
    ],
    "training_has_one_length": [
        ("", "--train-iters", None, ("--train-iters", "--train-samples"), ("--train-iters 1000",)),
        ("--train-samples 50", "", None, ("--train-iters 10", "--train-samples 50"), ("remove --", ", or --")),
    ],
    "samples_fill_a_batch": [
        ("--train-samples 1 --eval-iters 0", "--train-iters", None,
         ("--train-samples 1", "--global-batch-size 2"), ("--train-samples 2",)),
    ],
    "batch_sizes_are_valid": [
        ("--global-batch-size 16 --rampup-batch-size 4 4 --train-samples 99", "--train-iters", None,
         ("--rampup-batch-size 4 4",), ("--rampup-batch-size 32 32 1000000",)),
        ("--global-batch-size 16 --rampup-batch-size 4 0 9 --train-samples 99", "--train-iters", None,
         ("--rampup-batch-size 4 0 9",), ("numbers above 0",)),
        ("--global-batch-size 16 --rampup-batch-size 16 4 9 --train-samples 99", "--train-iters", None,
         ("--rampup-batch-size 16 4 9", "--global-batch-size 16"), ("--rampup-batch-size",)),
        ("--global-batch-size 16 --rampup-batch-size 4 5 9 --train-samples 99", "--train-iters", None,
         ("--rampup-batch-size 4 5 9", "--global-batch-size 16"), ("--rampup-batch-size 4 4 9",)),
        ("--global-batch-size 4000000000004 --rampup-batch-size 4 2 9 --train-samples 9000000000000", "--train-iters", None,
         ("--rampup-batch-size 4 2 9", "--global-batch-size 4000000000004"), ("--rampup-batch-size 4 ",)),
        ("--global-batch-size 16 --rampup-batch-size 4 3 9 --train-samples 99", "--train-iters", None,
         ("--rampup-batch-size", "--micro-batch-size 2", "7"), ("multiples of 2", "--decrease-batch-size-if-needed")),
        ("--step-batch-size-schedule 0:4,1k:5 --train-samples 99 --eval-global-batch-size 4", "--train-iters", None,
         ("--step-batch-size-schedule", "--micro-batch-size 2", "5"), ("multiples of 2",)),
        ("--step-batch-size-schedule 1k:8 --train-samples 99", "--train-iters", None,
         ("--step-batch-size-schedule '1k:8'",), ("--step-batch-size-schedule '0:8 1k:8'",)),
    ],
    "pieces_are_valid": [
        ("--seq-length 64 --seq-length-schedule 0:16,1k:24", "", None,
         ("--seq-length-schedule '0:16,1k:24'", "--seq-length 64", "24 tokens"), ("--seq-length-schedule '0:16,1k:32'",)),
        ("--seq-length 64 --seq-length-schedule 1k:16", "", None,
         ("--seq-length-schedule '1k:16'",), ("--seq-length-schedule '0:16 1k:16'",)),
        ("--seq-length 64 --seq-length-schedule 0:2,1k:32 --context-parallel-size 2", "", Facts(world_size=2),
         ("pieces of 2 tokens", "multiples of 4"), ("--seq-length-schedule '0:4,1k:32'",)),
        ("--seq-length 64 --seq-length-schedule 0:2 --context-parallel-size 2 --tensor-model-parallel-size 4 --sequence-parallel",
         "", Facts(world_size=8), ("pieces of 2 tokens", "multiples of 8"), ("--seq-length-schedule '0:8'",)),
    ],
    "steps_end_with_the_batch_size": [
        ("--step-batch-size-schedule 0:4,1k:8 --train-samples 99 --global-batch-size 4", "--train-iters", None,
         ("--step-batch-size-schedule", "--global-batch-size 4"), ("remove --global-batch-size",)),
    ],
    "changing_batches_require_samples": [
        ("--global-batch-size 16 --rampup-batch-size 4 4 9", "", None,
         ("--train-iters 10", "--rampup-batch-size"), ("--train-samples",)),
        ("--step-batch-size-schedule 0:4,1k:8 --train-samples 99 --lr-warmup-iters 1", "--train-iters", None,
         ("--lr-warmup-iters 1", "--step-batch-size-schedule"), ("--lr-warmup-samples",)),
    ],
    "dtypes_agree": [
        ("--bf16 --params-dtype float32", "", None, ("--bf16", "--params-dtype float32"), ("one of them",)),
        ("--params-dtype bfloat16", "", None, ("--params-dtype bfloat16", "--bf16"), ("--bf16",)),
        ("--params-dtype float16", "", None, ("--params-dtype float16", "--fp16"), ("--fp16",)),
        ("--fp16 --params-dtype float32", "", None, ("--fp16", "--params-dtype float32"), ("one of them",)),
        ("--fp16 --bf16", "", None, ("--bf16", "--fp16"), ("one of them",)),
    ],
    "loss_scale_is_in_range": [
        ("--fp16 --initial-loss-scale 4 --min-loss-scale 8", "", None,
         ("--min-loss-scale 8", "--initial-loss-scale 4"), ("--min-loss-scale 4",)),
    ],
    "exit_signal_is_valid": [
        ("--exit-signal SIGKILL", "", None, ("--exit-signal SIGKILL",), ("SIGTERM",)),
        ("--exit-signal 99", "", None, ("--exit-signal 99",), ("SIGTERM",)),
    ],
    "functions_are_named": [
        ("--dataset my/prefix", "--mock-data", Facts(digests={"data.dataset": "1"}), ("--dataset my/prefix",), ("--dataset file.py:function", "--data-path")),
        ("--loss a.py", "", Facts(digests={"training.loss": "1"}), ("--loss a.py",), ("--loss file.py:function",)),
        ("--callbacks Printer", "", Facts(digests={"logging.callbacks": "1"}), ("--callbacks Printer",), ("--callbacks file.py:Class",)),
    ],
    "reruns_have_rejected_steps": [
        ("--rerun-mode validate_results --on-nan skip", "", None, ("--rerun-mode validate_results", "--on-nan skip"), ("one of them",)),
        ("--rerun-mode validate_results --no-check-for-nan-in-loss-and-grad", "", None,
         ("--no-check-for-nan-in-loss-and-grad",), ("one of them",)),
        ("--error-injection-rate 10", "", None, ("--error-injection-rate 10",), ("--rerun-mode validate_results",)),
    ],
    "restarts_continue_from_saves": [
        ("--inprocess-restart", "", None, ("--inprocess-restart", "--save None"), ("--save FOLDER --load FOLDER",)),
        ("--inprocess-restart --save x", "", None, ("--save x", "--load is None"), ("--save x --load x",)),
        ("--inprocess-restart --save x --load x --finetune", "", None, ("--finetune",), ("remove --finetune",)),
        ("--inprocess-restart --save x --load x --ckpt-step 2", "", None, ("--ckpt-step",), ("remove --ckpt-step",)),
    ],
    "bad_step_policies_are_valid": [
        ("--on-nan warn", "", None, ("--on-nan warn", "rewind N"), ("--on-nan rewind 100",)),
        ("--on-nan rewind", "", None, ("--on-nan rewind",), ("--on-nan rewind 100",)),
        ("--on-nan rewind 5", "", None, ("--on-nan rewind 5", "--save"), ("--save FOLDER",)),
        ("--on-nan rewind 5 --save x --no-save-optim", "", None, ("--on-nan rewind 5",), ("--no-save-optim",)),
        ("--on-nan skip --no-check-for-nan-in-loss-and-grad", "", None,
         ("--on-nan skip", "--no-check-for-nan-in-loss-and-grad"), ("remove one",)),
        ("--on-spike stop", "", None, ("--on-spike stop",), ("--check-for-spiky-loss",)),
    ],
}  # fmt: skip


def test_a_problem_names_flags_and_remedy(assert_refused, flags, without, facts, named, remedy):
    assert_refused(flags, named, remedy, without=without, facts=facts)
