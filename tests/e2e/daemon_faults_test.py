#!/usr/bin/env python3
"""Daemons that are paused or killed at every phase of a step, and ranks that come too late: who is
told what, by when, and how the run goes on."""

import unittest

import grpc

from daemon_cluster import DaemonCluster
from fault_story import undisturbed_digest
from muond_process import ProcessTest, wait_until
from muond_stubs import optimizer
from tcp_proxy import DOWN, UP

DEAD = 2  # the daemon that dies


def last_failure(trainer):
    return trainer.failures()[-1]


class LateTest(ProcessTest):
    """Deadlines pass; what had come in is kept, and the run ends in the bytes of an undisturbed one."""

    STEPS = 3

    def setUp(self):
        self.digest = undisturbed_digest(self, seed=3, steps=self.STEPS, skip_every=3)

    def start(self, **options):
        self.cluster = DaemonCluster(self, 3, proxies=True, **options)
        self.ranks = self.cluster.start_ranks(
            steps=self.STEPS, seed=3, skip_every=3, call_timeout=4, step_timeout=4)
        for trainer in self.ranks:
            trainer.hold("failed")

    def finish(self):
        for trainer in self.ranks:
            trainer.unhold("failed")
            if trainer.held and trainer.held[0] == "failed":
                trainer.say("again")
        for trainer in self.ranks:
            trainer.wait_done()
            trainer.check_deadlines()
        self.assertEqual(self.cluster.digest(), self.digest)

    def test_a_rank_paused_before_begin_is_named_to_the_others(self):
        self.start()
        late = self.ranks[1]
        late.hold("begin", 1)
        late.wait_held("begin", 1)
        late.stop()
        for trainer in self.ranks:
            if trainer is late:
                continue
            trainer.wait_held("failed")
            failure = last_failure(trainer)
            self.assertEqual((failure["call"], failure["code"]), ("finish", "DEADLINE_EXCEEDED"))
            self.assertRegex(failure["message"], r"missing: .*rank.*\b1\b", failure)
        late.resume()
        late.say()
        self.finish()

    def test_a_rank_paused_in_the_middle_of_a_push_is_named_to_the_others(self):
        self.start()
        late = self.ranks[2]
        late.hold("push", 1)
        late.wait_held("push", 1)
        hold = self.cluster.proxy[0].hold(late.name, UP, 1500)
        late.say()
        hold.wait()
        late.stop()
        for trainer in self.ranks:
            if trainer is late:
                continue
            trainer.wait_held("failed")
            failure = last_failure(trainer)
            self.assertEqual((failure["call"], failure["code"]), ("finish", "DEADLINE_EXCEEDED"))
            self.assertRegex(failure["message"], r"missing: .*rank.*\b2\b", failure)
        late.resume()
        hold.release()
        self.finish()

    def silent(self, point):
        self.start(flags=["--peer-patience", "1s"],
                   flags_of={DEAD: ["--fault-points", point]})
        for trainer in self.ranks:
            trainer.wait_held("failed")
            failure = last_failure(trainer)
            self.assertIn(failure["code"], ("UNAVAILABLE", "DEADLINE_EXCEEDED"), failure)
            self.assertIn(self.cluster.names[DEAD], failure["message"])
        self.assertTrue(self.cluster.stopped(DEAD))
        self.cluster.resume(DEAD)
        self.finish()

    def test_a_daemon_paused_before_its_vote_is_named(self):
        self.silent("stop_in_reduce:3")

    def test_a_daemon_paused_in_its_commit_is_named(self):
        self.silent("stop_in_commit")


class DaemonDeathTest(ProcessTest):
    """One daemon is killed while a run stands at each phase of its second step."""

    STEPS = 4
    # Run: the step that it can go on with after the death.
    RUNS = {"opened": 0, "begin": 1, "push": 1, "finish": 1, "pull": 2, "within-push": 1,
            "within-finish": 2, "within-pull": 2, "commit": 2}

    def start_run(self, name):
        """Its four ranks stand where the run's name says."""
        ranks = self.cluster.start_ranks(
            run=name, steps=self.STEPS, home=len(self.ranks) % 3, chunk_bytes=1024,
            call_timeout=8, step_timeout=8, bulk_timeout=8)
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
        for trainer in ranks[1:]:
            if phase == "finish":
                trainer.hold("pull", 1)
            elif phase == "pull":
                trainer.hold("begin", 2)
        for trainer in ranks:
            trainer.say()
        hold.wait()
        if phase == "push":
            wait_until(lambda: list(self.cluster.status(name).waiting_ranks) == [0],
                       "the other ranks to finish")
        for trainer in ranks[1:]:
            if phase != "push":
                trainer.wait_held(*(("pull", 1) if phase == "finish" else ("begin", 2)))

    def test_killed_at_every_phase(self):
        # Commits on that daemon before the one that it dies in: everybody's first step, but of the
        # run that has not begun, and three second ones.
        before = len(self.RUNS) - 1 + 3
        self.cluster = DaemonCluster(
            self, 3, proxies=True, flags=["--peer-patience", "1s"],
            flags_of={DEAD: ["--fault-points", f"stop_in_commit:{before}"]})
        self.ranks = {}
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
            self.assertEqual(self.cluster.status(name).steps_applied, self.RUNS[name])

    def check_refused(self):
        """The daemon is back, empty: nothing is applied any more, and all ranks learn why."""
        for name, resume in self.RUNS.items():
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
            parameters = self.cluster.ask(
                0, "DescribeParameters", optimizer.DescribeParametersRequest(run=name)).parameters
            for parameter in parameters:
                self.assertEqual(parameter.t, self.STEPS - self.RUNS[name], parameter.parameter.name)


if __name__ == "__main__":
    unittest.main()
