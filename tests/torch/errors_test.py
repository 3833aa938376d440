"""Errors that a trainer meets: each a Python exception of its kind, with a hint; none a hang."""

import concurrent.futures
import os
import signal
import subprocess
import sys
import time
import unittest

from harness import TorchTest, copy_of, mlp, moved, train

import torch
from torch import nn

import muond.torch
from muond import errors

SHORT = {"call_timeout": 1., "step_timeout": 2., "bulk_timeout": 2., "recovery_timeout": 1.}


class Errors(TorchTest):
    def within(self, kind, call):
        """The error that `call` must raise, in seconds and not in the minutes of the defaults; its
        hint is not empty."""
        start = time.monotonic()
        with self.assertRaises(kind) as caught:
            call()
        self.assertLess(time.monotonic() - start, 28)
        self.assertIn("hint: ", str(caught.exception))
        return caught.exception

    def test_no_daemon(self):
        model = mlp()
        opt = muond.torch.Muon(model, endpoint="127.0.0.1:1", **SHORT)
        error = self.within(errors.DaemonUnavailable, lambda: train(model, opt, 1))
        self.assertIsInstance(error, ConnectionError)
        self.assertIn("127.0.0.1:1", str(error))
        self.assertIn("muonctl", error.hint)

    def test_no_endpoint(self):
        model = mlp()
        opt = muond.torch.Muon(model)
        self.assertNotIn("MUOND_ENDPOINT", os.environ)
        self.assertIn("MUOND_ENDPOINT",
                      str(self.within(errors.MuondError, lambda: train(model, opt, 1))))

    def test_a_daemon_that_dies_and_one_that_stops_answering(self):
        for end in (signal.SIGKILL, signal.SIGSTOP):
            daemon, model = self.daemon(), mlp()
            opt = self.remote(model, daemon, **SHORT)
            train(model, opt, 2)
            before = copy_of(model)
            os.kill(daemon.process.pid, end)
            kinds = (errors.DaemonUnavailable, errors.StepTimeout)
            self.within(kinds, lambda: train(model, opt, 1))
            self.assertEqual(moved(model, before), 0)
            if end == signal.SIGSTOP:
                os.kill(daemon.process.pid, signal.SIGCONT)
                opt.step()
                self.assertEqual(opt.last_outcome.applied_steps, 3)
            else:
                daemon.process.wait()
                daemon.socket.unlink()

    def test_a_daemon_that_comes_back_without_its_state(self):
        daemon, model = self.daemon(), mlp()
        opt = self.remote(model, daemon, **SHORT)
        train(model, opt, 1)
        daemon.kill()
        daemon.socket.unlink()
        self.daemon(directory=daemon.directory)
        error = self.within(errors.StateLost, lambda: train(model, opt, 1))
        self.assertIn("--checkpoint-dir", error.hint)
        opt.restart_from_parameters()
        train(model, opt, 1)
        self.assertEqual(opt.last_outcome.applied_steps, 1)

    def test_a_run_that_is_taken(self):
        daemon, model = self.daemon(), mlp()
        train(model, self.remote(model, daemon), 1)
        error = self.within(errors.RunTaken,
                            lambda: train(model, self.remote(model, daemon), 1))
        self.assertIn("MUOND_RUN", error.hint)

    def test_a_run_of_other_shapes(self):
        daemon = self.daemon()
        first = nn.Parameter(torch.ones(4, 4))
        first.grad = torch.ones(4, 4)
        opt = self.remote([("w", first)], daemon, session="same")
        opt.step()
        opt.release()
        other = nn.Parameter(torch.ones(4, 8))
        other.grad = torch.ones(4, 8)
        error = self.within(errors.RegistrationError,
                            self.remote([("w", other)], daemon, session="same").step)
        self.assertIn('"w"', str(error))

    def test_shapes_that_can_not_be(self):
        flat = nn.Parameter(torch.zeros(5))
        flat.muond_shape = (4, 4)
        flat.grad = torch.zeros(5)
        opt = self.local([("w", flat)])
        self.assertIn("which part", str(self.within(errors.ShapeMismatch, opt.step)))
        flat.muond_offset = 12
        self.assertIn("outside", str(self.within(errors.ShapeMismatch, opt.step)))
        flat.muond_offset = 2
        error = self.within(errors.RegistrationError, opt.step)  # a part alone leaves gaps
        self.assertIn('"w"', str(error))

    def test_double_precision_is_refused_by_name(self):
        double = nn.Parameter(torch.zeros(4, 4, dtype=torch.float64))
        double.grad = torch.zeros_like(double)
        opt = self.local([("w", double)])
        self.assertIn("float64", str(self.within(errors.RegistrationError, opt.step)))

    def test_other_threads_go_on_while_one_waits(self):
        model = mlp()
        opt = muond.torch.Muon(model, endpoint="127.0.0.1:1", **SHORT)
        with concurrent.futures.ThreadPoolExecutor() as pool:
            waiting = pool.submit(train, model, opt, 1)
            ticks = 0
            while not waiting.done():
                time.sleep(0.01)
                ticks += 1
            self.assertIsInstance(waiting.exception(), errors.DaemonUnavailable)
        self.assertGreater(ticks, 2, "the interpreter was held")

    def test_a_forked_child_leaves_its_parents_run_alone(self):
        daemon, model = self.daemon(), mlp()
        opt = self.remote(model, daemon)
        train(model, opt, 1)
        child = os.fork()
        if child == 0:
            opt.close()
            os._exit(0)
        self.assertEqual(os.waitpid(child, 0)[1], 0)
        train(model, opt, 1)
        self.assertEqual(opt.last_outcome.applied_steps, 2)


class Library(unittest.TestCase):
    def run_python(self, code, **environment):
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                              env={**os.environ, **environment}, timeout=60, check=False)

    def test_a_library_that_is_not_there_or_is_another(self):
        code = (f"import sys; sys.path[:0] = {sys.path[:2]!r}; from muond import _library as l; "
                "l.load()")
        for path, words in (("/nowhere.so", "nowhere"), ("/etc/hostname", "hostname")):
            done = self.run_python(code, MUOND_LIBRARY=path)
            self.assertIn("muond.errors.LibraryError", done.stderr)
            self.assertIn(words, done.stderr)
            self.assertIn("pip install", done.stderr)
        done = self.run_python(code.replace("l.load()", "l.ABI_VERSION = 99; l.load()"))
        self.assertIn("has interface 1, this package needs 99", done.stderr)


class Versions(TorchTest):
    def test_a_daemon_of_another_version(self):
        for answer, words in (("9.7.1", "it is 9.7.1"), ("", "no muond")):
            server = subprocess.Popen(
                ["/usr/bin/python3", "-B",
                 os.path.join(os.path.dirname(__file__), "other_version.py"), answer],
                stdout=subprocess.PIPE, text=True)
            self.addCleanup(server.stdout.close)
            self.addCleanup(server.wait)
            self.addCleanup(server.kill)
            address = server.stdout.readline().strip()
            model = mlp()
            opt = muond.torch.Muon(model, endpoint=address, call_timeout=10.)
            with self.assertRaisesRegex(errors.VersionMismatch, words) as caught:
                train(model, opt, 1)
            self.assertIn("muonctl version", caught.exception.hint)


if __name__ == "__main__":
    unittest.main()
