#!/usr/bin/env python3
"""What a step costs beside its bytes and its arithmetic, and how it changes with the daemons.

usage: tests/bench/control_plane.py [--bin build/release/bin] [--steps 2000] [--json FILE]

Four trainer processes (muond-test-trainer) and 1 to 8 daemons, TCP on 127.0.0.1, all on this
machine. Two tables: one parameter of 16 x 16, median and 99th percentile of each call over all
ranks and steps; and the median step of a fixed model, whose Newton-Schulz work is divided among
the daemons (one thread each).
"""

import argparse
import contextlib
import datetime
import json
import pathlib
import socket
import subprocess
import sys

from bench_process import DEFAULT_BIN, machine

RANKS = 4
CALLS = ("begin", "push", "finish", "step", "pull")
MODEL = "square:48,256"


def free_ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextlib.contextmanager
def daemons(bin_dir, count, flags=()):
    """Their addresses, once all listen. `flags`: of daemon i flags[i], or none."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(count)]
    with contextlib.ExitStack() as stack:
        for index, address in enumerate(addresses):
            own = flags[index] if flags else ["--metrics-address", "none"]
            process = stack.enter_context(subprocess.Popen(
                [str(bin_dir / "muond"), "--listen", address, "--peers", ",".join(addresses),
                 "--advertise", address, "--threads", "1", "--drain-grace", "0s", *own],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True))
            stack.callback(process.terminate)
            for line in process.stdout:
                if "listening on" in line:
                    break
            else:
                raise RuntimeError(f"muond on {address} did not start")
        yield addresses


def train(bin_dir, count, model, steps, warmup, flags=()):
    """{call: seconds of all ranks and steps, sorted} with that many daemons."""
    with daemons(bin_dir, count, flags) as addresses:
        ranks = [subprocess.Popen(
            [str(bin_dir / "muond-test-trainer"), "--endpoint", addresses[0], "--rank", str(rank),
             "--world", str(RANKS), "--model", model, "--steps", str(steps + warmup), "--free",
             "--warmup", str(warmup)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
            for rank in range(RANKS)]
        told = [process.communicate()[0] for process in ranks]
    seconds = {call: [] for call in CALLS}
    for process, lines in zip(ranks, told):
        if process.returncode != 0:
            raise RuntimeError(f"a trainer ended with {process.returncode}: {lines}")
        for event in map(json.loads, lines.splitlines()):
            for call in CALLS if event["event"] == "times" else ():
                seconds[call] += event["seconds"][call]
    return {call: sorted(values) for call, values in seconds.items()}


def at(values, share):
    return values[min(int(share * len(values)), len(values) - 1)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bin", type=pathlib.Path, default=DEFAULT_BIN)
    parser.add_argument("--steps", type=int, default=2000, help="of the small model")
    parser.add_argument("--model-steps", type=int, default=20, help="of the fixed model")
    parser.add_argument("--daemons", type=int, nargs="*", default=list(range(1, 9)))
    parser.add_argument("--json", type=pathlib.Path)
    line = parser.parse_args()
    result = {"machine": machine(), "date": str(datetime.date.today()), "one_parameter": {},
              "model": {}}
    print(f"{result['machine']}, {result['date']}; {RANKS} trainers; ms, median / 99 %\n")
    print("| daemons | " + " | ".join(CALLS) + " |\n|" + "---|" * (len(CALLS) + 1))
    for count in line.daemons:
        seconds = train(line.bin, count, "one", line.steps, 200)
        row = {call: [at(seconds[call], 0.5), at(seconds[call], 0.99)] for call in CALLS}
        result["one_parameter"][count] = row
        print(f"| {count} | " + " | ".join(
            f"{1e3 * row[call][0]:.2f} / {1e3 * row[call][1]:.2f}" for call in CALLS) + " |",
            flush=True)
    print(f"\n{MODEL}, ms, median\n\n| daemons | push | finish | pull | step + pull |\n|"
          "---|---|---|---|---|")
    for count in line.daemons:
        seconds = train(line.bin, count, MODEL, line.model_steps, 3)
        row = {call: at(seconds[call], 0.5) for call in CALLS}
        result["model"][count] = row
        print(f"| {count} | {1e3 * row['push']:.1f} | {1e3 * row['finish']:.1f} | "
              f"{1e3 * row['pull']:.1f} | {1e3 * (row['step'] + row['pull']):.1f} |", flush=True)
    if line.json:
        line.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
