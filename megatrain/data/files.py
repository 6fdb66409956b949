"""Files that survive a power cut, errors that name their file, and packages that need not be installed."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from megatrain.config.errors import ConfigError, MegatrainError


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Errors of the disk inside name the file."""
    try:
        yield
    except OSError as error:
        raise MegatrainError(
            f"{path}: cannot be written: {error.strerror or error}",
            fix="make room or mend the disk, run again",
        ) from error


def flush(file: IO[bytes]) -> None:
    """What was written to a file is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """Make renames in a folder last through a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file and put it on the disk."""
    with writing(path), path.open("wb") as file:
        file.write(json.dumps(content, indent=2).encode() + b"\n")
        flush(file)


def optional_package(name: str, *, needed_for: str) -> Any:
    """A module of a package that is not among megatrain's own requirements."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ConfigError(
            f"{needed_for} needs the package {package}, which cannot be imported: {error}",
            fix=f"pip install {package}",
        ) from error
