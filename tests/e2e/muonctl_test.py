#!/usr/bin/env python3
"""muonctl as operators and scripts use it: tables, JSON, exit codes."""

import json
import re
import signal
import subprocess
import threading
import time
import unittest

import grpc
import numpy as np

from foreign_trainer import Trainer, parameter
from muond_process import ProcessTest, program, run_program
from muond_stubs import optimizer, types

OK, ERROR, USAGE, UNHEALTHY = range(4)

VALUES = {"blk.0.wq": np.eye(4, dtype=np.float32), "blk.0.norm": np.ones(4, np.float32)}


def keys_of(message):
    """The JSON keys of a message: the .proto file's own names, all of them, always."""
    return {field.name for field in message.DESCRIPTOR.fields}


class MuonctlTest(ProcessTest):

    def open_run(self, daemon, name):
        run = types.Run(name=name, world_size=1,
                        parameters=[parameter("blk.0.wq", [4, 4]),
                                    parameter("blk.0.norm", [4], role=types.ROLE_NORM)],
                        groups=[types.Group(name="weights")])
        trainer = Trainer(daemon.unix, run)
        trainer.register()
        trainer.initialize(VALUES)
        return trainer

    def trained_run(self, daemon, name):
        """One step applied, one skipped."""
        trainer = self.open_run(daemon, name)
        self.assertTrue(trainer.step(0, VALUES).applied)
        self.assertFalse(trainer.step(1, {n: v * np.float32("nan") for n, v in VALUES.items()},
                                      loss_scale=1).applied)
        return trainer

    def muonctl(self, *arguments, daemon=None, code=OK, **environment):
        """Runs it with MUOND_ENDPOINT; returns stdout."""
        if daemon is not None:
            environment["MUOND_ENDPOINT"] = daemon.unix
        done = run_program("muonctl", *arguments, environment=environment)
        self.assertEqual(done.returncode, code, (arguments, done.stdout, done.stderr))
        if code in (OK, UNHEALTHY):
            self.assertEqual(done.stderr, "")
            return done.stdout
        self.assertEqual(done.stdout, "")
        self.assertTrue(done.stderr.startswith("muonctl: "), done.stderr)
        self.assertEqual(done.stderr.count("\n"), 1, "an error is one line")
        return done.stderr

    def json(self, *arguments, code=OK, **options):
        return json.loads(self.muonctl(*arguments, "-o", "json", code=code, **options))

    def test_status(self):
        daemon = self.start_daemon()
        self.assertIn("no run", self.muonctl("status", daemon=daemon))
        self.assertEqual(self.json("status", daemon=daemon)["runs"], [])
        self.trained_run(daemon, "alpha")
        status = self.json("status", daemon=daemon)
        self.assertEqual(set(status), keys_of(optimizer.StatusReply()))
        self.assertEqual(status["pid"], daemon.process.pid)
        [run] = status["runs"]
        self.assertEqual(set(run), keys_of(optimizer.RunStatus()))
        self.assertEqual(
            {key: run[key] for key in ("run", "steps_applied", "newton_schulz_calls",
                                       "muon_matrices", "elements", "momentum_nonfinite")},
            {"run": "alpha", "steps_applied": 1, "newton_schulz_calls": 1, "muon_matrices": 1,
             "elements": 20, "momentum_nonfinite": 0})
        self.assertEqual({c: n for c, n in run["steps_skipped"].items() if n}, {"overflow": 1})
        self.assertEqual(run["position"]["next_step"], 2)
        table = self.muonctl("status", daemon=daemon)
        # Two spaces part the columns, one the words of a heading.
        rows = [re.split(r"\s{2,}", line.strip()) for line in table.splitlines()]
        [header] = [row for row in rows if row[0] == "RUN"]
        [row] = [row for row in rows if row[0] == "alpha"]
        self.assertEqual(len(row), len(header))
        self.assertEqual(row[1], "running")
        self.assertEqual(len(set(header)), len(header), "no two columns have one name")
        self.assertIn("skipped by cause: overflow 1", table)
        self.assertNotIn("\x1b", table, "no colors but on a terminal")

    def test_params(self):
        daemon = self.start_daemon()
        self.trained_run(daemon, "alpha")
        parameters = self.json("params", daemon=daemon)["parameters"]
        self.assertEqual([p["parameter"]["name"] for p in parameters], list(VALUES))
        self.assertEqual([p["routed"]["algorithm"] for p in parameters], ["muon", "adamw"])
        self.assertEqual([p["t"] for p in parameters], [1, 1])
        self.assertEqual(set(parameters[0]), keys_of(optimizer.ParameterState()))
        self.assertTrue(all(p["routed"]["reason"] for p in parameters))
        [one] = self.json("params", "blk.0.norm", daemon=daemon)["parameters"]
        self.assertEqual(one["parameter"]["name"], "blk.0.norm")
        table = self.muonctl("params", daemon=daemon)
        for word in ("blk.0.wq", "blk.0.norm", "4x4", parameters[0]["routed"]["reason"]):
            self.assertIn(word, table.replace(" x ", "x"))

    def test_digest(self):
        daemon = self.start_daemon()
        trainer = self.trained_run(daemon, "alpha")
        expected = trainer.digest(per_parameter=True)
        digest = self.json("digest", "--per-parameter", daemon=daemon)
        self.assertEqual(digest, {
            "tensor_digest": expected.tensor_digest, "control_digest": expected.control_digest,
            "version": 2, "parameters": dict(expected.parameters)})
        self.assertIn(expected.tensor_digest, self.muonctl("digest", daemon=daemon))
        self.assertEqual(self.json("digest", daemon=daemon)["parameters"], {})

    def test_which_run(self):
        daemon = self.start_daemon()
        self.assertIn("run", self.muonctl("digest", daemon=daemon, code=ERROR))
        self.trained_run(daemon, "alpha")
        self.open_run(daemon, "beta")
        for word in ("alpha", "beta"):
            self.assertIn(word, self.muonctl("digest", daemon=daemon, code=ERROR))
        named = self.json("digest", "--run", "beta", daemon=daemon)
        self.assertEqual(named, self.json("digest", daemon=daemon, MUOND_RUN="beta"))
        self.assertEqual(named["version"], 0)
        self.assertEqual(self.json("digest", "--run", "alpha", daemon=daemon,
                                   MUOND_RUN="beta")["version"], 2, "a flag wins")
        for verb in ("status", "params", "digest"):
            self.assertIn('"gamma"', self.muonctl(verb, "--run", "gamma", daemon=daemon,
                                                  code=ERROR))
        self.assertIn('"no.such"', self.muonctl("params", "no.such", "--run", "alpha",
                                                daemon=daemon, code=ERROR))

    def test_usage_errors(self):
        for arguments in ([], ["no-such-verb"], ["status", "--no-such-flag"],
                          ["status", "-o", "yaml"], ["status", "--timeout", "soon"],
                          ["health", "--service", "nonsense"]):
            self.muonctl(*arguments, code=USAGE, MUOND_ENDPOINT="127.0.0.1:1")

    def test_endpoints(self):
        daemon = self.start_daemon()
        for endpoint in (daemon.unix, daemon.tcp):
            self.assertEqual(self.json("status", "--endpoint", endpoint)["pid"],
                             daemon.process.pid)
        self.assertEqual(self.json("status", "--endpoint", daemon.tcp,
                                   MUOND_ENDPOINT="127.0.0.1:1")["pid"], daemon.process.pid)
        self.muonctl("status", "--endpoint", "http://nonsense", code=ERROR)

    def test_health(self):
        daemon = self.start_daemon()
        self.assertIn("SERVING", self.muonctl("health", daemon=daemon))
        for service in ("liveness", "readiness"):
            said = self.json("health", "--service", service, daemon=daemon)
            self.assertEqual((said["status"], said["healthy"]), ("SERVING", True))
        self.trained_run(daemon, "alpha")
        self.assertTrue(self.json("health", "--run", "alpha", daemon=daemon)["healthy"])
        daemon.stop()
        said = self.json("health", "--timeout", "2s", daemon=daemon, code=UNHEALTHY)
        self.assertEqual((said["status"], said["healthy"]), ("NOT_ANSWERING", False))
        self.assertIn("no daemon answers",
                      self.muonctl("status", "--timeout", "2s", daemon=daemon, code=ERROR))

    def test_a_stopped_process_is_noticed_within_the_timeout(self):
        daemon = self.start_daemon()
        daemon.process.send_signal(signal.SIGSTOP)
        self.addCleanup(daemon.process.send_signal, signal.SIGCONT)
        start = time.monotonic()
        self.muonctl("health", "--timeout", "1s", daemon=daemon, code=UNHEALTHY)
        # gRPC notices a silent peer about when the deadline does: either may speak.
        said = self.muonctl("status", "--timeout", "1s", daemon=daemon, code=ERROR)
        self.assertRegex(said, "did not answer within 1s|no daemon answers .* timed out")
        self.assertLess(time.monotonic() - start, 20)
        daemon.process.send_signal(signal.SIGCONT)
        self.muonctl("health", daemon=daemon)

    def test_runs_that_are_not_well(self):
        for point, complaint in (("momentum_nan", "non-finite"), ("fail_commit", "failed")):
            with self.subTest(point):
                directory = self.directory / point
                directory.mkdir()
                daemon = self.start_daemon("--fault-points", point, directory=directory)
                trainer = self.open_run(daemon, "ill")
                trainer.begin(0)
                trainer.push(0, VALUES)
                trainer.stub.Finish.future(trainer.finish_request(0), timeout=30).exception()
                said = self.json("health", "--run", "ill", daemon=daemon, code=UNHEALTHY)
                self.assertFalse(said["healthy"])
                self.assertIn(complaint, said["complaint"])
                self.assertIn(complaint, self.muonctl("status", daemon=daemon))
                self.muonctl("health", daemon=daemon)
                trainer.channel.close()

    def test_drain_lets_open_runs_go_on_and_no_new_ones_in(self):
        daemon = self.start_daemon()
        trainer = self.open_run(daemon, "open")
        drained = json.loads(self.muonctl("drain", "-o", "json", daemon=daemon))
        self.assertEqual(drained, {"draining": True, "open_runs": ["open"]})
        self.assertTrue(trainer.step(0, VALUES).applied, "the open run goes on")
        trainer.register()  # and its trainers may come back
        with self.assertRaises(grpc.RpcError) as refused:
            self.open_run(daemon, "new")
        self.assertEqual(refused.exception.code(), grpc.StatusCode.UNAVAILABLE)
        self.assertIn("draining", refused.exception.details())
        self.muonctl("health", "--service", "readiness", daemon=daemon, code=UNHEALTHY)
        trainer.close()
        self.muonctl("drain", "--wait", "20", daemon=daemon)
        self.muonctl("drain", "--cancel", daemon=daemon)
        self.muonctl("health", "--service", "readiness", daemon=daemon)
        self.open_run(daemon, "new")

    def test_bench_runs_muond_bench(self):
        done = run_program("muonctl", "--endpoint", "127.0.0.1:1", "bench", "--model", "nonsense")
        direct = run_program("muond-bench", "--endpoint", "127.0.0.1:1", "--model", "nonsense")
        self.assertNotEqual(direct.returncode, 0)
        self.assertEqual((done.returncode, done.stderr), (direct.returncode, direct.stderr))

    def test_a_watcher_does_not_keep_the_daemon_from_ending(self):
        daemon = self.start_daemon(grace_seconds=20)
        watcher = subprocess.Popen([program("muonctl"), "--endpoint", daemon.unix, "watch"],
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.addCleanup(watcher.kill)
        trainer = self.open_run(daemon, "watched")
        # The first event proves that the watcher is there.
        reader = threading.Thread(target=watcher.stdout.readline, daemon=True)
        reader.start()
        step = 0
        while reader.is_alive():
            trainer.step(step, VALUES)
            step += 1
            reader.join(.05)
        begun = time.monotonic()
        daemon.stop()
        self.assertLess(time.monotonic() - begun, 10)
        _, complaint = watcher.communicate(timeout=20)
        self.assertEqual(watcher.returncode, ERROR)
        self.assertIn("shutting down", complaint)


if __name__ == "__main__":
    unittest.main()
