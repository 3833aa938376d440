#!/usr/bin/env python3
"""Daemons that are paused or killed at every phase of a step, and ranks that come too late: who is
told what, by when, and how the run goes on.

usage: daemon_faults_test.py [--ranks N] [unittest's arguments]

  --ranks N  of each of the nine runs whose daemon is killed; 2 by default, 4 in the long form
"""

import sys
import unittest
from concurrent.futures import ThreadPoolExecutor

import grpc

from daemon_cluster import DaemonCluster
from fault_story import undisturbed_digest
from muond_process import ProcessTest, wait_until
from muond_stubs import optimizer
from tcp_proxy import DOWN, UP

DEAD = 2  # the daemon that dies
RANKS = 2


def last_failure(trainer):
    return trainer.failures()[-1]


class Late:
    """A cluster whose deadlines are short, and a run in which somebody is late. What had come in is
    kept, and the run ends in the bytes of an undisturbed one."""

    TRAINING = {"steps": 3, "seed": 3, "skip_every": 3}

    def __init__(self, test, digest, **options):
        self.test, self.digest = test, digest
        self.cluster = DaemonCluster(test, 3, proxies=True, **options)
        self.ranks = self.cluster.start_ranks(call_timeout=8, step_timeout=8, **self.TRAINING)
        for trainer in self.ranks:
            trainer.hold("failed")

    def expect_deadline(self, late):
        """The other ranks are told who is late."""
        for trainer in self.ranks:
            if trainer is late:
                continue
            trainer.wait_held("failed")
            failure = last_failure(trainer)
            assert (failure["call"], failure["code"]) == ("finish", "DEADLINE_EXCEEDED"), failure
            self.test.assertRegex(failure["message"], rf"missing: ranks \[{late.rank}\]")

    def paused_before_begin(self):
        late = self.ranks[1]
        late.hold("begin", 1)
        late.wait_held("begin", 1)
        late.stop()
        self.expect_deadline(late)
        late.resume()
        late.say()
        self.finish()

    def paused_in_the_middle_of_a_push(self):
        late = self.ranks[2]
        late.hold("push", 1)
        late.wait_held("push", 1)
        hold = self.cluster.proxy[0].hold(late.name, UP, 1500)
        late.say()
        hold.wait()
        late.stop()
        self.expect_deadline(late)
        late.resume()
        hold.release()
        self.finish()

    def silent_daemon(self):
        """It has stopped itself where the fault point says."""
        for trainer in self.ranks:
            trainer.wait_held("failed")
            failure = last_failure(trainer)
            assert failure["code"] in ("UNAVAILABLE", "DEADLINE_EXCEEDED"), failure
            self.test.assertIn(self.cluster.names[DEAD], failure["message"])
        assert self.cluster.stopped(DEAD)
        self.cluster.resume(DEAD)
        self.finish()

    def finish(self):
        for trainer in self.ranks:
            trainer.unhold()
            if trainer.held and trainer.held[0] == "failed":
                trainer.say("again")
        for trainer in self.ranks:
            trainer.wait_done()
            trainer.check_deadlines()
        self.test.assertEqual(self.cluster.digest(), self.digest)


class LateTest(ProcessTest):

    def test_whoever_is_late_is_named(self):
        """All at once: they mostly wait for deadlines."""
        digest = undisturbed_digest(self, **Late.TRAINING)

        def silent(point):
            Late(self, digest, flags=["--peer-patience", "1s"],
                 flags_of={DEAD: ["--fault-points", point]}).silent_daemon()

        with ThreadPoolExecutor() as pool:
            cases = {
                "rank before begin": pool.submit(lambda: Late(self, digest).paused_before_begin()),
                "rank in a push": pool.submit(
                    lambda: Late(self, digest).paused_in_the_middle_of_a_push()),
                "daemon before its vote": pool.submit(silent, "stop_in_reduce:3"),
                "daemon in its commit": pool.submit(silent, "stop_in_commit"),
                "daemon before its replies": pool.submit(silent, "stop_before_finish_reply"),
            }
        for name, case in cases.items():
            with self.subTest(name):
                case.result()


class DaemonDeathTest(ProcessTest):
    """One daemon is killed while a run stands at each phase of its second step."""

    STEPS = 4
    # Run: the steps that it may be able to go on with after the death. One that dies in its commit
    # may have told nobody of its vote.
    RUNS = {"opened": {0}, "begin": {1}, "push": {1}, "finish": {1}, "pull": {2},
            "within-push": {1}, "within-finish": {2}, "within-pull": {2}, "commit": {1, 2}}

    def start_run(self, name):
        """Its ranks stand where the run's name says."""
        seconds = 3 * RANKS  # many processes get little time each
        ranks = self.cluster.start_ranks(
            RANKS, run=name, steps=self.STEPS, home=len(self.ranks) % 3, chunk_bytes=1024,
            call_timeout=seconds, step_timeout=seconds, bulk_timeout=seconds)
        self.ranks[name] = ranks
        phase, step = {"opened": ("begin", 0), "commit": ("finish", 1),
                       "within-push": ("push", 1), "within-finish": ("finish", 1),
                       "within-pull": ("pull", 1)}.get(name, (name, 1))
        for trainer in ranks:
            trainer.hold("failed")
            trainer.hold(phase, step)
        return phase, step

    def bring(self, name, phase, step):
        ranks = self.ranks[name]
        for trainer in ranks:
            trainer.wait_held(phase, step)
        if not name.startswith("within-"):
            return
        first, proxy = ranks[0], self.cluster.proxy[DEAD]
        hold = proxy.hold(first.name, UP if phase == "push" else DOWN,
                          0 if phase == "finish" else 1500)
        # Nobody has newer values than the others: what is replicated must be the same on all.
        for trainer in ranks[1:]:
            trainer.hold("pull", 1)
        for trainer in ranks:
            if trainer is first or phase != "pull":
                trainer.say()
        hold.wait()
        if phase == "push":
            wait_until(lambda: list(self.cluster.status(name).waiting_ranks) == [0],
                       "the other ranks to finish")
        if phase == "finish":
            for trainer in ranks[1:]:
                trainer.wait_held("pull", 1)

    def test_killed_at_every_phase(self):
        # Commits on that daemon before the one that it dies in: everybody's first step, but of the
        # run that has not begun, and three second ones.
        before = len(self.RUNS) - 1 + 3
        self.cluster = DaemonCluster(
            self, 3, proxies=True, flags=["--peer-patience", "1s"],
            flags_of={DEAD: ["--fault-points", f"stop_in_commit:{before}"]})
        self.ranks = {}
        self.resume = {}
        places = {name: self.start_run(name) for name in self.RUNS}
        for name, place in places.items():
            self.bring(name, *place)
        for trainer in self.ranks["commit"]:
            trainer.say()
        self.cluster.wait_stopped(DEAD)
        self.cluster.kill(DEAD)
        self.cluster.proxy[DEAD].reset()
        for name, ranks in self.ranks.items():
            for trainer in ranks:
                if trainer.held:
                    trainer.say()
        self.check_told()
        self.cluster.restart(DEAD)
        self.check_refused()
        self.check_going_on()

    def check_told(self):
        """Every rank of every run hears of the death in time, by the daemon's name."""
        for name, ranks in self.ranks.items():
            for trainer in ranks:
                trainer.wait_held("failed")
                failure = last_failure(trainer)
                with self.subTest(run=name, rank=trainer.rank, failure=failure):
                    self.assertEqual(failure["code"], "UNAVAILABLE")
                    self.assertIn(self.cluster.names[DEAD], failure["message"])
                trainer.check_deadlines()
            applied = {self.cluster.status(name, daemon).steps_applied for daemon in (0, 1)}
            self.assertEqual(len(applied), 1, f"{name}: survivors differ")
            self.resume[name] = applied.pop()
            self.assertIn(self.resume[name], self.RUNS[name], name)

    def check_refused(self):
        """The daemon is back, empty: nothing is applied any more, and all ranks learn why."""
        for name, resume in self.resume.items():
            if name == "opened":
                continue
            for trainer in self.ranks[name]:
                trainer.say("again")
            for trainer in self.ranks[name]:
                trainer.wait(lambda t=trainer: t.position and t.position["needs_restore"],
                             "to hear that the run needs a restore")
                self.assertEqual(trainer.position["next_step"], resume)
            status = self.cluster.status(name, DEAD)
            self.assertEqual(status.position.state, optimizer.RUN_STATE_NEEDS_RESTORE)
            self.assertEqual(status.position.resume_step, resume)
            with self.assertRaises(grpc.RpcError) as caught:
                self.cluster.ask(DEAD, "Begin", optimizer.BeginRequest(
                    id=optimizer.RunId(run=name, generation=status.position.generation),
                    rank=0, step=resume, loss_scale=status.loss_scale))
            self.assertEqual(caught.exception.code(), grpc.StatusCode.FAILED_PRECONDITION)
            self.assertIn(f"needs a restore before step {resume}", caught.exception.details())

    def check_going_on(self):
        for name, ranks in self.ranks.items():
            for trainer in ranks:
                trainer.unhold()
                trainer.say("again" if name == "opened" else "reinitialize")
        for name, ranks in self.ranks.items():
            for trainer in ranks:
                trainer.wait_done()
                trainer.check_deadlines()
            self.assertEqual(len({self.cluster.digest(name, daemon) for daemon in range(3)}), 1)
            # Fresh momentum: only the steps since then count. Each daemon knows of what it owns.
            request = optimizer.DescribeParametersRequest(run=name)
            states = [self.cluster.ask(daemon, "DescribeParameters", request).parameters
                      for daemon in range(3)]
            for parameter in zip(*states):
                self.assertEqual(max(state.t for state in parameter),
                                 self.STEPS - self.resume[name], parameter[0].parameter.name)


if __name__ == "__main__":
    if "--ranks" in sys.argv:
        at = sys.argv.index("--ranks")
        RANKS = int(sys.argv[at + 1])
        del sys.argv[at:at + 2]
    unittest.main()
