#!/usr/bin/env python3
"""Real processes, three daemons and four trainer ranks, to which anything may happen at any moment:
deaths, pauses, cut connections, full and slow disks, jumping clocks, spoiled bytes, ranks that are
there twice, daemons that restart again and again. Every call must end within its deadline, the run
must go on, never fall behind its newest checkpoint, and end in the bytes of an undisturbed run.

usage: chaos_test.py [--faults 24] [--seed 1] [--buddy] [unittest's arguments]

What happens, and to whom, follows from the seed; where it meets a step does not. The long form
(--faults 300) is recorded in docs/testing.md. With --buddy daemons hold each other's state and have
no disk to go back to: one daemon at a time dies, and no step that any rank has the outcome of is
taken again.
"""

import argparse
import collections
import random
import sys
import time
import unittest

import grpc

from daemon_cluster import DaemonCluster
from fault_story import undisturbed_digest
from host_faults import HostFaults
from muond_process import ProcessTest
from muond_stubs import checkpoint as ck
from muond_stubs import checkpoint_grpc
from tcp_proxy import UP, Flip

OPTIONS = argparse.Namespace(faults=24, seed=1, buddy=False)
DAEMONS = 3
RANKS = 4
TRAINING = {"seed": 5, "skip_every": 5}
# A run that takes no step for so long hangs. Everything else waits seconds at most.
HANG_SECONDS = 60
CLOCK_JUMPS = (-3600, -5, 5, 3600)  # seconds


class Chaos:
    """One story. `test` is a ProcessTest."""

    def __init__(self, test, seed):
        self.test = test
        self.random = random.Random(seed)
        self.told = []
        self.counts = collections.Counter()
        self.codes = collections.Counter()
        self.endings = []  # (when, what to do) of what lasts for a while
        self.stop_at = None  # the step at which all ranks wait
        self.floors = {}  # by rank process: it may not resume before this step
        self.reached = 0  # with buddies: the step after the newest that any rank has an outcome of
        self.checkpoints = test.directory / "checkpoints"
        self.checkpoints.mkdir()
        kept = ["--buddy-steps", "4"] if OPTIONS.buddy else [
            "--checkpoint-dir", self.checkpoints, "--checkpoint-every-steps", "4",
            "--checkpoint-keep", "3"]
        self.hosts = [HostFaults(test.directory / f"host-{i}") for i in range(DAEMONS)]
        self.cluster = DaemonCluster(
            test, DAEMONS, proxies=True, environments=[host.environment for host in self.hosts],
            flags=["--backend", "cpu", "--threads", "1", "--peer-patience", "500ms", *kept])
        self.ranks = self.cluster.start_ranks(
            RANKS, steps=1 << 40, call_timeout=4, bulk_timeout=4, step_timeout=6,
            chunk_bytes=1024, **TRAINING)
        self.everyone = list(self.ranks)  # twins, too
        for rank in self.ranks:
            self.watch(rank)

    # -- What happens

    def kill_daemon(self, index=None):
        if index is None:
            index = self.random.randrange(DAEMONS)
            self.make_good()
        self.cluster.resume(index)  # the dead don't mind
        self.cluster.kill(index)
        self.cluster.restart(index)
        return f"daemon {index}"

    def make_good(self):
        """With buddies: what died last is back, and its copies are where they belong."""
        if OPTIONS.buddy:
            self.progress(2)

    def restart_storm(self):
        victims = [self.random.randrange(DAEMONS) for _ in range(self.random.randint(2, 5))]
        if OPTIONS.buddy:
            victims = victims[:1] * len(victims)
        self.make_good()
        for index in victims:
            self.kill_daemon(index)
            self.wait(self.random.random() * 0.2)
        return f"daemons {victims}"

    def pause_daemon(self):
        index = self.random.randrange(DAEMONS)
        self.cluster.stop(index)
        self.later(self.random.uniform(0.1, 1.5), lambda: self.cluster.resume(index))
        return f"daemon {index}"

    def kill_rank(self):
        rank = self.random.choice(self.ranks)
        if rank.stopped_at is not None:
            return "nobody: it is paused"
        rank.restart()
        self.watch(rank)
        return rank.name

    def pause_rank(self):
        rank = self.random.choice(self.ranks)
        if rank.stopped_at is not None:
            return "nobody: it is paused"
        rank.stop()

        def resume():
            rank.resume()
            rank.stopped_at = None
        self.later(self.random.uniform(0.1, 1.5), resume)
        return rank.name

    def double_rank(self):
        """Somebody starts a rank a second time."""
        original = self.random.choice(self.ranks)
        twin = self.cluster.start_rank(original.rank, "twin", original.arguments[3:])
        self.watch(twin)
        self.everyone.append(twin)

        def end():
            self.everyone.remove(twin)
            twin.kill()
            self.check_calls(twin)
        self.later(self.random.uniform(0.3, 2), end)
        return original.name

    def reset_connections(self):
        index = self.random.randrange(DAEMONS)
        who = self.random.choice([None, *(rank.name for rank in self.ranks)])
        self.cluster.proxy[index].reset(who)
        return f"{who or 'everybody'} and daemon {index}"

    def spoil_a_chunk(self):
        """In the middle of a push, to which the connection then belongs alone."""
        rank = self.random.choice(self.ranks)
        rank.hold("push")
        deadline = time.monotonic() + 5
        while not (rank.held and rank.held[0] == "push") and time.monotonic() < deadline:
            self.tick()
        rank.unhold("push")
        if not (rank.held and rank.held[0] == "push"):
            return "nobody: no push came"
        proxy = self.cluster.proxy[self.random.randrange(DAEMONS)]
        flip = Flip(rank.name, UP, self.random.randrange(100, 3000))
        proxy.flip = flip
        rank.say()
        # Only a push is safe to spoil: nothing but its own digests protects these bytes.
        while not rank.held and not flip.done and time.monotonic() < deadline:
            self.tick(ranks=[each for each in self.everyone if each is not rank])
        proxy.flip = None
        self.counts["spoiled bytes"] += flip.done
        return f"{rank.name}: {'done' if flip.done else 'nothing so long'}"

    def fill_the_disk(self):
        index = self.random.randrange(DAEMONS)
        self.hosts[index].disk_full(True)
        self.later(self.random.uniform(0.3, 2), lambda: self.hosts[index].disk_full(False))
        return f"daemon {index}"

    def slow_the_disk(self):
        index = self.random.randrange(DAEMONS)
        self.hosts[index].slow_sync(self.random.uniform(0.05, 0.5))
        self.later(self.random.uniform(0.5, 3), lambda: self.hosts[index].slow_sync(0))
        return f"daemon {index}"

    def clock_jump(self):
        index, seconds = self.random.randrange(DAEMONS), self.random.choice(CLOCK_JUMPS)
        self.hosts[index].clock_jump(seconds)
        return f"daemon {index}: {seconds} s"

    KINDS = (kill_daemon, restart_storm, pause_daemon, kill_rank, pause_rank, double_rank,
             reset_connections, spoil_a_chunk, fill_the_disk, slow_the_disk, clock_jump)

    # -- Time

    def later(self, seconds, action):
        self.endings.append((time.monotonic() + seconds, action))

    def tick(self, ranks=None):
        """Lets everybody go on who waits for a word, ends what is over, looks for the dead."""
        for ending in [each for each in self.endings if each[0] <= time.monotonic()]:
            self.endings.remove(ending)
            ending[1]()
        for index, daemon in enumerate(self.cluster.daemons):
            assert daemon.process.poll() is None, f"daemon {index} died: {self.told[-5:]}"
        for rank in self.everyone if ranks is None else ranks:
            if rank not in self.everyone:
                continue  # a twin whose time was over just now
            assert rank.process.poll() is None, f"{rank.name} died: {self.told[-5:]}"
            self.reached = max(self.reached, max(rank.outcomes, default=-1) + 1)
            if rank.held is not None:
                self.let_go(rank, *rank.held)
        time.sleep(0.01)

    def let_go(self, rank, phase, step):
        if phase == "failed":
            self.watch(rank)
            rank.say("again")
        elif phase == "begin" and step != self.stop_at:
            floor = self.floors.pop(rank, 0)
            assert step >= floor, f"{rank.name} resumes at {step}, {floor} was safe"
            rank.say()
        elif phase != "begin" and phase not in rank.holds:
            rank.say()

    def watch(self, rank):
        """It is about to ask where the run stands."""
        rank.hold("begin")
        rank.hold("failed")
        saved = [int(path.parent.name.rsplit("-", 1)[1])
                 for path in self.checkpoints.glob("**/ckpt-*/manifest.json")]
        self.floors[rank] = self.reached if OPTIONS.buddy else max(saved, default=0)

    def wait(self, seconds):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.tick()

    @staticmethod
    def taken(rank):
        return sum((call["call"], call.get("code")) == ("finish", "OK") for call in rank.calls)

    def progress(self, steps=1):
        """Every rank takes so many more."""
        wanted = {rank: self.taken(rank) + steps for rank in self.ranks}
        self.until(lambda: all(self.taken(rank) >= wanted[rank] for rank in self.ranks),
                   f"{steps} more steps")

    def until(self, condition, what):
        deadline = time.monotonic() + HANG_SECONDS
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"{what}: not within {HANG_SECONDS} s: {self.standing()}")
            self.tick()

    def standing(self):
        """Where everybody is."""
        lines = [f"{rank.name}: held at {rank.held}, {rank.position}, {rank.calls[-2:]}"
                 for rank in self.everyone]
        for index in range(DAEMONS):
            try:
                lines.append(f"daemon {index}: {self.cluster.status(index=index, seconds=5)}")
            except grpc.RpcError as error:
                lines.append(f"daemon {index}: {error.code()}: {error.details()}")
        return "\n".join(lines)

    # -- The story

    def save(self):
        with grpc.insecure_channel(self.cluster.listen[0]) as channel:
            checkpoint_grpc.CheckpointStub(channel).Save(ck.SaveRequest(run="run"), timeout=60)

    def run(self, faults):
        self.progress()
        if not OPTIONS.buddy:
            self.save()
        for number in range(faults):
            self.wait(self.random.random() * 0.6)
            kind = self.random.choice(self.KINDS)
            name = kind.__name__.replace("_", " ")
            self.counts[name] += 1
            self.told.append(f"{number}: {name}: ")
            self.told[-1] += kind(self)
            if self.random.random() < 0.4:
                self.progress()
        self.until(lambda: not self.endings, "what lasts to end")
        self.progress(2)
        return self.end()

    def end(self):
        """All ranks stand before one step; the state is that of all steps before it."""
        self.stop_at = max(rank.outcomes and max(rank.outcomes) for rank in self.ranks) + 3
        self.until(lambda: all(rank.held == ("begin", self.stop_at) for rank in self.ranks),
                   f"all ranks to come to step {self.stop_at}")
        for rank in self.ranks:
            self.check_calls(rank)
        return self.stop_at, {self.cluster.digest(index=i) for i in range(DAEMONS)}

    def check_calls(self, rank):
        rank.check_deadlines()
        self.codes.update(call["code"] for call in rank.failures())


class ChaosTest(ProcessTest):

    def test_whatever_happens_the_end_is_that_of_an_undisturbed_run(self):
        start = time.monotonic()
        chaos = Chaos(self, OPTIONS.seed)
        try:
            steps, digests = chaos.run(OPTIONS.faults)
        except AssertionError:
            print("\n".join(chaos.told), file=sys.stderr)
            raise
        seconds = time.monotonic() - start
        self.assertEqual(digests, {undisturbed_digest(self, steps=steps, **TRAINING)})
        how = ", buddies" if OPTIONS.buddy else ""
        print(f"seed {OPTIONS.seed}{how}: {OPTIONS.faults} faults in {seconds:.0f} s, "
              f"{steps} steps: {dict(chaos.counts)}; calls that failed: {dict(chaos.codes)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=OPTIONS.faults)
    parser.add_argument("--seed", type=int, default=OPTIONS.seed)
    parser.add_argument("--buddy", action="store_true")
    OPTIONS, rest = parser.parse_known_args()
    unittest.main(argv=[sys.argv[0], *rest])
