"""Interrupted runs: after a kill at any step the next run resumes, and the bytes equal those of an uninterrupted run."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from unittest import mock

import pytest
from everyday import one_in
from preprocessing import NULL, InlineWorkers, content_of, numbers, run

from megatrain.config.errors import InputError
from megatrain.data.indexed.reader import IndexedDataset
from megatrain.data.indexed.writer import IndexedWriter
from megatrain.data.preprocess import encoder
from megatrain.data.preprocess import run as preprocess_module
from megatrain.data.preprocess.outputs import Journal
from megatrain.storage.files import open_regular

pytestmark = pytest.mark.usefixtures("without_fsync")

ROOT = Path(__file__).parents[3]
FINAL_FILES = [f"out_{key}_document.{kind}" for key in ("id", "text") for kind in ("bin", "idx", "json")]


def mixed_inputs(folder, num_documents):
    """Write a plain and a compressed file with some bad lines; return the arguments."""
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
    """Ends the process, as SIGKILL would, before the k-th operation that changes the disk."""

    def __init__(self, step):
        self.left = step

    def before(self, real):
        def call(*arguments, **named):
            self.left -= 1
            if self.left < 0:
                os._exit(9)
            return real(*arguments, **named)

        return call


def run_killed(arguments, prefix, step, **options):
    """Run in a separate process that is killed at a step. Return whether it finished before."""
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
            code = run(*arguments, prefix=prefix, **options)
        os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) in {0, 9}
    return os.waitstatus_to_exitcode(status) == 0


def require_old_or_new(folder, old, new):
    """Assert that a dataset that opens is complete and has its own description."""
    for name in FINAL_FILES:
        if name.endswith(".idx") and (folder / name).exists():
            IndexedDataset(folder / name.removesuffix(".idx"))
            trio = [name.replace(".idx", suffix) for suffix in (".bin", ".idx", ".json")]
            found = [(folder / part).read_bytes() for part in trio]
            assert found in ([old[part] for part in trio], [new[part] for part in trio])


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("with_old", [False, True])
def test_a_run_killed_at_any_step_is_resumed(tmp_path, capsys, with_old):
    inputs = tmp_path / "in"
    inputs.mkdir()
    arguments = mixed_inputs(inputs, 600)
    options = {"chunk_bytes": 5000, "journal_seconds": 0.0}
    (tmp_path / "whole").mkdir()
    assert run(*arguments, prefix=tmp_path / "whole" / "out", **options) == 0
    new = content_of(tmp_path / "whole")
    assert sorted(new) == sorted([*FINAL_FILES, "out.bad_lines.jsonl"])
    (tmp_path / "earlier").mkdir()
    other = numbers(inputs / "other.jsonl", ["1"])
    other.write_text('{"text": "1", "id": "2"}\n')
    assert run("--input", other, *NULL, "--json-keys", "text", "id", prefix=tmp_path / "earlier" / "out") == 0
    old = content_of(tmp_path / "earlier")
    num_resumed = 0
    for step in itertools.count(int(with_old), 2):
        folder = tmp_path / f"at{step}"
        folder.mkdir()
        for name, content in old.items() if with_old else ():
            (folder / name).write_bytes(content)
        is_done = run_killed(arguments, folder / "out", step, **options)
        require_old_or_new(folder, old, new)
        capsys.readouterr()
        assert run(*arguments, prefix=folder / "out", **options) == 0
        num_resumed += "resuming an interrupted run after " in capsys.readouterr().err
        assert content_of(folder) == new
        if is_done:
            break
    assert step > 50
    assert num_resumed > step // 4


DRIVER = """
import sys
from megatrain.data.preprocess.run import preprocess
from megatrain.data.preprocess.flags import parse_settings
if __name__ == "__main__":
    preprocess(parse_settings(sys.argv[1:]), chunk_bytes=20_000, journal_seconds=0.0)
"""


@pytest.mark.nightly
def test_a_run_killed_many_times_ends_with_the_same_bytes(tmp_path):
    arguments = mixed_inputs(tmp_path, 60_000)
    (tmp_path / "whole").mkdir()
    assert run(*arguments, prefix=tmp_path / "whole" / "out") == 0
    (tmp_path / "driver.py").write_text(DRIVER)
    journal = tmp_path / "out.preprocess.json"
    choices = random.Random(1)
    signals = [signal.SIGKILL, signal.SIGTERM, signal.SIGKILL, signal.SIGINT]
    documents_done = []
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
            [sys.executable, tmp_path / "driver.py", *map(str, [*arguments, *flags])],
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
        if process.wait(60) == 0:  # a loaded machine: the run ended before the signal came
            break
        documents_done.append(json.loads(journal.read_text())["keys"]["text"]["documents"])
    assert documents_done == sorted(set(documents_done)), "every run makes progress"
    assert documents_done, "no run was killed"
    assert documents_done[-1] < 60_000
    assert content_of(tmp_path) == content_of(tmp_path / "whole")


def stopped(arguments, prefix, *, after, **options):
    """Run with an error at chunk number `after`; the chunks before it are journaled."""

    class Failing(InlineWorkers):
        def map(self, items, **_):
            for number, item in enumerate(items):
                if number == after:
                    raise OSError(5, "Input/output error")
                yield self.work(item)

    named = {"chunk_bytes": 2000, "journal_seconds": 0.0} | options
    assert run(*arguments, prefix=prefix, workers_type=Failing, **named) == 1


@pytest.fixture
def arguments(tmp_path):
    return ["--input", numbers(tmp_path / "in.jsonl", ["1 2 3"] * 1000), *NULL]


def test_settings_that_do_not_change_the_bytes_may_change_on_resume(arguments, tmp_path, capsys):
    assert run(*arguments, prefix=tmp_path / "whole") == 0
    stopped(arguments, tmp_path / "out", after=3)
    assert "666 documents are done and kept" in capsys.readouterr().err
    again = [*arguments, "--workers", 3, "--log-interval", 7, "--on-bad-line", "skip"]
    assert run(*again, prefix=tmp_path / "out", chunk_bytes=300) == 0
    assert "resuming an interrupted run after 666 documents, 666 lines of file 1" in capsys.readouterr().err
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
def test_other_settings_start_over_and_are_reported(tmp_path, capsys, flags, name):
    source = tmp_path / "in.jsonl"
    source.write_text("bad\n" + '{"text": "1 2 3", "other": "4"}\n' * 1000)
    arguments = ["--input", source, *NULL, "--on-bad-line", "skip"]
    stopped(arguments, tmp_path / "out", after=3)
    capsys.readouterr()
    assert run(*arguments, *flags, prefix=tmp_path / "out") == 0
    assert re.search(rf"starting over: .* {name}\n", capsys.readouterr().err)
    assert run(*arguments, *flags, prefix=tmp_path / "whole") == 0
    whole = {file.replace("whole", "out"): content for file, content in content_of(tmp_path, "whole").items()}
    assert content_of(tmp_path) == whole


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda folder: (folder / "out_text_document.bin.partial").unlink(),
            "partial files are incomplete",
        ),
        (lambda folder: os.truncate(folder / "out_text_document.lengths.partial", 5), "are incomplete"),
        (
            lambda folder: (folder / "out_text_document.owner.partial").write_text("x" * 32),
            "are incomplete",
        ),
        (lambda folder: (folder / "out.preprocess.json").write_text("{"), "out.preprocess.json is damaged"),
        (lambda folder: os.utime(folder / "in.jsonl"), "--input"),
    ],
)
def test_unusable_partial_files_are_dropped(arguments, tmp_path, capsys, damage, message):
    stopped(arguments, tmp_path / "out", after=3)
    damage(tmp_path)
    capsys.readouterr()
    assert run(*arguments, prefix=tmp_path / "out") == 0
    printed = capsys.readouterr().err
    assert message in printed
    assert "resuming" not in printed
    assert IndexedDataset(tmp_path / "out_text_document").num_tokens == 3000
    assert len(list(tmp_path.iterdir())) == 4


def wrong_versions(content):
    """Yield a JSON value with each part missing, of each wrong type, or another number."""
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


@pytest.mark.parametrize("step", one_in(2, [4, 1]))
def test_a_journal_that_no_run_wrote_is_dropped(tmp_path, capsys, step):
    arguments = ["--input", numbers(tmp_path / "in.jsonl", ["1 2 3"] * 9), *NULL]
    stopped(arguments, tmp_path / "out", after=3, chunk_bytes=30)
    remains = content_of(tmp_path)
    good = json.loads(remains["out.preprocess.json"])
    texts = [json.dumps(wrong).encode() for wrong in wrong_versions(good) if wrong != good]
    assert len(texts) > 200
    for text in [*texts[::step], b"", b"\xff", b"[" * 100_000, b"9" * 5000]:
        for name, content in remains.items():
            (tmp_path / name).write_bytes(content)
        (tmp_path / "out.preprocess.json").write_bytes(text)
        capsys.readouterr()
        assert run(*arguments, prefix=tmp_path / "out") == 0
        printed = capsys.readouterr().err
        assert "starting over: " in printed
        assert "out.preprocess.json is damaged\n" in printed
        assert IndexedDataset(tmp_path / "out_text_document").num_tokens == 27
        assert len(list(tmp_path.iterdir())) == 4


def test_a_run_of_another_format_is_dropped(arguments, tmp_path, capsys, monkeypatch):
    stopped(arguments, tmp_path / "out", after=3)
    capsys.readouterr()
    monkeypatch.setattr(preprocess_module, "FORMAT", preprocess_module.FORMAT + 1)
    assert run(*arguments, prefix=tmp_path / "out") == 0
    assert "format\n" in capsys.readouterr().err


def stopped_before_commit(arguments, prefix, capsys, monkeypatch, *, committed=()):
    """Run until all files are complete and journaled, and some of them are renamed."""
    real = Path.replace

    def replace(self, target):
        if self.name.startswith("out_") and Path(target).suffix not in committed:
            raise OSError(5, "Input/output error")
        return real(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", replace)
        assert run(*arguments, prefix=prefix) == 1
    assert "documents are done and kept" in capsys.readouterr().err
    assert json.loads(Path(f"{prefix}.preprocess.json").read_text())["is_complete"]


@pytest.mark.parametrize("committed", [(), (".bin",), (".bin", ".json")])
@pytest.mark.parametrize("lost", ["*.partial", "*.bin*", "*.json*", "*.idx*", "*.owner.partial", None])
def test_a_complete_run_is_finished_only_if_its_files_exist(
    arguments, tmp_path, capsys, monkeypatch, lost, committed
):
    assert run(*arguments, "--append-eod", prefix=tmp_path / "out") == 0
    stopped_before_commit(arguments, tmp_path / "out", capsys, monkeypatch, committed=committed)
    for path in tmp_path.glob(f"out_{lost}"):
        path.unlink()
    assert run(*arguments, prefix=tmp_path / "out") == 0
    printed = capsys.readouterr().err
    assert ("its partial files are incomplete" in printed) == (lost is not None)
    assert "done: 1,000 documents" in printed
    assert IndexedDataset(tmp_path / "out_text_document").num_tokens == 3000
    assert json.loads((tmp_path / "out_text_document.json").read_text())["append_eod"] is False
    assert len(list(tmp_path.iterdir())) == 4


def flip_bit(path, bit):
    content = bytearray(path.read_bytes())
    content[bit // 8 % len(content)] ^= 1 << bit % 8
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("is_complete", [False, True])
def test_damaged_partial_files_are_never_used(tmp_path, capsys, monkeypatch, is_complete):
    """One flipped bit in any file of an interrupted run: the next run names the file and starts over."""
    source = tmp_path / "in.jsonl"
    source.write_text("".join(f'{{"text": "{n % 90} 7 2"}}\n' + "bad\n" * (n == 5) for n in range(600)))
    arguments = ["--input", source, *NULL, "--on-bad-line", "quarantine"]
    assert run(*arguments, prefix=tmp_path / "whole") == 0
    whole = {name.replace("whole", "out"): content for name, content in content_of(tmp_path, "whole").items()}
    if is_complete:
        stopped_before_commit(arguments, tmp_path / "out", capsys, monkeypatch)
    else:
        stopped(arguments, tmp_path / "out", after=3)
    files = content_of(tmp_path)
    kinds = ("bin", "idx", "json") if is_complete else ("bin", "lengths", "borders", "owner")
    names = [f"out_text_document.{kind}.partial" for kind in kinds]
    names += ["out.bad_lines.jsonl" + ".partial" * (not is_complete)]
    assert set(names) <= set(files)
    generator = random.Random(3)
    for name in names * 4:
        for path in tmp_path.glob("out*"):
            path.unlink()
        for other, content in files.items():
            (tmp_path / other).write_bytes(content)
        # Bytes that were written after the journal are dropped: all of these are before.
        num_covered = (
            len(files[name]) // 2 if name.endswith("partial") and not is_complete else len(files[name])
        )
        flip_bit(tmp_path / name, generator.randrange(8 * num_covered))
        capsys.readouterr()
        assert run(*arguments, prefix=tmp_path / "out") == 0
        assert "starting over: its partial files are incomplete or damaged" in capsys.readouterr().err, name
        assert content_of(tmp_path) == whole


def test_a_file_that_changes_before_the_end_is_an_error(arguments, tmp_path, capsys, monkeypatch):
    finalize = IndexedWriter.finalize

    def spoiled(self):
        self.state()
        flip_bit(tmp_path / "out_text_document.borders.partial", 80)
        finalize(self)

    with monkeypatch.context() as patched:
        patched.setattr(IndexedWriter, "finalize", spoiled)
        assert run(*arguments, prefix=tmp_path / "out") == 1
    assert "other content than was written" in capsys.readouterr().err
    assert not (tmp_path / "out_text_document.idx").exists()
    assert run(*arguments, prefix=tmp_path / "out") == 0
    assert IndexedDataset(tmp_path / "out_text_document").num_tokens == 3000


def test_files_removed_while_a_run_completes_are_an_error(arguments, tmp_path, capsys, monkeypatch):
    real = IndexedWriter.commit

    def commit(self):
        for path in tmp_path.glob("*.bin.partial"):
            path.unlink()
        real(self)

    with monkeypatch.context() as patched:
        patched.setattr(IndexedWriter, "commit", commit)
        assert run(*arguments, prefix=tmp_path / "out") == 1
    assert "out_text_document.bin: does not exist, but 6000 bytes were written" in capsys.readouterr().err
    assert run(*arguments, prefix=tmp_path / "out") == 0
    assert IndexedDataset(tmp_path / "out_text_document").num_tokens == 3000


def test_a_lost_quarantine_file_is_written_again(tmp_path, capsys, monkeypatch):
    source = tmp_path / "in.jsonl"
    source.write_text('bad\n{"text": "1"}\n')
    arguments = ["--input", source, *NULL, "--on-bad-line", "quarantine"]
    stopped_before_commit(arguments, tmp_path / "out", capsys, monkeypatch)
    (tmp_path / "out.bad_lines.jsonl").unlink()
    assert run(*arguments, prefix=tmp_path / "out") == 0
    assert "its partial files are incomplete" in capsys.readouterr().err
    assert json.loads((tmp_path / "out.bad_lines.jsonl").read_text())["text"] == "bad"


@pytest.mark.parametrize(
    ("package", "flags"), [("tokenizers", ()), ("sentencepiece", ()), ("nltk", ("--split-sentences",))]
)
def test_an_upgraded_library_starts_over(arguments, tmp_path, capsys, monkeypatch, package, flags):
    if flags:
        monkeypatch.setattr(preprocess_module, "available_splitter", lambda _: "punkt")
        monkeypatch.setattr(encoder, "load_splitter", lambda _: lambda text: [text])
    stopped([*arguments, *flags], tmp_path / "out", after=3)
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "99.0" if name == package else real(name))
    capsys.readouterr()
    assert run(*arguments, *flags, prefix=tmp_path / "out") == 0
    assert "library versions\n" in capsys.readouterr().err


def test_runs_that_write_the_same_dataset_exclude_each_other(tmp_path, capsys):
    """z and b_c, or z_b and c: both write z_b_c_document."""
    source = tmp_path / "in.jsonl"
    source.write_text('{"b_c": "1", "c": "2"}\n' * 1000)
    first = ["--input", source, *NULL, "--json-keys", "c", "b_c"]
    second = ["--input", source, *NULL, "--json-keys", "c"]
    with IndexedWriter(tmp_path / "z_b_c_document", "u2"):
        before = content_of(tmp_path, "z")
        assert run(*first, prefix=tmp_path / "z") == 2
        message = capsys.readouterr().err
        assert message.startswith(f"error: {tmp_path / 'z_b_c_document.lock'}: another run ")
        assert content_of(tmp_path, "z") == before
    stopped(first, tmp_path / "z", after=3)
    stopped(second, tmp_path / "z_b", after=9)
    capsys.readouterr()
    assert run(*first, prefix=tmp_path / "z") == 0
    assert "its partial files are incomplete" in capsys.readouterr().err, "they belong to the other run"
    dataset = IndexedDataset(tmp_path / "z_b_c_document")
    assert {dataset.read(number)[0] for number in range(len(dataset))} == {1}


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_the_lock_of_a_killed_writer_is_released(arguments, tmp_path):
    child = os.fork()
    if not child:
        IndexedWriter(tmp_path / "out_text_document", "u2").open()
        os._exit(0)
    os.waitpid(child, 0)
    assert (tmp_path / "out_text_document.lock").exists()
    assert run(*arguments, prefix=tmp_path / "out") == 0
    assert len(list(tmp_path.iterdir())) == 4


def test_a_bad_line_that_stopped_a_run_can_be_skipped_on_resume(tmp_path, capsys):
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "1"}\n' * 500 + "bad\n" + '{"text": "2"}\n' * 500)
    arguments = ["--input", source, *NULL]
    options = {"chunk_bytes": 1000, "journal_seconds": 0.0}
    assert run(*arguments, prefix=tmp_path / "out", **options) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"error: {source}:501: not JSON")
    assert "documents are done and kept" in message
    assert run(*arguments, "--on-bad-line", "skip", prefix=tmp_path / "out", **options) == 0
    assert "resuming" in capsys.readouterr().err
    assert IndexedDataset(tmp_path / "out_text_document").num_documents == 1000


def test_a_second_run_with_the_same_prefix_is_an_error(arguments, tmp_path, capsys):
    with Journal(str(tmp_path / "out"), print):
        assert run(*arguments, prefix=tmp_path / "out") == 2
        assert f"--output-prefix {tmp_path / 'out'}" in capsys.readouterr().err
        assert run(*arguments, prefix=tmp_path / "other") == 0
    assert run(*arguments, prefix=tmp_path / "out") == 0


def test_a_lock_whose_owner_ends_during_acquire_is_acquired_again(tmp_path):
    """Its file is removed by then, so a third run could lock a new file of the same name."""
    holder = contextlib.ExitStack()
    holder.enter_context(Journal(str(tmp_path / "out"), print))

    def opened(*arguments):
        descriptor = open_regular(*arguments)
        holder.close()
        return descriptor

    with (
        mock.patch("megatrain.data.files.open_regular", opened),
        Journal(str(tmp_path / "out"), print),
        pytest.raises(InputError, match="another run"),
        Journal(str(tmp_path / "out"), print),
    ):
        pass
    assert not list(tmp_path.iterdir())


def test_a_full_disk_keeps_the_old_dataset(arguments, tmp_path, capsys, monkeypatch):
    assert run(*arguments, prefix=tmp_path / "out") == 0
    earlier = content_of(tmp_path)
    for step in ("_offsets", "finalize", "state"):
        with monkeypatch.context() as patched:

            def fail(self):
                raise OSError(28, "No space left on device")

            patched.setattr(IndexedWriter, step, fail)
            assert run(*arguments, "--append-eod", prefix=tmp_path / "out") == 1
        printed = capsys.readouterr().err
        assert "No space left on device" in printed
        assert "nothing was kept" in printed
        assert content_of(tmp_path) == earlier
