#!/usr/bin/env python3
"""What it costs that daemons hold each other's state (docs/checkpoints.md, "Buddies"): time of a
step, bytes that go out and bytes that are held, without buddies and with.

usage: tests/bench/buddy_cost.py [--bin build/release/bin] [--daemons 3] [--steps 30] [--rounds 3]

Four trainer processes and the daemons, TCP on 127.0.0.1, all on this machine, so that every byte to
a buddy costs the same cores twice. A model of 48 matrices of 256 x 256, fp32 gradients summed over
the ranks, and one of a single 16 x 16. Rounds alternate between the settings; medians.
"""

import argparse
import collections
import datetime
import pathlib
import statistics
import sys
import threading
import urllib.request

from bench_process import DEFAULT_BIN, machine
from control_plane import MODEL, at, free_ports, train

SETTINGS = (0, 1, 8, 64)
MEBI = 1 << 20


class Watch(threading.Thread):
    """The largest values that the daemons' metrics have while it runs."""

    def __init__(self, ports):
        super().__init__(daemon=True)
        self.ports = ports
        self.over = threading.Event()
        self.most = collections.Counter()

    def run(self):
        while not self.over.wait(0.1):
            for port in self.ports:
                url = f"http://127.0.0.1:{port}/metrics"
                try:
                    with urllib.request.urlopen(url, timeout=5) as page:
                        lines = page.read().decode().splitlines()
                except OSError:
                    continue  # not there yet, or gone
                for name, series in (("sent", "muond_buddy_sent_bytes_total{"),
                                     ("held", 'muond_memory_bytes{kind="buddy"')):
                    for line in lines:
                        if line.startswith(series):
                            value = float(line.rpartition(" ")[2])
                            self.most[name] = max(self.most[name], value)


def measure(line, model, steps, warmup, buddy_steps):
    """Median seconds of a step with its pull, largest bytes sent a step and held, of any daemon."""
    ports = free_ports(line.daemons)
    flags = [["--metrics-address", f"127.0.0.1:{port}", "--buddy-steps", str(buddy_steps)]
             for port in ports]
    watch = Watch(ports)
    watch.start()
    seconds = train(line.bin, line.daemons, model, steps, warmup, flags)
    watch.over.set()
    watch.join()
    step = at(seconds["step"], 0.5) + at(seconds["pull"], 0.5)
    return step, watch.most["sent"] / (steps + warmup), watch.most["held"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bin", type=pathlib.Path, default=DEFAULT_BIN)
    parser.add_argument("--daemons", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30, help="of the large model")
    parser.add_argument("--rounds", type=int, default=3)
    line = parser.parse_args()
    print(f"{machine()}, {datetime.date.today()}; {line.daemons} daemons\n\n"
          "| model | buddy-steps | step and pull, ms | to the buddy a step, MiB | held, MiB |\n"
          "|---|---|---|---|---|")
    for model, steps, warmup in (("one", 50 * line.steps, 100), (MODEL, line.steps, 3)):
        taken = collections.defaultdict(list)
        for _ in range(line.rounds):
            for buddy_steps in SETTINGS:
                taken[buddy_steps].append(measure(line, model, steps, warmup, buddy_steps))
        for buddy_steps in SETTINGS:
            step, sent, held = (statistics.median(values) for values in zip(*taken[buddy_steps]))
            print(f"| {model} | {buddy_steps} | {1e3 * step:.2f} | {sent / MEBI:.2f} | "
                  f"{held / MEBI:.2f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
