"""Parameters whose places flat tensors of an engine have taken: what the layers' parameters are
then, and which calls of step() are none."""

import sys

import torch

from muond import errors

# DeepSpeed's wrappers call step() with zero gradients, and the learning rate as it is, in here.
_INITIALIZING = "initialize_optimizer_states"
_DEPTH = 12


def initializing():
    """Whether one of step()'s callers only wants the optimizer's state to exist."""
    frame = sys._getframe(1)
    for _ in range(_DEPTH):
        frame = frame.f_back
        if frame is None:
            return False
        if frame.f_code.co_name == _INITIALIZING:
            return True
    return False


class Partitioned:
    """Mixed into the optimizer. `_engine`: the tie to a DeepSpeed engine, or None."""

    _engine = None

    def bind_deepspeed(self, engine):
        """muond.deepspeed.bind_deepspeed(engine), whose optimizer this one must be."""
        from muond import deepspeed  # which needs this package
        if deepspeed.bind_deepspeed(engine) is not self:
            raise errors.RegistrationError("bind_deepspeed: the engine's optimizer is another one")

    def _contents(self):
        """(groups, names, routes), the parameters as the layers have them."""
        if self._engine is not None:
            return self._engine.contents()
        return self.param_groups, self.names(), self._routes

    def _holders(self, present):
        """The tensors whose `state` counts a step with these entries and gradients."""
        if self._engine is not None:
            return self._engine.holders()
        return [entry.parameter for entry, _ in present]

    def _touch_state(self):
        """Each parameter's entry in `state`, which tools take for the sign of a step taken."""
        holders = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        for holder in self._engine.holders() if self._engine is not None else holders:
            self.state[holder].setdefault("step", torch.zeros((), dtype=torch.int64))
