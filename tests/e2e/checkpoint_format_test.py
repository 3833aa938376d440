#!/usr/bin/env python3
"""Others can read our checkpoints: a reader written from docs/checkpoint_format.md, Python's
safetensors, and the tools of tests/... that go to and from torch and DeepSpeed."""

import json
import os
import pathlib
import subprocess
import sys
import unittest

import numpy as np

from checkpoint_reader import read_checkpoint
from checkpoint_kill_test import gradients, run_spec, values
from muond_process import ROOT, ProcessTest, run_program
from spread_trainer import SpreadTrainer

GOLDEN = ROOT / "tests/golden/checkpoint_v1"
# Made by deploy or by hand: python3 -m venv build/safetensors-venv and pip install safetensors numpy.
VENV = pathlib.Path(os.environ.get("MUOND_SAFETENSORS_PYTHON",
                                   ROOT / "build/safetensors-venv/bin/python"))

READ = """
import json, sys
from safetensors import safe_open
found = {}
for path in sys.argv[1:]:
    with safe_open(path, framework="numpy") as opened:
        for key in opened.keys():
            tensor = opened.get_tensor(key)
            found[key] = [list(tensor.shape), float(tensor.astype("float64").sum())]
print(json.dumps(found))
"""


def find_venv():
    """A Python with safetensors, made once in the build folder; None where there is no registry."""
    if not VENV.exists():
        folder = VENV.parent.parent
        made = subprocess.run([sys.executable, "-m", "venv", str(folder)], capture_output=True,
                              check=False)
        if made.returncode == 0:
            subprocess.run([str(folder / "bin/pip"), "install", "--quiet", "safetensors", "numpy"],
                           capture_output=True, check=False, timeout=240)
    works = VENV.exists() and subprocess.run([str(VENV), "-c", "import safetensors, numpy"],
                                             capture_output=True, check=False).returncode == 0
    return VENV if works else None


def golden_value(tensor, i):
    return np.float32(7 * 1000 + len(tensor) * 100 + i) + np.float32(0.1)


class CheckpointFormatTest(ProcessTest):
    def saved(self, daemons=1):
        """A checkpoint of a real daemon, and the trainer that is still there."""
        root = self.directory / "checkpoints"
        root.mkdir()
        daemon = self.start_daemon("--backend", "cpu", "--threads", "1",
                                   "--checkpoint-dir", str(root))
        trainer = SpreadTrainer([daemon.unix], run_spec())
        trainer.initialize(values())
        scale = 1024.0
        for step in range(5):
            scale = trainer.step(step, gradients(step, scale), scale).next_loss_scale
        done = run_program("muonctl", "--endpoint", daemon.unix, "checkpoint", "save")
        self.assertEqual(done.returncode, 0, done.stderr)
        return root, trainer

    def test_a_second_reader_finds_every_value_of_the_golden_checkpoint(self):
        manifest, tensors = read_checkpoint(GOLDEN / "r/ckpt-7")
        self.assertEqual(manifest["step"], 7)
        self.assertEqual(set(tensors), {
            "blk.0.wq.master", "blk.0.wq.momentum", "blk.0.norm.master", "blk.0.norm.exp_avg",
            "blk.0.norm.exp_avg_sq", "embed.master", "embed.exp_avg", "embed.exp_avg_sq"})
        self.assertEqual(tensors["embed.master"].shape, (5, 4))
        for name, tensor in tensors.items():
            parameter, state = name.rsplit(".", 1)
            expected = [golden_value(parameter + state, i) for i in range(tensor.size)]
            np.testing.assert_array_equal(tensor.reshape(-1), np.array(expected, np.float32), name)

    def test_a_second_reader_finds_what_a_trainer_pulls(self):
        root, trainer = self.saved()
        manifest, tensors = read_checkpoint(root / "killed/ckpt-5")
        pulled = trainer.trainers[0].pull(5, master=True)
        for name, tensor in pulled.items():
            np.testing.assert_array_equal(tensors[f"{name}.master"], tensor, name)
        described = trainer.trainers[0].describe()
        for parameter in manifest["parameters"]:
            state = described[parameter["name"]]
            self.assertEqual(parameter["t"], state.t)
            momentum = tensors[parameter["name"] + (
                ".momentum" if parameter["algorithm"] == "muon" else ".exp_avg")]
            self.assertAlmostEqual(float(np.linalg.norm(momentum.astype(np.float64))),
                                   state.momentum_norm, delta=1e-5 * state.momentum_norm)

    def test_python_safetensors_finds_tensors_by_logical_name_and_shape(self):
        python = find_venv()
        if python is None:
            self.skipTest("SKIPPED: no Python with safetensors: pip could not install it here")
        root, _ = self.saved()
        folder = root / "killed/ckpt-5"
        done = subprocess.run([str(python), "-c", READ,
                               *map(str, sorted(folder.glob("*.safetensors")))],
                              capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        found = json.loads(done.stdout)
        _, tensors = read_checkpoint(folder)
        self.assertEqual(set(found), set(tensors))
        for name, (shape, total) in found.items():
            self.assertEqual(tuple(shape), tensors[name].shape, name)
            self.assertEqual(total, float(tensors[name].astype(np.float64).sum()), name)


if __name__ == "__main__":
    unittest.main()
