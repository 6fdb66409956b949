"""Chat templates: the text that transformers makes, loss on answers, and limits that end any template with an error."""

from __future__ import annotations

import json
import time
from datetime import datetime

import pytest
from preprocessing import run
from tokenizers import Tokenizer, models, pre_tokenizers

from megatrain.config.errors import ConfigError, InputError
from megatrain.config.schema.tokenizer import TokenizerConfig
from megatrain.data.preprocess import chat_template as module
from megatrain.data.preprocess.chat_template import load_template
from megatrain.data.preprocess.conversations import ConversationSettings, built_in_template, make_formatter
from megatrain.data.preprocess.documents import InvalidDocumentError

pytestmark = pytest.mark.usefixtures("without_fsync")

CHATML = """{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
TEMPLATES = {
    "strings": "{{ bos_token }}" + CHATML,
    "tools": """{%- if tools %}
    {{- '<|im_start|>system\n<tools>' }}
    {%- for tool in tools %}
        {{- '\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '</tools> as <tool_call>{"name": <name>}</tool_call><|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' ~ message.role ~ '\n' }}
    {%- if message.content is string %}{{ message.content | trim }}
    {%- elif message.content is iterable %}
        {%- for part in message.content %}{{ part.text if part is mapping else part }}|{% endfor %}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>' + call.function | tojson(indent=2) + '</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}""",
    "tojson": """{{ {'b': 'ü<&>\\'', 'a': messages | length > 0} | tojson(sort_keys=true, separators=(',', ':')) }}
{{ 'é' | tojson(ensure_ascii=true) }} {{ 'é' | tojson }} {{ [1, [2]] | tojson(indent=1) }}
{%- for m in messages %}{{ m | tojson }}{% endfor %}""",
    "documents": """{%- for document in documents or [] %}[{{ loop.index }}: {{ document['title'] }} {{ document.text }}]
{% endfor %}{% for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}""",
    "undefined": "{{ documents is none }} {{ tools is none }} {{ messages[0].x is defined }}{{ other | default('d') }}"
    + CHATML,
    "generation": """{% for m in messages %}{% if m.role == 'assistant' %}A: {% generation %}{{ m.content }}{{ eos_token }}
{% endgeneration %}{% else %}{{ m.role }}: {{ m.content }}
{% endif %}{% endfor %}{{ messages | length }}""",
    "break and continue": """{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content }}
{% for c in 'abc' %}{% if c == 'b' %}{% break %}{% endif %}{{ c }}{% endfor %}{% endfor %}""",
    "time": "{{ strftime_now('%d %b %Y') }} {{ strftime_now(format='%Y') }}" + CHATML,
    "alternating": """{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate: ' + m.role) }}{% endif %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]
{%- else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}""",
    "end token last": """{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% else %}{{ eos_token }}{% endif %}""",
    "namespace": """{% set ns = namespace(n=0, last='') %}{% set names = dict(user='U', assistant='A') %}
{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f(pad_token) }}{{ dict.fromkeys(['a'], 1) }}
{% for m in messages %}{% set ns.n = ns.n + 1 %}{% set ns.last = m.role %}{{ names.get(m.role, '?') }}{{ ns.n }}{{ m.content }}
{% endfor %}""",
    "private names": "{% set ns = namespace(_a=1) %}{{ ns._a }}",
    "reasoning": """{% for m in messages %}{{ m.role }}{% if m.reasoning_content is defined %}<think>{{ m.reasoning_content }}</think>
{%- endif %}{{ m.thinking }}|{{ m.content }};{% endfor %}""",
    "variables": "{{ enable_thinking | default(true) }} {{ image_token }} {{ audio_token }} {{ unk_token }} {{ cls_token is defined }}"
    + CHATML,
    "white space": """
    {% if true %}
    a
    {% endif %}
  {% for m in messages %}
    {{ m.content }}   {#- c #}
  {% endfor %}

""",
    "a list as Python writes it": "{% for m in messages %}{{ m.content }}{% endfor %}",
    "unsafe": "{{ messages.__class__.__mro__ }}",
    "changes a list": "{% set _ = messages.append(1) %}",
    "not defined": "{{ messages[0].content.x.y }}",
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "wetter", "description": 'für <city> & "more"', "parameters": {"a": None}},
    }
]
CALLS = [{"type": "function", "function": {"name": "wetter", "arguments": {"city": "Zürich", "b": "<b>'"}}}]
ROWS = {
    "short": [("user", "hi"), ("assistant", "hello")],
    "two turns": [
        ("user", " a "),
        ("assistant", "<tool_call>é & <b>"),
        ("user", "中文 😀"),
        ("assistant", "日本\n"),
    ],
    "system": [("system", "s's"), ("user", "u"), ("assistant", "a")],
    "begins with an answer": [("assistant", "a"), ("user", "u"), ("assistant", "b")],
    "ends with a question": [("user", "u"), ("assistant", "a"), ("user", "v")],
}
FULL_ROWS = {name: {"messages": [{"role": r, "content": c} for r, c in talk]} for name, talk in ROWS.items()} | {
    "tool calls": {
        "tools": TOOLS,
        "messages": [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": None, "tool_calls": CALLS},
            {"role": "tool", "content": '{"t": 3}', "name": "wetter"},
            {"role": "assistant", "content": "3", "tool_calls": None},
        ],
    },
    "tools as text": {"tools": json.dumps(TOOLS), "documents": None, "messages": [
        {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}
    ]},
    "no tools": {"tools": [], "documents": [{"title": "T<", "text": "x"}], "messages": [
        {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}
    ]},
    "parts": {"messages": [
        {"role": "user", "content": [{"type": "text", "text": "it's"}, {"type": "text", "text": "2"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "ok"}]},
    ]},
    "reasoning": {"chat_template_kwargs": {"enable_thinking": False}, "messages": [
        {"role": "user", "content": "u"}, {"role": "assistant", "content": "a", "reasoning": "r"},
        {"role": "user", "content": "u"}, {"role": "assistant", "content": "a", "thinking": "t"},
    ]},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer with special tokens of its own roles."""
    folder = tmp_path_factory.mktemp("tokenizer")
    words = ["<unk>", "<s>", "</s>", "<pad>", "<image>", "<audio>"]
    tokenizer = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    roles = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    extra = {"image_token": "<image>", "extra_special_tokens": {"audio_token": "<audio>"}}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **roles, **extra}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def oracle(folder):
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)


def formatter(folder, source, tmp_path):
    (tmp_path / "t.jinja").write_text(source)
    tokenizer = TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder))
    template = load_template(tokenizer, str(tmp_path / "t.jinja"))
    return make_formatter(ConversationSettings(key="messages", prompt_format="default", template=template))


def outcome(call, *arguments):
    """Return what a call returns; None: it fails."""
    try:
        return call(*arguments)
    except Exception:  # noqa: BLE001 - transformers and templates raise anything
        return None


def text_of_transformers(oracle, source, row):
    tools = json.loads(row["tools"]) if isinstance(row.get("tools"), str) else row.get("tools")
    variables = row.get("chat_template_kwargs", {})
    options = {"tools": tools, "documents": row.get("documents"), **variables}
    return oracle.apply_chat_template(row["messages"], chat_template=source, tokenize=False, **options)


def joined(row):
    """Return a row whose lists of parts are strings."""
    texts = [
        {**one, "content": "".join(part["text"] for part in one["content"])}
        if isinstance(one.get("content"), list)
        else one
        for one in row["messages"]
    ]
    return row | {"messages": texts}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_text_of_a_conversation_is_that_of_transformers(folder, oracle, tmp_path, name):
    """A template that reads strings gets strings, where transformers fails or writes a list as Python does."""
    source = TEMPLATES[name]
    conversations = formatter(folder, source, tmp_path)
    for row_name, row in FULL_ROWS.items():
        expected = outcome(text_of_transformers, oracle, source, row)
        if row_name == "parts" and (expected is None or "'type'" in expected):
            expected = outcome(text_of_transformers, oracle, source, joined(row))
        if expected is None:
            with pytest.raises(
                InvalidDocumentError, match=r"rejected by the chat template .*t\.jinja: line \d"
            ):
                conversations(row)
            continue
        # A later system message begins another conversation.
        (found,) = conversations(row)
        assert "".join(segment.text for segment in found.segments) == expected, row_name


@pytest.mark.parametrize("name", ["chatml", "nemotron-h-aligned", "nemotron-nano-v2", "identity"])
def test_a_built_in_format_is_its_template(oracle, name):
    texts = [
        ("system", " Be brief. "),
        ("user", "Hi /think '\\n"),
        ("assistant", " yes/think\n"),
        ("user", "so\n"),
    ]
    row = {"messages": [{"role": role, "content": text} for role, text in texts]}
    (found,) = make_formatter(ConversationSettings(key="messages", prompt_format=name))(row)
    text = text_of_transformers(oracle, built_in_template(name), row)
    assert "".join(segment.text for segment in found.segments) == text
    row["messages"][0]["role"] = "developer"
    if name != "identity":  # a message that is left out would be an answer to another question
        with pytest.raises(Exception, match="no role developer, only system, user, assistant"):
            text_of_transformers(oracle, built_in_template(name), row)


def test_templates_are_named_as_in_transformers(folder, oracle, tmp_path):
    """A template for tools is used for rows with tools; files come before tokenizer_config.json."""
    texts = {"default": CHATML, "tool_use": "{{ tools | length }} tools" + CHATML}
    for place in ("config", "files"):
        copy = tmp_path / place
        copy.mkdir()
        for file in folder.iterdir():
            (copy / file.name).write_bytes(file.read_bytes())
        config = json.loads((copy / "tokenizer_config.json").read_text())
        config["chat_template"] = [{"name": name, "template": text} for name, text in texts.items()]
        if place == "files":
            config["chat_template"] = "not used"
            (copy / "additional_chat_templates").mkdir()
            (copy / "chat_template.jinja").write_text(texts["default"])
            (copy / "additional_chat_templates" / "tool_use.jinja").write_text(texts["tool_use"])
        (copy / "tokenizer_config.json").write_text(json.dumps(config))
        tokenizer = TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(copy))
        template = load_template(tokenizer, None)
        conversations = make_formatter(
            ConversationSettings(key="messages", prompt_format="default", template=template)
        )
        theirs = type(oracle).from_pretrained(copy)
        for row in (FULL_ROWS["short"], FULL_ROWS["short"] | {"tools": TOOLS}):
            (found,) = conversations(row)
            expected = text_of_transformers(theirs, None, row)
            assert "".join(segment.text for segment in found.segments) == expected


@pytest.mark.parametrize("row", ["short", "two turns", "begins with an answer", "ends with a question"])
def test_marked_answers_have_loss(folder, oracle, tmp_path, row):
    source = TEMPLATES["generation"]
    (found,) = formatter(folder, source, tmp_path)(FULL_ROWS[row])
    render = pytest.importorskip("transformers.utils.chat_template_utils").render_jinja_template
    options = {"return_assistant_tokens_mask": True, **oracle.special_tokens_map}
    (text,), (spans,) = render([FULL_ROWS[row]["messages"]], chat_template=source, **options)
    answers = [segment.text for segment in found.segments if segment.has_loss]
    assert answers == [text[start:end] for start, end in spans]


def test_an_end_token_after_the_last_message_belongs_to_the_last_answer(folder, tmp_path):
    (found,) = formatter(folder, TEMPLATES["end token last"], tmp_path)(FULL_ROWS["two turns"])
    expected = ["<tool_call>é & <b><|end|>", "日本\n<|end|></s>"]
    assert [segment.text for segment in found.segments if segment.has_loss] == expected


HOSTILE = {
    "division": "{{ 1/0 }}",
    "digits": "{{ (10**5000)|string }}",
    "power": "{{ 10**(10**9) }}",
    "power of a variable": "{{ (messages|length + 8)**(10**9) }}",
    "recursion": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "nested parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "long output": "{% for i in range(99999) %}{% for j in range(9999) %}xxxxxxxxx{% endfor %}{% endfor %}",
    "product": "{{ 'x' * 10**10 }}",
    "product of a variable": "{{ messages[0].content * 10**10 }}",
    "list": "{{ [1] * 10**10 }}",
    "center": "{{ 'x'|center(10**10) }}",
    "ljust": "{{ 'x'.ljust(10**10) }}",
    "format": "{{ '%10000000000d' % 1 }}",
    "format of str": "{{ '{:10000000000}'.format(1) }}",
    "tojson": "{{ messages|tojson(indent=10**10) }}",
    "range": "{{ range(10**9)|list }}",
    "growth": "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "lorem ipsum": "{{ lipsum(n=10**8) }}",
    "globals": "{{ cycler.__init__.__globals__ }}",
    "generation": "{% generation %}{{ 1/0 }}{% endgeneration %}",
    "include": "{% include '/etc/passwd' %}",
    "no end": "{% for m in messages %}",
    "break outside": "{% break %}",
    "no filter": "{{ 1|unknown }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_template_ends_with_an_error_that_names_its_file(folder, tmp_path, monkeypatch, name):
    monkeypatch.setattr(module, "RENDER_SECONDS", 0.3)
    monkeypatch.setattr(module, "MEMORY_BYTES", 1 << 28)
    start = time.monotonic()
    with pytest.raises((InvalidDocumentError, InputError), match=r"t\.jinja: ") as caught:
        formatter(folder, HOSTILE[name], tmp_path)(FULL_ROWS["short"])
    assert len(str(caught.value)) < 1000
    assert time.monotonic() - start < 60


def test_a_failure_of_a_template_is_a_bad_line(folder, tmp_path, capsys, monkeypatch):
    """The process that was ended is replaced: other lines are read."""
    monkeypatch.setattr(module, "RENDER_SECONDS", 0.5)
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    (tmp_path / "t.jinja").write_text("{% if messages[0].content == 'hi' %}" + loops + "{% endif %}" + CHATML)
    rows = [FULL_ROWS[name] for name in ("system", "short", "system", "tool calls", "system")]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = ["--input", tmp_path / "in.jsonl", "--sft", "--sft-tokenizer-prompt-format", "default"]
    flags += ["--chat-template", tmp_path / "t.jinja", "--tokenizer-model", folder]
    assert run(*flags, prefix=tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert (
        f"in.jsonl:2: rejected by the chat template {tmp_path}/t.jinja: it takes more than 0.5 seconds"
        in error
    )
    assert "Traceback" not in error
    assert run(*flags, "--on-bad-line", "skip", prefix=tmp_path / "out") == 0
    error = capsys.readouterr().err
    assert (
        f"in.jsonl:4: rejected by the chat template {tmp_path}/t.jinja: line 3: 'dict object' has no" in error
    )
    assert "3 documents, 3 sequences" in error


def test_the_time_of_a_run_does_not_change(folder, tmp_path):
    conversations = formatter(folder, "{{ strftime_now('%Y-%m-%d %H:%M:%S.%f') }}" + CHATML, tmp_path)
    first, second = (conversations(FULL_ROWS["short"])[0].segments[0].text for _ in range(2))
    assert first == second
    assert abs((datetime.now() - datetime.fromisoformat(first[:26])).total_seconds()) < 600  # noqa: DTZ005


def test_a_missing_template_is_an_error(tmp_path):
    tokenizer = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=9)
    with pytest.raises(ConfigError, match="the tokenizer has no chat template"):
        load_template(tokenizer, None)
    with pytest.raises(InputError, match="missing: cannot be read"):
        load_template(tokenizer, str(tmp_path / "missing"))
