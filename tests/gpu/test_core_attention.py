"""Core attention of layers on a GPU against eager attention in fp64: head sizes, in bf16 and fp16.

torch's own choice of kernel covers sizes that the others do not support.
"""

import importlib.util

import pytest
import torch
from kernel_reference import DTYPES, MAX_ERRORS, head_sizes_of

from megatrain.config.model_spec.attention import AttentionSpec
from megatrain.kernels.attention.eager import EagerAttention
from megatrain.kernels.attention.interface import MaskSpec
from megatrain.model.implementations.attention import LocalAttention
from megatrain.parallel.batch import PassInfo
from megatrain.parallel.documents import Documents

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore"),  # warnings of flash-attn-4's dependencies
]
S, B, HEADS, GROUPS = 300, 2, 4, 2
ENDS = [0, 1, 129, S, 333, 333, 2 * S]
CASES = [*head_sizes_of("flash4", "cudnn", "flash2", "sdpa"), ("sdpa", 36)]


@pytest.mark.parametrize(
    ("backend", "d", "has_documents"),
    [*((*case, False) for case in CASES), *((*case, True) for case in head_sizes_of("flash2"))],
)
def test_head_sizes_in_core_attention(backend: str, d: int, has_documents: bool) -> None:
    if backend == "flash4" and importlib.util.find_spec("flash_attn") is None:
        pytest.skip("needs flash-attn-4")
    generator, dtype = torch.Generator().manual_seed(d), DTYPES.get(d, torch.bfloat16)
    qkv = torch.randn(S, B, HEADS + 2 * GROUPS, d, generator=generator).to("cuda", dtype).requires_grad_()
    dout = torch.randn(S, B, HEADS, d, generator=generator).to("cuda", dtype)
    documents = Documents(torch.tensor(ENDS, dtype=torch.int32, device="cuda"), S, B, S)
    core = LocalAttention(AttentionSpec(num_heads=HEADS, num_query_groups=GROUPS, head_dim=d), backend)
    sizes = (HEADS, GROUPS, GROUPS)
    out = core(*qkv.split(sizes, dim=2), PassInfo(documents=documents if has_documents else None))
    out.backward(dout.flatten(2))
    q, k, v = qkv.detach().double().split(sizes, dim=2)
    eager, spec = EagerAttention(scale=d**-0.5), MaskSpec(is_causal=True)
    if has_documents:
        spec = MaskSpec(explicit=documents.mask)
    expected, lse = eager.forward(q, k, v, spec)
    gradients = eager.backward(dout.double(), q, k, v, expected, lse, spec)
    for found, wanted in ((out.detach(), expected.flatten(2)), (qkv.grad, torch.cat(gradients, dim=2))):
        error = ((found.double() - wanted).abs().max() / wanted.abs().max()).item()
        assert error < MAX_ERRORS[dtype], error
