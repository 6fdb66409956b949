"""`megatrain serve`: an OpenAI-compatible completions server for the model of a checkpoint, in one process or on tensor ranks.

    main thread: event loop with HTTP (http_app.py) <─> thread: passes of the model (inference/service.py)

SIGTERM or Ctrl-C: no further request is accepted; those that run get --stop-seconds to finish, the others an error.
"""

from __future__ import annotations

import argparse
import dataclasses
import signal
import socket
import traceback
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatrain.config.errors import ConfigError, MegatrainError, Problem
from megatrain.config.schema.training import HF_PREFIX
from megatrain.inference.leading_engine import LeadingEngine, follow
from megatrain.inference.service import Service
from megatrain.inference.texts import TextEngine
from megatrain.parallel.messages import Messages
from megatrain.tools.generation.chat_request import ChatFormat
from megatrain.tools.generation.load import Generation, add_model_flags, joined_process, load
from megatrain.tools.generation.text_chat import TextChat, text_chat
from megatrain.tools.subcommands import CommandParser, add_command

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_SECONDS_TO_END = 30.0
"""Time for the pass that runs when the server stops, and for clients to receive their answers."""


def add_flags(commands: Any) -> None:
    """Add `megatrain serve`."""
    parser = add_command(commands, "serve", run)
    add_model_flags(parser)
    parser.add("--host", "address to listen on (default: 127.0.0.1, this machine alone)", "127.0.0.1")
    parser.add("--port N", "port; 0: a free one, which is printed", 8000, at_least=0, at_most=65535)
    parser.add("--served-model-name NAME", "name of the model in requests (default: the name of the folder)")
    parser.add(
        "--image-folder FOLDER",
        "folder below which requests may name images as file: URLs (default: none; data: URLs always work)",
        of=Path,
    )
    _add_limits(parser)


def _add_limits(parser: CommandParser) -> None:
    parser.add(
        "--max-context N",
        "most tokens of a prompt and its text together, or of a prompt that an encoder reads (default: the model's context)",
        of=int,
        at_least=1,
    )
    parser.add(
        "--max-waiting N",
        "most sequences that wait for memory; further requests are refused",
        256,
        at_least=1,
    )
    parser.add(
        "--max-connections N",
        "most connections; a further one ends the one that has been without a request for longest",
        1024,
        at_least=1,
    )
    parser.add(
        "--idle-seconds S",
        "time in which a connection must send the head of a request, or read a part of the answer",
        30,
        at_least=1,
        at_most=3600,
    )
    parser.add("--max-body-mb MB", "size limit of a request", 4.0, above=0)
    parser.add("--request-seconds S", "time limit of a request, with its wait for memory", 600.0, above=0)
    parser.add(
        "--stop-seconds S",
        "time that running requests have to finish when the server is stopped",
        10.0,
        at_least=0,
        at_most=3600,
    )


def run(arguments: argparse.Namespace) -> None:
    """Answer requests of OpenAI's completions API (POST /v1/completions, /v1/chat/completions) with the model of a checkpoint."""
    _require_packages()
    with joined_process(arguments) as process:
        loaded = load(arguments, process)
        generation = Generation(arguments, process, loaded)
        start, end_ids = generation.start_id, generation.end_ids
        most = arguments.max_context or loaded.max_context
        if most > loaded.max_context:
            raise ConfigError(
                f"--max-context {most}: the model's context has {loaded.max_context} tokens",
                fix=f"use --max-context {loaded.max_context} or less",
            )
        plan = generation.plan(
            max_tokens=most if start is None else generation.context,
            max_prompt=most,
            num_sequences=arguments.max_sequences,
        )
        messages = process.messages()
        listener = _shared_listener(arguments, messages)
        if listener is None:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)  # rank 0 ends the others
            follow(TextEngine(loaded.model, loaded.tokenizer, plan, process.device, end_ids, start), messages)
            return
        engine = LeadingEngine(loaded.model, loaded.tokenizer, plan, process.device, end_ids, messages, start)
        name = arguments.served_model_name or Path(arguments.load.removeprefix(HF_PREFIX)).resolve().name
        host, port = listener.getsockname()[:2]
        process.note(
            f"model {name!r}: http://{f'[{host}]' if ':' in host else host}:{port}/v1/completions and /v1/chat/completions"
        )
        if arguments.host not in _LOOPBACK:
            process.note(
                "every host that can reach this address can use the server: it has no authentication"
            )
        first_end = next(iter(end_ids), None)
        chat = (
            text_chat(loaded, process.note)
            if loaded.model.spec.vision is None
            else ChatFormat(
                loaded.model.spec, loaded.tokenizer, loaded.tiling, first_end, arguments.image_folder
            )
        )
        _serve(arguments, engine, listener, name=name, chat=chat)


def _serve(
    arguments: argparse.Namespace,
    engine: TextEngine,
    listener: socket.socket,
    *,
    name: str,
    chat: ChatFormat | TextChat,
) -> None:
    import uvicorn  # noqa: PLC0415 (optional)

    from megatrain.tools.generation.http_app import CompletionsApp, Limits  # noqa: PLC0415 (optional packages)

    failures: list[BaseException] = []

    class Server(uvicorn.Server):
        """Server whose requests end when it stops."""

        def handle_exit(self, sig: int, frame: Any) -> None:
            service.begin_stop(arguments.stop_seconds)
            super().handle_exit(sig, frame)

    def fail(error: BaseException) -> None:
        failures.append(error)
        server.should_exit = True

    plan = engine.engine.model.cache.plan
    limits = Limits(
        max_tokens=plan.max_tokens,
        max_prompt=None if engine.start_id is None else plan.max_memory,
        body_bytes=int(arguments.max_body_mb * 1e6),
        request_seconds=arguments.request_seconds,
    )
    service = Service(engine, max_waiting=arguments.max_waiting, on_failure=fail)
    hosts = ["*"] if arguments.host not in _LOOPBACK else [*_LOOPBACK, "[::1]"]
    app = CompletionsApp(
        service,
        engine.tokenizer,
        model=name,
        vocab_size=engine.engine.model.model.spec.vocab_size,
        limits=limits,
        hosts=hosts,
        chat=chat,
    )
    server = Server(_http(arguments, app.app))

    def stop(*_: object) -> None:
        server.should_exit = True

    # These handlers act until uvicorn has its own, and once more after its clean stop, when it raises the signal again.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    server.run(sockets=[listener])
    service.begin_stop(0)
    has_ended = service.join(_SECONDS_TO_END)
    if has_ended and not failures:
        engine.close()
    if failures:
        traceback.print_exception(failures[0])
        raise MegatrainError(
            f"text generation failed: {failures[0]}", fix="see the error above; start the server again"
        )
    if not has_ended:
        raise MegatrainError("a pass of the model did not end", fix="check the device")
    print("> stopped; all memory of the cache is free", flush=True)


def _http(arguments: argparse.Namespace, app: Any) -> Any:
    """Return the settings of uvicorn: its limits of connections."""
    import uvicorn  # noqa: PLC0415 (optional)

    # optional packages
    from megatrain.tools.generation.connections import LimitedConnection, allowed_connections  # noqa: PLC0415

    connections = allowed_connections(arguments.max_connections)
    if connections < arguments.max_connections:
        print(
            f"> at most {connections} connections: the process may not open more files (ulimit -n)",
            flush=True,
        )
    return uvicorn.Config(
        app,
        http=LimitedConnection,
        ws="none",
        log_level="warning",
        access_log=False,
        timeout_keep_alive=arguments.idle_seconds,
        timeout_graceful_shutdown=int(arguments.stop_seconds + _SECONDS_TO_END),
        limit_concurrency=connections + 1,  # uvicorn refuses at this number
        server_header=False,
    )


def _require_packages() -> None:
    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"`megatrain serve` needs the packages {' and '.join(missing)}",
            fix="pip install 'megatrain[serve]'",
        )


def _shared_listener(arguments: argparse.Namespace, messages: Messages) -> socket.socket | None:
    """Return the socket of rank 0, None on other ranks.

    Raises:
        ConfigError: rank 0 cannot listen; on all ranks.
    """
    listener, problem = None, None
    if messages.rank == 0:
        try:
            listener = _listen(arguments.host, arguments.port)
        except ConfigError as error:
            problem = dataclasses.astuple(error.problems[0])
    problem = messages.broadcast(problem)
    if problem is not None:
        raise ConfigError.of([Problem(*problem)])
    return listener


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, ValueError) as error:  # ValueError: no text of a host name
        raise ConfigError(
            f"--host {host!r} --port {port}: {getattr(error, 'strerror', None) or error}",
            fix="use a free --port, and a --host of this machine",
        ) from error
