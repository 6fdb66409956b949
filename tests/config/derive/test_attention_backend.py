"""The attention kernel that each name selects on each device, and the note with the reason."""

import dataclasses

import pytest

from megatrain.config import ConfigError, Facts, parse, resolve
from megatrain.config.model_spec.attention import AttentionSpec

SHAPE = (
    "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 8 --mock-data --tokenizer-type NullTokenizer"
    " --vocab-size 99 --micro-batch-size 1 --train-iters 1 --lr 1e-3 --position-embedding-type rope --attention-dropout 0"
)
HERE = {"torch": "2.11", "flash-attn-4": "4.0.0b36"}
RING = "--context-parallel-size 2"
GATHERED = f"{RING} --cp-comm-type all_gather"
HEADS = AttentionSpec(num_heads=4, num_query_groups=4, head_dim=32)


def plan(flags, *, device, libraries=HERE, capability=None, custom_layers=None):
    facts = Facts(
        device=device, device_capability=capability, libraries=libraries, vocab_size=99, eod_id=98,
        world_size=2 if "--context-parallel-size" in flags else 1, digests={"model.spec": "1"}, custom_layers=custom_layers,
    )  # fmt: skip
    return resolve(parse([*SHAPE.split(), *flags.split()]), facts)


def outcome(flags, **facts):
    """Return the kernel of the plan, or `refused`."""
    try:
        return plan(flags, **facts).derived.attention_backend
    except ConfigError as error:
        others = [problem for problem in error.problems if "--attention-backend" not in str(problem)]
        return others or "refused"


def note(flags, **facts):
    """Return the note on the kernel."""
    [found] = [note for note in plan(flags, **facts).notes if "--attention-backend" in note]
    return found


@pytest.mark.parametrize(
    ("channels", "kernel"), [(32, "flash4"), (96, "flash4"), (80, "cudnn"), (112, "cudnn")]
)
def test_head_widths_that_flash_attn_4_computes_wrongly_use_another_kernel(channels, kernel):
    assert plan(f"--bf16 --kv-channels {channels}", device="cuda").derived.attention_backend == kernel


@pytest.mark.parametrize(
    ("name", "on_cpu", "on_gpu", "without_library"),
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
def test_a_name_selects_a_kernel(name, on_cpu, on_gpu, without_library):
    flags = f"--bf16 --attention-backend {name}"
    assert plan(flags, device="cpu").derived.attention_backend == on_cpu
    assert plan(flags, device="cuda").derived.attention_backend == on_gpu
    assert plan(flags, device="cuda", libraries={}).derived.attention_backend == without_library


def test_wide_heads_and_fp32_use_torchs_kernels():
    assert plan("--bf16 --kv-channels 256", device="cuda").derived.attention_backend == "sdpa"
    assert (
        plan("--bf16 --kv-channels 256 --attention-backend flash", device="cuda").derived.attention_backend
        == "flash2"
    )
    assert plan("", device="cuda").derived.attention_backend == "sdpa"


def test_a_note_has_the_kernel_and_the_reason():
    assert note("--bf16", device="cuda", libraries={}) == (
        "--attention-backend auto: cuDNN's attention, as flash-attn-4 is not installed"
    )
    assert note("--bf16 --kv-channels 192", device="cuda") == (
        "--attention-backend auto: torch's own choice of kernel, as flash-attn-4 needs heads of at most 128 channels in"
        " multiples of 32, and --kv-channels is 192; cuDNN's attention needs heads of at most 128 channels in multiples of"
        " 8, and --kv-channels is 192"
    )
    assert not [n for n in plan("", device="cpu").notes if "--attention-backend" in n]


NAMES = ("auto", "flash", "fused", "sdpa", "flash4", "flash2", "cudnn", "math")


@pytest.mark.parametrize(
    ("features", "kernels", "without_library"),
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
            "triton triton triton refused refused refused refused math",
            "triton triton",
        ),
        (
            "--attention-dropout 0.1",
            "triton triton triton refused refused refused refused math",
            "triton triton",
        ),
        (
            "--attention-dropout 0.1 --window-size 8,0 --reset-attention-mask",
            "triton triton triton refused refused refused refused math",
            "triton triton",
        ),
    ],
)
def test_the_kernel_supports_the_features_of_all_layers(features, kernels, without_library):
    found = {name: outcome(f"--bf16 {features} --attention-backend {name}", device="cuda") for name in NAMES}
    assert found == dict(zip(NAMES, kernels.split(), strict=True))
    without = [
        outcome(f"--bf16 {features} --attention-backend {name}", device="cuda", libraries={})
        for name in NAMES
    ]
    assert without[:2] == without_library.split()
    assert without[2:] == [*kernels.split()[2:4], "refused", *kernels.split()[5:]]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (
            "--window-size 8,0",
            "auto: FlashAttention-2 of torch, as flash-attn-4 is not installed; cuDNN's attention does not support windows",
        ),
        (
            "--window-size 8,0 --reset-attention-mask --attention-backend fused",
            "fused: FlashAttention-2 of torch, as cuDNN's attention does not support documents and windows",
        ),
        (
            "--reset-attention-mask --attention-backend sdpa",
            "sdpa: FlashAttention-2 of torch, as torch's own choice of kernel does not support documents",
        ),
        (
            f"{RING} --softmax-type off-by-one --attention-backend sdpa",
            "sdpa: FlashAttention-2 of torch, as torch's own choice of kernel does not support sinks and context ranks",
        ),
        (
            f"{GATHERED} --attention-backend fused",
            "fused: FlashAttention-2 of torch, as cuDNN's attention does not support gathered keys",
        ),
        (f"{RING} --attention-backend cudnn", "cudnn: cuDNN's attention"),
        (
            "--attn-logit-softcapping 50 --attention-dropout 0.1",
            "auto: megatrain's Triton kernel, for --attention-dropout 0.1 and --attn-logit-softcapping 50.0",
        ),
        (
            "--attention-dropout 0.1 --no-compile",
            "auto: eager attention, which stores all scores, as only megatrain's Triton kernel supports --attention-dropout 0.1, and it is compiled at run time, which --no-compile rules out: memory and time grow with the square of --seq-length",
        ),
    ],
)
def test_the_note_has_the_reason_against_other_kernels(flags, expected):
    assert note(f"--bf16 {flags}", device="cuda", libraries={}) == f"--attention-backend {expected}"


def test_cpus_use_eager_attention_where_no_kernel_has_a_feature():
    features = f"{RING} --window-size 8,0 --reset-attention-mask --softmax-type learnable"
    assert plan(features, device="cpu").derived.attention_backend == "sdpa"
    assert outcome("--attention-backend sdpa --attention-dropout 0.1", device="cpu") == "refused"
    assert plan("--attention-dropout 0.1", device="cpu").derived.attention_backend == "math"
    found = note("--attention-dropout 0.1", device="cpu")
    assert "supports --attention-dropout 0.1, and it needs bf16 or fp16 on a GPU:" in found


@pytest.mark.parametrize(
    "flags", ["", "--bf16 --kv-channels 264", "--bf16 --no-compile", "--bf16 --attention-backend unfused"]
)
def test_dropout_on_gpus_is_eager_where_the_triton_kernel_cannot_be_used(flags):
    found = plan(f"{flags} --attention-dropout 0.1", device="cuda")
    assert found.derived.attention_backend == "math"


def test_the_triton_kernel_is_deterministic_and_takes_windows_and_documents_over_context_ranks():
    flags = (
        f"--bf16 --attention-dropout 0.1 --deterministic-mode --window-size 8,0 --reset-attention-mask {RING}"
    )
    found = plan(f"{flags} --cp-comm-type p2p", device="cuda").derived
    assert (found.attention_backend, found.cp_comm_types) == ("triton", ("all_gather",))


@pytest.mark.parametrize(
    ("flags", "is_slower"), [(f"{RING} --cp-comm-type p2p", True), (RING, False), ("", False)]
)
def test_a_note_says_that_small_chunks_make_dropout_slower(flags, is_slower):
    found = note(f"--bf16 --attention-dropout 0.1 {flags}", device="cuda")
    assert ("slower" in found) == is_slower


@pytest.mark.parametrize(
    ("flags", "feature"), [(RING, "context ranks"), ("--softmax-type learnable", "sinks")]
)
def test_fp32_on_gpus_has_no_kernel_with_log_sum_exp(flags, feature):
    assert f"as no fused kernel for float32 on a GPU supports {feature}:" in note(flags, device="cuda")
    assert plan(flags, device="cuda").derived.attention_backend == "math"
    assert outcome(f"{flags} --attention-backend sdpa", device="cuda") == "refused"
    assert plan("--window-size 8,0", device="cuda").derived.attention_backend == "sdpa"


def custom(*, is_of_all=True, **attention):
    """Return layers whose attention has these features: all of them, or the first one."""
    changed, plain = dataclasses.replace(HEADS, **attention), HEADS

    def layers(_, layers):
        first, *others = layers
        rest = [one.with_part(changed if is_of_all else plain) for one in others]
        return (first.with_part(changed), *rest)

    return layers


@pytest.mark.parametrize(
    ("layers", "kernels"),
    [
        (custom(), "flash4 cudnn sdpa cudnn"),
        (custom(window=8), "flash4 flash2 flash2 refused"),
        (custom(sink="zero"), "flash4 cudnn flash2 cudnn"),
        (custom(softcap=50.0, is_of_all=False), "triton triton refused refused"),
        (custom(softcap=50.0), "triton triton refused refused"),
    ],
)
def test_features_of_custom_layers_replace_those_of_flags(layers, kernels):
    flags = (
        "--bf16 --spec my.py:layers --attn-logit-softcapping 50 --window-size 8,0 --softmax-type learnable"
    )
    names = ("auto", "fused", "sdpa", "cudnn")
    found = [
        outcome(f"{flags} --attention-backend {name}", device="cuda", custom_layers=layers) for name in names
    ]
    assert found == kernels.split()


def test_a_note_names_layers_with_eager_attention():
    layers = custom(softcap=50.0, is_of_all=False)
    found = note("--spec my.py:layers", device="cuda", custom_layers=layers)
    assert found.endswith("; layers with logit softcapping or attention dropout (--spec) store all scores")
    assert "Triton kernel, for logit" in note(
        "--bf16 --spec my.py:layers", device="cuda", custom_layers=layers
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
def test_a_library_needs_the_tested_version(version, kernel):
    libraries = {"flash-attn-4": version}
    assert plan("--bf16", device="cuda", libraries=libraries).derived.attention_backend == kernel


@pytest.mark.parametrize(
    ("capability", "kernel"),
    [((7, 5), "sdpa"), ((8, 0), "cudnn"), ((9, 0), "flash4"), ((10, 0), "flash4"), ((12, 0), "cudnn")],
)
def test_a_kernel_is_used_on_gpus_that_it_supports(capability, kernel):
    assert plan("--bf16", device="cuda", capability=capability).derived.attention_backend == kernel


def test_a_deterministic_run_uses_deterministic_kernels():
    flags = "--bf16 --deterministic-mode"
    assert plan(flags, device="cuda").derived.attention_backend == "flash4"
    assert plan(flags, device="cuda", libraries={}).derived.attention_backend == "sdpa"
    assert (
        plan(f"{flags} --attention-backend flash", device="cuda", libraries={}).derived.attention_backend
        == "flash2"
    )
    assert plan("--bf16 --deterministic-mode", device="cpu").derived.attention_backend == "sdpa"


def test_facts_with_a_capability_survive_json():
    facts = Facts(
        device="cuda",
        device_capability=(9, 0),
        custom_layers=custom(softcap=50.0),
    )
    assert Facts.from_json(facts.to_json()) == facts
