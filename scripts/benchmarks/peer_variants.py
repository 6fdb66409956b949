"""Compare variants of overlapped products on two GPUs (temporary).

python -m torch.distributed.run --nproc-per-node 2 scripts/benchmarks/peer_variants.py
"""

import os
import sys
import traceback
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
import tensor_overlap as bench

from megatrain.parallel.build_grid import build_grid
from megatrain.parallel.process_groups import make_group
from megatrain.parallel.rank_lists import GridShape
from megatrain.parallel.tensor_overlap import peer_memory, products
from megatrain.parallel.tensor_overlap.peer_memory import PeerMemory
from megatrain.parallel.tensor_parallel import TensorParallel
from megatrain.kernels.wgrad import accumulate_weight_gradient

RANK = int(os.environ["RANK"])
ms, random = bench.milliseconds, bench.random


def say(*words):
    if RANK == 0:
        print(*words, flush=True)


def bits():
    """Products of halves against whole products."""
    for layer in bench.LAYERS:
        i, o = (layer.inputs, layer.outputs // 2) if layer.is_column else (layer.inputs // 2, layer.outputs)
        x, w, dy = random(8192, i), random(o, i), random(8192, o)
        for name, a, b in (("y", x, w.t()), ("dx", dy, w)):
            whole = a @ b
            halves = torch.cat([a[:4096] @ b, a[4096:] @ b])
            out = torch.empty_like(whole)
            t_whole = ms(lambda: torch.mm(a, b, out=out))
            t_half = ms(
                lambda: (torch.mm(a[:4096], b, out=out[:4096]), torch.mm(a[4096:], b, out=out[4096:]))
            )
            say(
                f"  {layer.name:18}{name:3} same bits: {torch.equal(whole, halves)}; whole {t_whole:.3f}, halves {t_half:.3f} ms"
            )


def raw(group):
    """Times of the parts: one send, a send with own copy, a sum, NCCL's collectives."""
    peers = PeerMemory(group)
    x, full = random(4096, 1, 4096), random(8192, 1, 4096)
    other = 1 - RANK
    say(f"  send 33.5 MB both ways       {ms(lambda: peers.send([(other, x)]).wait()):.4f} ms")
    say(f"  the same and own copy        {ms(lambda: peers.send([(other, x), (RANK, x)]).wait()):.4f} ms")
    small = random(64)
    say(f"  send 128 B both ways         {ms(lambda: peers.send([(other, small)]).wait()):.4f} ms")
    y, z = random(4096, 1, 4096), random(4096, 1, 4096)
    say(f"  torch.add of two parts       {ms(lambda: torch.add(x, y, out=z)):.4f} ms")
    say(f"  copy_ of 33.5 MB             {ms(lambda: z.copy_(x)):.4f} ms")
    say(f"  NCCL all-gather              {ms(lambda: dist.all_gather_into_tensor(full, x)):.4f} ms")
    say(f"  NCCL reduce-scatter          {ms(lambda: dist.reduce_scatter_tensor(x, full)):.4f} ms")


class KernelSignals:
    """Flags by torch's kernels put_signal and wait_signal."""

    handle = None

    def __init__(self, stream):
        self._stream, self.driver = stream, ORIGINAL_DRIVER(stream)
        self.copy = self.driver.copy

    def write(self, address, value):
        with torch.cuda.stream(self._stream):
            KernelSignals.handle.put_signal(1 - RANK, channel=value % 8)

    def wait(self, address, value):
        with torch.cuda.stream(self._stream):
            KernelSignals.handle.wait_signal(1 - RANK, channel=value % 8)


ORIGINAL_DRIVER = peer_memory._Driver


def torch_operators(group):
    """torch.ops.symm_mem, as before."""
    import torch.distributed._symmetric_memory  # noqa: F401

    name = group.handle.group_name
    ops = torch.ops.symm_mem

    def gathered_product(x, weight, peers, bias=None):
        return ops.fused_all_gather_matmul(x.contiguous(), [weight], 0, name)[1][0]

    def all_gather_product(x, weight, peers):
        gathered, out = ops.fused_all_gather_matmul(x.contiguous(), [weight], 0, name)
        return gathered, out[0]

    def product_reduce_scatter(x, weight, peers):
        return ops.fused_matmul_reduce_scatter(x.contiguous(), weight, "sum", 0, name)

    return [
        mock.patch.object(products, f.__name__, f)
        for f in (gathered_product, all_gather_product, product_reduce_scatter)
    ]


def direct(group):
    """The product writes into the peer's memory."""

    def product_reduce_scatter(x, weight, peers):
        rows = x.unflatten(0, (2, -1))
        own_rows = rows[RANK]
        like = own_rows.new_empty((*own_rows.shape[:-1], weight.shape[1]))
        sends = peers._next_sends(like)
        slots = sends._slots
        handle = KernelSignals.handle
        target = handle.get_buffer(
            1 - RANK, tuple(like.shape), like.dtype, storage_offset=sends._offset // like.element_size()
        )
        torch.mm(rows[1 - RANK].flatten(0, -2), weight, out=target.flatten(0, -2))
        slots.stream.wait_stream(torch.cuda.current_stream())
        slots.driver.write(slots.addresses[1 - RANK] + 4 * RANK, sends._number)
        received = sends.received()
        torch.mm(own_rows.flatten(0, -2), weight, out=like.flatten(0, -2))
        products._sum_into(like, like, received, peers)
        return like

    return mock.patch.object(products, "product_reduce_scatter", product_reduce_scatter)


def epilogue(group):
    """Backward pass of a column-parallel layer: the sum after dW, or in the last product's epilogue."""
    peers = PeerMemory(group)
    for name, o in (("qkv", 3072), ("fc1", 14336)):
        x, w, dy, grad = (
            random(4096, 1, 4096),
            random(o, 4096),
            random(8192, 1, o),
            torch.zeros(o, 4096, device="cuda"),
        )

        def now():
            full, gather = products.begin_gather(x, peers)
            dx, reduction = products.begin_reduction(dy @ w, peers)
            gather.wait()
            accumulate_weight_gradient(grad, dy.flatten(0, 1), full.flatten(0, 1))
            reduction.wait()

        def fused():
            full, gather = products.begin_gather(x, peers)
            rows = dy.unflatten(0, (2, -1))
            received = peers.send([(1 - RANK, rows[1 - RANK] @ w)])
            gather.wait()
            accumulate_weight_gradient(grad, dy.flatten(0, 1), full.flatten(0, 1))
            torch.addmm(received.from_rank(1 - RANK).flatten(0, 1), rows[RANK].flatten(0, 1), w)

        say(
            f"  {name}: sum apart {ms(now):.3f}, in the epilogue {ms(fused):.3f}, again {ms(now):.3f} {ms(fused):.3f} ms"
        )


def layers(tp):
    total, shown = 0.0, ""
    for layer in bench.LAYERS:
        forward, both = map(ms, layer.passes(tp, 2))
        total += both
        shown += f"{forward:8.3f}{both - forward:8.3f}  "
    say(f"    {shown} sum {total:.3f}")


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    grid = build_grid(GridShape(tp=2), RANK, make_group)
    group = grid.tp
    from torch.distributed import _symmetric_memory as symmetric

    original = symmetric.rendezvous

    def recorded(*args):
        KernelSignals.handle = original(*args)
        return KernelSignals.handle

    symmetric.rendezvous = recorded

    def overlapped():
        return TensorParallel(group, grid.kv, sequence_parallel=True, peers=PeerMemory(group))

    def case(name, run):
        say(name)
        try:
            run()
        except Exception:
            traceback.print_exc()

    def patched(patches):
        import contextlib

        with contextlib.ExitStack() as stack:
            for patch in patches:
                stack.enter_context(patch)
            layers(overlapped())

    case("parts", lambda: raw(group))
    case("halves", bits)
    say("layers: forward and backward of", ", ".join(layer.name for layer in bench.LAYERS))
    case("  collectives", lambda: layers(TensorParallel(group, grid.kv, sequence_parallel=True)))
    case("  copies", lambda: layers(overlapped()))
    case("  copies again", lambda: layers(overlapped()))
    case("  torch's operators", lambda: patched(torch_operators(group)))
    allocate = peer_memory.SharedSlots._allocate

    def with_plain_stream(slots, num_bytes):
        memory = allocate(slots, num_bytes)
        slots.stream = torch.cuda.Stream(slots.device)
        slots.driver = peer_memory._Driver(slots.stream)
        return memory

    case(
        "  copies, priority 0",
        lambda: patched([mock.patch.object(peer_memory.SharedSlots, "_allocate", with_plain_stream)]),
    )
    case("  products write into the peer", lambda: patched([direct(group)]))
    case("epilogue", lambda: epilogue(group))
    case("  signals by kernels", lambda: patched([mock.patch.object(peer_memory, "_Driver", KernelSignals)]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
