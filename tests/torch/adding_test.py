#!/usr/bin/env python3
"""Parameters that are added to the open run: they train as if they had been there from the start
and had had no gradients so far, with a daemon as in the process."""

import copy
import pathlib
import tempfile
import unittest
from unittest import mock

from harness import TorchTest, copy_of, loss_of, mlp

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as checkpoint

import muond.torch
from muond import errors
from muond import session as sessions

STEPS, LATE = 6, 3


class Grows(nn.Module):
    """A model that has a layer more from some step on."""

    def __init__(self):
        super().__init__()
        self.base = mlp()
        self.late = nn.Linear(13, 13)
        self.grown = False

    def forward(self, inputs):
        outputs = self.base(inputs)
        return outputs + self.late(torch.tanh(outputs)) if self.grown else outputs


def early_group(model):
    return {"params": [(f"base.{name}", p) for name, p in model.base.named_parameters()]}


def late_group(model):
    return {"params": [(f"late.{name}", p) for name, p in model.late.named_parameters()],
            "lr": 0.03}


class Adding(TorchTest):
    OPTIONS = {"lr": 0.05, "adamw": {"lr": 0.01}, "loss_scale": "dynamic"}

    def one_step(self, model, opt, step):
        opt.zero_grad()
        (loss_of(model, step) * opt.loss_scale).backward()
        opt.step()

    def start(self, make, all_at_once=False, **options):
        """(model, optimizer), the same start each time. make(groups, **options)."""
        torch.manual_seed(4)
        model = Grows()
        groups = [early_group(model)] + [late_group(model)] * all_at_once
        return model, make(groups, **{**self.OPTIONS, **options})

    def train(self, model, opt, first=0, last=STEPS, add=True, decay=1.):
        for step in range(first, last):
            if step == LATE:
                model.grown = True
                if add:
                    opt.add_param_group(late_group(model))
            self.one_step(model, opt, step)
            for group in opt.param_groups:
                group["lr"] *= decay

    def undisturbed(self, **how):
        """(digest, model) of a training with all parameters added in the process."""
        model, opt = self.start(self.local)
        self.train(model, opt, **how)
        return opt.digest(), model

    def test_a_daemon_and_the_process_train_alike_and_as_if_they_had_been_there(self):
        digest, model = self.undisturbed()
        daemon = self.daemon()
        for early in (False, True):
            other, opt = self.start(lambda groups, **options: self.remote(
                groups, daemon, run=f"early-{early}", **options), async_push=early)
            self.train(other, opt)
            self.assertEqual(opt.digest(), digest)
            self.assertSame(model, other)
            self.assertEqual([opt.state[p]["step"] for p in other.late.parameters()],
                             [STEPS - LATE] * 2)
        self.assertEqual(opt._early.early, 10 * LATE + 12 * (STEPS - LATE))
        self.assertEqual(opt._early.again, 0)
        there, opt = self.start(self.local, all_at_once=True)
        self.train(there, opt, add=False)
        self.assertSame(model, there)

    def test_routing_is_reported_and_groups_are_read_at_every_step(self):
        model, opt = self.start(self.local)
        self.train(model, opt, last=LATE)
        with self.assertLogs("muond", "INFO") as logs:
            self.train(model, opt, LATE, LATE + 1)
        self.assertIn("2 parameters were added", logs.output[-1])
        for text in (logs.output[-1], opt.describe()):
            self.assertRegex(text, r"late.weight +\[13, 13\] +muon +2 +1 of 13 x 13.*hidden matrix")
            self.assertRegex(text, r"late.bias +\[13\] +adamw +3 .*a vector")
        self.assertEqual([group["lr"] for group in opt.param_groups], [0.05, 0.01, 0.03, 0.03])
        before = copy_of(model)
        for group in opt.param_groups[:2]:
            group["lr"] = 0.
        self.one_step(model, opt, LATE + 1)
        for name, p in model.named_parameters():
            same = torch.equal(p, before.pop(0))
            self.assertEqual(same, name.startswith("base"), name)

    def test_state_dict_goes_on_with_them(self):
        digest, whole = self.undisturbed()
        daemon = self.daemon()
        plain = (lambda _, opt: copy.deepcopy(opt.state_dict()),
                 lambda _, opt, state: opt.load_state_dict(state))
        of_checkpoints = (checkpoint.get_optimizer_state_dict,
                          checkpoint.set_optimizer_state_dict)
        for save, load in (plain, of_checkpoints):
            def make(groups, run=save.__name__.strip("<>"), **options):
                return self.remote(groups, daemon, run=run, **options)
            model, opt = self.start(make)
            self.train(model, opt, last=STEPS - 1)
            parameters, state = copy.deepcopy(model.state_dict()), save(model, opt)
            opt.release()
            again, opt = self.start(make, all_at_once=True)
            again.load_state_dict(parameters)
            again.grown = True
            load(again, opt, state)
            self.assertEqual(opt.next_step, STEPS - 1)
            self.train(again, opt, STEPS - 1)
            self.assertEqual(opt.digest(), digest)
            self.assertSame(again, whole)
            self.assertEqual(opt.state_dict()["muond"]["additions"], [10])

    def test_a_program_that_starts_again_adds_them_again(self):
        daemon = self.daemon()

        def make(groups, **options):
            return self.remote(groups, daemon, run="again", session="me", **options)
        model, opt = self.start(make)
        self.train(model, opt, last=STEPS - 1)
        opt.release()
        again, opt = self.start(make)
        self.assertEqual(opt.next_step, STEPS - 1)  # joins the run with the parameters of before
        again.grown = True
        opt.add_param_group(late_group(again))
        self.assertSame(again, model)
        self.train(again, opt, STEPS - 1)
        digest, whole = self.undisturbed()
        self.assertEqual(opt.digest(), digest)
        self.assertSame(again, whole)

    def test_what_is_refused_leaves_nothing(self):
        model, opt = self.start(self.local)
        self.train(model, opt, last=LATE)
        groups = len(opt.param_groups)
        taken = next(model.base.parameters())
        late = model.late.weight
        tied = nn.Parameter(model.base.lm_head.weight.data)
        for group, kind, words in (
                ([("base.lm_head.weight", late)], errors.RegistrationError, "has one of that name"),
                ([("late", taken)], ValueError, "more than one parameter group"),
                ([("late", tied)], errors.RegistrationError, 'tied to "base.lm_head.weight"'),
                ([("late", nn.Parameter(torch.ones(2, 2).double()))], errors.RegistrationError,
                 "dtype"),
                ([("late", nn.Parameter(torch.ones(2, 3, 4)))], errors.ShapeMismatch, "experts")):
            with self.assertRaisesRegex(kind, words):
                opt.add_param_group({"params": group})
            self.assertEqual(len(opt.param_groups), groups)
        with self.assertRaisesRegex(ValueError, "weight decay"):
            opt.add_param_group({"params": [("late", late)], "weight_decay": -1.})
        old = errors.from_code(errors.UNIMPLEMENTED, "a daemon is older than this client")
        with mock.patch.object(opt._binding.session, "add_parameters", side_effect=old):
            with self.assertRaisesRegex(errors.VersionMismatch, "older") as caught:
                opt.add_param_group(late_group(model))
        self.assertIn("muonctl version", caught.exception.hint)
        self.assertEqual(len(opt.param_groups), groups)
        self.train(model, opt, LATE)
        self.assertEqual(opt.digest(), self.undisturbed()[0])

    def test_frozen_ones_join_no_run(self):
        model, opt = self.start(self.local)
        self.train(model, opt, last=1)
        model.late.requires_grad_(False)
        opt.add_param_group(late_group(model))
        self.assertEqual(opt.describe().count("not registered"), 2)
        self.train(model, opt, 1, 2)
        self.assertEqual(opt.status()["runs"][0]["position"]["generation"], "1")

    def test_an_addition_that_failed_half_way_may_be_repeated(self):
        model, opt = self.start(self.local)
        self.train(model, opt, last=LATE)
        gone = errors.DaemonUnavailable("gone")
        with mock.patch.object(opt._binding.session, "initialize", side_effect=gone):
            with self.assertRaises(errors.DaemonUnavailable):
                opt.add_param_group(late_group(model))
        self.train(model, opt, LATE)
        self.assertEqual(opt.digest(), self.undisturbed()[0])

    def test_a_step_after_an_addition_that_failed_half_way_says_what_is_missing(self):
        model, opt = self.start(self.local)
        self.train(model, opt, last=LATE)
        gone = errors.DaemonUnavailable("gone")
        with mock.patch.object(opt._binding.session, "initialize", side_effect=gone):
            with self.assertRaises(errors.DaemonUnavailable):
                opt.add_param_group(late_group(model))
        with self.assertRaisesRegex(errors.RunStateError, "were added are missing") as caught:
            self.one_step(model, opt, LATE)
        self.assertIn("add_param_group", caught.exception.hint)
        self.train(model, opt, LATE)
        self.assertEqual(opt.digest(), self.undisturbed()[0])

    def test_a_rank_that_another_session_holds_is_no_taken_name(self):
        session = sessions.Session.__new__(sessions.Session)
        session.handle = None
        for message, kind in (("rank 0: is held by another session: two", errors.RunTaken),
                              ('parameter "a": the run has one', errors.RegistrationError)):
            refusal = errors.from_code(errors.ALREADY_EXISTS, message)
            with mock.patch.object(session, "_call", side_effect=refusal):
                with self.assertRaises(kind) as caught:
                    session.add_parameters({})
            self.assertEqual(caught.exception.code, errors.ALREADY_EXISTS)

    def test_a_daemon_that_dies_afterwards_has_them_from_its_checkpoint(self):
        with tempfile.TemporaryDirectory(prefix="muond-torch-", dir="/tmp") as folder:
            flags = ["--checkpoint-dir", folder]
            daemon = self.daemon(*flags)
            model, opt = self.start(
                lambda groups, **options: self.remote(groups, daemon, **options))
            taken = []
            for step in opt.steps(STEPS):
                if step == LATE and not model.grown:
                    model.grown = True
                    opt.add_param_group(late_group(model))
                    opt.save_checkpoint()
                self.train(model, opt, step, step + 1, add=False, decay=0.9)
                if step == LATE + 1 and len(taken) == step:
                    daemon.kill()
                    pathlib.Path(daemon.socket).unlink()
                    self.daemon(*flags, directory=daemon.directory)
                taken.append(step)
            self.assertEqual(taken, [0, 1, 2, 3, 4, 5, 3, 4, 5])
            self.assertEqual(opt.digest(), self.undisturbed(decay=0.9)[0])


if __name__ == "__main__":
    unittest.main()
