"""The kernel of attention: what each name means on each device, and the line that says so."""

import pytest

from megatrain.config import Facts, parse, resolve

SHAPE = (
    "--num-layers 1 --hidden-size 64 --num-attention-heads 4 --seq-length 8 --mock-data --tokenizer-type NullTokenizer"
    " --vocab-size 99 --micro-batch-size 1 --train-iters 1 --lr 1e-3 --position-embedding-type rope"
)
HERE = {"torch": "2.11", "flash-attn-4": "4.0.0b36"}


def plan(flags, *, device, libraries=HERE, capability=None):
    facts = Facts(device=device, device_capability=capability, libraries=libraries, vocab_size=99, eod_id=98)
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


@pytest.mark.parametrize(
    ("version", "kernel"),
    [
        ("4.0.0b9", "cudnn"),
        ("4.0.0b36", "flash4"),
        ("4.0.0b100", "flash4"),
        ("4.0.0", "flash4"),
        ("4.1", "flash4"),
    ],
)
def test_a_library_is_taken_from_the_proven_version_on(version, kernel):
    libraries = {"flash-attn-4": version}
    assert plan("--bf16", device="cuda", libraries=libraries).derived.attention_backend == kernel


@pytest.mark.parametrize(
    ("capability", "kernel"),
    [((7, 5), "sdpa"), ((8, 0), "cudnn"), ((9, 0), "flash4"), ((10, 0), "flash4"), ((12, 0), "cudnn")],
)
def test_a_kernel_is_taken_on_generations_that_it_runs_on(capability, kernel):
    assert plan("--bf16", device="cuda", capability=capability).derived.attention_backend == kernel


def test_a_deterministic_run_takes_kernels_that_can_order_their_sums():
    flags = "--bf16 --deterministic-mode"
    assert plan(flags, device="cuda").derived.attention_backend == "flash4"
    assert plan(flags, device="cuda", libraries={}).derived.attention_backend == "sdpa"
    assert (
        plan(f"{flags} --attention-backend flash", device="cuda", libraries={}).derived.attention_backend
        == "flash2"
    )
    assert plan("--bf16 --deterministic-mode", device="cpu").derived.attention_backend == "sdpa"


def test_facts_come_back_from_json_with_the_capability():
    facts = Facts(device="cuda", device_capability=(9, 0))
    assert Facts.from_json(facts.to_json()) == facts
