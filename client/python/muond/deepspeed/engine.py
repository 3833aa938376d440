"""Steps of a DeepSpeed engine.

DeepSpeed's wrapper decides about overflow, then calls the optimizer's step() once for each of its
flat tensors. The service needs all gradients of a step at once, and has all new values before the
first flat tensor is copied to the model. So the first of these calls takes the whole step, with the
gradients of all flat tensors, and the others find it done. Unscaling and clipping are the
service's: the wrapper's would change one flat tensor at a time.
"""

import functools
import logging
import math
import re
import secrets

import torch

from muond import errors
from muond.deepspeed import wrappers
from muond.torch import layout as layouts
from muond.torch import routing

logger = logging.getLogger("muond")


def _muon_of(engine):
    from muond.torch import Muon  # not at the top: the optimizer calls this module
    optimizer = getattr(engine, "basic_optimizer", None)
    if not isinstance(optimizer, Muon):
        raise errors.RegistrationError(
            f"bind_deepspeed: the engine's optimizer is {type(optimizer).__name__}",
            hint="deepspeed.initialize(model=..., optimizer=muond.torch.Muon(...), config=...)")
    return optimizer


def _check_options(optimizer, engine):
    options = optimizer._options
    if optimizer._binding is not None:
        raise errors.RunStateError("bind_deepspeed: the optimizer has joined its run before",
                                   hint="bind right after deepspeed.initialize")
    if optimizer.owns_loss_scale:
        raise errors.RegistrationError(
            "bind_deepspeed: loss_scale: DeepSpeed scales the loss, and the service is asked to",
            hint="leave loss_scale= away; DeepSpeed's scale and skips are reported to the service")
    if options["async_push"]:
        raise errors.RegistrationError(
            "bind_deepspeed: async_push=True: gradients are complete when DeepSpeed has reduced "
            "them, not in backward's hooks", hint="leave async_push= away")
    clip = float(getattr(engine.optimizer, "clip_grad", 0.0) or 0.0)
    if clip and options["max_grad_norm"] not in (0.0, clip):
        raise errors.RegistrationError(
            f"bind_deepspeed: gradient_clipping of the engine's configuration is {clip}, "
            f"max_grad_norm of the optimizer {options['max_grad_norm']}",
            hint="give one of them, or the same value")


def bind_deepspeed(engine):
    """Ties the muond.torch.Muon inside a DeepSpeed engine to the engine. Right after
    deepspeed.initialize, on every rank; a checkpoint is loaded afterwards. Returns the optimizer.

    The configuration needs "zero_allow_untested_optimizer": true for stages 1 to 3, and
    "zero_force_ds_cpu_optimizer": false with optimizer offload. Its `gradient_clipping` becomes the
    service's clipping, under the optimizer's `clip_policy`. DeepSpeed scales the loss and finds
    overflows; each step that it skips is reported. A step that the service skips counts as skipped
    for the engine, too.
    MuondError with the reason where the engine's layout is not known (expert, model and pipeline
    parallelism, NVMe, ZenFlow).
    """
    optimizer = _muon_of(engine)
    if optimizer._engine is not None and optimizer._engine.engine is engine:
        return optimizer
    layout = wrappers.of(engine)
    optimizer._routes = [routes for routes in optimizer._routes if routes]  # as DeepSpeed did
    if layout is None:
        _check_options(optimizer, engine)
        optimizer.register_step_post_hook(_tell_plain_engine)
        optimizer.overflow = False
        return optimizer
    _check_options(optimizer, engine)
    optimizer._engine = Tie(optimizer, engine, layout)
    return optimizer


def _tell_plain_engine(optimizer, *_):
    """An engine without a wrapper asks the optimizer itself whether the step was skipped."""
    optimizer.overflow = optimizer.last_outcome is not None and not optimizer.last_outcome.applied


class Tie:
    """Of one optimizer to one engine. The optimizer asks it for groups whose parameters are the
    layers' parts, in place of its own with the engine's flat tensors."""

    def __init__(self, optimizer, engine, layout):
        self.engine, self.layout = engine, layout
        self._optimizer = optimizer
        self._round = None  # scale of the step under way
        self._taken = False
        self._groups = list(optimizer.param_groups)
        self._parts = list(layout.parts())
        self._names, self._routes = self._resolve()
        self._views = [self._view(part) for part in self._parts]
        self._take_over(engine.optimizer)
        if optimizer._session_name is None:
            shared = [f"deepspeed-{secrets.token_hex(8)}-rank0"]
            torch.distributed.broadcast_object_list(shared, src=0)
            optimizer._session_name = self.session(shared[0])

    # ---- whose elements these are --------------------------------------------------------------

    def _resolve(self):
        """(names, routes) of the parts: those that the optimizer was built with."""
        optimizer = self._optimizer
        if len(optimizer._routes) != len(self._groups):
            raise errors.RegistrationError(
                f"bind_deepspeed: the optimizer was built with {len(optimizer._routes)} groups, "
                f"the engine has {len(self._groups)}")
        given = [dict(zip(group.get("param_names", ()), routes))
                 for group, routes in zip(self._groups, optimizer._routes)]
        names, routes = [], []
        for part in self._parts:
            name = self.engine.param_names.get(part.parameter)
            if name is None:
                raise errors.RegistrationError(
                    f"bind_deepspeed: group {part.group} has a parameter of shape "
                    f"{list(part.shape)} that is none of the engine's model")
            route = given[part.group].get(name)
            if given[part.group] and route is None:
                raise errors.RegistrationError(
                    f'bind_deepspeed: parameter "{name}" of the engine\'s model has no such name '
                    "in the optimizer", hint="build it from the model's named_parameters()")
            if route is None:  # no names were given: by what its group was found to be
                route = routing.decide(name, part.parameter, named=False,
                                       group={"algorithm": self._groups[part.group]["algorithm"]})
            names.append(name)
            routes.append(route)
        return names, routes

    def _view(self, part):
        """A tensor that the rest of this package takes for the parameter: this rank's part of the
        master weights, with what says where in the layer that lies."""
        flat = self.layout.flats()[part.flat].detach()
        view = flat if part.whole else flat.narrow(0, part.start, part.count)
        if not part.whole:
            view.muond_shape, view.muond_offset = part.shape, part.offset
        return view.requires_grad_()

    def _refresh(self):
        """Master weights may have moved since (offload_states, reload_states)."""
        flats = self.layout.flats()
        for part, view in zip(self._parts, self._views):
            flat = flats[part.flat].detach()
            now = flat if part.whole else flat.narrow(0, part.start, part.count)
            if now.data_ptr() != view.data_ptr() or now.device != view.device:
                view.data = now

    def contents(self):
        """(groups, names, routes) as the optimizer has them without an engine."""
        groups = [{**group, "params": [], "param_names": []} for group in self._groups]
        routes = [[] for _ in groups]
        for part, view, name, route in zip(self._parts, self._views, self._names, self._routes):
            groups[part.group]["params"].append(view)
            groups[part.group]["param_names"].append(name)
            routes[part.group].append(route)
        return groups, [group["param_names"] for group in groups], routes

    @staticmethod
    def session(name):
        """This rank's session name beside another rank's: of stage 0, whose state is the same on
        all ranks, DeepSpeed saves rank 0's and loads it everywhere."""
        return re.sub(r"-rank\d+$", f"-rank{layouts.world()[0]}", name)

    def holders(self):
        """The tensors that the optimizer's `state` is kept for."""
        return self.layout.flats()

    # ---- steps ---------------------------------------------------------------------------------

    def _take_over(self, wrapper):
        """From now on the wrapper's steps are ours to announce and to conclude."""
        for part in self._parts:
            # DeepSpeed takes any optimizer whose class has "muon" in its name for its own, and
            # would orthogonalize gradients of parameters with this attribute before we get them.
            if "use_muon" in part.parameter.__dict__:
                del part.parameter.use_muon
        wrapper.unscale_and_clip_grads = lambda *_, **__: None
        clip = float(getattr(wrapper, "clip_grad", 0.0) or 0.0)
        if clip:
            self._optimizer._options["max_grad_norm"] = clip
            logger.info("DeepSpeed's gradient_clipping %s is the service's from now on, clip_policy"
                        " %s", clip, self._optimizer._options["clip_policy"])
        wrapper.step = functools.partial(self._step_engine, wrapper, wrapper.step)

    def _step_engine(self, wrapper, original, *arguments, **options):
        optimizer = self._optimizer
        self._groups = list(optimizer.param_groups)
        self._refresh()
        self._round, self._taken = self.layout.scale(), False
        clip = getattr(wrapper, "clip_grad", None)
        if self.layout.stage == "BF16_Optimizer":  # it clips by a function of its module
            wrapper.clip_grad = 0.0
        try:
            result = original(*arguments, **options)
            if not self._taken:
                self._conclude_skip(wrapper)
            elif optimizer.last_outcome is not None and not optimizer.last_outcome.applied:
                wrapper.overflow = True  # the engine counts it, and its scheduler waits
        finally:
            self._round = None
            if clip is not None:
                wrapper.clip_grad = clip
            for view in self._views:
                view.muond_grad = None
        return result

    def _conclude_skip(self, wrapper):
        if not getattr(wrapper, "overflow", False):
            raise errors.RunStateError(
                "DeepSpeed: the engine's step ended without a step of its optimizer and without "
                "an overflow")
        self._optimizer._report_skip(self._round)

    def enter(self):
        """Called by the optimizer's step(): True where the step is to be taken, with all gradients
        in place; False where this engine's step has been taken before."""
        if self._round is None:
            raise errors.RunStateError(
                "step: a DeepSpeed engine holds this optimizer's parameters",
                hint="call engine.step()")
        if self._taken:
            return False
        for view, gradient in zip(self._views, self.layout.gradients(self._parts)):
            view.muond_grad = gradient
        if not math.isfinite(self._round) or self._round <= 0:
            raise errors.RegistrationError(f"DeepSpeed: loss scale {self._round}")
        self._optimizer.grad_scale = self._round
        self._taken = True
        return True

    def leave(self):
        """After the step, whatever became of it."""
        self._optimizer.grad_scale = None
