"""torch's GradScaler and the service: a step that the scaler skips is one that the service must
hear of, or its counts and its step numbers would not be the training's.

The scaler asks an optimizer for `_step_supports_amp_scaling`. False ("trainer"): it divides the
gradients itself and, after an overflow, just does not call step(). True ("daemon"): it always calls
step() and leaves unscaling and skipping to the service.
"""

import sys
import weakref

import torch

from muond import errors
from muond import session as sessions


def unwrapped(optimizer):
    """The optimizer inside wrappers that hold it as `.optimizer`."""
    seen = set()
    while hasattr(optimizer, "optimizer") and id(optimizer) not in seen:
        seen.add(id(optimizer))
        optimizer = optimizer.optimizer
    return optimizer


class ScalerWatch:
    """Notices the steps that a GradScaler skips, and has them reported at once."""

    def __init__(self, owner, report):
        self._owner = weakref.ref(owner)
        self._report = report   # report(scale): a step was skipped that would have had this scale
        self._scaler = lambda: None
        self._open = None       # (calls, scale) of a scaler's step that was under way at attach()
        self.calls = 0          # of the optimizer's step()

    def attach(self, scaler):
        """Watches this scaler from now on."""
        if self._scaler() is scaler:
            return
        self._scaler = weakref.ref(scaler)
        original = scaler.step

        def step(optimizer, *arguments, **options):
            if unwrapped(optimizer) is not self._owner():
                return original(optimizer, *arguments, **options)
            self.settle()
            calls, scale = self.calls, scaler.get_scale()
            result = original(optimizer, *arguments, **options)
            if scaler.is_enabled() and self.calls == calls:
                self._report(scale)
            return result

        scaler.step = step

    def noticed(self, frame):
        """Called where `_step_supports_amp_scaling` is read: by a scaler's step()? Then that is the
        scaler to watch, though its present step is under way already."""
        scaler = frame.f_locals.get("self")
        if not isinstance(scaler, torch.amp.GradScaler) or self._scaler() is scaler:
            return
        self.attach(scaler)
        self._open = (self.calls, scaler.get_scale())

    def settle(self):
        """Reports the step that was under way when the scaler was first seen, if it was skipped."""
        opened, self._open = self._open, None
        if opened is not None and opened[0] == self.calls:
            self._report(opened[1])


class Scaling:
    """Who scales the loss. Mixed into the optimizer."""

    @property
    def _step_supports_amp_scaling(self):
        if self._options["amp_scaling"] == "daemon":
            return True
        self._watch.noticed(sys._getframe(1))
        return False

    def attach_scaler(self, scaler):
        """Has this GradScaler's skips reported, its first one included."""
        self._watch.attach(scaler)

    @property
    def owns_loss_scale(self):
        """True when the service decides the scale: multiply the loss by `loss_scale`."""
        return self._options["loss_scale"]["mode"] in ("MODE_STATIC", "MODE_DYNAMIC")

    @property
    def loss_scale(self):
        """What the loss must be multiplied by before backward: the service's scale for the next
        step, joining the run if need be; 1.0 where the trainer scales by itself, or not at all."""
        if not self.owns_loss_scale:
            return 1.0
        return self._bound().session.position().loss_scale

    def scaling(self):
        """In words."""
        mode = self._options["loss_scale"]["mode"].removeprefix("MODE_").lower()
        if self.owns_loss_scale:
            return f"{mode}, owned by the service: multiply the loss by opt.loss_scale"
        if self._options["amp_scaling"] == "daemon":
            return "a GradScaler decides it; the service unscales, and skips what overflowed"
        return "the trainer's, if any; steps that its GradScaler skips are reported"

    def _scale_of_gradients(self):
        """What the gradients of this step were multiplied by; 0: by the service's own scale."""
        if self.owns_loss_scale:
            return 0.0
        scale = getattr(self, "grad_scale", None)  # set by the scaler while it calls step()
        return 1.0 if scale is None else float(scale)

    def _report_skip(self, scale):
        if self.owns_loss_scale:
            raise errors.MuondError(
                "loss scale: the service owns it, and a GradScaler is at work, too",
                hint="leave the GradScaler away, or leave loss_scale= away")
        session = self._bound().session
        self._consume(lambda: session.skip(sessions.OVERFLOW, scale))
