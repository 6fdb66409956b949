"""`/v1/chat/completions` of a model of conversations about images: the answers are those of `megatrain generate --image`."""

import base64
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_serve import Server, events
from tiny_tokenizers import gpt2_files

import pretrain
from megatrain.tools.main import main

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
Image = pytest.importorskip("PIL.Image")
FLAGS = (
    "--model-family vlm --img-h 16 --img-w 16 --patch-dim 8 --vision-model-type siglip --vision-hidden-size 16"
    " --vision-num-attention-heads 2 --num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 100 --mock-data"
    " --micro-batch-size 1 --train-iters 1 --lr 1e-3 --device cpu --position-embedding-type rope --eval-iters 0"
    " --hidden-dropout 0 --attention-dropout 0 --init-method-std 0.5 --tokenizer-type GPT2BPETokenizer"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a checkpoint, with two images in its folder `images`."""
    made = tmp_path_factory.mktemp("run")
    vocab, merges = gpt2_files(made)
    words = [*FLAGS.split(), "--vocab-file", vocab, "--merge-file", merges, "--save", str(made / "run")]
    assert pretrain.main(words) == 0
    (made / "images").mkdir()
    for name in ("one", "two"):
        colours = torch.randint(0, 256, (16, 16, 3), dtype=torch.uint8)
        Image.fromarray(colours.numpy()).save(made / "images" / f"{name}.png")
    return made


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("log") / "log.txt"
    made = Server(folder / "run", log, "--image-folder", str(folder / "images"))
    yield made
    made.stop()
    assert made.exit_code() == 0, made.output


def image_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def data_url(folder: Path, name: str) -> str:
    return f"data:image/png;base64,{base64.b64encode((folder / 'images' / name).read_bytes()).decode()}"


def chat(server: Server, *parts: Any, **fields: Any) -> tuple[int, Any]:
    fields = {
        "max_tokens": 8,
        "temperature": 0,
        "messages": [{"role": "user", "content": list(parts)}],
        **fields,
    }
    return server.post("/v1/chat/completions", **fields)


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def test_answers_are_those_of_the_command(
    server: Server, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    images = [folder / "images" / f"{name}.png" for name in ("one", "two")]
    prompt = "USER: <image>\n<image>\nwhat? ASSISTANT:"
    words = [
        "generate",
        "--load",
        str(folder / "run"),
        "--prompt",
        prompt,
        "--image",
        *map(str, images),
        "--json",
    ]
    assert main([*words, "--max-new-tokens", "8", "--temperature", "0", "--device", "cpu"]) == 0
    expected = json.loads(capsys.readouterr().out)
    parts = [image_part(data_url(folder, "one.png")), image_part(f"file://{images[1]}"), text("what?")]
    status, found = chat(server, *parts)
    assert status == 200, found
    choice = found["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": expected["text"]}
    assert choice["finish_reason"] == expected["finish_reason"]
    assert found["usage"]["prompt_tokens"] == expected["num_prompt_tokens"]
    swapped = chat(server, parts[1], parts[0], parts[2])[1]["choices"][0]["message"]["content"]
    assert swapped != expected["text"], "the images decide nothing"
    history = [
        {"role": "system", "content": "hi"},
        {"role": "user", "content": [parts[0], text("a")]},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": [parts[1], text("c")]},
    ]
    assert chat(server, messages=history)[0] == 200


def test_a_stream_has_the_same_text(server: Server, folder: Path) -> None:
    parts = [image_part(data_url(folder, "one.png")), text("what?")]
    messages = [{"role": "user", "content": parts}]
    expected = chat(server, *parts)[1]["choices"][0]["message"]["content"]
    connection, answer = server.stream(
        path="/v1/chat/completions", max_tokens=8, temperature=0, messages=messages
    )
    with contextlib.closing(connection):
        deltas = [one["choices"][0]["delta"]["content"] for one in events(answer)]
    assert "".join(deltas) == expected


WRONG = {
    "a page": (lambda _: [image_part("https://example.org/cat.png")], "not fetched"),
    "a file outside": (
        lambda folder: [image_part(f"file://{folder}/images/../vocab.json")],
        "--image-folder",
    ),
    "no image": (lambda _: [image_part("data:image/png;base64,aGVsbG8=")], "no image"),
    "no base64": (lambda _: [image_part("data:image/png;base64,!!")], "base64"),
    "a mark": (lambda _: [text("<image>")], "<image>"),
    "another part": (lambda _: [{"type": "input_audio"}], "neither"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_parts_are_refused(kind: str, server: Server, folder: Path) -> None:
    parts, error = WRONG[kind]
    status, found = chat(server, *parts(folder))
    assert status == 400
    assert error in found["error"]["message"]
    assert found["error"]["param"] == "messages"


@pytest.mark.parametrize(
    "messages", [[], "hi", [{"role": "tool", "content": "a"}], [{"role": "assistant", "content": "a"}], [7]]
)
def test_wrong_messages_are_refused(messages: Any, server: Server) -> None:
    assert chat(server, messages=messages)[0] == 400
