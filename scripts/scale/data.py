"""Start of a rank's data: `python scripts/scale/data.py --documents 10000000 --datasets 1`, with datasets of sparse files; `TMPDIR` has
24 bytes a document, and more with several epochs.

`facts` reads all of `.idx`, as rank 0 does first, and builds nothing; `cold` computes the index, shared by `--processes` as by the ranks
of a run; `warm` is every later start and every other rank: it opens the files, compares their digests with those of rank 0, and maps index
and blend. Processor seconds do not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt

from megatrain.config.derive.datasets import Blend
from megatrain.data.indexed.reader import HEADER, MAGIC, VERSION
from megatrain.data.samples.build import SamplePlans, SplitBuilder
from megatrain.data.samples.gpt_dataset import SampleOptions
from megatrain.data.samples.index_cache import EVERYTHING, NotCachedError, Share
from megatrain.data.samples.sources import inspect_datasets

UINT16, DOCUMENT_TOKENS, SEQ_LENGTH = 8, 625, 8192
BLOCK = 10_000_000
"""Documents that are made at once."""


def make(prefix: Path, documents: int, seed: int) -> None:
    """Write a dataset whose tokens are zeros that take no space; datasets of one seed would share an index."""
    blocks = [range(start, min(start + BLOCK, documents)) for start in range(0, documents, BLOCK)]
    num_tokens = 0
    with prefix.with_suffix(".idx").open("wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, UINT16, documents, documents + 1))
        for block in blocks:
            _lengths(block, seed).tofile(file)
        for block in blocks:
            ends = np.cumsum(_lengths(block, seed), dtype=np.int64) + num_tokens
            (2 * np.concatenate(([num_tokens], ends[:-1]))).tofile(file)
            num_tokens = int(ends[-1])
        for block in blocks:
            np.arange(block.start, block.stop, dtype=np.int64).tofile(file)
        np.array([documents], np.int64).tofile(file)
    with prefix.with_suffix(".bin").open("wb") as file:
        file.truncate(2 * num_tokens)


def _lengths(block: range, seed: int) -> npt.NDArray[np.int32]:
    return np.random.default_rng((seed, block.start)).integers(1, 2 * DOCUMENT_TOKENS, len(block), np.int32)


def start(folder: Path, samples: int, share: Share = EVERYTHING) -> dict[str, float]:
    """Do what a rank does at a start; return seconds of both steps and of the processor, and the largest memory."""
    names = sorted(str(path.with_suffix("")) for path in folder.glob("*.idx"))
    blend = Blend(tuple(names), (1.0,) * len(names) if len(names) > 1 else None)
    before, processor = time.perf_counter(), time.process_time()
    facts, problems = inspect_datasets({"all": blend}, vocab_size=None, tokenizer_fingerprint=None)
    assert not problems, problems
    inspected = time.perf_counter()
    options = SampleOptions(seq_length=SEQ_LENGTH, eod=None)
    digests = {one.prefix: one.digest for one in facts}
    where = {"cache_folder": folder / "cache", "digests": digests, "log": lambda _: None}
    builder = SplitBuilder(options, **where, share=share)
    plans = SamplePlans(train=(samples,), valid=(0,), test=(0,), seed=1)
    with contextlib.suppress(NotCachedError):  # another process builds it
        builder.build({"all": blend}, "100,0,0", plans)
    return {
        "inspect": inspected - before,
        "build": time.perf_counter() - inspected,
        "processor": time.process_time() - processor,
        "largest MB": _largest_bytes() / 1e6,
    }


def _largest_bytes() -> int:
    """Return the most memory that this process had, with mapped pages; `getrusage` counts that of its parent too."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def main() -> None:
    """Print a line of JSON for a cold and for a warm start, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=10_000_000, help="of each dataset")
    parser.add_argument("--datasets", type=int, default=1)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--processes", type=int, default=1, help="that build the index of a cold start")
    parser.add_argument("--start", type=Path, help="start with the datasets of this folder")
    parser.add_argument("--share", type=int, nargs=2, default=EVERYTHING, metavar=("K", "N"))
    arguments = parser.parse_args()
    if arguments.start is not None:
        found = start(arguments.start, arguments.samples, Share(*arguments.share))
        print(json.dumps({name: round(value, 3) for name, value in found.items()}))
        return
    with TemporaryDirectory() as name:
        for number in range(arguments.datasets):
            make(Path(name) / f"set_{number:05d}", arguments.documents, number)
        words = [sys.executable, __file__, "--start", name, "--samples", str(arguments.samples)]
        cold = [(number, arguments.processes) for number in range(arguments.processes)]
        for what, shares in (("facts", [(1, 1)]), ("cold", cold), ("blend", [(0, 1)]), ("warm", [(0, 1)])):
            started = [
                subprocess.Popen([*words, "--share", *map(str, share)], stdout=subprocess.PIPE)
                for share in shares
            ]
            for process in started:
                print(what, process.communicate()[0].decode().strip(), flush=True)


if __name__ == "__main__":
    main()
