#!/usr/bin/env python3
"""Daemons that go away in the middle of a training, real processes: the trainer goes on by itself,
and ends with the digest of the training that nothing disturbed."""

import copy
import os
import pathlib
import tempfile
import threading
import time
import unittest

from harness import TorchTest, copy_of, loss_of, mlp, moved, train

import torch
from torch import nn

import muond.torch
from muond import errors
from muond_process import Daemon

STEPS = 14


def dropping():
    """A model with random numbers in its forward pass: steps that are taken again must draw the
    same ones."""
    model = mlp()
    model.act0 = nn.Sequential(model.act0, nn.Dropout(0.2))
    return model


class Cluster:
    """Daemons that share runs, on addresses of 127.0.0.0/8 that are this process's own."""

    def __init__(self, test, count, *flags, grace_seconds):
        self.test, self.grace_seconds, self.flags = test, grace_seconds, flags
        pid = os.getpid()
        self.listen = [f"127.{1 + pid // 250 % 250}.{1 + pid % 250}.{1 + index}:7070"
                       for index in range(count)]
        self.daemons = [None] * count
        for index in range(count):
            self.start(index)
        for daemon in self.daemons:
            daemon.wait_for_addresses()

    def start(self, index):
        daemon = Daemon(*self.flags, "--peers", ",".join(self.listen), "--advertise",
                        self.listen[index], directory=self.test.directory,
                        listen=[self.listen[index]], metrics="none", wait=False,
                        grace_seconds=self.grace_seconds)
        self.test.addCleanup(daemon.stop)
        self.daemons[index] = daemon

    def restart(self, index):
        self.start(index)
        self.daemons[index].wait_for_addresses()

    def kill(self, index):
        self.daemons[index].kill()


def schedule(opt):
    return torch.optim.lr_scheduler.ExponentialLR(opt, 0.97)


def take(model, opt, scheduler, step):
    """One step of the training, and its loss."""
    opt.zero_grad()
    loss = loss_of(model, step) * opt.loss_scale
    loss.backward()
    opt.step()
    scheduler.step()
    return loss.item()


class Recovery(TorchTest):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="muond-torch-", dir="/tmp")
        self.addCleanup(folder.cleanup)
        self.directory = pathlib.Path(folder.name)
        (self.directory / "checkpoints").mkdir()

    def cluster(self, daemons, every=4, grace_seconds=20):
        flags = ["--checkpoint-dir", self.directory / "checkpoints", "--threads", "1", "--backend",
                 "cpu"]
        if every:
            flags += ["--checkpoint-every-steps", str(every)]
        return Cluster(self, daemons, *flags, grace_seconds=grace_seconds)

    def training(self, cluster=None, **options):
        """(model, optimizer, scheduler), the same start each time."""
        torch.manual_seed(4)
        model = dropping()
        options = {"lr": 0.05, "adamw": {"lr": 0.01}, "loss_scale": "dynamic", **options}
        if cluster is None:
            opt = self.local(model.named_parameters(), **options)
        else:
            opt = muond.torch.Muon(model.named_parameters(), endpoint=cluster.listen[0],
                                   run="training", call_timeout=20., **options)
            self.addCleanup(self._close, opt)
        return model, opt, schedule(opt)

    def undisturbed(self):
        """(digest, losses) of a training that nothing happens to."""
        model, opt, scheduler = self.training()
        losses = [take(model, opt, scheduler, step) for step in range(STEPS)]
        return opt.digest(), losses

    def later(self, action, *arguments):
        """Has another thread do it while this one trains; joined at the end."""
        def run():
            time.sleep(0.3)
            action(*arguments)
        thread = threading.Thread(target=run)
        thread.start()
        self.addCleanup(thread.join)

    def train_through(self, cluster, happens, **options):
        """Trains to the end. happens: {step: what is done before it, once}. The steps taken."""
        model, opt, scheduler = self.training(cluster, **options)
        losses, taken = {}, []
        for step in opt.steps(STEPS, rewind=[scheduler]):
            if step in happens:
                happens.pop(step)(opt)
            losses[step] = take(model, opt, scheduler, step)
            taken.append(step)
        self.assertEqual(happens, {})
        digest, expected = self.undisturbed()
        self.assertEqual(list(losses.values()), expected)
        self.assertEqual(opt.digest(), digest)
        self.assertEqual(opt.last_outcome.applied_steps, STEPS)
        counts = {int(opt.state[p]["step"]) for p in model.parameters()}
        self.assertEqual(counts, {STEPS})
        return taken

    def test_daemons_restarted_one_after_the_other_lose_no_step(self):
        cluster = self.cluster(3, every=0)

        def restart(index):
            cluster.daemons[index].terminate()
            self.assertEqual(cluster.daemons[index].wait(), 0)
            self.later(cluster.restart, index)
        taken = self.train_through(cluster, {3: lambda _: restart(1), 6: lambda _: restart(0),
                                             9: lambda _: restart(2)})
        self.assertEqual(taken, list(range(STEPS)))

    def test_a_daemon_that_dies_has_the_steps_since_the_checkpoint_taken_again(self):
        cluster = self.cluster(2, every=0)

        def die(_):
            cluster.kill(1)
            self.later(cluster.restart, 1)
        taken = self.train_through(cluster, {4: lambda opt: opt.save_checkpoint(), 7: die})
        self.assertEqual(taken, [*range(8), *range(4, STEPS)])

    def test_the_only_daemon_dies_in_the_middle_of_steps(self):
        cluster = self.cluster(1)

        threads = []

        def die_soon(_):
            def die():
                time.sleep(0.03)
                cluster.kill(0)
                cluster.restart(0)
            threads.append(threading.Thread(target=die))
            threads[-1].start()
        # The last death comes before the last steps, however fast they are.
        self.train_through(cluster, {5: die_soon, 9: die_soon, 12: lambda _: [
            thread.join() for thread in threads]}, async_push=True)

    def test_what_step_says_without_a_loop_that_goes_back(self):
        cluster = self.cluster(1, every=0)
        model, opt, scheduler = self.training(cluster)
        for step in range(3):
            take(model, opt, scheduler, step)
        self.assertEqual(opt.save_checkpoint(), "ckpt-3")
        saved = copy_of(model)
        for step in range(3, 6):
            take(model, opt, scheduler, step)
        cluster.kill(0)
        cluster.restart(0)
        with self.assertRaisesRegex(errors.RolledBack, "before step 3") as caught:
            take(model, opt, scheduler, 6)
        self.assertEqual((caught.exception.step, opt.next_step), (3, 3))
        self.assertIn("opt.steps", caught.exception.hint)
        self.assertEqual(moved(model, saved), 0)
        self.assertEqual(opt.last_outcome.step, 2)
        self.assertEqual({int(opt.state[p]["step"]) for p in model.parameters()}, {3})
        opt._options["on_rollback"] = "continue"
        take(model, opt, scheduler, 3)
        cluster.kill(0)
        cluster.restart(0)
        take(model, opt, scheduler, 4)  # is lost
        self.assertEqual(opt.next_step, 3)
        self.assertEqual(moved(model, saved), 0)

    def test_without_a_checkpoint_the_state_is_lost(self):
        cluster = self.cluster(1, every=0)
        model, opt, scheduler = self.training(cluster, recovery_timeout=30.)
        take(model, opt, scheduler, 0)
        cluster.kill(0)
        cluster.restart(0)
        with self.assertRaisesRegex(errors.StateLost, "version 1") as caught:
            take(model, opt, scheduler, 1)
        self.assertIn("restart_from_parameters", caught.exception.hint)
        opt.restart_from_parameters()
        take(model, opt, scheduler, 1)
        self.assertEqual(opt.last_outcome.applied_steps, 1)

    def test_a_daemon_that_dies_before_the_first_step_gets_the_values_again(self):
        cluster = self.cluster(1, every=0)

        def die(_):
            cluster.kill(0)
            cluster.restart(0)
        self.assertEqual(self.train_through(cluster, {0: die}), list(range(STEPS)))

    def test_the_time_to_come_back_is_limited(self):
        cluster = self.cluster(1)
        model, opt, scheduler = self.training(cluster, recovery_timeout=1.)
        opt._options["call_timeout"] = 1.
        take(model, opt, scheduler, 0)
        before = copy_of(model)
        cluster.kill(0)
        start = time.monotonic()
        with self.assertRaises(errors.DaemonUnavailable):
            take(model, opt, scheduler, 1)
        self.assertLess(time.monotonic() - start, 75)
        self.assertEqual(moved(model, before), 0)

    def test_going_back_to_a_checkpoint_by_hand(self):
        model, opt, scheduler = self.training(self.cluster(2, every=0))
        take(model, opt, scheduler, 0)
        self.assertEqual(opt.save_checkpoint(), "ckpt-1")
        saved, digest = copy_of(model), opt.digest()
        take(model, opt, scheduler, 1)
        with self.assertRaisesRegex(errors.NotFound, "ckpt-5"):
            opt.restore_checkpoint("ckpt-5")
        self.assertGreater(moved(model, saved), 0)
        self.assertEqual(opt.restore_checkpoint("ckpt-1"), 1)
        self.assertEqual(moved(model, saved), 0)
        self.assertEqual(opt.digest(), digest)
        take(model, opt, scheduler, 1)
        self.assertEqual(opt.last_outcome.step, 1)

    def test_a_program_that_starts_again_goes_on_from_its_own_files(self):
        cluster = self.cluster(1, every=0)
        model, opt, scheduler = self.training(cluster)
        take(model, opt, scheduler, 0)
        opt.save_checkpoint()
        files = copy.deepcopy({"model": model.state_dict(), "opt": opt.state_dict(),
                               "scheduler": scheduler.state_dict(), "rng": torch.get_rng_state()})
        digest = opt.digest()
        take(model, opt, scheduler, 1)
        opt.release()
        for mode in ("raise", "restore"):
            model, opt, scheduler = self.training(cluster, on_lost_state=mode)
            model.load_state_dict(files["model"])
            opt.load_state_dict(copy.deepcopy(files["opt"]))
            scheduler.load_state_dict(files["scheduler"])
            torch.set_rng_state(files["rng"])
            if mode == "raise":
                with self.assertRaisesRegex(errors.StateLost, "version 2") as caught:
                    take(model, opt, scheduler, 1)
                self.assertIn('"restore"', caught.exception.hint)
        self.assertEqual(opt.digest(), digest)
        self.assertEqual(list(opt.steps(1)), [])
        for step in opt.steps(STEPS):
            take(model, opt, scheduler, step)
        self.assertEqual(opt.digest(), self.undisturbed()[0])


class Local(TorchTest):
    def test_the_service_in_this_process_keeps_checkpoints_too(self):
        with tempfile.TemporaryDirectory() as folder:
            options = {"checkpoint_dir": folder, "checkpoint_every_steps": 2, "run": "kept"}
            model = mlp()
            opt = self.local(model, **options)
            train(model, opt, 2)
            opt.save_checkpoint()
            train(model, opt, 1, first=2)
            opt.restore_checkpoint()
            self.assertEqual(opt.next_step, 2)
            digest = opt.digest()
            opt.close()
            other = mlp(seed=9)
            again = self.local(other, **options)
            self.assertEqual(again.next_step, 2)
            self.assertEqual(again.digest(), digest)
            self.assertSame(model, other)
        with self.assertRaisesRegex(ValueError, "local=True"):
            muond.torch.Muon(mlp(), checkpoint_dir="/tmp", endpoint="unix:///x")

    def test_steps_wants_what_can_be_kept(self):
        opt = self.local(mlp())
        with self.assertRaisesRegex(TypeError, "state_dict"):
            next(opt.steps(3, rewind=[object()]))


if __name__ == "__main__":
    unittest.main()
