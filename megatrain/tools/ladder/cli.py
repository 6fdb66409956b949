"""`megatrain ladder`: write a family of small runs, compare them, and fit the law of their losses.

write: flags of the target ─> FOLDER/NAME.yaml, FOLDER/run.sh     runs ─> compare: a table ─> fit: L(N, D), the target's loss, a plot
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from megatrain.config.errors import ConfigError, InputError
from megatrain.tools.ladder.law import Law, Point
from megatrain.tools.ladder.law import fit as fit_law
from megatrain.tools.ladder.plot import Target, ladder_svg, short
from megatrain.tools.ladder.runs import LadderRun, problems, read_ladder
from megatrain.tools.subcommands import add_command, write_output

_RATIOS: Final = (5.0, 10.0, 20.0)
_FAR: Final = 100
"""Ratio of sizes beyond which a prediction is a long way from the points."""


def add_flags(commands: Any) -> None:
    """Add `megatrain ladder ...`."""
    ladder = add_command(
        commands, "ladder", description="Write, compare and extrapolate a family of small runs."
    )
    actions = ladder.add_subparsers(dest="action", required=True, metavar="ACTION")
    write = add_command(actions, "write", write_runs, takes_run_flags=True, help="write the YAML files and the script of the runs", usage="megatrain ladder write --folder FOLDER [options] FLAGS")  # fmt: skip
    write.add("--folder FOLDER", "folder for the files and for the runs", required=True, of=Path)
    write.add(
        "--widths H ...", "hidden sizes (default: four from 1/8 to 1/2 of the target's)", of=int, at_least=1
    )
    write.add(
        "--tokens-per-parameter R ...",
        "tokens of a run, as multiples of its parameters",
        _RATIOS,
        of=float,
        above=0,
    )
    write.add(
        "--depth",
        "layers: in proportion to the width, or as many as the target (default: scaled; with --use-mup same)",
        choices=("scaled", "same"),
    )
    write.add("--batch SAMPLES", "global batch size of the runs (default: the target's)", of=int, at_least=1)
    write.add("--ranks N", "data-parallel ranks of a run", 1, at_least=1)
    finished = add_command(actions, "compare", compare)
    fitted = add_command(actions, "fit", fit)
    for parser in (finished, fitted):
        parser.add("runs RUN ...", "--save folder of a run")
        parser.add("--output FILE.svg", "plot to write", of=Path)
    fitted.add("--target-parameters N", "parameters to predict for", of=float, above=0)
    fitted.add("--target-tokens D", "tokens to predict for", of=float, above=0)


def write_runs(arguments: argparse.Namespace) -> None:
    """Write smaller and shorter runs than the one of FLAGS, and the script that runs them."""
    from megatrain.tools.ladder.family import LadderSpec, plan_ladder, write_ladder  # noqa: PLC0415 (imports the engine)

    folder: Path = arguments.folder
    spec = LadderSpec(
        folder,
        arguments.widths and tuple(sorted(set(arguments.widths))),
        tuple(arguments.tokens_per_parameter),
        arguments.depth,
        arguments.batch,
        arguments.ranks,
    )
    ladder = plan_ladder(spec, arguments.run_flags)
    write_ladder(ladder, spec)
    print(f"{'run':<20} {'parameters':>14} {'tokens':>16} {'iterations':>11}")
    for rung in ladder.rungs:
        print(f"{rung.name:<20} {rung.parameters:>14,} {rung.tokens:>16,} {rung.iterations:>11,}")
    for note in ladder.notes():
        print(f"note: {note}")
    print(f"run them:  bash {folder / 'run.sh'}      on Slurm:  sbatch {folder / 'run.sh'}")
    print(
        f"then:      megatrain ladder fit {folder}/w*/ --target-parameters {ladder.parameters:.4g}"
        f" --target-tokens {ladder.tokens:.4g} --output {folder / 'ladder.svg'}"
    )


def compare(arguments: argparse.Namespace) -> None:
    """Print and draw the losses of finished runs by size and tokens."""
    runs = _checked_runs(arguments, fits=False)
    points = [run.point for run in runs]
    _print_points(points, None)
    _draw(arguments, points, None, None, "Final losses")


def fit(arguments: argparse.Namespace) -> None:
    """Fit E + A/N^a + B/D^b to finished runs, and predict the loss of a larger one."""
    wanted = (arguments.target_parameters, arguments.target_tokens)
    if wanted.count(None) == 1:
        raise ConfigError(
            f"--target-parameters {wanted[0]} and --target-tokens {wanted[1]} do not name a size and a number of tokens",
            fix="give both, such as --target-parameters 7e9 --target-tokens 140e9",
        )
    points = [run.point for run in _checked_runs(arguments, fits=True)]
    law = fit_law(points)
    _print_points(points, law)
    found = law.coefficients
    print("L(N, D) = E + A / N^a + B / D^b, each with its 90 % interval:")
    for name, (value, low, high) in found.items():
        print(f"  {name} = {value:.4g}  ({low:.4g} to {high:.4g})")
    target = None
    if wanted[0] is not None:
        target = Target(*wanted, *law.predict(*wanted))
        _print_target(law, target, points, found)
    _draw(arguments, points, law, target, "Final losses and the fitted law, E + A / N^a + B / D^b")


def _checked_runs(arguments: argparse.Namespace, *, fits: bool) -> list[LadderRun]:
    if arguments.output is not None and arguments.output.suffix != ".svg":
        raise ConfigError(
            f"--output {arguments.output}: the plot is an SVG file", fix="end its name with .svg"
        )
    runs = read_ladder(arguments.runs)
    found = list(problems(runs, fits=fits))
    if found:
        raise InputError.of(found)
    return runs


def _print_points(points: Sequence[Point], law: Law | None) -> None:
    print(
        f"{'run':<28} {'parameters':>14} {'tokens':>16} {'tokens/N':>9} {'loss':>9}"
        + ("" if law is None else f" {'law':>9}")
    )
    for point in sorted(points, key=lambda one: (one.parameters, one.tokens)):
        fitted = "" if law is None else f" {law.loss(point.parameters, point.tokens):>9.4f}"
        ratio = point.tokens / point.parameters
        print(
            f"{point.name:<28} {point.parameters:>14,} {point.tokens:>16,} {ratio:>9.3g} {point.loss:>9.4f}{fitted}"
        )


def _print_target(
    law: Law, target: Target, points: Sequence[Point], found: Mapping[str, tuple[float, ...]]
) -> None:
    print(
        f"predicted loss of {short(target.parameters)} parameters on {short(target.tokens)} tokens: {target.loss:.4f}"
        f"  (90 % interval: {target.low:.4f} to {target.high:.4f})"
    )
    farther = max(
        target.parameters / max(p.parameters for p in points), target.tokens / max(p.tokens for p in points)
    )
    if farther > _FAR:
        print(
            f"note: the target is {farther:,.0f} times as large as the largest run: the interval covers the noise of the runs, not"
            " whether the law holds that far"
        )
    if found["a"][0] > 0 and found["b"][0] > 0:
        size, tokens = law.best_size(6 * target.parameters * target.tokens)
        print(f"least loss for its FLOPs: {short(size)} parameters on {short(tokens)} tokens")


def _draw(
    arguments: argparse.Namespace, points: Sequence[Point], law: Law | None, target: Target | None, title: str
) -> None:
    if arguments.output is None:
        return
    write_output(arguments.output, ladder_svg(points, law, target, title))
    print(f"{arguments.output}: open it in a browser")
