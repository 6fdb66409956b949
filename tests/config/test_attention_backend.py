"""The kernel of attention: what each name means on each device, and the line that says so."""

import pytest

from megatrain.config import Facts, parse, resolve

SHAPE = (
    "--num-layers 1 --hidden-size 64 --num-attention-heads 4 --seq-length 8 --mock-data --tokenizer-type NullTokenizer"
    " --vocab-size 99 --micro-batch-size 1 --train-iters 1 --lr 1e-3 --position-embedding-type rope"
)
HERE = {"torch": "2.11", "flash-attn-4": "4.0"}


def plan(flags, *, device, libraries=HERE):
    facts = Facts(device=device, libraries=libraries, vocab_size=99, eod_id=98)
    return resolve(parse([*SHAPE.split(), *flags.split()]), facts)


@pytest.mark.parametrize(
    ("asked", "on_cpu", "on_gpu", "without_library"),
    [
        ("auto", "sdpa", "flash4", "cudnn"),
        ("flash", "sdpa", "flash4", "flash2"),
        ("fused", "sdpa", "cudnn", "cudnn"),
        ("unfused", "math", "math", "math"),
        ("local", "math", "math", "math"),
        ("sdpa", "sdpa", "sdpa", "sdpa"),
        ("math", "math", "math", "math"),
    ],
)
def test_a_name_means_a_kernel(asked, on_cpu, on_gpu, without_library):
    flags = f"--bf16 --attention-backend {asked}"
    assert plan(flags, device="cpu").derived.attention_backend == on_cpu
    assert plan(flags, device="cuda").derived.attention_backend == on_gpu
    assert plan(flags, device="cuda", libraries={}).derived.attention_backend == without_library


def test_wide_heads_and_fp32_are_for_torchs_own_kernels():
    assert plan("--bf16 --kv-channels 256", device="cuda").derived.attention_backend == "sdpa"
    assert (
        plan("--bf16 --kv-channels 256 --attention-backend flash", device="cuda").derived.attention_backend
        == "flash2"
    )
    assert plan("", device="cuda").derived.attention_backend == "sdpa"


def test_one_line_says_what_was_taken_and_why():
    [line] = [n for n in plan("--bf16", device="cuda", libraries={}).notes if "--attention-backend" in n]
    assert line == "--attention-backend auto: cuDNN's attention, as flash-attn-4 is not installed"
    assert not [n for n in plan("", device="cpu").notes if "--attention-backend" in n]
