#!/usr/bin/env python3
"""muond-bench against a real daemon: the smallest model, its JSON, what it leaves behind."""

import json
import re
import statistics
import unittest

import grpc

from muond_process import ProcessTest, run_program
from muond_stubs import optimizer, optimizer_grpc

STEPS = 3


class BenchTest(ProcessTest):

    def setUp(self):
        self.daemon = self.start_daemon()

    def bench(self, *arguments, model="tiny", code=0):
        done = run_program("muond-bench", "--model", model, "--steps", STEPS, "--warmup", 1,
                           *arguments, environment={"MUOND_ENDPOINT": self.daemon.unix},
                           timeout=120)
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        return done

    def check_phases(self, phases):
        self.assertLessEqual({"push", "step", "pull"}, set(phases))
        for name, phase in phases.items():
            self.assertEqual(len(phase["seconds"]), STEPS, name)
            self.assertTrue(all(seconds > 0 for seconds in phase["seconds"]), name)
            self.assertAlmostEqual(phase["median_seconds"], statistics.median(phase["seconds"]))
            self.assertEqual(phase["min_seconds"], min(phase["seconds"]))
            self.assertEqual(phase["max_seconds"], max(phase["seconds"]))

    def test_json(self):
        for dtype, size in (("f32", 4), ("bf16", 2)):
            result = json.loads(self.bench("--dtype", dtype, "--json", "-").stdout)
            self.assertEqual((result["model"], result["dtype"], result["steps"]),
                             ("tiny", dtype, STEPS))
            self.assertGreater(result["muon_matrices"], 0)
            self.assertEqual(result["newton_schulz_fallbacks"], 0)
            self.check_phases(result["phases"])
            for phase in ("push", "pull"):
                self.assertEqual(result["phases"][phase]["bytes"], size * result["elements"])
                self.assertGreater(result["phases"][phase]["bytes_per_second"], 0)

    def test_table_and_file(self):
        path = self.directory / "bench.json"
        table = self.bench("--json", path).stdout
        self.check_phases(json.loads(path.read_text())["phases"])
        self.assertTrue(re.search(r"^push +[\d.]+ +[\d.]+ +[\d.]+ +[\d.]+ +\d+%$", table,
                                  re.MULTILINE), table)
        self.assertIn("checked: ", table)

    def test_it_closes_its_run(self):
        self.bench()
        with grpc.insecure_channel(self.daemon.tcp) as channel:
            stub = optimizer_grpc.OptimizerStub(channel)
            self.assertEqual(list(stub.Status(optimizer.StatusRequest(), timeout=10).runs), [])

    def test_errors(self):
        self.assertIn("no-such-model", self.bench(model="no-such-model", code=2).stderr)
        self.assertIn("--no-such-flag", self.bench("--no-such-flag", code=2).stderr)
        self.assertIn("muond-bench: ", self.bench("--endpoint", "127.0.0.1:1", code=1).stderr)


if __name__ == "__main__":
    unittest.main()
