"""Conversations: the text of each prompt format, loss on the assistant's text only, and errors that name the line."""

from __future__ import annotations

import json

import pytest
from preprocessing import NULL, content_of, run

from megatrain.data.indexed.reader import IndexedDataset, loss_mask_of
from megatrain.data.preprocess.chat_template import TemplateSettings
from megatrain.data.preprocess.conversations import ConversationSettings, make_formatter
from megatrain.data.preprocess.documents import InvalidDocumentError

pytestmark = pytest.mark.usefixtures("without_fsync")

TALK = [
    ("system", " Be brief. "),
    ("user", "Hello /think"),
    ("assistant", " Hi. "),
    ("user", "Bye"),
    ("assistant", "Bye."),
]
CHATML = """{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\n' }}
{%- endif -%}"""


def messages(*pairs):
    return {"messages": [{"role": role, "content": content} for role, content in pairs]}


def segments_of(row, prompt_format, source=None):
    """Return the segments of each conversation of a row."""
    sources = (("default", source),)
    template = (
        TemplateSettings(file="f.jinja", sources=sources, special_tokens=(), now="") if source else None
    )
    settings = ConversationSettings(key="messages", prompt_format=prompt_format, template=template)
    return [[tuple(segment)[:2] for segment in one.segments] for one in make_formatter(settings)(row)]


EXPECTED = {
    "nemotron-h-aligned": [
        ("<SPECIAL_10>System\nBe brief.\n", False),
        ("<SPECIAL_11>User\nHello /think\n<SPECIAL_11>Assistant\n", False),
        ("Hi.\n", True),
        ("<SPECIAL_11>User\nBye\n<SPECIAL_11>Assistant\n", False),
        ("Bye.\n", True),
    ],
    "nemotron-nano-v2": [
        ("<SPECIAL_10>System\nBe brief.\n", False),
        ("<SPECIAL_11>User\nHello\n", False),
        ("<SPECIAL_11>Assistant\nHi.\n<SPECIAL_12>\n", True),
        ("<SPECIAL_11>User\nBye\n", False),
        ("<SPECIAL_11>Assistant\nBye.\n<SPECIAL_12>\n", True),
    ],
    "identity": [(content, role == "assistant") for role, content in TALK],
    "default": [
        (
            "<|im_start|>system\n Be brief. <|im_end|>\n<|im_start|>user\nHello /think<|im_end|>\n<|im_start|>assistant\n",
            False,
        ),
        (" Hi. <|im_end|>\n", True),
        ("<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n", False),
        ("Bye.<|im_end|>\n", True),
    ],
}


@pytest.mark.parametrize("prompt_format", EXPECTED)
def test_only_the_text_of_the_assistant_has_loss(prompt_format):
    source = CHATML if prompt_format == "default" else None
    assert segments_of(messages(*TALK), prompt_format, source) == [EXPECTED[prompt_format]]


def test_a_system_message_begins_a_new_conversation():
    turns = [("user", "1"), ("assistant", "2"), ("system", "3"), ("assistant", "4")]
    expected = [[("1", False), ("2", True)], [("3", False), ("4", True)]]
    assert segments_of(messages(*turns), "identity") == expected
    with pytest.raises(InvalidDocumentError, match="conversation 1 of 2 has no text of the assistant"):
        segments_of(messages(("user", "1"), *turns[2:]), "identity")


PARTS = [{"type": "text", "text": "4"}, "2"]
SAME = {
    "ShareGPT": {
        "conversations": [{"from": "human", "value": "1"}, {"from": "gpt", "value": "42"}],
        "system": "s",
    },
    "parts": {
        "messages": [
            {"role": "system", "content": ["s"]},
            {"role": "user", "content": "1", "tool_calls": None},
            {"role": "assistant", "content": PARTS, "tool_calls": []},
        ]
    },
}


@pytest.mark.parametrize("name", SAME)
@pytest.mark.parametrize("prompt_format", EXPECTED)
def test_other_names_and_parts_are_read(name, prompt_format):
    source = CHATML if prompt_format == "default" else None
    row = messages(("system", "s"), ("user", "1"), ("assistant", "42"))
    assert segments_of(SAME[name], prompt_format, source) == segments_of(row, prompt_format, source)


CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
LEFT_OUT = {
    "tool_calls": {"messages": [CALL]},
    "reasoning_content": {"messages": [{"role": "assistant", "content": "1", "reasoning_content": "2"}]},
    "tools": {"messages": [{"role": "assistant", "content": "1"}], "tools": [{"name": "f"}]},
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_a_format_does_not_write_is_an_error(name):
    with pytest.raises(InvalidDocumentError, match=f"identity does not write {name}"):
        segments_of(LEFT_OUT[name], "identity")


ROWS = {
    '{"text": "1"}': "key 'messages' has no list of messages; the keys are 'text'",
    '{"messages": [{"role": "user"}]}': "message 1 has no content",
    '{"messages": [{"content": "1"}]}': "message 1 has no role that is a string",
    '{"messages": [{"role": "user", "content": 1}]}': "the content of message 1 is not a string, a list of parts",
    '{"messages": [{"role": "user", "content": [{"type": "image"}]}]}': "a message has a part of type image",
    '{"messages": [{"role": "assistant", "content": "\\ud800"}]}': "the conversation contains half of a surrogate",
    '{"conversations": []}': "key 'conversations' is an empty list, not a list of messages",
    '{"messages": "hello"}': "key 'messages' is a string, not a list of messages",
    '{"text": "hello"}': "key 'messages' has no list of messages; the keys are 'text'",
    '{"messages": [{"role": "user", "content": "1"}]}': "the conversation has no text of the assistant",
    '{"messages": [{"role": "assistant", "content": "x"}]}': "rejected by the tokenizer",
}


@pytest.mark.parametrize("row", ROWS)
def test_a_line_without_a_conversation_is_a_bad_line(tmp_path, capsys, row):
    (tmp_path / "in.jsonl").write_text(row + "\n")
    flags = ["--input", tmp_path / "in.jsonl", "--sft", "--sft-tokenizer-prompt-format", "identity", *NULL]
    assert run(*flags, prefix=tmp_path / "out") == 2
    assert f"in.jsonl:1: {ROWS[row]}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("row", "fix"),
    [
        ({"prompt": "1", "completion": "2"}, 'write rows as {"messages": [{"role": "user"'),
        ({"chat": [{"role": "assistant", "content": "1"}]}, "name the key of the messages with --json-keys (chat)"),
    ],
)  # fmt: skip
def test_a_row_without_messages_is_answered_with_their_key_or_their_form(row, fix):
    with pytest.raises(InvalidDocumentError) as caught:
        segments_of(row, "identity")
    assert caught.value.fix.startswith(fix)


def write(path, count=40):
    rows = [
        messages(("user", f"{number} 1"), ("assistant", f"{number % 98} " * (number % 5 + 1)), ("user", "2"))
        for number in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("workers", [0, 2])
def test_tokens_and_loss_mask_have_the_same_sequences(tmp_path, workers):
    source = write(tmp_path / "in.jsonl")
    flags = ["--input", source, "--sft", "--sft-tokenizer-prompt-format", "identity", *NULL]
    whole = tmp_path / "whole"
    whole.mkdir()
    assert run(*flags, prefix=whole / "out") == 0
    tokens = IndexedDataset(whole / "out_messages_document")
    mask = IndexedDataset(loss_mask_of(str(whole / "out_messages_document")))
    assert (len(tokens), mask.dtype.name) == (40, "uint8")
    assert tokens.read(7).tolist() == [7, 1, 7, 7, 7, 2, 99]
    assert mask.read(7).tolist() == [0, 0, 1, 1, 1, 0, 0]
    assert (tokens.lengths == mask.lengths).all()
    if workers:
        from megatrain.data.preprocess.workers import Workers

        split = tmp_path / "split"
        split.mkdir()
        options = {"workers_type": Workers, "chunk_bytes": 300}
        assert run(*flags, "--workers", workers, prefix=split / "out", **options) == 0
        assert content_of(split) == content_of(whole)


def test_flags_of_conversations_are_checked(tmp_path, capsys):
    source = write(tmp_path / "in.jsonl")
    assert run("--input", source, *NULL, "--chat-template", "x", prefix=tmp_path / "out") == 2
    assert "--chat-template has no meaning without --sft" in capsys.readouterr().err
    default = ["--sft", "--sft-tokenizer-prompt-format", "default"]
    assert run("--input", source, *NULL, *default, prefix=tmp_path / "out") == 2
    assert "has no chat template" in capsys.readouterr().err
    template = tmp_path / "template.jinja"
    template.write_text("{% if %}")
    assert run("--input", source, *NULL, *default, "--chat-template", template, prefix=tmp_path / "out") == 2
    assert f"{template}: the chat template is not valid: line 1" in capsys.readouterr().err
    template.write_text("{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}")
    assert run("--input", source, *NULL, *default, "--chat-template", template, prefix=tmp_path / "out") == 0
    (tmp_path / "in.txt").write_text("1")
    assert run("--input", tmp_path / "in.txt", *NULL, "--sft", prefix=tmp_path / "out") == 2
    assert "--sft reads conversations" in capsys.readouterr().err


def test_a_line_may_hold_several_conversations(tmp_path, capsys):
    """Each is a sequence, and ends with the end-of-document token unless it has it."""
    rows = [
        messages(("assistant", "1"), ("system", "2"), ("assistant", "3 99")),
        messages(("assistant", "4"), ("user", "5")),
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = ["--input", tmp_path / "in.jsonl", "--sft", "--sft-tokenizer-prompt-format", "identity", *NULL]
    assert run(*flags, "--append-eod", prefix=tmp_path / "out") == 0
    assert "--append-eod has no effect" in capsys.readouterr().err
    tokens = IndexedDataset(tmp_path / "out_messages_document")
    mask = IndexedDataset(loss_mask_of(tokens.prefix))
    assert [tokens.read(k).tolist() for k in range(3)] == [[1, 99], [2, 3, 99], [4, 5, 99]]
    assert [mask.read(k).tolist() for k in range(3)] == [[1, 1], [0, 1, 1], [1, 0, 0]]
    for dataset in (tokens, mask):
        assert dataset.document_boundaries.tolist() == [0, 2, 3]
    assert json.loads((tmp_path / "out_messages_document.json").read_text())["append_eod"] is True


def test_words_that_the_tokenizer_lacks_are_named(tmp_path, capsys, golden):
    (tmp_path / "in.jsonl").write_text(json.dumps(messages(*TALK)))
    flags = ["--input", tmp_path / "in.jsonl", "--sft", "--tokenizer-model", golden / "tokenizer.json"]
    assert run(*flags, prefix=tmp_path / "out") == 0
    assert "the tokenizer has no token <|im_start|>, <|im_end|>, which" in capsys.readouterr().err
    assert run(*flags, "--sft-tokenizer-prompt-format", "nemotron-h-aligned", prefix=tmp_path / "out") == 0
    assert "the tokenizer has no token <SPECIAL_10>, <SPECIAL_11>, which" in capsys.readouterr().err
    (tmp_path / "t.jinja").write_text(CHATML)
    flags += ["--sft-tokenizer-prompt-format", "default", "--chat-template", tmp_path / "t.jinja"]
    assert run(*flags, prefix=tmp_path / "out") == 0
    assert "the tokenizer has no token <|im_start|>, <|im_end|>, which" in capsys.readouterr().err


def test_tables_are_read_as_lines(tmp_path, golden, capsys):
    """A table fills absent keys with null, which the template would write."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [
        {**messages(("user", "1"), ("assistant", "2")), "tools": [{"name": "f", "parameters": {"x": 1}}]},
        {"messages": [{"role": "user", "content": "3"}, CALL], "tools": [{"name": "g"}]},
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "in.parquet")
    (tmp_path / "t.jinja").write_text(
        "{% generation %}{{ messages | tojson + tools | tojson }}{% endgeneration %}"
    )
    flags = ["--sft", "--sft-tokenizer-prompt-format", "default", "--chat-template", tmp_path / "t.jinja"]
    flags += ["--tokenizer-model", golden / "tokenizer.json"]
    for suffix in ("jsonl", "parquet"):
        assert run("--input", tmp_path / f"in.{suffix}", *flags, prefix=tmp_path / suffix) == 0
    for end in ("", "_loss_mask"):
        jsonl, table = (tmp_path / f"{kind}_messages_document{end}.bin" for kind in ("jsonl", "parquet"))
        assert jsonl.read_bytes() == table.read_bytes()
    capsys.readouterr()
    for key, problem in {"other": "has no column 'other'", "tools": "message 1 has no role"}.items():
        assert (
            run("--input", tmp_path / "in.parquet", *flags, "--json-keys", key, prefix=tmp_path / "out") == 2
        )
        assert problem in capsys.readouterr().err
    parquet.write_table(arrow.table({"messages": ["text"]}), tmp_path / "text.parquet")
    assert run("--input", tmp_path / "text.parquet", *flags, prefix=tmp_path / "out") == 2
    assert "column 'messages' has type string, not lists of messages" in capsys.readouterr().err
