#!/usr/bin/env python3
"""Dashboards and alerts with real parts: Debian's Prometheus scrapes three daemons that share a
training run, every query of every panel gives data, and each fault's alert fires in time.

A minute of the alert rules is a second here. With MUOND_PICTURES=FOLDER the dashboards are drawn
there from the same data.
"""

import json
import math
import os
import sys
import threading
import time
import unittest

import grpc
import numpy as np

from cluster_trainer import ClusterTrainer, Net
from muond_process import ROOT, ProcessTest, run_program, wait_until
from muond_stubs import optimizer as pb
from muond_stubs import types
from prometheus_server import Prometheus, free_port
from trainer_ranks import Trainer

sys.path[:0] = [str(ROOT / "dashboards"), str(ROOT / "deploy" / "prometheus")]
import alerts  # noqa: E402  pylint: disable=wrong-import-position,import-error
import generate  # noqa: E402  pylint: disable=wrong-import-position,import-error
import render  # noqa: E402  pylint: disable=wrong-import-position,import-error

# Alerts that no fault below provokes; promtool tests each of them with series made up for it.
NOT_SEEN_LIVE = {
    "MuondAbsent": "Prometheus would need another configuration",
    "MuondDaemonRestarted": "a restart within the test would end the run that others need",
    "MuondRpcErrors": "needs ten minutes of refusals, ten seconds here",
    "MuondTransportErrors": "needs damaged chunks for five minutes",
    "MuondRunFailed": "a failed run ends; tests/cluster has the failures",
    "MuondStepSlow": "compares with an hour ago",
    "MuondShardImbalance": "a quarter of an hour of imbalance",
    "MuondReplicaDivergence": "the step protocol does not let it happen",
    "MuondMomentumLowRank": "half an hour",
    "MuondMomentumStale": "half an hour",
}
WINDOW = 5  # seconds that rates look back
DYNAMIC = {"mode": types.LossScale.MODE_DYNAMIC, "policy": types.LossScale.POLICY_MEGATRON,
           "hysteresis": 1}


# Series above 0 while runs train by both data paths and are saved.
FED = (
    *(f'muond_transport_{what}_total{{transport="{path}",direction="{direction}"}}'
      for what in ("bytes", "messages") for path in ("grpc", "arena")
      for direction in ("rx", "tx")),
    'muond_transport_choices_total{transport="grpc"}',
    'muond_transport_choices_total{transport="arena"}',
    'muond_transport_connections{transport="arena"}',
    'muond_memory_bytes{kind="arena"}',
    *(f'muond_checkpoints_total{{result="saved",run="{run}"}}' for run in ("shared", "arena")),
    'muond_checkpoint_size_bytes{run="shared"}',
    'muond_checkpoint_last_step{run="shared"}',
    'muond_checkpoint_last_success_timestamp_seconds{run="shared"}',
    'muond_checkpoint_duration_seconds_count{run="shared"}',
)


class PacedTrainer(Trainer):
    """A rank of the C++ client that leaves the processor to others between the phases of a step."""

    def _say(self, word):
        time.sleep(.02)
        super()._say(word)


class Training(threading.Thread):
    """Trains until it is told to stop, or a call fails. `spoil(step)`: a NaN in its gradients."""

    def __init__(self, address, run, net, spoil=lambda step: False, pause=.03):
        super().__init__(daemon=True)
        self.trainer = ClusterTrainer(address, run)
        self.net, self.spoil, self.pause = net, spoil, pause
        self.losses, self.outcomes, self.error = [], [], None
        self.ended = threading.Event()
        self.trainer.initialize(net.values)
        self.start()

    def run(self):
        values, scale, step = dict(self.net.values), 0.0, 0
        scaler = self.trainer.run.loss_scale
        scale = scaler.initial or 65536.0 if scaler.mode == types.LossScale.MODE_DYNAMIC else 1.0
        try:
            while not self.ended.wait(self.pause):
                loss, gradients = self.net.gradients(values, scale)
                if self.spoil(step):
                    gradients["blk.0.w1"][0, 0] = np.nan
                outcome = self.trainer.step(step, gradients, loss_scale=scale)
                if outcome.applied:
                    values = self.trainer.pull(outcome.version)
                    self.losses.append(loss)
                self.outcomes.append(outcome)
                scale = outcome.next_loss_scale if scale != 1.0 else 1.0
                step += 1
        except (grpc.RpcError, AssertionError) as error:
            self.error = error

    def stop(self):
        self.ended.set()
        self.join(60)


def substituted(expr):
    """A query as Grafana would send it with all variables at All."""
    for name in ("job", "instance", "run", "group"):
        expr = expr.replace(f"${name}", ".+")
    return expr.replace("$__rate_interval", f"{WINDOW}s")


class DashboardsTest(ProcessTest):
    killed = unshared = ""  # the instances that are killed, and that refuse an arena

    def setUp(self):
        if self._testMethodName == "test_every_alert_is_seen_live_or_listed":
            return  # needs nothing that runs
        ports = [free_port() for _ in range(3)]
        peers = ",".join(f"127.0.0.1:{port}" for port in ports)
        common = ["--backend", "cpu", "--threads", "1", "--diagnostics-every", "5", "--log-every",
                  "50", "--peer-patience", "60s"]
        saved = self.folder("saved")
        self.shared = [self.start_daemon(
            "--peers", peers, "--checkpoint-dir", saved, "--checkpoint-every-steps", "10",
            "--buddy-steps", "8", *common,
            directory=(folder := self.folder(f"d{i}")),
            listen=[f"127.0.0.1:{port}", f"unix://{folder}/muond.sock"])
            for i, port in enumerate(ports)]
        self.saved_alone = self.folder("saved-alone")
        self.alone = self.start_daemon(
            "--fault-points", "newton_schulz_fast_path_nan:0:0", "--checkpoint-dir",
            self.saved_alone, "--checkpoint-every", "2s", "--max-arena-bytes", "1MiB", *common,
            directory=self.folder("alone"))
        self.damaged = self.start_daemon("--fault-points", "momentum_nan:20", *common,
                                         directory=self.folder("damaged"))
        everyone = [*self.shared, self.alone, self.damaged]
        self.prometheus = Prometheus(self.folder("prometheus"),
                                     [daemon.metrics[7:] for daemon in everyone])
        self.addCleanup(self.prometheus.stop)
        self.trainings = []
        self.prometheus.wait_ready()

    def folder(self, name):
        path = self.directory / name
        path.mkdir()
        return path

    def train(self, daemon, run, net, **options):
        training = Training(daemon.tcp, run, net, **options)
        self.addCleanup(training.stop)
        self.trainings.append(training)
        return training

    def train_by_client(self, daemon, run):
        """Over the unix socket, where the client asks for memory to share."""
        trainer = PacedTrainer(0, run, self.directory, [
            "--endpoint", daemon.unix, "--run", run, "--world", 1, "--steps", 100_000], {})
        self.addCleanup(trainer.close)
        return trainer

    # ---- Panels ------------------------------------------------------------------------------

    def check_queries(self, end):
        """Every query of every panel and every variable has data: none may be empty."""
        asked = 0
        for path in generate.files():
            dashboard = render.load(path)
            for panel in dashboard["panels"]:
                for target in panel.get("targets", []):
                    asked += 1
                    series = self.prometheus.query_range(substituted(target["expr"]), end - 4, end)
                    values = [value for _, samples in series for _, value in samples]
                    with self.subTest(dashboard=path.name, panel=panel["title"]):
                        self.assertFalse(any(math.isinf(value) for value in values), series)
                        finite = [value for value in values if math.isfinite(value)]
                        self.assertTrue(finite, f"no data: {target['expr']}")
                        if "histogram_quantile" not in target["expr"]:
                            self.assertEqual(len(finite), len(values), "NaN")
        self.assertGreater(asked, 70)
        for name, query in generate.VARIABLES.items():
            match, label = query[len("label_values("):-1].rsplit(", ", 1)
            values = self.prometheus.get(f"/api/v1/label/{label}/values",
                                         **{"match[]": substituted(match)})
            self.assertTrue(values, f"variable {name} has no values")

    def check_nothing_fires(self):
        """In a healthy run. Where the machine is too busy for a scrape to be answered within its
        second, daemons look dead for a moment; a fault would go on firing."""
        try:
            wait_until(lambda: not self.prometheus.firing(), "silence", 30)
        except AssertionError:
            self.fail(f"fire in a healthy run: {self.prometheus.firing()}")

    def check_every_metric_is_scraped(self):
        """What the table declares is there, by the names that queries use."""
        names = set(self.prometheus.get("/api/v1/label/__name__/values"))
        for name, metric in generate.metric_table.read().items():
            self.assertIn(name + ("_bucket" if metric.type == "histogram" else ""), names)

    def check_data_paths_and_checkpoints_are_fed(self):
        for series in FED:
            with self.subTest(series=series):
                self.assertTrue(self.prometheus.query(f"sum({series}) > 0"), "nothing counted")

    def check_console(self):
        page = self.prometheus.get("/consoles/muond.html", parse=False)
        self.assertNotIn("error", page.lower())
        self.assertIn("<td>shared</td>", page)

    # ---- muonctl -----------------------------------------------------------------------------

    def muonctl(self, *arguments):
        done = run_program("muonctl", "--endpoint", self.shared[0].tcp, "--run", "shared",
                           *arguments)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def check_tools(self):
        """While the run trains on three daemons."""
        events = [json.loads(line) for line in
                  self.muonctl("watch", "--steps", "6", "-o", "json").splitlines()]
        steps = [event["outcome"]["step"] for event in events]
        self.assertEqual(steps, list(range(steps[0], steps[0] + 6)), "not one is missing")
        self.assertTrue(any(event["sampled"] and event["worst_residuals"] for event in events)
                        or self.owns_no_matrix(0), events)
        trace = json.loads(self.muonctl("trace", "--steps", "3", "--file", "-"))["traceEvents"]
        names = {event["args"]["name"] for event in trace if event["name"] == "process_name"}
        self.assertEqual(len(names), 3, "every daemon")
        phases = {event["name"] for event in trace if event.get("cat") == "phase"}
        self.assertLessEqual({"receive", "reduce", "vote", "newton_schulz", "adamw"}, phases)
        self.assertIn("gradient norm", self.muonctl("params", "--worst"))
        self.assertIn("shared,running,1/1,", self.muonctl("runs", "-o", "csv"))
        self.assertIn("steps per second", self.muonctl("top", "--count", "2", "--interval", ".1"))
        self.assertIn("muon", self.muonctl("routing"))
        self.assertIn("flag --peers", self.muonctl("config"))
        self.assertIn("PASS", self.muonctl("doctor"))
        self.assertIn("| applied ", self.shared[0].log(), "a summary line")

    def owns_no_matrix(self, daemon):
        trainer = self.trainings[0].trainer
        return not any("w" in name for name, _, count in trainer.owned[daemon] if count)

    # ---- Faults ------------------------------------------------------------------------------

    def start_faults(self):
        """Each on a run of its own, so that none hides another."""
        storm = Net(1).run("storm", loss_scale=types.LossScale(**DYNAMIC, window=2))
        self.train(self.alone, storm, Net(1), spoil=lambda step: step % 3 == 0)
        floor = Net(2).run("floor", loss_scale=types.LossScale(**DYNAMIC, initial=1, minimum=1))
        self.train(self.alone, floor, Net(2), spoil=lambda step: step % 10 == 0)
        self.train(self.alone, Net(3).run("inactive", hidden=types.ROLE_NORM), Net(3))
        self.train(self.damaged, Net(4).run("damaged"), Net(4))
        stuck = ClusterTrainer(self.alone.tcp, Net(5).run("stuck"))
        stuck.initialize(Net(5).values)
        stuck.begin(0)
        ClusterTrainer(self.alone.tcp, Net(6).run("lonely", world_size=2))
        self.train(self.alone, Net(7).run("unsaved"), Net(7))
        self.train_by_client(self.alone, "unshared")  # its arena is larger than the daemon's limit
        self.stop_saving("unsaved")

    def stop_saving(self, run):
        """After its first checkpoint, a file is where the run's directory was. (Permissions would
        not keep root out.)"""
        folder = self.saved_alone / run
        wait_until(lambda: f'run "{run}": saved ckpt' in self.alone.log(), f"a checkpoint of {run}")
        folder.rename(self.saved_alone / "gone")
        folder.touch()

    def begin_without_it(self, training):
        """The trainer's call was refused at any point of a step; now one is in flight for sure."""
        # Whatever call it was in: the longest wait is that of a Finish (--step-deadline).
        wait_until(lambda: training.error, "the end of a run whose daemon is gone", 150)
        stub, run = training.trainer.stubs[0], training.trainer.run_id()
        position = stub.Status(pb.StatusRequest(run=run.run), timeout=20).runs[0].position
        stub.Begin(pb.BeginRequest(id=run, rank=0, step=position.next_step,
                                   loss_scale=position.last_outcome.next_loss_scale), timeout=20)

    def expected_alerts(self):
        alone = {(name, run) for name, run in (
            ("MuondOverflowStorm", "storm"), ("MuondLossScaleAtMinimum", "floor"),
            ("MuondMuonInactive", "inactive"), ("MuondMomentumNonFinite", "damaged"),
            ("MuondAllStepsSkipped", "damaged"), ("MuondStepStuck", "stuck"),
            ("MuondTrainersMissing", "lonely"), ("MuondNoProgress", "lonely"),
            ("MuondMuonUpdatesStalled", "inactive"), ("MuondNewtonSchulzNotConverging", "storm"),
            ("MuondCheckpointFailing", "unsaved"), ("MuondCheckpointTooOld", "unsaved"),
            ("MuondTransportFallback", self.unshared))}
        return alone | {("MuondDaemonDown", self.killed), ("MuondStepStuck", "shared")}

    def test_every_alert_is_seen_live_or_listed(self):
        live = {name for name, _ in self.expected_alerts()}
        for alert in alerts.present_alerts():
            self.assertNotEqual(alert.name in live, alert.name in NOT_SEEN_LIVE, alert.name)

    def test_dashboards_have_data_and_alerts_fire(self):
        net = Net()
        training = self.train(self.shared[0], net.run("shared", max_grad_norm=.5,
                                                      loss_scale=types.LossScale(**DYNAMIC)), net,
                              spoil=lambda step: step == 30)
        by_arena = self.train_by_client(self.shared[1], "arena")
        wait_until(lambda: len(training.outcomes) >= 40 or training.error, "40 steps", 60)
        by_arena.wait(lambda: len(by_arena.outcomes) >= 20, "20 steps", 60)
        time.sleep(WINDOW + 2)
        self.assertIsNone(training.error)
        self.assertLess(training.losses[-1], training.losses[0] / 2, "it learns")
        self.check_nothing_fires()
        end = time.time() - 1
        self.assertEqual(self.prometheus.query(
            'sum(grpc_server_handled_total{grpc_code="Unimplemented"}) > 0'), [])
        self.check_queries(end)
        self.check_every_metric_is_scraped()
        self.check_data_paths_and_checkpoints_are_fed()
        self.check_console()
        self.check_tools()
        if "MUOND_PICTURES" in os.environ:
            render.draw(self.prometheus, os.environ["MUOND_PICTURES"], end, WINDOW)

        self.start_faults()
        self.killed, self.unshared = self.shared[2].metrics[7:], self.alone.metrics[7:]
        self.shared[2].kill()
        self.begin_without_it(training)
        expected = self.expected_alerts()
        seen = set()

        def all_seen():
            seen.update(self.prometheus.firing())
            return expected <= seen

        try:
            wait_until(all_seen, "alerts", 120)
        except AssertionError:
            self.fail(f"never fired: {expected - seen}; fired: {seen}")


if __name__ == "__main__":
    unittest.main()
