#!/usr/bin/env python3
"""Load, one axis at a time: many ranks, daemons, parameters, idle connections, readers that don't
read, ranks that never finish, and many steps. What a daemon needs must stay flat where nothing
grows, and other runs must not notice.

usage: load_test.py [--long] [unittest's arguments]

The long form, whose sizes are in SIZES, is recorded in docs/testing.md. MUOND_PICTURES=FOLDER makes
test_many_steps draw what it measured there.
"""

import json
import os
import pathlib
import socket
import statistics
import sys
import time
import unittest

import grpc
import numpy as np

from daemon_cluster import DaemonCluster
from fault_story import undisturbed_digest
from foreign_trainer import Trainer, parameter
from muond_process import ProcessTest, program, run_program
from muond_stubs import optimizer as pb
from muond_stubs import types

# Axis: (short, long).
SIZES = {"ranks": (16, 64), "daemons": (8, 8), "parameters": (10_000, 100_000),
         "connections": (1000, 1000), "steps": (2000, 10_000)}
LONG = "--long" in sys.argv or os.environ.get("MUOND_TEST_LONG") == "1"
MIB = 1 << 20
# What allocators keep, and what is counted late.
SLACK_BYTES = 8 * MIB


def size(axis):
    return SIZES[axis][LONG]


def resident_bytes(pid):
    pages = int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def descriptors(pid):
    return len(os.listdir(f"/proc/{pid}/fd"))


def run_of(name, shape, world_size=1):
    """One parameter, of which every rank has the whole gradient."""
    return types.Run(name=name, world_size=world_size, groups=[types.Group(name="weights")],
                     parameters=[parameter("w0", shape, replicated=world_size > 1)])


class SmallRun:
    """One rank with one small matrix, that takes steps, and times them."""

    def __init__(self, address, name="small"):
        self.trainer = Trainer(address, run_of(name, [16, 16]))
        self.trainer.register()
        self.trainer.initialize({"w0": np.eye(16, dtype=np.float32)})
        self.gradient = {"w0": np.outer(np.arange(16), np.ones(16)).astype(np.float32)}
        self.next = 0

    def steps(self, count):
        """Seconds of each."""
        seconds = []
        for _ in range(count):
            start = time.monotonic()
            outcome = self.trainer.step(self.next, self.gradient)
            assert outcome.applied, outcome
            seconds.append(time.monotonic() - start)
            self.next += 1
        return seconds


def draw_steps(count, memory, files, slowest):
    """A daemon's memory, its descriptors, and the time that 99 % of each tenth's steps took."""
    from matplotlib.figure import Figure  # pylint: disable=import-outside-toplevel
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots(3, sharex=True)
    at = count / 100 * np.arange(1, 101)
    for axis, x, y, label in ((axes[0], at, np.array(memory) / MIB, "resident memory, MiB"),
                              (axes[1], at, files, "descriptors"),
                              (axes[2], at[9::10], slowest, "99 % of steps within, ms")):
        axis.plot(x, y, drawstyle="steps-pre", color="tab:blue")
        axis.set_ylim(0, 1.3 * max(y))
        axis.set_ylabel(label, fontsize=8)
        axis.grid(alpha=0.3)
    axes[-1].set_xlabel("steps")
    figure.savefig(pathlib.Path(os.environ["MUOND_PICTURES"], "load-steps.svg"))


class LoadTest(ProcessTest):

    def serve(self):
        self.daemon = self.start_daemon("--backend", "cpu", "--threads", "1")
        self.pid = self.daemon.process.pid
        return self.daemon

    def report(self, text):
        print(f"{self._testMethodName}: {text}", flush=True)

    def test_many_ranks(self):
        count = size("ranks")
        cluster = DaemonCluster(self, 3)
        start = time.monotonic()
        ranks = cluster.start_ranks(count, steps=4, seed=3, skip_every=3, call_timeout=60)
        for rank in ranks:
            rank.wait_done()
            self.assertEqual(rank.failures(), [])
        self.report(f"{count} ranks, 3 daemons, 4 steps: {time.monotonic() - start:.1f} s")
        alone = DaemonCluster(self, 1, peers="")
        for rank in alone.start_ranks(count, run="alone", steps=4, seed=3, skip_every=3,
                                      call_timeout=60):
            rank.wait_done()
        self.assertEqual({cluster.digest(index=i) for i in range(3)}, {alone.digest(run="alone")})

    def test_many_daemons(self):
        count = size("daemons")
        cluster = DaemonCluster(self, count, flags=["--threads", "1"])
        start = time.monotonic()
        ranks = cluster.start_ranks(4, steps=10, seed=3, skip_every=3)
        for rank in ranks:
            rank.wait_done()
            self.assertEqual(rank.failures(), [])
        self.report(f"{count} daemons, 4 ranks, 10 steps: {time.monotonic() - start:.1f} s")
        expected = undisturbed_digest(self, seed=3, steps=10, skip_every=3)
        self.assertEqual({cluster.digest(index=i) for i in range(count)}, {expected})

    def test_many_parameters(self):
        count = size("parameters")
        self.serve()
        result = run_program("muond-bench", "--endpoint", self.daemon.unix, "--model",
                             f"synthetic:{count}", "--steps", 2, "--warmup", 1, "--no-ceilings",
                             "--json", "-", timeout=500)
        self.assertEqual(result.returncode, 0, result.stderr)
        result = json.loads(result.stdout)
        beyond = result["memory"]["grown_bytes"] - result["memory"]["need_bytes"]
        self.report(f"{count} parameters of 1 KiB: a step in "
                    f"{result['phases']['total']['median_seconds']:.2f} s, "
                    f"{beyond / count / 1024:.1f} KiB a parameter beside its tensors")
        # Names, shapes, boxes, routes, and the libraries' share; no copy of anything.
        self.assertLess(beyond, 32 * MIB + count * 8 * 1024)

    def test_idle_connections(self):
        count = size("connections")
        small = SmallRun(self.serve().unix)
        before = small.steps(100)
        was = descriptors(self.pid)
        host, port = self.daemon.tcp.rsplit(":", 1)
        idle = [socket.create_connection((host, int(port)), 30) for _ in range(count)]
        during = small.steps(100)
        self.report(f"step {1e3 * statistics.median(before):.2f} ms, with {count} idle connections "
                    f"{1e3 * statistics.median(during):.2f} ms, descriptors {was} to "
                    f"{descriptors(self.pid)}")
        for each in idle:
            each.close()
        self.settle(lambda: descriptors(self.pid) <= was + 2, "descriptors to be given back")

    def settle(self, condition, what, seconds=60):
        deadline = time.monotonic() + seconds
        while not condition():
            self.assertLess(time.monotonic(), deadline, what)
            time.sleep(0.05)

    def test_readers_that_do_not_read(self):
        """Each asks for its parameters and takes one message of them."""
        small = SmallRun(self.serve().unix)
        elements = 16 * MIB // 4
        reader = Trainer(self.daemon.unix, run_of("large", [elements // 1024, 1024]))
        reader.register()
        reader.initialize({"w0": np.ones((elements // 1024, 1024), np.float32)})
        before = resident_bytes(self.pid)
        streams = []
        for _ in range(16):
            other = Trainer(self.daemon.unix, reader.run)
            other.register()
            request = pb.PullRequest(id=other.run_id(), rank=0, version=0)
            streams.append(other.stub.Pull(request, timeout=60))
            next(streams[-1])
        seconds = small.steps(200)
        grown = resident_bytes(self.pid) - before
        self.report(f"16 stalled readers of 16 MiB: the daemon grew by {grown / MIB:.1f} MiB, "
                    f"other run's step {1e3 * statistics.median(seconds):.2f} ms")
        # A stream's own window, not its tensor.
        self.assertLess(grown, 16 * 4 * MIB)
        for stream in streams:
            stream.cancel()
        # What had waited for them is let go of: others read on.
        self.assertEqual(reader.pull(0)["w0"].shape, (elements // 1024, 1024))
        small.steps(10)

    def test_ranks_that_never_finish(self):
        """They begin, push, and say no more; the one that does finish is told who is missing."""
        small = SmallRun(self.serve().unix)
        run = run_of("waits", [16, 16], world_size=8)
        ranks = [Trainer(self.daemon.unix, run, rank=rank) for rank in range(8)]
        values = {"w0": np.eye(16, dtype=np.float32)}
        for rank in ranks:
            rank.register()
        for rank in ranks:
            rank.initialize(values)
        for rank in ranks:
            rank.begin(0)
            rank.push(0, values)
        before = resident_bytes(self.pid), descriptors(self.pid)
        for _ in range(5):
            with self.assertRaises(grpc.RpcError) as raised:
                ranks[0].finish(0, wait_ms=100)
            self.assertEqual(raised.exception.code(), grpc.StatusCode.DEADLINE_EXCEEDED)
            self.assertIn("1, 2, 3, 4, 5, 6, 7", raised.exception.details())
        small.steps(50)
        self.assertLess(resident_bytes(self.pid), before[0] + SLACK_BYTES)
        self.assertLessEqual(descriptors(self.pid), before[1] + 2)

    def test_many_steps(self):
        count = size("steps")
        small = SmallRun(self.serve().unix)
        small.steps(count // 10)  # buffers and threads that come with the first steps
        samples, seconds = [], []
        for _ in range(100):
            seconds += small.steps(count // 100)
            samples.append((resident_bytes(self.pid), descriptors(self.pid)))
        memory, files = zip(*samples)
        slowest = [1e3 * np.percentile(tenth, 99) for tenth in np.split(np.array(seconds), 10)]
        self.report(f"{count} steps: memory {memory[0] / MIB:.2f} to {memory[-1] / MIB:.2f} MiB, "
                    f"descriptors {files[0]} to {files[-1]}, 99 % of each tenth's steps within "
                    f"{' '.join(f'{ms:.1f}' for ms in slowest)} ms")
        if "MUOND_PICTURES" in os.environ:
            draw_steps(count, memory, files, slowest)
        self.assertLess(max(memory), memory[0] + SLACK_BYTES // 4)
        self.assertLessEqual(max(files), files[0] + 2)


if __name__ == "__main__":
    program("muond")
    unittest.main(argv=[each for each in sys.argv if each != "--long"])
