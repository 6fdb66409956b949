"""Write the quickstart's corpus: this Python's standard library and its docstrings, one JSON object per line.

--folder reads another folder instead, such as Python's site-packages.

    *.py of the standard library -> {"text": source, "path": "json/decoder.py"}
    their longer docstrings      -> {"text": prose,  "path": "json.decoder:JSONDecoder"}

Nothing is downloaded, and the same Python gives the same bytes. The order of the files is pseudo-random, each followed by its
docstrings, so that a validation split at the end resembles the rest. Tables of characters are excluded.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import sysconfig
import tokenize
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

SKIPPED_FOLDERS = {
    "encodings",
    "pydoc_data",
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "idlelib",
    "lib2to3",
    "__pycache__",
}
MIN_DOCSTRING_CHARACTERS = 200


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="the JSONL file to write")
    parser.add_argument(
        "--limit-mb",
        type=float,
        default=16.0,
        help="stop before the file grows beyond this many megabytes [16]",
    )
    parser.add_argument("--folder", type=Path, help="folder of *.py files [the standard library]")
    arguments = parser.parse_args()

    library = arguments.folder or Path(sysconfig.get_paths()["stdlib"])
    if arguments.folder is None and not any(library.glob("*.py")):
        raise SystemExit(
            f"{library} contains no Python sources\n  fix: use a Python whose library is not zipped, or give --folder"
        )
    num_documents, num_bytes = write_corpus(
        library, arguments.output, limit_bytes=int(arguments.limit_mb * 1e6)
    )
    print(f"{arguments.output}: {num_documents} documents, {num_bytes / 1e6:.1f} MB from {library}")


def write_corpus(library: Path, output: Path, *, limit_bytes: int) -> tuple[int, int]:
    """Write whole documents up to the limit; return their number and their bytes."""
    output.parent.mkdir(parents=True, exist_ok=True)
    # quickstart.sh must not mistake a truncated file for a finished one.
    unfinished = output.with_name(output.name + ".part")
    num_documents = num_bytes = 0
    with unfinished.open("wb") as file:
        for text, path in documents(library):
            try:
                line = json.dumps({"text": text, "path": path}, ensure_ascii=False).encode() + b"\n"
            except UnicodeEncodeError:  # a lone surrogate
                continue
            if num_bytes + len(line) > limit_bytes:
                break
            file.write(line)
            num_documents += 1
            num_bytes += len(line)
    if not num_documents:
        raise SystemExit(
            f"{library} contains no Python source of less than {limit_bytes / 1e6:g} MB\n  fix: set --folder to another folder, or increase --limit-mb"
        )
    unfinished.replace(output)
    return num_documents, num_bytes


def documents(library: Path) -> Iterator[tuple[str, str]]:
    """Yield (text, path) of each source file of the library, followed by its docstrings."""
    relative_paths = [path.relative_to(library) for path in library.rglob("*.py")]
    for relative in sorted(
        relative_paths, key=lambda path: hashlib.sha256(path.as_posix().encode()).digest()
    ):
        if SKIPPED_FOLDERS.intersection(relative.parts) or not (library / relative).is_file():
            continue
        try:
            with tokenize.open(library / relative) as file:  # respects a coding comment
                source = file.read()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # invalid escapes in strings of the library
                tree = ast.parse(source)
        except (SyntaxError, UnicodeDecodeError):  # a few files are broken on purpose
            continue
        if not source.strip():
            continue
        yield source, relative.as_posix()
        module = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
        for name, prose in docstrings(tree):
            yield prose, f"{module}:{name}"


def docstrings(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield (dotted name, prose) for the module, its classes and their functions, in the order of the file."""

    def walk(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            prose = ast.get_docstring(node)
            if prose and len(prose) > MIN_DOCSTRING_CHARACTERS:
                yield name, prose
        for child in ast.iter_child_nodes(node):
            is_named = isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            yield from walk(child, f"{name}.{child.name}".removeprefix(".") if is_named else name)

    yield from walk(tree, "")


if __name__ == "__main__":
    main()
