"""Conversations with a model of --sft: the template of its data in the checkpoint, the export, `generate --chat` and `serve`."""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
from test_serve import Server, events
from tiny_tokenizers import gpt2_files

import pretrain
from megatrain.data.preprocess.run import main as preprocess
from megatrain.tools.main import main

transformers = pytest.importorskip("transformers")
pytest.importorskip("jinja2")
pytest.importorskip("uvicorn")
FLAGS = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 4 --seq-length 300 --sft --split 1,0,0 --micro-batch-size 1"
    " --train-iters 1 --lr 1e-3 --device cpu --position-embedding-type rope --eval-iters 0 --hidden-dropout 0"
    " --attention-dropout 0 --init-method-std 0.5 --swiglu --normalization RMSNorm --disable-bias-linear"
    " --untie-embeddings-and-output-weights --ffn-hidden-size 32"
)
QUESTION = {"role": "user", "content": " two  blanks\n"}
LATER = [QUESTION, {"role": "assistant", "content": "the fox"}, {"role": "user", "content": "why?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a checkpoint `run`, and its export `hf`."""
    made = tmp_path_factory.mktemp("chat")
    vocab, merges = gpt2_files(made)
    tokenizer = ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", vocab, "--merge-file", merges]
    talk = {"messages": [QUESTION, {"role": "assistant", "content": "4"}]}
    (made / "in.jsonl").write_text(json.dumps(talk) + "\n")
    words = ["--input", str(made / "in.jsonl"), "--output-prefix", str(made / "data"), "--sft", *tokenizer]
    assert preprocess(words) == 0
    data = ["--data-path", str(made / "data_messages_document"), "--save", str(made / "run")]
    assert pretrain.main([*FLAGS.split(), *tokenizer, *data]) == 0
    words = ["convert", "megatrain-to-hf", str(made / "run"), str(made / "hf"), "--no-compare"]
    assert main(words) == 0
    return made


def answers(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    capsys.readouterr()
    flags = ["--temperature", "0", "--max-new-tokens", "8", "--device", "cpu", "--json", "--chat"]
    assert main(["generate", "--load", str(folder), *flags, *words]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_prompts_are_those_of_transformers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "hf")
    ids = tokenizer.apply_chat_template(
        [QUESTION], add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    assert tokenizer.decode(ids["input_ids"][0]) == (
        "<|im_start|>user\n two  blanks\n<|im_end|>\n<|im_start|>assistant\n"
    )
    expected = model.generate(**ids, do_sample=False, max_new_tokens=8)[0, ids["input_ids"].shape[1] :]
    for name in ("run", "hf"):
        (found,) = answers(folder / name, capsys, "--prompt", QUESTION["content"])
        assert found["num_prompt_tokens"] == ids["input_ids"].shape[1]
        assert found["tokens"] == expected.tolist()


def test_a_role_that_the_format_lacks_is_named(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Left out, its message would silently have no effect on the answer."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"messages": [{"role": "developer", "content": "Be brief."}, QUESTION]}))
    words = ["--prompt-file", str(prompts), "--chat", "--device", "cpu"]
    assert main(["generate", "--load", str(folder / "run"), *words]) == 2
    message = capsys.readouterr().err
    assert "no role developer, only system, user, assistant, tool" in message
    assert "fix: give messages that the model's chat template accepts" in message


@pytest.mark.nightly
def test_a_conversation_of_lines_is_that_of_its_messages(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--temperature", "0", "--max-new-tokens", "8", "--device", "cpu", "--chat", "--system", "dog"]
    monkeypatch.setattr("sys.stdin", io.StringIO("the\nfox\n"))
    assert main(["generate", "--load", str(folder / "run"), *flags]) == 0
    printed = capsys.readouterr().out
    messages = [{"role": "system", "content": "dog"}]
    texts = []
    for content in ("the", "fox"):
        messages.append({"role": "user", "content": content})
        (folder / "talk.jsonl").write_text(json.dumps({"messages": messages}))
        (found,) = answers(folder / "run", capsys, "--prompt-file", str(folder / "talk.jsonl"))
        texts.append(found["text"])
        messages.append({"role": "assistant", "content": found["text"]})
    assert printed.endswith("\n".join(texts) + "\n")


def test_a_server_answers_as_the_command(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "later.jsonl").write_text(json.dumps({"messages": LATER}))
    (expected,) = answers(folder / "run", capsys, "--prompt-file", str(folder / "later.jsonl"))
    server = Server(folder / "run", tmp_path / "log.txt")
    fields = {"messages": LATER, "temperature": 0, "max_tokens": 8}
    status, found = server.post("/v1/chat/completions", **fields)
    assert status == 200, found
    assert found["choices"][0]["message"] == {"role": "assistant", "content": expected["text"]}
    assert found["usage"]["prompt_tokens"] == expected["num_prompt_tokens"]
    connection, answer = server.stream(path="/v1/chat/completions", **fields)
    with contextlib.closing(connection):
        deltas = [one["choices"][0]["delta"]["content"] for one in events(answer)]
    assert "".join(deltas) == expected["text"]
    for wrong in ([], [{"role": 1}], [{"role": "user", "content": "\ud800"}], "hi"):
        status, found = server.post("/v1/chat/completions", messages=wrong)
        assert (status, found["error"]["param"]) == (400, "messages"), found
    server.stop()
    assert server.exit_code() == 0, server.output
