"""Train a language model: `python pretrain.py --flags`, or `torchrun --nproc-per-node 8 pretrain.py --flags`.

parse ─┬─> join the ranks (facts, plan, groups) ─> Trainer ─> resume ─> train ─> exit code
       └─> --dry-run: print the plan, memory and timeline of the run
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the rest is imported in functions, so that an interrupt of any import leaves no traceback
    from megatrain.config import Request
    from megatrain.training.logging.console import Phases


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code: 0 target reached, 2 nothing started, 3 no valid checkpoint, 75 stopped early, 1 other errors."""
    try:
        return run(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:  # before the training loop, which saves and stops
        print("interrupted", file=sys.stderr)
        return 130


def run(argv: Sequence[str]) -> int:
    """Parse the command line; print the dry run, or train."""
    from megatrain.config import parse
    from megatrain.config.environment import read_environment
    from megatrain.training.launch.launcher_watch import end_with_launcher
    from megatrain.training.logging.console import Console, Phases

    end_with_launcher(read_environment())
    request = parse(argv)
    is_dry = request.known("training.dry_run") is not None
    phases = Phases(Console(is_quiet=is_dry or read_environment().rank != 0))
    with phases.phase("importing PyTorch"):  # after parsing, so that --help answers at once
        from megatrain.training.launch.ranks import report_errors
        from megatrain.training.planning.dry_run_output import print_dry_run

    return report_errors(lambda: print_dry_run(request) if is_dry else train(request, phases))


def train(request: Request, phases: Phases) -> int:
    """Run the training on this rank."""
    from megatrain.training.launch.ranks import joined_ranks
    from megatrain.training.planning.memory_check import check_memory
    from megatrain.training.trainer import Trainer

    with joined_ranks(request, phases, check_memory=check_memory) as ranks:
        trainer = Trainer(ranks)
        trainer.resume()
        return trainer.train()


if __name__ == "__main__":
    sys.exit(main())
