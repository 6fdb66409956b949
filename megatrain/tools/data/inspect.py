"""`megatrain data inspect`: the content of a dataset, compared with its description.

.bin, .idx ─> counts ───────┐
.json ─> description ───────┴─> text or JSON; a contradiction is an error
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from typing import Any, Final

from megatrain.config.errors import ConfigError, InputError, Problem
from megatrain.config.schema.tokenizer import TokenizerConfig, is_same_tokenizer
from megatrain.data.indexed.reader import IndexedDataset, read_description
from megatrain.data.preprocess.flags import load_values, tokenizer_settings
from megatrain.data.tokenizers.build import Tokenizer, load_tokenizer
from megatrain.tools.data.counts import Lengths, contents

_SHOWN_IDS: Final = 16


class DisagreementError(InputError):
    """A dataset contradicts its description or the tokenizer."""

    exit_code = 1


def inspect(arguments: argparse.Namespace) -> None:
    """Print everything; then raise DisagreementError if there is a contradiction."""
    dataset = IndexedDataset(arguments.prefix, index_cache=arguments.object_storage_cache_path)
    tokenizer = _tokenizer(arguments)
    number = arguments.document
    if number is not None and not 0 <= number < dataset.num_documents:
        raise ConfigError(
            f"--document {number}: {dataset.prefix} has {dataset.num_documents} documents",
            fix=f"give a number from 0 to {dataset.num_documents - 1}"
            if dataset.num_documents
            else "leave --document out",
        )
    description = read_description(dataset.prefix)
    found = contents(dataset, _end_of_document(description, tokenizer))
    problems = list(_problems(dataset, found, description, tokenizer))
    document = None if number is None else _document(dataset, number, tokenizer)
    if arguments.json:
        print(
            json.dumps(
                found
                | {"description": description, "problems": [problem.text for problem in problems]}
                | ({} if document is None else {"document": document})
            )
        )
    else:
        print(_text(dataset, found, description, agrees=not problems))
        if document is not None:
            print(_document_text(document, tokenizer))
    if problems:
        raise DisagreementError.of(problems)


def printable(text: str) -> str:
    """Indent a text and escape control characters."""
    clean = "".join(c if c in "\n\t" or c.isprintable() else repr(c)[1:-1] for c in text)
    return "\n".join(f"    {line}" for line in clean.split("\n"))


def shown_ids(ids: list[Any]) -> str:
    """Format numbers; of many, only the first and the last."""
    if len(ids) <= 2 * _SHOWN_IDS:
        return " ".join(map(str, ids))
    return " ".join([*map(str, ids[:_SHOWN_IDS]), "..", *map(str, ids[-_SHOWN_IDS:])])


def _tokenizer(arguments: argparse.Namespace) -> Tokenizer | None:
    """Load the tokenizer of the flags; None if there are none."""
    problems: list[Problem] = []
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    values = load_values(tokenizer_settings(), given, problems)
    if problems:
        raise ConfigError.of(problems)
    return load_tokenizer(TokenizerConfig(**values)) if values else None


# ---- comparison of the description with the counts


_DESCRIBED: Final = ("documents", "sequences", "tokens", "largest_id", "bin_crc32", "idx_crc32")


def _end_of_document(description: dict[str, Any] | None, tokenizer: Tokenizer | None) -> int | None:
    """Return the end-of-document id of the given tokenizer, or else of the description."""
    if tokenizer is not None:
        return tokenizer.eod
    eod = (description or {}).get("eod")
    return eod if isinstance(eod, int) else None


def _problems(
    dataset: IndexedDataset,
    found: dict[str, Any],
    description: dict[str, Any] | None,
    tokenizer: Tokenizer | None,
) -> Iterator[Problem]:
    described = description or {}
    for name in (
        *_DESCRIBED,
        *(["eod_count"] if found["tokens"] and described.get("eod") == found["eod"] else []),
    ):
        if described.get(name) is not None and found[name] is not None and described[name] != found[name]:
            yield Problem(
                f"{dataset.prefix}.json: {name} is {described[name]}, but the files contain {found[name]}",
                "copy all three files again, or make the dataset again: they do not belong together, or one is damaged",
            )
    vocab_size = tokenizer.vocab_size if tokenizer is not None else described.get("vocab_size")
    largest, smallest = found["largest_id"], found["smallest_id"]
    if vocab_size is not None and largest is not None and largest >= vocab_size:
        yield Problem(
            f"{dataset.name}: largest_id is {largest}, but vocab_size is {vocab_size}",
            "use the tokenizer that the data was made with, or make the dataset again",
        )
    if smallest is not None and smallest < 0:
        yield Problem(f"{dataset.name}: smallest_id is {smallest}, below 0", "make the dataset again")
    made_with = described.get("tokenizer_fingerprint")
    if tokenizer is not None and made_with and not is_same_tokenizer(made_with, tokenizer.fingerprint):
        yield Problem(
            f"{dataset.prefix}.json: tokenizer_fingerprint is {made_with}, but the fingerprint of the given tokenizer is"
            f" {tokenizer.fingerprint}",
            "give the tokenizer that the data was made with",
        )


# ---- one document


def _document(dataset: IndexedDataset, number: int, tokenizer: Tokenizer | None) -> dict[str, Any]:
    first, end = map(int, dataset.document_boundaries[number : number + 2])
    parts = [dataset.read(sequence).tolist() for sequence in range(first, end)]
    ids = [token for part in parts for token in part]
    is_text = tokenizer is not None and dataset.dtype.kind in "iu"
    text = None
    if tokenizer is not None and is_text and all(0 <= token < tokenizer.vocab_size for token in ids):
        text = tokenizer.decode(ids)
    return {
        "document": number,
        "tokens": len(ids),
        "sequences": [
            {
                "sequence": sequence,
                "mode": None if dataset.modes is None else int(dataset.modes[sequence]),
                "ids": part,
            }
            for sequence, part in zip(range(first, end), parts, strict=True)
        ],
        "text": text,
    }


# ---- text


def _text(
    dataset: IndexedDataset, found: dict[str, Any], description: dict[str, Any] | None, *, agrees: bool
) -> str:
    modes = found["modes"]
    rows = [
        ("elements", found["element_type"]),
        ("documents", f"{found['documents']:,}{_including_empty(found['documents_without_sequences'])}"),
        ("sequences", f"{found['sequences']:,}{_including_empty(found['empty_sequences'])}"),
        ("tokens", f"{found['tokens']:,}"),
        ("bytes", f"{found['bytes']['bin']:,} in .bin, {found['bytes']['idx']:,} in .idx"),
    ]
    if modes is not None:
        rows.append(("modes", ", ".join(f"mode {mode}: {count:,}" for mode, count in modes.items())))
    rows += _id_rows(found)
    rows += _description_rows(dataset, description, agrees=agrees)
    lines = [dataset.prefix, *(f"  {name:<12} {text}" for name, text in rows)]
    lines += ["", _LENGTHS_ROW.format("length", *(field.name for field in dataclasses.fields(Lengths)))]
    of_lengths = {"sequences": found["sequence_lengths"], "documents": found["document_lengths"]}
    if found["sequences"] > found["documents"]:  # such as the sentences of BERT and T5
        of_lengths["per document"] = found["sequences_per_document"]
    for name, lengths in of_lengths.items():
        numbers = (
            ["-"] * 5
            if lengths is None
            else [f"{n:,.1f}" if isinstance(n, float) else f"{n:,}" for n in lengths.values()]
        )
        lines.append(_LENGTHS_ROW.format(name, *numbers))
    return "\n".join(lines)


_LENGTHS_ROW: Final = "  {:<13}{:>9}{:>12}{:>14}{:>12}{:>14}"


def _including_empty(count: int) -> str:
    return f", including {count:,} empty" if count else ""


def _id_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    if found["largest_id"] is None:
        why = ": there are no tokens" if not found["tokens"] else ": elements are not integers"
        return [("ids", f"none{why}")]
    if found["eod"] is None:
        ends = "unknown: give --tokenizer-type and its flags"
    else:
        ends = f"id {found['eod']}, found {found['eod_count']:,} times"
    return [("ids", f"{found['smallest_id']} to {found['largest_id']}"), ("end token", ends)]


def _description_rows(
    dataset: IndexedDataset, description: dict[str, Any] | None, *, agrees: bool
) -> list[tuple[str, str]]:
    if description is None:
        return [("description", f"none: there is no {dataset.prefix}.json")]
    if not {"tokenizer_fingerprint", *_DESCRIBED} & set(description):
        return [("description", f"none: {dataset.prefix}.json is not a description")]
    verdict = "agrees with the files" if agrees else "see the error below"
    rows = [("description", f"{dataset.prefix}.json, {verdict}")]
    if description.get("tokenizer_type"):
        fingerprint = str(description.get("tokenizer_fingerprint"))[:12]
        size = description.get("vocab_size")
        rows.append(
            ("made with", f"{description['tokenizer_type']}, {size} tokens, fingerprint {fingerprint}")
        )
    sources = description.get("sources")
    sources = sources if isinstance(sources, list) else []
    names = [str(source.get("path")) if isinstance(source, dict) else str(source) for source in sources]
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        rows.append(("made from", f"{', '.join(names[:3])}{more}"))
    return rows


def _document_text(document: dict[str, Any], tokenizer: Tokenizer | None) -> str:
    sequences = document["sequences"]
    where = " in one sequence" if len(sequences) == 1 else f" in {len(sequences):,} sequences"
    lines = [f"\ndocument {document['document']}: {document['tokens']:,} tokens{where}"]
    for part in sequences:
        mode = "" if part["mode"] is None else f", mode {part['mode']}"
        lines.append(
            f"  sequence {part['sequence']}{mode}, {len(part['ids']):,} tokens: {shown_ids(part['ids'])}"
        )
    if document["text"] is not None:
        lines += ["  text", printable(document["text"])]
    elif tokenizer is not None:
        lines.append("  no text: some ids are not in the tokenizer")
    else:
        lines.append("  no text: give --tokenizer-type and its flags")
    return "\n".join(lines)
