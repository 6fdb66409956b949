"""Time the data pipeline: `python scripts/benchmarks/data.py [section ...] [--tokenizer PATH]`, all sections by default.

preprocess   preprocess_data.py against encode_batch of the tokenizers library, on the same text and cores
index        10 million documents, 10 billion tokens, s 2048, one epoch: open and index them, with and without the cache
blend        1,000 datasets of 10 thousand documents, weighted, 4 million samples: the whole start of a run
batch        time that a step waits for 4 prefetched samples of 8192 tokens

Files are created in a temporary folder; the .bin files of `index` and `blend` are sparse and take no space.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import resource
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from megatrain.config.derive.datasets import Blend
from megatrain.data.indexed.reader import HEADER, MAGIC, VERSION, IndexedDataset
from megatrain.data.samples.build import SamplePlans, SplitBuilder
from megatrain.data.samples.gpt_dataset import GPTDataset, SampleOptions
from megatrain.data.samples.gpt_index import build_index
from megatrain.data.samples.index_cache import IndexCache
from megatrain.data.samples.loader import BatchLoader
from megatrain.data.samples.sampler import DataShard, SingleSampler
from megatrain.data.samples.sources import inspect_datasets

UINT16 = 8
"""The element code of .idx files."""

ROOT = Path(__file__).resolve().parents[2]
TEXT_BYTES = 64_000_000
DOCUMENT_CHARS = (1_000, 20_000)


@dataclass(frozen=True)
class Setup:
    """The inputs of a section."""

    folder: Path
    tokenizer: Path | None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "sections", nargs="*", metavar="section", help=f"sections to run: {', '.join(SECTIONS)}"
    )
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json, for `preprocess`")
    given = parser.parse_args()
    unknown = set(given.sections) - set(SECTIONS)
    if unknown:
        parser.error(f"unknown section: {', '.join(sorted(unknown))}")
    chosen = given.sections or list(SECTIONS)
    if "preprocess" in chosen and given.tokenizer is None:
        parser.error("preprocess needs --tokenizer")
    for name in chosen:
        print(f"\n{name}", flush=True)
        with TemporaryDirectory() as folder:
            SECTIONS[name](Setup(Path(folder), given.tokenizer))


def preprocess(setup: Setup) -> None:
    """Print the best of three alternating runs, without the start of processes, measured on an empty file."""
    text, empty = setup.folder / "text.jsonl", setup.folder / "empty.jsonl"
    num_bytes = write_text(text)
    empty.touch()
    print(
        "| processes or threads | encode_batch | encode_batch_fast | preprocess_data.py | to encode_batch | to the fast one |"
    )
    print("|---|---|---|---|---|---|")
    for count in (1, 2):
        seconds: dict[str, list[float]] = {}
        for _ in range(3):
            for name in ("encode_batch", "encode_batch_fast"):
                seconds.setdefault(name, []).append(library_seconds(setup, text, name, count))
            seconds.setdefault("ours", []).append(
                our_seconds(setup, text, count) - our_seconds(setup, empty, count)
            )
        speed = {name: num_bytes / min(times) / 1e6 for name, times in seconds.items()}
        print(
            f"| {count} | {speed['encode_batch']:.2f} MB/s | {speed['encode_batch_fast']:.2f} MB/s | "
            f"{speed['ours']:.2f} MB/s | {speed['ours'] / speed['encode_batch']:.2f} x | "
            f"{speed['ours'] / speed['encode_batch_fast']:.2f} x |",
            flush=True,
        )


def write_pair(prefix: Path, lengths: np.ndarray) -> None:
    """Write a dataset with one sequence per document and a sparse .bin of zeros."""
    offsets = np.zeros(len(lengths), np.int64)
    np.cumsum(lengths[:-1], dtype=np.int64, out=offsets[1:])
    with Path(f"{prefix}.idx").open("wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, UINT16, len(lengths), len(lengths) + 1))
        file.write(lengths.tobytes() + (2 * offsets).tobytes())
        file.write(np.arange(len(lengths) + 1, dtype=np.int64).tobytes())
    with Path(f"{prefix}.bin").open("wb") as file:
        file.truncate(2 * int(lengths.sum(dtype=np.int64)))


def timed(name: str, work: Callable[[], object], target: str) -> None:
    began = time.perf_counter()
    work()
    seconds = time.perf_counter() - began
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{name:32s} {seconds:8.3f} s   {memory:6.0f} MiB   (target {target})")


def index(setup: Setup) -> None:
    folder = setup.folder
    lengths = np.random.default_rng(0).integers(1, 2000, 10_000_000, dtype=np.int32)
    write_pair(folder / "data", lengths)
    IndexedDataset(folder / "data")  # load the files into the page cache
    print(f"{len(lengths):,} documents, {lengths.sum(dtype=np.int64):,} tokens")
    for name, target in (("cold", "3 s, 1.5 GB"), ("cached", "0.2 s")):
        cache = IndexCache(folder / "cache")

        def start(cache: IndexCache = cache) -> object:
            dataset = IndexedDataset(folder / "data")
            return build_index(
                dataset.lengths, range(len(dataset)), seq_length=2048, seed=1, num_samples=None, cache=cache
            )

        timed(f"  open and index, {name}", start, target)


def blend(setup: Setup) -> None:
    folder = setup.folder
    random = np.random.default_rng(0)
    for k in range(1000):
        write_pair(folder / f"d{k}", random.integers(1, 2000, 10_000, dtype=np.int32))
    prefixes = tuple(str(folder / f"d{k}") for k in range(1000))
    blends = {"all": Blend(prefixes, tuple(random.uniform(0.5, 1.5, 1000)))}
    plans = SamplePlans(train=(4_000_000,), valid=(4000,), test=(400,), seed=1)
    print("1,000 datasets of 10,000 documents, weighted, 4,000,000 training samples")
    for name, target in (("cold", "10 s"), ("cached", "2 s")):

        def start() -> object:
            inspect_datasets(blends, vocab_size=50_000, tokenizer_fingerprint=None)
            builder = SplitBuilder(SampleOptions(seq_length=2048, eod=0), cache_folder=folder / "cache")
            return builder.build(blends, "969,30,1", plans)

        timed(f"  check, open and blend, {name}", start, target)


def batch(setup: Setup) -> None:
    folder = setup.folder
    lengths = np.random.default_rng(0).integers(1, 2000, 200_000, dtype=np.int32)
    write_pair(folder / "data", lengths)
    np.memmap(folder / "data.bin", "<u2", "r+")[:] = 17
    dataset = IndexedDataset(folder / "data")
    made = build_index(lengths, range(len(lengths)), seq_length=8192, seed=1, num_samples=None)
    samples = GPTDataset(
        dataset, made, SampleOptions(seq_length=8192, eod=0, vocab_size=50_000, reset_attention_mask=True)
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sampler = SingleSampler(DataShard(micro_batch_size=1, dp_rank=0, dp_size=1), len(samples))
    for workers in (0, 2):
        with closing(
            BatchLoader(
                samples, sampler, seq_length=8192, device=device, num_workers=workers, has_documents=True
            )
        ) as loader:
            waits = []
            for step in range(60):
                began = time.perf_counter()
                loader.microbatches(4 * step, 4)
                waits.append(1000 * (time.perf_counter() - began))
                time.sleep(0.05)  # the computation of the step
        target = "   (target 1 ms)" if workers else ""
        print(
            f"4 x 8192 tokens to {device}, --num-workers {workers}: a step waits {np.median(waits[5:]):.2f} ms"
            f" (median), {max(waits[5:]):.2f} ms (maximum){target}"
        )


SECTIONS: dict[str, Callable[[Setup], None]] = {
    "preprocess": preprocess,
    "index": index,
    "blend": blend,
    "batch": batch,
}


def write_text(path: Path) -> int:
    """Write this machine's own text as JSON Lines in documents of varied length; return the bytes of text."""
    rng = random.Random(0)
    documents, num_bytes = [], 0
    for text in texts():
        position = 0
        while position < len(text) and num_bytes < TEXT_BYTES:
            length = rng.randint(*DOCUMENT_CHARS)
            documents.append(text[position : position + length])
            num_bytes += len(documents[-1].encode())
            position += length
    rng.shuffle(documents)
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": document}) + "\n" for document in documents)
    print(f"{num_bytes / 1e6:.1f} MB of text in {len(documents):,} documents", flush=True)
    return num_bytes


def texts() -> Iterator[str]:
    """Yield the sources of the standard library, then the documentation of the system."""
    for folder, pattern in (
        (sysconfig.get_paths()["stdlib"], "*.py"),
        ("/usr/share/man", "*.gz"),
        ("/usr/share/doc", "*"),
    ):
        for path in sorted(Path(folder).rglob(pattern)):
            if path.is_file() and "site-packages" not in path.parts:
                try:
                    content = path.read_bytes()
                    yield (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
                except (OSError, UnicodeDecodeError):
                    continue


LIBRARY = """
import json, sys, time, tokenizers
tokenizer = tokenizers.Tokenizer.from_file(sys.argv[1])
texts = [json.loads(line)["text"] for line in open(sys.argv[2], encoding="utf-8")]
start = time.perf_counter()
getattr(tokenizer, sys.argv[3])(texts, add_special_tokens=False)
print(time.perf_counter() - start)
"""


def library_seconds(setup: Setup, text: Path, name: str, num_threads: int) -> float:
    """Return the seconds of one call with all texts in memory, without reading, parsing or copying ids out."""
    done = subprocess.run(
        [sys.executable, "-c", LIBRARY, setup.tokenizer, text, name],
        env={"TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": str(num_threads)},
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout)


def our_seconds(setup: Setup, text: Path, num_workers: int) -> float:
    command = [sys.executable, ROOT / "preprocess_data.py", "--input", text, "--workers", str(num_workers)]
    command += ["--tokenizer-model", setup.tokenizer, "--append-eod", "--output-prefix", setup.folder / "out"]
    start = time.perf_counter()
    subprocess.run(command, capture_output=True, check=True)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
