"""Untrusted YAML: read with bounded time and memory.

    text ─> limit of size ─> nodes ─> limits of depth, of uses of anchors, of numbers, of characters ─> values

An anchor that is used twice counts twice: a few lines of anchors in anchors would stand for more values than memory holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import yaml

from megatrain.config.errors import is_unicode

_MAX_CHARACTERS: Final = 1 << 20
_MAX_NODES: Final = 100_000
_MAX_DEPTH: Final = 64
_MAX_NUMBER: Final = 100
"""Characters of a number; YAML 1.1 also has those of base 60, whose length takes quadratic time."""
_NUMBERS: Final = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


def compose_yaml(text: str, loader: type[yaml.SafeLoader] = yaml.SafeLoader) -> yaml.Node | None:
    """Return the nodes of a text, which have line numbers; None: it is empty.

    Raises:
        ValueError, yaml.YAMLError, RecursionError: it is no YAML, or exceeds a limit.
    """
    if len(text) > _MAX_CHARACTERS:
        raise ValueError(f"{len(text)} characters, more than {_MAX_CHARACTERS}")
    root = yaml.compose(text, Loader=loader)
    if root is not None:
        _check(root)
    return root


def load_yaml(text: str, loader: type[yaml.SafeLoader] = yaml.SafeLoader) -> Any:
    """Return the values of a text.

    Raises:
        ValueError, yaml.YAMLError, RecursionError: it is no YAML, or exceeds a limit.
    """
    root = compose_yaml(text, loader)
    return None if root is None else loader("").construct_document(root)


def _check(root: yaml.Node) -> None:
    level, count = [root], 0
    for _ in range(_MAX_DEPTH):
        count += sum(len(node.value) for node in level if not isinstance(node, yaml.ScalarNode))
        if count > _MAX_NODES:
            break
        for node in level:
            if isinstance(node, yaml.ScalarNode):
                _check_scalar(node)
        level = [part for node in level for part in _parts(node)]
        if not level:
            return
    raise ValueError(
        f"values are nested deeper than {_MAX_DEPTH}, or more than {_MAX_NODES} by use of anchors"
    )


def _check_scalar(node: yaml.ScalarNode) -> None:
    line = node.start_mark.line + 1
    if node.tag in _NUMBERS and len(node.value) > _MAX_NUMBER:
        raise ValueError(f"line {line}: a number of {len(node.value)} characters")
    if not is_unicode(node.value):
        raise ValueError(f"line {line}: {node.value[:100]!r} has half of a surrogate pair")


def _parts(node: yaml.Node) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        for pair in node.value:
            yield from pair
    elif isinstance(node, yaml.SequenceNode):
        yield from node.value
