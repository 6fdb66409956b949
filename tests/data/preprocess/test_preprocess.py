"""Preprocessing: recorded bytes, equal for any number of workers, and no files left after a bad line."""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

import pytest
from preprocessing import NULL, InlineWorkers, content_of, numbers, run
from recorded import EXPECTED, check_recorded

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
    """The chunks are the same with worker processes and in this process."""
    file, tokenizer, flags, recorded = run_case
    arguments = ["--input", golden_text / f"{file}.jsonl", "--workers", workers or 1, *flags]
    arguments += ["--tokenizer-model", golden_text / tokenizer]
    if tokenizer == SP:
        pytest.importorskip("sentencepiece")
        arguments += ["--tokenizer-type", "SentencePieceTokenizer"]
    settings = parse_settings([*map(str, arguments), "--output-prefix", str(tmp_path / "out")])
    preprocess(settings, chunk_bytes=50_000, workers_type=Workers if workers else InlineWorkers)
    for key, hashes in recorded.items():
        check_recorded(tmp_path / f"out_{key}_document", hashes)


@pytest.fixture
def texts(tmp_path):
    """Many different documents, in several chunks."""
    path = tmp_path / "texts.jsonl"
    with path.open("w") as file:
        for number in range(30_000):
            text = " ".join(str((number * step) % 98) for step in range(number % 9))
            value = [text, "", "7 8"] if number % 50 == 0 else text
            file.write(json.dumps({"text": value, "id": str(number % 98)}) + "\n")
    return path


def test_the_output_does_not_depend_on_the_number_of_workers(texts, tmp_path):
    outputs = []
    for workers in (1, 3):
        flags = [*NULL, "--append-eod", "--json-keys", "text", "id", "--workers", workers]
        assert run("--input", texts, *flags, prefix=tmp_path / f"w{workers}", workers_type=Workers) == 0
        files = sorted(tmp_path.glob(f"w{workers}_*"))
        assert len(files) == 6
        outputs.append([file.read_bytes() for file in files])
    assert outputs[0] == outputs[1]
    dataset = IndexedDataset(tmp_path / "w1_text_document")
    assert dataset.num_documents == 30_000
    assert len(dataset) == 30_000 - len([n for n in range(30_000) if n % 9 == 0 and n % 50]) + len(
        [n for n in range(30_000) if n % 50 == 0 and n % 9]
    )


def test_documents_become_sequences_and_empty_ones_are_kept(tmp_path):
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
        **{
            f"{kind}_crc32": zlib.crc32((tmp_path / f"out_text_document.{kind}").read_bytes())
            for kind in ("bin", "idx")
        },
    }


BAD_LINES = {
    b'{"text": "1 2"': "not JSON: ",
    b'{"text": "\xff"}': "not UTF-8: byte 0xff at position 10",
    b'{"body": "1", "id": 3}': "key 'text' is missing; the keys are 'body', 'id'",
    b"{}": "key 'text' is missing; the keys are nothing",
    b'{"text": null}': "key 'text' is null",
    b'{"text": 5}': "key 'text' is a number",
    b'{"text": {"a": 1}}': "key 'text' is an object",
    b'{"text": ["1", 2]}': "key 'text' is a list with a number",
    b'["text"]': "is a list, not an object",
    b"": "blank line",
    b'{"text": "\\ud800"}': "key 'text' contains half of a surrogate pair",
    b'{"text": ' + b"[" * 100_000: "not usable JSON: nested too deeply",
    b'{"text": "1", "n": ' + b"9" * 5000 + b"}": "not usable JSON",
    b'{"text": "1 x"}': "rejected by the tokenizer: NullTokenizer reads numbers",
    b'{"text": "1 100"}': "rejected by the tokenizer: id 100 is outside the vocabulary of 100",
}


@pytest.mark.parametrize("bad", BAD_LINES, ids=BAD_LINES.get)
def test_a_bad_line_stops_the_run_and_leaves_no_files(tmp_path, capsys, bad):
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'{"text": "1"}\n' * 3 + bad + b"\n" + b'{"text": "2"}\n' * 3)
    assert run("--input", source, *NULL, prefix=tmp_path / "out") == 2
    message = capsys.readouterr().err
    assert message.startswith(f"error: {source}:4: {BAD_LINES[bad]}")
    assert "--on-bad-line skip" in message
    assert "Traceback" not in message
    assert list(tmp_path.iterdir()) == [source]


def test_a_run_that_stops_shows_ten_bad_lines_of_all_chunks_and_counts_them(tmp_path, capsys, monkeypatch):
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'{"text": "1"}\nbad\n' * 24)
    arguments = {"prefix": tmp_path / "out", "chunk_bytes": 30}
    assert run("--input", source, *NULL, **arguments) == 2
    message = capsys.readouterr().err
    shown = [f"{source}:{number}: not JSON: Expecting value at column 1\n" for number in range(2, 21, 2)]
    assert message.startswith(
        f"error: {'  '.join(shown)}  and 14 more: 24 bad lines in all of the input\n  fix: "
    )
    assert "fix: correct the lines, or skip such lines with --on-bad-line skip" in message
    monkeypatch.setattr("megatrain.data.preprocess.bad_lines._LOOK_ON_BYTES", 100)
    assert run("--input", source, *NULL, **arguments) == 2
    (count,) = re.findall(r"(\d+) bad lines so far; reading ended", capsys.readouterr().err)
    assert int(count) < 24
    assert list(tmp_path.iterdir()) == [source]


def test_documents_before_a_bad_line_are_kept_for_a_run_that_skips_it(tmp_path, capsys):
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'{"text": "1"}\n' * 9 + b'bad\n{"text": "2"}\n')
    assert run("--input", source, *NULL, prefix=tmp_path / "out", chunk_bytes=30, journal_seconds=0) == 2
    assert "8 documents are done and kept" in capsys.readouterr().err
    assert run("--input", source, *NULL, "--on-bad-line", "skip", prefix=tmp_path / "out") == 0
    assert "resuming" in (printed := capsys.readouterr().err)
    assert "1 bad line was skipped\n" in printed
    assert IndexedDataset(tmp_path / "out_text_document").num_documents == 10


def test_bad_lines_can_be_skipped(tmp_path, capsys):
    source = tmp_path / "in.jsonl"
    good = b'{"text": "1"}\n'
    source.write_bytes(b"".join(good + bad + b"\n" for bad in BAD_LINES))
    assert run("--input", source, *NULL, "--on-bad-line", "skip", prefix=tmp_path / "out") == 0
    dataset = IndexedDataset(tmp_path / "out_text_document")
    assert dataset.num_documents == dataset.num_tokens == len(BAD_LINES)
    assert json.loads((tmp_path / "out_text_document.json").read_text())["skipped_lines"] == len(BAD_LINES)
    logged = [line for line in capsys.readouterr().err.splitlines() if line.startswith("skipped: ")]
    assert len(logged) == len(BAD_LINES)
    numbers_of_lines = [int(line.split(":")[2]) for line in logged]
    assert numbers_of_lines == list(range(2, 2 * len(BAD_LINES) + 1, 2))


def test_a_truncated_last_line_is_a_bad_line(tmp_path, capsys):
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "1"}\n{"text": "2')
    assert run("--input", source, *NULL, prefix=tmp_path / "out") == 2
    assert f"{source}:2: not JSON: Unterminated string" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lines", "found"),
    [([], "0 documents"), (['{"text": ""}'], "1 documents"), (['{"body": "1"}'] * 2, "bad lines skipped: 2")],
)
def test_a_dataset_without_tokens_is_an_error(tmp_path, capsys, lines, found):
    source = tmp_path / "in.jsonl"
    source.write_text("".join(line + "\n" for line in lines))
    assert run("--input", source, *NULL, "--on-bad-line", "skip", prefix=tmp_path / "out") == 2
    message = capsys.readouterr().err
    assert "out_text_document would be empty" in message
    assert found in message
    assert re.search("fix: .*--input .*--json-keys", message)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_one_empty_file_among_several_is_valid(tmp_path):
    empty, full = numbers(tmp_path / "a.jsonl", []), numbers(tmp_path / "b.jsonl", ["1"])
    assert run("--input", empty, full, *NULL, prefix=tmp_path / "out") == 0
    assert IndexedDataset(tmp_path / "out_text_document").num_documents == 1


def test_a_wrong_key_is_answered_with_the_keys_of_the_line(tmp_path, capsys):
    source = tmp_path / "in.jsonl"
    source.write_text('{"body": "1", "id": 7, "parts": ["1"]}\n')
    assert run("--input", source, *NULL, prefix=tmp_path / "out") == 2
    assert "fix: name the key of the text with --json-keys (body or parts)" in capsys.readouterr().err
    assert run("--input", source, *NULL, "--json-keys", "body", prefix=tmp_path / "out") == 0


@pytest.mark.parametrize("keys", [(), ("--json-keys", "messages")])
def test_conversations_without_sft_are_answered_with_the_flag(tmp_path, capsys, keys):
    source = tmp_path / "in.jsonl"
    source.write_text('{"id": 1, "messages": [{"role": "assistant", "content": "1"}]}\n')
    assert run("--input", source, *NULL, *keys, prefix=tmp_path / "out") == 2
    assert "fix: add --sft, which reads conversations, or correct the line" in capsys.readouterr().err
    flags = ["--sft", "--sft-tokenizer-prompt-format", "identity"]
    assert run("--input", source, *NULL, *flags, prefix=tmp_path / "out") == 0


def test_progress_lines_have_speed_and_time_left(texts, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(progress, "_LINE_SECONDS", 0.0)
    assert (
        run("--input", texts, *NULL, "--log-interval", 10_000, prefix=tmp_path / "out", chunk_bytes=50_000)
        == 0
    )
    output = capsys.readouterr().err.splitlines()
    assert len(output) == 3 + 2
    for part in ("% | ", " documents | ", "documents/s | ", "MB/s | 0:00:0", " left"):
        assert part in output[0]
    assert output[-2].startswith("done: 30,000 documents from ")
    assert output[-1].startswith(f"  {tmp_path / 'out_text_document'}: 30,000 documents, ")


def test_progress_is_logged_neither_too_rarely_nor_too_often(capsys, monkeypatch):
    monkeypatch.setattr(progress, "_LINE_SECONDS", 0.05)
    monkeypatch.setattr(progress, "_SILENT_SECONDS", 0.2)
    counter = progress.Progress(total_bytes=100, log_interval=1, documents=5, bytes_read=50)
    with counter.running():
        time.sleep(0.5)
        silent = capsys.readouterr().err.splitlines()
        for number in range(100):
            counter.add(1, bytes_read=50 + number // 2)
    assert 1 <= len(silent) <= 3
    assert silent[0].endswith("50.0% | 5 documents | 0 documents/s | 0.00 MB/s | ? left")
    assert len(capsys.readouterr().err.splitlines()) <= 2


def test_all_problems_of_a_command_line_are_reported_at_once(capsys):
    assert main(["--inptu", "x", "--workers", "0", "--json-keys", "a", "a"]) == 2
    message = capsys.readouterr().err
    for part in (
        "error: 5 problems",
        "--inptu",
        "--input?",
        "--input is missing",
        "--output-prefix is missing",
        "--workers 0",
        "--json-keys names 'a' twice",
    ):
        assert part in message


def test_the_command_restores_the_handlers_of_signals():
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    assert main(["--workers", "0"]) == 2
    assert [signal.getsignal(number) for number in numbers] == before


def test_invalid_values_are_reported_with_their_flags(capsys):
    arguments = ["--worker", "4", "--workers", "two", "--on-bad-line", "skp", "--log-interval", "2", "3"]
    assert main([*arguments, "--append-eod", "stray", "--max-line-mb", "--input=x"]) == 2
    message = capsys.readouterr().err
    for pattern in (
        r"error: 7 problems",
        r"--worker .*\n +fix: .*--workers",
        r"stray .*\n +fix: .*--help",
        r"--on-bad-line skp .*\n +fix: .*skip.* stop .* quarantine",
        r"--max-line-mb .*\n +fix: .*--max-line-mb .*whole number",
        r"--workers two .*\n +fix: .*--workers .*whole number",
        r"--log-interval 2 3 .*\n +fix: .*--log-interval .*whole number",
        r"--output-prefix .*\n +fix: .*--output-prefix PREFIX",
    ):
        assert re.search(pattern, message), pattern


def test_a_language_without_sentence_splitting_is_an_error(capsys):
    assert main(["--input", "x", "--output-prefix", "p", "--lang", "english"]) == 2
    message = capsys.readouterr().err
    assert re.match(r"error: --lang .*\n  fix: add --split-sentences", message)


@pytest.mark.parametrize(
    ("prefix", "shown", "better"), [("", "''", "corpus"), ("data/", "data/", "data/corpus")]
)
def test_an_output_prefix_without_a_file_name_is_an_error(capsys, prefix, shown, better):
    assert main(["--input", "x", "--output-prefix", prefix]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"error: --output-prefix {shown} ")
    assert message.endswith(f"such as {better}\n")


def test_every_field_of_the_tokenizer_is_a_flag(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for field in dataclasses.fields(TokenizerConfig):
        assert "--" + field.name.replace("_", "-") in text
    assert "--tokenizer-type {" in text
    arguments = "--input a b --output-prefix p --tokenizer-model m --vocab-size 7"
    settings = parse_settings(arguments.split())
    assert settings.input == ("a", "b")
    assert settings.tokenizer == TokenizerConfig(
        tokenizer_type="HuggingFaceTokenizer", tokenizer_model="m", vocab_size=7
    )
    with pytest.raises(
        ConfigError, match=r"--tokenizer-type Hugging is not a choice\n  fix: .*HuggingFaceTokenizer"
    ):
        parse_settings([*arguments.split(), "--tokenizer-type", "Hugging"])
    with pytest.raises(ConfigError, match="--vocab-size many is not a whole number"):
        parse_settings([*arguments.split(), "--vocab-size", "many"])


def test_flags_without_effect_are_accepted_and_reported(tmp_path, capsys):
    source = numbers(tmp_path / "in.jsonl", ["1"])
    flags = ["--partitions", 4, "--keep-sequential-samples", "--dataset-impl", "mmap"]
    assert run("--input", source, *NULL, *flags, prefix=tmp_path / "out") == 0
    printed = capsys.readouterr().err
    assert "--partitions has no effect" in printed
    assert "--keep-sequential-samples has no effect" in printed
    assert "--dataset-impl has no effect" in printed
    assert run("--input", source, *NULL, "--dataset-impl", "lazy", prefix=tmp_path / "out") == 2
    assert "fix: give --dataset-impl mmap" in capsys.readouterr().err


def test_invalid_keys_and_newlines_without_splitting_are_errors(capsys):
    arguments = ["--input", "x", "--output-prefix", "p", "--json-keys", "a/b", "--keep-newlines"]
    assert main(arguments) == 2
    message = capsys.readouterr().err
    assert "--json-keys 'a/b'" in message
    assert re.search("--keep-newlines .*--split-sentences", message)


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
def test_an_input_that_is_an_output_is_an_error(tmp_path, capsys, name):
    source = numbers(tmp_path / name, ["1"])
    content = source.read_bytes()
    assert run("--input", source, *NULL, prefix=tmp_path / "out") == 2
    assert f"{source}: would be overwritten by the output" in capsys.readouterr().err
    assert content_of(tmp_path) == {name: content}


def test_append_eod_needs_an_end_of_document_token(tmp_path, capsys, monkeypatch):
    tokenizer = load_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=100))
    tokenizer.eod = None
    for where in (preprocess_module, encoder):
        monkeypatch.setattr(where, "load_tokenizer", lambda _: tokenizer)
    source = numbers(tmp_path / "in.jsonl", ["1 99"])
    arguments = ["--input", source, *NULL, "--tokenizer-model", "some.json"]
    assert run(*arguments, "--append-eod", prefix=tmp_path / "out") == 2
    message = capsys.readouterr().err
    assert re.match(r"error: --append-eod .*some\.json.*\n  fix: ", message)
    assert run(*arguments, prefix=tmp_path / "out") == 0
    description = json.loads((tmp_path / "out_text_document.json").read_text())
    assert (description["eod"], description["eod_count"], description["largest_id"]) == (None, 0, 99)


def test_bad_lines_can_be_quarantined_without_loss(tmp_path, capsys):
    source = tmp_path / "in.jsonl"
    lines = [*BAD_LINES, b'{"n": "\x80\xff"}\r', "{é".encode()]
    good = b'{"text": "1"}'
    source.write_bytes(b"".join(line + b"\n" for line in (*lines, good)))
    arguments = ["--input", source, *NULL, "--on-bad-line", "quarantine"]
    assert run(*arguments, prefix=tmp_path / "out") == 0
    path = tmp_path / "out.bad_lines.jsonl"
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    contents = [
        entry["text"].encode() if "text" in entry else base64.b64decode(entry["base64"]) for entry in entries
    ]
    assert contents == lines
    assert [(entry["file"], entry["line"]) for entry in entries] == [
        (str(source), number) for number in range(1, len(lines) + 1)
    ]
    assert entries[0]["reason"].startswith(BAD_LINES[lines[0]])
    assert f"{len(lines)} bad lines were quarantined to {path}" in capsys.readouterr().err
    source.write_text('{"text": "1"}\n')
    assert run(*arguments, prefix=tmp_path / "out") == 0
    assert not path.exists(), "the file of an earlier run is removed"


def test_a_quarantine_file_of_an_earlier_run_is_removed(tmp_path, capsys):
    source = tmp_path / "in.jsonl"
    source.write_text('bad\n{"text": "1"}\n')
    arguments = ["--input", source, *NULL, "--on-bad-line"]
    assert run(*arguments, "quarantine", prefix=tmp_path / "out") == 0
    assert "1 bad line was quarantined to " in capsys.readouterr().err
    assert run(*arguments, "skip", prefix=tmp_path / "out") == 0
    assert "1 bad line was skipped\n" in capsys.readouterr().err
    assert not (tmp_path / "out.bad_lines.jsonl").exists(), "it described other data"


def test_only_the_first_bad_lines_are_logged(tmp_path, capsys):
    source = tmp_path / "in.jsonl"
    source.write_text("bad\n" * 100 + '{"text": "1"}\n')
    assert run("--input", source, *NULL, "--on-bad-line", "skip", prefix=tmp_path / "out") == 0
    printed = capsys.readouterr().err
    assert printed.count("skipped: ") == 21
    assert "100 bad lines were skipped\n" in printed


def test_a_missing_input_names_similar_files(tmp_path, capsys):
    numbers(tmp_path / "train.jsonl", [])
    assert run("--input", tmp_path / "trian.jsonl", *NULL, prefix=tmp_path / "out") == 2
    assert re.search(r"trian\.jsonl: .*\n  fix: .*train\.jsonl", capsys.readouterr().err)


def test_a_folder_that_cannot_be_created_is_an_error(tmp_path, capsys):
    (tmp_path / "no").write_text("a file")
    source = numbers(tmp_path / "in.jsonl", ["1"])
    assert run("--input", source, *NULL, prefix=tmp_path / "no" / "out") == 2
    assert "cannot be written" in capsys.readouterr().err


def test_text_is_kept_unchanged():
    row = parse_line('{"text": " caf\\u00e9 \\ud83d\\ude00 世\\n"}\r'.encode())
    assert sentences_of(row, ["text"]) == [[" café 😀 世\n"]]


def start_long_run(tmp_path):
    source = numbers(tmp_path / "in.jsonl", ["1 2 3 4 5 6 7 8 9"] * 400_000)
    arguments = [
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
        [sys.executable, ROOT / "preprocess_data.py", *map(str, arguments)],
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
def test_a_killed_run_ends_and_leaves_no_files(tmp_path, who, code):
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
        assert "SIGKILL" in errors
    if "nothing was kept" in errors:
        assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
    else:  # on a busy host, the run took long enough to write its journal
        assert "are done and kept" in errors


def test_a_full_disk_leaves_no_files(tmp_path):
    source = numbers(tmp_path / "in.jsonl", ["1 2 3 4 5 6 7 8 9"] * 100_000)
    arguments = [*map(str, ("--input", source, *NULL)), "--output-prefix", str(tmp_path / "out")]
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
        [sys.executable, script, *arguments], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 1
    assert re.search(r"(?m)^error: .*out_text_document\.bin\.partial: .*File too large\n  fix: ", done.stderr)
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
