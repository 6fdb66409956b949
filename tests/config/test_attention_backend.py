"""The kernel of attention: what each name means on each device, and the line that says so."""

import pytest

from megatrain.config import ConfigError, Facts, parse, resolve
from megatrain.config.derive.custom_layers import CustomLayers
from megatrain.config.derive.layer_sizes import LayerSizes

SHAPE = (
    "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 8 --mock-data --tokenizer-type NullTokenizer"
    " --vocab-size 99 --micro-batch-size 1 --train-iters 1 --lr 1e-3 --position-embedding-type rope --attention-dropout 0"
)
HERE = {"torch": "2.11", "flash-attn-4": "4.0.0b36"}
RING = "--context-parallel-size 2"
GATHERED = f"{RING} --cp-comm-type all_gather"
HEADS = LayerSizes(num_heads=4, num_query_groups=4, head_channels=32, ffn_hidden_size=64)


def plan(flags, *, device, libraries=HERE, capability=None, custom_layers=None):
    facts = Facts(
        device=device, device_capability=capability, libraries=libraries, vocab_size=99, eod_id=98,
        world_size=2 if "--context-parallel-size" in flags else 1, custom_layers=custom_layers,
    )  # fmt: skip
    return resolve(parse([*SHAPE.split(), *flags.split()]), facts)


def outcome(flags, **facts):
    """The kernel that a plan has, or `refused`."""
    try:
        return plan(flags, **facts).derived.attention_backend
    except ConfigError as error:
        others = [problem for problem in error.problems if "--attention-backend" not in str(problem)]
        return others or "refused"


def line(flags, **facts):
    """What the plan says of it."""
    [found] = [note for note in plan(flags, **facts).notes if "--attention-backend" in note]
    return found


@pytest.mark.parametrize(
    ("channels", "kernel"), [(32, "flash4"), (96, "flash4"), (80, "cudnn"), (112, "cudnn")]
)
def test_heads_with_which_flash_attn_4_is_wrong_run_on_another_kernel(channels, kernel):
    assert plan(f"--bf16 --kv-channels {channels}", device="cuda").derived.attention_backend == kernel


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
    assert line("--bf16", device="cuda", libraries={}) == (
        "--attention-backend auto: cuDNN's attention, as flash-attn-4 is not installed"
    )
    assert line("--bf16 --kv-channels 192", device="cuda") == (
        "--attention-backend auto: torch's own choice of kernel, as flash-attn-4 takes heads of at most 128 channels in"
        " multiples of 32, and --kv-channels is 192; cuDNN's attention takes heads of at most 128 channels in multiples of"
        " 8, and --kv-channels is 192"
    )
    assert not [n for n in plan("", device="cpu").notes if "--attention-backend" in n]


NAMES = ("auto", "flash", "fused", "sdpa", "flash4", "flash2", "cudnn", "math")


@pytest.mark.parametrize(
    ("asks", "kernels", "without_library"),
    [
        ("--window-size 8,0", "flash4 flash4 flash2 flash2 flash4 flash2 refused math", "flash2 flash2"),
        ("--window-size -1,0", "flash4 flash4 cudnn sdpa flash4 flash2 cudnn math", "cudnn flash2"),
        (
            "--window-size 8,0 --window-attn-skip-freq [0,1]",
            "flash4 flash4 flash2 flash2 flash4 flash2 refused math",
            "flash2 flash2",
        ),
        (
            "--window-size 8,0 --window-attn-skip-freq [0,0]",
            "flash4 flash4 cudnn sdpa flash4 flash2 cudnn math",
            "cudnn flash2",
        ),
        ("--reset-attention-mask", "flash4 flash4 flash2 flash2 flash4 flash2 refused math", "flash2 flash2"),
        (
            "--dataloader-inter-document-masking",
            "flash4 flash4 flash2 flash2 flash4 flash2 refused math",
            "flash2 flash2",
        ),
        ("--softmax-type learnable", "flash4 flash4 cudnn flash2 flash4 flash2 cudnn math", "cudnn flash2"),
        (RING, "flash4 flash4 cudnn flash2 flash4 flash2 cudnn math", "cudnn flash2"),
        (
            f"{RING} --cp-comm-type a2a",
            "flash4 flash4 cudnn flash2 flash4 flash2 cudnn math",
            "cudnn flash2",
        ),
        (GATHERED, "flash4 flash4 flash2 flash2 flash4 flash2 refused math", "flash2 flash2"),
        (
            f"{RING} --cp-comm-type p2p all_gather",
            "flash4 flash4 flash2 flash2 flash4 flash2 refused math",
            "flash2 flash2",
        ),
        (
            f"{RING} --window-size 8,0",
            "flash4 flash4 flash2 flash2 flash4 flash2 refused math",
            "flash2 flash2",
        ),
        (
            "--attn-logit-softcapping 50",
            "math math math refused refused refused refused math",
            "math math",
        ),
        ("--attention-dropout 0.1", "math math math refused refused refused refused math", "math math"),
        (
            "--attention-dropout 0.1 --window-size 8,0 --reset-attention-mask",
            "math math math refused refused refused refused math",
            "math math",
        ),
    ],
)
def test_all_layers_run_on_a_kernel_that_takes_what_they_ask_for(asks, kernels, without_library):
    found = {name: outcome(f"--bf16 {asks} --attention-backend {name}", device="cuda") for name in NAMES}
    assert found == dict(zip(NAMES, kernels.split(), strict=True))
    without = [
        outcome(f"--bf16 {asks} --attention-backend {name}", device="cuda", libraries={}) for name in NAMES
    ]
    assert without[:2] == without_library.split()
    assert without[2:] == [*kernels.split()[2:4], "refused", *kernels.split()[5:]]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (
            "--window-size 8,0",
            "auto: FlashAttention-2 of torch, as flash-attn-4 is not installed; cuDNN's attention is not for windows",
        ),
        (
            "--window-size 8,0 --reset-attention-mask --attention-backend fused",
            "fused: FlashAttention-2 of torch, as cuDNN's attention is not for documents and windows",
        ),
        (
            "--reset-attention-mask --attention-backend sdpa",
            "sdpa: FlashAttention-2 of torch, as torch's own choice of kernel is not for documents",
        ),
        (
            f"{RING} --softmax-type off-by-one --attention-backend sdpa",
            "sdpa: FlashAttention-2 of torch, as torch's own choice of kernel is not for sinks and context ranks",
        ),
        (
            f"{GATHERED} --attention-backend fused",
            "fused: FlashAttention-2 of torch, as cuDNN's attention is not for gathered keys",
        ),
        (f"{RING} --attention-backend cudnn", "cudnn: cuDNN's attention"),
        (
            "--attn-logit-softcapping 50 --attention-dropout 0.1",
            "auto: attention written out, with all scores in memory, as no fused kernel has --attention-dropout 0.1 and --attn-logit-softcapping 50.0: memory and time grow with the square of --seq-length",
        ),
    ],
)
def test_the_line_names_what_was_not_taken(flags, expected):
    assert line(f"--bf16 {flags}", device="cuda", libraries={}) == f"--attention-backend {expected}"


def test_cpus_write_out_what_no_kernel_has_and_say_so():
    asks = f"{RING} --window-size 8,0 --reset-attention-mask --softmax-type learnable"
    assert plan(asks, device="cpu").derived.attention_backend == "sdpa"
    assert outcome("--attention-backend sdpa --attention-dropout 0.1", device="cpu") == "refused"
    assert plan("--attention-dropout 0.1", device="cpu").derived.attention_backend == "math"
    assert "as no fused kernel has --attention-dropout 0.1:" in line("--attention-dropout 0.1", device="cpu")


@pytest.mark.parametrize(("asks", "what"), [(RING, "context ranks"), ("--softmax-type learnable", "sinks")])
def test_fp32_on_gpus_has_no_kernel_that_joins_parts(asks, what):
    assert f"as no fused kernel of float32 on a GPU is for {what}:" in line(asks, device="cuda")
    assert plan(asks, device="cuda").derived.attention_backend == "math"
    assert outcome(f"{asks} --attention-backend sdpa", device="cuda") == "refused"
    assert plan("--window-size 8,0", device="cuda").derived.attention_backend == "sdpa"


def own(**attention):
    return CustomLayers(digest="1", layers=(HEADS,) * 2, differences=(), **attention)


@pytest.mark.parametrize(
    ("layers", "kernels"),
    [
        (own(), "flash4 cudnn sdpa cudnn"),
        (own(has_windows=True), "flash4 flash2 flash2 refused"),
        (own(has_sinks=True), "flash4 cudnn flash2 cudnn"),
        (own(eager_attention="some"), "flash4 cudnn refused refused"),
        (own(eager_attention="all"), "math math refused refused"),
    ],
)
def test_layers_of_ones_own_ask_for_themselves(layers, kernels):
    flags = (
        "--bf16 --spec my.py:layers --attn-logit-softcapping 50 --window-size 8,0 --softmax-type learnable"
    )
    names = ("auto", "fused", "sdpa", "cudnn")
    found = [
        outcome(f"{flags} --attention-backend {name}", device="cuda", custom_layers=layers) for name in names
    ]
    assert found == kernels.split()


def test_layers_that_are_written_out_beside_others_are_told():
    told = line("--bf16 --spec my.py:layers", device="cuda", custom_layers=own(eager_attention="some"))
    assert told == (
        "--attention-backend auto: flash-attn-4; layers with softcaps or dropout of scores (--spec) hold all scores in memory"
    )


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
    facts = Facts(
        device="cuda", device_capability=(9, 0), custom_layers=own(eager_attention="some", has_sinks=True)
    )
    assert Facts.from_json(facts.to_json()) == facts
