#!/usr/bin/env python3
"""Peers that mean harm, or are broken: each is refused with a clear error or cut off, is counted,
and the runs of others are served meanwhile and keep every byte. tests/e2e/tls_test.py has those
without the right certificate, tests/cluster/bad_*_test.cc wrong requests one by one."""

import pathlib
import re
import socket
import stat
import struct
import threading
import time
import unittest
import urllib.request

import grpc
import numpy as np

from foreign_trainer import Trainer, parameter, position_of
from muond_process import ProcessTest, wait_until
from muond_stubs import optimizer, optimizer_grpc, types

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADERS, SETTINGS, CONTINUATION = 1, 4, 9
MEMORY_MAX = 64 << 20  # what the worst of these may cost a daemon
FLOOD_BYTES = 8 << 20  # of headers without an end


def frame(kind, stream, payload, flags=0):
    return struct.pack("!I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(
        "!I", stream) + payload


class HostileTest(ProcessTest):

    def setUp(self):
        self.daemon = self.start_daemon("--backend", "reference")
        self.victim = Trainer(self.daemon.tcp, self.run_of("victim"))
        self.addCleanup(self.victim.channel.close)
        self.victim.register()
        self.victim.initialize({"w": np.eye(4, dtype=np.float32)})
        self.steps = 0
        self.serves()

    @staticmethod
    def run_of(name, **fields):
        return types.Run(name=name, world_size=1, parameters=[parameter("w", [4, 4])],
                         groups=[types.Group(name="weights")], **fields)

    def serves(self):
        """The victim takes a step, in good time."""
        start = time.monotonic()
        gradient = np.full((4, 4), self.steps + 1, np.float32)
        self.assertTrue(self.victim.step(self.steps, {"w": gradient}).applied)
        self.steps += 1
        self.assertLess(time.monotonic() - start, 20)

    def memory(self):
        text = pathlib.Path(f"/proc/{self.daemon.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+) kB", text)[1]) << 10

    def descriptors(self):
        return len(list(pathlib.Path(f"/proc/{self.daemon.process.pid}/fd").iterdir()))

    def handled(self, code):
        """How many calls ended with it, by the metrics."""
        with urllib.request.urlopen(self.daemon.metrics + "/metrics", timeout=20) as reply:
            text = reply.read().decode()
        return sum(float(value) for value in re.findall(
            rf'(?m)^grpc_server_handled_total{{[^}}]*grpc_code="{code}"[^}}]*}} (\S+)', text))

    def refused(self, code, call, *words):
        with self.assertRaises(grpc.RpcError) as caught:
            call()
        self.assertEqual(caught.exception.code(), code, caught.exception.details())
        for word in words:
            self.assertIn(word, caught.exception.details())
        return caught.exception

    def connect(self):
        host, port = self.daemon.tcp.rsplit(":", 1)
        connection = socket.create_connection((host, int(port)), timeout=20)
        self.addCleanup(connection.close)
        return connection

    # -- Connections

    def test_noise_harms_nobody(self):
        for noise in (b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 16,
                      PREFACE + b"\xff" * 64, PREFACE + frame(SETTINGS, 0, b"") + b"\x00" * 4096):
            connection = self.connect()
            connection.sendall(noise)
            self.serves()

    def test_a_flood_of_headers_in_one_call_is_refused(self):
        before = self.memory()
        with grpc.insecure_channel(self.daemon.tcp) as channel:
            stub = optimizer_grpc.OptimizerStub(channel)
            flood = [(f"x-{i}", "a" * 1000) for i in range(200)]
            with self.assertRaises(grpc.RpcError) as caught:
                stub.Status(optimizer.StatusRequest(), metadata=flood, timeout=30)
        # Which of the two depends on whether the refusal or the closed connection is seen first.
        self.assertIn(caught.exception.code(), (grpc.StatusCode.RESOURCE_EXHAUSTED,
                                                grpc.StatusCode.UNAVAILABLE))
        self.serves()
        self.assertLess(self.memory() - before, MEMORY_MAX)

    def test_headers_without_an_end_harm_nobody(self):
        """HTTP/2's CONTINUATION flood: frames that never end a block of headers. gRPC 1.51 keeps
        what it gets of them until the connection ends: that is the caller's own bytes, a few times
        over, and nobody else's."""
        before = self.memory()
        connection = self.connect()
        connection.sendall(PREFACE + frame(SETTINGS, 0, b"") + frame(HEADERS, 1, b"\x82"))
        # One literal header of a kilobyte after the other.
        literal = b"\x00\x05x-big\x7f\x81\x07" + b"a" * 256
        sent = 0
        try:
            connection.settimeout(10)
            while sent < FLOOD_BYTES:
                connection.sendall(frame(CONTINUATION, 1, literal * 32))
                sent += len(literal) * 32
        except (ConnectionError, TimeoutError):
            pass
        self.serves()
        self.assertLess(self.memory() - before, MEMORY_MAX)
        connection.close()
        self.serves()

    def test_slow_connections_keep_nobody_out(self):
        """Connections that say nothing, half a preface, or one byte now and then."""
        before = self.descriptors()
        held = []
        for i in range(200):
            connection = self.connect()
            connection.sendall(PREFACE[:i % len(PREFACE)])
            held.append(connection)
        for byte in range(3):
            self.serves()
            for connection in held:
                try:
                    connection.sendall(PREFACE[byte:byte + 1])
                except ConnectionError:
                    pass  # hung up on already
        for connection in held:
            connection.close()
        wait_until(lambda: self.descriptors() <= before + 8, "the daemon to let go of what is gone")

    def test_slow_streams_keep_nobody_out(self):
        """Streams that begin and then say nothing more."""
        other = Trainer(self.daemon.tcp, self.run_of("other"))
        self.addCleanup(other.channel.close)
        other.register()
        values = {"w": np.eye(4, dtype=np.float32)}
        over = threading.Event()

        def stalls(first):
            yield first
            over.wait(60)

        streams = [other.stub.Initialize.future(stalls(optimizer.InitializeRequest(
            id=other.run_id())), timeout=60) for _ in range(50)]
        for _ in range(3):
            self.serves()
        over.set()
        for stream in streams:
            stream.cancel()
        other.initialize(values)
        other.close()

    # -- Requests

    def test_a_message_beyond_the_limit_is_refused(self):
        before = self.memory()
        unlimited = [("grpc.max_send_message_length", -1)]
        with grpc.insecure_channel(self.daemon.tcp, unlimited) as channel:
            stub = optimizer_grpc.OptimizerStub(channel)
            self.refused(grpc.StatusCode.RESOURCE_EXHAUSTED, lambda: stub.Register(
                optimizer.RegisterRequest(client="x" * (80 << 20)), timeout=60))
        self.serves()
        self.assertLess(self.memory() - before, 2 * MEMORY_MAX)

    def test_a_former_generations_calls_are_refused(self):
        """What was recorded before a generation was raised, sent again after it."""
        old = optimizer.RunId(run="victim", generation=self.victim.generation)
        gradient = np.full((4, 4), 9, np.float32)
        pushes = list(self.victim.push_requests(self.steps, {"w": gradient}))
        stub = self.victim.stub
        raised = stub.RaiseGeneration(optimizer.RaiseGenerationRequest(id=old), timeout=30)
        self.assertGreater(raised.position.generation, old.generation)
        digest = self.victim.digest().tensor_digest
        counted = self.handled("FailedPrecondition")
        calls = (lambda: stub.Begin(optimizer.BeginRequest(id=old, step=self.steps), timeout=30),
                 lambda: stub.Push(iter(pushes), timeout=30),
                 lambda: stub.Finish(optimizer.FinishRequest(id=old, step=self.steps), timeout=30),
                 lambda: stub.Skip(optimizer.SkipRequest(
                     id=old, step=self.steps, cause=types.SKIP_CAUSE_TRAINER), timeout=30),
                 lambda: stub.Close(optimizer.CloseRequest(id=old), timeout=30))
        for call in calls:
            error = self.refused(grpc.StatusCode.FAILED_PRECONDITION, call, "generation")
            self.assertEqual(position_of(error).generation, raised.position.generation)
        self.assertEqual(self.victim.digest().tensor_digest, digest)
        self.assertEqual(self.handled("FailedPrecondition"), counted + len(calls))
        self.victim.register()
        self.serves()

    def test_another_run_of_the_same_name_is_refused(self):
        digest = self.victim.digest().tensor_digest
        bigger = types.Run(name="victim", world_size=1, parameters=[parameter("w", [8, 4])],
                           groups=[types.Group(name="weights")])
        for run, session, code, words in (
                (bigger, "", grpc.StatusCode.INVALID_ARGUMENT, ('"w"', "shape")),
                (self.run_of("victim", max_grad_norm=3), "", grpc.StatusCode.INVALID_ARGUMENT,
                 ('"victim"', "3")),
                (self.run_of("victim"), "somebody-else", grpc.StatusCode.ALREADY_EXISTS,
                 ("rank 0", "another session"))):
            stranger = Trainer(self.daemon.tcp, run, session=session)
            self.addCleanup(stranger.channel.close)
            self.refused(code, stranger.register, *words)
        self.assertEqual(self.victim.digest().tensor_digest, digest)
        self.serves()

    def test_nobody_is_told_the_protocol(self):
        """Reflection is off unless a setting turns it on, on unix sockets too, and in the version
        of its protocol that gRPC does not have yet."""
        for address in (self.daemon.tcp, self.daemon.unix):
            with grpc.insecure_channel(address) as channel:
                for version in ("v1alpha", "v1"):
                    method = f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"
                    self.refused(grpc.StatusCode.UNIMPLEMENTED, lambda: list(
                        channel.stream_stream(method)(iter([b"\x3a\x00"]), timeout=30)))
        self.serves()

    # -- Files

    def test_the_socket_is_its_owners(self):
        """muond makes the folder, and nobody else may enter it."""
        second = self.directory / "second"
        second.mkdir()
        place = second / "made-by-muond"
        self.start_daemon("--backend", "reference", directory=second,
                          listen=[f"unix://{place}/muond.sock", "127.0.0.1:0"])
        self.assertEqual(stat.S_IMODE(place.stat().st_mode), 0o700)


if __name__ == "__main__":
    unittest.main()
