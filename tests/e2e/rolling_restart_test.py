#!/usr/bin/env python3
"""Daemons that share a run are restarted in the middle of it, one after the other and all at once,
as docs/deploy.md tells operators to: no step is lost, and none is taken twice. Trainers either take
steps in pieces and rejoin themselves, or whole ones, and then see nothing of it.

usage: rolling_restart_test.py [--rounds 1] [--seed 1] [--without-save] [unittest's arguments]

  --without-save  daemons have no grace, so that they end without saving: the tests must fail
"""

import argparse
import random
import sys
import time
import unittest

from daemon_cluster import DaemonCluster
from fault_story import undisturbed_digest
from muond_process import ProcessTest, run_program

OPTIONS = argparse.Namespace(rounds=1, seed=1, without_save=False)
DAEMONS = 3
STEPS_BETWEEN = 8
TRAINING = {"seed": 11, "skip_every": 5}


class RollingRestartTest(ProcessTest):

    def start(self, restarts, **trainer):
        self.random = random.Random(OPTIONS.seed)
        self.restarts = 0
        checkpoints = self.directory / "checkpoints"
        checkpoints.mkdir()
        self.steps = (restarts + 2) * STEPS_BETWEEN
        # Periodic saves, too: where the last step was not saved, there is something to go back to.
        self.cluster = DaemonCluster(
            self, DAEMONS, grace_seconds=0 if OPTIONS.without_save else 30, flags=[
                "--checkpoint-dir", checkpoints, "--checkpoint-every-steps", "5",
                "--threads", "1", "--backend", "cpu"])
        self.ranks = self.cluster.start_ranks(steps=self.steps, call_timeout=10, **TRAINING,
                                              **trainer)

    def drain(self, daemons):
        """In the middle of the run, at no particular place of a step: SIGTERM, and a clean end."""
        self.restarts += 1
        after = self.restarts * STEPS_BETWEEN
        for trainer in self.ranks:
            trainer.wait(lambda t=trainer: after in t.outcomes, f"to take step {after}")
        time.sleep(self.random.random() * 0.05)
        for index in daemons:
            self.cluster.daemons[index].terminate()
        for index in daemons:
            self.assertEqual(self.cluster.daemons[index].wait(), 0, "drained")

    def start_again(self, daemons):
        for index in daemons:
            self.cluster.restart(index)
        health = run_program("muonctl", "health", "--endpoint", self.cluster.listen[daemons[0]])
        self.assertEqual(health.returncode, 0, health.stderr)

    def finish(self, unnoticed=False):
        for trainer in self.ranks:
            trainer.wait_done()
            trainer.check_deadlines()
            taken = [call["step"] for call in trainer.calls
                     if call["call"] in ("finish", "step") and call.get("code") == "OK"]
            twice = sorted({step for step in taken if taken.count(step) > 1})
            self.assertEqual(twice, [], f"{trainer.name} took steps again")
            if unnoticed:
                self.assertEqual(trainer.failures(), [], "the session did not recover by itself")
                over = [text for text in trainer.interruptions if " after an interruption " in text]
                self.assertTrue(over, f"{trainer.name}: nobody was told")
            else:
                self.assertTrue(trainer.failures(), "a restart went unnoticed")
        self.assertEqual(self.cluster.status().position.next_step, self.steps)
        digests = {self.cluster.digest(index=index) for index in range(DAEMONS)}
        self.assertEqual(digests, {undisturbed_digest(self, steps=self.steps, **TRAINING)})

    def restart_one_after_the_other(self):
        order = list(range(DAEMONS)) * OPTIONS.rounds
        for index in order:
            self.drain([index])
            log = self.cluster.daemons[index].log()
            self.assertNotIn("ends without a checkpoint of its last step", log)
            self.start_again([index])

    def test_one_after_the_other(self):
        self.start(DAEMONS * OPTIONS.rounds)
        self.restart_one_after_the_other()
        self.finish()

    def test_trainers_of_whole_steps_see_nothing_of_it(self):
        self.start(DAEMONS * OPTIONS.rounds, whole_steps=True)
        self.restart_one_after_the_other()
        self.finish(unnoticed=True)

    def test_all_at_once(self):
        everyone = list(range(DAEMONS))
        self.start(OPTIONS.rounds)
        for _ in range(OPTIONS.rounds):
            self.random.shuffle(everyone)
            self.drain(everyone)
            self.start_again(everyone)
        self.finish()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=OPTIONS.rounds)
    parser.add_argument("--seed", type=int, default=OPTIONS.seed)
    parser.add_argument("--without-save", action="store_true")
    OPTIONS, rest = parser.parse_known_args()
    unittest.main(argv=[sys.argv[0], *rest])
