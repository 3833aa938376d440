#!/usr/bin/env python3
"""Alert rules, runbooks and dashboards are what their tables make, and the tools that judge them
agree: promtool on rules and their tests, our own linter on dashboards, which must find what is
planted."""

import copy
import json
import re
import subprocess
import sys
import tempfile
import unittest

from muond_process import ROOT

PROMETHEUS = ROOT / "deploy" / "prometheus"
sys.path[:0] = [str(ROOT / "dashboards"), str(PROMETHEUS)]
import alert_table  # noqa: E402  pylint: disable=wrong-import-position,import-error
import generate  # noqa: E402  pylint: disable=wrong-import-position,import-error
import lint  # noqa: E402  pylint: disable=wrong-import-position,import-error


def tool(*arguments, cwd=PROMETHEUS):
    return subprocess.run([str(a) for a in arguments], cwd=cwd, capture_output=True, text=True,
                          timeout=120, check=False)


class FilesTest(unittest.TestCase):
    maxDiff = None

    def succeeds(self, *arguments):
        done = tool(*arguments)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done.stdout + done.stderr

    def test_files_are_what_the_tables_make(self):
        self.succeeds(sys.executable, "-B", "alerts.py", "--check")
        self.succeeds(sys.executable, "-B", ROOT / "dashboards" / "generate.py", "--check")

    def test_promtool_accepts_rules_and_their_tests(self):
        self.succeeds("promtool", "check", "config", "prometheus.yml")
        self.succeeds("promtool", "check", "rules", "--lint=all", "--lint-fatal", "muond.rules.yml")
        self.succeeds("promtool", "test", "rules", "muond.test.yml")

    def test_every_rule_has_a_test_that_fires_and_one_that_does_not(self):
        rules = set(re.findall(r"- alert: (\w+)", (PROMETHEUS / "muond.rules.yml").read_text()))
        tests = (PROMETHEUS / "muond.test.yml").read_text()
        self.assertGreater(len(rules), 15)
        for rule in rules:
            self.assertIn(f"- name: {rule} fires", tests)
            self.assertIn(f"- name: {rule} is silent", tests)
            page = (ROOT / "docs" / "runbooks" / f"{rule}.md").read_text()
            for heading in ("## Meaning", "## Check", "## Act", "## Don't"):
                self.assertIn(heading, page)

    def test_a_rule_that_is_blunted_is_noticed(self):
        text = (PROMETHEUS / "muond.rules.yml").read_text()
        self.assertIn("> 1.5'", text)
        with tempfile.TemporaryDirectory() as folder:
            with open(f"{folder}/muond.rules.yml", "w", encoding="utf-8") as file:
                file.write(text.replace("> 1.5'", "> 9.5'"))
            with open(f"{folder}/muond.test.yml", "w", encoding="utf-8") as file:
                file.write((PROMETHEUS / "muond.test.yml").read_text())
            done = tool("promtool", "test", "rules", "muond.test.yml", cwd=folder)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("MuondShardImbalance", done.stdout + done.stderr)

    def test_scaled_rules_keep_their_meaning(self):
        with tempfile.TemporaryDirectory() as folder:
            scaled = f"{folder}/scaled.yml"
            self.succeeds(sys.executable, "-B", "alerts.py", "--scale", "60", "--output", scaled)
            self.succeeds("promtool", "check", "rules", scaled)
            with open(scaled, encoding="utf-8") as file:
                text = file.read()
        self.assertIn("timestamp_seconds) > 2 and", text)
        self.assertNotIn("[5m]", text)
        self.assertEqual(len(re.findall("- alert:", text)),
                         len(re.findall("- alert:", (PROMETHEUS / "muond.rules.yml").read_text())))

    def test_severities(self):
        for alert in alert_table.ALERTS:
            self.assertIn(alert.severity, ("critical", "warning", "info"), alert.name)


class LintTest(unittest.TestCase):

    def setUp(self):
        path, text = next(iter(generate.files().items()))
        self.name, self.good = path.name, json.loads(text)

    def faults(self, change):
        dashboard = copy.deepcopy(self.good)
        panel = next(p for p in dashboard["panels"] if p["type"] == "timeseries")
        change(dashboard, panel)
        return " ".join(lint.faults(self.name, dashboard))

    def test_finds_what_is_planted(self):
        def expr(text):
            return lambda d, p: p["targets"][0].update(expr=text)

        matcher = '{job=~"$job",instance=~"$instance"}'
        self.assertEqual(self.faults(lambda d, p: None), "")
        for change, complaint in (
                (lambda d, p: p.update(title=""), "has no title"),
                (lambda d, p: p.update(description=""), "has no description"),
                (lambda d, p: p["fieldConfig"]["defaults"].update(unit="ms"), "unit 'ms'"),
                (lambda d, p: p["targets"][0]["datasource"].update(uid="abc"), "data source"),
                (lambda d, p: p.update(gridPos={"x": 0, "y": 0, "w": 24, "h": 3}), "lies on"),
                (lambda d, p: p.update(id=1), "id twice"),
                (lambda d, p: d.update(editable=True), "editable"),
                (expr(f"muond_no_such_metric{matcher}"), "there is no metric"),
                (expr(f"muond_steps_total{matcher}"), "is a counter"),
                (expr("muond_loss_scale"), "without job and instance"),
                (expr(f"rate(muond_steps_total{matcher}[5m])"), "fixed window"),
                (expr(f"sum(muond_loss_scale{matcher}"), "not whole")):
            with self.subTest(complaint):
                self.assertIn(complaint, self.faults(change))

    def test_finds_unused_metrics(self):
        faults = " ".join(lint.unused({self.name: self.good}))
        self.assertIn("muond_memory_bytes: no panel", faults)


if __name__ == "__main__":
    unittest.main()
