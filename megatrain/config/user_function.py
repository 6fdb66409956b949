"""A function or class in a file of the user's own, named by a flag: `--spec my_layers.py:my_spec`.

The digest of the file is compared before the file is run: with that of the checkpoint, and with that of rank 0.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.machinery
import importlib.util
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Final

from megatrain.config.errors import ConfigError
from megatrain.config.schema.tree import Config, flag_of

USER_FUNCTIONS: Final = ("data.dataset", "training.loss", "logging.callbacks")
"""Settings that name a function or a class. The digest of its file is in the setting of the same name with `_digest`."""


@dataclass(frozen=True)
class UserFunction:
    """The location of a function or class of the user."""

    module: str
    """Module on the Python path, or a file that ends in .py."""
    name: str
    """Name of the function in the module."""
    flag: str
    """The flag that names it."""

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"

    @classmethod
    def parse(cls, words: str | Sequence[str], flag: str) -> UserFunction | None:
        """Return the function that the words of a flag name; None: they name none.

        file.py:function      module:function      module function
        """
        words = [words] if isinstance(words, str) else words
        if len(words) == 1 and ":" not in words[0]:  # a YAML file may hold both words in one text
            words = words[0].split()
        module, _, name = words[0].rpartition(":") if len(words) == 1 else " : ".join(words).partition(" : ")
        return cls(module, name, flag) if module and name.isidentifier() else None

    def digest(self) -> str:
        """Return the digest of the file, which is not run. Raises ConfigError."""
        try:
            return _digest(_file_of(self.module).read_bytes())
        except (OSError, ImportError) as error:
            raise self._not_imported(f"{type(error).__name__}: {error}") from error

    def require_digest(self, expected: str | None) -> None:
        """Compare this rank's file with that of the plan. Raises ConfigError."""
        found = self.digest()
        if found != expected:
            raise ConfigError(
                f"{self.flag} {self}: this rank's file has digest {found}, the plan has {expected}",
                fix="let all ranks read the same file, and do not change it during the start",
            )

    def load(self) -> Callable[..., Any]:
        """Run the file, once a process while it does not change, and return the function.

        Raises:
            ConfigError: the file cannot be imported, or has no such function.
        """
        try:
            is_file = self.module.endswith(".py")
            module = _run_file(Path(self.module)) if is_file else importlib.import_module(self.module)
        except Exception as error:
            raise self._not_imported(self._where(error)) from error
        found = getattr(module, self.name, None)
        if not callable(found):
            raise ConfigError(
                f"{self.flag} {self}: {self.module} has no function {self.name}",
                fix="name a function of that module",
            )
        return found  # type: ignore[no-any-return]

    def failure(self, error: Exception) -> ConfigError:
        """Return the error that the user's code raised, with its file and line."""
        return ConfigError(
            f"{self.flag} {self}: {self._where(error)}", fix="correct the function at that line"
        )

    def _not_imported(self, reason: str) -> ConfigError:
        return ConfigError(
            f"{self.flag} {self}: {self.module} cannot be imported: {reason}",
            fix="give a file, such as my_file.py:my_function, or a module on the Python path (PYTHONPATH)",
        )

    def _where(self, error: Exception) -> str:
        """Return the error with the last line of the user's file that led to it, or else the line that raised it."""
        if isinstance(error, SyntaxError) and error.lineno is not None:
            return f"{type(error).__name__}: {error.msg} ({error.filename}:{error.lineno})"
        frames = traceback.extract_tb(error.__traceback__)
        file = getattr(sys.modules.get(self.module), "__file__", None) or self.module
        last = ([frame for frame in frames if frame.filename == file] or frames)[-1]
        return f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})"


def user_function(config: Config, setting: str) -> UserFunction | None:
    """Return the function that one of `USER_FUNCTIONS` names; None: it names none."""
    text = config.get(setting)
    return None if text is None else UserFunction.parse(text, flag_of(setting))


def _file_of(module: str) -> Path:
    """Return the file of a module. Neither it nor a package that it is in is imported."""
    if module.endswith(".py"):
        return Path(module)
    name, folders, file = "", None, None
    for part in module.split("."):
        name = f"{name}.{part}".lstrip(".")
        found = (finder.find_spec(name, folders) for finder in sys.meta_path)
        spec = next((one for one in found if one is not None), None)
        if spec is None:
            raise ModuleNotFoundError(f"No module named {name!r}")
        folders, file = spec.submodule_search_locations, spec.origin
    if file is None:
        raise ImportError(f"{module} has no file")
    return Path(file)


def _run_file(path: Path) -> ModuleType:
    """Run the bytes of a file as a module, so that the code that runs has the digest that was compared."""
    text = path.read_bytes()
    name = f"{path.stem}_{_digest(str(path.resolve()).encode() + text)}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path, loader=_Loader(name, str(path), text))
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses look their module up
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


class _Loader(importlib.machinery.SourceFileLoader):
    """Runs these bytes, never a compiled copy, which may be of an older file."""

    def __init__(self, name: str, path: str, text: bytes) -> None:
        super().__init__(name, path)
        self.text = text

    def get_code(self, fullname: str) -> CodeType:  # noqa: ARG002
        """Compile the bytes."""
        return self.source_to_code(self.text, self.path)


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:16]
