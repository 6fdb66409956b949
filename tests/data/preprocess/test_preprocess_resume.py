"""Interrupted runs: killed at every step, the next one goes on, and the bytes are those of a run that nobody disturbed."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from unittest import mock

import pytest
from preprocessing import NULL, InlineWorkers, content_of, numbers, run

from megatrain.config.errors import InputError
from megatrain.data.indexed.reader import IndexedDataset
from megatrain.data.indexed.writer import IndexedWriter
from megatrain.data.preprocess import encoder
from megatrain.data.preprocess import run as preprocess_module
from megatrain.data.preprocess.outputs import Journal

ROOT = Path(__file__).parents[3]
SETTLED = [f"out_{key}_document.{kind}" for key in ("id", "text") for kind in ("bin", "idx", "json")]


def mixed_inputs(folder, num_documents):
    """A plain and a compressed file, with a bad line now and then."""
    lines = [
        b"not JSON\n"
        if number % 97 == 5
        else b'{"text": "%d %d", "id": "%d"}\n' % (number % 98, 7, number % 10)
        for number in range(num_documents)
    ]
    half = num_documents // 2
    (folder / "a.jsonl").write_bytes(b"".join(lines[:half]))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(b"".join(lines[half:])))
    flags = [*NULL, "--append-eod", "--json-keys", "text", "id", "--on-bad-line", "quarantine"]
    return ["--input", folder / "a.jsonl", folder / "b.jsonl.gz", *flags]


class KilledAtStep:
    """Ends the process as SIGKILL would, before step number k of those that change anything on the disk."""

    def __init__(self, step):
        self.left = step

    def before(self, real):
        def call(*arguments, **named):
            self.left -= 1
            if self.left < 0:
                os._exit(9)
            return real(*arguments, **named)

        return call


def run_killed(words, prefix, step, **options):
    """A run in a process of its own, killed at a step. Returns whether it came to its end before."""
    child = os.fork()
    if not child:
        code = 1
        with contextlib.suppress(BaseException):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            killed = KilledAtStep(step)
            for owner, name in (
                (os, "fsync"),
                (Path, "replace"),
                (Path, "unlink"),
                (IndexedWriter, "_write"),
                (IndexedWriter, "_offsets"),
            ):
                setattr(owner, name, killed.before(getattr(owner, name)))
            code = run(*words, prefix=prefix, **options)
        os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) in {0, 9}
    return os.waitstatus_to_exitcode(status) == 0


def require_old_or_new(folder, old, new):
    """What opens is whole; with it goes its own description."""
    for name in SETTLED:
        if name.endswith(".idx") and (folder / name).exists():
            IndexedDataset(folder / name.removesuffix(".idx"))
            trio = [name.replace(".idx", suffix) for suffix in (".bin", ".idx", ".json")]
            found = [(folder / part).read_bytes() for part in trio]
            assert found in ([old[part] for part in trio], [new[part] for part in trio])


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("with_old", [False, True])
def test_a_run_killed_at_any_step_is_gone_on_with(tmp_path, capsys, with_old):
    inputs = tmp_path / "in"
    inputs.mkdir()
    words = mixed_inputs(inputs, 1200)
    options = {"chunk_bytes": 5000, "journal_seconds": 0.0}
    (tmp_path / "whole").mkdir()
    assert run(*words, prefix=tmp_path / "whole" / "out", **options) == 0
    new = content_of(tmp_path / "whole")
    assert sorted(new) == sorted([*SETTLED, "out.bad_lines.jsonl"])
    (tmp_path / "former").mkdir()
    other = numbers(inputs / "other.jsonl", ["1"])
    other.write_text('{"text": "1", "id": "2"}\n')
    assert run("--input", other, *NULL, "--json-keys", "text", "id", prefix=tmp_path / "former" / "out") == 0
    old = content_of(tmp_path / "former")
    num_gone_on = 0
    for step in itertools.count(int(with_old), 2):
        folder = tmp_path / f"at{step}"
        folder.mkdir()
        for name, content in old.items() if with_old else ():
            (folder / name).write_bytes(content)
        is_done = run_killed(words, folder / "out", step, **options)
        require_old_or_new(folder, old, new)
        capsys.readouterr()
        assert run(*words, prefix=folder / "out", **options) == 0
        num_gone_on += "going on with an interrupted run, after " in capsys.readouterr().err
        assert content_of(folder) == new
        if is_done:
            break
    assert step > 100
    assert num_gone_on > step // 4


DRIVER = """
import sys
from megatrain.data.preprocess.run import preprocess
from megatrain.data.preprocess.flags import parse_settings
if __name__ == "__main__":
    preprocess(parse_settings(sys.argv[1:]), chunk_bytes=20_000, journal_seconds=0.0)
"""


def test_a_run_killed_many_times_ends_with_the_same_bytes(tmp_path):
    words = mixed_inputs(tmp_path, 60_000)
    (tmp_path / "whole").mkdir()
    assert run(*words, prefix=tmp_path / "whole" / "out") == 0
    (tmp_path / "driver.py").write_text(DRIVER)
    journal = tmp_path / "out.preprocess.json"
    choices = random.Random(1)
    signals = [signal.SIGKILL] * 8 + [signal.SIGTERM, signal.SIGINT]
    places = []
    for number, kind in enumerate([*signals, None]):
        flags = [
            "--output-prefix",
            tmp_path / "out",
            "--workers",
            1 + number % 2,
            "--log-interval",
            1 + number,
        ]
        process = subprocess.Popen(
            [sys.executable, tmp_path / "driver.py", *map(str, [*words, *flags])],
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        if kind is None:
            assert process.wait(60) == 0
            break
        before = journal.stat().st_mtime_ns if journal.exists() else 0
        while process.poll() is None and (not journal.exists() or journal.stat().st_mtime_ns == before):
            time.sleep(0.002)
        time.sleep(choices.random() * 0.02)
        process.send_signal(kind)
        process.wait(60)
        places.append(json.loads(journal.read_text())["keys"]["text"]["documents"])
    assert places == sorted(set(places)), "every run has come further"
    assert places[-1] < 60_000
    assert content_of(tmp_path) == content_of(tmp_path / "whole")


def stopped(words, prefix, *, after, **options):
    """A run that meets an error in chunk number `after`; what is done before is journaled."""

    class Failing(InlineWorkers):
        def map(self, items, **_):
            for number, item in enumerate(items):
                if number == after:
                    raise OSError(5, "Input/output error")
                yield self.work(item)

    named = {"chunk_bytes": 2000, "journal_seconds": 0.0} | options
    assert run(*words, prefix=prefix, workers_type=Failing, **named) == 1


@pytest.fixture
def words(tmp_path):
    return ["--input", numbers(tmp_path / "in.jsonl", ["1 2 3"] * 1000), *NULL]


def test_what_does_not_change_the_bytes_may_change_on_the_way(words, tmp_path, capsys):
    assert run(*words, prefix=tmp_path / "whole") == 0
    stopped(words, tmp_path / "out", after=3)
    assert "666 documents are done and kept: the same command goes on from there" in capsys.readouterr().err
    again = [*words, "--workers", 3, "--log-interval", 7, "--on-bad-line", "skip"]
    assert run(*again, prefix=tmp_path / "out", chunk_bytes=300) == 0
    assert (
        "going on with an interrupted run, after 666 documents, 666 lines of file 1 of 1"
        in capsys.readouterr().err
    )
    whole = {name.replace("whole", "out"): content for name, content in content_of(tmp_path, "whole").items()}
    assert content_of(tmp_path) == whole


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (["--append-eod"], "--append-eod"),
        (["--vocab-size", 99], "tokenizer"),
        (["--max-line-mb", 2], "--max-line-mb"),
        (["--json-keys", "text", "other"], "--json-keys"),
        (["--on-bad-line", "quarantine"], "--on-bad-line"),
    ],
)
def test_other_settings_start_anew_and_say_so(tmp_path, capsys, flags, name):
    source = tmp_path / "in.jsonl"
    source.write_text("bad\n" + '{"text": "1 2 3", "other": "4"}\n' * 1000)
    words = ["--input", source, *NULL, "--on-bad-line", "skip"]
    stopped(words, tmp_path / "out", after=3)
    capsys.readouterr()
    assert run(*words, *flags, prefix=tmp_path / "out") == 0
    assert (
        f"the remains of another run with this prefix are dropped: it had other {name}\n"
        in capsys.readouterr().err
    )
    assert run(*words, *flags, prefix=tmp_path / "whole") == 0
    whole = {file.replace("whole", "out"): content for file, content in content_of(tmp_path, "whole").items()}
    assert content_of(tmp_path) == whole


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda folder: (folder / "out_text_document.bin.partial").unlink(),
            "partial files are not all there",
        ),
        (lambda folder: os.truncate(folder / "out_text_document.lengths.partial", 5), "are not all there"),
        (
            lambda folder: (folder / "out_text_document.owner.partial").write_text("x" * 32),
            "are not all there",
        ),
        (lambda folder: (folder / "out.preprocess.json").write_text("{"), "out.preprocess.json is damaged"),
        (lambda folder: os.utime(folder / "in.jsonl"), "it had other --input"),
    ],
)
def test_remains_that_cannot_be_used_are_dropped(words, tmp_path, capsys, damage, message):
    stopped(words, tmp_path / "out", after=3)
    damage(tmp_path)
    capsys.readouterr()
    assert run(*words, prefix=tmp_path / "out") == 0
    printed = capsys.readouterr().err
    assert message in printed
    assert "going on" not in printed
    assert IndexedDataset(tmp_path / "out_text_document").num_tokens == 3000
    assert len(list(tmp_path.iterdir())) == 4


def wrong_versions(content):
    """A JSON value, with every part of it missing, or of each wrong type, or another number."""
    yield from (None, [], {}, "x", 1.5, True, -1, 10**30, [[]])
    parts = (
        content.items()
        if isinstance(content, dict)
        else enumerate(content if isinstance(content, list) else [])
    )
    for key, value in parts:
        for wrong in wrong_versions(value):
            yield (
                content | {key: wrong}
                if isinstance(content, dict)
                else [*content[:key], wrong, *content[key + 1 :]]
            )
        if isinstance(content, dict):
            yield {name: other for name, other in content.items() if name != key}


def test_a_journal_that_no_run_has_written_is_dropped(tmp_path, capsys):
    words = ["--input", numbers(tmp_path / "in.jsonl", ["1 2 3"] * 9), *NULL]
    stopped(words, tmp_path / "out", after=3, chunk_bytes=30)
    remains = content_of(tmp_path)
    good = json.loads(remains["out.preprocess.json"])
    texts = [json.dumps(wrong).encode() for wrong in wrong_versions(good) if wrong != good]
    assert len(texts) > 200
    for text in [*texts, b"", b"\xff", b"[" * 100_000, b"9" * 5000]:
        for name, content in remains.items():
            (tmp_path / name).write_bytes(content)
        (tmp_path / "out.preprocess.json").write_bytes(text)
        capsys.readouterr()
        assert run(*words, prefix=tmp_path / "out") == 0
        printed = capsys.readouterr().err
        assert printed.startswith("the remains of an interrupted run are dropped: ")
        assert "out.preprocess.json is damaged\n" in printed
        assert IndexedDataset(tmp_path / "out_text_document").num_tokens == 27
        assert len(list(tmp_path.iterdir())) == 4


def test_a_run_of_another_format_is_dropped(words, tmp_path, capsys, monkeypatch):
    stopped(words, tmp_path / "out", after=3)
    capsys.readouterr()
    monkeypatch.setattr(preprocess_module, "FORMAT", 3)
    assert run(*words, prefix=tmp_path / "out") == 0
    assert "it had other format\n" in capsys.readouterr().err


def stopped_before_publishing(words, prefix, capsys, monkeypatch, *, published=()):
    """A run whose files are complete, some of them with their names, and whose journal says so."""
    real = Path.replace

    def replace(self, target):
        if self.name.startswith("out_") and Path(target).suffix not in published:
            raise OSError(5, "Input/output error")
        return real(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", replace)
        assert run(*words, prefix=prefix) == 1
    assert "documents are done and kept" in capsys.readouterr().err
    assert json.loads(Path(f"{prefix}.preprocess.json").read_text())["is_complete"]


@pytest.mark.parametrize("published", [(), (".bin",), (".bin", ".json")])
@pytest.mark.parametrize("lost", ["*.partial", "*.bin*", "*.json*", "*.idx*", "*.owner.partial", None])
def test_a_complete_run_is_done_only_if_its_files_are_there(
    words, tmp_path, capsys, monkeypatch, lost, published
):
    assert run(*words, "--append-eod", prefix=tmp_path / "out") == 0
    stopped_before_publishing(words, tmp_path / "out", capsys, monkeypatch, published=published)
    for path in tmp_path.glob(f"out_{lost}"):
        path.unlink()
    assert run(*words, prefix=tmp_path / "out") == 0
    printed = capsys.readouterr().err
    dropped = "the remains of an interrupted run are dropped: its partial files are not all there"
    assert (dropped in printed) == (lost is not None)
    assert "done: 1,000 documents" in printed
    assert IndexedDataset(tmp_path / "out_text_document").num_tokens == 3000
    assert json.loads((tmp_path / "out_text_document.json").read_text())["append_eod"] is False
    assert len(list(tmp_path.iterdir())) == 4


def test_files_removed_while_a_run_completes_are_an_error(words, tmp_path, capsys, monkeypatch):
    real = IndexedWriter.commit

    def commit(self):
        for path in tmp_path.glob("*.bin.partial"):
            path.unlink()
        real(self)

    with monkeypatch.context() as patched:
        patched.setattr(IndexedWriter, "commit", commit)
        assert run(*words, prefix=tmp_path / "out") == 1
    assert "out_text_document.bin: is not there, and 6000 bytes were written" in capsys.readouterr().err
    assert run(*words, prefix=tmp_path / "out") == 0
    assert IndexedDataset(tmp_path / "out_text_document").num_tokens == 3000


def test_quarantined_lines_that_are_lost_are_found_again(tmp_path, capsys, monkeypatch):
    source = tmp_path / "in.jsonl"
    source.write_text('bad\n{"text": "1"}\n')
    words = ["--input", source, *NULL, "--on-bad-line", "quarantine"]
    stopped_before_publishing(words, tmp_path / "out", capsys, monkeypatch)
    (tmp_path / "out.bad_lines.jsonl").unlink()
    assert run(*words, prefix=tmp_path / "out") == 0
    assert "its partial files are not all there" in capsys.readouterr().err
    assert json.loads((tmp_path / "out.bad_lines.jsonl").read_text())["text"] == "bad"


@pytest.mark.parametrize(
    ("package", "flags"), [("tokenizers", ()), ("sentencepiece", ()), ("nltk", ("--split-sentences",))]
)
def test_an_upgraded_library_starts_anew(words, tmp_path, capsys, monkeypatch, package, flags):
    if flags:
        monkeypatch.setattr(preprocess_module, "load_splitter", lambda _: str.split)
        monkeypatch.setattr(encoder, "load_splitter", lambda _: lambda text: [text])
    stopped([*words, *flags], tmp_path / "out", after=3)
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "99.0" if name == package else real(name))
    capsys.readouterr()
    assert run(*words, *flags, prefix=tmp_path / "out") == 0
    assert "are dropped: it had other library versions\n" in capsys.readouterr().err


def test_keys_that_name_the_same_dataset_exclude_each_other(tmp_path, capsys):
    """z and b_c, or z_b and c: both write z_b_c_document."""
    source = tmp_path / "in.jsonl"
    source.write_text('{"b_c": "1", "c": "2"}\n' * 1000)
    first = ["--input", source, *NULL, "--json-keys", "c", "b_c"]
    second = ["--input", source, *NULL, "--json-keys", "c"]
    with IndexedWriter(tmp_path / "z_b_c_document", "u2"):
        before = content_of(tmp_path, "z")
        assert run(*first, prefix=tmp_path / "z") == 2
        message = capsys.readouterr().err
        assert message.startswith(f"error: {tmp_path / 'z_b_c_document.lock'}: another run is writing to ")
        assert content_of(tmp_path, "z") == before
    stopped(first, tmp_path / "z", after=3)
    stopped(second, tmp_path / "z_b", after=9)
    capsys.readouterr()
    assert run(*first, prefix=tmp_path / "z") == 0
    assert "its partial files are not all there" in capsys.readouterr().err, "they are the other run's"
    dataset = IndexedDataset(tmp_path / "z_b_c_document")
    assert {dataset.read(number)[0] for number in range(len(dataset))} == {1}


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_the_lock_of_a_killed_writer_is_free(words, tmp_path):
    child = os.fork()
    if not child:
        IndexedWriter(tmp_path / "out_text_document", "u2").open()
        os._exit(0)
    os.waitpid(child, 0)
    assert (tmp_path / "out_text_document.lock").exists()
    assert run(*words, prefix=tmp_path / "out") == 0
    assert len(list(tmp_path.iterdir())) == 4


def test_a_bad_line_that_stopped_a_run_can_be_left_out_by_the_next(tmp_path, capsys):
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "1"}\n' * 500 + "bad\n" + '{"text": "2"}\n' * 500)
    words = ["--input", source, *NULL]
    options = {"chunk_bytes": 1000, "journal_seconds": 0.0}
    assert run(*words, prefix=tmp_path / "out", **options) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"error: {source}:501: not JSON")
    assert "documents are done and kept" in message
    assert run(*words, "--on-bad-line", "skip", prefix=tmp_path / "out", **options) == 0
    assert "going on" in capsys.readouterr().err
    assert IndexedDataset(tmp_path / "out_text_document").num_documents == 1000


def test_two_runs_at_once_are_one_too_many(words, tmp_path, capsys):
    with Journal(str(tmp_path / "out"), print):
        assert run(*words, prefix=tmp_path / "out") == 2
        assert f"another run is writing to --output-prefix {tmp_path / 'out'}" in capsys.readouterr().err
        assert run(*words, prefix=tmp_path / "other") == 0
    assert run(*words, prefix=tmp_path / "out") == 0


def test_a_lock_whose_holder_ends_while_it_is_taken_is_taken_anew(tmp_path):
    """Its file is gone by then, so that a third run could lock another one of the same name."""
    holder = contextlib.ExitStack()
    holder.enter_context(Journal(str(tmp_path / "out"), print))
    real = Path.open

    def opened(self, *arguments):
        file = real(self, *arguments)
        holder.close()
        return file

    with (
        mock.patch.object(Path, "open", opened),
        Journal(str(tmp_path / "out"), print),
        pytest.raises(InputError, match="another run"),
        Journal(str(tmp_path / "out"), print),
    ):
        pass
    assert not list(tmp_path.iterdir())


def test_a_full_disk_keeps_the_former_dataset_and_what_is_done(words, tmp_path, capsys, monkeypatch):
    assert run(*words, prefix=tmp_path / "out") == 0
    former = content_of(tmp_path)
    for step in ("_offsets", "finalize", "state"):
        with monkeypatch.context() as patched:

            def fail(self):
                raise OSError(28, "No space left on device")

            patched.setattr(IndexedWriter, step, fail)
            assert run(*words, "--append-eod", prefix=tmp_path / "out") == 1
        printed = capsys.readouterr().err
        assert "No space left on device" in printed
        assert "nothing was kept" in printed
        assert content_of(tmp_path) == former
