"""Debian's Prometheus for a test: scrapes daemons once a second, evaluates the alert rules with all
durations divided, answers queries."""

import json
import pathlib
import socket
import subprocess
import sys
import urllib.parse
import urllib.request

from muond_process import ROOT, wait_until

SCALE = 60  # a minute of the rules is a second here
CONSOLES = ROOT / "deploy" / "prometheus" / "consoles"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Prometheus:
    """A server with a directory of its own."""

    def __init__(self, directory, targets):
        self.directory = pathlib.Path(directory)
        rules = self.directory / "rules.yml"
        subprocess.run([sys.executable, "-B", ROOT / "deploy" / "prometheus" / "alerts.py",
                        "--scale", str(SCALE), "--output", rules], check=True, timeout=60)
        config = self.directory / "prometheus.yml"
        config.write_text(json.dumps({
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(rules)],
            "scrape_configs": [{"job_name": "muond", "static_configs": [{"targets": targets}]}]}))
        self.url = f"http://127.0.0.1:{free_port()}"
        self.log = open(self.directory / "prometheus.log", "wb")
        self.process = subprocess.Popen(
            ["prometheus", f"--config.file={config}", f"--web.listen-address={self.url[7:]}",
             f"--storage.tsdb.path={self.directory / 'tsdb'}",
             f"--web.console.templates={CONSOLES}", f"--web.console.libraries={CONSOLES}"],
            stdin=subprocess.DEVNULL, stdout=self.log, stderr=subprocess.STDOUT)

    def wait_ready(self):
        wait_until(self._ready, "Prometheus' start")

    def _ready(self):
        assert self.process.poll() is None, (self.directory / "prometheus.log").read_text()
        try:
            return self.get("/-/ready", parse=False)
        except OSError:
            return False

    def get(self, path, parse=True, **parameters):
        query = urllib.parse.urlencode(parameters, doseq=True)
        with urllib.request.urlopen(f"{self.url}{path}?{query}", timeout=20) as reply:
            text = reply.read().decode()
        if not parse:
            return text
        answer = json.loads(text)
        assert answer["status"] == "success", answer
        return answer["data"]

    def query_range(self, expr, start, end, step=1):
        """[(labels, [(time, value)])]"""
        data = self.get("/api/v1/query_range", query=expr, start=start, end=end, step=step)
        return [(series["metric"], [(float(t), float(v)) for t, v in series["values"]])
                for series in data["result"]]

    def query(self, expr):
        data = self.get("/api/v1/query", query=expr)
        return [(series["metric"], float(series["value"][1])) for series in data["result"]]

    def firing(self):
        """{(alert, run or instance)} of now."""
        return {(alert["labels"]["alertname"],
                 alert["labels"].get("run") or alert["labels"].get("instance", ""))
                for alert in self.get("/api/v1/alerts")["alerts"] if alert["state"] == "firing"}

    def stop(self):
        self.process.terminate()
        self.process.wait(30)
        self.log.close()
