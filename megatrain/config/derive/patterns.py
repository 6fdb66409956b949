"""Parsers of layer patterns and of attention windows.

"4"                  every fourth layer, counted from 1
"[1]*3+[0]"          a Python list expression with an entry for each layer
"128,0"              a window: tokens to the left, tokens to the right
"""

import ast
import re

from megatrain.config.schema.values import UnresolvedError

MAX_LAYERS = 1 << 16


class PatternError(UnresolvedError):
    """A text that is not valid, which a rule reports."""


def parse_layer_pattern(text: str | None, num_layers: int, *, one_means: bool) -> tuple[bool, ...]:
    """Return for each layer whether it has a feature.

    Args:
        text: None: all layers have it. A number N: all but every Nth layer. A list: by its entries.
        num_layers: layers of the model.
        one_means: whether an entry of 1 means that the layer has the feature.

    Raises:
        PatternError: the text is not valid, or has another number of entries.
    """
    if text is None:
        return (True,) * num_layers
    if re.fullmatch(r"[0-9]{1,6}", text.strip()):
        step = int(text)
        if step < 1:
            raise PatternError(f"{text} is not 1 or more")
        return tuple(number % step != 0 for number in range(1, num_layers + 1))
    entries = _parse_list(text)
    if len(entries) != num_layers:
        raise PatternError(f"{text} has {len(entries)} entries for {num_layers} layers")
    if set(entries) - {0, 1}:
        raise PatternError(f"{text} has entries other than 0 and 1")
    return tuple(bool(entry) == one_means for entry in entries)


def parse_expert_pattern(text: str, num_layers: int) -> tuple[bool, ...]:
    """Return for each layer whether it has experts.

    Args:
        text: a number N: the first and every Nth layer after it. A list: layers with an entry of 1.
        num_layers: layers of the model.

    Raises:
        PatternError: as in `parse_layer_pattern`.
    """
    if re.fullmatch(r"[0-9]{1,6}", text.strip()):
        step = int(text)
        if step < 1:
            raise PatternError(f"{text} is not 1 or more")
        return tuple(number % step == 0 for number in range(num_layers))
    return parse_layer_pattern(text, num_layers, one_means=True)


def parse_window(text: str | None) -> int | None:
    """Return the number of tokens to the left that attention sees; None: all.

    Raises:
        PatternError: the text is not a window, or one with tokens to the right.
    """
    if text is None:
        return None
    found = re.fullmatch(r"[(\[]?\s*(-?[0-9]{1,9})\s*,\s*(-?[0-9]{1,9})\s*[)\]]?", text.strip())
    if found is None:
        raise PatternError(f"'{text}' is not two numbers, tokens to the left and to the right")
    left, right = int(found[1]), int(found[2])
    if right != 0:
        raise PatternError(f"'{text}' has tokens to the right, which must be 0")
    if left < -1:
        raise PatternError(f"'{text}' has a negative number of tokens to the left")
    return None if left == -1 else left


def _parse_list(text: str) -> list[int]:
    """Evaluate `[1, 0]*2 + [1]` without running code."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
        return _evaluate(tree.body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise PatternError(f"'{text}' is neither a number nor a list such as [1]*3+[0]") from None


def _evaluate(node: ast.expr) -> list[int]:
    match node:
        case ast.List(elts=entries):
            return [_number(entry) for entry in entries]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            joined = _evaluate(left) + _evaluate(right)
        case ast.BinOp(left=ast.Constant() as times, op=ast.Mult(), right=part):
            joined = _repeat(_evaluate(part), _number(times))
        case ast.BinOp(left=part, op=ast.Mult(), right=times):
            joined = _repeat(_evaluate(part), _number(times))
        case _:
            raise ValueError
    if len(joined) > MAX_LAYERS:
        raise ValueError
    return joined


def _repeat(part: list[int], times: int) -> list[int]:
    if len(part) * times > MAX_LAYERS:
        raise ValueError
    return part * times


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int and node.value >= 0:
        return node.value
    raise ValueError
