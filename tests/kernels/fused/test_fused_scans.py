"""Kernels of chunked scans, their convolution and gated norm against recurrences and formulas in fp64: outputs and every gradient."""

from collections.abc import Callable, Sequence

import pytest
import torch
from fused_helpers import DEVICE, DTYPES, drawn
from recurrences import convolution_sums, delta_recurrence, mamba2_recurrence
from torch import Tensor

from megatrain.kernels.fused.scans import convolution, gated_delta, gated_norm, mamba2
from megatrain.kernels.fused.scans.unit_heads import unit_heads
from megatrain.kernels.qkv import split_channels

pytestmark = pytest.mark.filterwarnings("default")  # Triton's own
ERRORS = {torch.float32: 5e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
"""Norm of the error by the norm of the result; 16-bit GEMMs round their inputs, among them states and scores."""

Run = Callable[..., Sequence[Tensor]]


def boundaries(starts: list[int] | None, tokens: int) -> Tensor | None:
    return None if starts is None else torch.tensor([*starts, tokens], dtype=torch.int32, device=DEVICE)


def document_ids(starts: list[int] | None, b: int, s: int) -> Tensor | None:
    cu_seqlens = boundaries(starts, b * s)
    if cu_seqlens is None:
        return None
    return torch.bucketize(torch.arange(b * s, device=DEVICE), cu_seqlens, right=True).view(b, s).t()


def compare(run: Run, oracle: Run, inputs: dict[str, Tensor | None], dtype: torch.dtype) -> None:
    """Compare outputs, and gradients for random gradients of the outputs, with the oracle's in fp64."""
    found, expected = [], []
    for function, results, is_oracle in ((run, found, False), (oracle, expected, True)):
        leaves = {}
        for name, tensor in inputs.items():
            wide = tensor if tensor is None or not is_oracle else tensor.double()
            leaves[name] = None if wide is None else wide.detach().requires_grad_()
        outputs = function(**leaves)
        gradients = [drawn(*out.shape, seed=20 + place).to(out.dtype) for place, out in enumerate(outputs)]
        torch.autograd.backward(outputs, gradients)
        results += [(f"output {place}", out.detach()) for place, out in enumerate(outputs)]
        results += [(f"gradient of {name}", x.grad) for name, x in leaves.items() if x is not None]
    for (name, one), (_, other) in zip(found, expected, strict=True):
        assert one.shape == other.shape, name
        error = ((one.double() - other).norm() / other.norm().clamp(min=1e-30)).item()
        assert error <= ERRORS[dtype], f"{name}: {error}"


def mamba2_inputs(
    b: int, s: int, n: int, p: int, g: int, m: int, dtype: torch.dtype, *, has_state: bool
) -> dict[str, Tensor | None]:
    """Decays from a token's to a thousand tokens' length; x, B and C are parts of one projection."""
    widths = (n * p, g * m, g * m)
    x, B, C = drawn(b, s, sum(widths), dtype=dtype).split(widths, dim=-1)  # noqa: N806
    dt = torch.nn.functional.softplus(drawn(b, s, n, seed=1) * 2 - 2)
    return {
        "x": x.unflatten(-1, (n, p)),
        "dt": dt,
        "A": -torch.linspace(-4, 2, n, device=DEVICE).exp(),
        "B": B.unflatten(-1, (g, m)),
        "C": C.unflatten(-1, (g, m)),
        "D": drawn(n, seed=3),
        "initial_state": drawn(b, n, p, m, seed=4) if has_state else None,
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "starts", "has_state"),
    [
        ((2, 131, 4, 12, 2, 10), [0, 1, 64, 100, 100, 131, 132, 220], True),
        ((1, 192, 2, 16, 1, 20), None, True),
        ((1, 3, 4, 4, 4, 6), None, False),
        *([((2, 1000, 16, 64, 2, 128), [0, 70, 999, 1000, 1300], True)] if DEVICE == "cuda" else []),
    ],
)
def test_mamba2_scan(
    shape: tuple[int, int, int, int, int, int],
    starts: list[int] | None,
    has_state: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if dtype is torch.float32 and shape[-1] > 64:
        pytest.skip("layers give the kernels 16-bit inputs; these tiles compile for minutes in fp32")
    monkeypatch.setattr(mamba2, "_MIN_BLOCK", 16)  # two programs divide wide states
    cu_seqlens = boundaries(starts, shape[0] * shape[1])

    def oracle(x, dt, A, B, C, D, initial_state):  # noqa: N803
        return mamba2_recurrence(x, dt, A, B, C, D, starts or [], initial_state)

    compare(
        lambda **inputs: mamba2.mamba2_scan(**inputs, cu_seqlens=cu_seqlens),
        oracle, mamba2_inputs(*shape, dtype, has_state=has_state), dtype,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "width", "starts", "has_bias", "has_silu", "has_initial"),
    [
        ((2, 83, 20), 4, [0, 1, 40, 41, 43, 83, 85, 149, 150], True, True, True),
        ((1, 66, 33), 4, None, False, True, True),
        ((2, 65, 8), 3, [0, 65, 129], True, False, True),
        ((2, 64, 16), 2, None, False, True, False),
        ((1, 2, 16), 4, None, True, True, True),
    ],
)
def test_causal_convolution(
    shape: tuple[int, int, int],
    width: int,
    starts: list[int] | None,
    has_bias: bool,
    has_silu: bool,
    has_initial: bool,
    dtype: torch.dtype,
) -> None:
    b, s, c = shape
    ids = document_ids(starts, b, s)
    inputs = {
        "x": drawn(s, b, 2 * c, dtype=dtype).transpose(0, 1)[:, :, c:],
        "weight": drawn(c, width, dtype=dtype, seed=1),
        "bias": drawn(c, dtype=dtype, seed=2) if has_bias else None,
        "initial_tokens": drawn(b, width - 1, c, dtype=dtype, seed=3) if has_initial else None,
    }

    def run(**tensors: Tensor) -> list[Tensor]:
        return [convolution.causal_conv(**tensors, has_silu=has_silu, document_ids=ids)]

    def oracle(x: Tensor, weight: Tensor, bias: Tensor | None, initial_tokens: Tensor | None) -> list[Tensor]:
        z = convolution_sums(x, weight, bias, starts or [], initial_tokens)
        return [z * z.sigmoid() if has_silu else z]

    compare(run, oracle, inputs, dtype)


def delta_inputs(
    s: int, b: int, nk: int, n: int, dk: int, dv: int, dtype: torch.dtype, *, has_state: bool
) -> dict[str, Tensor | None]:
    """Keys of length 1, some of them equal, so that writes replace each other; decays from 1 to 1/50."""
    normalize = torch.nn.functional.normalize
    k = normalize(drawn(s, b, nk, dk, seed=1), dim=-1)
    k[1::3] = k[::3][: len(k[1::3])]
    return {
        "q": (normalize(drawn(s, b, nk, dk), dim=-1) * dk**-0.5).to(dtype),
        "k": k.to(dtype),
        "v": drawn(s, b, 2 * n, dv, dtype=dtype, seed=2)[:, :, n:],
        "g": -torch.linspace(-6, 1.4, n, device=DEVICE).exp() * drawn(s, b, n, seed=3).abs(),
        "beta": drawn(s, b, n, seed=4).mul(2).sigmoid(),
        "state": drawn(b, n, dk, dv, seed=5) if has_state else None,
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "starts", "has_state"),
    [
        ((131, 2, 1, 2, 6, 10), [0, 1, 64, 100, 100, 131, 132, 220], True),
        ((192, 1, 2, 2, 20, 40), None, True),
        ((3, 1, 2, 2, 8, 4), None, False),
        *([((1000, 2, 2, 4, 128, 128), [0, 70, 999, 1000, 1300], True)] if DEVICE == "cuda" else []),
    ],
)
def test_gated_delta_rule(
    shape: tuple[int, int, int, int, int, int], starts: list[int] | None, has_state: bool, dtype: torch.dtype
) -> None:
    if max(shape[2:]) > 64 and dtype is torch.float32:
        pytest.skip("tiles of 16-bit numbers only")
    ids = document_ids(starts, shape[1], shape[0])

    def oracle(q, k, v, g, beta, state):
        return delta_recurrence(q, k, v, g, beta, starts or [], state)

    compare(
        lambda **inputs: gated_delta.gated_delta_rule(**inputs, document_ids=ids),
        oracle, delta_inputs(*shape, dtype, has_state=has_state), dtype,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "num_groups", "width"), [((7, 3), 2, 20), ((2, 1), 1, 2100), ((33, 2), 3, 16)]
)
def test_gated_norm(
    rows: tuple[int, int], num_groups: int, width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gated_norm, "_PROGRAMS", 2 * num_groups)  # several tiles a program
    monkeypatch.setattr(gated_norm, "_TILE", 64)
    channels, eps = num_groups * width, 1e-5
    inputs: dict[str, Tensor | None] = {
        "y": drawn(*rows, channels, dtype=dtype),
        "gate": drawn(*rows, 3 * channels, dtype=dtype, seed=1)[..., channels : 2 * channels],
        "weight": drawn(channels, dtype=dtype, seed=2),
    }

    def oracle(y: Tensor, gate: Tensor, weight: Tensor) -> list[Tensor]:
        gated = (y * gate * gate.sigmoid()).unflatten(-1, (num_groups, width))
        return [torch.nn.functional.rms_norm(gated, (width,), eps=eps).flatten(-2) * weight]

    compare(
        lambda **given: [gated_norm.gated_norm(**given, num_groups=num_groups, eps=eps)],
        oracle,
        inputs,
        dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_projection_has_the_gradients_that_kernels_write_into_their_places(dtype: torch.dtype) -> None:
    s, b, n, p, g, m = 70, 2, 4, 12, 2, 10
    sizes, parts = [n * p, n * p + 2 * g * m], [(n, p), (g, m), (g, m)]
    dt = torch.nn.functional.softplus(drawn(b, s, n, seed=1) * 2 - 2)
    weights = (drawn(sizes[1], 4, seed=2), -torch.linspace(-4, 2, n, device=DEVICE).exp(), drawn(n, seed=3))
    gain = drawn(sizes[0], seed=4)

    def run(projection: Tensor) -> list[Tensor]:
        (gate, mixed), places = split_channels(projection, sizes)
        kernel, decays, skip = weights
        y = convolution.causal_conv(mixed.transpose(0, 1), kernel, has_silu=True, place=places[1]).transpose(
            0, 1
        )
        channels, of_parts = split_channels(y, [heads * width for heads, width in parts])
        x, B, C = (one.transpose(0, 1).unflatten(-1, part) for one, part in zip(channels, parts, strict=True))  # noqa: N806
        y, _ = mamba2.mamba2_scan(x, dt, decays, B, C, skip, places=of_parts)
        return [gated_norm.gated_norm(y.transpose(0, 1).flatten(2), gate, gain, g, 1e-5, places[0])]

    def oracle(projection: Tensor) -> list[Tensor]:
        gate, mixed = projection.split(sizes, dim=-1)
        kernel, decays, skip = (weight.double() for weight in weights)
        z = convolution_sums(mixed.transpose(0, 1), kernel, None, [], None)
        channels = (z * z.sigmoid()).split([heads * width for heads, width in parts], dim=-1)
        x, B, C = (one.unflatten(-1, part) for one, part in zip(channels, parts, strict=True))  # noqa: N806
        y, _ = mamba2_recurrence(x, dt.double(), decays, B, C, skip, [], None)
        gated = y.transpose(0, 1).flatten(2) * gate * gate.sigmoid()
        return [
            torch.nn.functional.rms_norm(gated.unflatten(-1, (g, -1)), (n * p // g,), eps=1e-5).flatten(-2)
            * gain
        ]

    compare(run, oracle, {"projection": drawn(s, b, sum(sizes), dtype=dtype)}, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "n", "d"), [((7, 2), 3, 20), ((5, 1), 2, 128), ((1, 1), 1, 3000)])
def test_unit_heads_write_their_gradient_into_a_part_of_a_projection(
    tokens: tuple[int, int], n: int, d: int, dtype: torch.dtype
) -> None:
    def run(projection: Tensor) -> list[Tensor]:
        parts, places = split_channels(projection, [n * d, n * d, 4])
        heads = [part.unflatten(-1, (n, d)) for part in parts[:2]]
        return [unit_heads(heads[0], 0.3, 1e-6, places[0]), unit_heads(heads[1], 1.0, 1e-6)]

    def oracle(projection: Tensor) -> list[Tensor]:
        heads = projection[..., : 2 * n * d].unflatten(-1, (2, n, d))
        unit = heads / (heads.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        return [0.3 * unit[:, :, 0], unit[:, :, 1]]

    compare(run, oracle, {"projection": drawn(*tokens, 2 * n * d + 4, dtype=dtype)}, dtype)
