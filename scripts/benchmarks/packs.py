"""Time packs of documents of different lengths under each scheduler: fixed groups filled in order, balanced, and dynamic.

    python -m torch.distributed.run --nproc-per-node 4 scripts/benchmarks/packs.py                  one process per GPU
    python -m torch.distributed.run --nproc-per-node 4 scripts/benchmarks/packs.py --tiny           on CPUs, a tiny model
    ... scripts/benchmarks/packs.py --steps 3 --seconds 90 -- --num-layers 6 --global-batch-size 96

All rows train the same documents, log-normal lengths with a tail to 131,072 tokens, in one process group; flags after `--` are of
pretrain.py. `cp4 first_fit` has one size of groups. `gathered`: keys and values are gathered instead of heads exchanged.

    ms           median of the steps
    simulated    the simulated step, of the times in training/planning/packs.py; `error` compares it with ms
    idle         simulated share of the ranks' time in which they wait
    bound        simulated step over a bound that no schedule is below

With --fit the times of `each` micro-batch, of a token and of a pair of tokens are fitted to single packs, in seconds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from megatrain.config import parse
from megatrain.data.samples.pack_loader import PackLoader, PackSettings
from megatrain.parallel.packs.context import PackAttention
from megatrain.parallel.packs.schedule import SCHEDULERS, Pack, PackCosts, lower_bound
from megatrain.parallel.packs.simulate import drawing, seconds_of, simulate
from megatrain.training.batches import build_samples
from megatrain.training.build import build_schedules
from megatrain.training.engine import Engine
from megatrain.training.launch.ranks import Ranks, joined_ranks, report_errors
from megatrain.training.planning.packs import pack_settings

MODEL = (
    "--num-layers 8 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention"
    " --num-query-groups 8 --vocab-size 128256 --bf16 --global-batch-size 64 --seq-length 131072 --device cuda"
)
TINY = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 8 --vocab-size 301 --device cpu"
    " --global-batch-size 24 --seq-length 1024"
)
COMMON = (
    "--normalization RMSNorm --swiglu --position-embedding-type rope --rotary-base 500000 --disable-bias-linear"
    " --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --transformer-impl local"
    " --mock-data --tokenizer-type NullTokenizer --micro-batch-size 1 --train-iters 100 --eval-iters 0 --lr 1e-5"
    " --pack-documents --dynamic-context-parallel --calculate-per-token-loss --num-workers 0"
)
LENGTHS = '{{"type": "lognormal", "min_seq_len": 64, "max_seq_len": {0}, "mean_seq_len": {1}, "lognormal_sigma": 1.5}}'
ROWS = {
    "cp{0} first_fit": ("first_fit", False, False),
    "cp{0} first_fit, gathered": ("first_fit", False, True),
    "cp{0} dp_balanced": ("dp_balanced", False, False),
    "dynamic": ("default_dynamic_cp", True, False),
}
"""Scheduler, groups of all sizes, keys and values gathered."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="a tiny model on CPUs")
    parser.add_argument("--steps", type=int, default=2, help="timed steps of each row, after one more")
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="start no further step after so many seconds"
    )
    parser.add_argument("--fit", action="store_true", help="fit the times of packs")
    parser.add_argument("flags", nargs="*", help="further flags of pretrain.py, after --")
    options = parser.parse_args()
    limit, mean = (1024, 96) if options.tiny else (131072, 8192)
    words = f"{TINY if options.tiny else MODEL} {COMMON}".split()
    words += ["--varlen-mock-dataset-config-json", LENGTHS.format(limit, mean), *options.flags]
    begin = time.perf_counter()

    def run() -> int:
        with joined_ranks(parse(words)) as ranks:
            _Benchmark(ranks, options, begin).run()
        return 0

    return report_errors(run)


class _Benchmark:
    """All rows on one engine."""

    def __init__(self, ranks: Ranks, options: argparse.Namespace, begin: float) -> None:
        self.ranks, self.plan, self.options, self.begin = ranks, ranks.plan, options, begin
        self.engine = Engine(ranks.plan, ranks.grid, ranks.device)
        self.engine.initialize()
        self.samples: Any = build_samples(ranks.plan, ranks.facts, lambda _: None).train
        self.settings = pack_settings(ranks.plan)
        self.batch = ranks.plan.config.training.global_batch_size
        self.hyperparams = build_schedules(ranks.plan).at(0)

    def run(self) -> None:
        self._print(
            f"ready after {time.perf_counter() - self.begin:.0f} s, {torch.cuda.device_count()} GPUs a host"
        )
        lengths, _ = self._loader(self.settings).schedule(0, self.batch)
        self._print(
            f"{len(lengths)} documents, {lengths.sum():,} tokens in the first step, longest {lengths.max():,},"
            f" median {int(np.median(lengths)):,}; {self.settings.domain.tokens_per_rank:,} rows a rank"
        )
        if self.options.fit:
            self._fit()
        rows = {name.format(self.settings.domain.sizes[-1]): row for name, row in ROWS.items()}
        times: dict[str, list[float]] = {name: [] for name in rows}
        for step in range(1 + self.options.steps):  # all rows train the same documents in turn
            for name, row in rows.items():
                if self._is_late():
                    break
                seconds = self._step(row, step * self.batch)
                self._print(
                    f"step {step}, {name}: {1e3 * seconds:.0f} ms after {time.perf_counter() - self.begin:.0f} s"
                )
                if step:
                    times[name].append(seconds)
        self._table(rows, times)

    def _is_late(self) -> bool:
        late = torch.tensor(
            float(time.perf_counter() - self.begin > self.options.seconds), device=self.ranks.device
        )
        torch.distributed.all_reduce(late)
        return bool(late.item())

    def _settings_of(self, row: tuple[str, bool, bool]) -> PackSettings:
        scheduler, is_dynamic, _ = row
        domain = self.settings.domain
        sizes = domain.sizes if is_dynamic else domain.sizes[-1:]
        return replace(self.settings, scheduler=SCHEDULERS[scheduler], domain=replace(domain, sizes=sizes))

    def _loader(self, settings: PackSettings) -> PackLoader:
        return PackLoader(
            self.samples, len(self.samples), settings, rank=self.ranks.grid.replicas.rank, device=self.ranks.device,
            num_workers=0,
        )  # fmt: skip

    def _step(self, row: tuple[str, bool, bool], first: int) -> float:
        """Run one step; return its seconds without reading the documents."""
        settings = self._settings_of(row)
        for module in (one for segment in self.engine.model.segments for one in segment.modules()):
            if isinstance(context := getattr(module, "context", None), PackAttention):
                object.__setattr__(context, "gathers", row[2])
        batches = self._loader(settings).microbatches(first, self.batch // settings.documents_per_pass)
        return self._timed(lambda: self.engine.step(batches, self.hyperparams, first_sample=first))

    def _timed(self, work: Any) -> float:
        self._wait()
        start = time.perf_counter()
        work()
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        if self.ranks.device.type == "cuda":
            torch.cuda.synchronize()
        torch.distributed.barrier()

    def _table(self, rows: dict[str, tuple[str, bool, bool]], times: dict[str, list[float]]) -> None:
        first = next(iter(rows))
        self._print(
            f"{'':28}{'ms':>9}{'gain':>7}{'tokens/s':>10}{'simulated':>11}{'error':>8}{'idle':>7}{'bound':>7}{'packs':>7}"
        )
        for name, row in rows.items():
            if not times[name]:
                self._print(f"{name:28} no step")
                continue
            settings = self._settings_of(row)
            found = [
                self._loader(settings).schedule(k * self.batch, self.batch)
                for k in range(1, 1 + len(times[name]))
            ]
            steps = [simulate(packs, lengths, settings.costs, settings.domain) for lengths, packs in found]
            bounds = [lower_bound(lengths, settings.costs, self.settings.domain) for lengths, _ in found]
            ms, simulated = (1e3 * statistics.median(x) for x in (times[name], [step.time for step in steps]))
            tokens = statistics.mean(
                lengths.sum() / t for (lengths, _), t in zip(found, times[name], strict=True)
            )
            self._print(
                f"{name:28}{ms:9.0f}{statistics.median(times[first]) * 1e3 / ms:7.2f}{tokens:10,.0f}{simulated:11.0f}"
                f"{simulated / ms - 1:8.1%}{statistics.mean(s.idle_share for s in steps):7.1%}"
                f"{statistics.mean(s.time / b for s, b in zip(steps, bounds, strict=True)):7.2f}{len(found[0][1]):7}"
            )
        settings = self._settings_of(rows["dynamic"])
        lengths, packs = self._loader(settings).schedule(self.batch, self.batch)
        self._print(
            "\n".join(
                drawing(packs, simulate(packs, lengths, settings.costs, settings.domain), settings.domain)
            )
        )
        if self.ranks.device.type == "cuda":
            self._print(
                f"peak {torch.cuda.max_memory_allocated() / 1e9:.1f} GB allocated, {torch.cuda.max_memory_reserved() / 1e9:.1f} GB reserved"
            )

    def _fit(self) -> None:
        """Time micro-batches of one pack each, and fit their costs."""
        domain, rows, seconds, sizes = self.settings.domain, [], [], []
        most = domain.tokens_per_rank
        for size in domain.sizes:
            for share, pieces in ((0.25, 1), (1.0, 1), (1.0, 16)):
                lengths = np.full(pieces, int(most * size * share) // pieces, np.int64)
                taken = [self._fitted(lengths, size) for _ in range(2)]
                rows.append(
                    [
                        1.0,
                        lengths.sum() / size,
                        (lengths.astype(float) ** 2).sum() / size,
                        (size > 1) * lengths.sum() / size,
                    ]
                )
                seconds.append(min(taken))
                sizes.append(f"{size} ranks, {pieces} of {lengths[0]}")
        # Relative errors count alike.
        matrix, target = np.array(rows), np.array(seconds)
        used = matrix.any(0)
        found = np.zeros(4)
        found[used] = np.linalg.lstsq(matrix[:, used] / target[:, None], np.ones(len(target)), rcond=None)[0]
        each, token, pair, sent = found
        planned = self.settings.costs
        self._print(f"fitted each {each:.3e} token {token:.3e} pair {pair:.3e} sent {sent:.3e}")
        self._print(
            f"planned each {planned.each:.3e} token {planned.token:.3e} pair {planned.pair:.3e} sent {planned.sent:.3e}"
        )
        for name, took, row in zip(sizes, seconds, rows, strict=True):
            n = int(name.split()[0])
            lengths = np.full(int(name.split()[2]), int(name.split()[-1]), np.int64)
            plan = seconds_of(
                Pack(0, n, tuple(range(len(lengths))), int(lengths.sum())), lengths, planned, domain
            )
            self._print(
                f"  {name:28} {1e3 * took:8.1f} ms, fitted {1e3 * float(np.dot(found, row)):8.1f}, planned {1e3 * plan:8.1f}"
            )
        self.settings = replace(self.settings, costs=PackCosts(each=each, token=token, pair=pair, sent=sent))

    def _fitted(self, lengths: Any, size: int) -> float:
        """Time the passes of a pack on each group of a size, without the update."""
        samples = _Lengths(lengths, self.plan.derived.vocab_size)
        pack = Pack(
            self.ranks.grid.replicas.rank // size * size, size, tuple(range(len(lengths))), int(lengths.sum())
        )
        settings = replace(self.settings, scheduler=lambda *_: [pack], documents_per_pass=len(lengths))
        loader = PackLoader(
            samples,
            len(lengths),
            settings,
            rank=self.ranks.grid.replicas.rank,
            device=self.ranks.device,
            num_workers=0,
        )
        batches = self.engine.shard_batches(loader.microbatches(0, 1))
        infos = self.engine.pass_infos(batches, first_sample=0)
        seconds = self._timed(
            lambda: self.engine.executor.run(
                self.engine.pipeline.training(0, 2), [*batches, *batches], [*infos, *infos]
            )
        )
        self.engine.buffers.gradients.zero()
        return seconds / 2

    def _print(self, text: str) -> None:
        if self.ranks.is_main:
            print(text, flush=True)


class _Lengths:
    """Documents of given lengths."""

    def __init__(self, lengths: Any, vocab_size: int) -> None:
        from megatrain.data.samples.document_dataset import DocumentDataset, build_document_index
        from megatrain.data.samples.gpt_dataset import SampleOptions
        from megatrain.data.samples.mock import MockSequences

        longest = int(lengths.max()) + 1
        config = f'{{"type": "uniform", "min_seq_len": {longest}, "max_seq_len": {longest}}}'
        mock = MockSequences(vocab_size=vocab_size, eod=0, lengths=config)
        index = build_document_index(
            mock.lengths, range(len(lengths)), seq_length=longest, seed=0, num_samples=None
        )
        self.documents = DocumentDataset(mock, index, SampleOptions(seq_length=longest, eod=0))

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, k: int) -> Any:
        return self.documents[k]

    def spans(self, k: int) -> Any:
        return self.documents.spans(k)


if __name__ == "__main__":
    sys.exit(main())
