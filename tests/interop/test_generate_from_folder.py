"""`megatrain generate` and `transformers` continue prompts with the same tokens, from its folder and from a checkpoint of ours."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from everyday import one_in
from tiny_models import MODELS, tiny_model, write
from transformers_reference import END, greedy_tokens, ids_of, write_tokenizer

from megatrain.tools.main import main

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
PROMPTS = ["add", "a longer prompt, with (words)", "x = "]
ALWAYS = ("Llama 3", "DeepSeek-V3")
"""Models of every test run, with and without latent attention. Nightly runs have all."""


def generated(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert main(["generate", *words, "--json"]) == 0, capsys.readouterr().err
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[] if one in ALWAYS else pytest.mark.nightly) for one in MODELS]
)
def test_greedy_texts_are_those_of_transformers(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = tiny_model(name)
    folder = write(theirs, tmp_path / "theirs")
    write_tokenizer(folder)
    flags = ["--temperature", "0", "--max-new-tokens", "15", "--prompt", *PROMPTS]
    for penalty in (1.0, 1.3):
        found = generated(capsys, "--load", f"hf:{folder}", *flags, "--repetition-penalty", str(penalty))
        for prompt, one in zip(PROMPTS, found, strict=True):
            assert one["tokens"] == greedy_tokens(theirs, ids_of(prompt), repetition_penalty=penalty)
            assert one["num_prompt_tokens"] == len(prompt)
            shown = [token for token in one["tokens"] if token != END]
            assert one["finish_reason"] == ("stop" if one["tokens"][-1] == END else "length")
            if all(token > END for token in shown):
                assert ids_of(one["text"]) == shown
    assert main(["convert", "hf-to-megatrain", str(folder), str(tmp_path / "ours")]) == 0
    again = generated(capsys, "--load", str(tmp_path / "ours"), *flags, "--repetition-penalty", "1.3")
    assert again == found


@pytest.mark.parametrize("has_tokenizer", [True, False])
def test_each_listed_token_ends_a_text(
    has_tokenizer: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lists of config.json and of generation_config.json count, from the folder, a checkpoint made of it and its export."""
    folder = write(tiny_model("Llama 3"), tmp_path / "theirs")
    if has_tokenizer:
        write_tokenizer(folder)
    prompt = "add" if has_tokenizer else "68 71 71"
    flags = ["--prompt", prompt, "--temperature", "9", "--max-new-tokens", "15"]
    (whole,) = generated(capsys, "--load", str(folder), *flags, "--termination-id", "0")
    first, second = list(dict.fromkeys(whole["tokens"]))[2:4]
    end = whole["tokens"].index(first) + 1
    for name, listed in {"config.json": [END, second], "generation_config.json": [first, 1 << 20]}.items():
        content = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
        (folder / name).write_text(json.dumps(content | {"eos_token_id": listed}))
    ours, back = str(tmp_path / "ours"), tmp_path / "back"
    assert main(["convert", "hf-to-megatrain", str(folder), ours]) == 0
    assert main(["convert", "megatrain-to-hf", ours, str(back), "--no-compare"]) == 0
    for load in (str(folder), ours, str(back)):
        (found,) = generated(capsys, "--load", load, *flags)
        assert (found["tokens"], found["finish_reason"]) == (whole["tokens"][:end], "stop")
    for name in ("config.json", "generation_config.json"):
        assert json.loads((back / name).read_text())["eos_token_id"] == [END, second, first]


def test_rows_after_the_tokenizer_s_last_token_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tiny_model("Llama 3"), tmp_path / "theirs")
    write_tokenizer(folder, size=80)
    (found,) = generated(
        capsys, "--load", str(folder), "--prompt", "add", "--max-new-tokens", "60", "--temperature", "9"
    )
    assert max(found["tokens"]) < 80
    write_tokenizer(folder, size=98)
    assert main(["generate", "--load", str(folder), "--prompt", "5 3", "--max-new-tokens", "1"]) == 0
    assert "its tokenizer has 98 tokens, the vocabulary 97 rows" in capsys.readouterr().out


def test_a_folder_with_the_prefix_must_be_one_of_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--load", f"hf:{tmp_path}", "--prompt", "5"]) == 2
    assert f"{tmp_path}: has no config.json" in (text := capsys.readouterr().err)
    assert "hf download" not in text
    assert main(["generate", "--load", "hf:meta-llama/Llama-3.2-1B", "--prompt", "5"]) == 2
    assert "hf download meta-llama/Llama-3.2-1B --local-dir Llama-3.2-1B" in capsys.readouterr().err


def test_a_checkpoint_of_megatron_is_read_as_its_conversion(
    golden_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = str(golden_text.parent / "training" / "llama.ckpt")
    assert main(["convert", "megatron-to-megatrain", source, str(tmp_path)]) == 0
    flags = ["--prompt", "1 2 3", "--max-new-tokens", "8", "--temperature", "0", "--log-probs", "1"]
    assert generated(capsys, "--load", source, *flags) == generated(capsys, "--load", str(tmp_path), *flags)


T5_PROMPTS = ["68 71 71 5 9 12", "3", "7 8 9 10 11 12 13 14 15 16 17 18 19 20"]


@pytest.mark.parametrize("name", one_in(2, ["T5 v1.1", "T5, SwiGLU"]))
@pytest.mark.parametrize("sequences", one_in(2, ["2", "64"]))
def test_a_decoder_continues_what_an_encoder_has_read(
    name: str, sequences: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the folder, from a checkpoint of ours, and by transformers from its export."""
    theirs = tiny_model(name)
    theirs.config.decoder_start_token_id = 7
    folder, ours, back = write(theirs, tmp_path / "theirs"), str(tmp_path / "ours"), str(tmp_path / "back")
    flags = ["--temperature", "0", "--max-new-tokens", "15", "--max-sequences", sequences]
    assert main(["convert", "hf-to-megatrain", str(folder), ours]) == 0
    assert main(["convert", "megatrain-to-hf", ours, back]) == 0
    exported = type(theirs).from_pretrained(back, attn_implementation="eager").eval()
    assert exported.generation_config.decoder_start_token_id == 7
    assert exported.config.pad_token_id == 0, "transformers shifts labels with it"
    for penalty in (1.0, 1.3):
        words = [*flags, "--repetition-penalty", str(penalty), "--prompt", *T5_PROMPTS]
        found = generated(capsys, "--load", str(folder), *words)
        assert generated(capsys, "--load", ours, *words) == found
        for prompt, one in zip(T5_PROMPTS, found, strict=True):
            ids = torch.tensor([[int(word) for word in prompt.split()]])
            ids_mask = torch.ones_like(ids)
            whole = exported.generate(
                ids, attention_mask=ids_mask, do_sample=False, max_new_tokens=15, repetition_penalty=penalty
            )
            assert [7, *one["tokens"]] == whole[0].tolist()
            assert one["num_prompt_tokens"] == ids.shape[1]
    starts = [tuple(one["tokens"][:3]) for one in found]
    assert len(set(starts)) == len(starts), "the texts depend on the prompts"
    (other,) = generated(capsys, "--load", ours, *words[:-3], T5_PROMPTS[0], "--decoder-start-id", "9")
    assert other["tokens"] != found[0]["tokens"]


def test_what_generates_no_text_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tiny_model("Megatron BERT"), tmp_path / "theirs")
    assert main(["generate", "--load", str(folder), "--prompt", "68 71"]) == 2
    assert "an encoder alone (--model-family bert) generates no text" in capsys.readouterr().err
