"""Pushing while backward runs: the same bits as pushing at step(), whatever happens to gradients
afterwards."""

import unittest

from harness import TorchTest, batch, loss_of, mlp, train

import torch
from torch import nn

from muond.torch.early import RESTARTS_MAX
from muond.torch.staging import differing


class Early(TorchTest):
    def pair(self, change, steps=3, **options):
        """Trains early and not, with `change(model, opt)` between backward and step; (early
        optimizer, its model)."""
        digests, kept = [], None
        for early in (False, True):
            model = mlp()
            opt = self.local(model, async_push=early, **options)
            for step in range(steps):
                opt.zero_grad()
                loss_of(model, step).backward()
                change(model, opt, step)
                opt.step()
            digests.append(opt.digest())
            kept = opt
        self.assertEqual(*digests)
        return kept

    def test_everything_goes_early_from_the_second_step_on(self):
        opt = self.pair(lambda *_: None)
        self.assertEqual((opt._early.early, opt._early.again), (20, 0))
        self.assertEqual(opt.status()["runs"][0]["position"]["generation"], "1")

    def test_a_gradient_that_changes_after_its_push_is_pushed_again(self):
        def clip(model, opt, step):
            if step == 1:
                nn.utils.clip_grad_norm_(model.parameters(), 1e-3)

        opt = self.pair(clip)
        self.assertEqual(opt._early.again, 10)
        self.assertGreater(int(opt.status()["runs"][0]["position"]["generation"]), 1)
        self.assertIn("10 of them changed", opt.describe())

    def test_a_change_behind_the_version_counters_back_is_seen(self):
        def touch(model, opt, step):
            model.layer1.weight.grad.data.view(-1)[3:4].neg_()

        opt = self.pair(touch, steps=2)
        self.assertEqual(opt._early.again, 1)

    def test_unscale_under_a_GradScaler(self):
        digests = []
        for early in (False, True):
            model = mlp()
            opt = self.local(model, async_push=early)
            scaler = torch.amp.GradScaler("cpu", init_scale=256.)
            for step in range(2):
                opt.zero_grad()
                inputs, targets = batch(step)
                scaler.scale(nn.functional.cross_entropy(model(inputs), targets)).backward()
                scaler.step(opt)
                scaler.update()
            digests.append(opt.digest())
        self.assertEqual(*digests)
        self.assertEqual(opt._early.again, 10)

    def test_a_learning_rate_that_changes_after_backward(self):
        def change(model, opt, step):
            opt.param_groups[0]["lr"] = 0.01 * (step + 1)

        self.pair(change)

    def test_accumulation(self):
        digests = []
        for early in (False, True):
            model = mlp()
            opt = self.local(model, async_push=early)
            train(model, opt, 1)
            for step in range(2):
                opt.zero_grad()
                with opt.accumulate():
                    loss_of(model, step).backward()
                loss_of(model, step + 7).backward()
                opt.step()
            digests.append(opt.digest())
        self.assertEqual(*digests)
        self.assertEqual(opt._early.again, 0)

    def test_it_ends_itself_where_it_never_works(self):
        def double(model, opt, step):
            for p in model.parameters():
                p.grad.mul_(2)

        with self.assertLogs("muond", "WARNING") as logs:
            opt = self.pair(double, steps=RESTARTS_MAX + 3)
        self.assertIn("from now on", logs.output[-1])
        self.assertEqual(opt._early.early, 10 * RESTARTS_MAX)
        self.assertIn("all at step()", opt.describe())

    def test_a_gradient_taken_away_after_its_push(self):
        def drop(model, opt, step):
            if step == 1:
                model.layer0.weight.grad = None

        opt = self.pair(drop)
        self.assertEqual(int(opt.state[opt.param_groups[0]["params"][0]]["step"]), 2)

    def test_same_bits_means_bits(self):
        nan, zero = torch.tensor([float("nan"), 1.]), torch.tensor([0.])
        pairs = [("nan", nan, nan.clone()), ("zero", zero, -zero), ("scalar", zero[0], zero[0]),
                 ("shape", nan, zero), ("dtype", zero, zero.bfloat16())]
        self.assertEqual(sorted(differing(pairs)), ["dtype", "shape", "zero"])


if __name__ == "__main__":
    unittest.main()
