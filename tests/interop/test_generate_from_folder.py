"""`megatrain generate` and `transformers` continue prompts with the same tokens, from its folder and from a checkpoint of ours."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import VOCAB, tiny_model, write

from megatrain.tools.main import main

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
PROMPTS = ["add", "a longer prompt, with (words)", "x = "]
ALWAYS = ("Llama 3",)
NAMES = (
    "Llama 3",
    "Gemma 2",
    "Mistral",
    "GPT-2",
    "Qwen3-MoE",
    "Mixtral",
    "OLMo-2",
    "Phi-3, partial RoPE",
    "Llama, YaRN",
)


def write_tokenizer(folder: Path, *, size: int = VOCAB) -> None:
    """Write a tokenizer of characters; token 2 ends documents."""
    texts = ["<unk>", "<s>", "</s>", *map(chr, range(32, 32 + size - 3))]
    model = {
        "type": "BPE",
        "vocab": {text: number for number, text in enumerate(texts)},
        "merges": [],
        "unk_token": "<unk>",
    }
    content = {"version": "1.0", "added_tokens": [], "model": model, "decoder": {"type": "Fuse"}}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))


def ids_of(prompt: str) -> list[int]:
    return [ord(character) - 29 for character in prompt]


def generated(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert main(["generate", *words, "--json"]) == 0, capsys.readouterr().err
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[] if one in ALWAYS else pytest.mark.nightly) for one in NAMES]
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
            ids = torch.tensor([ids_of(prompt)])
            whole = theirs.generate(
                ids,
                do_sample=False,
                max_new_tokens=15,
                repetition_penalty=penalty,
                eos_token_id=2,
                pad_token_id=0,
            )
            assert one["tokens"] == whole[0, ids.shape[1] :].tolist()
            assert one["num_prompt_tokens"] == ids.shape[1]
            shown = [token for token in one["tokens"] if token != 2]
            assert one["finish_reason"] == ("stop" if one["tokens"][-1] == 2 else "length")
            if min(shown) > 2:
                assert ids_of(one["text"]) == shown
    assert main(["convert", "hf-to-megatrain", str(folder), str(tmp_path / "ours")]) == 0
    again = generated(capsys, "--load", str(tmp_path / "ours"), *flags, "--repetition-penalty", "1.3")
    assert again == found


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
    assert f"{tmp_path}: has no config.json" in capsys.readouterr().err


def test_a_checkpoint_of_megatron_is_read_as_its_conversion(
    golden_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = str(golden_text.parent / "training" / "llama.ckpt")
    assert main(["convert", "megatron-to-megatrain", source, str(tmp_path)]) == 0
    flags = ["--prompt", "1 2 3", "--max-new-tokens", "8", "--temperature", "0", "--log-probs", "1"]
    assert generated(capsys, "--load", source, *flags) == generated(capsys, "--load", str(tmp_path), *flags)
