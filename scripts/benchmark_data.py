"""Times the data side: `python scripts/benchmark_data.py [section ...] [--tokenizer PATH]`, all sections by default.

preprocess   preprocess_data.py against encode_batch of the tokenizers library, on the same text and cores
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parent.parent
TEXT_BYTES = 64_000_000
DOCUMENT_CHARS = (1_000, 20_000)


@dataclass(frozen=True)
class Setup:
    """What sections work with."""

    folder: Path
    tokenizer: Path


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="*", metavar="section", help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--tokenizer", type=Path, required=True, help="a tokenizer.json")
    given = parser.parse_args()
    unknown = set(given.sections) - set(SECTIONS)
    if unknown:
        parser.error(f"there is no section {', '.join(sorted(unknown))}")
    with TemporaryDirectory() as folder:
        for name in given.sections or SECTIONS:
            print(f"\n{name}", flush=True)
            SECTIONS[name](Setup(Path(folder), given.tokenizer))


def preprocess(setup: Setup) -> None:
    """The best of three runs each, in turns; without the start of processes, which is measured on an empty file."""
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


SECTIONS: dict[str, Callable[[Setup], None]] = {"preprocess": preprocess}


def write_text(path: Path) -> int:
    """JSON Lines of this machine's own text, in documents of varied length: the bytes of text in them."""
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
    """Sources of the standard library, then what the system documents itself with."""
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
    """All texts in memory, one call: no reading, no parsing, and the ids stay inside the library."""
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
