"""Tensors on a GPU whose daemon computes there, too: they go by pointer and stream through memory
that both processes share, and are trained to the same bits as tensors of the CPU, and as by every
other path. Ends with 77, skipped, where there is no GPU."""

import sys
import tempfile
import unittest

from harness import TorchTest, mlp

import torch
from torch import nn

from muond_process import Daemon

if not torch.cuda.is_available():
    print("*** NO GPU HERE: CUDA tensors are not tested. ***")
    sys.exit(77)


class Cuda(TorchTest):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory(prefix="muond-torch-", dir="/tmp")
        cls.addClassCleanup(folder.cleanup)
        cls.shared = Daemon("--backend", "cuda", directory=folder.name)
        cls.addClassCleanup(cls.shared.stop)

    def made(self, params, **options):
        self.runs = getattr(self, "runs", 0) + 1
        run = f"{self._testMethodName}-{self.runs}"
        return self.remote(params, self.shared, run=run, **options)

    def train(self, dtype, device, steps=3, **options):
        model = mlp(dtype).to(device)
        opt = self.made(model, lr=0.02, **options)
        generator = torch.Generator().manual_seed(3)
        for _ in range(steps):
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=generator).to(p)
            versions = [p._version for p in model.parameters()]
            opt.step()
            self.assertTrue(all(p._version > version
                                for p, version in zip(model.parameters(), versions)))
        return opt, [p.detach().cpu() for p in model.parameters()]

    def test_the_same_bits_by_every_path(self):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            opt, wanted = self.train(dtype, "cpu")
            for transport in ("auto", "grpc", "arena"):
                with self.subTest(dtype=dtype, transport=transport):
                    other, got = self.train(dtype, "cuda", transport=transport)
                    self.assertEqual(other._binding.session.transports()[0]["name"],
                                     "cuda-ipc" if transport == "auto" else transport)
                    self.assertIn("read in place", other.describe())
                    self.assertEqual(other.digest(), opt.digest())
                    for p, q in zip(got, wanted):
                        self.assertTrue(torch.equal(p, q))

    def test_what_is_queued_on_the_stream_counts(self):
        """Gradients that a stream still computes when step() is called, on a stream of its own."""
        digests = []
        for slow in (False, True):
            model = mlp().cuda()
            opt = self.made(model, lr=0.02)
            stream = torch.cuda.Stream() if slow else torch.cuda.current_stream()
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                for step in range(3):
                    if slow:
                        torch.cuda._sleep(200_000_000)
                    for p in model.parameters():
                        p.grad = torch.full_like(p, 0.5 + step) + p.detach()
                    opt.step()
            torch.cuda.synchronize()
            digests.append(opt.digest())
        self.assertEqual(*digests)

    def test_tensors_that_are_not_contiguous(self):
        results = []
        for device in ("cpu", "cuda"):
            weight = nn.Parameter(torch.arange(64.).reshape(8, 8).t().to(device) / 64)
            opt = self.made([("w", weight)], lr=0.1)
            weight.grad = torch.eye(8, device=device).flip(0).t() * 3
            opt.step()
            results.append((opt.digest(), weight.detach().cpu()))
        self.assertEqual(results[0][0], results[1][0])
        self.assertTrue(torch.equal(results[0][1], results[1][1]))

    def gradients(self, model, step, scale=lambda loss: loss):
        """Fixed ones, from a backward pass that ends in known values."""
        generator = torch.Generator().manual_seed(step)
        total = sum((p * torch.randn(p.shape, generator=generator).to(p)).sum()
                    for p in model.parameters())
        scale(total).backward()

    def test_pushing_while_backward_runs(self):
        digests = []
        for early in (False, True):
            model = mlp().cuda()
            opt = self.made(model, async_push=early)
            for step in range(4):
                opt.zero_grad()
                self.gradients(model, step)
                if step == 2:
                    nn.utils.clip_grad_norm_(model.parameters(), 1e-3, foreach=False)
                opt.step()
            digests.append(opt.digest())
        self.assertEqual(*digests)
        self.assertEqual((opt._early.early, opt._early.again), (30, 10))

    def test_GradScaler(self):
        model = mlp().cuda()
        opt = self.made(model)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.**24)
        for step in range(4):
            opt.zero_grad()
            self.gradients(model, step, scaler.scale)
            if step < 2:
                model.norm.weight.grad.fill_(float("inf"))
            scaler.step(opt)
            scaler.update()
        self.assertEqual((opt.last_outcome.skipped_steps, opt.last_outcome.applied_steps), (2, 2))
        self.assertEqual(scaler.get_scale(), 2.**22)


if __name__ == "__main__":
    unittest.main()
