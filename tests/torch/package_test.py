"""`pip install` from the repository: a wheel that carries the library and works from a fresh
place."""

import os
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
            # A copy: setuptools leaves its own folders beside the sources.
            subprocess.run(["cp", "-r", str(ROOT / "client" / "python"), f"{folder}/source"],
                           check=True)
            subprocess.run([*pip, "wheel", *quiet, "--no-build-isolation", "-w", folder,
                            f"{folder}/source"], check=True, timeout=300)
            wheel, = [name for name in os.listdir(folder) if name.endswith(".whl")]
            self.assertRegex(wheel, r"^muond-[\d.]+-py3-none-linux_x86_64\.whl$")
            names = zipfile.ZipFile(f"{folder}/{wheel}").namelist()
            self.assertIn("muond/libmuond_client.so", names)
            self.assertIn("muond/torch/optimizer.py", names)
            subprocess.run([*pip, "install", *quiet, "--target", f"{folder}/site",
                            f"{folder}/{wheel}"], check=True, timeout=300)
            environment = {key: value for key, value in os.environ.items()
                           if not key.startswith("MUOND_")}
            done = subprocess.run(
                [sys.executable, "-c", f"FOLDER = {folder!r}\n{CODE}"], text=True, check=False,
                capture_output=True, timeout=120, cwd=folder,
                env={**environment, "PYTHONPATH": f"{folder}/site"})
            self.assertEqual((done.returncode, done.stdout.strip()), (0, "works"), done.stderr)


if __name__ == "__main__":
    unittest.main()
