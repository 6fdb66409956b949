"""The file of --data-schedule: training data that changes at given iterations.

    - {from_iteration: 20000, data_path: [0.5, data/web, 0.5, data/code]}
    - {from_iteration: 30000, data_path: [data/code]}

The flags of the run name the data of the first phase; validation and test data do not change.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import yaml

from megatrain.config.derive.datasets import Blend, parse_blend
from megatrain.config.errors import InputError
from megatrain.config.plain_yaml import load_yaml

_FIX: Final = "write a list in YAML or JSON, such as [{from_iteration: 20000, data_path: [0.7, A, 0.3, B]}], in ascending order"


def read_data_schedule(path: str) -> dict[int, Blend]:
    """Return the training data of each later phase, by the number of completed iterations at which it starts.

    Raises:
        ConfigError: the file cannot be read, or an entry is not valid.
    """
    flag = f"--data-schedule {path}"
    try:
        content = load_yaml(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{flag}: cannot be read: {error.strerror}", fix="give an existing file") from error
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise InputError(f"{flag}: is neither YAML nor JSON: {error}", fix=_FIX) from error
    if not isinstance(content, list) or not content:
        raise InputError(f"{flag}: contains no list of phases", fix=_FIX)
    phases: dict[int, Blend] = {}
    for number, entry in enumerate(content, start=1):
        start, words = _checked(entry, f"{flag}: entry {number}")
        if start <= max(phases, default=0):
            raise InputError(
                f"{flag}: entry {number} starts at iteration {start}, which is not after"
                f" {max(phases, default=0)}, where the phase before it starts",
                fix="sort the entries; the data of the first phase is given by flags, such as --data-path",
            )
        phases[start] = parse_blend(words, f"{flag}: entry {number}")
    return phases


def _checked(entry: Any, where: str) -> tuple[int, list[str]]:
    """Return the iteration and the words of an entry."""
    names = {"from_iteration", "data_path"}
    if not isinstance(entry, dict) or set(entry) != names:
        found = ", ".join(map(str, entry)) if isinstance(entry, dict) else repr(entry)
        raise InputError(f"{where} does not have from_iteration and data_path: {found}", fix=_FIX)
    start, data = entry["from_iteration"], entry["data_path"]
    if type(start) is not int:
        raise InputError(f"{where}: from_iteration {start!r} is not a whole number", fix=_FIX)
    words = data.split() if isinstance(data, str) else data
    if not isinstance(words, list) or not words or not all(type(word) in (str, int, float) for word in words):
        raise InputError(f"{where}: data_path {data!r} is not a list of weights and prefixes", fix=_FIX)
    return start, [str(word) for word in words]
