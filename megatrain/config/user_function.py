"""A function or class in a file of the user's own, named by a flag: `--spec my_layers.py:my_spec`.

    a checkpoint, or --spec-digest ──> `digest`, on rank 0 ──> Facts.digests ──> `load`, on every rank

The digest of the file is compared before the file is run: with that of the checkpoint, and with that of rank 0. The bytes that
run are those whose digest was compared, never a compiled copy, which may be of an older file.
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

USER_FUNCTIONS: Final = ("model.spec", "data.dataset", "training.loss", "logging.callbacks")
"""Settings that name a function or a class. The digest of its file is in the setting of the same name with `_digest`."""
LR_FUNCTION: Final = "schedule.lr_decay_style"
"""The setting that may name a function too. Its digest is stored with the schedules (`ScheduleValues`)."""


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

    def digest(
        self,
        *,
        given: str | None = None,
        stored: str | None = None,
        before: UserFunction | None = None,
        flag: str = "",
    ) -> str:
        """Return the digest of the file, which is not run.

        Args:
            given: the digest that a setting asks for.
            stored, before: without it, the digest and the function of the checkpoint that the run continues.
            flag: the flag, with {digest}, that accepts another file.

        Raises:
            ConfigError: the file cannot be read, or is not the one that is asked for.
        """
        digest, consent = _digest(self._read()), "add " + flag
        if given is None and before is not None and before.name != self.name:
            raise ConfigError(
                f"{self.flag} {self}: the checkpoint is of another function, {before}",
                fix=f"use that function, or {consent.format(digest=digest)} to run this one",
            )
        expected = stored if given is None else given
        if expected not in (None, digest):
            source = "that of the checkpoint" if given is None else flag.split(maxsplit=1)[0]
            raise ConfigError(
                f"{self.flag} {self}: the file has changed, its digest is {digest}, and {source} is {expected}",
                fix=f"use the file of that run, or {consent.format(digest=digest)} to run the changed file",
            )
        return digest

    def load(self, digest: str | None = None) -> Callable[..., Any]:
        """Run the file, once a process while it does not change, and return the function.

        Args:
            digest: of the file that the plan has; None: of any.

        Raises:
            ConfigError: the file has another digest, cannot be imported, or has no such function.
        """
        text = self._read()
        if digest not in (None, found := _digest(text)):
            raise ConfigError(
                f"{self.flag} {self}: this rank's file has digest {found}, the plan has {digest}",
                fix="let all ranks read the same file, and do not change it during the start",
            )
        try:
            is_file = self.module.endswith(".py")
            module = _run_file(Path(self.module), text) if is_file else _run_module(self.module, text)
        except Exception as error:
            raise self._not_imported(self.where(error)) from error
        function = getattr(module, self.name, None)
        if not callable(function):
            raise ConfigError(
                f"{self.flag} {self}: {self.module} has no function {self.name}",
                fix="name a function of that module",
            )
        return function  # type: ignore[no-any-return]

    def failure(self, error: Exception) -> ConfigError:
        """Return the error that the user's code raised, with its file and line."""
        return ConfigError(
            f"{self.flag} {self}: {self.where(error)}", fix="correct the function at that line"
        )

    def _read(self) -> bytes:
        try:
            return _file_of(self.module).read_bytes()
        except (OSError, ImportError) as error:
            raise self._not_imported(f"{type(error).__name__}: {error}") from error

    def _not_imported(self, reason: str) -> ConfigError:
        return ConfigError(
            f"{self.flag} {self}: {self.module} cannot be imported: {reason}",
            fix="give a file, such as my_file.py:my_function, or a module on the Python path (PYTHONPATH)",
        )

    def where(self, error: Exception) -> str:
        """Return the error with the line of the user's file that led to it."""
        return describe_line(error, str(_file_of(self.module)))


def describe_line(error: Exception, file: str) -> str:
    """Return the error with the last line of a file that led to it, or else, as for wrong arguments, with the file."""
    if isinstance(error, SyntaxError) and error.lineno is not None:
        return f"{type(error).__name__}: {error.msg} ({error.filename}:{error.lineno})"
    frames, path = traceback.extract_tb(error.__traceback__), Path(file).resolve()
    lines = [f"{file}:{frame.lineno}" for frame in frames if Path(frame.filename).resolve() == path]
    return f"{type(error).__name__}: {error} ({[file, *lines][-1]})"


def user_function(config: Config, setting: str) -> UserFunction | None:
    """Return the function that a setting names; None: it names none."""
    return function_of(setting, config.get(setting))


def function_of(setting: str, words: str | Sequence[str] | None) -> UserFunction | None:
    """Return the function that the words of a setting name; None: they name none, or layers of Megatron-LM."""
    function = UserFunction.parse(words, flag_of(setting)) if words else None
    is_megatron = function is not None and setting == "model.spec" and function.module.startswith("megatron.")
    return None if is_megatron else function


def _file_of(module: str) -> Path:
    """Return the file of a module. Neither it nor a package that it is in is imported."""
    if module.endswith(".py"):
        return Path(module)
    name, folders, file = "", None, None
    for part in module.split("."):
        name = f"{name}.{part}".lstrip(".")
        spec = _spec_of(name, folders)
        if spec is None:
            raise ModuleNotFoundError(f"No module named {name!r}")
        folders, file = spec.submodule_search_locations, spec.origin
    if file is None:
        raise ImportError(f"{module} has no file")
    return Path(file)


def _spec_of(name: str, folders: Sequence[str] | None) -> importlib.machinery.ModuleSpec | None:
    finders = (finder for finder in sys.meta_path if not isinstance(finder, _Finder))
    found = (finder.find_spec(name, folders) for finder in finders)
    return next((one for one in found if one is not None), None)


def _run_module(name: str, text: bytes) -> ModuleType:
    """Import a module from these bytes. A module that was imported from elsewhere is imported again."""
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded.__loader__, "text", None) == text:
        return loaded
    sys.modules.pop(name, None)
    finder = _Finder(name, text)
    sys.meta_path.insert(0, finder)
    try:
        return importlib.import_module(name)  # the package of the module may import it too
    finally:
        sys.meta_path.remove(finder)


def _run_file(path: Path, text: bytes) -> ModuleType:
    """Run the bytes of a file as a module."""
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


@dataclass(frozen=True)
class _Finder:
    """Finds a module whose source is these bytes."""

    name: str
    text: bytes

    def find_spec(
        self,
        name: str,
        folders: Sequence[str] | None,
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> importlib.machinery.ModuleSpec | None:
        """Return how to load the module; None: it is another one, or not of Python's source."""
        spec = _spec_of(name, folders) if name == self.name else None
        if (
            spec is None
            or spec.origin is None
            or not isinstance(spec.loader, importlib.machinery.SourceFileLoader)
        ):
            return None
        spec.loader = _Loader(name, spec.origin, self.text)
        return spec


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
