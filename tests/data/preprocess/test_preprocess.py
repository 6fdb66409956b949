"""Preprocessing: recorded bytes, the same for any number of workers, and nothing left behind by a bad line."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from preprocessing import NULL, InlineWorkers, content_of, numbers, run
from recorded import EXPECTED

from megatrain.config.errors import ConfigError
from megatrain.config.schema.tokenizer import TokenizerConfig
from megatrain.data.indexed.reader import IndexedDataset
from megatrain.data.preprocess import encoder, progress
from megatrain.data.preprocess import run as preprocess_module
from megatrain.data.preprocess.documents import parse_line, sentences_of
from megatrain.data.preprocess.flags import parse_settings
from megatrain.data.preprocess.run import main, preprocess
from megatrain.data.preprocess.workers import Workers
from megatrain.data.tokenizers.build import load_tokenizer

ROOT = Path(__file__).parents[3]


def check_hashes(prefix, recorded):
    for suffix in ("bin", "idx"):
        content = Path(f"{prefix}.{suffix}").read_bytes()
        assert len(content) == recorded[f"{suffix}_bytes"]
        assert hashlib.sha256(content).hexdigest() == recorded[f"{suffix}_sha256"]


DERIVED = EXPECTED["derived_files"]
HF, SP = "tokenizer.json", "tokenizer.model"
RECORDED_RUNS = [
    ("corpus", HF, ["--append-eod"], {"text": EXPECTED["indexed"]["corpus_text_document"]}),
    ("corpus", HF, [], {"text": DERIVED["corpus_no_eod_text_document"]}),
    ("paragraphs", HF, ["--append-eod"], {"text": DERIVED["paragraphs_hf_text_document"]}),
    ("corpus", SP, ["--append-eod"], {"text": DERIVED["corpus_sp_text_document"]}),
    ("paragraphs", SP, ["--append-eod"], {"text": EXPECTED["indexed"]["paragraphs_text_document"]}),
    (
        "corpus",
        HF,
        ["--append-eod", "--json-keys", "text", "src"],
        {"text": DERIVED["two_keys_text_document"], "src": DERIVED["two_keys_src_document"]},
    ),
]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("run_case", RECORDED_RUNS, ids=lambda case: "-".join((*case[:2], *case[2])))
def test_recorded_bytes(golden_text, tmp_path, run_case, workers):
    """Also in this process, where chunks are cut just the same."""
    file, tokenizer, flags, recorded = run_case
    words = ["--input", golden_text / f"{file}.jsonl", "--workers", workers or 1, *flags]
    words += ["--tokenizer-model", golden_text / tokenizer]
    if tokenizer == SP:
        pytest.importorskip("sentencepiece")
        words += ["--tokenizer-type", "SentencePieceTokenizer"]
    settings = parse_settings([*map(str, words), "--output-prefix", str(tmp_path / "out")])
    preprocess(settings, chunk_bytes=50_000, workers_type=Workers if workers else InlineWorkers)
    for key, hashes in recorded.items():
        check_hashes(tmp_path / f"out_{key}_document", hashes)


@pytest.fixture
def texts(tmp_path):
    """Many documents of all kinds, over several chunks."""
    path = tmp_path / "texts.jsonl"
    with path.open("w") as file:
        for number in range(60_000):
            text = " ".join(str((number * step) % 98) for step in range(number % 9))
            value = [text, "", "7 8"] if number % 50 == 0 else text
            file.write(json.dumps({"text": value, "id": str(number % 98)}) + "\n")
    return path


def test_the_number_of_workers_changes_nothing(texts, tmp_path):
    outputs = []
    for workers in (1, 2, 3):
        flags = [*NULL, "--append-eod", "--json-keys", "text", "id", "--workers", workers]
        assert run("--input", texts, *flags, prefix=tmp_path / f"w{workers}", workers_type=Workers) == 0
        files = sorted(tmp_path.glob(f"w{workers}_*"))
        assert len(files) == 6
        outputs.append([file.read_bytes() for file in files])
    assert outputs[0] == outputs[1] == outputs[2]
    dataset = IndexedDataset(tmp_path / "w1_text_document")
    assert dataset.num_documents == 60_000
    assert len(dataset) == 60_000 - len([n for n in range(60_000) if n % 9 == 0 and n % 50]) + len(
        [n for n in range(60_000) if n % 50 == 0 and n % 9]
    )


def test_documents_become_what_the_rules_say(tmp_path):
    source = numbers(tmp_path / "in.jsonl", ["1 2", "", ["3", "", "4 5", ""], [], [""], "6"])
    assert run("--input", source, *NULL, "--append-eod", prefix=tmp_path / "out") == 0
    dataset = IndexedDataset(tmp_path / "out_text_document")
    assert [dataset.read(k).tolist() for k in range(len(dataset))] == [[1, 2, 99], [3], [4, 5, 99], [6, 99]]
    assert dataset.document_boundaries.tolist() == [0, 1, 1, 3, 3, 3, 4]


def test_the_description_names_the_tokenizer_and_the_counts(tmp_path):
    source = numbers(tmp_path / "in.jsonl", ["1 2", "", "3"])
    assert run("--input", source, *NULL, "--append-eod", prefix=tmp_path / "out") == 0
    description = json.loads((tmp_path / "out_text_document.json").read_text())
    assert description == {
        "tokenizer_type": "NullTokenizer",
        "tokenizer_fingerprint": load_tokenizer(
            TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=100)
        ).fingerprint,
        "vocab_size": 100,
        "eod": 99,
        "append_eod": True,
        "documents": 3,
        "sequences": 2,
        "tokens": 5,
        "largest_id": 99,
        "eod_count": 2,
        "json_key": "text",
        "skipped_lines": 0,
        "sources": [{"path": str(source), "bytes": source.stat().st_size}],
    }


BAD_LINES = {
    b'{"text": "1 2"': "not JSON: Expecting ',' delimiter at column 15",
    b'{"text": "\xff"}': "not UTF-8: byte 0xff at position 10 of the line",
    b'{"body": "1", "id": 3}': "key 'text' is missing; the line has 'body', 'id'",
    b"{}": "key 'text' is missing; the line has nothing",
    b'{"text": null}': "key 'text' holds null, not a string",
    b'{"text": 5}': "key 'text' holds a number, not a string",
    b'{"text": {"a": 1}}': "key 'text' holds an object, not a string",
    b'{"text": ["1", 2]}': "key 'text' holds a list with a number, not a string",
    b'["text"]': "holds a list, not an object",
    b"": "blank line",
    b'\xef\xbb\xbf{"text": "1"}': "starts with a byte-order mark",
    b'{"text": "\\ud800"}': "key 'text' holds half of a surrogate pair",
    b'{"text": ' + b"[" * 100_000: "not usable JSON: nested too deeply",
    b'{"text": "1", "n": ' + b"9" * 5000 + b"}": "not usable JSON",
    b'{"text": "1 x"}': "refused by the tokenizer: invalid literal for int",
    b'{"text": "1 100"}': "refused by the tokenizer: id 100 is outside the vocabulary of 100",
}


@pytest.mark.parametrize("bad", BAD_LINES, ids=BAD_LINES.get)
def test_a_bad_line_stops_the_run_and_leaves_nothing(tmp_path, capsys, bad):
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'{"text": "1"}\n' * 3 + bad + b"\n" + b'{"text": "2"}\n' * 3)
    assert run("--input", source, *NULL, prefix=tmp_path / "out") == 2
    message = capsys.readouterr().err
    assert message.startswith(f"error: {source}:4: {BAD_LINES[bad]}")
    assert "--on-bad-line skip" in message
    assert "Traceback" not in message
    assert list(tmp_path.iterdir()) == [source]


def test_bad_lines_can_be_left_out(tmp_path, capsys):
    source = tmp_path / "in.jsonl"
    good = b'{"text": "1"}\n'
    source.write_bytes(b"".join(good + bad + b"\n" for bad in BAD_LINES))
    assert run("--input", source, *NULL, "--on-bad-line", "skip", prefix=tmp_path / "out") == 0
    dataset = IndexedDataset(tmp_path / "out_text_document")
    assert dataset.num_documents == dataset.num_tokens == len(BAD_LINES)
    assert json.loads((tmp_path / "out_text_document.json").read_text())["skipped_lines"] == len(BAD_LINES)
    shown = [line for line in capsys.readouterr().err.splitlines() if line.startswith("left out: ")]
    assert len(shown) == len(BAD_LINES)
    places = [int(line.split(":")[2]) for line in shown]
    assert places == list(range(2, 2 * len(BAD_LINES) + 1, 2))


def test_a_cut_last_line_is_a_bad_line(tmp_path, capsys):
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "1"}\n{"text": "2')
    assert run("--input", source, *NULL, prefix=tmp_path / "out") == 2
    assert f"{source}:2: not JSON: Unterminated string" in capsys.readouterr().err


def test_no_documents_are_no_error(tmp_path):
    source = numbers(tmp_path / "in.jsonl", [])
    assert run("--input", source, *NULL, prefix=tmp_path / "out") == 0
    assert IndexedDataset(tmp_path / "out_text_document").num_documents == 0


def test_progress_tells_speed_and_time_left(texts, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(progress, "_LINE_SECONDS", 0.0)
    assert (
        run("--input", texts, *NULL, "--log-interval", 20_000, prefix=tmp_path / "out", chunk_bytes=50_000)
        == 0
    )
    output = capsys.readouterr().err.splitlines()
    assert len(output) == 3 + 2
    for word in ("% | 2", " documents | ", "documents/s | ", "MB/s | 0:00:0", " left"):
        assert word in output[0]
    assert output[-2].startswith("done: 60,000 documents from ")
    assert output[-1].startswith(f"  {tmp_path / 'out_text_document'}: 60,000 documents, ")


def test_progress_is_never_silent_for_long_nor_talks_without_end(capsys, monkeypatch):
    monkeypatch.setattr(progress, "_LINE_SECONDS", 0.05)
    monkeypatch.setattr(progress, "_SILENT_SECONDS", 0.2)
    shown = progress.Progress(total_bytes=100, log_interval=1, documents=5, bytes_read=50)
    with shown.running():
        time.sleep(0.5)
        silent = capsys.readouterr().err.splitlines()
        for number in range(100):
            shown.add(1, bytes_read=50 + number // 2)
    assert 1 <= len(silent) <= 3
    assert silent[0].endswith("50.0% | 5 documents | 0 documents/s | 0.00 MB/s | ? left")
    assert len(capsys.readouterr().err.splitlines()) <= 2


def test_all_problems_of_a_command_line_are_told_at_once(capsys):
    assert main(["--inptu", "x", "--workers", "0", "--json-keys", "a", "a"]) == 2
    message = capsys.readouterr().err
    for part in (
        "error: 5 problems\n1. --inptu is unknown\n     fix: did you mean --input?\n2. ",
        "--input is missing",
        "--output-prefix is missing",
        "--workers 0 must be at least 1\n     fix: give --workers a whole number at least 1",
        "--json-keys names 'a' twice",
    ):
        assert part in message


def test_values_that_a_flag_does_not_take_are_told_like_other_problems(capsys):
    words = ["--worker", "4", "--workers", "two", "--on-bad-line", "skp", "--log-interval", "2", "3"]
    assert main([*words, "--append-eod", "stray", "--max-line-mb", "--input=x"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: 7 problems",
        "1. --worker is unknown",
        "     fix: did you mean --workers?",
        "2. stray is unknown",
        "     fix: see --help for what there is",
        "3. --on-bad-line skp is not a choice",
        "     fix: did you mean skip? --on-bad-line takes stop or skip or quarantine",
        "4. --max-line-mb has no value",
        "     fix: give --max-line-mb a whole number at least 1",
        "5. --workers two is not a whole number",
        "     fix: give --workers a whole number at least 1",
        "6. --log-interval 2 3 is not one value",
        "     fix: give --log-interval a whole number at least 1",
        "7. --output-prefix is missing",
        "     fix: give --output-prefix PREFIX",
    ]


def test_a_language_without_sentences_is_refused(capsys):
    assert main(["--input", "x", "--output-prefix", "p", "--lang", "english"]) == 2
    message = capsys.readouterr().err
    assert message.startswith(
        "error: --lang says how sentences are split, and they are not\n  fix: add --split-"
    )


@pytest.mark.parametrize(
    ("prefix", "shown", "better"), [("", "''", "corpus"), ("data/", "data/", "data/corpus")]
)
def test_an_output_prefix_that_names_no_file_is_refused(capsys, prefix, shown, better):
    assert main(["--input", "x", "--output-prefix", prefix]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"error: --output-prefix {shown} names no file\n  fix: ")
    assert message.endswith(f"such as {better}\n")


def test_every_field_of_the_tokenizer_is_a_flag(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for field in dataclasses.fields(TokenizerConfig):
        assert "--" + field.name.replace("_", "-") in text
    assert "Kind of the tokenizer." in text
    words = "--input a b --output-prefix p --tokenizer-model m --vocab-size 7"
    settings = parse_settings(words.split())
    assert settings.input == ("a", "b")
    assert settings.tokenizer == TokenizerConfig(
        tokenizer_type="HuggingFaceTokenizer", tokenizer_model="m", vocab_size=7
    )
    with pytest.raises(
        ConfigError, match=r"--tokenizer-type Hugging is not a choice\n  fix: .*HuggingFaceTokenizer"
    ):
        parse_settings([*words.split(), "--tokenizer-type", "Hugging"])
    with pytest.raises(ConfigError, match="--vocab-size many is not a whole number"):
        parse_settings([*words.split(), "--vocab-size", "many"])


def test_flags_without_effect_are_accepted_and_say_so(tmp_path, capsys):
    source = numbers(tmp_path / "in.jsonl", ["1"])
    flags = ["--partitions", 4, "--keep-sequential-samples"]
    assert run("--input", source, *NULL, *flags, prefix=tmp_path / "out") == 0
    printed = capsys.readouterr().err
    assert "--partitions has no effect: output is in the order of the input anyway" in printed
    assert "--keep-sequential-samples has no effect" in printed


def test_keys_and_newlines_that_make_no_sense_are_refused(capsys):
    words = ["--input", "x", "--output-prefix", "p", "--json-keys", "a/b", "--keep-newlines"]
    assert main(words) == 2
    message = capsys.readouterr().err
    assert "--json-keys 'a/b' cannot be part of a file's name" in message
    assert "--keep-newlines says how sentences are split, and they are not" in message


@pytest.mark.parametrize(
    "name",
    [
        "out_text_document.json",
        "out_text_document.bin.partial",
        "out_text_document.lock",
        "out.bad_lines.jsonl",
        "out.bad_lines.jsonl.partial",
        "out.preprocess.json",
        "out.preprocess.json.partial",
        "out.preprocess.lock",
    ],
)
def test_an_input_that_is_an_output_is_refused(tmp_path, capsys, name):
    source = numbers(tmp_path / name, ["1"])
    content = source.read_bytes()
    assert run("--input", source, *NULL, prefix=tmp_path / "out") == 2
    assert f"{source}: would be overwritten by the output" in capsys.readouterr().err
    assert content_of(tmp_path) == {name: content}


def test_a_tokenizer_without_an_end_token_cannot_append_it(tmp_path, capsys, monkeypatch):
    tokenizer = load_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=100))
    tokenizer.eod = None
    for where in (preprocess_module, encoder):
        monkeypatch.setattr(where, "load_tokenizer", lambda _: tokenizer)
    source = numbers(tmp_path / "in.jsonl", ["1 99"])
    words = ["--input", source, *NULL, "--tokenizer-model", "some.json"]
    assert run(*words, "--append-eod", prefix=tmp_path / "out") == 2
    message = capsys.readouterr().err
    assert message.startswith(
        "error: --append-eod needs an end-of-document token, and some.json names none\n  fix: "
    )
    assert run(*words, prefix=tmp_path / "out") == 0
    description = json.loads((tmp_path / "out_text_document.json").read_text())
    assert (description["eod"], description["eod_count"], description["largest_id"]) == (None, 0, 99)


def test_bad_lines_can_be_put_aside_without_loss(tmp_path, capsys):
    source = tmp_path / "in.jsonl"
    lines = [*BAD_LINES, b'{"n": "\x80\xff"}\r', "{é".encode()]
    source.write_bytes(b"".join(line + b"\n" for line in lines))
    words = ["--input", source, *NULL, "--on-bad-line", "quarantine"]
    assert run(*words, prefix=tmp_path / "out") == 0
    path = tmp_path / "out.bad_lines.jsonl"
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    contents = [
        entry["text"].encode() if "text" in entry else base64.b64decode(entry["base64"]) for entry in entries
    ]
    assert contents == lines
    assert [(entry["file"], entry["line"]) for entry in entries] == [
        (str(source), number) for number in range(1, len(lines) + 1)
    ]
    assert entries[0]["reason"] == BAD_LINES[lines[0]]
    assert f"{len(lines)} bad lines were left out; see {path}" in capsys.readouterr().err
    source.write_text('{"text": "1"}\n')
    assert run(*words, prefix=tmp_path / "out") == 0
    assert not path.exists(), "those of a former run are gone"


def test_only_a_file_of_bad_lines_that_this_run_wrote_is_named(tmp_path, capsys):
    source = tmp_path / "in.jsonl"
    source.write_text("bad\n")
    words = ["--input", source, *NULL, "--on-bad-line"]
    assert run(*words, "quarantine", prefix=tmp_path / "out") == 0
    assert "1 bad lines were left out; see " in capsys.readouterr().err
    assert run(*words, "skip", prefix=tmp_path / "out") == 0
    assert "1 bad lines were left out\n" in capsys.readouterr().err
    assert not (tmp_path / "out.bad_lines.jsonl").exists(), "it told of data that is gone"


def test_only_the_first_bad_lines_are_shown(tmp_path, capsys):
    source = tmp_path / "in.jsonl"
    source.write_text("bad\n" * 100)
    assert run("--input", source, *NULL, "--on-bad-line", "skip", prefix=tmp_path / "out") == 0
    printed = capsys.readouterr().err
    assert printed.count("left out: ") == 21
    assert "left out: further bad lines are only counted" in printed
    assert "100 bad lines were left out\n" in printed


def test_a_missing_input_names_its_neighbours(tmp_path, capsys):
    numbers(tmp_path / "train.jsonl", [])
    assert run("--input", tmp_path / "trian.jsonl", *NULL, prefix=tmp_path / "out") == 2
    assert (
        "trian.jsonl: there is no such file\n  fix: " + str(tmp_path) + " holds train.jsonl"
        in capsys.readouterr().err
    )


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path, capsys):
    (tmp_path / "no").write_text("a file")
    source = numbers(tmp_path / "in.jsonl", ["1"])
    assert run("--input", source, *NULL, prefix=tmp_path / "no" / "out") == 2
    assert "cannot be written" in capsys.readouterr().err


def test_text_is_kept_as_it_is():
    row = parse_line('{"text": " caf\\u00e9 \\ud83d\\ude00 世\\n"}\r'.encode())
    assert sentences_of(row, ["text"]) == [[" café 😀 世\n"]]


def start_long_run(tmp_path):
    source = numbers(tmp_path / "in.jsonl", ["1 2 3 4 5 6 7 8 9"] * 400_000)
    words = [
        "--input",
        source,
        *NULL,
        "--workers",
        "2",
        "--log-interval",
        "1",
        "--output-prefix",
        tmp_path / "out",
    ]
    process = subprocess.Popen(
        [sys.executable, ROOT / "preprocess_data.py", *map(str, words)],
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    assert "documents" in process.stderr.readline()
    return process


def children(pid):
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux")
@pytest.mark.parametrize(("who", "code"), [("worker", 1), ("parent", 128 + signal.SIGTERM)])
def test_a_killed_run_ends_and_leaves_nothing(tmp_path, who, code):
    process = start_long_run(tmp_path)
    workers = children(process.pid)
    if who == "worker":
        victims = [pid for pid in workers if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(victims[0], signal.SIGKILL)
    else:
        process.terminate()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    if who == "worker":
        assert "was ended by SIGKILL" in errors
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_a_full_disk_leaves_nothing(tmp_path):
    source = numbers(tmp_path / "in.jsonl", ["1 2 3 4 5 6 7 8 9"] * 100_000)
    words = [*map(str, ("--input", source, *NULL)), "--output-prefix", str(tmp_path / "out")]
    code = (
        "import resource, sys; from megatrain.data.preprocess.run import main\n"
        "if __name__ == '__main__':\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "    sys.exit(main(sys.argv[1:]))\n"
    )
    script = tmp_path / "limited.py"
    script.write_text(code)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, script, *words], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 1
    assert (
        f"error: {tmp_path / 'out_text_document.bin.partial'}: cannot be written: File too large"
        in done.stderr
    )
    assert "nothing was kept" in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "limited.py"]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux")
def test_workers_end_when_their_parent_is_killed(tmp_path):
    process = start_long_run(tmp_path)
    workers = children(process.pid)
    assert workers
    process.kill()
    process.communicate(timeout=60)
    deadline = time.monotonic() + 30
    while any(is_alive(pid) for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_alive(pid):
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_preprocessing_starts_without_torch():
    code = "import sys, megatrain.data.preprocess.run; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
