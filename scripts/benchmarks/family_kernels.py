"""Before and after of single kernels."""

import sys, torch

sys.path.insert(0, "scripts/benchmarks")
from timing import milliseconds
from megatrain.kernels.cublaslt import accumulate_with_sums
from megatrain.kernels.fused import sums, random, attention
from megatrain.kernels.wgrad import accumulate_weight_gradient


def graph(run):
    run()
    torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        for _ in range(4):
            run()
    return milliseconds(g.replay) / 4 * 1e3


def wgrad():
    for t, o, i in (
        (16384, 1024, 1024),
        (16384, 3072, 1024),
        (16384, 4096, 1024),
        (16384, 1024, 4096),
        (8192, 2048, 2048),
        (8192, 6144, 2048),
        (8192, 8192, 2048),
        (8192, 2048, 8192),
        (2048, 2048, 2048),
        (2048, 8192, 2048),
    ):
        dy = torch.randn(t, o, device="cuda").bfloat16()
        x = torch.randn(t, i, device="cuda").bfloat16()
        g = torch.zeros(o, i, device="cuda")
        b = torch.zeros(o, device="cuda")
        try:
            s = accumulate_with_sums(g, dy, x)
            e1 = ((g - dy.float().t() @ x.float()).abs().max() / g.abs().max()).item()
            e2 = ((s - dy.double().sum(0)).abs().max() / s.abs().max()).item()
            joint = graph(lambda: b.add_(accumulate_with_sums(g, dy, x)))
        except RuntimeError as e:
            print("wgrad", t, o, i, "joint failed:", str(e)[:80])
            joint = e1 = e2 = float("nan")
        alone = graph(lambda: torch.addmm(g, dy.t(), x, out_dtype=g.dtype, out=g))
        apart = graph(lambda: sums.column_sums(dy, b))
        print(
            f"wgrad {t:6}x{o:5}x{i:5}: gemm {alone:7.1f} sums {apart:6.1f} together {alone + apart:7.1f}  joint {joint:7.1f} us  errors {e1:.1e} {e2:.1e}",
            flush=True,
        )


def drops():
    for rows, b, h in ((512, 32, 1024), (1024, 8, 2048)):
        x, r = (torch.randn(rows, b, h, device="cuda").bfloat16() for _ in range(2))
        ids = torch.arange(rows * b, device="cuda").view(rows, b)
        a = graph(lambda: random.drop(x, ids, 7, 0.1))
        c = graph(lambda: r + x)
        d = graph(lambda: random.drop(x, ids, 7, 0.1, r))
        ok = torch.equal(random.drop(x, ids, 7, 0.1, r), r + random.drop(x, ids, 7, 0.1))
        print(f"drop {rows}x{b}x{h}: drop {a:.1f} + add {c:.1f}, together {d:.1f} us, equal {ok}", flush=True)


def masks():
    import masked_attention as m
    from functools import partial
    from megatrain.kernels.attention.dropout import Dropout

    for case in m.CASES:
        q, k, v, dout, table = m.inputs(case)
        fwd, bwd = m.passes(case, "TILES", None)
        out, lse = fwd()
        rule = fwd.args[3].dropout
        kept = attention.memory_for_mask(q, k, rule)
        found = bwd(out, lse)
        f1, b1 = graph(fwd), graph(lambda: bwd(out, lse))
        f2 = graph(lambda: fwd(kept=kept))
        options = dict(fwd.keywords)
        back = lambda: attention.backward(dout, q, k, v, out, lse, fwd.args[3], **options, kept=kept)
        again = back()
        same = all(torch.equal(x, y) for x, y in zip(found, again) if x is not None)
        b2 = graph(back)
        print(
            f"attention {case.name:20}: mask in backward {f1:6.1f} + {b1:6.1f} = {f1 + b1:6.1f}; in forward {f2:6.1f} + {b2:6.1f} = {f2 + b2:6.1f} us; same {same}",
            flush=True,
        )


for name in sys.argv[1:]:
    try:
        globals()[name]()
    except Exception as e:
        print(name, "FAILED", type(e).__name__, str(e)[:300], flush=True)
