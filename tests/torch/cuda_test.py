"""Tensors on a GPU: staged through pinned host memory, said so, and trained to the same bits as
tensors of the CPU. Ends with 77, skipped, where there is no GPU."""

import sys
import unittest

from harness import TorchTest, mlp

import torch
from torch import nn

if not torch.cuda.is_available():
    print("*** NO GPU HERE: CUDA tensors are not tested. ***")
    sys.exit(77)


class Cuda(TorchTest):
    def test_the_same_bits_as_on_the_cpu(self):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            results = []
            for device in ("cpu", "cuda"):
                model = mlp(dtype).to(device)
                opt = self.local(model, lr=0.02)
                generator = torch.Generator().manual_seed(3)
                for _ in range(3):
                    for p in model.parameters():
                        p.grad = torch.randn(p.shape, generator=generator).to(p)
                    opt.step()
                results.append((opt.digest(), [p.detach().cpu() for p in model.parameters()]))
            self.assertIn("pinned host memory", opt.describe())
            self.assertEqual(results[0][0], results[1][0])
            for p, q in zip(results[0][1], results[1][1]):
                self.assertTrue(torch.equal(p, q))

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
            opt = self.local(model, async_push=early)
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
        opt = self.local(model)
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
