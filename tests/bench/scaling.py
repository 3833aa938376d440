#!/usr/bin/env python3
"""How a step's time grows with the number of parameters and with their bytes.

usage: tests/bench/scaling.py [--bin build/release/bin] [--sweep parameters|adamw|muon ...]

Three sweeps against a daemon of its own on a unix socket (or --in-process):

  parameters  10 to 100,000 parameters of 1 KiB, half matrices, half vectors
  adamw       8 AdamW tensors of growing size
  muon        a growing number of 256 x 1024 matrices

Each phase gets a line t = constant + slope x, fitted to relative errors, so that every decade
counts. --check fails when the time per unit of the largest size is over twice that of the one
before it: then it does not grow linearly.
"""

import argparse
import contextlib
import datetime
import json
import pathlib
import sys

from bench_process import DEFAULT_BIN, daemon, machine, run_bench

MIB = 1 << 20
PHASES = ("push", "step", "pull", "total")

# Name: (unit of x, sizes x, model of size x).
SWEEPS = {
    "parameters": ("parameter", (10, 100, 1000, 10_000, 100_000), lambda x: f"synthetic:{x}"),
    "adamw": ("MiB", (1, 4, 16, 64, 256, 1024), lambda x: f"custom:{x * MIB // 32 // 1024}x1024x8"
              ":adamw"),
    "muon": ("MiB", (1, 4, 16, 64, 256), lambda x: f"custom:256x1024x{x}"),
}


def fit(points):
    """Constant and slope of the line with the least sum of squared relative errors."""
    weights = [1 / t ** 2 for _, t in points]
    sums = [sum(w * x ** power for w, (x, _) in zip(weights, points)) for power in range(3)]
    tops = [sum(w * t * x ** power for w, (x, t) in zip(weights, points)) for power in range(2)]
    determinant = sums[0] * sums[2] - sums[1] ** 2
    slope = (sums[0] * tops[1] - sums[1] * tops[0]) / determinant
    return (tops[0] - slope * sums[1]) / sums[0], slope


def sweep(name, sizes, bin_dir, target, steps):
    """The result of one sweep as a dictionary."""
    unit, _, model = SWEEPS[name]
    rows = []
    for size in sizes:
        result = run_bench(bin_dir, *target, "--model", model(size), "--steps", steps,
                           "--warmup", 1, "--no-ceilings")
        phases = result["phases"]
        rows.append({"size": size, **{phase: phases[phase]["median_seconds"] for phase in PHASES}})
        print(f"  {size} {unit}: {1e3 * rows[-1]['total']:.2f} ms", file=sys.stderr)
    lines = {phase: fit([(row["size"], row[phase]) for row in rows]) for phase in PHASES}
    return {"sweep": name, "unit": unit, "rows": rows,
            "lines": {phase: {"constant_seconds": line[0], "seconds_per_unit": line[1]}
                      for phase, line in lines.items()}}


def show(result):
    """A Markdown table."""
    print(f"\n| {result['unit']}s | " + " | ".join(f"{phase} ms" for phase in PHASES)
          + f" | total µs per {result['unit']} |\n" + "|---" * (len(PHASES) + 2) + "|")
    for row in result["rows"]:
        cells = [f"{1e3 * row[phase]:.2f}" for phase in PHASES]
        print(f"| {row['size']:,} | " + " | ".join(cells)
              + f" | {1e6 * row['total'] / row['size']:.1f} |")
    lines = result["lines"]
    print(f"| µs per {result['unit']} (line) | "
          + " | ".join(f"{1e6 * lines[phase]['seconds_per_unit']:.2f}" for phase in PHASES)
          + " | |")


def is_linear(result):
    """Whether a unit costs at most twice as much at the largest size as at the one before."""
    before, last = result["rows"][-2:]
    return all(last[phase] / last["size"] <= 2 * before[phase] / before["size"]
               for phase in PHASES)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--bin", type=pathlib.Path, default=DEFAULT_BIN, help="of the programs")
    parser.add_argument("--sweep", choices=SWEEPS, action="append", help="default: all of them")
    parser.add_argument("--max-size", type=int, default=sys.maxsize, help="leave larger sizes out")
    parser.add_argument("--steps", type=int, default=7, help="measured steps of each size")
    parser.add_argument("--in-process", action="store_true", help="no daemon, no socket")
    parser.add_argument("--json", type=pathlib.Path, help="write the results there, too")
    parser.add_argument("--check", action="store_true", help="exit with 1 where it is not linear")
    arguments = parser.parse_args()
    results = []
    with contextlib.ExitStack() as stack:
        target = ["--in-process"]
        if not arguments.in_process:
            target = ["--endpoint", stack.enter_context(daemon(arguments.bin))]
        for name in arguments.sweep or SWEEPS:
            sizes = [size for size in SWEEPS[name][1] if size <= arguments.max_size]
            results.append(sweep(name, sizes, arguments.bin, target, arguments.steps))
    print(f"{datetime.date.today().isoformat()}, {machine()}")
    for result in results:
        show(result)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")
    bad = [result["sweep"] for result in results if not is_linear(result)]
    if arguments.check and bad:
        sys.exit(f"not linear: {', '.join(bad)}")


if __name__ == "__main__":
    main()
