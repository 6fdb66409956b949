"""`megatrain data sample` and `megatrain data index`: equal to a run with the same flags."""

from __future__ import annotations

import itertools
import json
import os
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from everyday import one_in

import pretrain
from megatrain.config import parse, resolve
from megatrain.data.indexed.reader import IndexedDataset
from megatrain.data.indexed.writer import IndexedWriter
from megatrain.data.samples.dataset import SampleDataset
from megatrain.data.samples.loader import BatchLoader
from megatrain.data.samples.sampler import DataShard, SingleSampler
from megatrain.tools.data import cli
from megatrain.tools.main import main
from megatrain.training.batches import build_samples
from megatrain.training.launch.facts import gather_data_facts

MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --normalization RMSNorm --swiglu"
    " --position-embedding-type rope --disable-bias-linear --hidden-dropout 0 --attention-dropout 0"
    " --micro-batch-size 2 --lr 1e-3 --seed 11"
)
VOCABULARY = "--tokenizer-type NullTokenizer --vocab-size 50"
RUN = f"{MODEL} {VOCABULARY} --global-batch-size 4 --train-iters 5 --eval-iters 1 --eval-interval 5 --seq-length 16"
EOD = 49


@pytest.fixture
def datasets(tmp_path: Path) -> tuple[str, str]:
    """Two small datasets whose sequences all differ."""
    random = np.random.default_rng(3)
    for name in ("first", "second"):
        with IndexedWriter(tmp_path / name, "uint16") as writer:
            for _ in range(300):
                parts = [random.integers(0, EOD, random.integers(1, 12)) for _ in range(random.integers(3))]
                writer.add_document([*parts, np.array([EOD])])
    return str(tmp_path / "first"), str(tmp_path / "second")


def sample(capsys: pytest.CaptureFixture[str], flags: str, of: str, index: int, *more: str) -> dict[str, Any]:
    code = main(["data", "sample", "--of", of, *flags.split(), "--index", str(index), *more, "--json"])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    found: dict[str, Any] = json.loads(captured.out)
    return found


def error(capsys: pytest.CaptureFixture[str], arguments: str) -> str:
    assert main(["data", *arguments.split()]) == 2
    message = capsys.readouterr().err
    assert "fix:" in message
    assert "Traceback" not in message
    return message


def built(flags: str, *, world_size: int = 1) -> Any:
    request = parse(flags.split())
    facts = gather_data_facts(request, world_size=world_size, log=print)
    return build_samples(resolve(request, facts), facts)


MASKS = (
    "",
    "--reset-attention-mask --reset-position-ids --eod-mask-loss",
    "--dataloader-inter-document-masking",
)
BLENDS = ("{0}", "0.7 {0} 0.3 {1}", "{0} {1}")


@pytest.mark.parametrize(("blend", "masks"), one_in(4, itertools.product(BLENDS, MASKS)))
def test_a_sample_is_what_training_reads(
    blend: str, masks: str, datasets: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Compare sample k on each of two data-parallel ranks, also in a resumed run."""
    flags = f"{RUN} --split 8,1,1 --data-path {blend.format(*datasets)} {masks}"
    samples = built(flags, world_size=2).train
    for rank, consumed in itertools.product(range(2), (0, 12)):
        sampler = SingleSampler(DataShard(micro_batch_size=2, dp_rank=rank, dp_size=2), len(samples))
        with closing(BatchLoader(samples, sampler, seq_length=16, has_documents=bool(masks))) as loader:
            (batch,) = loader.microbatches(consumed, 1)
        for row in range(2):
            shown = sample(capsys, flags, "train", consumed + 2 * rank + row)
            for name in ("tokens", "labels", "loss_mask", "position_ids"):
                assert shown[name] == getattr(batch, name)[row].tolist()
            if batch.documents is not None:
                boundaries = batch.documents.cu_seqlens.tolist()
                starts = [start - 16 * row for start in boundaries if 16 * row <= start < 16 * (row + 1)]
                assert shown["document_starts"] == starts


@pytest.mark.parametrize("of", ["train", "valid", "test"])
def test_the_spans_of_a_sample_give_its_tokens(of: str, datasets: tuple[str, str]) -> None:
    flags = f"{RUN} --split 6,2,2 --data-path 0.7 {datasets[0]} 0.3 {datasets[1]}"
    samples: SampleDataset = getattr(built(flags), of)
    opened = {f"{prefix}.bin": IndexedDataset(prefix) for prefix in datasets}
    for k in range(len(samples)):
        spans = samples.spans(k)
        read = [opened[span.source].read(span.sequence, span.offset, span.length) for span in spans]
        assert np.concatenate(read).tolist() == [*samples[k].tokens, samples[k].labels[-1]]
        for span in spans:
            boundaries = opened[span.source].document_boundaries
            assert boundaries[span.document] <= span.sequence < boundaries[span.document + 1]


def test_a_sample_is_printed_as_text(datasets: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    flags = f"{RUN} --split 8,1,1 --data-path {datasets[0]} --reset-attention-mask --eod-mask-loss"
    shown = sample(capsys, flags, "train", 3)
    assert main(["data", "sample", *flags.split(), "--of", "train", "--index", "3"]) == 0
    printed = capsys.readouterr().out
    assert re.match(r"train sample 3 of \d+; the run reads 20\n", printed)
    masked = [position for position, token in enumerate(shown["tokens"]) if token == EOD]
    assert f"tokens         16; loss on {16 - len(masked)}" in printed
    ids = [line.split() for line in printed.splitlines() if line.startswith("    ")]
    assert [int(word) for line in ids for word in line] == shown["tokens"]
    assert f"{datasets[0]}, document " in printed


def test_text_is_decoded(golden_text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {golden_text}/tokenizer.json"
    flags = (
        f"{RUN.replace(VOCABULARY, tokenizer)} --data-path {golden_text}/corpus_text_document --split 9,1,0"
    )
    assert main(["data", "sample", *flags.split(), "--of", "train", "--index", "0"]) == 0
    printed = capsys.readouterr().out
    document = int(re.search(r"document (\d+)", printed)[1])  # type: ignore[index]
    text = json.loads((golden_text / "corpus.jsonl").read_text().splitlines()[document])["text"]
    first = next(line.strip() for line in printed.splitlines() if line.startswith("    ") and line.strip())
    assert first in text


def test_flags_for_gpus_work_without_gpus(
    datasets: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    plain = f"{RUN} --split 8,1,1 --data-path {datasets[0]}"
    large = f"{plain} --bf16 --device cuda --tensor-model-parallel-size 4 --sequence-parallel"
    assert sample(capsys, large, "train", 2) == sample(capsys, plain, "train", 2)
    assert sample(capsys, f"{large} --world-size 8", "train", 2) == sample(capsys, plain, "train", 2)
    assert sample(capsys, f"{plain} --device cpu --deterministic-mode", "train", 2)
    assert "12 ranks" not in error(capsys, f"sample {large} --of train --index 2 --world-size 6")


def test_the_order_depends_on_the_ranks_if_the_batch_does(
    datasets: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = f"{RUN} --split 8,1,1 --data-path {datasets[0]}".replace("--global-batch-size 4 ", "")
    assert main(["data", "sample", *flags.split(), "--of", "train", "--index", "1"]) == 0
    captured = capsys.readouterr()
    assert "--world-size" in captured.err
    assert "; the run reads 10\n" in captured.out
    assert (
        main(["data", "sample", *flags.split(), "--of", "train", "--index", "1", "--world-size", "16"]) == 0
    )
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "; the run reads 160\n" in captured.out


def test_validation_sets_have_names(datasets: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    flags = (
        f"{RUN} --train-data-path {datasets[0]} --valid-data-path {datasets[0]} {datasets[1]}"
        " --full-validation --multiple-validation-sets"
    )
    assert "fix: give --set with one of first, second" in error(
        capsys, f"sample {flags} --of valid --index 0"
    )
    assert "--set third " in error(capsys, f"sample {flags} --of valid --index 0 --set third")
    assert "leave --set out" in error(capsys, f"sample {flags} --of train --index 0 --set first")
    found = sample(capsys, flags, "valid", 1, "--set", "second")
    assert found["tokens"] == built(flags).named_valid["second"][1].tokens.tolist()


def test_mock_data_has_samples(capsys: pytest.CaptureFixture[str]) -> None:
    flags = f"{RUN} --mock-data"
    assert sample(capsys, flags, "test", 1)["tokens"] == built(flags).test[1].tokens.tolist()
    assert main(["data", "sample", *flags.split(), "--of", "test", "--index", "1"]) == 0
    assert "mock data, document " in capsys.readouterr().out


def test_a_checkpoint_contributes_its_plans(
    datasets: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = f"{RUN} --split 8,1,1 --data-path {datasets[0]} --device cpu --num-workers 0"
    before = [sample(capsys, flags, "train", k) for k in (0, 19)]
    assert pretrain.main([*flags.split(), "--save", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    longer = f"{flags} --train-iters 50 --load {tmp_path}/run"
    assert [sample(capsys, longer, "train", k) for k in (0, 19)] == before
    assert sample(capsys, f"{flags} --train-iters 50", "train", 0) != before[0]
    assert main(["data", "sample", *longer.split(), "--of", "train", "--index", "20"]) == 0
    assert "plans: the checkpoint's 20, and 180 more with another seed" in capsys.readouterr().out
    # Checkpoints under --save that this run does not resume are ignored here.
    assert sample(capsys, f"{flags} --save {tmp_path}/run", "train", 0) == before[0]


def test_without_a_checkpoint_the_run_starts_from_scratch(
    datasets: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = f"{RUN} --split 8,1,1 --data-path {datasets[0]}"
    arguments = f"{flags} --load {tmp_path}/nowhere --exit-on-missing-checkpoint"
    assert main(["data", "sample", *arguments.split(), "--of", "train", "--index", "0", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == sample(capsys, flags, "train", 0)
    assert "nowhere" in captured.err
    assert "from scratch" in captured.err


def test_missing_samples_and_files_are_reported(
    datasets: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = f"{RUN} --split 8,2,0 --data-path {datasets[0]}"
    count = len(built(flags).valid)
    assert f"fix: give a number from 0 to {count - 1}" in error(
        capsys, f"sample {flags} --of valid --index {count}"
    )
    assert "--index -1: " in error(capsys, f"sample {flags} --of train --index -1")
    assert "--of test: " in error(capsys, f"sample {flags} --of test --index 0")
    assert "--world-size 0 " in error(capsys, f"index {flags} --world-size 0")
    assert "--bf16" in error(capsys, f"index {flags} --bf15")
    assert "nowhere.bin: there is no such file" in error(
        capsys, f"index {flags} --data-path {datasets[0]} {Path(datasets[0]).parent}/nowhere"
    )


@pytest.fixture
def large(tmp_path: Path) -> str:
    """A dataset whose index is large enough to be cached."""
    return write_large(tmp_path / "large", 1 << 17)


def write_large(prefix: Path, count: int) -> str:
    with IndexedWriter(prefix, "uint16") as writer:
        elements = np.arange(3 * count) % EOD
        writer.add_documents(elements, np.full(count, 3, np.int32), np.ones(count, np.int64))
    return str(prefix)


def rows(printed: str) -> list[list[str]]:
    table, _, _ = printed.partition("\n\n")
    return [line.split() for line in table.splitlines()[1:]]


def test_indices_are_built_once(large: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = tmp_path / "index_cache"
    flags = f"{RUN} --split 9,1,0 --data-path {large} --bf16 --device cuda --tensor-model-parallel-size 2"
    assert main(["data", "index", *flags.split()]) == 0
    first = capsys.readouterr().out
    train, valid = rows(first)
    tokens = 3 * round(0.9 * (1 << 17))
    assert train[:6] == ["train", "11", f"{tokens // 3:,}", f"{tokens:,}", "1", f"{(tokens - 1) // 16:,}"]
    assert (train[7:], valid[7:]) == (["built", large], ["small", large])
    assert "1 built, 1 too small to cache" in first
    (file,) = cache.glob("*.index")
    assert f"{cache}: 1 files, {file.stat().st_size / 1e6:,.1f} MB" in first
    assert main(["data", "index", *flags.split()]) == 0
    assert rows(capsys.readouterr().out)[0][7:] == ["found", large]
    written = file.stat().st_mtime_ns
    built(flags.replace("--device cuda", ""), world_size=2)  # as training builds them
    assert [(path, path.stat().st_mtime_ns) for path in cache.glob("*.index")] == [(file, written)]


def test_processes_share_what_is_missing(
    large: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "_SEQUENCES_OF_A_PROCESS", 1 << 16)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(3))
    other = write_large(tmp_path / "other", 1 << 18)
    flags = f"{RUN} --split 1,0,0 --data-path 0.5 {large} 0.5 {other}".split()
    assert main(["data", "index", *flags]) == 0
    listed = capfd.readouterr().out
    assert sorted(row[-1] for row in rows(listed)) == sorted(["2", large, other])
    assert listed.count("sequences") == 1, "the children print no heading"
    assert "2 built, 1 too small to cache" in listed
    assert main(["data", "index", *flags]) == 0
    assert "2 found, 1 too small to cache" in " ".join(capfd.readouterr().out.split())


def test_a_blend_has_its_own_row(large: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = f"{RUN} --split 9,1,0 --data-path 0.5 {large} 0.5 {large}"
    assert main(["data", "index", *flags.split()]) == 0
    listed = rows(capsys.readouterr().out)
    assert [row[0] for row in listed] == ["train"] * 3 + ["valid"] * 3
    assert listed[0][-2:] == ["built", large]
    assert listed[1][-2:] == ["found", large]
    assert listed[2] == ["train", "11", "20", listed[2][3], "small", "blend", "of", "2"]


def test_indices_need_a_folder(large: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = f"{RUN} --split 9,1,0"
    assert "--data-cache-path is not set" in error(capsys, f"index {flags} --mock-data")
    file = tmp_path / "file"
    file.touch()
    message = error(capsys, f"index {flags} --data-path {large} --data-cache-path {file}")
    assert f"{file}: indices cannot be written: File exists" in message
