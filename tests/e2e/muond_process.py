"""Starts the programs as a user would: a daemon in a directory of its own, tools that end by
themselves, and the test case that shows the daemons' logs when something fails."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Sanitizers slow everything down; a test that waits this long has failed.
START_SECONDS = 60
STOP_SECONDS = 60
# The line of the log; a warning about plain TCP has quotes.
LISTENING = r'listening on ([^\s"]+)[\n"]'


def program(name):
    """The path of a program of this build. A missing one is a failure, never a skip."""
    path = pathlib.Path(os.environ["MUOND_BIN_DIR"]) / name
    assert path.exists(), f"{path}: was not built"
    return str(path)


def clean_environment(**settings):
    """This process's environment without its MUOND_* variables, plus `settings`."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("MUOND_")}
    return {**kept, **settings}


def run_program(name, *arguments, environment=None, timeout=60):
    """Runs a program to its end; returns what subprocess.run does, with text output."""
    return subprocess.run(
        [program(name), *map(str, arguments)], env=clean_environment(**(environment or {})),
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout, check=False)


def wait_until(condition, what, seconds=30):
    """Asks until the answer is true and returns it; after `seconds`, an assertion names `what`."""
    deadline = time.monotonic() + seconds
    while True:
        answer = condition()
        if answer:
            return answer
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(0.02)


class Daemon:
    """A muond process on a unix socket and free ports of 127.0.0.1, its log beside the socket."""

    def __init__(self, *flags, directory, environment=None, listen=None,
                 metrics="127.0.0.1:0", grace_seconds=1, wait=True, prefix=()):
        self.directory = pathlib.Path(directory)
        self.socket = self.directory / "muond.sock"
        self.log_path = self.directory / f"muond-{time.monotonic_ns()}.log"
        addresses = listen or [f"unix://{self.socket}", "127.0.0.1:0"]
        arguments = [*prefix, program("muond"), "--metrics-address", metrics, "--drain-grace",
                     f"{grace_seconds}s"]
        for address in addresses:
            arguments += ["--listen", address]
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen(
                arguments + list(map(str, flags)), env=clean_environment(**(environment or {})),
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        self.unix = self.tcp = self.metrics = ""
        self.listening = len(addresses)
        self.has_metrics = metrics != "none"
        if wait:
            self.wait_for_addresses()

    def wait_for_addresses(self):
        """Until it listens; then `unix`, `tcp` and `metrics` are known."""
        def ready():
            assert self.process.poll() is None, f"muond ended at once:\n{self.log()}"
            if self.has_metrics:
                return re.search(r"metrics on (http://\S+)/metrics", self.log())
            return len(re.findall(LISTENING, self.log())) == self.listening

        told = wait_until(ready, "muond's start", START_SECONDS)
        self.metrics = told[1] if self.has_metrics else ""
        addresses = re.findall(LISTENING, self.log())
        assert len(addresses) == self.listening, (
            f"{self.listening} addresses wanted, log has {addresses}")
        self.unix = next((a for a in addresses if a.startswith("unix:")), "")
        self.tcp = next((a for a in addresses if not a.startswith("unix:")), "")
        assert not self.tcp.endswith(":0"), f"{self.tcp}: the log must name the port"

    def log(self):
        return self.log_path.read_text(errors="replace")

    def terminate(self):
        self.process.send_signal(signal.SIGTERM)

    def kill(self):
        """kill -9: no chance to clean up."""
        self.process.kill()
        self.process.wait(STOP_SECONDS)

    def wait(self, seconds=STOP_SECONDS):
        """The exit code."""
        return self.process.wait(seconds)

    def stop(self):
        """SIGTERM, and a clean end; does nothing when the process has ended before."""
        if self.process.poll() is not None:
            return
        self.terminate()
        try:
            code = self.wait()
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"muond did not end within {STOP_SECONDS} s of SIGTERM") from None
        assert code == 0, f"muond ended with {code} after SIGTERM"
        assert not self.socket.exists(), "muond left its socket behind"


class ProcessTest(unittest.TestCase):
    """A test with a scratch directory whose daemons end, cleanly, with it."""

    maxDiff = None

    def run(self, result=None):
        # A socket's path has at most 107 bytes, whatever TMPDIR says.
        with tempfile.TemporaryDirectory(prefix="muond-e2e-", dir="/tmp") as directory:
            self.directory = pathlib.Path(directory)
            self.daemons = []
            bad = len(result.failures) + len(result.errors)
            super().run(result)
            if len(result.failures) + len(result.errors) > bad:
                for daemon in self.daemons:
                    print(f"---- {self.id()}: {daemon.log_path}\n{daemon.log()}", file=sys.stderr)

    def start_daemon(self, *flags, **options):
        daemon = Daemon(*flags, **{"directory": self.directory, **options})
        self.daemons.append(daemon)
        self.addCleanup(daemon.stop)
        return daemon
