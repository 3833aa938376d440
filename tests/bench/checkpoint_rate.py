#!/usr/bin/env python3
"""How fast a checkpoint is written beside what the disk can do, and how long it holds a step.

usage: tests/bench/checkpoint_rate.py [--bin build/release/bin] [--directory DIR] [--rounds 5]
                                      [--matrices 12] [--json FILE]

One daemon with MATRICES matrices of 2048 x 1024 (24 MiB of state each). In every round, one after
the other on the same disk: `dd bs=2M conv=fsync` of as many bytes, a save, and `dd` again. The
background write is the save without the copy, which the daemon tells at log level debug; the copy
is what a step can be held for. Exit code 1 when the median write is below --floor of the median dd.
"""

import argparse
import datetime
import functools
import json
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "e2e"))

import grpc  # noqa: E402
import numpy as np  # noqa: E402

import foreign_trainer  # noqa: E402
from bench_process import DEFAULT_BIN, machine  # noqa: E402
from foreign_trainer import Trainer, parameter  # noqa: E402
from muond_stubs import checkpoint, checkpoint_grpc, types  # noqa: E402

ROWS, COLS = 2048, 1024
# All chunks are alike: a checksum in plain Python takes longer than all that is measured.
foreign_trainer.crc32c = functools.lru_cache(4)(foreign_trainer.crc32c)


def dd_seconds(directory, size):
    """`dd` of `size` zero bytes, fsync included; a new file each time, as a checkpoint's are."""
    target = directory / "dd.bin"
    start = time.monotonic()
    subprocess.run(["dd", "if=/dev/zero", f"of={target}", "bs=2M", f"count={size // (2 << 20)}",
                    "conv=fsync"], check=True, stderr=subprocess.DEVNULL)
    elapsed = time.monotonic() - start
    target.unlink()
    return elapsed


class Service:
    """A daemon and its one trainer."""

    def __init__(self, arguments, directory):
        self.log = directory / "muond.log"
        (directory / "checkpoints").mkdir()
        address = f"unix://{directory}/muond.sock"
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [str(arguments.bin / "muond"), "--listen", address, "--metrics-address", "none",
                 "--log-level", "debug", "--checkpoint-dir", str(directory / "checkpoints"),
                 "--checkpoint-keep", "1", "--drain-grace", "0s",
                 # Keeps the memory of the copy, as a run that is saved again and again has it.
                 "--checkpoint-every-steps", "1000000"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        while "listening on" not in self.log.read_text():
            time.sleep(0.02)
        names = [f"blk.{i}.w" for i in range(arguments.matrices)]
        run = types.Run(
            name="rate", world_size=1,
            parameters=[parameter(name, [ROWS, COLS], group="all", role=types.ROLE_HIDDEN)
                        for name in names],
            groups=[types.Group(name="all", algorithm=types.ALGORITHM_ADAMW)])
        self.trainer = Trainer(f"unix:{directory}/muond.sock", run)
        self.trainer.register()
        chunk = np.random.default_rng(0).standard_normal(1 << 18, np.float32)
        self.values = {name: np.resize(chunk, (ROWS, COLS)) for name in names}
        self.trainer.initialize(self.values)
        self.saver = checkpoint_grpc.CheckpointStub(
            grpc.insecure_channel(f"unix:{directory}/muond.sock"))
        self.step = 0

    def take_step(self):
        """So that there is something new to save."""
        self.trainer.begin(self.step)
        self.trainer.push(self.step, self.values)
        self.trainer.stub.Finish(self.trainer.finish_request(self.step, wait_ms=100_000),
                                 timeout=120)
        self.step += 1

    def save(self):
        """(seconds of the whole, seconds of the copy, bytes)"""
        reply = self.saver.Save(checkpoint.SaveRequest(run="rate"), timeout=600)
        copies = re.findall(r"was copied in ([0-9.]+) s", self.log.read_text())
        return reply.seconds, float(copies[-1]), reply.bytes


def measure(arguments, directory):
    service = Service(arguments, directory)
    try:
        service.take_step()
        size = service.save()[2]  # its memory was new
        rounds = []
        for _ in range(arguments.rounds):
            service.take_step()
            before = dd_seconds(directory, size)
            whole, copy, size = service.save()
            after = dd_seconds(directory, size)
            rounds.append({"dd": [before, after], "save": whole, "copy": copy,
                           "write": whole - copy})
            print(f"dd {before:.3f} and {after:.3f} s, write {whole - copy:.3f} s, "
                  f"copy {copy:.3f} s")
        return size, rounds
    finally:
        service.process.terminate()
        service.process.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=pathlib.Path, default=DEFAULT_BIN)
    parser.add_argument("--directory", default=None, help="on the disk to be measured")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--matrices", type=int, default=12)
    parser.add_argument("--floor", type=float, default=0.8, help="of dd's rate")
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="rate-") as directory:
        size, rounds = measure(arguments, pathlib.Path(directory))
    dd = statistics.median(seconds for each in rounds for seconds in each["dd"])
    write = statistics.median(each["write"] for each in rounds)
    copy = statistics.median(each["copy"] for each in rounds)
    share = dd / write
    print(f"{size} bytes on {machine()}: medians dd {size / dd / 1e6:.0f} MB/s, "
          f"write {size / write / 1e6:.0f} MB/s: {share:.0%} of dd; a step is held {copy:.3f} s "
          f"({size / copy / 1e9:.2f} GB/s)")
    if arguments.json:
        arguments.json.write_text(json.dumps(
            {"date": datetime.date.today().isoformat(), "machine": machine(), "bytes": size,
             "rounds": rounds, "share_of_dd": share}, indent=1) + "\n")
    return 0 if share >= arguments.floor else 1


if __name__ == "__main__":
    sys.exit(main())
