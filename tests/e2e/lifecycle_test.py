#!/usr/bin/env python3
"""Daemons and trainers that end in the middle of things, and what the others see of it."""

import json
import pathlib
import signal
import subprocess
import sys
import threading
import time
import unittest
import urllib.error
import urllib.request

import grpc
import numpy as np

import trainer_process
from foreign_trainer import Trainer, parameter
from muond_process import ProcessTest, clean_environment, wait_until
from muond_stubs import optimizer, optimizer_grpc, types

GRACE_SECONDS = 5


def http_status(url):
    try:
        with urllib.request.urlopen(url, timeout=10) as reply:
            return reply.status
    except urllib.error.HTTPError as error:
        return error.code


def daemon_answers(address):
    with grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        reply = optimizer_grpc.OptimizerStub(channel).Status(optimizer.StatusRequest(), timeout=10)
        return reply.pid


class HeldStream:
    """A Push that sends its first chunk and stays open until `release`."""

    def __init__(self, trainer, step, gradients):
        self._released = threading.Event()
        self._requests = trainer.push_requests(step, gradients)
        self.call = trainer.stub.Push.future(self._send(), timeout=60)

    def _send(self):
        yield next(self._requests)
        self._released.wait(60)
        yield from self._requests

    def release(self):
        self._released.set()


class DrainTest(ProcessTest):

    def setUp(self):
        self.daemon = self.start_daemon(grace_seconds=GRACE_SECONDS)

    def half_a_step(self):
        """A run of two ranks: rank 0 waits in Finish, rank 1 is in the middle of a Push."""
        run = types.Run(name="drain", world_size=2, parameters=[parameter("w", [2, 4])],
                        groups=[types.Group(name="weights")])
        boxes = [{"w": [types.Box(offset=[rank, 0], size=[1, 4])]} for rank in range(2)]
        ranks = [Trainer(self.daemon.unix, run, rank=r, slices=boxes[r], chunk_bytes=8)
                 for r in range(2)]
        tensor = {"w": np.ones((2, 4), np.float32)}
        for trainer in ranks:
            trainer.register()
        for trainer in ranks:
            trainer.initialize(tensor)
        for trainer in ranks:
            trainer.begin(0)
        ranks[0].push(0, tensor)
        waiting = ranks[0].stub.Finish.future(ranks[0].finish_request(0), timeout=60)
        held = HeldStream(ranks[1], 0, tensor)
        self.addCleanup(held.release)
        wait_until(lambda: ranks[0].status().waiting_ranks == [1], "rank 0 to wait for rank 1")
        self.assertFalse(waiting.done())
        return ranks, waiting, held

    def test_sigterm_in_the_middle_of_a_step(self):
        _, waiting, held = self.half_a_step()
        start = time.monotonic()
        self.daemon.terminate()
        error = waiting.exception(timeout=20)
        self.assertEqual(error.code(), grpc.StatusCode.UNAVAILABLE, error.details())
        self.assertIn("shutting down", error.details())
        self.assertLess(time.monotonic() - start, GRACE_SECONDS, "a waiter is told at once")
        self.assertEqual(http_status(self.daemon.metrics + "/readyz"), 503)
        self.assertEqual(http_status(self.daemon.metrics + "/healthz"), 200)
        error = held.call.exception(timeout=20)
        self.assertEqual(error.code(), grpc.StatusCode.UNAVAILABLE, error.details())
        self.assertEqual(self.daemon.wait(), 0)
        self.assertLess(time.monotonic() - start, GRACE_SECONDS + 10, "within the grace")
        self.assertFalse(self.daemon.socket.exists())
        self.assertIn("stopped", self.daemon.log())

    def test_a_stream_that_goes_on_while_draining_is_told(self):
        ranks, waiting, held = self.half_a_step()
        self.daemon.terminate()
        waiting.exception(timeout=20)
        held.release()
        start = time.monotonic()
        error = held.call.exception(timeout=20)
        self.assertEqual(error.code(), grpc.StatusCode.UNAVAILABLE, error.details())
        self.assertEqual(self.daemon.wait(), 0)
        self.assertLess(time.monotonic() - start, GRACE_SECONDS + 10)
        with self.assertRaises(grpc.RpcError) as caught:
            ranks[0].status()
        self.assertEqual(caught.exception.code(), grpc.StatusCode.UNAVAILABLE)

    def test_a_second_sigterm_changes_nothing(self):
        _, waiting, _ = self.half_a_step()
        for _ in range(3):
            self.daemon.terminate()
            waiting.exception(timeout=20)
        self.assertEqual(self.daemon.wait(), 0)
        self.assertFalse(self.daemon.socket.exists())

    def test_sigint_stops_it_as_well(self):
        self.daemon.process.send_signal(signal.SIGINT)
        self.assertEqual(self.daemon.wait(), 0)

    def test_sigterm_during_a_commit(self):
        """The step is finished or aborted, and its caller hears which."""
        daemon = self.start_daemon("--fault-points", "delay_commit", listen=["127.0.0.1:0"])
        trainer = Trainer(daemon.tcp, trainer_process.run_named("slow"))
        trainer.register()
        trainer.initialize(trainer_process.values())
        trainer.begin(0)
        trainer.push(0, trainer_process.gradients())
        finish = trainer.stub.Finish.future(trainer.finish_request(0), timeout=60)
        time.sleep(0.3)  # into the second that the commit takes
        daemon.terminate()
        error = finish.exception(timeout=30)
        if error is None:
            self.assertTrue(finish.result().outcome.applied)
        else:
            self.assertEqual(error.code(), grpc.StatusCode.UNAVAILABLE, error.details())
        self.assertEqual(daemon.wait(), 0)


class TrainerDeathTest(ProcessTest):

    def setUp(self):
        self.daemon = self.start_daemon()

    def start_trainer(self, run, session, what):
        script = pathlib.Path(trainer_process.__file__)
        process = subprocess.Popen(
            [sys.executable, str(script), self.daemon.unix, run, session, what],
            env=clean_environment(TMPDIR=str(self.directory)), stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True)
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        return process

    def complete(self, run, session):
        out, err = self.start_trainer(run, session, "complete").communicate(timeout=60)
        self.assertTrue(out, err)
        return json.loads(out)

    def test_killed_in_a_push_then_restarted(self):
        undisturbed = self.complete("undisturbed", "a")
        self.assertEqual(undisturbed["rejoined"], False)
        first = self.start_trainer("disturbed", "a", "stall")
        self.assertEqual(json.loads(first.stdout.readline()), {"stalled": True})
        first.kill()
        first.wait(30)
        self.assertEqual(daemon_answers(self.daemon.unix), self.daemon.process.pid)
        self.assertEqual(http_status(self.daemon.metrics + "/readyz"), 200)
        other, err = self.start_trainer("disturbed", "b", "complete").communicate(timeout=60)
        self.assertEqual(other, "")
        self.assertIn("ALREADY_EXISTS", err)
        again = self.complete("disturbed", "a")
        self.assertEqual(again, {**undisturbed, "rejoined": True})
        self.assertIsNone(self.daemon.process.poll(), "the daemon lives on")


class AddressTest(ProcessTest):
    """Who may have an address: a socket left behind is replaced, a living daemon's never."""

    def expect_refusal(self, *words, **options):
        daemon = self.start_daemon(**options, wait=False)
        self.assertEqual(daemon.wait(), 1, daemon.log())
        for word in words:
            self.assertIn(word, daemon.log())

    def test_a_socket_left_behind_is_replaced(self):
        first = self.start_daemon()
        first.kill()
        self.assertTrue(first.socket.is_socket(), "kill -9 leaves the file")
        second = self.start_daemon()
        self.assertEqual(second.unix, first.unix)
        self.assertEqual(daemon_answers(second.unix), second.process.pid)

    def test_a_living_daemon_keeps_its_socket(self):
        first = self.start_daemon()
        self.expect_refusal("cannot bind", str(first.socket), "another daemon",
                            listen=[f"unix://{first.socket}"])
        self.assertEqual(daemon_answers(first.unix), first.process.pid)
        self.assertEqual(daemon_answers(first.tcp), first.process.pid)

    def test_a_living_daemon_keeps_its_port(self):
        first = self.start_daemon()
        self.expect_refusal("cannot bind", first.tcp, "another daemon", listen=[first.tcp])
        self.assertEqual(daemon_answers(first.tcp), first.process.pid)

    def test_a_living_daemon_keeps_its_metrics_port(self):
        first = self.start_daemon()
        spare = self.directory / "spare.sock"
        taken = first.metrics.removeprefix("http://")
        self.expect_refusal("metrics address", taken, listen=[f"unix://{spare}"],
                            metrics=taken)
        self.assertFalse(spare.exists())

    def test_a_start_that_fails_takes_its_socket_with_it(self):
        first = self.start_daemon()
        spare = self.directory / "spare.sock"
        self.expect_refusal("cannot bind", first.tcp, listen=[f"unix://{spare}", first.tcp])
        self.assertFalse(spare.exists())

    def test_a_file_in_the_way_is_left_alone(self):
        path = self.directory / "muond.sock"
        path.write_text("precious")
        self.expect_refusal("no socket", str(path), listen=[f"unix://{path}"])
        self.assertEqual(path.read_text(), "precious")

    def test_the_directory_of_a_socket_is_private(self):
        path = self.directory / "made" / "muond.sock"
        daemon = self.start_daemon(listen=[f"unix://{path}"])
        self.assertEqual(path.parent.stat().st_mode & 0o777, 0o700)
        self.assertEqual(daemon_answers(daemon.unix), daemon.process.pid)


if __name__ == "__main__":
    unittest.main()
