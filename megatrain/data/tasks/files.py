"""Tasks of --eval-tasks: multiple choice and cloze, from local files.

    NAME.jsonl   {"query": .., "choices": [..], "gold": 0} or {"query": .., "target": ..}   ─┐
    NAME.yaml    a task of lm-evaluation-harness, whose data is a local file of JSON lines   ─┴─> Task: contexts, continuations

A YAML file has lm-evaluation-harness's meaning (lm_eval 0.4, api/task.py): the name of a field or a jinja2 template. Templates
run in jinja2's sandbox; `!function` is refused. Rank 0 reads the files.
"""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from megatrain.config.errors import ConfigError, InputError
from megatrain.data.files import optional_package

Fields = Mapping[str, Any]
_YAML: Final = (".yaml", ".yml")
_ROW: Final = 'write rows such as {"query": "2 + 2 =", "choices": ["3", "4"], "gold": 1} or {"query": "2 + 2 =", "target": "4"}'
_DATA: Final = (
    "set dataset_path: json and dataset_kwargs: {data_files: FILE.jsonl}, after a download of the dataset"
)


@dataclass(frozen=True)
class Document:
    """One document of a task."""

    context: str
    answers: tuple[str, ...]
    """Multiple choice: the choices; cloze: the text that follows."""
    gold: int = 0
    """Index of the right answer."""


@dataclass(frozen=True)
class Task:
    """A task; its documents have several answers each (multiple choice), or one (cloze)."""

    name: str
    documents: tuple[Document, ...]
    delimiter: str = " "
    """Text between context and answer."""

    @property
    def has_choices(self) -> bool:
        """Documents are multiple choice."""
        return len(self.documents[0].answers) > 1


def read_tasks(paths: Sequence[str], limit: int | None = None) -> list[Task]:
    """Read tasks from files, and from folders all files of tasks in them, by name.

    Args:
        limit: documents of each task that are read; None: all.

    Raises:
        InputError: a file is missing or is no task, or two tasks have one name.
    """
    tasks = [_task(file, limit) for path in paths for file in _files(Path(path))]
    names = [task.name for task in tasks]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"two tasks have the name {twice}", fix="rename one of them, or its file")
    return tasks


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise InputError(
            f"{path}: there is no such file or folder",
            fix="name a .jsonl or .yaml file of a task, or a folder",
        )
    described = [file for file in path.iterdir() if file.suffix in _YAML]
    read = {data.resolve() for file in described for data in _data_files(file, _settings(file))}
    rows = [file for file in path.glob("*.jsonl") if file.resolve() not in read]
    if not described and not rows:
        raise InputError(
            f"{path}: has no file of a task", fix="name a folder with .jsonl or .yaml files of tasks"
        )
    return sorted((*described, *rows))


def _task(file: Path, limit: int | None) -> Task:
    if file.suffix in _YAML:
        settings = _settings(file)
        (data, *more), name = _data_files(file, settings), str(settings.get("task", file.stem))
        if more:
            raise InputError(
                f"{file}: names {1 + len(more)} data files of the split", fix="join them in one file"
            )
        read, delimiter = _reader_of(file, settings), str(settings.get("target_delimiter", " "))
    else:
        data, name, read, delimiter = file, file.stem, _plain, " "
    documents = []
    for place, row in _rows(data, limit):
        try:
            documents.append(read(row))
        except ConfigError:
            raise
        except Exception as error:  # a template may raise anything
            reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            raise InputError(
                f"{place}: is no document of {file.name}: {reason}",
                fix=_ROW if data == file else "correct it",
            ) from error
    if len({len(one.answers) > 1 for one in documents}) != 1:
        problem = "mixes multiple choice and cloze" if documents else "has no documents"
        raise InputError(f"{data}: {problem}", fix=_ROW)
    return Task(name, tuple(documents), delimiter)


def _rows(file: Path, limit: int | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the documents of a file, with their place."""
    try:
        lines = [
            (n, line)
            for n, line in enumerate(file.read_text(encoding="utf-8").split("\n"), 1)
            if line.strip()
        ]
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: cannot be read: {error}", fix="give a text file in UTF-8") from error
    for number, line in lines[:limit]:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"{file}, line {number}: is not JSON: {error}", fix="write one JSON object a line"
            ) from error
        if not isinstance(row, dict):
            raise InputError(f"{file}, line {number}: is no JSON object", fix="write one JSON object a line")
        yield f"{file}, line {number}", row


def _plain(row: Fields) -> Document:
    missing = [
        key for key in (["query"] if "target" in row else ["query", "choices", "gold"]) if key not in row
    ]
    if missing:
        raise ValueError(f"it has no {', '.join(missing)}; its keys are {', '.join(row)}")
    if "target" in row:
        return Document(_text(row["query"]), (_text(row["target"]),))
    return _document(row["query"], row["choices"], row["gold"])


def _document(context: Any, choices: Any, gold: Any) -> Document:
    """Check the parts of a document of multiple choice."""
    if not isinstance(choices, (list, tuple)):
        raise ValueError(f"the choices {choices!r} are no list")  # noqa: TRY004 (of a file, not of a caller)
    answers = tuple(map(_text, choices))
    number = answers.index(gold) if gold in answers else gold
    if type(number) is not int or not 0 <= number < len(answers) or len(answers) < 2:
        raise ValueError(f"the right answer {gold!r} is none of the {len(answers)} choices")
    return Document(_text(context), answers, number)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no text")  # noqa: TRY004 (of a file, not of a caller)
    return value


def _settings(file: Path) -> dict[str, Any]:
    """Return the settings of a YAML file, over those of the file that it includes."""
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        fix = "write the YAML of a task with fields and templates; code (`!function`) is not run"
        raise InputError(f"{file}: cannot be read: {error}", fix=fix) from error
    if not isinstance(found, dict):
        raise InputError(f"{file}: is no YAML of a task", fix="see docs/training.md for an example")
    base = found.pop("include", None)
    return found if base is None else _settings(file.parent / str(base)) | found


def _data_files(file: Path, settings: Fields) -> list[Path]:
    """Return the files of JSON lines of the split that is scored."""
    arguments = settings.get("dataset_kwargs")
    files = arguments.get("data_files") if isinstance(arguments, dict) else None
    if settings.get("dataset_path") != "json" or not files:
        raise InputError(
            f"{file}: its dataset_path {settings.get('dataset_path')} is no local file", fix=_DATA
        )
    if isinstance(files, dict):
        split = str(settings.get("test_split") or settings.get("validation_split") or "train")
        if split not in files:
            raise InputError(
                f"{file}: data_files has no split {split}", fix=f"name the file of {split} in data_files"
            )
        files = files[split]
    files = [files] if isinstance(files, str) else files
    if not isinstance(files, list) or not files:
        raise InputError(f"{file}: data_files is {files!r}, no name of a file", fix=_DATA)
    names = [Path(str(name)) for name in files]
    # Path.is_file fails for a name that is too long.
    return [name if os.path.isfile(name) else file.parent / name for name in names]  # noqa: PTH113


def _reader_of(file: Path, settings: Fields) -> Callable[[Fields], Document]:
    """Return what makes a document of a row, by the settings of a YAML file."""
    kind, shots = settings.get("output_type"), settings.get("num_fewshot") or 0
    if kind not in ("multiple_choice", "loglikelihood"):
        raise InputError(
            f"{file}: output_type {kind} is not scored", fix="use multiple_choice or loglikelihood"
        )
    if shots:
        raise InputError(
            f"{file}: num_fewshot {shots}: no examples are added",
            fix="write them in `description`, or remove num_fewshot",
        )
    if "process_docs" in settings:
        raise InputError(
            f"{file}: process_docs is code, which is not run", fix="write its result to the data file"
        )
    missing = [key for key in ("doc_to_text", "doc_to_target") if key not in settings]
    missing += ["doc_to_choice"] * (kind == "multiple_choice" and "doc_to_choice" not in settings)
    if missing:
        raise InputError(f"{file}: has no {', '.join(missing)}", fix="give a field or a template")
    sandbox = optional_package("jinja2.sandbox", needed_for=f"the templates of {file}")
    jinja2 = optional_package("jinja2", needed_for=f"the templates of {file}")
    environment = sandbox.ImmutableSandboxedEnvironment(
        undefined=jinja2.StrictUndefined, keep_trailing_newline=True
    )
    description = str(settings.get("description") or "")

    def value(key: str, row: Fields) -> tuple[Any, bool]:
        """Return the value of a field, or of a template, and True for a template."""
        source = settings[key]
        if not isinstance(source, str):
            return list(source.values()) if isinstance(source, dict) else source, False
        return (
            (row[source], False) if source in row else (environment.from_string(source).render(**row), True)
        )

    def read(row: Fields) -> Document:
        (text, _), (target, is_rendered) = value("doc_to_text", row), value("doc_to_target", row)
        context = description + _text(text)
        if kind == "loglikelihood":
            return Document(context, (_text(target),))
        choices, _ = value("doc_to_choice", row)
        choices = ast.literal_eval(choices) if isinstance(choices, str) else choices
        return _document(context, choices, int(target) if is_rendered and target.isdigit() else target)

    return read
