"""Small languages inside values: which layers a setting is for, and how far attention sees.

"4"                  every fourth layer, counted from 1
"[1]*3+[0]"          a list with an entry for each layer, spelled as Python spells lists
"128,0"              a window: tokens to the left, tokens to the right
"""

import ast
import re

MAX_LAYERS = 1 << 16


class PatternError(Exception):
    """A text that is none of these."""


def parse_layer_pattern(text: str | None, num_layers: int, *, one_means: bool) -> tuple[bool, ...]:
    """Whether each layer has what a pattern is about.

    Args:
        text: None: all have it. A number: all but every such layer. A list: by its entries.
        num_layers: of the model.
        one_means: whether a layer whose entry is 1 has it, or has it not.

    Raises:
        PatternError: the text is no pattern, or has another number of entries.
    """
    if text is None:
        return (True,) * num_layers
    if re.fullmatch(r"[0-9]{1,6}", text.strip()):
        step = int(text)
        if step < 1:
            raise PatternError(f"{text} is not 1 or more")
        return tuple(number % step != 0 for number in range(1, num_layers + 1))
    entries = _list_of(text)
    if len(entries) != num_layers:
        raise PatternError(f"{text} has {len(entries)} entries, and there are {num_layers} layers")
    if set(entries) - {0, 1}:
        raise PatternError(f"{text} has entries other than 0 and 1")
    return tuple(bool(entry) == one_means for entry in entries)


def parse_expert_pattern(text: str, num_layers: int) -> tuple[bool, ...]:
    """Whether each layer has experts.

    Args:
        text: a number N: every Nth layer, the first one too. A list: those with an entry of 1.
        num_layers: of the model.

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
    """How many tokens to the left attention sees; None: all.

    Raises:
        PatternError: the text is no window, or one that looks ahead.
    """
    if text is None:
        return None
    found = re.fullmatch(r"[(\[]?\s*(-?[0-9]{1,9})\s*,\s*(-?[0-9]{1,9})\s*[)\]]?", text.strip())
    if found is None:
        raise PatternError(f"'{text}' is not two numbers, tokens to the left and to the right")
    left, right = int(found[1]), int(found[2])
    if right != 0:
        raise PatternError(f"'{text}' looks ahead: tokens to the right must be 0")
    if left < -1:
        raise PatternError(f"'{text}' has a negative number of tokens to the left")
    return None if left == -1 else left


def _list_of(text: str) -> list[int]:
    """The list of numbers that `[1, 0]*2 + [1]` spells. Nothing is run."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
        return _walked(tree.body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise PatternError(f"'{text}' is neither a number nor a list such as [1]*3+[0]") from None


def _walked(node: ast.expr) -> list[int]:
    match node:
        case ast.List(elts=entries):
            return [_number(entry) for entry in entries]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            joined = _walked(left) + _walked(right)
        case ast.BinOp(left=ast.Constant() as times, op=ast.Mult(), right=part):
            joined = _repeated(_walked(part), _number(times))
        case ast.BinOp(left=part, op=ast.Mult(), right=times):
            joined = _repeated(_walked(part), _number(times))
        case _:
            raise ValueError
    if len(joined) > MAX_LAYERS:
        raise ValueError
    return joined


def _repeated(part: list[int], times: int) -> list[int]:
    if len(part) * times > MAX_LAYERS:
        raise ValueError
    return part * times


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int and node.value >= 0:
        return node.value
    raise ValueError
