#!/usr/bin/env python3
"""Compare the predictions of `megatrain plan` with the measured steps and peak memory of docs/benchmarks.md. Needs no GPU.

python scripts/benchmarks/plan_accuracy.py
"""

from __future__ import annotations

from megatrain.tools.plan.measured import MEASURED, predicted


def main() -> None:
    print(f"{'case':<12} {'ms':>7} {'predicted':>9} {'ratio':>6}   {'GB':>6} {'planned':>7} {'ratio':>6}")
    for case in MEASURED:
        found = predicted(case)
        milliseconds, gigabytes = found.time.total * 1e3, found.memory_bytes / 1e9
        print(
            f"{case.name:<12} {case.milliseconds:7.0f} {milliseconds:9.0f} {milliseconds / case.milliseconds:6.3f}"
            f"   {case.gigabytes:6.1f} {gigabytes:7.1f} {gigabytes / case.gigabytes:6.3f}  {case.note}".rstrip()
        )


if __name__ == "__main__":
    main()
