"""What the tests of the Python package share: small models, daemons, comparisons."""

import os
import pathlib
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "client" / "python"), str(ROOT / "tests" / "e2e")]

import torch  # noqa: E402
from torch import nn  # noqa: E402

import muond.torch  # noqa: E402
from muond_process import Daemon  # noqa: E402

torch.set_num_threads(1)
LONG = bool(os.environ.get("MUOND_TEST_LONG"))


def mlp(dtype=torch.float32, seed=0):
    """Three hidden matrices, an embedding, a head and biases: ten parameters with the norm's."""
    torch.manual_seed(seed)
    model = nn.Sequential()
    model.add_module("embed", nn.Embedding(13, 16))
    for i in range(3):
        model.add_module(f"layer{i}", nn.Linear(16, 16))
        model.add_module(f"act{i}", nn.Tanh())
    model.add_module("norm", nn.LayerNorm(16, bias=False))
    model.add_module("lm_head", nn.Linear(16, 13))
    return model.to(dtype)


def batch(step, count=24):
    generator = torch.Generator().manual_seed(1000 + step)
    inputs = torch.randint(0, 13, (count,), generator=generator)
    return inputs, (inputs * 5 + 1) % 13


def loss_of(model, step):
    inputs, targets = batch(step)
    return nn.functional.cross_entropy(model(inputs).float(), targets)


def local(params, **options):
    """The optimizer with a service in this process."""
    return muond.torch.Muon(params, **{"local": True, "threads": 1, **options})


def train(model, optimizer, steps, first=0):
    losses = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def copy_of(model):
    return [p.detach().clone() for p in model.parameters()]


def moved(model, before):
    return sum(not torch.equal(p, q) for p, q in zip(model.parameters(), before))


class TorchTest(unittest.TestCase):
    """Closes the optimizers and daemons that a test made."""

    maxDiff = None

    def local(self, params, **options):
        optimizer = local(params, **options)
        self.addCleanup(self._close, optimizer)
        return optimizer

    def remote(self, params, daemon, **options):
        options = {"endpoint": daemon.unix, "run": self._testMethodName, **options}
        optimizer = muond.torch.Muon(params, **options)
        self.addCleanup(self._close, optimizer)
        return optimizer

    @staticmethod
    def _close(optimizer):
        try:
            optimizer.close()
        except muond.MuondError:
            pass

    def daemon(self, *flags, **options):
        if "directory" not in options:
            folder = tempfile.TemporaryDirectory(prefix="muond-torch-", dir="/tmp")
            self.addCleanup(folder.cleanup)
            options["directory"] = folder.name
        daemon = Daemon("--backend", "cpu", "--threads", "1", *flags, **options)
        self.addCleanup(daemon.stop)
        return daemon

    def assertSame(self, one, other):
        for p, q in zip(one.parameters(), other.parameters(), strict=True):
            self.assertTrue(torch.equal(p, q))
