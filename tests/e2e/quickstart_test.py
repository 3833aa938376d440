#!/usr/bin/env python3
"""The example trainer of deploy/quickstart, with few steps: what it writes, and that it is true."""

import csv
import json
import os
import random
import shutil
import subprocess
import unittest

from muond_process import ProcessTest, run_program

STEPS = 40
HELD_OUT = "Ruth"
KEYS = {
    "parameters", "muon_matrices", "newton_schulz_calls", "newton_schulz_fallbacks",
    "steps_applied", "steps_skipped", "loss_scale", "momentum_nonfinite", "validation_loss",
    "state_digest", "lr", "steps_per_second", "seed", "text", "books_held_out"}


def write_text(path):
    """A few books of the King James Bible; without the program, verses of a made-up language."""
    if shutil.which("bible"):
        passages = ["gen1:1-gen9:29", "ruth1:1-ruth4:22"]
        verses = [subprocess.run(["bible", "-f", passage], stdin=subprocess.DEVNULL, check=True,
                                 capture_output=True, text=True, timeout=60).stdout
                  for passage in passages]
        path.write_text("".join(verses))
        return
    rng = random.Random(1)
    words = ["".join(rng.choices("aeiounrstlm", k=rng.randint(2, 7))) for _ in range(12)]
    with path.open("w") as file:
        for book, verses in (("Ge", 400), (HELD_OUT, 80)):
            for verse in range(1, verses + 1):
                file.write(f"{book}1:{verse} {' '.join(rng.choices(words, k=12))}\n")


class QuickstartTest(ProcessTest):

    def train(self, daemon, out, *flags, code=0):
        text = self.directory / "text.txt"
        write_text(text)
        done = run_program(
            "muond-example-char-lm", "--text", text, "--out", out, "--holdout", HELD_OUT,
            "--steps", STEPS, "--muon-lr", "0.016", "--adamw-lr", "0.008", "--batch", 64,
            "--hidden", 64, *flags, environment={"MUOND_ENDPOINT": daemon.unix}, timeout=240)
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        return done

    def test_few_steps(self):
        daemon = self.start_daemon()
        out = self.directory / "out"
        self.train(daemon, out, "--keep")
        summary = json.loads((out / "summary.json").read_text())
        self.assertLessEqual(KEYS, set(summary))
        self.check_muon(summary)
        self.check_losses(summary, out)
        self.check_against_the_daemon(summary, daemon)
        self.assertEqual(sorted(os.listdir(out)), ["loss.csv", "summary.json"])

    def check_muon(self, summary):
        algorithms = [p["algorithm"] for p in summary["parameters"]]
        self.assertLessEqual({"muon", "adamw"}, set(algorithms))
        self.assertEqual(summary["muon_matrices"], algorithms.count("muon"))
        self.assertEqual(summary["newton_schulz_calls"],
                         summary["muon_matrices"] * summary["steps_applied"])
        self.assertGreaterEqual(summary["steps_skipped"], 1, "the first scale overflows")
        self.assertEqual(summary["steps_applied"] + summary["steps_skipped"], STEPS)
        self.assertEqual(len(summary["loss_scale"]), STEPS)
        self.assertLess(summary["loss_scale"][-1], summary["loss_scale"][0])
        self.assertEqual(summary["momentum_nonfinite"], 0)

    def check_losses(self, summary, out):
        for optimizer in ("muon", "adamw"):
            curve = summary["validation_loss"][optimizer]
            self.assertEqual([curve[0][0], curve[-1][0]], [0, STEPS])
            self.assertLess(curve[-1][1], curve[0][1] - 0.3, optimizer)
        with (out / "loss.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        for optimizer in ("muon", "adamw"):
            written = [[int(row["step"]), float(row["validation_loss"])] for row in rows
                       if row["optimizer"] == optimizer]
            self.assertEqual([step for step, _ in written],
                             [step for step, _ in summary["validation_loss"][optimizer]])
            for (_, loss), (_, expected) in zip(written, summary["validation_loss"][optimizer]):
                self.assertAlmostEqual(loss, expected, delta=1e-5)

    def check_against_the_daemon(self, summary, daemon):
        """--keep leaves the runs open: the daemon itself says the same."""
        asked = run_program("muonctl", "status", "--run", "char-lm-muon", "-o", "json",
                            environment={"MUOND_ENDPOINT": daemon.unix})
        [run] = json.loads(asked.stdout)["runs"]
        for key in ("steps_applied", "newton_schulz_calls", "muon_matrices"):
            self.assertEqual(run[key], summary[key], key)
        asked = run_program("muonctl", "digest", "--run", "char-lm-muon", "-o", "json",
                            environment={"MUOND_ENDPOINT": daemon.unix})
        self.assertEqual(json.loads(asked.stdout)["tensor_digest"], summary["state_digest"])

    def test_runs_are_reproducible_and_leave_nothing(self):
        daemon = self.start_daemon()
        digests = []
        for name in ("a", "b"):
            self.train(daemon, self.directory / name)
            summary = json.loads((self.directory / name / "summary.json").read_text())
            digests.append(summary["state_digest"])
        self.assertEqual(digests[0], digests[1], "the same seed, the same bits")
        asked = run_program("muonctl", "status", "-o", "json",
                            environment={"MUOND_ENDPOINT": daemon.unix})
        self.assertEqual(json.loads(asked.stdout)["runs"], [], "closed runs are gone")

    def test_no_daemon(self):
        daemon = self.start_daemon()
        daemon.stop()
        done = self.train(daemon, self.directory / "out", code=1)
        self.assertIn("muond-example-char-lm: ", done.stderr)


if __name__ == "__main__":
    unittest.main()
