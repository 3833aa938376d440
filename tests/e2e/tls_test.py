#!/usr/bin/env python3
"""Mutual TLS with real processes: who gets in, who may call what, and that certificates change
under a running daemon. The authority is made by deploy/tls/make-ca, as an operator would."""

import contextlib
import json
import re
import subprocess
import unittest

import grpc

from muond_process import ROOT, ProcessTest, run_program, wait_until
from muond_stubs import optimizer, optimizer_grpc, types

HEALTH = "/grpc.health.v1.Health/Check"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
DENIED = grpc.StatusCode.PERMISSION_DENIED
NO_MESSAGE = b"\xff"  # of any kind: what is admitted is refused for that, and does nothing


def documented():
    """{(method, role)}: who may call what, by the table in docs/security.md."""
    calls = {method: f"/muond.v1.{service}/{method}" for service, methods in RPCS.items()
             for method in methods}
    allowed = set()
    rows = re.findall(r"(?m)^\| ([^|]+) \| (yes)? ?\| (yes)? ?\| (yes)? ?\|$",
                      (ROOT / "docs/security.md").read_text())
    for what, *columns in rows:
        roles = [role for role, column in zip(("trainer", "daemon", "admin"), columns) if column]
        services = [service for service in RPCS if f"`{service}`" in what]
        named = [calls[word] for word in re.findall(r"\w+", what) if word in calls]
        whole = [f"/muond.v1.{service}/{method}" for service in services
                 for method in RPCS[service]]
        allowed |= {(method, role) for method in named + whole for role in roles}
    return allowed


def rpcs():
    """{service: [methods]} of all of the tree's protocol files."""
    found = {}
    for file in sorted((ROOT / "proto/muond/v1").glob("*.proto")):
        for service, body in re.findall(r"(?ms)^service (\w+) \{(.*?)^\}", file.read_text()):
            found[service] = re.findall(r"(?m)^  rpc (\w+)\(", body)
    return found


RPCS = rpcs()


def make_ca(*arguments):
    return subprocess.run([ROOT / "deploy/tls/make-ca", *map(str, arguments)], check=False,
                          capture_output=True, text=True, timeout=60)


class TlsTest(ProcessTest):

    def setUp(self):
        self.ca = self.directory / "ca"
        self.make(self.ca)
        self.certificate("daemon", "node", "--host", "localhost", "--host", "127.0.0.1")

    def make(self, *arguments):
        done = make_ca(*arguments)
        self.assertEqual(done.returncode, 0, done.stderr)

    def certificate(self, role, name, *options, ca=None):
        self.make(ca or self.ca, role, name, *options)

    def files(self, name, ca=None, authority=None):
        """The environment of a program that holds the certificate `name`."""
        ca = ca or self.ca
        return {"MUOND_TLS_CERT": str(ca / f"{name}.crt"), "MUOND_TLS_KEY": str(ca / f"{name}.key"),
                "MUOND_TLS_CA": str((authority or ca) / "ca.crt")}

    def start(self, *flags, **options):
        return self.start_daemon("--backend", "reference", "--tls-refresh", "1s", *flags,
                                 environment=self.files("node"), **options)

    def muonctl(self, daemon, *verb, timeout="30s", **files):
        return run_program("muonctl", "--endpoint", daemon.tcp, "--timeout", timeout, *verb,
                           environment=files)

    def call(self, daemon, method, name):
        """The status code and details of an empty call with the certificate `name`."""
        read = lambda ending: (self.ca / f"{name}.{ending}").read_bytes()
        credentials = grpc.ssl_channel_credentials((self.ca / "ca.crt").read_bytes(), read("key"),
                                                   read("crt"))
        with grpc.secure_channel(daemon.tcp, credentials) as channel:
            try:
                channel.unary_unary(method)(b"", timeout=20)
            except grpc.RpcError as error:
                return error.code(), error.details()
        return grpc.StatusCode.OK, ""

    def bench(self, daemon, **files):
        return run_program("muond-bench", "--endpoint", daemon.tcp, "--model", "custom:8x4",
                           "--steps", "1", "--warmup", "1", "--no-ceilings", environment=files)

    def test_each_role_does_its_own_and_no_more(self):
        for role in ("trainer", "admin"):
            self.certificate(role, role)
        daemon = self.start()
        done = self.bench(daemon, **self.files("trainer"))
        self.assertEqual(done.returncode, 0, done.stderr)
        done = self.bench(daemon, **self.files("admin"))
        self.assertEqual(done.returncode, 1)
        self.assertIn('needs the role trainer, certificate "CN=admin" gives admin', done.stderr)
        self.assertEqual(self.muonctl(daemon, "status", **self.files("admin")).returncode, 0)
        denied, ok = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.OK
        for method, name, code in (
                ("/muond.v1.Peer/Vote", "trainer", denied),
                ("/muond.v1.Peer/Vote", "admin", denied),
                ("/muond.v1.Optimizer/Begin", "node", denied),
                ("/muond.v1.Optimizer/Begin", "admin", denied),
                ("/muond.v1.Optimizer/Digest", "node", denied),
                ("/muond.v1.Optimizer/Status", "node", ok),
                ("/muond.v1.Nothing/Status", "admin", denied),
                (REFLECTION, "trainer", denied),
                (HEALTH, "trainer", ok)):
            with self.subTest(method=method, name=name):
                self.assertEqual(self.call(daemon, method, name)[0], code)
        # Admitted, and refused only for what it says: there is no such run.
        self.assertNotEqual(self.call(daemon, "/muond.v1.Optimizer/Begin", "trainer")[0], denied)
        self.assertNotEqual(self.call(daemon, "/muond.v1.Optimizer/Close", "admin")[0], denied)
        self.assertIn("refused: call", daemon.log())

    def test_every_call_is_open_to_the_documented_roles_and_to_no_other(self):
        for role in ("trainer", "admin"):
            self.certificate(role, role)
        daemon = self.start()
        allowed = documented()
        self.assertEqual({method for method, _ in allowed},
                         {f"/muond.v1.{service}/{method}" for service, methods in RPCS.items()
                          for method in methods}, "a call without a row in docs/security.md")
        read = lambda name: (self.ca / name).read_bytes()
        for role, name in (("trainer", "trainer"), ("daemon", "node"), ("admin", "admin")):
            credentials = grpc.ssl_channel_credentials(read("ca.crt"), read(f"{name}.key"),
                                                       read(f"{name}.crt"))
            with grpc.secure_channel(daemon.tcp, credentials) as channel:
                for method in sorted({method for method, _ in allowed}):
                    with self.subTest(method=method, role=role):
                        with self.assertRaises(grpc.RpcError) as caught:
                            channel.unary_unary(method)(NO_MESSAGE, timeout=20)
                        code = caught.exception.code()
                        self.assertEqual(code != DENIED, (method, role) in allowed, code)
                        self.assertNotIn(code, (grpc.StatusCode.UNAVAILABLE,
                                                grpc.StatusCode.DEADLINE_EXCEEDED))

    def stub(self, daemon, name):
        read = lambda ending: (self.ca / f"{name}.{ending}").read_bytes()
        channel = grpc.secure_channel(daemon.tcp, grpc.ssl_channel_credentials(
            (self.ca / "ca.crt").read_bytes(), read("key"), read("crt")))
        self.addCleanup(channel.close)
        return optimizer_grpc.OptimizerStub(channel)

    def test_a_run_belongs_to_the_trainers_that_opened_it(self):
        for name, options in (("one", ("--team", "a")), ("two", ("--team", "a")), ("other", ())):
            self.certificate("trainer", name, *options)
        self.certificate("admin", "admin")
        daemon = self.start()
        whole = types.ParameterSlices(parameter="w", boxes=[types.Box(offset=[0], size=[2])])
        register = lambda rank: optimizer.RegisterRequest(rank=rank, slices=[whole], run=types.Run(
            name="r", world_size=2, groups=[types.Group(name="g")],
            parameters=[types.Parameter(name="w", shape=types.Shape(dims=[2]), group="g",
                                        dtype=types.DTYPE_F32, replicated=True)]))
        one, two, other = (self.stub(daemon, name) for name in ("one", "two", "other"))
        run = optimizer.RunId(run="r", generation=one.Register(register(0)).position.generation)
        streams = lambda request: iter([request])
        for call in (
                lambda: other.Register(register(1)),
                lambda: other.Initialize(streams(optimizer.InitializeRequest(id=run))),
                lambda: other.Begin(optimizer.BeginRequest(id=run)),
                lambda: other.Push(streams(optimizer.PushRequest(id=run))),
                lambda: other.Finish(optimizer.FinishRequest(id=run)),
                lambda: other.Skip(optimizer.SkipRequest(id=run)),
                lambda: list(other.Pull(optimizer.PullRequest(id=run))),
                lambda: other.OpenArena(optimizer.OpenArenaRequest(id=run)),
                lambda: other.CloseArena(optimizer.CloseArenaRequest(id=run)),
                lambda: list(other.PullArena(streams(optimizer.PullArenaRequest(
                    pull=optimizer.PullRequest(id=run))))),
                lambda: other.Close(optimizer.CloseRequest(id=run)),
                lambda: other.AddParameters(optimizer.AddParametersRequest(id=run)),
                lambda: other.RaiseGeneration(optimizer.RaiseGenerationRequest(id=run)),
                lambda: other.Status(optimizer.StatusRequest(run="r")),
                lambda: other.DescribeParameters(
                    optimizer.DescribeParametersRequest(run="r")),
                lambda: other.Digest(optimizer.DigestRequest(run="r"))):
            with self.assertRaises(grpc.RpcError) as caught:
                call()
            self.assertEqual(caught.exception.code(), DENIED)
            self.assertIn('belongs to other trainers than those of "spiffe://muond.internal/other/'
                          'muond/role/trainer"', caught.exception.details())
            self.assertNotIn("/a/muond", caught.exception.details(), "whose it is, is not told")
        self.assertEqual(list(other.Status(optimizer.StatusRequest()).runs), [])
        self.assertEqual([run.run for run in one.Status(optimizer.StatusRequest()).runs], ["r"])
        # Another certificate of the same team, an operator, and whoever may use the socket.
        self.assertEqual(list(two.Register(register(1)).missing_ranks), [])
        self.assertEqual(self.muonctl(daemon, "status", **self.files("admin")).returncode, 0)
        self.assertIn('"r"', run_program("muonctl", "--endpoint", daemon.unix, "-o", "json",
                                         "status").stdout)
        for stub in (one, two):
            stub.Close(optimizer.CloseRequest(id=run, rank=int(stub is two)))
        # Its name is free again.
        self.assertEqual(list(other.Register(register(0)).missing_ranks), [1])

    def test_flags_do_what_the_environment_does(self):
        self.certificate("trainer", "trainer")
        daemon = self.start()
        names = {"MUOND_TLS_CERT": "--tls-cert", "MUOND_TLS_KEY": "--tls-key",
                 "MUOND_TLS_CA": "--tls-ca"}
        flags = []
        for name, file in self.files("trainer").items():
            flags += [names[name], file]
        self.assertEqual(self.muonctl(daemon, *flags, "status").returncode, 0)
        done = run_program("muond-bench", "--endpoint", daemon.tcp, "--model", "custom:8x4",
                           "--steps", "1", "--warmup", "1", "--no-ceilings", *flags)
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_strangers_are_not_let_in(self):
        self.certificate("admin", "late", "--days", "-1")
        other = self.directory / "other"
        self.make(other)
        self.certificate("admin", "stranger", ca=other)
        self.certificate("admin", "admin")
        daemon = self.start()
        for what, files, words in (
                ("plain", {}, "no daemon answers"),
                # It believes our daemon, and shows a certificate of another authority.
                ("unknown", self.files("stranger", ca=other, authority=other),
                 "no daemon answers"),
                ("ended", self.files("late"), "valid from"),
                ("two of three", {k: v for k, v in self.files("admin").items() if "CA" not in k},
                 "TLS needs three files"),
                ("not its key", {**self.files("admin"),
                                 "MUOND_TLS_KEY": str(self.ca / "node.key")}, "not the key of"),
                ("other authority", self.files("admin", authority=other), "not acceptable")):
            with self.subTest(what):
                done = self.muonctl(daemon, "status", timeout="2s", **files)
                self.assertEqual(done.returncode, 1, done.stdout)
                self.assertIn(words, done.stderr)
        # Past the client's own check, the daemon's: the handshake fails.
        with self.assertRaises(grpc.FutureTimeoutError):
            credentials = grpc.ssl_channel_credentials(
                (self.ca / "ca.crt").read_bytes(), (other / "stranger.key").read_bytes(),
                (other / "stranger.crt").read_bytes())
            with grpc.secure_channel(daemon.tcp, credentials) as channel:
                grpc.channel_ready_future(channel).result(timeout=1)
        with self.assertRaises(grpc.FutureTimeoutError):
            credentials = grpc.ssl_channel_credentials(
                (self.ca / "ca.crt").read_bytes(), (self.ca / "late.key").read_bytes(),
                (self.ca / "late.crt").read_bytes())
            with grpc.secure_channel(daemon.tcp, credentials) as channel:
                grpc.channel_ready_future(channel).result(timeout=1)
        self.assertEqual(self.muonctl(daemon, "status", **self.files("admin")).returncode, 0)

    def test_a_client_believes_only_a_daemon_that_carries_the_name(self):
        self.certificate("daemon", "node", "--host", "optimizer.example")
        self.certificate("admin", "admin")
        daemon = self.start()
        done = self.muonctl(daemon, "status", timeout="2s", **self.files("admin"))
        self.assertEqual(done.returncode, 1)
        self.assertIn("no daemon answers", done.stderr)
        done = self.muonctl(daemon, "status", **self.files("admin"),
                            MUOND_TLS_SERVER_NAME="optimizer.example")
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_certificates_change_under_a_running_daemon(self):
        self.certificate("admin", "admin")
        daemon = self.start()
        self.assertEqual(self.muonctl(daemon, "status", **self.files("admin")).returncode, 0)
        # Another authority takes over: first both are believed, then the daemon gets a certificate
        # of the new one.
        new = self.directory / "new"
        self.make(new)
        self.certificate("daemon", "node", "--host", "127.0.0.1", ca=new)
        self.certificate("admin", "admin", ca=new)
        both = (self.ca / "ca.crt").read_text() + (new / "ca.crt").read_text()
        (self.ca / "both").write_text(both)
        (self.ca / "both").rename(self.ca / "ca.crt")
        for ending in ("key", "crt"):
            (new / f"node.{ending}").rename(self.ca / f"node.{ending}")
        status = lambda: self.muonctl(daemon, "status", timeout="2s", **self.files("admin", ca=new))
        wait_until(lambda: status().returncode == 0, "the new certificate's use", 60)
        self.assertEqual(self.muonctl(daemon, "status", **self.files("admin")).returncode, 0,
                         "those of the old authority are still believed")
        self.assertEqual(len(re.findall("listening on", daemon.log())), 2, "it never restarted")

    def test_two_daemons_vote_over_tls(self):
        self.certificate("trainer", "trainer")
        ports = []
        with contextlib.ExitStack() as stack:
            import socket  # pylint: disable=import-outside-toplevel
            for _ in range(2):
                held = stack.enter_context(socket.socket())
                held.bind(("127.0.0.1", 0))
                ports.append(held.getsockname()[1])
        peers = [f"127.0.0.1:{port}" for port in ports]
        for i, address in enumerate(peers):
            folder = self.directory / f"d{i}"
            folder.mkdir()
            self.start("--peers", ",".join(peers), directory=folder, listen=[address])
        done = self.bench(self.daemons[0], **self.files("trainer"))
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_doctor_judges_its_own_certificate_and_that_of_the_daemon_beside_it(self):
        self.certificate("admin", "admin")
        daemon = self.start()

        def doctor(address, **files):
            done = run_program("muonctl", "--endpoint", address, "--timeout", "2s", "-o", "json",
                               "doctor", environment=files)
            return {each["check"]: (each["grade"], each["found"])
                    for each in json.loads(done.stdout)}

        told = doctor(daemon.unix)
        self.assertEqual([told[check][0] for check in ("tls", "daemon tls", "socket", "arena")],
                         ["PASS"] * 4)
        self.assertRegex(told["daemon tls"][1], '"CN=node,O=muond" is valid until 20')
        told = doctor(daemon.tcp, **self.files("admin"))
        self.assertRegex(told["tls"][1], '"CN=admin,O=muond" is valid until 20')
        grade, found = doctor(daemon.unix, **{**self.files("admin"), "MUOND_TLS_KEY": str(
            self.ca / "node.key")})["tls"]
        self.assertEqual(grade, "FAIL")
        self.assertIn("not the key of", found)
        self.certificate("daemon", "node", "--host", "localhost", "--days", "-1")
        grade, found = doctor(daemon.unix)["daemon tls"]
        self.assertEqual(grade, "FAIL")
        self.assertIn("valid from", found)
        (self.ca / "node.key").unlink()
        self.assertEqual(doctor(daemon.unix)["daemon tls"][0], "WARN")

    def test_probes_need_no_certificate_and_get_nothing_else(self):
        daemon = self.start("--health-address", "127.0.0.1:0")
        port = re.search(r"health probes on (\S+)", daemon.log())[1]
        with grpc.insecure_channel(port) as channel:
            reply = channel.unary_unary(HEALTH)(b"\n\x09readiness", timeout=20)
            self.assertEqual(reply, b"\x08\x01", "SERVING")
            with self.assertRaises(grpc.RpcError) as caught:
                channel.unary_unary("/muond.v1.Optimizer/Status")(b"", timeout=20)
            self.assertEqual(caught.exception.code(), grpc.StatusCode.UNIMPLEMENTED)
            with self.assertRaises(grpc.RpcError) as caught:
                list(channel.stream_stream(REFLECTION)(iter([b"\x3a\x00"]), timeout=20))
            self.assertEqual(caught.exception.code(), grpc.StatusCode.UNIMPLEMENTED)

    def test_a_daemon_that_could_not_be_believed_does_not_start(self):
        self.certificate("trainer", "trainer")
        base = ["--listen", "0.0.0.0:0", "--metrics-address", "none"]
        done = run_program("muond", *base)
        self.assertEqual(done.returncode, 2)
        self.assertIn("give --tls-cert, --tls-key and --tls-ca", done.stderr)
        done = run_program("muond", *base, environment=self.files("trainer"))
        self.assertEqual(done.returncode, 1)
        self.assertIn("does not have the role daemon", done.stderr)
        done = run_program("muond", *base, "--insecure", environment=self.files("node"))
        self.assertEqual(done.returncode, 2)
        self.assertIn("every TCP address asks for certificates", done.stderr)
        done = run_program("muond", *base, "--tls-cert", self.ca / "node.crt")
        self.assertEqual(done.returncode, 2)
        self.assertIn("belong together", done.stderr)
        self.start(listen=["0.0.0.0:0"])

    def test_make_ca_refuses_what_makes_no_sense(self):
        for arguments, words in (
                ((self.ca,), "never replaced"),
                ((self.ca, "king", "a"), "expected trainer, daemon or admin"),
                ((self.ca, "daemon", "a"), "needs --host"),
                ((self.ca, "admin", "ca"), "expected letters"),
                ((self.ca, "admin", "a/b"), "expected letters"),
                ((self.directory / "none", "admin", "a"), "has no authority")):
            done = make_ca(*arguments)
            self.assertEqual(done.returncode, 1)
            self.assertIn(words, done.stderr)
        self.assertEqual((self.ca / "node.key").stat().st_mode & 0o777, 0o600)


if __name__ == "__main__":
    unittest.main()
