#!/usr/bin/env python3
"""What a Prometheus server sees of a run: well-formed text, the right numbers, no leftovers."""

import collections
import math
import re
import subprocess
import unittest
import urllib.error
import urllib.request

import numpy as np

from foreign_trainer import Trainer, parameter
from muond_process import ProcessTest, wait_until
from muond_stubs import types

NUMBER = r"[+-]?(?:\d+(?:\.\d+)?(?:e[+-]?\d+)?|Inf)|NaN"
SAMPLE = re.compile(rf"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{{(.*)\}})? ({NUMBER})(?: -?\d+)?")
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\[\\"n])*)"(?:,|$)')
COMMENT = re.compile(r"# (HELP|TYPE) ([a-zA-Z_:][a-zA-Z0-9_:]*) (.+)")

RUN = "metrics-run"


class Scrape:
    """One exposition: samples by (name, labels), types by family."""

    def __init__(self, text):
        self.samples = {}
        self.types = {}
        for line in text.splitlines():
            comment = COMMENT.fullmatch(line)
            if comment:
                if comment[1] == "TYPE":
                    assert comment[2] not in self.types, f"a second TYPE: {line}"
                    self.types[comment[2]] = comment[3]
                continue
            sample = SAMPLE.fullmatch(line)
            assert sample, f"neither sample nor comment: {line!r}"
            labels = sample[2] or ""
            assert LABEL.sub("", labels) == "", f"labels: {line!r}"
            key = (sample[1], tuple(sorted(LABEL.findall(labels))))
            assert key not in self.samples, f"a series twice: {line!r}"
            assert sample[3] != "NaN", f"no sample is NaN: {line!r}"
            self.samples[key] = float(sample[3])

    def value(self, name, **labels):
        key = (name, tuple(sorted(labels.items())))
        assert key in self.samples, f"no series {key}; there are {self.select(name)}"
        return self.samples[key]

    def select(self, name, **labels):
        """Samples of the family that have these labels among theirs."""
        return {key: value for key, value in self.samples.items()
                if key[0] == name and set(labels.items()) <= set(key[1])}

    def total(self, name, **labels):
        return sum(self.select(name, **labels).values())

    def of_run(self, run):
        return [key for key in self.samples if ("run", run) in key[1]]

    def counters(self):
        """Everything that must never fall: counters, and the parts of histograms. The sum of
        values that may be negative is none."""
        for (name, labels), value in self.samples.items():
            family = re.sub(r"_(bucket|count|sum)$", "", name)
            if name == "muond_momentum_grad_cosine_sum":
                continue
            if self.types.get(name) == "counter" or self.types.get(family) == "histogram":
                yield (name, labels), value


def get(url):
    """Status, content type and body."""
    try:
        with urllib.request.urlopen(url, timeout=20) as reply:
            return reply.status, reply.headers["Content-Type"], reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers["Content-Type"], error.read().decode()


class MetricsTest(ProcessTest):

    def setUp(self):
        self.daemon = self.start_daemon()
        self.last = None

    def scrape(self):
        """Reads /metrics, lets promtool judge it, and checks that no counter has fallen."""
        code, kind, text = get(f"{self.daemon.metrics}/metrics")
        self.assertEqual(code, 200)
        self.assertTrue(kind.startswith("text/plain; version=0.0.4"), kind)
        judged = subprocess.run(["promtool", "check", "metrics"], input=text, text=True,
                                capture_output=True, timeout=60, check=False)
        self.assertEqual((judged.returncode, judged.stdout + judged.stderr), (0, ""))
        scrape = Scrape(text)
        if self.last is not None:
            now = dict(scrape.counters())
            for key, before in self.last.counters():
                if key in now:
                    self.assertGreaterEqual(now[key], before, key)
        self.last = scrape
        return scrape

    def memory(self, scrape):
        return {dict(labels)["kind"]: value for (_, labels), value in
                scrape.select("muond_memory_bytes", location="host").items()}

    def open_run(self):
        rng = np.random.default_rng(1)
        run = types.Run(
            name=RUN, world_size=1,
            parameters=[parameter("blk.0.wq", [8, 8]), parameter("blk.0.wk", [8, 4]),
                        parameter("blk.0.norm", [8], role=types.ROLE_NORM)],
            groups=[types.Group(name="weights",
                                muon=types.Hyperparameters(lr=.125, momentum=0.5),
                                adamw=types.Hyperparameters(lr=.125, beta1=0.5, beta2=.99,
                                                            eps=1e-8))],
            loss_scale=types.LossScale(mode=types.LossScale.MODE_DYNAMIC,
                                       policy=types.LossScale.POLICY_MEGATRON, hysteresis=1))
        self.trainer = Trainer(self.daemon.unix, run, chunk_bytes=64)
        self.trainer.register()
        values = {p.name: rng.standard_normal(tuple(p.shape.dims)).astype(np.float32)
                  for p in run.parameters}
        self.values = values
        self.gradients = {name: rng.standard_normal(v.shape).astype(np.float32)
                          for name, v in values.items()}

    def train(self):
        """Applied, overflow, the trainer's skip, applied; a scrape after each."""
        self.trainer.initialize(self.values)
        opened = self.scrape()
        self.assertEqual(opened.total("muond_steps_total", run=RUN), 0)
        self.assertEqual(opened.value("muond_last_step", run=RUN), -1)
        self.apply(0, 65536)
        poisoned = {name: g * np.float32(65536) for name, g in self.gradients.items()}
        poisoned["blk.0.wk"] = poisoned["blk.0.wk"].copy()
        poisoned["blk.0.wk"][0, :3] = np.nan
        before = self.scrape()
        self.assertFalse(self.trainer.step(1, poisoned, loss_scale=65536).applied)
        after = self.scrape()
        for name in ("muond_newton_schulz_calls_total", "muond_muon_updates_total",
                     "muond_momentum_norm",
                     "muond_weight_norm", "muond_grad_norm"):
            self.assertEqual(before.select(name), after.select(name), "a skip changes nothing")
        self.assertFalse(self.trainer.skip(2).applied)
        self.assertEqual(self.scrape().value("muond_consecutive_skips", run=RUN), 2)
        self.apply(3, 32768)
        self.trainer.pull(4)

    def apply(self, step, scale):
        scaled = {name: g * np.float32(scale) for name, g in self.gradients.items()}
        outcome = self.trainer.step(step, scaled, loss_scale=scale)
        self.assertTrue(outcome.applied, outcome)
        self.scrape()

    def check_steps(self, scrape):
        outcomes = {dict(labels)["outcome"]: value for (_, labels), value in
                    scrape.select("muond_steps_total", run=RUN).items()}
        self.assertEqual(outcomes, {
            "applied": 2, "skipped_overflow": 1, "skipped_by_trainer": 1, "failed": 0,
            "skipped_state_overflow": 0, "skipped_norm_threshold": 0})
        # The trainer's skip came without a Begin: it lasted no time.
        expected = {"muond_last_step": 3, "muond_consecutive_skips": 0, "muond_step_inflight": 0,
                    "muond_step_inflight_start_timestamp_seconds": 0, "muond_run_active": 1,
                    "muond_step_waiting_shards": 0, "muond_trainers_connected": 1,
                    "muond_trainers_expected": 1, "muond_muon_expected": 1,
                    "muond_loss_scale": 32768, "muond_loss_scale_min": 1,
                    "muond_step_duration_seconds_count": 3, "muond_duplicate_requests_total": 0,
                    "muond_grad_clipped_steps_total": 0}
        self.assertEqual({name: scrape.value(name, run=RUN) for name in expected}, expected)
        moves = {dict(labels)["direction"]: value for (_, labels), value in
                 scrape.select("muond_loss_scale_changes_total", run=RUN).items()}
        self.assertEqual(moves, {"growth": 0, "backoff": 1})
        states = {dict(labels)["state"] for (_, labels), value in
                  scrape.select("muond_run_state", run=RUN).items() if value}
        self.assertEqual(states, {"running"})

    def check_numerics(self, scrape):
        group = {"run": RUN, "group": "weights"}
        for name, muon, adamw in (("muond_parameters", 2, 1),
                                  ("muond_parameter_elements", 64 + 32, 8)):
            self.assertEqual(scrape.value(name, algorithm="muon", **group), muon)
            self.assertEqual(scrape.value(name, algorithm="adamw", **group), adamw)
        self.assertEqual(scrape.value("muond_newton_schulz_calls_total", **group), 2 * 2)
        self.assertEqual(scrape.value("muond_muon_updates_total", **group), 2 * 2)
        self.assertEqual(scrape.total("muond_newton_schulz_outcomes_total", **group), 2 * 2)
        self.assertEqual(scrape.total("muond_newton_schulz_special_total", **group), 0)
        self.assertEqual(scrape.value("muond_learning_rate", **group), .125)
        # Steps 0 and 3 were applied; the first met no momentum and was the one that is sampled.
        self.assertEqual(scrape.value("muond_momentum_grad_cosine_count", **group), 3)
        self.assertEqual(scrape.value("muond_momentum_grad_cosine_bucket", le="0.95", **group), 0,
                         "the same gradient again: the cosine is 1")
        self.assertEqual(scrape.value("muond_newton_schulz_residual_count", **group), 2)
        self.assertEqual(scrape.value("muond_update_rms_ratio_count", **group), 2 + 2 + 1)
        self.assertEqual(scrape.value("muond_momentum_stale_tensors", run=RUN), 0)
        self.assertEqual(scrape.value("muond_shard_elements", run=RUN), 64 + 32 + 8)
        self.assertGreater(scrape.value("muond_shard_busy_seconds_total", run=RUN), 0)
        norms = sorted((float(np.linalg.norm(g)) for g in self.gradients.values()), reverse=True)
        for rank, norm in enumerate(norms, 1):
            self.assertAlmostEqual(scrape.value("muond_worst_value", run=RUN, rank=str(rank),
                                                measure="grad_norm"), norm, delta=1e-5)
        kinds = scrape.select("muond_nonfinite_tensors", run=RUN)
        self.assertEqual(sorted(kinds.values()), [0, 0, 0])
        self.assertEqual(scrape.value("muond_nonfinite_elements_total", run=RUN, kind="grad"), 3)
        squares = {n: float(np.sum(np.square(g, dtype=float))) for n, g in self.gradients.items()}
        self.assertAlmostEqual(scrape.value("muond_grad_norm", run=RUN),
                               math.sqrt(sum(squares.values())), delta=1e-5)
        # Two steps of one gradient with beta 1/2: every first moment is 3/4 of it.
        self.assertAlmostEqual(scrape.value("muond_momentum_norm", **group),
                               .75 * math.sqrt(sum(squares.values())), delta=1e-5)
        weights = self.trainer.pull(4, master=True)
        self.assertAlmostEqual(
            scrape.value("muond_weight_norm", **group),
            math.sqrt(sum(np.sum(np.square(w, dtype=float)) for w in weights.values())),
            delta=1e-5)

    def check_traffic(self, scrape):
        for direction, size, count in (
                ("rx", self.trainer.sent_bytes, self.trainer.sent_messages),
                ("tx", self.trainer.received_bytes, self.trainer.received_messages)):
            path = {"transport": "grpc", "direction": direction}
            self.assertGreater(size, 0)
            self.assertEqual(scrape.value("muond_transport_bytes_total", **path), size)
            self.assertEqual(scrape.value("muond_transport_messages_total", **path), count)
        self.assertEqual(scrape.total("muond_transport_errors_total"), 0)
        handled = collections.Counter()
        for (_, labels), value in scrape.select("grpc_server_handled_total",
                                                grpc_service="muond.v1.Optimizer").items():
            labels = dict(labels)
            handled[labels["grpc_method"], labels["grpc_code"]] += value
        self.assertEqual({key: value for key, value in handled.items() if value}, {
            ("Register", "OK"): 1, ("Initialize", "OK"): 1, ("Begin", "OK"): 3, ("Push", "OK"): 3,
            ("Finish", "OK"): 3, ("Skip", "OK"): 1, ("Pull", "OK"): 1})
        for name in ("grpc_server_started_total", "grpc_server_handling_seconds_count"):
            self.assertEqual(scrape.total(name, grpc_method="Push", grpc_type="client_stream"), 3)
        for phase in ("reduce", "momentum", "newton_schulz", "apply", "adamw"):
            observed = scrape.value("muond_step_phase_seconds_count", phase=phase)
            self.assertGreater(observed, 0, phase)

    def test_a_run_from_open_to_close(self):
        idle = self.scrape()
        self.assertEqual(idle.value("muond_ready"), 1)
        self.assertEqual(idle.of_run(RUN), [])
        self.assertGreater(idle.value("process_resident_memory_bytes"), 1 << 20)
        self.assertEqual(list(idle.select("muond_build_info").values()), [1])
        self.open_run()
        opening = self.scrape()
        self.assertEqual(opening.value("muond_run_state", run=RUN, state="opening"), 1)
        self.train()
        trained = self.scrape()
        self.check_steps(trained)
        self.check_traffic(trained)
        self.check_numerics(trained)
        self.assertTrue(self.trainer.close().closed)
        closed = self.scrape()
        self.assertEqual(closed.of_run(RUN), [], "a closed run leaves no series")
        self.assertEqual(closed.value("muond_step_phase_seconds_count", phase="newton_schulz"),
                         trained.value("muond_step_phase_seconds_count", phase="newton_schulz"))

    def test_memory_is_that_of_the_runs(self):
        empty = self.scrape()
        self.open_run()
        self.train()
        used = self.scrape()
        self.assertEqual(set(self.memory(empty).values()), {0})
        memory = self.memory(used)
        self.assertEqual({kind: memory[kind] // 4 for kind in
                          ("master", "momentum", "second_moment", "staging")},
                         {"master": 104, "momentum": 104, "second_moment": 8, "staging": 104})
        self.assertGreaterEqual(memory["workspace"], 2 * 4 * 64, "U and O of the larger matrix")
        self.trainer.close()
        wait_until(lambda: set(self.memory(self.scrape()).values()) == {0}, "memory to be freed")

    def test_probes(self):
        for page in ("/healthz", "/readyz"):
            self.assertEqual(get(self.daemon.metrics + page)[0], 200, page)
        self.assertEqual(get(self.daemon.metrics + "/else")[0], 404)


if __name__ == "__main__":
    unittest.main()
