"""The program that renders chat templates: a process of its own, with a limit of time and memory.

    line of JSON {"messages": .., "tools": .., ..} -> stdin -> render -> stdout -> {"segments": [[text, has_loss], ..]} or {"error": ".."}

A template comes with a tokenizer and may be anybody's: the sandbox keeps it from running code, the limits from never
ending. Python cannot interrupt a computation such as `10 ** 10 ** 9`, but the kernel can end a process. The environment is that
of transformers' `apply_chat_template`: its filter, globals, extensions and variables (transformers 5.23,
utils/chat_template_utils.py). The file imports jinja2 and the standard library only, so that it starts fast and in little memory.
"""

from __future__ import annotations

import json
import random
import re
import resource
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, Final, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment

TEXT_CHARACTERS: Final = 1 << 26
"""Characters that a conversation may have."""

_REASONING: Final = ("reasoning_content", "thinking", "reasoning")
"""Names of the reasoning of a message; templates read the first or the second."""
_MEDIA: Final = re.compile("image|audio|video|file")
Message = dict[str, Any]


class _RejectedError(Exception):
    """A conversation cannot be rendered; the message is the reason."""


class _Generation(jinja2.ext.Extension):
    """The tag `{% generation %}`, which marks the text of the assistant."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.blocks: list[str] | None = None
        """Text so far; None: spans are not recorded."""
        self.spans: list[tuple[int, int]] = []

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """Parse the block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_record")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _record(self, caller: jinja2.runtime.Macro) -> str:
        text: str = caller()
        if self.blocks is not None:
            start = sum(map(len, self.blocks))
            self.spans.append((start, start + len(text)))
        return text


class _Dict:
    """The global `dict` without the attributes of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """The global `namespace` without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, values = args[0], dict(*args[1:], **kwargs)
        for name in values:
            _require_public(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _require_public(name)
        super().__setitem__(name, value)


def _require_public(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"the name {name!r} of a namespace begins with an underscore")


def _environment(now: str) -> ImmutableSandboxedEnvironment:
    """Return the environment of transformers. `now`: ISO time of `strftime_now`, which does not change during a run."""

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {
        "raise_exception": raise_exception,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    if now:
        environment.globals["strftime_now"] = datetime.fromisoformat(now).strftime
    return environment


class Renderer:
    """Renders conversations with the templates of one tokenizer."""

    def __init__(
        self, *, sources: Mapping[str, str], variables: Mapping[str, Any], now: str, seconds: float
    ) -> None:
        """Compile the templates.

        Args:
            sources: templates by name: `default`, and perhaps `tool_use`, for conversations with tools.
            variables: special tokens by role.
            now: ISO time of `strftime_now`; empty: no template calls it.
            seconds: CPU time in which a template must compile, and render a conversation once.
        """
        self._sources = sources
        self._variables = variables
        self._seconds = seconds
        self._environment = _environment(now)
        with _limited(seconds):
            self._templates = {
                name: self._environment.from_string(source) for name, source in sources.items()
            }

    def segments(self, request: Mapping[str, Any]) -> list[tuple[str, bool]]:
        """Return the parts of the text of a conversation, each with True if it is the text of the assistant.

        `request`: `messages`, and if the row has them `tools`, `documents` and `variables`; `is_prompt`: the text ends with
        the prompt for an answer.
        """
        name = "tool_use" if request.get("tools") is not None and "tool_use" in self._templates else "default"
        template = self._templates[name]
        messages, whole = self._readable(template, request)
        if re.search(r"\{%-?\s*generation\s*-?%\}", self._sources[name]):
            spans = self._marked(template, messages, request)
        else:
            spans = self._answers(template, messages, request, whole)
        segments, end = [], 0
        for start, stop in spans:
            segments += [(whole[end:start], False), (whole[start:stop], True)]
            end = stop
        return [(text, has_loss) for text, has_loss in [*segments, (whole[end:], False)] if text]

    def _readable(self, template: jinja2.Template, request: Mapping[str, Any]) -> tuple[list[Message], str]:
        """Return the messages as the template reads them, and the text.

        A list of text parts is joined if the template reads only strings: it fails, or writes the list as Python does.
        """
        messages = _with_reasoning(request["messages"])
        parts = [message["content"] for message in messages if isinstance(message.get("content"), list)]
        is_prompt = request.get("is_prompt", False)
        if not parts:
            return messages, self._render(template, messages, request, is_prompt=is_prompt)
        _require_text_parts(parts)
        joined = [message | {"content": _joined(message.get("content"))} for message in messages]
        try:
            text = self._render(template, messages, request, is_prompt=is_prompt)
        except Exception:  # noqa: BLE001 - any failure may be that of a list; another one is raised again below
            return joined, self._render(template, joined, request, is_prompt=is_prompt)
        if any(str(part) in text for part in parts):
            return joined, self._render(template, joined, request, is_prompt=is_prompt)
        return messages, text

    def _marked(
        self, template: jinja2.Template, messages: Sequence[Message], request: Mapping[str, Any]
    ) -> list[tuple[int, int]]:
        """Return the spans that the template marks with `{% generation %}`."""
        tracker = self._environment.extensions[_Generation.identifier]
        assert isinstance(tracker, _Generation)
        tracker.blocks, tracker.spans = [], []
        try:
            with _limited(self._seconds):
                tracker.blocks += template.generate(self._context(messages, request, is_prompt=False))
        finally:
            tracker.blocks = None
        return tracker.spans

    def _answers(
        self, template: jinja2.Template, messages: Sequence[Message], request: Mapping[str, Any], whole: str
    ) -> list[tuple[int, int]]:
        """Return the spans of answers: the text that the conversation up to an answer has, and the prompt for it has not."""

        def end_of(count: int, *, is_prompt: bool) -> int:
            """Return the end of the first messages in the text."""
            text = self._render(template, messages[:count], request, is_prompt=is_prompt)
            if not whole.startswith(text):  # some templates write the end token once, after the last message
                text = text.removesuffix(self._variables.get("eos_token") or "")
            if not whole.startswith(text):
                raise _RejectedError(
                    f"it changes the text before message {count + 1} when that is added; mark answers with"
                    " {% generation %} and {% endgeneration %}"
                )
            return len(text)

        spans: list[tuple[int, int]] = []
        for number, message in enumerate(messages):
            if message.get("role") == "assistant":
                # There is no prompt without messages: a conversation that begins with an answer is one from its start.
                start = end_of(number, is_prompt=True) if number else 0
                spans.append((start, max(start, end_of(number + 1, is_prompt=False))))
        return spans

    def _render(
        self,
        template: jinja2.Template,
        messages: Sequence[Message],
        request: Mapping[str, Any],
        *,
        is_prompt: bool = False,
    ) -> str:
        with _limited(self._seconds):
            text = template.render(self._context(messages, request, is_prompt=is_prompt))
        if len(text) > TEXT_CHARACTERS:
            raise _RejectedError(f"the text has {len(text):,} characters, more than {TEXT_CHARACTERS:,}")
        return text

    def _context(
        self, messages: Sequence[Message], request: Mapping[str, Any], *, is_prompt: bool
    ) -> dict[str, Any]:
        random.seed(0)  # the filter `random` must not depend on the process
        return {
            **self._variables,
            **request.get("variables", {}),
            "messages": messages,
            "tools": request.get("tools"),
            "documents": request.get("documents"),
            "add_generation_prompt": is_prompt,
        }


def _with_reasoning(messages: Sequence[Message]) -> list[Message]:
    """Return the messages without null, each with its reasoning under the names that templates read."""
    found = []
    for given in messages:
        message = {key: value for key, value in given.items() if value is not None}
        reasoning = next((message[name] for name in _REASONING if name in message), None)
        if reasoning is not None:
            message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
        found.append(message)
    return found


def _require_text_parts(contents: Sequence[Sequence[Any]]) -> None:
    for part in (part for content in contents for part in content):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and _MEDIA.search(kind):
            raise _RejectedError(f"a message has a part of type {kind!r}, and only text is read")


def _joined(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    texts = [part if isinstance(part, str) else part.get("text") for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise _RejectedError("a message has a part without text, and the template reads strings")
    return "".join(texts)


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """End this process by SIGPROF if the block takes more CPU time than this."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _reason(error: Exception) -> str:
    """Return what failed, with the line of the template."""
    trace, line = error.__traceback__, getattr(error, "lineno", None)
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    text = str(error) or type(error).__name__
    if isinstance(error, MemoryError):
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        text = f"needs more memory than {limit >> 20:,} MiB"
    elif not isinstance(error, jinja2.TemplateError | _RejectedError):
        text = f"{type(error).__name__}: {text}"
    return f"{f'line {line}: ' if line else ''}{text[:500]}"


def main() -> None:
    """Answer each line of JSON with one: the first has limits and templates, each further one a conversation."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, and with it the input
    renderer = None
    for line in sys.stdin.buffer:
        try:
            request = json.loads(line)
            if renderer is None:
                memory_bytes = request.pop("memory_bytes")
                resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
                renderer = Renderer(**request)
                text = "{}"
            else:
                text = json.dumps({"segments": renderer.segments(request)})
        except Exception as error:  # noqa: BLE001 - a template may raise anything; the parent reports it
            text = json.dumps({"error": _reason(error)})
        print(text, flush=True)


if __name__ == "__main__":
    main()
