#!/usr/bin/env python3
"""Compare the predictions of `megatrain plan` with the measured steps and peak memory of docs/benchmarks.md. Needs no GPU.

python scripts/benchmarks/plan_accuracy.py
"""

from __future__ import annotations

from megatrain.tools.plan.measured import MEASURED, predicted


def main() -> None:
    print(f"{'case':<16}{'ms':>14}{'predicted':>11}  {'ratio':<13}{'GB':>7}{'planned':>9}{'ratio':>7}")
    for case in MEASURED:
        found = predicted(case)
        milliseconds, gigabytes = found.time.total * 1e3, found.memory_bytes / 1e9
        measured = " to ".join(f"{one:.0f}" for one in case.milliseconds)
        ratios = ", ".join(f"{milliseconds / one:.3f}" for one in case.milliseconds)
        print(
            f"{case.name:<16}{measured:>14}{milliseconds:>11.0f}  {ratios:<13}"
            f"{case.gigabytes:>7.1f}{gigabytes:>9.1f}{gigabytes / case.gigabytes:>7.3f}  {case.note}".rstrip(),
            flush=True,
        )


if __name__ == "__main__":
    main()
