#!/usr/bin/env python3
"""Others can read our checkpoints: a reader written from docs/checkpoint_format.md, Python's
safetensors, and torch and DeepSpeed by way of client/tools/checkpoint_convert.py."""

import json
import os
import pathlib
import subprocess
import sys
import unittest

import numpy as np

from checkpoint_reader import read_checkpoint
from checkpoint_kill_test import gradients, run_spec, values
from foreign_trainer import parameter
from muond_process import ROOT, ProcessTest, run_program
from muond_stubs import types
from spread_trainer import SpreadTrainer

GOLDEN = ROOT / "tests/golden/checkpoint_v1"
CONVERT = ROOT / "client/tools/checkpoint_convert.py"
# What tests/torch/with_torch installs.
TORCH = pathlib.Path(os.environ.get(
    "MUOND_TORCH_PYTHON", pathlib.Path.home() / ".cache/muond/torch-venv/bin/python"))
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


# Three steps of both of torch's optimizers, and what they hold then.
TRAIN = """
import sys, torch
torch.manual_seed(0)
model = {"w": torch.randn(6, 4), "v": torch.randn(5, 7), "norm": torch.randn(9)}
model = {name: torch.nn.Parameter(value) for name, value in model.items()}
muon = torch.optim.Muon([model["w"], model["v"]], lr=0.1)
adamw = torch.optim.AdamW([model["norm"]], lr=0.1)
for step in range(3):
    for parameter in model.values():
        parameter.grad = torch.randn_like(parameter)
    muon.step(); adamw.step()
torch.save({"model": {n: p.detach() for n, p in model.items()}, "step": 3, "optimizers": [
    {"class": "Muon", "names": ["w", "v"], "state_dict": muon.state_dict()},
    {"class": "AdamW", "names": ["norm"], "state_dict": adamw.state_dict()}]}, sys.argv[1])
"""
# Two .pt files hold the same values, bit for bit; a DeepSpeed folder too.
COMPARE = """
import pathlib, sys, torch
first, second = (torch.load(path, weights_only=True) for path in sys.argv[1:3])
zero = pathlib.Path(sys.argv[3]) / "zero"
equal = lambda a, b: torch.equal(a.view(torch.int32), b.view(torch.int32))
states = [{name: entry for o in each["optimizers"] for name, entry in
           zip(o["names"], (o["state_dict"]["state"][i] for i in range(len(o["names"]))))}
          for each in (first, second)]
for name, value in first["model"].items():
    assert equal(value, second["model"][name]), name
    assert equal(value, torch.load(zero / name / "fp32.pt")["param"]), name
    for key, entry in states[0][name].items():
        assert torch.equal(torch.as_tensor(entry), torch.as_tensor(states[1][name][key])), key
        if key != "step":
            assert equal(entry, torch.load(zero / name / f"{key}.pt")["param"]), key
assert torch.load(zero / "norm" / "step.pt") == 3
assert not (zero / "w" / "exp_avg.pt").exists()
"""
# Then the same with the optimizers' state in bf16, as torch keeps it beside bf16 parameters: into a
# checkpoint and out again, all in one process, since torch takes long to start.
HALVED = """
import runpy, sys
original, folder, convert = sys.argv[1:4]
saved = torch.load(original, weights_only=True)
def states(content):
    return {name: {key: value for key, value in o["state_dict"]["state"][i].items()
                   if key != "step"}
            for o in content["optimizers"] for i, name in enumerate(o["names"])}
for entry in states(saved).values():
    assert entry
for optimizer in saved["optimizers"]:
    for entry in optimizer["state_dict"]["state"].values():
        entry.update({key: value.to(torch.bfloat16) for key, value in entry.items()
                      if key != "step"})
torch.save(saved, folder + "/half.pt")
def run(*arguments):
    sys.argv = [convert, *arguments]
    runpy.run_path(convert, run_name="__main__")
into = ["from-torch", folder + "/half.pt", folder + "/out", "--run", "r", "--step", "3"]
try:
    run(*into)
except SystemExit as refused:
    print(refused)
run(*into, "--widen")
# Momentum that stays what it is: moments have no such choice.
for entry in saved["optimizers"][1]["state_dict"]["state"].values():
    entry.update({key: value.to(torch.float32) for key, value in entry.items() if key != "step"})
torch.save(saved, folder + "/half_momentum.pt")
into = ["from-torch", folder + "/half_momentum.pt", folder + "/kept", "--run", "from-torch",
        "--step", "3", "--momentum-dtype"]
run(*into, "bf16")
run("to-torch", folder + "/kept/from-torch/ckpt-3", folder + "/same.pt")
for name, entry in states(torch.load(folder + "/same.pt", weights_only=True)).items():
    for key, value in entry.items():
        same = states(saved)[name][key]
        assert value.dtype == same.dtype and torch.equal(value, same), (name, key, value.dtype)
saved = torch.load(folder + "/half.pt", weights_only=True)
whole = ["from-torch", original, folder + "/narrowed", "--run", "r", "--momentum-dtype", "bf16"]
try:
    run(*whole)
except SystemExit as refused:
    print(refused)
run("to-torch", folder + "/out/r/ckpt-3", folder + "/back.pt", "--state-dtype", "bf16")
back = states(torch.load(folder + "/back.pt", weights_only=True))
for name, entry in states(saved).items():
    for key, value in entry.items():
        assert value.dtype == back[name][key].dtype == torch.bfloat16, (name, key)
        assert torch.equal(value.view(torch.int16), back[name][key].view(torch.int16)), (name, key)
"""
# As DeepSpeed's optimizer takes up a universal checkpoint (ZeROOptimizer and
# load_hp_checkpoint_state in its repository): the same files, keys and demands, in our own words.
# A rank takes a part of each parameter's flat master weights: here the second half.
DEEPSPEED = """
import os, re, sys, torch
tag, reference = sys.argv[1], torch.load(sys.argv[2], weights_only=True)
zero = os.path.join(tag, "zero")
state = torch.load(os.path.join(zero, "optimizer_state.pt"), weights_only=False)
assert tuple(map(int, state["ds_version"].split("."))) >= (0, 3, 17)
groups = [["w", "v"], ["norm"]]
assert len(state["param_groups"]) >= len(groups), "a group beyond the saved ones is not loaded"
for names, saved in zip(groups, state["param_groups"]):
    assert set(saved) == {"params"}, "it would overwrite the configuration"
    steps, keys = [], set()
    for name in names:
        step, folder = None, os.path.join(zero, name)
        for file in os.listdir(folder):
            key = re.fullmatch(r"(.+)[.]pt", file)[1]
            content = torch.load(os.path.join(folder, file), weights_only=False)
            if key == "step":
                step = content
                continue
            full = content["param"]
            shape = reference["model"][name].shape
            assert full.shape == shape and full.dtype == torch.float32, (name, key)
            half = full.numel() // 2
            fragment = full.flatten().narrow(0, half, full.numel() - half)
            if key == "fp32":
                whole = reference["model"][name]
            else:
                keys.add(key)
                whole = next(o["state_dict"]["state"][o["names"].index(name)][key]
                             for o in reference["optimizers"] if name in o["names"])
            assert torch.equal(fragment, whole.flatten()[half:]), (name, key)
        steps.append(step)
    assert all(step == steps[0] for step in steps), steps
    assert keys == ({"momentum_buffer"} if steps[0] is None else {"exp_avg", "exp_avg_sq"}), keys
"""


def torch_run():
    parameters = [parameter("w", [6, 4], group="m"), parameter("v", [5, 7], group="m"),
                  parameter("norm", [9], group="a", role=types.ROLE_NORM)]
    return types.Run(name="from-torch", world_size=1, parameters=parameters, groups=[
        types.Group(name="m", algorithm=types.ALGORITHM_MUON),
        types.Group(name="a", algorithm=types.ALGORITHM_ADAMW)])


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
            self.skipTest("SKIPPED: no Python with safetensors: pip can't install it here")
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

    # torchtitan PR #4615: bf16 state became fp32, and nobody was told.
    def test_torchtitan4615_half_precision_state_of_torch_is_widened_when_told_so_only(self):
        if not TORCH.exists():
            self.skipTest(f"SKIPPED: {TORCH}: no Python with torch (MUOND_TORCH_PYTHON names one)")

        done = subprocess.run(
            [str(TORCH), "-B", "-c", TRAIN + HALVED, str(self.directory / "whole.pt"),
             str(self.directory), str(CONVERT)],
            capture_output=True, text=True, check=False, timeout=300)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("w: momentum_buffer is bfloat16, muond keeps it in float32", done.stdout)
        self.assertIn("w: momentum_buffer is float32, --momentum-dtype says bfloat16", done.stdout)
        # A run that keeps it so goes on from it, another one does not take it.
        run = torch_run()
        run.groups[0].momentum_dtype = types.DTYPE_BF16
        self.assertEqual(self.resumed_step(run), 3)
        self.assertEqual(self.resumed_step(torch_run()), None)

    def resumed_step(self, run):
        """Of a daemon that has imported the momentum in bf16; None: it refused to."""
        directory = self.directory / f"daemon{len(self.daemons)}"
        directory.mkdir()
        daemon = self.start_daemon("--backend", "cpu", "--threads", "1", "--checkpoint-dir",
                                   str(self.directory / "kept"), directory=directory)
        trainer = SpreadTrainer([daemon.unix], run)
        try:
            step = trainer.join(10)
        except Exception:  # pylint: disable=broad-except
            self.assertIn("momentum bf16, the run has master f32, momentum f32", daemon.log())
            return None
        rng = np.random.default_rng(1)
        shapes = {"w": (6, 4), "v": (5, 7), "norm": (9,)}
        self.assertTrue(trainer.step(step, {name: rng.standard_normal(shape, np.float32)
                                            for name, shape in shapes.items()}, 1.0).applied)
        return step

    # DeepSpeed #8608, Megatron PR #5742: the state that an algorithm has, not two moments for all.
    def test_torch_state_goes_in_and_comes_out_again_and_to_deepspeed(self):
        if not TORCH.exists():
            self.skipTest(f"SKIPPED: {TORCH}: no Python with torch (MUOND_TORCH_PYTHON names one)")

        def run(*arguments):
            done = subprocess.run([str(TORCH), "-B", *map(str, arguments)], capture_output=True,
                                  text=True, check=False, timeout=300)
            self.assertEqual(done.returncode, 0, done.stderr)

        root = self.directory / "imported"
        before, after = self.directory / "before.pt", self.directory / "after.pt"
        run("-c", TRAIN, before)
        run(CONVERT, "from-torch", before, root, "--run", "from-torch", "--step", 3)
        daemon = self.start_daemon("--backend", "cpu", "--threads", "1",
                                   "--checkpoint-dir", str(root))
        trainer = SpreadTrainer([daemon.unix], torch_run())
        self.assertEqual(trainer.join(30), 3)
        self.assertEqual(trainer.trainers[0].describe("norm")["norm"].t, 3)
        saved = run_program("muonctl", "--endpoint", daemon.unix, "-o", "json", "checkpoint",
                            "save")
        self.assertEqual(saved.returncode, 0, saved.stderr)
        folder = root / "from-torch" / json.loads(saved.stdout)["name"]
        run(CONVERT, "to-torch", folder, after)
        run(CONVERT, "to-deepspeed", folder, self.directory / "universal")
        run("-c", COMPARE, before, after, self.directory / "universal")
        run("-c", DEEPSPEED, self.directory / "universal", before)
        # The next step runs on it.
        rng = np.random.default_rng(1)
        shapes = {"w": (6, 4), "v": (5, 7), "norm": (9,)}
        outcome = trainer.step(3, {name: rng.standard_normal(shape, np.float32)
                                   for name, shape in shapes.items()}, 1.0)
        self.assertTrue(outcome.applied)
        self.assertEqual(outcome.newton_schulz_calls, 2)


if __name__ == "__main__":
    unittest.main()
