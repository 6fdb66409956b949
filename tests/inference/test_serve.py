"""`megatrain serve` as clients use it: in a process of its own, over HTTP."""

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile_messages import hostile_messages, send_and_leave
from tiny_models import tiny_model, write

import pretrain
from megatrain.tools.main import main

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
FLAGS = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 200 --tokenizer-type NullTokenizer --vocab-size 29"
    " --mock-data --micro-batch-size 1 --train-iters 1 --lr 1e-3 --device cpu --position-embedding-type rope --eval-iters 0"
    " --hidden-dropout 0 --attention-dropout 0 --window-size 5,0 --init-method-std 0.3"
).split()


class Server:
    """A server in a forked process."""

    def __init__(self, folder: Path | str, log: Path, *flags: str, name: str | None = "tiny") -> None:
        words = ["serve", "--load", str(folder), "--port", "0", "--device", "cpu", *flags]
        words += [] if name is None else ["--served-model-name", name]
        self.log = log
        torch.set_num_threads(1)  # a process forked while torch's threads run hangs
        self.pid = os.fork()
        if self.pid == 0:
            exit_code = 99
            try:
                descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(descriptor, 1)
                os.dup2(descriptor, 2)
                sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
                exit_code = main(words)
            finally:
                sys.stdout.flush()
                os._exit(exit_code)
        self.port = int(self._wait_for(lambda: re.search(r"http://127.0.0.1:(\d+)/", self.output))[1])
        self._wait_for(lambda: self._is_up() or None)

    @property
    def output(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def _is_up(self) -> bool:
        try:
            return self.get("/health")[0] == 200
        except OSError:
            return False

    def _wait_for(self, find: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + 60
        while (found := find()) is None:
            assert time.monotonic() < deadline, self.output
            time.sleep(0.02)
        return found

    def request(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def get(self, path: str) -> tuple[int, Any]:
        return self.request("GET", path)

    def post(self, path: str, **fields: Any) -> tuple[int, Any]:
        return self.request("POST", path, json.dumps(fields).encode(), {"Content-Type": "application/json"})

    def complete(self, prompt: Any, **fields: Any) -> tuple[int, Any]:
        return self.post("/v1/completions", prompt=prompt, **fields)

    def stream(
        self, path: str = "/v1/completions", **fields: Any
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        body = json.dumps({**fields, "stream": True})
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        return connection, connection.getresponse()

    def wait_until_free(self) -> None:
        def is_free() -> bool | None:
            state = self.get("/health")[1]
            return (state["running"], state["waiting"], state["cache_is_free"]) == (0, 0, True) or None

        self._wait_for(is_free)

    def stop(self, number: int = signal.SIGTERM) -> None:
        os.kill(self.pid, number)

    def exit_code(self) -> int:
        def ended() -> int | None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            return os.waitstatus_to_exitcode(status) if pid else None

        found: int = self._wait_for(ended)
        return found


def events(answer: http.client.HTTPResponse) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in answer.read().decode().split("\n\n") if line]
    assert lines[-1] == "[DONE]" or "error" in json.loads(lines[-1])
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("run")
    assert pretrain.main([*FLAGS, "--save", str(made)]) == 0
    return made


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(
        folder, tmp_path_factory.mktemp("log") / "log.txt", "--max-sequences", "4", "--max-waiting", "300"
    )
    yield made
    made.stop()
    assert made.exit_code() == 0, made.output
    assert "stopped; all memory of the cache is free" in made.output


def test_completions_are_those_of_the_command(
    server: Server, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    flags = [
        "--max-new-tokens",
        "9",
        "--temperature",
        "0.9",
        "--top-k",
        "0",
        "--seed",
        "3",
        "--json",
        "--log-probs",
        "1",
    ]
    assert main(["generate", "--load", str(folder), "--prompt", "5 3", "1 2 3 4", *flags]) == 0
    expected = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    fields = {"max_tokens": 9, "temperature": 0.9, "seed": 3, "model": "tiny"}
    status, found = server.complete(["5 3", [1, 2, 3, 4]], **fields, logprobs=1)
    assert status == 200
    assert [(one["text"], one["finish_reason"]) for one in found["choices"]] == [
        (one["text"], one["finish_reason"]) for one in expected
    ]
    probs = found["choices"][0]["logprobs"]["token_logprobs"]
    assert probs == pytest.approx([one["log_prob"] for one in expected[0]["log_probs"]], rel=1e-4)
    count = sum(len(one["tokens"]) for one in expected)
    assert found["usage"] == {"prompt_tokens": 6, "completion_tokens": count, "total_tokens": 6 + count}
    connection, answer = server.stream(prompt=["5 3", "1 2 3 4"], **fields)
    pieces = [event["choices"][0] for event in events(answer)]
    connection.close()
    for number, one in enumerate(expected):
        assert "".join(piece["text"] for piece in pieces if piece["index"] == number) == one["text"]
    assert [piece["finish_reason"] for piece in pieces if piece["finish_reason"]] == ["length"] * 2


def test_an_encoder_reads_the_prompts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model has the name of its folder, without hf:."""
    pytest.importorskip("transformers")
    folder = write(tiny_model("T5 v1.1"), tmp_path / "theirs")
    prompts, flags = ["68 71 71", "9 30 12 5"], ["--temperature", "0", "--max-new-tokens", "9", "--json"]
    assert main(["generate", "--load", str(folder), "--prompt", *prompts, *flags]) == 0
    expected = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    monkeypatch.chdir(tmp_path)
    server = Server("hf:theirs", tmp_path / "log.txt", "--max-context", "5", name=None)
    try:
        assert server.get("/v1/models")[1]["data"][0]["id"] == "theirs"
        status, found = server.complete(prompts, max_tokens=9, temperature=0)
        assert status == 200
        assert [one["text"] for one in found["choices"]] == [one["text"] for one in expected]
        assert found["usage"]["prompt_tokens"] == 7
        for fields, param in (({"echo": True}, "echo"), ({"max_tokens": 10_000}, "prompt")):
            status, found = server.complete("68 71", **fields)
            assert (status, found["error"]["param"]) == (400, param)
        status, found = server.complete("1 2 3 4 5 6")
        assert (status, found["error"]["code"]) == (400, "context_length_exceeded")
    finally:
        server.stop()
    assert server.exit_code() == 0, server.output


@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.nightly)])
def test_a_hostile_client_changes_nothing(server: Server, count: int) -> None:
    before = server.complete("5 3", max_tokens=8, temperature=0)
    body = json.dumps({"prompt": "5 3", "max_tokens": 2, "temperature": 0, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    understood = [
        head + b"Content-Length: %d\r\n\r\n" % len(body) + body,
        b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n",
        head + b"Content-Length: 999999999\r\n\r\n" + body,
    ]
    for number, message in enumerate(hostile_messages(count, seed=2, understood=understood)):
        send_and_leave(server.port, message, is_reset=number % 3 == 0)
    server.wait_until_free()
    assert server.complete("5 3", max_tokens=8, temperature=0)[1]["choices"] == before[1]["choices"]
    assert "Traceback" not in server.output


def test_choices_echo_stop_and_prompt_log_probabilities(server: Server) -> None:
    status, found = server.complete(
        "5 3 1", n=3, echo=True, logprobs=2, max_tokens=2, seed=1, ignore_eos=True
    )
    assert status == 200
    assert len({one["text"] for one in found["choices"]}) > 1
    for one in found["choices"]:
        assert one["text"].startswith("5 3 1 ")
        assert one["logprobs"]["tokens"][:3] == ["5", "3", "1"]
        assert one["logprobs"]["token_logprobs"][0] is None
        assert all(value < 0 for value in one["logprobs"]["token_logprobs"][1:])
        assert [len(top) for top in one["logprobs"]["top_logprobs"][1:]] == [2] * 4
    whole = server.complete("5 3", max_tokens=8, temperature=0)[1]["choices"][0]["text"]
    stop = whole[4:8]
    (one,) = server.complete("5 3", max_tokens=8, temperature=0, stop=["none", stop])[1]["choices"]
    assert (one["text"], one["finish_reason"]) == (whole[: whole.index(stop)], "stop")
    assert server.complete("5 3 1", max_tokens=0, echo=True, logprobs=0)[1]["choices"][0]["text"] == "5 3 1"


def test_models_and_health(server: Server) -> None:
    status, found = server.get("/v1/models")
    assert (status, found["data"][0]["id"], found["data"][0]["max_model_len"]) == (200, "tiny", 200)
    server.wait_until_free()
    assert server.get("/health") == (
        200,
        {"status": "running", "running": 0, "waiting": 0, "cache_is_free": True},
    )


def test_the_last_token_of_a_text_needs_no_context(server: Server) -> None:
    """As in `megatrain generate`: it is sampled, and never an input."""
    status, found = server.complete("1 " * 200, max_tokens=1)
    assert (status, found["choices"][0]["finish_reason"]) in {(200, "length"), (200, "stop")}
    assert server.complete("1 " * 200, max_tokens=2)[0] == 400


@pytest.mark.parametrize(
    ("fields", "status", "param", "words"),
    [
        ({"prompt": "1 " * 300}, 400, "prompt", "at most 200 tokens"),
        ({"prompt": "1", "max_tokens": 201}, 400, "prompt", "at most 200 tokens"),
        ({"prompt": "29"}, 400, "prompt", "29 is outside the vocabulary"),
        ({"prompt": [29]}, 400, "prompt", "at most 28"),
        ({"prompt": [True]}, 400, "prompt", "integer"),
        ({"prompt": [[]]}, 400, "prompt", "list without ids"),
        ({"prompt": []}, 400, "prompt", "0 entries"),
        ({"prompt": {}}, 400, "prompt", "string"),
        ({"prompt": "\ud800"}, 400, "prompt", "surrogates"),
        ({"prompt": "1", "n": 65}, 400, "n", "64"),
        ({"prompt": ["1"] * 33, "n": 2}, 400, "n", "more than 64"),
        ({"prompt": "1", "temperature": -1}, 400, "temperature", "0, or a number"),
        ({"prompt": "1", "temperature": 1e-50}, 400, "temperature", "0, or a number"),
        ({"prompt": "1", "repetition_penalty": 1e-45}, 400, "repetition_penalty", "from 0.01 to 100"),
        ({"prompt": "1", "top_p": 10**400}, 400, "top_p", "finite number"),
        (
            {"prompt": "1", "stream": True, "stream_options": {"include_usage": True}},
            400,
            "stream_options",
            "",
        ),
        ({"prompt": "1", "temperature": "hot"}, 400, "temperature", "finite number"),
        ({"prompt": "1", "temperature": float("nan")}, 400, "temperature", "finite number"),
        ({"prompt": "1", "top_p": 0}, 400, "top_p", "above 0"),
        ({"prompt": "1", "max_tokens": -1}, 400, "max_tokens", "at least 0"),
        ({"prompt": "1", "stop": [""]}, 400, "stop", "one character"),
        ({"prompt": "1", "logprobs": 1, "stream": True}, 400, "logprobs", "stream"),
        ({"prompt": "1", "logit_bias": {"1": 2}}, 400, "logit_bias", "not supported"),
        ({"prompt": "1", "promt": "1"}, 400, "promt", "unknown field"),
        ({"prompt": "1", "model": "other"}, 404, "model", "does not exist"),
        ({"prompt": "1", "\ud800": 1}, 400, "\ud800", "unknown field '\\ud800'"),
        ({"prompt": "1", "x" * 99 + "\U0001f600": 1}, 400, "x" * 99 + "\U0001f600", "unknown field"),
        ({"prompt": "1", "model": "\ud800"}, 404, "model", "does not exist"),
        ({"prompt": ["1", "2\udfff"]}, 400, "prompt", "surrogates"),
        ({"prompt": "1", "stop": ["\ud800"] * 17}, 400, "stop", "at most 16"),
        ({"prompt": "1", "suffix": "\ud800"}, 400, "suffix", "not supported"),
    ],
    ids=str,
)
def test_wrong_requests_are_named(
    server: Server, fields: dict[str, Any], status: int, param: str, words: str
) -> None:
    found, content = server.post("/v1/completions", **fields)
    assert (found, content["error"]["param"]) == (status, param)
    assert words in content["error"]["message"]


def test_half_of_a_surrogate_pair_stops_nothing(server: Server) -> None:
    """It is a text that no generated text contains."""
    status, found = server.complete("5 3", max_tokens=3, stop=["\ud800"], user="\udfff", ignore_eos=True)
    assert (status, found["choices"][0]["finish_reason"]) == (200, "length")


def test_connections_without_requests_do_not_block_others(folder: Path, tmp_path: Path) -> None:
    server = Server(folder, tmp_path / "log.txt", "--max-connections", "8", "--idle-seconds", "2")
    held = [socket.create_connection(("127.0.0.1", server.port), timeout=20) for _ in range(30)]
    for connection in held:
        with contextlib.suppress(ConnectionError):
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n")
    assert server.complete("5 3", max_tokens=2)[0] == 200
    for connection in held:
        with connection, contextlib.suppress(ConnectionError):
            assert connection.recv(100) == b""
    server.stop()
    assert server.exit_code() == 0, server.output
    assert "Traceback" not in server.output


def test_wrong_http_is_refused(server: Server) -> None:
    json_type = {"Content-Type": "application/json"}
    for body, headers, status in [
        (b"{", json_type, 400),
        (b"[]", json_type, 400),
        (b"[" * 100_000, json_type, 400),
        (b'{"prompt": "1"}', {"Content-Type": "text/plain"}, 415),
        (b'"' + b"1" * 5_000_000 + b'"', json_type, 413),
    ]:
        found, content = server.request("POST", "/v1/completions", body, headers)
        assert found == status, content
        assert content["error"]["message"]
    assert server.get("/v1/chat")[0] == 404
    assert server.request("GET", "/pause")[0] == 405
    assert server.request("POST", "/pause", b"", {"Content-Type": "text/plain"})[0] == 415
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("GET", "/health", headers={"Host": "example.com"})
    answer = connection.getresponse()
    assert answer.status == 400
    assert json.loads(answer.read())["error"]["code"] == "wrong_host"
    connection.close()


def test_a_pause_is_confirmed_and_requests_wait_for_its_end(server: Server) -> None:
    assert server.post("/pause") == (200, {"status": "paused"})
    assert server.get("/health")[1]["status"] == "paused"
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.complete, "5 3", max_tokens=2, temperature=0)
        time.sleep(0.3)
        assert not waiting.done()
        assert server.post("/resume") == (200, {"status": "running"})
        assert waiting.result()[0] == 200


def test_requests_of_clients_that_vanish_end(server: Server) -> None:
    """While no pass runs, only the server's reaction ends them."""
    server.wait_until_free()
    assert server.post("/pause")[0] == 200
    connections = []
    for number in range(6):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        body = json.dumps({"prompt": "5 3", "max_tokens": 9, "stream": number % 2 == 0})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        connections.append(connection)
    server._wait_for(lambda: server.get("/health")[1]["waiting"] == 6 or None)
    for connection in connections:
        connection.close()
    server._wait_for(lambda: server.get("/health")[1]["waiting"] == 0 or None)
    assert server.post("/resume")[0] == 200


def client(server: Server, number: int) -> str:
    """Act as one of many clients; return what became of its request."""
    prompt, tokens = f"{number % 28} {number % 7}", 5 + number % 90
    match number % 4:
        case 0:
            status, content = server.complete(prompt, max_tokens=tokens, seed=number, ignore_eos=True)
            assert status == 200, content
            return "answered"
        case 1:
            connection, answer = server.stream(prompt=prompt, max_tokens=tokens, seed=number, ignore_eos=True)
            assert events(answer)[-1]["choices"][0]["finish_reason"] == "length"
            connection.close()
            return "answered"
        case 2:  # vanishes, before the answer or in it
            body = json.dumps(
                {"prompt": prompt, "max_tokens": 150, "stream": number % 8 == 2, "ignore_eos": True}
            )
            with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
                head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
                connection.sendall((head + body).encode())
                if number % 8 == 2:
                    assert connection.recv(20).startswith(b"HTTP/1.1 200")
            return "vanished"
        case _:
            status, content = server.complete("1 " * (201 + number), max_tokens=tokens)
            assert (status, content["error"]["code"]) == (400, "context_length_exceeded")
            return "refused"


def test_64_clients_at_once(server: Server) -> None:
    with ThreadPoolExecutor(64) as pool:
        found = list(pool.map(lambda number: client(server, number), range(64)))
    assert {kind: found.count(kind) for kind in set(found)} == {"answered": 32, "vanished": 16, "refused": 16}
    server.wait_until_free()


def test_a_stop_in_the_middle_answers_every_client(folder: Path, tmp_path: Path) -> None:
    server = Server(folder, tmp_path / "log.txt", "--max-sequences", "2", "--stop-seconds", "0.5")
    begun = threading.Barrier(65)

    def ask(number: int) -> str:
        begun.wait()
        try:
            status, content = server.complete("5 3", max_tokens=190, ignore_eos=True, seed=number)
        except (OSError, http.client.HTTPException):
            return "no connection"
        if status == 200:
            return "answered"
        assert status == 503, content
        assert "stopp" in content["error"]["message"]
        return "stopped"

    with ThreadPoolExecutor(64) as pool:
        asked = [pool.submit(ask, number) for number in range(64)]
        begun.wait()
        server._wait_for(lambda: server.get("/health")[1]["waiting"] >= 32 or None)
        server.stop()
        found = [one.result() for one in asked]
    assert server.exit_code() == 0, server.output
    assert "all memory of the cache is free" in server.output
    assert found.count("stopped") >= 32
    assert found.count("no connection") <= 32  # those that had not connected


@pytest.mark.nightly
def test_requests_have_a_time_limit_and_a_full_queue_refuses(folder: Path, tmp_path: Path) -> None:
    flags = ("--max-sequences", "1", "--max-waiting", "1", "--request-seconds", "1", "--max-context", "50")
    server = Server(folder, tmp_path / "log.txt", *flags)
    assert server.post("/pause")[0] == 200
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(server.complete, "5 3", max_tokens=9)
        server._wait_for(lambda: server.get("/health")[1]["waiting"] or None)
        status, content = server.complete("5 3", max_tokens=9)
        assert (status, content["error"]["code"]) == (429, "too_many_requests")
        status, content = first.result()
        assert (status, content["error"]["code"]) == (504, "timeout")
    connection, answer = server.stream(prompt="5 3", max_tokens=9)
    assert events(answer)[-1]["error"]["code"] == "timeout"
    connection.close()
    server.wait_until_free()
    assert server.complete("5 3", max_tokens=50)[1]["error"]["code"] == "context_length_exceeded"
    server.stop(signal.SIGINT)
    assert server.exit_code() == 0, server.output


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--port", "99999"], "--port 99999"),
        (["--max-context", "201"], "--max-context 201: the model's context has 200"),
        (["--termination-id", "29"], "--termination-id 29"),
        (["--request-seconds", "0"], "--request-seconds 0 "),
        (["--idle-seconds", "0"], "--idle-seconds 0"),
        (["--cache-gb", "1e-9"], "needs a cache of"),
        (["--host", "192.0.2.1"], "--host '192.0.2.1'"),
        (["--host", "a" * 70], "--host 'aaa"),
    ],
    ids=str,
)
def test_wrong_flags_are_named(
    folder: Path, flags: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--load", str(folder), "--device", "cpu", *flags]) == 2
    message = capsys.readouterr().err
    assert named in message
    assert "fix:" in message


def test_a_port_in_use_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--load", str(folder), "--device", "cpu", "--port", str(port)]) == 2
    assert f"--port {port}: Address already in use" in capsys.readouterr().err
