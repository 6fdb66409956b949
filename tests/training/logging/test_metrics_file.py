"""A damaged metrics.jsonl keeps all intact lines, and a full disk leaves the file as it was."""

import bisect
import errno
import itertools
import json
import os
import random
from pathlib import Path

import pytest
from everyday import nightly

from megatrain.training.logging import metrics_file
from megatrain.training.logging.metrics_file import LogError, MetricsFile, is_metrics_file


def line_of(iteration: int) -> bytes:
    return json.dumps({"iteration": iteration, "lm_loss": 10.0 / iteration}).encode() + b"\n"


def written(folder: Path, lines: list[bytes]) -> Path:
    path = folder / "metrics.jsonl"
    path.write_bytes(b"".join(lines))
    return path


@pytest.mark.parametrize(
    "damage",
    [
        b'{"iteration": 6, "lm_loss": "\xff"}\n',
        b'{"iteration": 6, "x": ' + b"[" * 100_000 + b"}\n",
        b'{"ituration": 6}\n',
        b'{"iteration": true}\n',
        b'{"iteration": -6}\n',
        b'{"iteration": ' + b"6" * 5000 + b"}\n",
        b"\0" * 50 + b"\n",
        b"[6]\n",
        b"\n",
        b'{"iteration": 8006}\n',
        b'{"iteration": 2}\n',
        b'{"iteration": 6}{"iteration": 6}\n',
    ],
)
def test_one_damaged_line_is_kept_aside_and_the_rest_stays(tmp_path: Path, damage: bytes) -> None:
    lines = [*map(line_of, range(1, 6)), damage, *map(line_of, range(7, 12))]
    path = written(tmp_path, lines)
    assert is_metrics_file(path)
    metrics = MetricsFile(path, resumed_iteration=10)
    metrics.close()
    assert path.read_bytes() == b"".join([*lines[:5], *lines[6:10]])
    assert metrics.note is not None
    assert "line 6" in metrics.note
    aside = tmp_path / "metrics.damaged-1.jsonl"
    assert str(aside) in metrics.note
    assert aside.read_bytes() == damage


def test_damaged_lines_of_several_starts_are_all_kept(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        path = written(tmp_path, [line_of(1), b"x%d\n" % number, line_of(2)])
        MetricsFile(path, resumed_iteration=2).close()
    assert [(tmp_path / f"metrics.damaged-{n}.jsonl").read_bytes() for n in (1, 2, 3)] == [
        b"x1\n",
        b"x2\n",
        b"x3\n",
    ]


def test_an_intact_file_has_no_note(tmp_path: Path) -> None:
    """Evaluations repeat an iteration; a last line without its end is complete."""
    evaluation = b'{"iteration": 2, "validation": "valid"}\n'
    lines = [line_of(1), line_of(2), evaluation, evaluation, line_of(3)[:-1]]
    metrics = MetricsFile(written(tmp_path, lines), resumed_iteration=3)
    metrics.write({"iteration": 4})
    metrics.close()
    assert metrics.note is None
    assert metrics.path.read_bytes() == b"".join(lines) + b'\n{"iteration": 4}\n'
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl"]


@pytest.mark.parametrize("num_flips", [100, nightly(2000)])
def test_no_flipped_bit_removes_another_line(tmp_path: Path, num_flips: int) -> None:
    generator = random.Random(5)
    lines = [line_of(n) for n in range(1, 21)]
    content, starts = b"".join(lines), list(itertools.accumulate(map(len, lines), initial=0))
    aside = tmp_path / "metrics.damaged-1.jsonl"
    for _ in range(num_flips):
        bit = generator.randrange(8 * len(content))
        hit = bisect.bisect_right(starts, bit // 8) - 1
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        path = written(tmp_path, [bytes(flipped)])
        MetricsFile(path, resumed_iteration=20).close()
        after = path.read_bytes().splitlines(keepends=True)
        lost = [at for at, line in enumerate(lines) if line not in after and at != hit]
        # A flipped line end joins two lines; a flipped digit can repeat the iteration of a line, and either may be the damaged one.
        assert len(lost) <= 1
        is_last = hit == len(lines) - 1  # a larger iteration looks like one of an earlier attempt
        kept = path.read_bytes() + (aside.read_bytes() if aside.exists() else b"")
        assert is_last or sorted(kept) == sorted(flipped)
        aside.unlink(missing_ok=True)


@pytest.mark.parametrize("num_written", [0, 7])
def test_a_full_disk_leaves_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_written: int
) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl", resumed_iteration=0)
    metrics.write({"iteration": 1})

    def fill(descriptor: int, data: bytes) -> None:
        os.write(descriptor, data[:num_written])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(metrics_file, "write_all", fill)
        with pytest.raises(
            LogError,
            match=r"metrics.jsonl: .*errno 28.*; 17 bytes needed, [\d,]+ bytes free\n  fix: .*--on-log-failure",
        ):
            metrics.write({"iteration": 2})
    metrics.write({"iteration": 3})
    metrics.close()
    assert metrics.path.read_bytes() == b'{"iteration": 1}\n{"iteration": 3}\n'


def test_a_failed_start_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, [line_of(1), line_of(2)])

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("megatrain.storage.files.fsync", fail)
    with pytest.raises(LogError):
        MetricsFile(path, resumed_iteration=1)
    assert path.read_bytes() == line_of(1) + line_of(2)
    assert sorted(found.name for found in tmp_path.iterdir()) == ["metrics.jsonl"]


def test_a_file_that_was_replaced_is_noticed_before_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    written = MetricsFile(path, resumed_iteration=0)
    written.write({"iteration": 1})
    written.flush()
    path.rename(tmp_path / "moved.jsonl")
    path.write_text("")
    with pytest.raises(LogError, match=r"metrics\.jsonl: the file was replaced"):
        written.flush()
    written.close()
