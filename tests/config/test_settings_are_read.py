"""Every setting is read somewhere, so that no flag is accepted and ignored.

    sources of megatrain/ ──> what each reads of a section ──> settings without a read: there must be none

A read is `training.seed` where `training` is a section by its name, its type or its origin, or `known("training.seed")`.
Tables that describe settings, and what settings need, read nothing.
"""

import ast
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

from megatrain.config.schema.tree import section_types, settings

ROOT = Path(__file__).resolve().parents[2] / "megatrain"
SECTIONS = {section.__name__: name for name, section in section_types().items()}
"""Names of the sections by their classes."""
GETTERS = ("known", "get", "raw", "user_function")


def test_every_setting_is_read() -> None:
    found = {read for source in ROOT.rglob("*.py") for read in reads(source.read_text())}
    unread = [one.flag for one in settings() if not any(fnmatch(one.path, read) for read in found)]
    assert not unread, f"these flags change nothing: {unread}; read them, or remove them"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("if plan.config.training.seed: pass", "training.seed"),
        ("one, two = draft.config.training, draft.config.data\nuse(two.split)", "data.split"),
        ("def build(config: TokenizerConfig | None): return config.vocab_file", "tokenizer.vocab_file"),
        (
            "def init(self, config: DataConfig): self._own = config\ndef run(self): self._own.split",
            "data.split",
        ),
        ("class DataConfig:\n    split: str = ''\n    def parts(self): return self.split", "data.split"),
        ("use(getattr(data, f'{name}_path'))", "data.*_path"),
        ('request.known("checkpoint.load")', "checkpoint.load"),
    ],
)
def test_a_read_is_found(source: str, expected: str) -> None:
    assert expected in reads(source)


@pytest.mark.parametrize(
    "source",
    [
        "training.seed = 1",
        "use(found.seed, derived.seed)",
        "class TrainingConfig:\n    seed: int = setting(1, needs=on('training.seed'))",
        'table = {"training.seed": 1}',
        "getattr(training, f'{name}')",
        "table[0] = config.training\nuse(found().seed)",
    ],
)
def test_other_uses_are_no_reads(source: str) -> None:
    assert not any(fnmatch("training.seed", read) for read in reads(source))


def reads(source: str) -> set[str]:
    """Return patterns such as `training.seed` or `data.*_path` of the attributes of sections that a source reads."""
    nodes = list(ast.walk(ast.parse(source)))
    owners = _owners(nodes)
    found = set()
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            found |= {f"{section}.{node.attr}" for section in owners.get(_last_name(node.value), ())}
        elif isinstance(node, ast.Call) and _last_name(node.func) in GETTERS:
            found |= {str(one.value) for one in node.args if isinstance(one, ast.Constant)}
        elif isinstance(node, ast.Call) and _last_name(node.func) == "getattr":
            words = getattr(node.args[1], "values", [])  # of an f-string
            name = "".join(
                str(getattr(word, "value", "")) if isinstance(word, ast.Constant) else "*" for word in words
            )
            if name.strip("*"):
                found |= {f"{section}.{name}" for section in owners.get(_last_name(node.args[0]), ())}
    return found


def _owners(nodes: list[ast.AST]) -> dict[str, set[str]]:
    """Return the sections that a name or attribute may be in this source."""
    owners = {name: {name} for name in SECTIONS.values()}
    for name, origin in [*_typed(nodes), *_assigned(nodes)]:
        owners.setdefault(name, set()).update(owners.get(origin, ()))
    owners.pop("", None)  # expressions without a name
    return owners


def _typed(nodes: list[ast.AST]) -> Iterator[tuple[str, str]]:
    """Yield names with the sections that are their types."""
    for node in nodes:
        if isinstance(node, ast.arg) and node.annotation is not None:
            types = {_last_name(one) for one in ast.walk(node.annotation)}
            yield from ((node.arg, SECTIONS[one]) for one in types & set(SECTIONS))
        elif isinstance(node, ast.ClassDef) and node.name in SECTIONS:
            yield "self", SECTIONS[node.name]


def _assigned(nodes: list[ast.AST]) -> Iterator[tuple[str, str]]:
    """Yield names with the names that are assigned to them."""
    for node in nodes:
        if isinstance(node, ast.Assign):
            targets, values = (getattr(one, "elts", [one]) for one in (node.targets[0], node.value))
            yield from (
                (_last_name(target), _last_name(value))
                for target, value in zip(targets, values, strict=False)
            )


def _last_name(node: ast.AST) -> str:
    """Return `training` for `plan.config.training`, and nothing for other expressions."""
    return getattr(node, "attr", "") or getattr(node, "id", "")
