"""A run of four trainer ranks on three daemons in which something happens at every step, at an
exact place of the step, and which must end in the bytes of a run in which nothing happens.

Places before a call are phases of the trainer; places within a call are bytes that a proxy holds
back, or a daemon that stops itself at a fault point."""

import random

from daemon_cluster import DaemonCluster
from muond_process import wait_until
from tcp_proxy import DOWN, UP

RANKS = 4
DAEMONS = 3
SKIP_EVERY = 5
# Places of one rank, and what happens to it there.
PHASES = ("begin", "push", "finish", "pull")
WITHIN = ("middle of push", "before the reply of finish", "middle of pull")
ACTIONS = ("kill", "pause", "reset")
# Places where a daemon stops itself, and how often each is passed in a step, about.
STOPS = {"stop_in_reduce": 3, "stop_in_commit": 1, "stop_before_finish_reply": 4}
DAEMON_ACTIONS = ("pause", "kill a rank", "reset")


def undisturbed_digest(test, seed, steps, skip_every=SKIP_EVERY):
    """Of the same training on one daemon, without proxies, where nothing happens."""
    cluster = DaemonCluster(test, 1, peers="")
    ranks = cluster.start_ranks(RANKS, steps=steps, seed=seed, skip_every=skip_every)
    for trainer in ranks:
        trainer.wait_done()
    skipped = sum(not outcome["applied"] for outcome in ranks[0].outcomes.values())
    assert 0 < skipped < steps, f"{skipped} of {steps} steps skipped: the seed proves too little"
    return cluster.digest()


class FaultStory:
    """One seed's story. `test` is a ProcessTest."""

    def __init__(self, test, seed, steps=None, whole_steps=False):
        self.random = random.Random(seed)
        self.seed = seed
        places = [(place, action) for place in PHASES + WITHIN for action in ACTIONS]
        if whole_steps:  # no word is asked for between Begin and the outcome
            places = [(place, action) for place, action in places
                      if place in ("begin", "pull", "middle of push", "middle of pull")]
        self.random.shuffle(places)
        self.plan = places[:steps]
        self.steps = len(self.plan) + 1
        self.told = []  # what happened, for the reader of a failure
        self.happened = []  # the same without names, for counting
        self.digest = undisturbed_digest(test, seed, self.steps)
        self.stops_left = {daemon: set() for daemon in (1, 2)}
        flags = {}
        for point, per_step in STOPS.items():
            daemon = self.random.choice((1, 2))
            after = self.random.randrange(1, max(2, per_step * self.steps // 2))
            self.stops_left[daemon].add(point)
            flags.setdefault(daemon, []).append(f"{point}:{after}")
        self.cluster = DaemonCluster(
            test, DAEMONS, proxies=True,
            flags_of={daemon: ["--fault-points", ",".join(points)]
                      for daemon, points in flags.items()})
        self.ranks = self.cluster.start_ranks(
            RANKS, home=self.random.randrange(DAEMONS), steps=self.steps, seed=seed,
            skip_every=SKIP_EVERY, chunk_bytes=1024 << self.random.randrange(4),
            **({"whole_steps": True} if whole_steps else {}))
        self.victim = None
        self.step = -1        # the one that all have begun
        self.holding = False  # all ranks stay at the begin of that step

    def run(self):
        """To the end; asserts what must hold."""
        for trainer in self.ranks:
            trainer.hold("begin")
        for step, (place, action) in enumerate(self.plan):
            self.settle(step)
            self.victim = self.random.choice(self.ranks)
            self.tell(f"{action} of {self.victim.name} at {place}", f"{action} at {place}")
            if place in PHASES:
                self.at_phase(place, action)
            else:
                self.within_call(place, action)
            self.victim = None
        self.settle(self.steps - 1)
        for trainer in self.ranks:
            trainer.unhold("begin")
        self.release()
        self.until(lambda: all(trainer.done for trainer in self.ranks), "the end")
        self.check()

    def tell(self, text, kind):
        self.told.append(f"step {self.step}: {text}")
        self.happened.append(kind)

    def check(self):
        for trainer in self.ranks:
            trainer.check_deadlines()
            for call in trainer.failures():
                # The deadlines are long: a rank may be told to begin again, but nobody gives up.
                assert call["code"] in ("ABORTED", "FAILED_PRECONDITION"), f"{trainer.name}: {call}"
        for daemon in range(DAEMONS):
            digest = self.cluster.digest(index=daemon)
            assert digest == self.digest, f"daemon {daemon}: {digest}, undisturbed {self.digest}"

    # -- Waiting, with an eye on the daemons that stop themselves

    def until(self, condition, what):
        def asked():
            for daemon in self.stops_left:
                if self.stops_left[daemon] and self.cluster.stopped(daemon):
                    self.on_stopped(daemon)
            for trainer in self.ranks:
                late = trainer.held == ("begin", self.step) and trainer is not self.victim
                if late and not self.holding:  # it has begun another life
                    trainer.say()
            return condition()
        wait_until(asked, f"seed {self.seed}: {what}: {self.told}", 90)

    def settle(self, step):
        """All ranks stand at the begin of `step`."""
        self.holding = False
        self.until(lambda: all(t.held == ("begin", step) for t in self.ranks),
                   f"all ranks to come to step {step}")
        self.holding = True
        self.step = step

    def release(self):
        """All begin the step, the victim too."""
        self.holding = False
        for trainer in self.ranks:
            trainer.say()

    def on_stopped(self, daemon):
        action = self.random.choice(DAEMON_ACTIONS)
        self.tell(f"daemon {daemon} stopped: {action}", f"{action} while a daemon stands still")
        if action == "kill a rank":
            killed = self.random.choice([t for t in self.ranks if t is not self.victim])
            killed.restart()
        elif action == "reset":
            self.cluster.proxy[daemon].reset()
        self.cluster.resume(daemon)  # to its next fault point perhaps

    # -- Faults of one rank

    def others_wait(self):
        """The other ranks are through with what they can do alone."""
        others = [trainer for trainer in self.ranks if trainer is not self.victim]

        def waiting():
            if all(trainer.held == ("begin", self.step + 1) for trainer in others):
                return True
            # A daemon that lacks nothing waits for the votes of those that do.
            return any(list(self.cluster.status(index=daemon).waiting_ranks) == [self.victim.rank]
                       for daemon in range(DAEMONS) if not self.cluster.stopped(daemon))
        self.until(waiting, f"the ranks beside {self.victim.rank} to wait")

    def at_phase(self, phase, action):
        victim = self.victim
        if phase == "begin":
            self.holding = False  # the victim stays where it is
            for trainer in self.ranks:
                if trainer is not victim:
                    trainer.say()
        else:
            victim.hold(phase, self.step)
            self.release()
            self.until(lambda: victim.held == (phase, self.step), f"victim to come to {phase}")
            victim.unhold(phase)
        self.do(action, None)

    def within_call(self, place, action):
        victim, proxy = self.victim, self.cluster.proxy[self.random.randrange(DAEMONS)]
        phase = place.split()[-1]
        if "--whole-steps" in victim.arguments and phase == "push":
            phase = "begin"
            self.holding = False
            for trainer in self.ranks:
                if trainer is not victim:
                    trainer.say()
        else:
            victim.hold(phase, self.step)
            self.release()
            self.until(lambda: victim.held == (phase, self.step), f"victim to come to {phase}")
            victim.unhold(phase)
        if phase == "finish":
            hold = proxy.hold(victim.name, DOWN)
        else:
            direction = DOWN if phase == "pull" else UP
            hold = proxy.hold(victim.name, direction, self.random.randrange(1200, 2600))
        victim.say()
        self.until(hold.reached.is_set, f"{place} of {victim.name}")
        if phase == "finish":
            self.others_wait()
        self.do(action, hold)

    def do(self, action, hold):
        """`hold`: of bytes; without it the victim waits for a word."""
        victim = self.victim
        if action == "kill":
            victim.kill()
            if hold is not None and self.random.random() < 0.5:
                hold.release()  # what it sent before its death arrives after it
        elif action == "pause":
            victim.stop()
        if action != "reset":
            self.others_wait()
        if action == "pause":
            victim.resume()
            if hold is not None:
                hold.release()
        if action in ("kill", "reset"):
            for proxy in self.cluster.proxy:
                proxy.reset(victim.name)
        if action == "kill":
            victim.restart()
        elif hold is None:
            victim.say()
