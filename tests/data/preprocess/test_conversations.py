"""Conversations: the text of each prompt format, loss on the assistant's text only, and errors that name the line."""

from __future__ import annotations

import json

import pytest
from preprocessing import NULL, content_of, run

from megatrain.data.indexed.reader import IndexedDataset, loss_mask_of
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


def segments_of(row, prompt_format, **options):
    settings = ConversationSettings(key="messages", prompt_format=prompt_format, **options)
    return [tuple(segment) for segment in make_formatter(settings)(row)]


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
        ("<SPECIAL_11>Assistant\n", False),
        ("Hi.\n<SPECIAL_12>\n", True),
        ("<SPECIAL_11>User\nBye\n", False),
        ("<SPECIAL_11>Assistant\n", False),
        ("Bye.\n<SPECIAL_12>\n", True),
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
    template = {"chat_template": CHATML} if prompt_format == "default" else {}
    assert segments_of(messages(*TALK), prompt_format, **template) == EXPECTED[prompt_format]


def test_a_template_cannot_run_code():
    template = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(InvalidDocumentError, match="rejected by the chat template"):
        segments_of(messages(*TALK), "default", chat_template=template)


def test_a_template_that_changes_earlier_text_is_refused():
    template = "{{ messages | length }}" + CHATML
    with pytest.raises(InvalidDocumentError, match="changes the text before message 3"):
        segments_of(messages(*TALK), "default", chat_template=template)


ROWS = {
    '{"text": "1"}': "key 'messages' has no list of messages; the keys are 'text'",
    '{"messages": [{"role": "user"}]}': "message 1 has no role and content that are strings",
    '{"messages": [{"role": "user", "content": "1"}]}': "the conversation has no text of the assistant",
    '{"messages": [{"role": "assistant", "content": "x"}]}': "rejected by the tokenizer",
}


@pytest.mark.parametrize("row", ROWS)
def test_a_line_without_a_conversation_is_a_bad_line(tmp_path, capsys, row):
    (tmp_path / "in.jsonl").write_text(row + "\n")
    flags = ["--input", tmp_path / "in.jsonl", "--sft", "--sft-tokenizer-prompt-format", "identity", *NULL]
    assert run(*flags, prefix=tmp_path / "out") == 2
    assert f"in.jsonl:1: {ROWS[row]}" in capsys.readouterr().err


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
    flags = ["--input", source, "--sft", "--sft-tokenizer-prompt-format", "identity", "--append-eod", *NULL]
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
    assert "the chat template is not valid" in capsys.readouterr().err
    template.write_text("{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}")
    assert run("--input", source, *NULL, *default, "--chat-template", template, prefix=tmp_path / "out") == 0
    (tmp_path / "in.txt").write_text("1")
    assert run("--input", tmp_path / "in.txt", *NULL, "--sft", prefix=tmp_path / "out") == 2
    assert "--sft reads conversations" in capsys.readouterr().err
