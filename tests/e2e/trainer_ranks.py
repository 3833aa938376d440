"""Trainer ranks as real processes (tests/e2e/trainer): each tells of its calls and waits for a word
before each phase of a step, so that a test knows exactly where it stands when something happens."""

import contextlib
import json
import os
import signal
import subprocess
import threading
import time

from muond_process import clean_environment, program

# What a call may take beside its deadline: threads that get no processor. Machines are busy.
SLACK_SECONDS = 3
WAIT_SECONDS = 90


class Trainer:
    """One rank. It passes every phase by itself but those that `hold` names."""

    def __init__(self, rank, run, directory, arguments, pids, prefix=()):
        self.rank = rank
        self.name = f"{run}-rank-{rank}"
        self.arguments = [*prefix, program("muond-test-trainer"), "--rank", str(rank),
                          *map(str, arguments)]
        self.log_path = directory / f"{self.name}-{time.monotonic_ns()}.log"
        self.pids = pids    # {name: pid} of all, for the proxies
        self.calls = []     # what it told of each, of all its lives
        self.outcomes = {}  # by step
        self.interruptions = []  # that its session has told of
        self.times = None   # of one that ran free
        self.holds = {}     # phase: step, or None for every step
        self.held = None    # (phase, step) when it waits for a word
        self.position = None  # where it knew the run to stand when it last asked for a word
        self.done = False
        self.stopped_at = None
        self.changed = threading.Condition()
        self.start()

    def start(self):
        """A new life, under the same name."""
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(
                self.arguments, env=clean_environment(), stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=log, text=True)
        self.pids[self.name] = self.process.pid
        self.done = False
        self.reader = threading.Thread(target=self._read, args=(self.process,), daemon=True)
        self.reader.start()

    def _read(self, process):
        for line in process.stdout:
            event = json.loads(line)
            with self.changed:
                if process is self.process:
                    self._take(event)
                self.changed.notify_all()
        with self.changed:
            self.changed.notify_all()

    def _take(self, event):
        kind = event["event"]
        if kind == "call":
            # Time in which it was stopped is not the call's.
            self.calls.append(event)
        elif kind == "outcome":
            self.outcomes[event["step"]] = event
        elif kind == "interruption":
            self.interruptions.append(event["text"])
        elif kind == "times":
            self.times = event["seconds"]
        elif kind == "done":
            self.done = True
        elif kind == "at":
            phase, step = event["phase"], event["step"]
            self.position = event if "needs_restore" in event else None
            if phase in self.holds and self.holds[phase] in (None, step):
                self.held = (phase, step)
            else:
                self._say("again" if phase == "failed" else "go")

    def _say(self, word):
        self.held = None
        try:
            self.process.stdin.write(word + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it died; whoever waits for it will see

    def hold(self, phase, step=None):
        """It stops before that phase of that step, or of every one, and waits for `say`. The phase
        "failed" comes after a call that failed."""
        with self.changed:
            self.holds[phase] = step

    def unhold(self, phase=None):
        """Of all phases, where none is named."""
        with self.changed:
            for each in [phase] if phase else list(self.holds):
                self.holds.pop(each, None)

    def say(self, word="go"):
        with self.changed:
            assert self.held, f"{self.name} waits for no word"
            self._say(word)

    def wait(self, condition, what, seconds=WAIT_SECONDS):
        """Until `condition()` is true; it is asked after everything that the trainer tells."""
        with self.changed:
            def over():
                return condition() or self.process.poll() not in (None, 0)
            reached = self.changed.wait_for(over, seconds)
            assert reached and condition(), (
                f"{self.name}: {what}: not within {seconds} s; held at {self.held}, exit code "
                f"{self.process.poll()}, last call {self.calls[-1:]}\n"
                f"{self.log_path.read_text(errors='replace')}")

    def wait_held(self, phase, step=None):
        self.wait(lambda: self.held is not None and self.held[0] == phase and
                  step in (None, self.held[1]), f"to come to {phase} of step {step}")

    def wait_done(self):
        self.wait(lambda: self.done, "to end")
        assert self.process.wait(WAIT_SECONDS) == 0

    def kill(self):
        """kill -9."""
        with self.changed:
            self.process.kill()
            self.held = None
        self._end()

    def _end(self):
        self.process.wait(WAIT_SECONDS)
        self.reader.join(WAIT_SECONDS)
        with contextlib.suppress(BrokenPipeError):  # what it was told when it died
            self.process.stdin.close()
        self.process.stdout.close()

    def restart(self):
        self.kill()
        self.start()

    def stop(self):
        """SIGSTOP."""
        os.kill(self.process.pid, signal.SIGSTOP)
        self.stopped_at = time.monotonic()

    def resume(self):
        """SIGCONT. The time that it was stopped is taken off the call that it was in."""
        stopped = time.monotonic() - self.stopped_at
        with self.changed:
            self.calls.append({"call": "stopped", "seconds": stopped})
        os.kill(self.process.pid, signal.SIGCONT)

    def failures(self):
        """Calls that did not end with OK."""
        return [call for call in self.calls if call.get("code", "OK") != "OK"]

    def check_deadlines(self):
        """Every call has ended within its deadline, whatever happened."""
        stopped = 0.0
        for call in self.calls:
            if call["call"] == "stopped":
                stopped += call["seconds"]
                continue
            allowed = call["limit"] + SLACK_SECONDS + stopped
            assert call["seconds"] <= allowed, (
                f"{self.name}: a call took longer than {allowed:.1f} s: {call}")
            stopped = 0.0

    def close(self):
        """Whatever state it is in."""
        if self.process.poll() is None:
            self.process.kill()
        self._end()
