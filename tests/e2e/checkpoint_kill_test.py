#!/usr/bin/env python3
"""Daemons die by kill -9 at random moments of a training, come back, restore the run together, and
the training ends with the state of one that nothing ever happened to.

usage: checkpoint_kill_test.py [--kills 5] [--seed 1] [--daemons 3] [TEST CASE]

Moments are seeded: between steps, within them, while a checkpoint or a snapshot for a buddy is
written, while a restore is under way. CheckpointKillTest goes back to checkpoints; BuddyKillTest
has no disk, and no step may be lost. The long form (--kills 50) is recorded in docs/testing.md.
"""

import argparse
import random
import sys
import threading
import time
import unittest

import grpc
import numpy as np

from foreign_trainer import parameter
from muond_process import Daemon, ProcessTest
from muond_stubs import checkpoint as ck
from muond_stubs import checkpoint_grpc, types
from spread_trainer import SpreadTrainer

OPTIONS = argparse.Namespace(kills=5, seed=1, daemons=3)
SHAPES = {"a": [24, 16], "b": [16, 16], "c": [8, 32], "d": [12, 12], "norm": [16], "bias": [5]}
JOIN_SECONDS = 90


def run_spec():
    parameters = [parameter(name, shape, group="matrices" if len(shape) == 2 else "vectors",
                            role=types.ROLE_HIDDEN if len(shape) == 2 else types.ROLE_NORM)
                  for name, shape in SHAPES.items()]
    groups = [types.Group(name="matrices", algorithm=types.ALGORITHM_MUON),
              types.Group(name="vectors", algorithm=types.ALGORITHM_ADAMW)]
    scale = types.LossScale(mode=types.LossScale.MODE_DYNAMIC, initial=1024, window=3)
    return types.Run(name="killed", world_size=1, parameters=parameters, groups=groups,
                     loss_scale=scale)


def values():
    generator = np.random.default_rng(0)
    return {name: generator.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}


def gradients(step, loss_scale):
    """Of a step: always the same. Every seventh overflows."""
    generator = np.random.default_rng(step + 1)
    tensors = {name: generator.standard_normal(shape, np.float32) * np.float32(loss_scale)
               for name, shape in SHAPES.items()}
    if step % 7 == 3:
        tensors["b"][1, 2] = np.inf
    return tensors


class Killer(threading.Thread):
    """Kills and restarts daemons of the test until it has done so `kills` times."""

    def __init__(self, test, kills, seed):
        super().__init__(daemon=True)
        self.test, self.kills = test, kills
        self.random = random.Random(seed)
        self.steps = 0  # taken since the last kill, as the trainer counts
        self.log = []
        self.again = False  # who does not wait kills the same daemon again

    def run(self):
        victim = 0
        for number in range(self.kills):
            # One in four does not wait until the last one is over.
            waits = number == 0 or self.random.random() < 0.75
            if waits:
                wanted = self.random.randint(2, 6)
                deadline = time.monotonic() + JOIN_SECONDS
                while self.steps < wanted and time.monotonic() < deadline:
                    time.sleep(0.001)
                time.sleep(self.random.random() * 0.03)
            else:
                time.sleep(self.random.random() * 0.4)
            if waits or not self.again:
                victim = self.random.randrange(len(self.test.cluster))
            self.steps = 0
            self.log.append(victim)
            self.test.cluster[victim].kill()
            self.test.cluster[victim] = self.test.start_one(victim)


class KillTest:
    """What both tests do; `flags` is how daemons keep state."""

    again = False

    def start_one(self, index):
        directory = self.directory / str(index)
        directory.mkdir(exist_ok=True)
        peers = ",".join(f"unix:{self.directory}/{i}/muond.sock" for i in range(OPTIONS.daemons))
        flags = ["--backend", "cpu", "--threads", "1", "--peer-patience", "500ms", *self.flags()]
        if OPTIONS.daemons > 1:
            flags += ["--peers", peers]
        daemon = Daemon(*flags, directory=directory,
                        listen=[f"unix://{directory}/muond.sock"])
        self.daemons.append(daemon)
        self.addCleanup(daemon.stop)
        return daemon

    def undisturbed(self, steps):
        directory = self.directory / "alone"
        directory.mkdir()
        daemon = self.start_daemon("--backend", "cpu", "--threads", "1", directory=directory)
        trainer = SpreadTrainer([daemon.unix], run_spec())
        trainer.initialize(values())
        scale = 1024.0
        for step in range(steps):
            scale = trainer.step(step, gradients(step, scale), scale).next_loss_scale
        return trainer.trainers[0].digest().tensor_digest, scale

    def train(self, trainer):
        """Until all kills are over and three steps more; returns steps, loss scale and how many
        steps were taken again."""
        killer = Killer(self, OPTIONS.kills, OPTIONS.seed)
        killer.again = self.again
        killer.start()
        step, scale, back, after = 0, 1024.0, 0, 0
        while after < 3:
            outcome = trainer.step(step, gradients(step, scale), scale)
            if outcome is None:
                resumed = trainer.join(JOIN_SECONDS)
                back += max(0, step - resumed)
                step, scale = resumed, trainer.loss_scale
                continue
            step, scale = outcome.version, outcome.next_loss_scale
            killer.steps += 1
            after = after + 1 if not killer.is_alive() else 0
        killer.join()
        self.assertEqual(len(killer.log), OPTIONS.kills)
        return step, scale, back

    def disturbed(self, prepare=None):
        """`prepare` is called before the first step. Returns how many steps were taken again."""
        self.cluster = [self.start_one(i) for i in range(OPTIONS.daemons)]
        trainer = SpreadTrainer([daemon.unix for daemon in self.cluster], run_spec())
        trainer.initialize(values())
        if prepare:
            prepare()
        start = time.monotonic()
        step, scale, back = self.train(trainer)
        digest = trainer.trainers[0].digest().tensor_digest
        self.assertEqual((digest, scale), self.undisturbed(step))
        print(f"{type(self).__name__}, {OPTIONS.daemons} daemons, seed {OPTIONS.seed}: "
              f"{OPTIONS.kills} kills, {step} steps, {back} taken again, "
              f"{time.monotonic() - start:.1f} s: digest {digest}")
        return back


class CheckpointKillTest(KillTest, ProcessTest):
    def flags(self):
        return ["--checkpoint-dir", str(self.directory / "checkpoints"),
                "--checkpoint-every-steps", "2", "--checkpoint-keep", "2"]

    def save(self):
        """Something to go back to from the first moment on."""
        stub = checkpoint_grpc.CheckpointStub(grpc.insecure_channel(self.cluster[0].unix))
        stub.Save(ck.SaveRequest(run="killed"), timeout=60)

    def test_the_end_is_that_of_an_undisturbed_run(self):
        (self.directory / "checkpoints").mkdir()
        self.disturbed(self.save)


class BuddyKillTest(KillTest, ProcessTest):
    again = True  # its buddy dead, too, there would be nothing to come back from

    def flags(self):
        return ["--buddy-steps", "4"]

    def test_no_step_is_lost(self):
        if OPTIONS.daemons < 2:
            self.skipTest("a daemon alone has no buddy")
        self.assertEqual(self.disturbed(), 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=OPTIONS.kills)
    parser.add_argument("--seed", type=int, default=OPTIONS.seed)
    parser.add_argument("--daemons", type=int, default=OPTIONS.daemons)
    OPTIONS, rest = parser.parse_known_args()
    unittest.main(argv=[sys.argv[0], *rest])
