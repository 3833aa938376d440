#!/usr/bin/env python3
"""The real muond's configuration: who wins, what is refused, and that what it prints is a file."""

import json
import re
import unittest

from muond_process import ROOT, ProcessTest, run_program

ROW = re.compile(r"([a-z-]+) = (.+?)  # (.+)")


class ConfigTest(ProcessTest):

    def print_config(self, *flags, environment=None):
        """{setting: (value, source)} and the text."""
        done = run_program("muond", *flags, "--print-config", environment=environment)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        rows = {}
        for line in done.stdout.splitlines():
            if line.startswith("#"):
                continue
            row = ROW.fullmatch(line)
            self.assertTrue(row, line)
            rows[row[1]] = (row[2], row[3])
        return rows, done.stdout

    def write(self, text, name="muond.conf"):
        path = self.directory / name
        path.write_text(text)
        return path

    def expect_usage_error(self, *arguments, words, environment=None):
        done = run_program("muond", *arguments, environment=environment)
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertEqual(done.stdout, "")
        for word in words:
            self.assertIn(word, done.stderr)

    def test_flag_over_environment_over_file_over_default(self):
        # Each source sets one setting more than the stronger one, to another value.
        path = self.write('threads = 11\nmax-runs = 11\nmax-parameters = 11\n'
                          'log-format = "json"\nstep-deadline = "11s"\n')
        environment = {"MUOND_THREADS": "22", "MUOND_MAX_RUNS": "22",
                       "MUOND_STEP_DEADLINE": "22s"}
        rows, _ = self.print_config("--config", path, "--threads", "33", environment=environment)
        self.assertEqual(rows["threads"], ("33", "flag --threads"))
        self.assertEqual(rows["max-runs"], ("22", "environment MUOND_MAX_RUNS"))
        self.assertEqual(rows["step-deadline"], ('"22s"', "environment MUOND_STEP_DEADLINE"))
        self.assertEqual(rows["max-parameters"], ("11", f"{path}:3"))
        self.assertEqual(rows["log-format"], ('"json"', f"{path}:4"))
        self.assertEqual(rows["max-world-size"], ("65536", "default"))

    def test_a_stronger_list_replaces_the_weaker(self):
        path = self.write('listen = ["unix:///run/a.sock", "127.0.0.1:1"]\n')
        environment = {"MUOND_CONFIG": str(path)}
        rows, _ = self.print_config(environment=environment)
        self.assertEqual(rows["listen"],
                         ('["unix:///run/a.sock", "127.0.0.1:1"]', f"{path}:1"))
        environment["MUOND_LISTEN"] = "127.0.0.1:2,127.0.0.1:3"
        rows, _ = self.print_config(environment=environment)
        self.assertEqual(rows["listen"][0], '["127.0.0.1:2", "127.0.0.1:3"]')
        rows, _ = self.print_config("--listen", "127.0.0.1:4", "--listen", "127.0.0.1:5",
                                    environment=environment)
        self.assertEqual(rows["listen"], ('["127.0.0.1:4", "127.0.0.1:5"]', "flag --listen"))

    def test_what_it_prints_is_a_config_file(self):
        flags = ["--listen", "unix:///run/odd \"name\"/m.sock", "--metrics-address", "none",
                 "--threads", "3", "--step-deadline", "90s", "--max-chunk-bytes", "65536",
                 "--max-run-bytes", "3GiB", "--log-level", "debug", "--backend", "reference",
                 "--fault-points", "fail_commit:2"]
        rows, text = self.print_config(*flags)
        self.assertEqual(rows["metrics-address"][0], '"none"')
        again, _ = self.print_config("--config", self.write(text))
        self.assertEqual({n: value for n, (value, _) in again.items()},
                         {n: value for n, (value, _) in rows.items()})
        self.assertTrue(all("muond.conf:" in source for _, source in again.values()))

    def test_the_example_file_is_the_defaults(self):
        defaults, _ = self.print_config()
        example, _ = self.print_config("--config", ROOT / "deploy" / "muond.conf")
        self.assertEqual({n: value for n, (value, _) in example.items()},
                         {n: value for n, (value, _) in defaults.items()})
        named = {n for n, (_, source) in example.items() if source != "default"}
        self.assertEqual(set(defaults) - named, {"fault-points"})

    def test_what_is_refused_and_where_it_came_from(self):
        path = self.write("threads = 1\n\n# a comment\nstep-deadlin = \"5s\"\n")
        self.expect_usage_error("--config", path,
                                words=[f"{path}:4", '"step-deadlin"', '"step-deadline"'])
        path = self.write("threads = many\n")
        self.expect_usage_error("--config", path, words=[f"{path}:1", "threads"])
        self.expect_usage_error("--config", self.directory / "absent.conf", words=["absent.conf"])
        self.expect_usage_error("--no-such-flag", words=["--no-such-flag"])
        self.expect_usage_error("--threads", "-1", words=["threads", "--threads"])
        self.expect_usage_error(environment={"MUOND_STEP_DEADLINE": "soon"},
                                words=["MUOND_STEP_DEADLINE", "soon"])
        self.expect_usage_error("--listen", "0.0.0.0:0", words=["0.0.0.0:0", "--insecure"])
        self.expect_usage_error("--listen", "127.0.0.1:0", "--fault-points", "no_such_point",
                                words=["no_such_point", "fail_commit"])

    def test_help_and_version(self):
        for flag, word in (("--help", "--step-deadline"), ("--version", "muond ")):
            done = run_program("muond", flag)
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            self.assertIn(word, done.stdout)

    def test_a_daemon_runs_by_its_file(self):
        socket = self.directory / "by-file.sock"
        path = self.write('log-format = "json"\nstep-deadline = "7s"\n')
        daemon = self.start_daemon("--config", str(path), listen=[f"unix://{socket}"],
                                   environment={"MUOND_UNHEARD_OF": "1"})
        daemon.stop()
        lines = [json.loads(line) for line in daemon.log().splitlines()]
        self.assertTrue(all({"ts", "level", "msg"} <= set(line) for line in lines), lines)
        warnings = [line["msg"] for line in lines if line["level"] == "warning"]
        self.assertEqual(len(warnings), 1, lines)
        self.assertIn("MUOND_UNHEARD_OF", warnings[0])


if __name__ == "__main__":
    unittest.main()
