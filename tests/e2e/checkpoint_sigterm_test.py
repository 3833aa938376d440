#!/usr/bin/env python3
"""SIGTERM, as systemd and Kubernetes send it: a run that has taken steps since its last checkpoint
is saved before the daemon ends, and a new process goes on with the very next step."""

import concurrent.futures
import unittest

import grpc
import numpy as np

from checkpoint_kill_test import gradients, run_spec, values
from muond_process import Daemon, ProcessTest, run_program
from spread_trainer import SpreadTrainer


class CheckpointSigtermTest(ProcessTest):
    grace_seconds = 20

    def start(self, count):
        (self.directory / "checkpoints").mkdir(exist_ok=True)
        peers = ",".join(f"unix:{self.directory}/{i}/muond.sock" for i in range(count))
        daemons = []
        for index in range(count):
            directory = self.directory / str(index)
            directory.mkdir(exist_ok=True)
            flags = ["--backend", "cpu", "--threads", "1", "--peer-patience", "500ms",
                     "--checkpoint-dir", str(self.directory / "checkpoints")]
            if count > 1:
                flags += ["--peers", peers]
            daemons.append(Daemon(*flags, directory=directory, metrics="none",
                                  listen=[f"unix://{directory}/muond.sock"],
                                  grace_seconds=self.grace_seconds))
            self.daemons.append(daemons[-1])
            self.addCleanup(daemons[-1].stop)
        return daemons, SpreadTrainer([daemon.unix for daemon in daemons], run_spec())

    def train(self, trainer, first, end, scale):
        for step in range(first, end):
            outcome = trainer.step(step, gradients(step, scale), scale)
            self.assertIsNotNone(outcome, f"step {step}")
            scale = outcome.next_loss_scale
        return scale

    def end(self, daemons):
        """All at once: as when the machines go down, or a job ends."""
        for daemon in daemons:
            daemon.terminate()
        for daemon in daemons:
            self.assertEqual(daemon.wait(), 0)

    def saved(self):
        result = run_program("muonctl", "checkpoint", "verify", self.directory / "checkpoints")
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        return sorted(path.name for path in (self.directory / "checkpoints" / "killed").iterdir())

    def check(self, count, disturb=None):
        daemons, trainer = self.start(count)
        trainer.initialize(values())
        scale = self.train(trainer, 0, 5, 1024.0)
        digest = trainer.trainers[0].digest().tensor_digest
        if disturb:
            disturb(trainer, scale)
        self.end(daemons)
        self.assertEqual(self.saved(), ["ckpt-5"])
        daemons, trainer = self.start(count)
        self.assertEqual(trainer.join(60), 5)
        self.assertEqual(trainer.loss_scale, scale)
        self.assertEqual(trainer.trainers[0].digest().tensor_digest, digest)
        self.train(trainer, 5, 7, scale)
        self.end(daemons)
        self.assertEqual(self.saved(), ["ckpt-5", "ckpt-7"])

    def test_one_daemon(self):
        self.check(1)

    def test_three_daemons(self):
        self.check(3)

    def test_in_the_middle_of_a_step(self):
        """Gradients of which some are in and a Finish that waits: the step is thrown away, its
        trainer is told, and what is saved is the version before."""
        waiting = concurrent.futures.ThreadPoolExecutor()
        calls = []

        def begin_step(trainer, scale):
            rank = trainer.trainers[0]
            rank.begin(5, loss_scale=scale)
            rank.push(5, {"a": np.ones((24, 16), np.float32)})
            calls.append(waiting.submit(rank.stub.Finish, rank.finish_request(5, wait_ms=20_000),
                                        timeout=30))

        self.check(1, begin_step)
        with self.assertRaises(grpc.RpcError) as refused:
            calls[0].result()
        self.assertEqual(refused.exception.code(), grpc.StatusCode.UNAVAILABLE)
        waiting.shutdown()

    def test_nothing_new_is_not_saved_again(self):
        daemons, trainer = self.start(1)
        trainer.initialize(values())
        self.end(daemons)
        self.assertFalse((self.directory / "checkpoints" / "killed").exists(), "no step was taken")


if __name__ == "__main__":
    unittest.main()
