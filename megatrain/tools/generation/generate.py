"""`megatrain generate`: continue prompts with the model of a checkpoint.

--load ─> model, tokenizer ─> prompts ─> planned cache ─> passes ─> text, as it is sampled; or JSON
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain.config.errors import ConfigError, InputError, Problem
from megatrain.data.images.pixels import require_pillow
from megatrain.data.preprocess.documents import InvalidDocumentError
from megatrain.data.tokenizers.build import Tokenizer
from megatrain.inference.conversations import Conversations
from megatrain.inference.engine import Completion
from megatrain.inference.image_vectors import PromptImages, prompt_images, with_places
from megatrain.inference.sampling import LogProb, Sampling
from megatrain.inference.stored_model import LoadedModel
from megatrain.inference.texts import TextCompletion, TextEngine, encode_prompt
from megatrain.tools.generation.load import Generation, add_model_flags, joined_process, load
from megatrain.tools.subcommands import CommandParser, add_command


@dataclass(frozen=True)
class Prompt:
    """A text to continue, with the files of its images."""

    text: str
    images: tuple[Path, ...] = ()
    messages: tuple[Any, ...] = ()
    """Messages of a conversation; empty: the text is continued."""


_FLAGS = {"num_log_probs": "--log-probs", "stop": "--stop-words"}


def add_flags(commands: Any) -> None:
    """Add `megatrain generate`."""
    parser = add_command(commands, "generate", run)
    add_model_flags(parser)
    _add_prompts(parser)
    _add_sampling(parser)


def _add_prompts(parser: CommandParser) -> None:
    prompts = parser.add_mutually_exclusive_group()
    parser.add("--prompt TEXT ...", "texts to continue", group=prompts)
    parser.add(
        "--prompt-file FILE",
        'file with one prompt a line, as JSON: {"prompt": "..."}, with "images": ["FILE"] in the folder of the file',
        of=Path,
        group=prompts,
    )
    parser.add(
        "--chat",
        'answer each prompt, or the lists of messages in --prompt-file ({"messages": [..]}), in the words of training with'
        " --sft, or by the chat template of the tokenizer; without prompts: a conversation, a line of standard input each",
    )
    parser.add("--system TEXT", "system message of each conversation of --chat")
    parser.add(
        "--image FILE ...",
        "images that stand for each <image> of the --prompt, or before it, for a model that reads images",
        (),
        of=Path,
    )


def _add_sampling(parser: CommandParser) -> None:
    parser.add("--max-new-tokens N", "maximum number of tokens", 64)
    parser.add("--temperature T", "sampling temperature; 0: greedy decoding", 0.8)
    parser.add("--top-k K", "sample from the K most likely tokens; 0: all", 40)
    parser.add(
        "--top-p P", "sample from the fewest tokens whose probabilities sum to P (default: 1, all)", 1.0
    )
    parser.add(
        "--repetition-penalty X",
        "divide positive logits of earlier tokens by X, multiply negative ones (default: 1, none)",
        1.0,
    )
    parser.add("--stop-words TEXT ...", "texts that end the generated text", ())
    parser.add("--seed", "random seed; prompt number k uses the seed + k", 0)
    parser.add(
        "--log-probs N", "report the log-probability of each token, and of the N most likely ones", of=int
    )
    parser.add("--json", "print one JSON object per prompt")


def run(arguments: argparse.Namespace) -> None:
    """Load the newest valid checkpoint, or a folder of transformers, and continue prompts."""
    sampling, prompts = _sampling(arguments), _prompts(arguments)
    with joined_process(arguments, has_plain_output=arguments.json) as process:
        loaded = load(arguments, process)
        generation = Generation(arguments, process, loaded)
        chat, sampling = _chat(arguments, loaded, sampling)
        if chat is not None and not prompts:
            _talk(generation, sampling, chat)
            return
        images = [_images(loaded, prompt) for prompt in prompts]
        ids = [
            _encode(loaded, prompt, of_prompt, chat)
            for prompt, of_prompt in zip(prompts, images, strict=True)
        ]
        samplings = [_of_prompt(sampling, number, generation, one) for number, one in enumerate(ids)]
        engine = _engine(generation, ids, samplings)
        tiles = [None if one is None else one.tiles for one in images]
        texts = [engine.submit(*one) for one in zip(ids, samplings, tiles, strict=True)]
        started = time.perf_counter()
        given = [one.text for one in prompts]
        write = _write if process.ranks.rank == 0 else lambda _: None
        if arguments.json:
            _run_to_json(engine, given, texts, write)
        else:
            between = "\n" if engine.start_id is not None or arguments.chat else ""
            _run_to_text(engine, given, texts, write, between)
        seconds, count = time.perf_counter() - started, sum(one.completion.num_new for one in texts)
        process.note(f"{count} tokens in {seconds:.1f} s, {count / max(seconds, 1e-9):.1f} tokens/s")


def _chat(
    arguments: argparse.Namespace, loaded: LoadedModel, sampling: Sampling
) -> tuple[Conversations | None, Sampling]:
    """Return the writer of conversations with --chat, and the sampling of answers, which end where it ends them."""
    if not arguments.chat:
        return None, sampling
    chat = Conversations(loaded)
    return chat, dataclasses.replace(sampling, stop=(*sampling.stop, *chat.stop))


def _engine(
    generation: Generation, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling]
) -> TextEngine:
    """Plan the cache for these prompts, print the plan, and allocate it."""
    loaded, process, start = generation.loaded, generation.process, generation.start_id
    firsts = prompts if start is None else [[start]] * len(prompts)
    completions = [Completion(tuple(ids), one) for ids, one in zip(firsts, samplings, strict=True)]
    plan = generation.plan(
        max_tokens=max(one.num_total for one in completions),
        max_prompt=max(map(len, prompts)),
        num_sequences=len(prompts),
    )
    wanted = generation.arguments.max_new_tokens
    shorter = sum(one.max_new_tokens < wanted for one in samplings)
    if shorter:
        process.note(
            f"{shorter} of {len(prompts)} prompts: the context of {generation.context} tokens ends the text before"
            f" --max-new-tokens {wanted}"
        )
    return TextEngine(loaded.model, loaded.tokenizer, plan, process.device, generation.end_ids, start)


def _sampling(arguments: argparse.Namespace) -> Sampling:
    sampling = Sampling(
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        repetition_penalty=arguments.repetition_penalty,
        seed=arguments.seed,
        stop=tuple(arguments.stop_words),
        num_log_probs=arguments.log_probs,
    )
    problems = [
        Problem(f"{_FLAGS.get(name, '--' + name.replace('_', '-'))}: {problem.text}", problem.fix)
        for name, problem in sampling.problems()
    ]
    if problems:
        raise ConfigError.of(problems)
    return sampling


def _prompts(arguments: argparse.Namespace) -> list[Prompt]:
    if arguments.chat and arguments.image:
        raise ConfigError(
            "--image is given with --chat", fix="remove --chat, and write the prompt as in training"
        )
    if arguments.system is not None and not arguments.chat:
        raise ConfigError("--system has no meaning without --chat", fix="add --chat, or remove --system")
    if arguments.prompt is not None:
        found = [Prompt(text, tuple(arguments.image)) for text in arguments.prompt]
    elif arguments.prompt_file is not None:
        found = _prompts_of_file(arguments)
    elif arguments.chat:
        return []
    else:
        raise ConfigError("there is no prompt", fix="give --prompt, --prompt-file or --chat")
    return [_conversation(arguments, one) for one in found] if arguments.chat else found


def _conversation(arguments: argparse.Namespace, prompt: Prompt) -> Prompt:
    """Return a prompt as a conversation: its messages, or its text as one, after the system message."""
    messages = prompt.messages or ({"role": "user", "content": prompt.text},)
    return dataclasses.replace(prompt, messages=(*_system(arguments), *messages))


def _system(arguments: argparse.Namespace) -> list[dict[str, str]]:
    return [{"role": "system", "content": arguments.system}] if arguments.system is not None else []


def _prompts_of_file(arguments: argparse.Namespace) -> list[Prompt]:
    if arguments.image:
        raise ConfigError(
            "--image is given with --prompt-file",
            fix='write "images": ["FILE"] after each prompt of the file',
        )
    path: Path = arguments.prompt_file
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: {error}", fix="name a readable UTF-8 file") from error
    found = [
        _prompt(path, number, line, is_chat=arguments.chat)
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not found:
        raise InputError(f"{path}: has no prompts", fix='write one a line: {"prompt": "..."}')
    return found


def _prompt(path: Path, number: int, line: str, *, is_chat: bool) -> Prompt:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        value = None
    messages = value.get("messages") if isinstance(value, dict) and is_chat else None
    if isinstance(messages, list) and messages and all(isinstance(one, dict) for one in messages):
        return Prompt(str(messages[-1].get("content")), messages=tuple(messages))
    if not isinstance(value, dict) or not isinstance(value.get("prompt"), str):
        raise InputError(f"{path}:{number}: not an object with a prompt", fix='write {"prompt": "..."}')
    images = value.get("images", [])
    if not isinstance(images, list) or not all(isinstance(one, str) for one in images):
        raise InputError(f"{path}:{number}: images is not a list of names", fix='write "images": ["FILE"]')
    return Prompt(value["prompt"], tuple(path.parent / one for one in images))


def _images(loaded: LoadedModel, prompt: Prompt) -> PromptImages | None:
    """Return the images of a prompt."""
    if not prompt.images:
        return None
    require_pillow()
    files = []
    for path in prompt.images:
        try:
            files.append((path.read_bytes(), str(path)))
        except OSError as error:
            raise InputError(f"{path}: {error.strerror}", fix="name a readable image") from error
    return prompt_images(files, loaded.model.spec, loaded.tiling)


def _encode(
    loaded: LoadedModel, given: Prompt, images: PromptImages | None, chat: Conversations | None
) -> list[int]:
    prompt = given.text
    try:
        if chat is not None:
            ids = chat.encode({"messages": list(given.messages)})
        elif images is not None:
            ids = with_places(prompt, images.tokens, loaded.tokenizer)
        else:
            ids = encode_prompt(loaded.tokenizer, prompt)
    except InvalidDocumentError as error:
        raise InputError(f"--prompt {prompt[:100]!r}: {error}", fix=error.fix) from error
    except ValueError as error:
        raise ConfigError(
            f"--prompt {prompt[:100]!r}: {error}",
            fix="give a text of the model's tokenizer, with one <image> for each image, or none",
        ) from error
    if len(ids) > loaded.max_context:
        raise ConfigError(
            f"--prompt {prompt[:100]!r} ... has {len(ids)} tokens, and the model's context {loaded.max_context}",
            fix="shorten the prompt",
        )
    return ids


def _of_prompt(sampling: Sampling, number: int, generation: Generation, ids: Sequence[int]) -> Sampling:
    """Return the sampling of a prompt: its seed, and as many new tokens as the context has left."""
    taken = len(ids) if generation.start_id is None else 1
    most = min(sampling.max_new_tokens, generation.context + 1 - taken)
    return dataclasses.replace(sampling, seed=sampling.seed + number, max_new_tokens=most)


def _talk(generation: Generation, sampling: Sampling, chat: Conversations) -> None:
    """Answer each line of standard input in one conversation, until its end; one that fills the context begins anew."""
    arguments, process = generation.arguments, generation.process
    if process.ranks.size > 1 or arguments.json:
        raise ConfigError("--chat without a prompt is for one process and no --json", fix="give --prompt")
    whole = [0] * max(1, generation.context + 1 - sampling.max_new_tokens)
    engine = _engine(generation, [whole], [_of_prompt(sampling, 0, generation, whole)])
    mark = "> " if sys.stdin.isatty() else ""
    messages: list[dict[str, str]] = _system(arguments)
    _write(mark)
    for number, line in enumerate(sys.stdin):
        messages.append({"role": "user", "content": line.removesuffix("\n")})
        try:
            ids = chat.encode({"messages": messages})
        except InvalidDocumentError as error:
            raise InputError(f"line {number + 1}: {error}", fix=error.fix) from error
        if len(ids) > generation.context:
            process.note(
                f"the conversation has {len(ids)} tokens, the context {generation.context}: it begins anew"
            )
            messages = _system(arguments)
        else:
            text = engine.submit(ids, _of_prompt(sampling, number, generation, ids))
            while not engine.engine.is_idle:
                for _, new in engine.step():
                    _write(new)
            messages.append({"role": "assistant", "content": text.stream.text})
        _write(f"\n{mark}")


def _write(text: str) -> None:
    print(text, end="", flush=True)


def _run_to_text(
    engine: TextEngine,
    prompts: Sequence[str],
    texts: Sequence[TextCompletion],
    write: Callable[[str], None],
    between: str,
) -> None:
    """Run the engine and write the texts, `between` after each prompt; the text of a single prompt while it is sampled."""
    if len(texts) == 1:
        write(prompts[0] + between)
    while not engine.engine.is_idle:
        for _, new in engine.step():
            if len(texts) == 1:
                write(new)
    for number, (prompt, text) in enumerate(zip(prompts, texts, strict=True), 1):
        if len(texts) > 1:
            write(f"> prompt {number} of {len(texts)}\n{prompt}{between}{text.stream.text}")
        write("\n")
        for one in text.completion.log_probs:
            write(f"> {_log_prob(one, engine.tokenizer)}\n")


def _log_prob(one: LogProb, tokenizer: Tokenizer) -> str:
    pairs = [(one.token, one.log_prob), *one.top]
    texts = [f"{value:8.4f} {tokenizer.decode([token])!r}" for token, value in pairs]
    return texts[0] + (f"   most likely: {', '.join(map(str.strip, texts[1:]))}" if one.top else "")


def _run_to_json(
    engine: TextEngine, prompts: Sequence[str], texts: Sequence[TextCompletion], write: Callable[[str], None]
) -> None:
    """Run the engine and write one JSON object per prompt, in order."""
    while not engine.engine.is_idle:
        engine.step()
    for prompt, text in zip(prompts, texts, strict=True):
        one = text.completion
        found: dict[str, Any] = {
            "prompt": prompt,
            "text": text.stream.text,
            "finish_reason": one.finish_reason,
            "num_prompt_tokens": len(one.memory or one.prompt),
            "tokens": one.tokens,
        }
        if one.sampling.num_log_probs is not None:
            found["log_probs"] = [
                {"log_prob": each.log_prob, "top": [list(pair) for pair in each.top]}
                for each in one.log_probs
            ]
        write(json.dumps(found, ensure_ascii=False) + "\n")
