"""`pip install` from the repository: a wheel that carries the library and works from a fresh
place."""

import importlib.util
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest
import zipfile

from harness import ROOT

CODE = """
import muond, muond.torch, torch
from muond import _library
assert muond.__file__.startswith(FOLDER), muond.__file__
assert _library.path().startswith(FOLDER), _library.path()
assert _library.version() == muond.__version__
p = torch.nn.Parameter(torch.eye(2))
opt = muond.torch.Muon([("w", p)], lr=0.1, local=True, threads=1)
p.grad = torch.diag(torch.tensor([3., 4.]))
opt.step()
torch.testing.assert_close(p.detach().diag(), torch.tensor([.9177124, .8780796]))
print("works")
"""


class Package(unittest.TestCase):
    def test_pip_installs_it_from_the_repository(self):
        with tempfile.TemporaryDirectory(prefix="muond-wheel-") as folder:
            pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
            quiet = ["--quiet", "--no-deps", "--no-index"]
            # What pip needs of a clone. A copy: setuptools leaves its own folders beside it.
            source = f"{folder}/source"
            os.makedirs(f"{source}/client")
            subprocess.run(["cp", str(ROOT / "pyproject.toml"), source], check=True)
            subprocess.run(["cp", "-r", str(ROOT / "client" / "python"), f"{source}/client"],
                           check=True)
            subprocess.run([*pip, "wheel", *quiet, "--no-build-isolation", "-w", folder, source],
                           check=True, timeout=300)
            wheel, = [name for name in os.listdir(folder) if name.endswith(".whl")]
            self.assertRegex(wheel, r"^muond-[\d.]+-py3-none-linux_x86_64\.whl$")
            names = zipfile.ZipFile(f"{folder}/{wheel}").namelist()
            self.assertIn("muond/libmuond_client.so", names)
            self.assertIn("muond/torch/optimizer.py", names)
            # A clean environment, but that torch need not be installed once more.
            subprocess.run([sys.executable, "-m", "venv", "--without-pip", f"{folder}/venv"],
                           check=True, timeout=120)
            python = f"{folder}/venv/bin/python"
            subprocess.run([*pip, "--python", python, "install", *quiet, f"{folder}/{wheel}"],
                           check=True, timeout=300)
            torch = pathlib.Path(importlib.util.find_spec("torch").origin).parents[1]
            site, = pathlib.Path(f"{folder}/venv/lib").glob("python3*/site-packages")
            (site / "torch-from-there.pth").write_text(f"{torch}\n")
            environment = {key: value for key, value in os.environ.items()
                           if not key.startswith("MUOND_")}
            done = subprocess.run(
                [python, "-c", f"FOLDER = {folder!r}\n{CODE}"], text=True, check=False,
                capture_output=True, timeout=120, cwd=folder,
                env=environment)
            self.assertEqual((done.returncode, done.stdout.strip()), (0, "works"), done.stderr)


if __name__ == "__main__":
    unittest.main()
