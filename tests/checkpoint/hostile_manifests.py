"""Manifests with a valid checksum and wrong content, as a hostile or faulty program could write them.

manifest of a real checkpoint ─> each value missing, null, of another type, negative, huge, nested ... ─> HostileManifest
"""

from __future__ import annotations

import copy
import functools
import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from megatrain.config.schema.lr_decay import LrDecay
from megatrain.config.schema.tree import settings

Path = tuple[str | int, ...]
MISSING = object()
NULLABLE = {
    ("state", "tokenizer_fingerprint"),
    ("state", "schedule", "decoupled_lr"),
    ("state", "schedule", "decoupled_min_lr"),
    ("state", "schedule", "lr_wsd_decay_samples"),
    ("state", "datasets", 0, "weight"),
    *(("state", "data_plans", split, 0) for split in ("train", "valid", "test")),
}
NEGATIVE = {("state", "loss_scale", "patience")}
CAME_LATER = {"lr_decay_digest", *(entry.name for entry in fields(LrDecay))}
"""Values of a schedule that older checkpoints lack."""
LISTS = {(setting.section, setting.name): setting.kind for setting in settings() if setting.is_list}
"""Types of the entries of settings that are lists."""


@dataclass(frozen=True)
class HostileManifest:
    """A manifest with wrong values. Reading it never raises anything but an error of checkpoints."""

    name: str
    content: Callable[[], Mapping[str, Any]]
    is_refused: bool
    """True: the checkpoint must count as damaged. False: it may also be valid, if the value is."""

    @property
    def text(self) -> bytes:
        """Content of `manifest.json`, made when it is asked for: some are large."""
        return signed(self.content())


def signed(content: Mapping[str, Any]) -> bytes:
    """A manifest of this content with a valid checksum."""
    content = {name: value for name, value in content.items() if name != "checksum"}
    checksum = zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
    return json.dumps(content | {"checksum": checksum}, sort_keys=True, separators=(",", ":")).encode()


def rename_file(name: str) -> Callable[[dict[str, Any]], None]:
    """Return an edit that gives the first shard another name, for all its chunks."""

    def edit(content: dict[str, Any]) -> None:
        content["files"][name] = content["files"].pop("shard_00000.safetensors")
        for tensor in content["tensors"].values():
            for stored in tensor["kinds"].values():
                for chunk in stored["chunks"]:
                    if chunk["file"] == "shard_00000.safetensors":
                        chunk["file"] = name

    return edit


def changed(content: Mapping[str, Any], path: Path, value: Any) -> dict[str, Any]:
    """A copy with another value at the path; MISSING removes it."""
    result = copy.deepcopy(dict(content))
    place: Any = result
    for key in path[:-1]:
        place = place[key]
    if value is MISSING:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return result


def _edited(content: Mapping[str, Any], edit: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    result = copy.deepcopy(dict(content))
    edit(result)
    return result


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def hostile_manifests(content: Mapping[str, Any]) -> Iterator[HostileManifest]:
    """Yield the manifests that differ from a valid one in one value, and those with contradictions.

    Args:
        content: content of `manifest.json` of a training run, with datasets, a loss scale and expert biases if possible.
    """
    for path, value in _values(content):
        for kind, wrong, is_refused in _wrong_values(path, value):
            name = f"{'.'.join(map(str, path))} {kind}"
            yield HostileManifest(name, functools.partial(changed, content, path, wrong), is_refused)
    for name, edit in _CONTRADICTIONS.items():
        yield HostileManifest(name, functools.partial(_edited, content, edit), is_refused=True)


def _values(content: Mapping[str, Any]) -> Iterator[tuple[Path, Any]]:
    for name in ("iteration", "consumed_train_samples", "optimizer_step_count", "version", "format"):
        yield (name,), content[name]
    for name in ("state", "config", "files", "tensors"):
        yield from _inner((name,), content[name], most=None if name in ("state", "config") else 1)


def _inner(path: Path, value: Any, most: int | None = None) -> Iterator[tuple[Path, Any]]:
    yield path, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items)[: 1 if isinstance(value, list) else most]:
        yield from _inner((*path, key), inner, most=None)


def _wrong_values(path: Path, value: Any) -> Iterator[tuple[str, Any, bool]]:
    """Yield a name, the wrong value, and whether it must be refused."""
    is_of_config = path[0] == "config"
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_count = isinstance(value, int) and is_number and not (is_of_config or "schedule" in path)
    is_other_kind = path[-2:-1] == ("kinds",) and path[-1] != "weight"  # another optimizer may lack it
    may_lack = (is_of_config and len(path) > 1) or path == ("state", "amax_history")  # without delayed scales
    may_lack |= path[:-1] == ("state", "schedule") and path[-1] in CAME_LATER
    of_list = LISTS.get(path[1:]) if is_of_config else None  # versions before had one value instead
    is_entry = path[:-1] in (
        ("state", "expert_biases"),
        ("state", "amax_history"),
        ("files",),
        ("tensors",),
    ) or path[-1:] == (0,)
    yield "missing", MISSING, not (may_lack or is_entry or is_other_kind)
    yield "null", None, not (value is None or (is_of_config and len(path) == 3) or path in NULLABLE)
    others = {"object": {"a": 1}, "list": [{}], "text": "7", "number": 0.5, "flag": True}
    for kind, other in others.items():
        is_same = type(other) in (type(value), of_list) or (kind == "number" and is_number) or value is None
        yield f"as {kind}", other, not is_same and not (value == {} and kind == "object")
    is_other = isinstance(value, str | bool | list | dict) and of_list is not int
    yield "negative", -1, (is_count and path not in NEGATIVE) or is_other
    yield "2**70", 1 << 70, is_count or isinstance(value, str | bool | list | dict)
    yield "2**62", 1 << 62, False
    yield "NaN", math.nan, value is not None or is_of_config
    yield "infinity", math.inf, value is not None or is_of_config
    yield "a huge text", "x" * (2 << 20), True
    yield "half a surrogate pair", "\ud800", True
    yield "deep nesting", nested(500), True
    yield "a name with half a surrogate pair", {"\udfff": 1}, True


def _overlap(content: dict[str, Any]) -> None:
    """8,000 chunks that overlap, whose elements have the right number."""
    tensor = {"shape": [2, 8000], "kinds": {}}
    box = [[0, 2], [0, 1]]
    kind = copy.deepcopy(next(iter(content["tensors"].values()))["kinds"]["weight"])
    chunk = kind["chunks"][0] | {"box": box}
    kind["chunks"] = [chunk | {"box": [[0, 2], [i // 2, i // 2 + 1]]} for i in range(8000)]
    tensor["kinds"] = dict.fromkeys(next(iter(content["tensors"].values()))["kinds"], kind)
    content["tensors"]["overlap"] = tensor


_CONTRADICTIONS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "more samples than planned": lambda c: c.update(consumed_train_samples=10**8),
    "fewer samples than iterations": lambda c: c.update(consumed_train_samples=c["iteration"] - 1),
    "more steps than samples": lambda c: c.update(optimizer_step_count=c["consumed_train_samples"] + 1),
    "more scheduled than consumed": lambda c: c["state"].update(
        scheduled_samples=c["consumed_train_samples"] + 1
    ),
    "optimizer state that it denies": lambda c: c["state"].update(has_optimizer=False),
    "delayed scales without their history": lambda c: (
        c["config"]["precision"].update(fp8_format="hybrid", fp8_recipe="delayed"),
        c["state"].pop("amax_history", None),
    ),
    "a million layers": lambda c: c["config"]["model"].update(num_layers=10**6),
    "2**40 experts": lambda c: c["config"]["experts"].update(num_experts=1 << 40),
    "overlapping chunks": _overlap,
    **{
        f"{setting.path} is another kind of value": lambda c, setting=setting: c["config"][
            setting.section
        ].update({setting.name: {"of": "no type"}})
        for setting in settings()
    },
}
