"""Train a language model: `python pretrain.py --flags`, or `torchrun --nproc-per-node 8 pretrain.py --flags`.

parse ─┬─> join the ranks (facts, plan, groups) ─> Trainer ─> resume ─> train ─> exit code     (`train_run`)
       └─> --dry-run: print the plan, memory and timeline of the run
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # all is imported in functions: first what catches signals
    from megatrain.process.signals import Signals
    from megatrain.process.streams import StandardStreams


def main(argv: list[str] | None = None) -> int:
    """Return the exit code: 0 target reached, 2 nothing started, 3 no valid checkpoint, 75 stopped early, 1 other errors."""
    try:
        from megatrain.process.signals import Signals
        from megatrain.process.streams import StandardStreams

        with Signals() as signals, StandardStreams(ends_program=True) as streams:
            return run(sys.argv[1:] if argv is None else argv, signals, streams)
    except KeyboardInterrupt:  # of the first milliseconds
        print("interrupted", file=sys.stderr)
        return 130


def run(argv: list[str], signals: Signals, streams: StandardStreams) -> int:
    """Parse the command line; print the dry run, or train."""
    from megatrain.config import parse, read_environment
    from megatrain.training.launch.refusal import refuse
    from megatrain.training.liveness.launcher_watch import end_with_launcher
    from megatrain.training.logging.console import Console, Phases

    end_with_launcher(environment := read_environment())
    request = parse(argv)
    if request.problems and environment.world_size == 1:  # several ranks compare theirs first
        return refuse(request)
    streams.ends_program = is_dry = request.known("training.dry_run") is not None
    if request.known("resilience.inprocess_restart") and not is_dry and environment.supervisor is None:
        from megatrain.training.restarts.supervisor import supervise

        return supervise(request, environment, signals)
    phases = Phases(Console(is_quiet=is_dry or environment.rank != 0))
    with phases.phase("importing PyTorch"):  # after parsing, so that --help answers at once
        from megatrain.training.launch.ranks import report_errors
        from megatrain.training.planning.dry_run_output import print_dry_run
        from megatrain.training.trainer import train_run

    return report_errors(lambda: print_dry_run(request) if is_dry else train_run(request, phases, signals))


if __name__ == "__main__":
    from megatrain.process.exit_deadline import run_program

    run_program(main)
