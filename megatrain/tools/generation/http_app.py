"""OpenAI's completions API over HTTP: POST /v1/completions, GET /v1/models, GET /health, POST /pause, POST /resume.

    body, of limited size and time ─> CompletionRequest ─> tickets of the service ─> JSON, or server-sent events

Every wait has a limit. A client that disconnects ends its requests. An error is JSON with its reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megatrain.data.tokenizers.build import Tokenizer
from megatrain.inference.sampling import LogProb
from megatrain.inference.service import Event, Service, Ticket, UnavailableError
from megatrain.tools.generation.chat_request import ChatFormat
from megatrain.tools.generation.completion_request import CompletionRequest, RequestError, read_request
from megatrain.tools.generation.text_chat import TextChat

_BODY_SECONDS: Final = 30.0
_CONTROL_SECONDS: Final = 60.0
_SLOWEST_READER_SECONDS: Final = 30.0
"""Time after a request's limit in which a client may read the end of its events."""
_REASONS: Final = {
    "cancelled": ("the request was cancelled", 499),
    "stopped": ("the server stopped before the request was finished", 503),
    "failed": ("the server failed; its log has the error", 500),
}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of requests."""

    max_tokens: int
    """Tokens of a prompt and its text together, or of the text alone."""
    max_prompt: int | None = None
    """Tokens of a prompt that an encoder reads; None: the text continues the prompt."""
    body_bytes: int
    request_seconds: float
    """Time of a request, with its wait for memory."""


class CompletionsApp:
    """The application.

    Args:
        model: name of the model.
        hosts: accepted names of this host in requests; `*`: all.
        chat: reads conversations.
    """

    def __init__(
        self,
        service: Service,
        tokenizer: Tokenizer,
        *,
        model: str,
        vocab_size: int,
        limits: Limits,
        hosts: Sequence[str],
        chat: ChatFormat | TextChat,
    ) -> None:
        self.chat = chat
        self.service, self.tokenizer, self.model, self.limits = service, tokenizer, model, limits
        self.vocab_size, self.created = vocab_size, int(time.time())
        self.app = Starlette(
            routes=[
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/v1/chat/completions", self.chat_completions, methods=["POST"]),
                Route("/v1/models", self.models),
                Route("/health", self.health),
                Route("/pause", self.pause, methods=["POST"]),
                Route("/resume", self.resume, methods=["POST"]),
            ],
            middleware=[Middleware(_TrustedHosts, hosts=list(hosts))],
            exception_handlers={RequestError: _wrong_request, 404: _no_page, 405: _no_page},
        )

    async def models(self, _: Request) -> Response:
        """List the model."""
        one = {"id": self.model, "object": "model", "created": self.created, "owned_by": "megatrain"}
        one["max_model_len"] = self.limits.max_prompt or self.limits.max_tokens
        return _Json({"object": "list", "data": [one]})

    async def health(self, _: Request) -> Response:
        """Report the state; 503 if no request can be answered now."""
        status = self.service.status
        is_stuck = status.seconds_in_pass > self.limits.request_seconds
        content = {
            "status": "stuck" if is_stuck else status.state,
            "running": status.running,
            "waiting": status.waiting,
            "cache_is_free": status.is_memory_free,
        }
        return _Json(content, 200 if status.state == "running" and not is_stuck else 503)

    async def pause(self, request: Request) -> Response:
        """Run no further pass; the answer confirms that none runs."""
        _check_is_json(request)
        return self._confirmed(await asyncio.to_thread(self.service.pause, _CONTROL_SECONDS), "paused")

    async def resume(self, request: Request) -> Response:
        """Run passes again."""
        _check_is_json(request)
        return self._confirmed(await asyncio.to_thread(self.service.resume, _CONTROL_SECONDS), "running")

    def _confirmed(self, is_done: bool, state: str) -> Response:
        if is_done:
            return _Json({"status": state})
        now = self.service.status.state
        raise RequestError(f"not confirmed: the server is {now}", code="not_confirmed", status=503)

    async def completions(self, http: Request) -> Response:
        """Answer a request for completions."""
        read = functools.partial(
            read_request,
            tokenizer=self.tokenizer,
            vocab_size=self.vocab_size,
            max_prompt=self.limits.max_prompt,
        )
        return await self._answered(http, read)

    async def chat_completions(self, http: Request) -> Response:
        """Answer a request for the next message of a conversation."""
        return await self._answered(http, self.chat.read)

    async def _answered(self, http: Request, read: Callable[..., CompletionRequest]) -> Response:
        _check_is_json(http)
        deadline = time.monotonic() + self.limits.request_seconds
        body = await self._body(http)
        request = await asyncio.to_thread(read, body, model=self.model, max_tokens=self.limits.max_tokens)
        answer = _Answer(self, request, deadline)
        answer.submit()
        if request.streams:
            return _EventStream(answer)
        return await answer.whole(http)

    async def _body(self, http: Request) -> bytes:
        """Read the body within limits of size and time."""
        found = bytearray()
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                async for part in http.stream():
                    found += part
                    if len(found) > self.limits.body_bytes:
                        raise RequestError(
                            f"the body has more than {self.limits.body_bytes} bytes",
                            code="body_too_large",
                            status=413,
                        )
        except TimeoutError as error:
            raise RequestError(
                f"the body did not arrive in {_BODY_SECONDS:g} s", code="body_timeout", status=408
            ) from error
        except ClientDisconnect as error:
            raise RequestError("the client has disconnected", code="disconnected", status=499) from error
        return bytes(found)


class _Json(JSONResponse):
    """JSON in ASCII: texts of a request are repeated in it, and may contain half of a surrogate pair."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


class _Answer:
    """The answer to one request: its tickets and their events."""

    def __init__(self, app: CompletionsApp, request: CompletionRequest, deadline: float) -> None:
        self.app, self.request, self.deadline = app, request, deadline
        self.tickets: list[Ticket] = []
        self.arrived: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self.head = {
            "id": f"{'chat' if request.is_chat else ''}cmpl-{uuid.uuid4().hex}",
            "object": "chat.completion" if request.is_chat else "text_completion",
            "created": int(time.time()),
            "model": app.model,
        }

    def submit(self) -> None:
        """Submit all choices, or none."""
        loop = asyncio.get_running_loop()
        try:
            for number, (prompt, sampling) in enumerate(self.request.choices):

                def on_event(event: Event, number: int = number) -> None:
                    with contextlib.suppress(RuntimeError):  # the server has ended
                        loop.call_soon_threadsafe(self.arrived.put_nowait, (number, event))

                self.tickets.append(self.app.service.submit(prompt, sampling, on_event, self.request.images))
        except UnavailableError as error:
            self.cancel()
            is_full = "waiting" in str(error)
            raise RequestError(
                str(error),
                code="too_many_requests" if is_full else "unavailable",
                status=429 if is_full else 503,
            ) from error

    def cancel(self) -> None:
        """End the choices that are not finished; their memory returns."""
        for ticket in self.tickets:
            if not ticket.has_ended:
                self.app.service.cancel(ticket)

    async def arrivals(self) -> AsyncIterator[tuple[int, Event]]:
        """Yield the events of all choices, up to the last one.

        Raises:
            RequestError: a choice did not finish: time is up, or the server stopped.
        """
        left = len(self.tickets)
        try:
            while left:
                async with asyncio.timeout(max(0.0, self.deadline - time.monotonic())):
                    number, event = await self.arrived.get()
                if event.end in _REASONS:
                    message, status = _REASONS[event.end]
                    raise RequestError(message, code=event.end, status=status)
                left -= event.end is not None
                yield number, event
        except TimeoutError as error:
            seconds = self.app.limits.request_seconds
            raise RequestError(f"not finished in {seconds:g} s", code="timeout", status=504) from error
        finally:
            self.cancel()

    async def whole(self, http: Request) -> Response:
        """Return one JSON object, unless the client disconnects."""

        async def wait_for_all() -> None:
            async for _ in self.arrivals():
                pass

        work = asyncio.ensure_future(wait_for_all())
        gone = asyncio.ensure_future(_disconnected(http))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise RequestError("the client has disconnected", code="disconnected", status=499)
            await work
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
        choices = [self._choice(number) for number in range(len(self.tickets))]
        num_prompt = sum(len(prompt) for prompt in self.request.prompts)
        num_new = sum(one.text.completion.num_new for one in self.tickets if one.text)
        usage = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_new,
            "total_tokens": num_prompt + num_new,
        }
        return _Json({**self.head, "choices": choices, "usage": usage})

    async def events(self) -> AsyncIterator[str]:
        """Yield server-sent events; an error is the last one."""
        try:
            for number, (prompt, _) in enumerate(self.request.choices if self.request.echoes else ()):
                yield self._event(number, self.app.tokenizer.decode(prompt), None)
            async for number, event in self.arrivals():
                if event.text or event.end:
                    yield self._event(number, event.text, event.end)
            yield "data: [DONE]\n\n"
        except RequestError as error:
            yield f"data: {json.dumps(_content(error))}\n\n"
        finally:
            self.cancel()

    def _event(self, number: int, text: str, end: str | None) -> str:
        choice: dict[str, Any] = {"index": number, "logprobs": None, "finish_reason": end}
        head = dict(self.head)
        if self.request.is_chat:
            head["object"] = "chat.completion.chunk"
            choice["delta"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        return f"data: {json.dumps({**head, 'choices': [choice]})}\n\n"

    def _choice(self, number: int) -> dict[str, Any]:
        ticket = self.tickets[number]
        assert ticket.text is not None
        one, prompt = ticket.text.completion, ""
        if self.request.is_chat:
            message = {"role": "assistant", "content": ticket.text.stream.text}
            return {"index": number, "message": message, "finish_reason": one.finish_reason}
        if self.request.echoes:
            prompt = self.app.tokenizer.decode(one.prompt)
        return {
            "text": prompt + ticket.text.stream.text,
            "index": number,
            "logprobs": None if one.sampling.num_log_probs is None else self._log_probs(ticket),
            "finish_reason": one.finish_reason,
        }

    def _log_probs(self, ticket: Ticket) -> dict[str, Any]:
        """Return the log-probabilities of a choice; the first token of a prompt has none."""
        assert ticket.text is not None
        one = ticket.text.completion
        found: list[LogProb | None] = list(one.log_probs)
        if self.request.echoes:
            found = [None, *one.prompt_log_probs, *found]
        ids = [each.token if each else one.prompt[0] for each in found]
        texts = [self.app.tokenizer.decode([token]) for token in ids]
        offsets = [0]
        for text in texts:
            offsets.append(offsets[-1] + len(text))
        return {
            "tokens": texts,
            "token_logprobs": [each and each.log_prob for each in found],
            "top_logprobs": [each and {self.app.tokenizer.decode([token]): value for token, value in each.top} for each in found],
            "text_offset": offsets[:-1],
        }  # fmt: skip


class _EventStream(StreamingResponse):
    """Server-sent events of an answer. Its requests end with it, also if the client disconnects or reads too slowly."""

    def __init__(self, answer: _Answer) -> None:
        super().__init__(answer.events(), media_type="text/event-stream")
        self.answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        seconds = self.answer.deadline - time.monotonic() + _SLOWEST_READER_SECONDS
        try:
            async with asyncio.timeout(seconds):
                await super().__call__(scope, receive, send)
        except TimeoutError:
            return  # The server closes a connection whose response is not complete.
        finally:
            self.answer.cancel()


async def _disconnected(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _check_is_json(http: Request) -> None:
    """Check the content type: a page in a browser cannot send this one to another site without its consent."""
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RequestError(
            f"content-type {kind[:100]!r}: send application/json", code="content_type", status=415
        )


def _content(error: RequestError) -> dict[str, Any]:
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


class _TrustedHosts:
    """Starlette's check of the Host header, with an error in JSON."""

    def __init__(self, app: ASGIApp, hosts: list[str]) -> None:
        self.app, self.hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = RequestError("the Host header does not name this server", code="wrong_host")
        apps: list[ASGIApp] = [_error(problem)]

        async def accept(*_: object) -> None:
            apps.append(self.app)

        async def discard(_: Message) -> None:
            """Drop an error in plain text."""

        check = TrustedHostMiddleware(accept, allowed_hosts=self.hosts, www_redirect=False)
        await check(scope, receive, discard)
        await apps[-1](scope, receive, send)


def _error(error: RequestError) -> Response:
    headers = {"retry-after": "1"} if error.status in (429, 503) else None
    return _Json(_content(error), error.status, headers)


async def _wrong_request(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return _error(error)


async def _no_page(http: Request, error: Exception) -> Response:
    status = int(getattr(error, "status_code", 404))
    problem = f"{http.method} {http.url.path[:200]} does not exist"
    return _error(RequestError(problem, code="not_found", status=status))
