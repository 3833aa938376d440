#!/usr/bin/env python3
"""muond-bench against a real daemon and in its own process: small models, the JSON and what it is
made of, exit codes, what it leaves behind, and the measuring scripts on top of it."""

import json
import pathlib
import re
import signal
import statistics
import subprocess
import sys
import unittest

import grpc

from muond_process import ROOT, ProcessTest, clean_environment, program, run_program, wait_until
from muond_stubs import optimizer, optimizer_grpc

sys.path.insert(0, str(ROOT / "tests" / "bench"))
import bench_process  # noqa: E402
import scaling  # noqa: E402

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

    def runs(self):
        with grpc.insecure_channel(self.daemon.tcp) as channel:
            stub = optimizer_grpc.OptimizerStub(channel)
            return list(stub.Status(optimizer.StatusRequest(), timeout=10).runs)

    def check_phases(self, phases):
        self.assertEqual({"push", "step", "pull", "total"}, set(phases))
        for name, phase in phases.items():
            self.assertEqual(len(phase["seconds"]), STEPS, name)
            self.assertTrue(all(seconds > 0 for seconds in phase["seconds"]), name)
            self.assertAlmostEqual(phase["median_seconds"], statistics.median(phase["seconds"]))
            self.assertEqual(phase["min_seconds"], min(phase["seconds"]))
            self.assertEqual(phase["max_seconds"], max(phase["seconds"]))
            self.assertLessEqual(phase["p90_seconds"], phase["max_seconds"])

    def check_result(self, result):
        self.assertTrue(result["check"]["passed"])
        self.assertEqual({sample["algorithm"] for sample in result["check"]["samples"]},
                         {"muon", "adamw"})
        self.assertEqual(set(result["transports"]), {"grpc"})
        transport = result["transports"]["grpc"]
        self.assertRegex(transport["digest"], "^[0-9a-f]{32}$")
        self.assertAlmostEqual(transport["step_ms"],
                               1e3 * result["phases"]["total"]["median_seconds"])
        for name in ("push_gbps", "pull_gbps", "exposed_ms"):
            self.assertGreater(transport[name], 0)

    def test_json(self):
        for dtype, size in (("f32", 4), ("bf16", 2)):
            result = json.loads(self.bench("--dtype", dtype, "--json", "-").stdout)
            self.assertEqual((result["model"], result["dtype"], result["steps"], result["backend"]),
                             ("tiny", dtype, STEPS, "cpu"))
            self.assertGreater(result["muon_matrices"], 0)
            self.assertEqual(result["newton_schulz_fallbacks"], 0)
            self.check_phases(result["phases"])
            self.check_result(result)
            for phase in ("push", "pull"):
                self.assertEqual(result["phases"][phase]["bytes"], size * result["elements"])
                self.assertGreater(result["phases"][phase]["bytes_per_second"], 0)
            for name in ("memcpy_gbps", "memcpy_one_thread_gbps", "sgemm_gflops",
                         "bare_stream_push_gbps", "bare_stream_pull_gbps"):
                self.assertGreater(result["ceilings"][name], 0, name)
            for name in ("push_of_memcpy", "push_of_bare_stream", "step_of_sgemm"):
                self.assertGreater(result["shares"][name], 0, name)
            self.assertGreater(result["memory"]["grown_bytes"], 0)
            self.assertEqual(result["memory"]["daemon_state_bytes"],
                             result["memory"]["need_state_bytes"])

    def test_table_and_file(self):
        path = self.directory / "bench.json"
        table = self.bench("--json", path).stdout
        self.check_phases(json.loads(path.read_text())["phases"])
        self.assertTrue(re.search(r"^push( +[\d.]+){5} +\d+% +\d+%$", table, re.MULTILINE), table)
        self.assertIn("checked: ", table)
        self.assertNotIn("WRONG", table)

    def test_in_process_and_socket_agree(self):
        arguments = ("--no-ceilings", "--json", "-")
        socket = json.loads(self.bench(*arguments).stdout)
        own = json.loads(self.bench("--in-process", *arguments).stdout)
        self.assertEqual((socket["target"], own["target"]), (self.daemon.unix, "in-process"))
        self.assertEqual(own["transports"]["grpc"]["digest"],
                         socket["transports"]["grpc"]["digest"])
        reference = json.loads(self.bench("--in-process", "--backend", "reference", *arguments)
                               .stdout)
        self.assertEqual(reference["backend"], "reference")

    def test_a_wrong_result_fails_the_run(self):
        done = self.bench("--reference-lr-factor", "1.02", "--no-ceilings", "--json", "-", code=3)
        self.assertFalse(json.loads(done.stdout)["check"]["passed"])
        self.assertIn("disagrees with the fp64 reference", done.stderr)
        self.assertEqual(self.runs(), [])

    def test_memory_of_a_middling_model(self):
        """8 M elements of Muon, 16 M of AdamW; a fresh daemon, so that nothing is there already."""
        if re.search(b"__(asan|tsan)_init", pathlib.Path(program("muond")).read_bytes()):
            self.skipTest("sanitizers have memory of their own")
        result = json.loads(self.bench("--no-ceilings", "--check-memory", "--json", "-",
                                       model="custom:1024x8192,16384x1024:adamw").stdout)
        memory = result["memory"]
        self.assertTrue(memory["within_need"], memory)
        self.assertGreater(memory["grown_bytes"],
                           memory["need_state_bytes"] + memory["need_staging_bytes"])

    def test_it_closes_its_run(self):
        self.bench("--no-ceilings")
        self.assertEqual(self.runs(), [])

    def test_ctrl_c_closes_its_run(self):
        with subprocess.Popen(
                [program("muond-bench"), "--steps", "1000000", "--no-ceilings"],
                env=clean_environment(MUOND_ENDPOINT=self.daemon.unix), stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            wait_until(lambda: self.runs() and self.runs()[0].steps_applied > 3, "some steps")
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 130, errors)
        self.assertIn("interrupted after", errors)
        self.assertEqual(self.runs(), [])

    def test_errors(self):
        self.assertIn("no-such-model", self.bench(model="no-such-model", code=2).stderr)
        self.assertIn("--no-such-flag", self.bench("--no-such-flag", code=2).stderr)
        self.assertIn("pigeon", self.bench("--transport", "pigeon", code=2).stderr)
        self.assertIn("muond-bench: ", self.bench("--endpoint", "127.0.0.1:1", code=1).stderr)
        self.assertIn("backend", self.bench("--in-process", "--backend", "abacus", code=2).stderr)

    def test_paced(self):
        bench = bench_process.PacedBench(
            pathlib.Path(program("muond-bench")).parent, "--in-process", "--model",
            "custom:8x4,5x3:adamw", "--steps", 2, "--warmup", 1, "--no-ceilings")
        self.assertEqual([(tensor["shape"], tensor["muon"]) for tensor in bench.ready["tensors"]],
                         [([8, 4], True), ([5, 3], False)])
        first, second = bench.step(), bench.step()
        self.assertEqual(second["step"], first["step"] + 1)
        self.assertGreater(second["total_seconds"], second["step_seconds"])
        self.assertEqual(bench.close(), 0)


class ScalingTest(unittest.TestCase):
    """tests/bench/scaling.py, which measures step time against parameters and bytes."""

    def test_fit_finds_the_line(self):
        constant, slope = scaling.fit([(x, 3 + 0.5 * x) for x in (1, 10, 1000, 100_000)])
        self.assertAlmostEqual(constant, 3)
        self.assertAlmostEqual(slope, 0.5)

    def test_what_grows_with_the_square_is_not_linear(self):
        def result(time):
            return {"rows": [{"size": x, **{phase: time(x) for phase in scaling.PHASES}}
                             for x in (10, 100, 1000)]}
        self.assertTrue(scaling.is_linear(result(lambda x: 5 + 2 * x)))
        self.assertFalse(scaling.is_linear(result(lambda x: x * x)))

    def test_it_runs(self):
        folder = pathlib.Path(program("muond-bench")).parent
        done = subprocess.run(
            [sys.executable, "-B", str(ROOT / "tests" / "bench" / "scaling.py"), "--bin",
             str(folder), "--sweep", "parameters", "--max-size", "100", "--steps", "2"],
            env=clean_environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=120, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(done.stdout, r"\| 100 \|")


if __name__ == "__main__":
    unittest.main()
