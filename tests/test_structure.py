"""Check the structure that docs/architecture.md describes: import order and cycles, globals, environment reads, unsafe calls, sizes.

    sources of megatrain/ -> one `Module` each, parsed once -> one finder per rule -> a list of findings, which must be empty

Every finder also runs on small invented sources that break its rule, so that a finder that finds nothing fails.
"""

from __future__ import annotations

import ast
import gc
import importlib
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

ROOT = Path(__file__).resolve().parent.parent

FOLDER_LEVELS = {
    "config": 0,
    "process": 0,
    "storage": 0,
    "kernels": 1,
    "parallel": 2,
    "data": 3,
    "model": 3,
    "optim": 4,
    "checkpoint": 5,
    "interop": 6,
    "inference": 6,
    "training": 7,
    "tools": 8,
}
TRAINING_ORDER = (
    "liveness",
    "restarts",
    "logging",
    "launch",
    "parts",
    "distillation",
    "planning",
    "debugging",
    "faults",
    "tasks",
)
"""Subfolders of training/: none imports a later one, also not by way of the other files of training."""
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 70
MAX_BRANCHES = 15
MAX_ENTRY_LINES = 60
MAX_FILES_PER_FOLDER = 20
ENVIRONMENT_READER = "megatrain.config.environment"
READERS_OF_PRINTED_LINES = {
    "megatrain.process.available_memory",
    "megatrain.tools.doctor.cli",
    "megatrain.tools.doctor.gpus",
}
PICKLE_READER = "megatrain.interop.megatron.inert_pickle"
"""Reads pickles, and builds no class that they name."""
PICKLE_WRITER = "megatrain.interop.megatron.export"
"""Writes checkpoints for Megatron-LM, whose format is pickled."""
BRANCHES = (ast.If, ast.For, ast.While, ast.ExceptHandler, ast.BoolOp, ast.IfExp, ast.comprehension)


@dataclass(frozen=True)
class Module:
    """One source file. `name` is its dotted name; an `__init__.py` has the name of its package."""

    name: str
    source: str
    is_package: bool = False

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @property
    def folder(self) -> str | None:
        """The folder under megatrain/ that contains the file; None for megatrain/__init__.py."""
        parts = self.name.split(".")
        return parts[1] if len(parts) > 1 else None

    @cached_property
    def imports(self) -> dict[str, int]:
        """The line number by absolute name of every import, at any depth of the file.

        `from a import b` gives both `a` and `a.b`, since b may be a module.
        """
        found: dict[str, int] = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = self._absolute(node)
                names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
            else:
                continue
            for name in names:
                found.setdefault(name, node.lineno)
        return found

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = self.name.split(".") if self.is_package else self.name.split(".")[:-1]
        base = package[: len(package) - (node.level - 1)]
        return ".".join([*base, *([node.module] if node.module else [])])


def megatrain_modules() -> dict[str, Module]:
    modules = {}
    for path in sorted((ROOT / "megatrain").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        modules[name] = Module(name, path.read_text(encoding="utf-8"), is_package)
    return modules


MODULES = megatrain_modules()


@pytest.fixture(scope="module", autouse=True)
def _parsed() -> Iterator[None]:
    """Parse without collections of garbage, which search millions of nodes; no later test keeps them."""
    gc.disable()
    assert all(module.nodes for module in MODULES.values() if module.source)
    gc.freeze()
    gc.enable()
    yield
    MODULES.clear()


# ---- the finders: each takes a module (or all of them) and returns a sentence for each violation of its rule


def imports_of_later_folders(module: Module) -> list[str]:
    """Find imports of folders on the same or a later level."""
    findings = []
    for name, line in module.imports.items():
        parts = name.split(".")
        if parts[0] != "megatrain" or len(parts) == 1 or module.folder == parts[1]:
            continue
        if module.folder is None:
            findings.append(f"{module.name}:{line} imports {name}, but the package itself imports no folder")
        elif (
            module.folder in FOLDER_LEVELS
            and parts[1] in FOLDER_LEVELS
            and FOLDER_LEVELS[parts[1]] >= FOLDER_LEVELS[module.folder]
        ):
            findings.append(f"{module.name}:{line} imports {name}, which is not on an earlier level")
    return findings


def unknown_folders(module: Module) -> list[str]:
    is_known = module.folder is None or module.folder in FOLDER_LEVELS
    return (
        []
        if is_known
        else [f"{module.name} has no level: add its folder to FOLDER_LEVELS and to docs/architecture.md"]
    )


def import_cycles(modules: Mapping[str, Module]) -> list[str]:
    """Find groups of modules that import each other, also inside functions (Tarjan's strongly connected components)."""
    edges = {
        name: [to for to in module.imports if to in modules and to != name]
        for name, module in modules.items()
    }
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    cycles = []

    def connect(name: str) -> None:
        order[name] = low[name] = len(order)
        stack.append(name)
        for to in edges[name]:
            if to not in order:
                connect(to)
                low[name] = min(low[name], low[to])
            elif to in stack:
                low[name] = min(low[name], order[to])
        if low[name] == order[name]:
            component = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(component) > 1:
                cycles.append("a cycle: " + ", ".join(sorted(component)))

    for name in edges:
        if name not in order:
            connect(name)
    return cycles


def imports_of_later_training_folders(modules: Mapping[str, Module]) -> list[str]:
    """Find the files of subfolders of training/ from which imports lead to a later subfolder, and the first file there."""
    findings = []
    for name in modules:
        place, seen, ways = _training_place(name), {name}, [(name,)]
        while ways and place is not None:
            way = ways.pop()
            for to in modules[way[-1]].imports:
                if to in modules and to not in seen and to.startswith("megatrain.training."):
                    seen.add(to)
                    ways.append((*way, to))
                    if (_training_place(to) or 0) > place:
                        findings.append(" imports ".join((*way, to)))
    return findings


def _training_place(name: str) -> int | None:
    """Return the place of the subfolder of training/ that contains a module; None: it lies in no subfolder."""
    parts = name.split(".")
    # The name of a subfolder is the name of its `__init__.py`.
    is_in_subfolder = len(parts) > 3 or parts[-1] in TRAINING_ORDER
    return TRAINING_ORDER.index(parts[2]) if is_in_subfolder and parts[1] == "training" else None


def global_statements(module: Module) -> list[str]:
    return [
        f"{module.name}:{node.lineno} global {', '.join(node.names)}"
        for node in module.nodes
        if isinstance(node, ast.Global)
    ]


def mutable_globals(module: Module) -> list[str]:
    """Find module-level containers and objects that functions of the module change without a `global` statement."""
    names = {
        target.id
        for node in module.tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    names |= {node.name for node in module.tree.body if isinstance(node, ast.ClassDef)}
    names -= PROCESS_STATE.get(module.name, set())
    findings = []
    for function in functions(module):
        own = {argument.arg for argument in ast.walk(function.args) if isinstance(argument, ast.arg)}
        own |= {
            node.id
            for node in ast.walk(function)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        for node in ast.walk(function):
            changed = _changed_name(node)
            if changed in names - own:
                findings.append(f"{module.name}:{node.lineno} {function.name} changes {changed}")
    return findings


PROCESS_STATE = {
    "megatrain.kernels.fused.launching": {"FusedKernels"},
}
"""State of the whole process by module; the class documents the reason."""
MUTATORS = {"add", "append", "clear", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update"}


def _changed_name(node: ast.AST) -> str | None:
    """Return the name of the object that a node changes in place: `name[x] = y`, `name.x = y`, `name.append(x)`."""
    changed: ast.expr | None = None
    if isinstance(node, ast.Subscript | ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
        changed = node.value
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
        changed = node.func.value
    return changed.id if isinstance(changed, ast.Name) else None


def environment_reads(module: Module) -> list[str]:
    """Find reads of environment variables outside the one file that may read them."""
    if module.name == ENVIRONMENT_READER:
        return []
    # Assignments are allowed: some libraries take settings only from the environment.
    written = {
        id(node.value)
        for node in module.nodes
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load)
    }
    return uses_of(module, {"os.environ", "os.environb", "os.getenv", "os.getenvb"}, except_for=written)


def unsafe_calls(module: Module) -> list[str]:
    """Find calls that could run code from a file: checkpoints and configs must be data."""
    forbidden = {"eval", "exec", "torch.load", "torch.save"}
    called = uses_of(module, forbidden - ({"torch.save"} if module.name == PICKLE_WRITER else set()))
    libraries = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
    imported = [
        f"{module.name}:{line} imports {name}"
        for name, line in module.imports.items()
        if name.split(".")[0] in libraries and module.name != PICKLE_READER
    ]
    allowed = [
        f"{module.name}:{node.value.lineno} passes allow_pickle"
        for node in module.nodes
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and getattr(node.value, "value", True)
    ]
    return called + imported + allowed


def uses_of(module: Module, forbidden: set[str], *, except_for: Collection[int] = ()) -> list[str]:
    """Find uses of the forbidden dotted names, also under an alias: `from os import environ as e; e["X"]`."""
    origin = {}
    for node in module.nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                origin[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            origin.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    findings = []
    for node in module.nodes:
        if (
            isinstance(node, ast.Name | ast.Attribute)
            and isinstance(node.ctx, ast.Load)
            and id(node) not in except_for
        ):
            first, *rest = (dotted(node) or "").split(".")
            name = ".".join([origin.get(first, first), *rest])
            if name in forbidden:
                findings.append(f"{module.name}:{node.lineno} uses {name}")
    return findings


def dotted(node: ast.expr) -> str | None:
    """Return `a.b.c` for nested attributes, or None if the chain does not start at a name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (start := dotted(node.value)) is not None:
        return f"{start}.{node.attr}"
    return None


def splits_at_every_line_end(module: Module) -> list[str]:
    """Find splitlines(), which also splits JSON and text of users at U+2028 and others; what programs print has none."""
    if module.name in READERS_OF_PRINTED_LINES:
        return []
    return [
        f"{module.name}:{node.lineno} uses splitlines"
        for node in module.nodes
        if isinstance(node, ast.Attribute) and node.attr == "splitlines"
    ]


def heavy_imports_of_config(module: Module) -> list[str]:
    """Find imports of torch and numpy in config/, which would delay `--help`."""
    if module.folder not in {None, "config"}:
        return []
    return [
        f"{module.name}:{line} imports {name}"
        for name, line in module.imports.items()
        if name.split(".")[0] in {"torch", "numpy"}
    ]


def long_files(module: Module) -> list[str]:
    num_lines = len(module.source.splitlines())
    return [f"{module.name} has {num_lines} lines"] if num_lines > MAX_FILE_LINES else []


def long_functions(module: Module) -> list[str]:
    return [
        f"{module.name}:{node.lineno} {node.name} has {length} lines"
        for node in functions(module)
        if (length := (node.end_lineno or node.lineno) - node.lineno + 1) > MAX_FUNCTION_LINES
    ]


def branchy_functions(module: Module) -> list[str]:
    """Find functions with too many branches; branches of nested functions count for the outer one too."""
    return [
        f"{module.name}:{node.lineno} {node.name} has {num_branches} branches"
        for node in functions(module)
        if (num_branches := sum(isinstance(part, BRANCHES) for part in ast.walk(node))) > MAX_BRANCHES
    ]


def functions(module: Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in module.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


RULES: list[Callable[[Module], list[str]]] = [
    imports_of_later_folders,
    unknown_folders,
    global_statements,
    mutable_globals,
    environment_reads,
    unsafe_calls,
    splits_at_every_line_end,
    heavy_imports_of_config,
    long_files,
    long_functions,
    branchy_functions,
]


# ---- the package


def test_there_are_modules_to_check() -> None:
    assert {module.folder for module in MODULES.values()} >= {None, "config", "parallel", "model"}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_no_module_breaks(rule: Callable[[Module], list[str]]) -> None:
    findings = [finding for module in MODULES.values() for finding in rule(module)]
    assert not findings, "\n".join(findings)


def test_there_is_no_import_cycle() -> None:
    findings = import_cycles(MODULES)
    assert not findings, "\n".join(findings)


def test_training_folders_import_earlier_ones() -> None:
    findings = imports_of_later_training_folders(MODULES)
    assert not findings, "\n".join(findings)


def test_config_loads_neither_torch_nor_numpy() -> None:
    """Imports by the libraries that config/ imports count too."""
    names = [name for name in MODULES if name.startswith("megatrain.config")]
    program = f"import {', '.join(names)}, sys; print(*sorted({{'torch', 'numpy'}} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout.strip()) == (0, ""), result.stderr


@pytest.mark.parametrize("top", ["megatrain", "tests", "docs", "scripts", "configs"])
def test_a_folder_has_few_files(top: str) -> None:
    """`__init__.py` files and folders do not count."""
    crowded = {}
    for folder in [ROOT / top, *(path for path in (ROOT / top).rglob("*") if path.is_dir())]:
        names = [path.name for path in folder.iterdir() if path.is_file() and path.name != "__init__.py"]
        names = [name for name in names if not name.endswith(".pyc")]
        if len(names) > MAX_FILES_PER_FOLDER:
            crowded[str(folder.relative_to(ROOT))] = len(names)
    assert not crowded


def test_pretrain_fits_on_one_screen() -> None:
    entry = ROOT / "pretrain.py"
    assert len(entry.read_text(encoding="utf-8").splitlines()) < MAX_ENTRY_LINES


def test_the_root_has_two_programs() -> None:
    assert sorted(path.name for path in ROOT.glob("*.py")) == ["preprocess_data.py", "pretrain.py"]


# ---- the finders on invented sources: each entry breaks, or just keeps, one rule

BROKEN = [
    (imports_of_later_folders, "megatrain.data.gpt", "import megatrain.model.gpt"),
    (imports_of_later_folders, "megatrain.data.gpt", "from megatrain.training import trainer"),
    (imports_of_later_folders, "megatrain.data.gpt", "from megatrain import optim"),
    (imports_of_later_folders, "megatrain.data.gpt", "from ..model import gpt"),
    (imports_of_later_folders, "megatrain.data.gpt", "from .. import model"),
    (imports_of_later_folders, "megatrain.model.blocks.mlp", "from ...optim.adam import Adam"),
    (
        imports_of_later_folders,
        "megatrain.kernels.norm",
        "def f():\n    if True:\n        from megatrain.parallel import grid",
    ),
    (imports_of_later_folders, "megatrain.inference.engine", "import megatrain.interop.hf as hf"),
    (imports_of_later_folders, "megatrain", "from megatrain.config import errors"),
    (unknown_folders, "megatrain.core.utils", ""),
    (global_statements, "megatrain.data.gpt", "def f():\n    global state\n    state = 1"),
    (mutable_globals, "megatrain.data.gpt", "NAMES = {}\ndef f(x):\n    NAMES[x] = 1"),
    (mutable_globals, "megatrain.data.gpt", "found = []\ndef f(x):\n    found.append(x)"),
    (mutable_globals, "megatrain.data.gpt", "class Mode:\n    x = True\ndef f():\n    Mode.x = False"),
    (environment_reads, "megatrain.training.facts", "import os\nrank = os.environ['RANK']"),
    (
        environment_reads,
        "megatrain.training.facts",
        "import os as system\nrank = system.getenv('RANK')",
    ),
    (
        environment_reads,
        "megatrain.training.facts",
        "from os import environ as e\nrank = e.get('RANK')",
    ),
    (
        environment_reads,
        "megatrain.training.facts",
        "def f():\n    from os import getenv\n    return getenv('RANK')",
    ),
    (environment_reads, "megatrain.training.facts", "import os.path\nthere = 'RANK' in os.environ"),
    (unsafe_calls, "megatrain.checkpoint.load", "import pickle"),
    (unsafe_calls, "megatrain.checkpoint.load", "def f():\n    from pickle import loads"),
    (unsafe_calls, "megatrain.checkpoint.load", "import torch\ntorch.load('x', weights_only=True)"),
    (unsafe_calls, "megatrain.checkpoint.load", "from torch import load as read\nread('x')"),
    (unsafe_calls, "megatrain.config.yaml", "eval('1')"),
    (unsafe_calls, "megatrain.config.yaml", "run = exec"),
    (unsafe_calls, "megatrain.data.indexed", "np.load('x', allow_pickle=True)"),
    (splits_at_every_line_end, "megatrain.data.lines", "lines = path.read_text().splitlines()"),
    (heavy_imports_of_config, "megatrain.config.model", "import torch.nn as nn"),
    (heavy_imports_of_config, "megatrain.config.model", "def f():\n    from numpy import array"),
    (heavy_imports_of_config, "megatrain", "import torch"),
    (long_files, "megatrain.model.gpt", "x = 1\n" * (MAX_FILE_LINES + 1)),
    (long_functions, "megatrain.model.gpt", "def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES),
    (
        long_functions,
        "megatrain.model.gpt",
        "class A:\n  async def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES,
    ),
    (branchy_functions, "megatrain.model.gpt", "def f():\n" + "    if x: pass\n" * (MAX_BRANCHES + 1)),
    (branchy_functions, "megatrain.model.gpt", "def f():\n" + "    y = [a and b for a in x if b or c]\n" * 9),
]

KEPT = [
    (
        imports_of_later_folders,
        "megatrain.data.gpt",
        "from megatrain.parallel import batch\nfrom . import lines\nimport torch",
    ),
    (
        imports_of_later_folders,
        "megatrain.model.blocks.mlp",
        "from ..head import Head\nfrom ...config import model",
    ),
    (imports_of_later_folders, "megatrain.tools.main", "from megatrain import __version__\nimport megatrain"),
    (unknown_folders, "megatrain.config", ""),
    (splits_at_every_line_end, "megatrain.data.lines", 'lines = path.read_text().split("\\n")'),
    (
        global_statements,
        "megatrain.data.gpt",
        "def f():\n    x = 1\n    def g():\n        nonlocal x\n        x = 2",
    ),
    (mutable_globals, "megatrain.data.gpt", "NAMES = {}\ndef f(x):\n    return NAMES[x]"),
    (mutable_globals, "megatrain.data.gpt", "found = []\ndef f(x):\n    found = [x]\n    found.append(x)"),
    (
        mutable_globals,
        "megatrain.kernels.fused.launching",
        "class FusedKernels:\n    x = True\ndef f():\n    FusedKernels.x = False",
    ),
    (environment_reads, ENVIRONMENT_READER, "import os\nrank = os.environ['RANK']"),
    (
        environment_reads,
        "megatrain.training.facts",
        "import os\nos.environ['A'] = 'b'\nos.path.join('a', 'b')",
    ),
    (environment_reads, "megatrain.training.facts", "rank = self.os.environ"),
    (
        unsafe_calls,
        "megatrain.checkpoint.load",
        "model.eval()\nre.compile('a')\nfrom safetensors.torch import load",
    ),
    (unsafe_calls, "megatrain.data.indexed", "np.load('x', allow_pickle=False)"),
    (heavy_imports_of_config, "megatrain.model.gpt", "import torch"),
    (heavy_imports_of_config, "megatrain.config.model", "import yaml"),
    (long_files, "megatrain.model.gpt", "x = 1\n" * MAX_FILE_LINES),
    (long_functions, "megatrain.model.gpt", "def f():\n" + "    x = 1\n" * (MAX_FUNCTION_LINES - 1)),
    (branchy_functions, "megatrain.model.gpt", "def f():\n" + "    if x: pass\n" * MAX_BRANCHES),
]


def case_name(value: object) -> str:
    return getattr(value, "__name__", str(value)[:40].replace("\n", " "))


@pytest.mark.parametrize(("rule", "name", "source"), BROKEN, ids=case_name)
def test_a_broken_rule_is_found(rule: Callable[[Module], list[str]], name: str, source: str) -> None:
    assert rule(Module(name, source))


@pytest.mark.parametrize(("rule", "name", "source"), KEPT, ids=case_name)
def test_a_kept_rule_has_no_finding(rule: Callable[[Module], list[str]], name: str, source: str) -> None:
    assert not rule(Module(name, source))


def test_every_rule_is_tested_both_ways() -> None:
    assert {rule for rule, _, _ in BROKEN} == {rule for rule, _, _ in KEPT} == set(RULES)


def test_relative_imports_of_a_package_start_at_the_package() -> None:
    package = Module("megatrain.data", "from .gpt import samples\nfrom ..model import gpt", is_package=True)
    assert set(package.imports) >= {"megatrain.data.gpt", "megatrain.model.gpt"}


@pytest.mark.parametrize(
    ("sources", "num_cycles"),
    [
        ({"a": "import b", "b": "import c", "c": ""}, 0),
        ({"a": "import b", "b": "import a"}, 1),
        ({"a": "import b", "b": "from c import x", "c": "def f():\n    import a"}, 1),
        ({"a": "import b\nimport c", "b": "import a", "c": "import d", "d": "from c import x"}, 2),
        ({"a": "import a", "b": "import a\nimport c", "c": "import a"}, 0),
        ({"p.a": "from .b import x", "p.b": "from . import a"}, 1),
    ],
)
def test_cycles_are_found(sources: dict[str, str], num_cycles: int) -> None:
    assert len(import_cycles({name: Module(name, source) for name, source in sources.items()})) == num_cycles


def test_scripts_import_names_that_exist() -> None:
    """Type checks do not cover scripts/, and most of them need a GPU to run."""
    missing = []
    for path in sorted((ROOT / "scripts").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatrain"):
                module = importlib.import_module(node.module)
                missing += [
                    f"{path.relative_to(ROOT)}:{node.lineno}: {node.module}.{alias.name}"
                    for alias in node.names
                    if not hasattr(module, alias.name) and find_spec(f"{node.module}.{alias.name}") is None
                ]
    assert not missing


@pytest.mark.parametrize("module", ["megatrain.training.logging.console", "megatrain.training.logging"])
@pytest.mark.parametrize(
    ("source", "is_found"),
    [
        ("from megatrain.training.launch.ranks import Ranks", True),
        ("from megatrain.training.engine import Engine", True),
        ("from megatrain.training.liveness.failure import Failure", False),
    ],
)
def test_ways_to_later_training_folders_are_found(module: str, source: str, is_found: bool) -> None:
    sources = {
        module: source,
        "megatrain.training.engine": "import megatrain.training.faults.policy",
        "megatrain.training.launch.ranks": "",
        "megatrain.training.liveness.failure": "",
        "megatrain.training.faults.policy": "",
    }
    modules = {name: Module(name, text) for name, text in sources.items()}
    assert bool(imports_of_later_training_folders(modules)) == is_found
