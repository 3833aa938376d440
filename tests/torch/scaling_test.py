"""Loss scaling, by torch's GradScaler and by the service: the fault of DeepSpeed #8432, thirty
steps from 65536, with each; and what the service counts."""

import unittest

from harness import TorchTest, batch, copy_of, mlp, moved

import torch
from torch import nn

from muond import errors

# Makes gradients that overflow fp16 at scale 65536 and no more once it has halved a few times.
LOUD = 40.0
STEPS = 30


def half_loss(model, step):
    """Of a model of fp16 parameters: computed in fp32 from fp16 outputs."""
    inputs, targets = batch(step)
    return LOUD * nn.functional.cross_entropy(model(inputs).float(), targets)


def autocast_loss(model, step):
    with torch.autocast("cpu", torch.float16):
        return half_loss(model, step)


class DeepSpeed8432(TorchTest):
    """Skips come first, as the scale comes down; then all ten parameters move."""

    def check(self, model, before, scales, last_scale, outcome):
        self.assertEqual(scales[:2], [65536., 32768.], "the story starts with an overflow")
        skipped = outcome.skipped_steps
        self.assertEqual(last_scale, 65536. / 2 ** skipped)
        self.assertEqual(outcome.applied_steps, STEPS - skipped)
        self.assertGreater(outcome.applied_steps, 20)
        self.assertEqual(moved(model, before), 10)
        self.assertTrue(all(bool(p.isfinite().all()) for p in model.parameters()))

    def test_scale_owned_by_the_service(self):
        model = mlp(torch.float16)
        opt = self.local(model, lr=0.02, loss_scale="dynamic")
        before, scales, values = copy_of(model), [], copy_of(model)
        self.assertEqual(moved(model, before), 0, "control: no step moves nothing")
        for step in range(STEPS):
            opt.zero_grad()
            scales.append(opt.loss_scale)
            (half_loss(model, step) * opt.loss_scale).backward()
            opt.step()
            if not opt.last_outcome.applied:
                self.assertEqual(opt.last_outcome.cause, "overflow")
                self.assertEqual(moved(model, values), 0, "a skip moves nothing")
            values = copy_of(model)
        self.check(model, before, scales, opt.loss_scale, opt.last_outcome)
        self.assertEqual(opt.status()["runs"][0]["lossScale"], opt.loss_scale)

    def test_GradScaler_that_skips_by_itself(self):
        model = mlp()
        opt = self.local(model, lr=0.02)
        scaler = torch.amp.GradScaler("cpu", init_scale=65536.)
        before, scales, outcomes = copy_of(model), [], []
        for step in range(STEPS):
            opt.zero_grad()
            scales.append(scaler.get_scale())
            scaler.scale(autocast_loss(model, step)).backward()
            scaler.step(opt)
            scaler.update()
            outcomes.append(opt.last_outcome)
        self.check(model, before, scales, scaler.get_scale(), opt.last_outcome)
        # The first is reported when the second begins; from then on each at once, with its scale.
        skips = outcomes[-1].skipped_steps
        self.assertIsNone(outcomes[0])
        for step in range(1, STEPS):
            self.assertEqual(outcomes[step].step, step)
            halved = (scales + [scaler.get_scale()])[step + 1] < scales[step]
            self.assertEqual((outcomes[step].cause, outcomes[step].loss_scale),
                             ("overflow", scales[step]) if halved else ("", 1.))
        run = opt.status()["runs"][0]
        self.assertEqual(int(run["stepsSkipped"]["overflow"]), skips)
        self.assertEqual(int(run["stepsApplied"]), STEPS - skips)

    def test_GradScaler_that_leaves_it_to_the_service(self):
        model = mlp()
        opt = self.local(model, lr=0.02, amp_scaling="daemon")
        scaler = torch.amp.GradScaler("cpu", init_scale=65536.)
        before, scales = copy_of(model), []
        for step in range(STEPS):
            opt.zero_grad()
            scales.append(scaler.get_scale())
            scaler.scale(autocast_loss(model, step)).backward()
            scaler.step(opt)
            scaler.update()
            self.assertEqual(opt.last_outcome.loss_scale, scales[-1])
        self.check(model, before, scales, scaler.get_scale(), opt.last_outcome)


class Scaling(TorchTest):
    def test_all_three_ways_end_in_the_same_bits(self):
        # A scale that is a power of two changes nothing but which steps are skipped: none here.
        results = []
        for way in ("none", "trainer", "daemon", "service"):
            model = mlp()
            options = {"amp_scaling": way} if way in ("trainer", "daemon") else {}
            if way == "service":
                options["loss_scale"] = 1024.
            opt = self.local(model, **options)
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.,
                                          enabled=way in ("trainer", "daemon"))
            for step in range(3):
                opt.zero_grad()
                inputs, targets = batch(step)
                loss = nn.functional.cross_entropy(model(inputs), targets)
                (scaler.scale(loss) * opt.loss_scale).backward()
                scaler.step(opt)
                scaler.update()
            results.append((way, opt.digest(), opt.last_outcome.grad_norm))
        self.assertEqual(len({digest for _, digest, _ in results}), 1, results)
        self.assertEqual(len({norm for _, _, norm in results}), 1, results)

    def test_unscale_and_clip_before_the_step(self):
        for way in ("trainer", "daemon"):
            model = mlp()
            opt = self.local(model, amp_scaling=way)
            scaler = torch.amp.GradScaler("cpu", init_scale=4096.)
            inputs, targets = batch(0)
            scaler.scale(nn.functional.cross_entropy(model(inputs), targets)).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            scaler.step(opt)
            scaler.update()
            self.assertEqual(opt.last_outcome.loss_scale, 1.)
            self.assertAlmostEqual(opt.last_outcome.grad_norm, 1e-3, delta=1e-5)

    def test_an_attached_scaler_reports_its_first_skip_at_once(self):
        model = mlp()
        scaler = torch.amp.GradScaler("cpu", init_scale=65536.)
        opt = self.local(model, grad_scaler=scaler)
        scaler.scale(autocast_loss(model, 0)).backward()
        model.norm.weight.grad.fill_(float("inf"))
        scaler.step(opt)
        self.assertEqual((opt.last_outcome.cause, opt.last_outcome.loss_scale),
                         ("overflow", 65536.))

    def test_two_scalers_at_once_are_refused(self):
        model = mlp()
        scaler = torch.amp.GradScaler("cpu")
        opt = self.local(model, loss_scale="dynamic", grad_scaler=scaler)
        scaler.scale(autocast_loss(model, 0)).backward()
        model.norm.weight.grad.fill_(float("inf"))
        with self.assertRaisesRegex(errors.MuondError, "GradScaler"):
            scaler.step(opt)

    def test_others_may_read_the_switch(self):
        # Lightning and Accelerate ask for it outside of a scaler's step: that is no skip.
        model = mlp()
        opt = self.local(model)
        self.assertFalse(opt._step_supports_amp_scaling)
        self.assertFalse(opt._step_supports_amp_scaling)
        self.assertIsNone(opt.last_outcome)


if __name__ == "__main__":
    unittest.main()
