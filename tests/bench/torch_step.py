#!/usr/bin/env python3
"""One optimizer step of a model: torch.optim.Muon + AdamW against muond, paired in one run.

usage: PYTHON tests/bench/torch_step.py [--model gpt2] [--pairs 10] [--bin build/release/bin]

PYTHON is one that has torch >= 2.9, as tests/torch/with_torch has.

Both have the same shapes, fp32 parameters, gradients and state, the same number of threads, and
random gradients in memory. They take turns of two steps, of which the second counts (the first one
finds the other's data in the caches); who goes first alternates, and a pair's ratio is torch's time
divided by muond's: what slows the machine down slows both. torch's time is
Muon.step() and AdamW(fused=True).step(). muond's is its whole step inside this machine: Finish
alone (`step`), and with push and pull through the in-process channel (`total`). muond-bench checks
a sample of its results against fp64 in the same run.
"""

import argparse
import datetime
import json
import pathlib
import statistics
import sys
import time

import torch

from bench_process import DEFAULT_BIN, PacedBench, machine

# A thread pool that has just worked spins for a while, on the other's cores.
PAUSE_SECONDS = 0.2
WARMUP = 2


class TorchStep:
    """The tensors of a model and the two optimizers that torch has for them."""

    def __init__(self, tensors, threads):
        torch.set_num_threads(threads)
        torch.manual_seed(1)
        muon, rest = [], []
        for tensor in tensors:
            parameter = torch.nn.Parameter(torch.randn(tensor["shape"]) * 0.02)
            parameter.grad = torch.randn(tensor["shape"]) * 1e-3
            (muon if tensor["muon"] else rest).append(parameter)
        self.optimizers = []
        if muon:
            self.optimizers.append(torch.optim.Muon(muon, lr=1e-3))
        if rest:
            self.optimizers.append(torch.optim.AdamW(rest, lr=1e-3, fused=True))

    def step(self):
        """Seconds of one step."""
        start = time.perf_counter()
        for optimizer in self.optimizers:
            optimizer.step()
        return time.perf_counter() - start


def spread(values):
    """Median, minimum and maximum."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def measure(torch_step, bench, pairs):
    """Times of `pairs` pairs, as lists by name, in seconds."""
    times = {"torch": [], "step": [], "total": []}

    def run_torch():
        time.sleep(PAUSE_SECONDS)
        torch_step.step()
        times["torch"].append(torch_step.step())

    def run_muond():
        time.sleep(PAUSE_SECONDS)
        bench.step()
        step = bench.step()
        times["step"].append(step["step_seconds"])
        times["total"].append(step["total_seconds"])

    for pair in range(pairs):
        for run in (run_torch, run_muond) if pair % 2 == 0 else (run_muond, run_torch):
            run()
    return times


def report(model, threads, times):
    """The result as a dictionary."""
    ratios = {name: spread([a / b for a, b in zip(times["torch"], times[name])])
              for name in ("step", "total")}
    return {"date": datetime.date.today().isoformat(), "machine": machine(),
            "torch": torch.__version__, "model": model, "threads": threads,
            "milliseconds": {name: spread([1e3 * value for value in values])
                             for name, values in times.items()},
            "ratio": ratios, "seconds": times}


def show(result):
    """The result for people."""
    print(f"{result['model']}, {result['threads']} threads, torch {result['torch']}, "
          f"{len(result['seconds']['torch'])} pairs, {result['date']}\n{result['machine']}\n")
    names = {"torch": "torch.optim.Muon + AdamW", "step": "muond, step",
             "total": "muond, push + step + pull"}
    print(f"{'':28}{'median ms':>12}{'min':>10}{'max':>10}{'torch / it':>12}{'min':>7}{'max':>7}")
    for name, words in names.items():
        row = result["milliseconds"][name]
        line = f"{words:28}{row['median']:12.1f}{row['min']:10.1f}{row['max']:10.1f}"
        if name in result["ratio"]:
            ratio = result["ratio"][name]
            line += f"{ratio['median']:12.2f}{ratio['min']:7.2f}{ratio['max']:7.2f}"
        print(line)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--bin", type=pathlib.Path, default=DEFAULT_BIN, help="of muond-bench")
    parser.add_argument("--model", default="gpt2", help="as muond-bench takes it")
    parser.add_argument("--backend", default="cpu", help="muond's")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=pathlib.Path, help="write the result there, too")
    parser.add_argument("--at-least", type=float,
                        help="exit with 1 when the median ratio of `step` is lower")
    arguments = parser.parse_args()
    bench = PacedBench(arguments.bin, "--in-process", "--backend", arguments.backend, "--threads",
                       arguments.threads, "--model", arguments.model, "--steps",
                       2 * arguments.pairs, "--warmup", WARMUP, "--no-ceilings")
    torch_step = TorchStep(bench.ready["tensors"], arguments.threads)
    for _ in range(WARMUP):
        torch_step.step()
    times = measure(torch_step, bench, arguments.pairs)
    code = bench.close()
    result = report(arguments.model, arguments.threads, times)
    show(result)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    if code != 0:
        sys.exit(f"muond-bench ended with {code}: its results do not count")
    if arguments.at_least and result["ratio"]["step"]["median"] < arguments.at_least:
        sys.exit(f"slower than {arguments.at_least} times torch's speed")


if __name__ == "__main__":
    main()
