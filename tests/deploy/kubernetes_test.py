#!/usr/bin/env python3
"""Chart and kustomization, rendered by Helm and kubectl and held against Kubernetes' own schemas;
no cluster. That both make the same objects, that the daemon accepts the configuration in them, and
that what would be wrong is refused."""

import copy
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
VENV = ROOT / "build/deploy-venv"
KUBERNETES = ROOT / "deploy/kubernetes"
VERSIONS = ("1.27", "1.37")  # the oldest that has what we use, and the newest known here

RULES = """groups:
  - name: muond
    rules:
      - alert: Test
        expr: up == 0
"""

DEDICATED = {"mode": "statefulset", "tls": {"secretName": "muond-tls"}, "hostSocketDirectory": "",
             "gpu": {"mode": "request"}}
# Each way of deployment that the documents name, as values of the chart.
WAYS = {
    "beside": {},
    "beside, over the network": {"tls": {"secretName": "muond-tls"}},
    "dedicated": DEDICATED,
    "dedicated, plain": {**DEDICATED, "tls": {"secretName": ""}, "insecure": True},
    "time slices": {"gpu": {"mode": "request", "resource": "nvidia.com/gpu.shared", "count": 2}},
    "cpu": {"gpu": {"mode": "none"}, "config": {"backend": "cpu", "threads": 4,
                                                "max-run-bytes": "64GiB"}},
    "all options": {"priorityClassName": "high", "nodeSelector": {"a": "b"},
                    "affinity": {"nodeAffinity": {}}, "podLabels": {"c": "d"},
                    "podAnnotations": {"e": "f"}, "imagePullSecrets": [{"name": "g"}],
                    "extraEnv": [{"name": "H", "value": "i"}],
                    "extraVolumes": [{"name": "j", "emptyDir": {}}],
                    "extraVolumeMounts": [{"name": "j", "mountPath": "/j"}],
                    "serviceAccount": {"annotations": {"k": "l"}},
                    "networkPolicy": {"trainerNamespaceLabels": {"m": "n"}}},
    "bare": {"networkPolicy": {"enabled": False}, "podDisruptionBudget": {"enabled": False}},
}


def normal(thing):
    """Without what only one of the two tools adds."""
    thing = copy.deepcopy(thing)
    for metadata in (thing["metadata"],
                     thing.get("spec", {}).get("template", {}).get("metadata", {})):
        metadata.get("labels", {}).pop("app.kubernetes.io/managed-by", None)
        metadata.pop("namespace", None)
    return thing


def by_name(objects):
    return {(o["kind"], o["metadata"]["name"]): normal(o) for o in objects}


class KubernetesTest(unittest.TestCase):

    maxDiff = None

    @classmethod
    def setUpClass(cls):
        cls.scratch = tempfile.TemporaryDirectory()  # pylint: disable=consider-using-with
        cls.addClassCleanup(cls.scratch.cleanup)
        cls.directory = pathlib.Path(cls.scratch.name)
        (cls.directory / "rules").mkdir()
        (cls.directory / "rules/muond.alerts.rules.yml").write_text(RULES)
        (cls.directory / "dashboards").mkdir()
        (cls.directory / "dashboards/run.json").write_text('{"title": "a {{label}}"}')
        subprocess.run([KUBERNETES / "assemble", cls.directory / "out"], check=True,
                       stdout=subprocess.DEVNULL,
                       env={**os.environ, "MUOND_RULES": str(cls.directory / "rules"),
                            "MUOND_DASHBOARDS": str(cls.directory / "dashboards")})

    def helm(self, values, chart=KUBERNETES / "chart"):
        """The objects of a release called muond in the namespace muond; hooks and notes apart."""
        with helm_python.Chart.load(chart) as loaded:
            rendered = loaded.render(values, name="muond", namespace="muond")
        objects = []
        for name, text in rendered.items():
            if not name.endswith("NOTES.txt") and "/tests/" not in name:
                objects += [o for o in yaml.safe_load_all(text) if o]
        return objects

    def kustomize(self, folder):
        done = subprocess.run([VENV / "bin/kubectl", "kustomize", folder], capture_output=True,
                              text=True, check=False, timeout=60)
        self.assertEqual(done.returncode, 0, done.stderr)
        return [o for o in yaml.safe_load_all(done.stdout) if o]

    def check_schema(self, objects):
        """Custom resources apart, which have no schema here: their outline is checked by hand."""
        for thing in objects:
            if thing["apiVersion"].startswith("monitoring.coreos.com/"):
                self.assertEqual(set(thing), {"apiVersion", "kind", "metadata", "spec"})
                continue
            for version in VERSIONS:
                kubernetes_validate.validate(thing, version, strict=True)

    def pod(self, objects):
        return next(o for o in objects if o["kind"] in ("DaemonSet", "StatefulSet"))["spec"][
            "template"]["spec"]

    def test_every_way_is_valid_kubernetes(self):
        for name, values in WAYS.items():
            with self.subTest(name):
                objects = self.helm(values)
                self.check_schema(objects)
                kinds = {o["kind"] for o in objects}
                self.assertIn("StatefulSet" if "mode" in values else "DaemonSet", kinds)

    def test_the_chart_has_no_fault_of_helms_own(self):
        said = helm_python.lint(str(KUBERNETES / "chart"))
        self.assertEqual([m["error"] for m in said["messages"]], ["icon is recommended"])

    def test_kustomize_makes_the_charts_objects(self):
        for overlay, values in (("beside-trainers", {}), ("dedicated", DEDICATED)):
            with self.subTest(overlay):
                objects = self.kustomize(KUBERNETES / "kustomize/overlays" / overlay)
                self.check_schema(objects)
                self.assertEqual(by_name(objects), by_name(self.helm(values)))

    def test_monitoring_has_the_trees_rules_and_dashboards(self):
        out = self.directory / "out"
        chart = by_name(self.helm({"monitoring": {"enabled": True}}, out / "chart"))
        overlay = out / "kustomize/overlays/beside-trainers/kustomization.yaml"
        overlay.write_text(overlay.read_text() + "components: [../../components/monitoring]\n")
        kustomize = by_name(self.kustomize(overlay.parent))
        self.check_schema(list(chart.values()) + list(kustomize.values()))
        added = {("PodMonitor", "muond"), ("PrometheusRule", "muond-alerts-rules"),
                 ("ConfigMap", "muond-dashboards")}
        for objects in (chart, kustomize):
            self.assertLessEqual(added, set(objects))
            self.assertEqual(objects["PrometheusRule", "muond-alerts-rules"]["spec"],
                             yaml.safe_load(RULES))
            self.assertEqual(objects["ConfigMap", "muond-dashboards"]["data"],
                             {"run.json": '{"title": "a {{label}}"}'})
        self.assertEqual(chart["PodMonitor", "muond"]["spec"],
                         kustomize["PodMonitor", "muond"]["spec"])
        self.assertEqual(set(chart), set(kustomize))

    def test_the_trees_own_rules_and_dashboards_are_taken(self):
        out = self.directory / "own"
        subprocess.run([KUBERNETES / "assemble", out], check=True, stdout=subprocess.DEVNULL)
        objects = by_name(self.helm({"monitoring": {"enabled": True}}, out / "chart"))
        rules = yaml.safe_load((ROOT / "deploy/prometheus/muond.rules.yml").read_text())
        self.assertEqual(objects["PrometheusRule", "muond-rules"]["spec"], rules)
        dashboards = {path.name: path.read_text() for path in (ROOT / "dashboards").glob("*.json")}
        self.assertTrue(dashboards)
        self.assertEqual(objects["ConfigMap", "muond-dashboards"]["data"], dashboards)
        size = sum(map(len, dashboards.values()))
        self.assertLess(size, 1 << 20, "a ConfigMap has at most 1 MiB")
        done = subprocess.run([VENV / "bin/kubectl", "kustomize",
                               out / "kustomize/overlays/dedicated"], capture_output=True,
                              check=False, timeout=60)
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_the_daemon_accepts_its_configuration(self):
        muond = pathlib.Path(os.environ["MUOND_BIN_DIR"]) / "muond"
        for name, values in WAYS.items():
            with self.subTest(name):
                objects = self.helm(values)
                config = next(o for o in objects if o["kind"] == "ConfigMap")["data"]["muond.conf"]
                path = self.directory / "muond.conf"
                path.write_text(config)
                done = subprocess.run([muond, "--config", path, "--print-config"],
                                      capture_output=True, text=True, check=False, timeout=60,
                                      env={"PATH": os.environ["PATH"]})
                self.assertEqual(done.returncode, 0, done.stderr)
                settings = dict(re.findall(r"(?m)^(\S+) = (.*?)  #", done.stdout))
                ports = {p["name"]: p["containerPort"]
                         for p in self.pod(objects)["containers"][0]["ports"]}
                self.assertEqual(settings["health-address"], f'"0.0.0.0:{ports["health"]}"')
                self.assertEqual(settings["metrics-address"], f'"0.0.0.0:{ports["metrics"]}"')
                self.assertIn(f':{ports["grpc"]}"', settings["listen"])
                grace = int(re.fullmatch(r'"(?:(\d)m)?(?:(\d+)s)?"', settings["drain-grace"])[1]
                            or 0) * 60
                self.assertLess(grace, self.pod(objects)["terminationGracePeriodSeconds"])

    def test_daemons_take_nothing_that_they_need_not_have(self):
        for name, values in WAYS.items():
            with self.subTest(name):
                pod = self.pod(self.helm(values))
                for setting in ("hostIPC", "hostPID", "hostNetwork"):
                    self.assertNotIn(setting, pod)
                self.assertFalse(pod["automountServiceAccountToken"])
                container = pod["containers"][0]
                self.assertEqual(container["securityContext"]["capabilities"], {"drop": ["ALL"]})
                self.assertNotIn("privileged", json.dumps(container))
                gpu_asked = any("gpu" in key for key in container["resources"]["limits"])
                self.assertEqual(gpu_asked, values.get("gpu", {}).get("mode") == "request",
                                 "beside trainers it must not take theirs")

    def test_no_update_stops_a_run(self):
        for values in ({}, DEDICATED):
            objects = by_name(self.helm(values))
            kind = "StatefulSet" if values else "DaemonSet"
            self.assertEqual(objects[kind, "muond"]["spec"]["updateStrategy"], {"type": "OnDelete"})
            self.assertEqual(objects["PodDisruptionBudget", "muond"]["spec"]["maxUnavailable"], 0)

    def test_values_that_make_no_sense_are_refused(self):
        for values, words in (
                ({"mode": "deployment"}, "mode"),
                ({"replica": 3}, "replica"),
                ({"ports": {"grpc": 80}}, "want 1,024"),
                ({"mode": "statefulset"}, "give tls.secretName, or insecure"),
                ({"hostSocketDirectory": ""}, "no trainer could reach the daemon"),
                ({"insecure": True, "tls": {"secretName": "a"}}, "asks for certificates"),
                ({"config": {"listen": "0.0.0.0:1"}}, "the chart sets it")):
            with self.subTest(values):
                with self.assertRaises(helm_python.HelmError) as caught:
                    self.helm(values)
                self.assertIn(words, str(caught.exception))

    def test_a_change_of_configuration_shows_in_the_pod(self):
        marks = {self.helm(values)[2]["spec"]["template"]["metadata"]["annotations"][
            "muond.dev/config"] for values in ({}, {"config": {"max-runs": 3}})}
        self.assertEqual(len(marks), 2)


if __name__ == "__main__":
    if os.environ.get("MUOND_SANITIZE"):
        print("SKIPPED: no memory of ours is used here; the preset dev runs this", file=sys.stderr)
        sys.exit(77)
    if not (VENV / "bin/kubectl").exists():
        print(f"SKIPPED: {VENV} is missing: tests/deploy/make-venv makes it", file=sys.stderr)
        sys.exit(77)
    if pathlib.Path(sys.prefix).resolve() != VENV.resolve():
        os.execv(VENV / "bin/python", [str(VENV / "bin/python"), "-B", *sys.argv])
    import helm_python
    import kubernetes_validate
    import yaml
    unittest.main()
