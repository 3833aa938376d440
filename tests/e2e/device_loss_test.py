#!/usr/bin/env python3
"""A kernel faults in the middle of a commit: the device is lost to the daemon's process, which says
so and ends. Started again it goes on from its checkpoint, the trainer with it, and the end is that
of a training in which nothing happened.

usage: device_loss_test.py [TEST CASE]
"""

import pathlib
import sys
import unittest

import grpc

from checkpoint_kill_test import JOIN_SECONDS, gradients, run_spec, values
from muond_process import Daemon, ProcessTest
from muond_stubs import checkpoint as ck
from muond_stubs import checkpoint_grpc
from spread_trainer import SpreadTrainer

DEVICE_LOST = 3  # exit code
STEPS = 8


class DeviceLossTest(ProcessTest):
    def start(self, name, *flags):
        directory = self.directory / name
        for made in (directory, directory / "checkpoints"):
            made.mkdir(exist_ok=True)
        daemon = Daemon("--backend", "cpu", "--threads", "1", "--checkpoint-dir",
                        directory / "checkpoints", "--checkpoint-every-steps", "3", *flags,
                        directory=directory, listen=[f"unix://{directory}/muond.sock"])
        self.addCleanup(daemon.stop)
        return daemon

    def train(self, name, *flags):
        """Digest, how often a daemon was started again, and the last one's log."""
        daemon, again = self.start(name, *flags), 0
        trainer = SpreadTrainer([daemon.unix], run_spec())
        trainer.initialize(values())
        stub = checkpoint_grpc.CheckpointStub(grpc.insecure_channel(daemon.unix))
        stub.Save(ck.SaveRequest(run="killed"), timeout=60)
        log, step, scale = "", 0, 1024.0
        while step < STEPS:
            outcome = trainer.step(step, gradients(step, scale), scale)
            if outcome is not None:
                step, scale = outcome.version, outcome.next_loss_scale
                continue
            self.assertEqual(daemon.wait(), DEVICE_LOST)
            log, again = daemon.log(), again + 1
            daemon = self.start(name)  # as whoever supervises it would
            step = trainer.join(JOIN_SECONDS)
            scale = trainer.loss_scale
        return trainer.trainers[0].digest().tensor_digest, again, log

    def test_the_daemon_says_so_and_ends_and_goes_on_when_it_is_started_again(self):
        # The fifth commit: some parameters have been applied, two steps after the last checkpoint.
        digest, again, log = self.train("lost", "--fault-points", "kernel_trap:4")
        self.assertEqual(again, 1)
        last = log.strip().splitlines()[-1]
        for words in ("a kernel trapped", "can't use the device any more", "checkpoint"):
            self.assertIn(words, last)
        self.assertEqual(digest, self.train("undisturbed")[0])


if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).parent))
    unittest.main()
