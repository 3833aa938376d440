"""muond.torch.Muon: the optimizer that a training loop sees."""

import atexit
import contextlib
import logging
import os
import sys
import weakref

import torch

from muond import errors
from muond.torch import binding as bindings
from muond.torch import report, routing
from muond.torch.amp import Scaling, ScalerWatch
from muond.torch.early import EarlyPush
from muond.torch.groups import Groups
from muond.torch.options import check_flags, check_values, parse_options
from muond.torch.partitioned import Partitioned, initializing
from muond.torch.rewind import Rewinding

logger = logging.getLogger("muond")

_ADAMW = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
_opened = weakref.WeakSet()


class Muon(Scaling, Rewinding, Partitioned, Groups, torch.optim.Optimizer):
    """Muon for the hidden matrices, AdamW for the rest, both by the service.

    In place of torch.optim.Muon and torch.optim.AdamW; it takes all parameters:

        opt = muond.torch.Muon(model.named_parameters(), lr=0.02, adamw={"lr": 3e-4})

    `params`: named parameters, tensors, groups of either, or the model itself, whose embeddings are
    then known by their modules and not by their names. A group that has both kinds of parameters
    becomes two, one per algorithm, so that each has a `lr` of its own; what a group says itself
    (lr, weight_decay, betas, algorithm or use_muon) counts for all of its parameters.
    `lr` to `adjust_lr_fn`: as torch.optim.Muon has them; `ns_coefficients` may also be the name of
    a set (docs/semantics.md). `adamw`: lr, betas, eps, weight_decay of the others, by default
    torch.optim.AdamW's. All but nesterov, momentum_dtype, eps, ns_* and adjust_lr_fn are read at
    every step. `momentum_dtype`: what Muon's momentum is kept in, "f32" or "bf16" (or torch's names
    for them), which takes half the memory.

    `route`: function (name, parameter) -> "muon", "adamw", a Route, or None for no opinion.
    `require_muon`: MuonInactive where no parameter gets Muon.
    `endpoint` (MUOND_ENDPOINT): any daemon of the run. `local`: the service lives in this process,
    with `backend` and `threads`; under torch.distributed in rank 0's. `run` (MUOND_RUN): its name,
    by default the program's. `session`: this trainer's identity; that of a former process to go on
    with its run.
    `loss_scale`: None: the trainer's affair. "dynamic", a number for a static one, or a dictionary
    of the contract's LossScale: multiply the loss by `opt.loss_scale`.
    `amp_scaling`: "trainer" or "daemon", who unscales and skips under a torch GradScaler (amp.py).
    `gradients`: of plain tensors on several ranks: "reduced", they are the same on all (DDP), or
    "local", and the service averages them.
    `async_push`: push while backward still runs. `max_grad_norm`, `clip_policy`: the service's
    clipping, off by default. `transport`: the data path, by name.
    `recovery_timeout`: how long daemons that went away may take to come back with the run's state;
    `on_rollback`: "raise" RolledBack where that is an older one, or "continue" from it (rewind.py).
    `on_lost_state`: what becomes of a loaded state that the service has not: "raise", "restore" its
    checkpoint, or "fresh". `checkpoint_dir`, `checkpoint_every_steps`: of a `local` service.

    Times in seconds. Errors: muond.errors; step() may be called again then, none is taken twice.
    """

    def __init__(self, params, lr=1e-3, weight_decay=0.1, momentum=0.95, nesterov=True,
                 ns_coefficients=(3.4445, -4.7750, 2.0315), eps=1e-7, ns_steps=5,
                 adjust_lr_fn=None, *, momentum_dtype="f32", adamw=None, route=None,
                 require_muon=True, foreach=None, fused=None, maximize=False, capturable=False,
                 differentiable=False, **options):
        check_flags(foreach=foreach, fused=fused, maximize=maximize, capturable=capturable,
                    differentiable=differentiable)
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum,
                    "nesterov": nesterov, "ns_coefficients": ns_coefficients, "eps": eps,
                    "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn,
                    "momentum_dtype": momentum_dtype}
        check_values(defaults)
        if unknown := set(adamw or ()) - set(_ADAMW):
            raise TypeError(f"adamw: unknown {sorted(unknown)}, known are {sorted(_ADAMW)}")
        self._adamw = {**_ADAMW, **(adamw or {})}
        self._options, scaler = parse_options(options)
        self._route, self._embeddings = route, set()
        self._routes = []  # beside param_groups
        self._reset()
        if isinstance(params, torch.nn.Module):
            self._embeddings = routing.embeddings_of(params)
            params = params.named_parameters()
        super().__init__(params, defaults)
        if require_muon:
            self._check_active()
        if scaler is not None:
            self.attach_scaler(scaler)

    def _reset(self):
        """As before the first step."""
        self._binding, self._expected, self._early, self._ended = None, None, None, None
        self._session_name = self._options["session"]
        self._watch = ScalerWatch(self, self._report_skip)
        self._engine = None
        self._reset_rewinding()
        self.last_outcome = None

    def _check_active(self):
        chosen = [row for group, names, routes in zip(self.param_groups, self.names(), self._routes)
                  for row in zip(names, group["params"], routes)]
        if any(route.algorithm == routing.MUON and parameter.requires_grad
               for _, parameter, route in chosen):
            return
        reasons = "; ".join(f'"{name}" {list(parameter.shape)}: {route.reason}'
                            for name, parameter, route in chosen[:8])
        raise errors.MuonInactive(f"no parameter gets Muon, which would be silently inactive: "
                                  f"{reasons}{'; ...' if len(chosen) > 8 else ''}")

    # ---- steps ---------------------------------------------------------------------------------

    def _bound(self):
        """The run, joined at the first call."""
        if self._ended is not None:
            raise errors.RunStateError(f"this optimizer {self._ended}",
                                       hint="build a new one, and load its state_dict")
        if self._binding is None:
            self._check_alone()
            groups, names, routes = self._contents()
            routing.check_whole(groups, routes)
            self._binding = bindings.Binding(groups, self._options, names, routes,
                                             self._session_name, self._expected)
            self._session_name, self._expected = self._binding.session_name, None
            self._touch_state()
            _opened.add(self)
            if self._binding.service is not None:
                # Nobody else can go on with a run of this process.
                weakref.finalize(self, _close_quietly, self._binding.session).atexit = False
            if self._options["async_push"]:
                self._early = EarlyPush(self._binding, weakref.WeakMethod(self._scale_of_gradients))
            logger.info("%s", self.describe())
        return self._binding

    def _check_alone(self):
        """Two optimizers with one session would each take the other's steps for their own."""
        for other in _opened:
            if other._binding.session_name == self._session_name and (
                    self._expected is None or other._binding.run == self._expected["run"]):
                raise errors.RunTaken(
                    f'run "{other._binding.run}": another optimizer of this process holds it',
                    hint="release() or close() that one first")

    def _is_idle(self):
        """A step before the first one that is none: without gradients, or with zero ones, as
        checkpoint tools do it to fill `state`, lr 0, and DeepSpeed's wrappers as they are made."""
        gradients = [p.grad for group in self.param_groups for p in group["params"]
                     if p.grad is not None]
        if not gradients:
            return True
        if any(float(group["lr"]) != 0 for group in self.param_groups) and not initializing():
            return False
        if any(bool(gradient.any()) for gradient in gradients):
            return False
        self._touch_state()
        return True

    @torch._disable_dynamo  # calls of the service are nothing to compile
    @torch.no_grad()
    def step(self, closure=None):
        """Takes one step, or learns that it is skipped: `last_outcome` says which. Returns the
        closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._watch.calls += 1
        if self._engine is not None:
            if self._engine.enter():
                try:
                    self._step()
                finally:
                    self._engine.leave()
        elif self._binding is not None or not self._is_idle():
            self._step()
        return loss

    def _step(self):
        binding = self._bound()
        if binding.unpulled is not None:
            # The last call's step was taken, its parameters did not arrive: this call ends it.
            logger.warning('run "%s": step %d was taken before; getting its parameters',
                           binding.run, binding.unpulled[0] - 1)
            self._conclude(self._due, binding.resume)
            return
        binding.check_unchanged(self._contents()[0])
        present = binding.present()
        self._consume(lambda: self._take(binding, present), self._holders(present))

    def _take(self, binding, present):
        terms, scale = binding.terms(), self._scale_of_gradients()
        if self._early is not None:
            outcome = self._early.finish(terms, scale, present)
            if outcome is not None:
                return outcome
        slices, absent, kept = binding.gradients(present)
        for last in (False, True):
            try:
                return binding.step(terms, slices, absent, scale)
            except errors.SliceConflict:
                if last:
                    raise
                # An earlier attempt at this step, which failed, had pushed other gradients.
                binding.session.raise_generation("gradients are others than those before")
        return kept

    @contextlib.contextmanager
    def accumulate(self):
        """Backward passes in here are not the step's last: nothing is pushed early."""
        if self._early is not None:
            self._early.paused += 1
        try:
            yield
        finally:
            if self._early is not None:
                self._early.paused -= 1

    def restart_from_parameters(self, reason="the trainer restarts from its parameters"):
        """Gives the service the parameters' present values; momentum and moments start anew. All
        ranks call it."""
        self._bound().restart(reason)

    # ---- state ---------------------------------------------------------------------------------

    @torch._disable_dynamo
    def state_dict(self):
        """What torch.optim.Optimizer's has, and under "muond" which state of which run belongs to
        it: the service keeps momentum and moments, and its checkpoints save them."""
        state = super().state_dict()
        if self._binding is not None and self._ended is None:
            state["muond"] = self._binding.note()
        elif self._expected is not None:
            state["muond"] = dict(self._expected)
        # In a group as well: torch.distributed.checkpoint keeps groups and nothing else.
        for group in state["param_groups"][:1] if "muond" in state else ():
            group["muond"] = state["muond"]
        return state

    @torch._disable_dynamo
    def load_state_dict(self, state_dict):
        """Takes it over if the service's state is the one that it belongs to: StateLost else.
        Before the first step that is checked when the run is joined."""
        note = state_dict.get("muond") or next(
            (group["muond"] for group in state_dict["param_groups"] if "muond" in group), None)
        fresh = self._options["on_lost_state"] == "fresh"
        if note is None and not fresh and any(
                int(state.get("step", 1)) > 0 for state in state_dict["state"].values()):
            raise errors.StateLost("state_dict: steps were taken, and it does not say in which "
                                   "run; another optimizer's momentum can't be taken over")
        if self._binding is not None and note is not None:
            self._binding.verify(note)
        algorithms = [group["algorithm"] for group in self.param_groups]
        super().load_state_dict({key: value for key, value in state_dict.items()
                                 if key != "muond"})
        for group, algorithm in zip(self.param_groups, algorithms):
            group.setdefault("algorithm", algorithm)
            group.pop("muond", None)
        if self._binding is not None:
            self._binding.groups = self._contents()[0]
        elif note is not None:
            self._expected = dict(note)
            self._session_name = self._options["session"] or note["session"]
            if self._engine is not None and self._options["session"] is None:
                self._session_name = self._engine.session(note["session"])

    def __getstate__(self):
        note = self._expected
        if self._binding is not None and self._ended is None:
            note = self._binding.note()
        return {**super().__getstate__(), "_options": self._options, "_adamw": self._adamw,
                "_note": note, "_route": self._route, "_routes": self._routes}

    def __setstate__(self, state):
        fresh = "_binding" not in self.__dict__
        note = state.pop("_note", None)
        super().__setstate__(state)
        if fresh:  # a copy, or unpickled: it has no run, and may go on only where one waits for it
            self._embeddings = set()
            self._reset()
            if note is not None:
                self._ended = f'is a copy of one that has joined run "{note["run"]}"'

    # ---- what people ask -----------------------------------------------------------------------

    def pushing(self):
        """In words."""
        return self._early.words() if self._early is not None else (
            "from backward's hooks, once the run is joined" if self._options["async_push"]
            else "all at step()")

    def describe(self):
        """The routing table with a reason for each parameter, and by what path bytes travel."""
        return report.describe(self, self._binding)

    def status(self):
        """The daemon's StatusReply about this run."""
        return self._bound().session.status()

    def digest(self):
        """Of all optimizer state; two equal trainings share it."""
        return self._bound().session.digest()["tensorDigest"]

    def close(self):
        """Leaves the run; the last rank frees it at the service. The optimizer can't go on."""
        if self._binding is not None and self._ended is None:
            self._watch.settle()
            self._leave("was closed", self._binding.session.close)

    def release(self):
        """Ends this optimizer; the run stays, for another one that loads its state_dict."""
        if self._binding is not None and self._ended is None:
            self._leave("was released", self._binding.session.free)

    def _leave(self, how, leave):
        self._ended = how
        _opened.discard(self)
        if self._early is not None:
            self._early.stop()
            self._early = None
        leave()


def _close_quietly(session):
    with contextlib.suppress(errors.MuondError):
        session.close()


@atexit.register
def _close_all(opener=os.getpid()):
    """A program that ends well leaves its runs; one that died of an exception may come back."""
    if os.getpid() != opener or getattr(sys, "last_type", None) is not None:
        return
    for optimizer in list(_opened):
        if optimizer._options["at_exit"] == "close":
            try:
                optimizer.close()
            except errors.MuondError as error:
                logger.warning("%s", error.message)
