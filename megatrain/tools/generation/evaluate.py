"""`megatrain evaluate`: score tasks with the model of a checkpoint, as --eval-tasks does while a model trains."""

from __future__ import annotations

import argparse
import json
from typing import Any

from megatrain.data.tasks.files import read_tasks
from megatrain.data.tasks.requests import requests_of, task_metrics
from megatrain.inference.scoring import require_text_model, score
from megatrain.tools.generation.load import add_checkpoint_flags, joined_process, load
from megatrain.tools.subcommands import add_command
from megatrain.training.logging.metrics import evaluation_line


def add_flags(commands: Any) -> None:
    """Add `megatrain evaluate`."""
    parser = add_command(commands, "evaluate", run)
    add_checkpoint_flags(parser)
    parser.add(
        "--tasks PATH ...",
        "files of tasks, JSON lines or the YAML of lm-evaluation-harness, and folders of them (docs/training.md)",
        required=True,
    )
    parser.add("--limit N", "read the first N documents of each task (default: all)", of=int, at_least=1)
    parser.add("--batch-size N", "answers that are computed together", 8, at_least=1)
    parser.add("--json", "print one JSON object per task")


def run(arguments: argparse.Namespace) -> None:
    """Load the newest valid checkpoint, or a folder of transformers, and score tasks of multiple choice and cloze."""
    tasks = read_tasks(arguments.tasks, arguments.limit)
    with joined_process(arguments, has_plain_output=arguments.json) as process:
        loaded = load(arguments, process)
        require_text_model(loaded)
        requests = requests_of(tasks, loaded.tokenizer)
        scores = score(loaded, requests, batch_size=arguments.batch_size, device=process.device)
        for name, values in task_metrics(tasks, scores).items() if process.ranks.rank == 0 else ():
            if arguments.json:
                print(json.dumps({"task": name, **values}), flush=True)
            else:
                print(evaluation_line(f"task {name} at iteration {loaded.iteration}", values), flush=True)
