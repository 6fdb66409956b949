"""Lengths of synthetic documents by --varlen-mock-dataset-config-json, in Megatron-LM's words.

    {"type": "lognormal", "min_seq_len": 64, "max_seq_len": 131072, "mean_seq_len": 8192, "lognormal_sigma": 1.5}
    {"type": "uniform", "min_seq_len": 64, "max_seq_len": 4096}

`mean_seq_len` is the mean of the distribution before lengths are cut to the bounds.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from megatrain.config.errors import InputError

_FLAG: Final = "--varlen-mock-dataset-config-json"
_EXAMPLE: Final = '{"type": "lognormal", "min_seq_len": 64, "max_seq_len": 131072, "mean_seq_len": 8192, "lognormal_sigma": 1.5}'
_KEYS: Final = {
    "lognormal": {"min_seq_len", "max_seq_len", "mean_seq_len", "lognormal_sigma"},
    "uniform": {"min_seq_len", "max_seq_len"},
}
_IGNORED: Final = {"mode", "format"}
"""Megatron-LM's keys with one value here: a distribution, of packed documents."""


def mock_lengths(text: str, count: int, seed: int = 0) -> npt.NDArray[np.int32]:
    """Return the lengths of documents, at least 2 tokens each.

    Raises:
        InputError: the text is no file and no JSON of a known distribution.
    """
    values = _parsed(text)
    random, low, high = np.random.default_rng(seed), int(values["min_seq_len"]), int(values["max_seq_len"])
    if values["type"] == "uniform":
        return random.integers(low, high + 1, count, dtype=np.int32)
    sigma = float(values["lognormal_sigma"])
    location = math.log(values["mean_seq_len"]) - sigma**2 / 2
    return np.clip(random.lognormal(location, sigma, count), low, high).astype(np.int32)


def _parsed(text: str) -> dict[str, Any]:
    try:
        values = json.loads(text if text.lstrip().startswith("{") else Path(text).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"{_FLAG} {text}: {error}", fix=f"give JSON or a file of it, such as {_EXAMPLE}"
        ) from error
    kind = values.get("type") if isinstance(values, dict) else None
    wanted = _KEYS.get(kind) if isinstance(kind, str) else None
    if wanted is None:
        raise InputError(f"{_FLAG}: the type is {kind!r}, not {' or '.join(_KEYS)}", fix=f"use {_EXAMPLE}")
    given = values.keys() - {"type"} - _IGNORED
    if given != wanted or not all(type(values[key]) in (int, float) for key in wanted):
        raise InputError(
            f"{_FLAG}: {kind} needs the numbers {', '.join(sorted(wanted))}", fix=f"use {_EXAMPLE}"
        )
    if (
        not 2 <= values["min_seq_len"] <= values["max_seq_len"] < 2**31
        or min(values[key] for key in wanted) <= 0
    ):
        raise InputError(
            f"{_FLAG}: lengths from {values['min_seq_len']} to {values['max_seq_len']}",
            fix="use 2 or more tokens, and a larger max_seq_len than min_seq_len",
        )
    return dict(values)
