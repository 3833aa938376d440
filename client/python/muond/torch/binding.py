"""One optimizer's tie to its run: made at the first step, when names and shards are final."""

import logging
import os
import pathlib
import re
import secrets
import socket
import sys
import tempfile

import torch

from muond import errors
from muond import session as sessions
from muond.torch import layout as layouts
from muond.torch import routing, staging
from muond.torch.ending import Ending
from muond.torch.recovery import Recovery
from muond.torch.registration import (Entry, checked, described, fixed_terms, group_name,
                                       step_terms)

logger = logging.getLogger("muond")

_services = {}  # options of it -> the service of this process


def default_run():
    """MUOND_RUN, or the name of the program, which all ranks have in common."""
    script = pathlib.Path(sys.argv[0] if sys.argv else "").stem
    name = re.sub(r"[^A-Za-z0-9._-]", "-", script).lstrip("-._")[:100]
    return os.environ.get("MUOND_RUN") or name or "python"


def _local_service(options, run, ranks, rank):
    """(service of this process or None, endpoint or None, run name) for local=True."""
    if not run:  # one that is to be found again has no number
        run = default_run() + ("" if options["checkpoint_dir"] else f"-{secrets.token_hex(4)}")
    given = {name: options[name] for name in ("backend", "threads", "checkpoint_dir",
                                              "checkpoint_every_steps")}
    key = (*given.values(), ranks > 1)
    if rank == 0 and key not in _services:
        listen = ""
        if ranks > 1:
            listen = f"unix://{tempfile.mkdtemp(prefix='muond-')}/local.sock"
        _services[key] = sessions.Service(**given, listen=listen)
    if ranks == 1:
        return _services[key], None, run
    address, run, host = layouts.from_first(
        lambda: (_services[key].address, run, socket.gethostname()))
    if host != socket.gethostname():
        raise errors.MuondError("local=True: the ranks are on several machines",
                                hint="start a daemon and name its endpoint")
    return None, address, run


class Binding:
    """The run of one optimizer, and the parameters in it."""

    def __init__(self, groups, options, names, routes, session_name, expected):
        self.rank, self.ranks = layouts.world()
        self.groups = groups
        self.buffers = staging.Buffers()
        self._arrived = None  # (version, what its parameters have come into), after a step
        self.unpulled = None  # what conclude() was given, and could not bring
        self.adding = False   # the run may have parameters whose values it has not
        self._reduced = options["gradients"] == "reduced"
        self.fixed, self.entries, self.by_id = [], [], {}
        self._take_in(self._collect(names, routes))
        service, endpoint = None, options["endpoint"]
        run = options["run"] or (expected["run"] if expected else None)
        if options["local"]:
            service, endpoint, run = _local_service(options, run, self.ranks, self.rank)
        self.run, self.service = run or default_run(), service
        self.session_name = session_name or (
            f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}")
        self.local = options["local"]
        self.endpoint = endpoint or os.environ.get("MUOND_ENDPOINT") or "in this process"
        self.session = sessions.Session(
            self._registration(options, expected or {}), endpoint=endpoint, service=service,
            **{key: options[key] for key in ("call_timeout", "step_timeout", "bulk_timeout",
                                             "transport")},
            recovery_timeout=-1.0, **self._memory())  # Recovery sees to that
        self.recovery = Recovery(self.session, self.run, options["recovery_timeout"])
        self.report = self.session.describe()
        self._check_routing(self.entries)
        self._open(expected, options["on_lost_state"])

    def _memory(self):
        """Where the session is told that gradients and parameters lie."""
        device = layouts.local(self.entries[0].parameter).device
        if device.type != "cuda" or not staging.reachable(layouts.local(self.entries[0].parameter)):
            return {}
        wider = any(gradient.dtype == torch.float32 and entry.parameter.dtype != torch.float32
                    for entry, gradient in self.present())
        return {"memory": sessions.CUDA, "device": device.index,
                "gradient_dtype": sessions.F32 if wider else 0}

    def _collect(self, names, routes):
        """The trainable parameters of the groups that are not in the run yet, in their order."""
        found = []
        for index, group in list(enumerate(self.groups))[len(self.fixed):]:
            for parameter, name, route in zip(group["params"], names[index], routes[index]):
                staging.check(name, parameter)
                if parameter.requires_grad:
                    found.append((name, parameter, group_name(index), route))
        shapes = [routing.logical_shape(name, parameter) for name, parameter, _, _ in found]
        placed = layouts.layouts([f[0] for f in found], [f[1] for f in found], shapes,
                                 self._reduced, first=len(self.entries))
        return [Entry(*parts, place) for parts, place in zip(found, placed)]

    def _take_in(self, entries):
        self.fixed = [fixed_terms(i, group) for i, group in enumerate(self.groups)]
        self.entries += entries
        self.by_id.update({id(entry.parameter): entry for entry in entries})

    def _registration(self, options, expected):
        groups, parameters, slices = described(self.groups, self.entries)
        run = {"name": self.run, "worldSize": self.ranks, "parameters": parameters,
               "groups": groups, "additions": expected.get("additions", []),
               "lossScale": options["loss_scale"],
               "maxGradNorm": options["max_grad_norm"],
               "clipPolicy": f"CLIP_POLICY_{options['clip_policy'].upper()}",
               "reduceRanks": "REDUCTION_SUM" if self._reduced else "REDUCTION_MEAN"}
        return {"run": run, "rank": self.rank, "session": self.session_name, "slices": slices}

    def _check_routing(self, entries):
        """The service must have decided as this side did, about these, which it heard of last."""
        routing_table = self.report["routing"]["parameters"][-len(entries):]
        for entry, routed in zip(entries, routing_table, strict=True):
            algorithm = routed["algorithm"].removeprefix("ALGORITHM_").lower()
            if algorithm != entry.route.algorithm:
                raise errors.RegistrationError(
                    f'parameter "{entry.name}": routing: {entry.route.algorithm} here '
                    f"({entry.route.reason}), {algorithm} at the service ({routed['reason']})")

    def _open(self, expected, on_lost_state):
        """Brings run and parameters to one state, whichever of the two is ahead."""
        position = self.session.position()
        if position.state == sessions.NEEDS_RESTORE:
            position = self.recovery.await_state()
            if position.state != sessions.OPENING and not expected:
                logger.warning(
                    'run "%s": goes on from a checkpoint before step %d, whose parameters replace '
                    "those of this program", self.run, position.next_step)
        wanted = expected["version"] if expected else None
        fresh = position.state == sessions.OPENING
        if wanted and fresh and on_lost_state == "raise":
            raise errors.StateLost(
                f'run "{self.run}": the loaded state is that of version {wanted}, this run is new '
                "and has none")
        if expected and not (fresh and (on_lost_state == "fresh" or not wanted)):
            self._match(expected, on_lost_state)
        elif fresh:
            if wanted:
                logger.warning('run "%s": on_lost_state="fresh": momentum and moments of version '
                               "%d are given up", self.run, wanted)
            self.initialize()
            self._remember(self.entries)
            return
        step = self.session.position().next_step
        logger.info('run "%s": rejoined before step %d', self.run, step)
        self.conclude(step)

    def _match(self, expected, on_lost_state):
        """The service's state becomes, or is, the one that `expected` describes: StateLost else."""
        try:
            return self.verify(expected)
        except errors.StateLost as lost:
            if on_lost_state != "restore":
                raise
            name = f"ckpt-{expected['version']}"
            logger.warning('run "%s": %s; restoring "%s"', self.run, lost.message, name)
        self.restore(name)
        return self.verify(expected)

    def restore(self, name):
        """Takes the run back to one of the daemons' checkpoints; every rank calls it."""
        reply = layouts.from_first(lambda: self.session.restore(name))
        generation = int(reply["position"]["generation"])
        while self.session.position().generation < generation:
            self.recovery.await_state()
        return reply["name"]

    def verify(self, expected):
        """StateLost unless the service's state is the one that `expected` describes."""
        position = self.session.position()
        if expected["run"] != self.run or expected["version"] != position.next_step:
            raise errors.StateLost(
                f'run "{self.run}": the loaded state is version {expected["version"]} of run '
                f'"{expected["run"]}", the service stands at version {position.next_step}')
        digest = self.session.digest()["tensorDigest"]
        if digest != expected["tensor_digest"]:
            raise errors.StateLost(
                f'run "{self.run}": the loaded state has digest {expected["tensor_digest"]}, the '
                f"service's {digest}")

    def note(self):
        """What a state_dict keeps of the service's state."""
        digest = self.session.digest()
        return {"run": self.run, "session": self.session_name, "version": int(digest["version"]),
                "generation": self.session.position().generation,
                "tensor_digest": digest["tensorDigest"],
                "additions": [int(first) for first in self.report.get("additions", ())]}

    def add(self, groups, names, routes):
        """Adds the trainable parameters of those groups that are new to the run, with the values
        that they have; all ranks call it, between two steps. Returns the new entries. After an
        error it may be called again."""
        before, self.groups = self.groups, groups
        try:
            added = layouts.together(lambda: checked(self.entries, self._collect(names, routes)))
            waiting = []
            if added:
                layouts.together(lambda: self._join(added))
                waiting = layouts.together(lambda: self._pull(added))
                self.adding = False
        except BaseException:
            self.groups = before
            raise
        self._take_in(added)
        self._write(waiting, added)
        return added

    def _join(self, added):
        specs, parameters, slices = described(self.groups, added)
        before, self.adding = self.adding, True
        try:
            self.session.add_parameters(
                {"groups": specs, "parameters": parameters, "slices": slices})
        except (errors.RegistrationError, errors.VersionMismatch):  # refused
            self.adding = before
            raise
        self.report = self.session.describe()
        self._check_routing(added)
        # Where the run had them before, added by a program that this one goes on from, it has
        # their values, too; of what all ranks hold another one may have sent them.
        if self.session.position().state == sessions.OPENING:
            self.session.initialize(self._values(added))

    def _pull(self, entries):
        sinks, waiting = self._sinks(entries)
        self.session.pull(self.session.position().next_step, sinks)
        return waiting

    def _values(self, entries=None):
        """This rank's parameter values as slices, and the buffers that hold them."""
        entries = self.entries if entries is None else entries
        kept = [(entry, self.buffers.outgoing(entry.name, layouts.local(entry.parameter)))
                for entry in entries if entry.layout.box and entry.layout.elements]
        self.buffers.settle([layouts.local(entry.parameter) for entry, _ in kept])
        self._kept = kept
        return staging.slices_of((entry.name, buffer) for entry, buffer in kept)

    def initialize(self):
        """Gives a run that has taken no step its starting values."""
        self.session.initialize(self._values())

    def restart(self, reason):
        """Takes the parameters' present values over; momentum and moments start anew."""
        self.session.reinitialize(self._values(), reason)
        self.unpulled = None
        self._remember(self.entries)

    def _remember(self, entries):
        for entry in entries:
            entry.written = layouts.local(entry.parameter)._version

    def check_unchanged(self, groups):
        """ParameterChanged when somebody wrote to a parameter since the last step; an error, too,
        when what is fixed for the run, or the parameters themselves, are others."""
        self.groups = groups
        if any(p.requires_grad and id(p) not in self.by_id for g in groups for p in g["params"]):
            raise errors.RegistrationError(
                "param_groups: parameters were replaced or unfrozen since the run was joined",
                hint="build a new optimizer for them, in a run of its own")
        for index, group in enumerate(self.groups):
            if fixed_terms(index, group) != self.fixed[index]:
                raise errors.RegistrationError(
                    f"param_groups[{index}]: nesterov, momentum_dtype, eps, adjust_lr_fn, ns_steps "
                    "and ns_coefficients are fixed once the run is open",
                    hint="lr, weight_decay, momentum and betas may change at every step")
        for entry in self.entries:
            if layouts.local(entry.parameter)._version != entry.written:
                raise errors.ParameterChanged(
                    f'parameter "{entry.name}": its values were changed since the last step')

    def terms(self):
        """The hyperparameters of the next step, as the groups have them now."""
        return step_terms(self.groups, self.entries)

    def present(self):
        """(entry, local gradient) of all that have one."""
        pairs = [(entry, layouts.local_gradient(entry.parameter)) for entry in self.entries]
        return [(entry, gradient) for entry, gradient in pairs if gradient is not None]

    def gradients(self, present):
        """(slices to push, names absent on this rank, what keeps their memory alive)."""
        sent = [(entry, self.buffers.outgoing(entry.name, gradient)) for entry, gradient in present
                if entry.layout.box and entry.layout.elements and entry.layout.sends]
        self.buffers.settle([gradient for _, gradient in present])
        return (staging.slices_of((entry.name, buffer) for entry, buffer in sent),
                self.absent(present), sent)

    def step(self, terms, slices, absent, scale):
        """A whole step, with its pull: conclude() finds the parameters there."""
        sinks, waiting = self._sinks()
        outcome = self.session.step_and_pull(terms, slices, sinks, absent, scale)
        self._arrived = outcome.version, waiting
        return outcome

    def finish(self, absent):
        """Likewise the end of a step that was begun and pushed."""
        sinks, waiting = self._sinks()
        outcome = self.session.finish_and_pull(sinks, absent)
        self._arrived = outcome.version, waiting
        return outcome

    def _sinks(self, entries=None):
        """(slices that this rank pulls, entries with the tensors that these fill)."""
        entries = self.entries if entries is None else entries
        waiting = [(entry, self.buffers.incoming(entry.name, layouts.local(entry.parameter)))
                   for entry in entries if entry.layout.box and entry.layout.elements]
        return staging.slices_of((entry.name, buffer) for entry, buffer in waiting), waiting

    def absent(self, present):
        """Names of the parameters that this rank has nothing to say of."""
        here = {id(entry) for entry, _ in present if entry.layout.sends}
        return [entry.name for entry in self.entries if id(entry) not in here]

    def conclude(self, version, pull=True):
        """Brings the parameters of all ranks to `version`, or to the earlier one that the run went
        back to meanwhile, and returns which. `pull` false: they are of that version already."""
        return Ending(self, version, pull=pull).run()

    def resume(self):
        """Concludes what could not be concluded when it was tried last."""
        return self.conclude(*self.unpulled)

    def fetch(self, version):
        """Entries with what the values of that version, this rank's, have come into."""
        if self._arrived is None or self._arrived[0] != version:
            sinks, waiting = self._sinks()
            self.session.pull(version, sinks)
            self._arrived = version, waiting
        return self._arrived[1]

    def forget(self):
        """What was fetched is of a state that is gone."""
        self._arrived = None

    @staticmethod
    def came_in_place(waiting):
        """Whether fetch() has overwritten parameters."""
        return any(buffer.data_ptr() == layouts.local(entry.parameter).data_ptr()
                   for entry, buffer in waiting)

    def write(self, waiting):
        """The end of a step on all ranks: what was fetched, if anything was, becomes the
        parameters."""
        if waiting is not None:
            self._write(waiting, self.entries)
        self.unpulled = self._arrived = None
        self.adding = False

    def _write(self, waiting, entries):
        """Puts what was pulled of these entries into the parameters, those of other replicas,
        too."""
        copies = [entry for entry in entries if entry.layout.copies]
        with torch.no_grad():
            for entry, buffer in waiting:
                tensor = layouts.local(entry.parameter)
                if buffer.data_ptr() == tensor.data_ptr():
                    torch.autograd.graph.increment_version(tensor)  # it came in place
                else:
                    tensor.copy_(buffer, non_blocking=True)
            for entry in copies:
                layouts.copy_from_primary(entry.layout, layouts.local(entry.parameter))
        self.buffers.settle([layouts.local(entry.parameter) for entry, _ in waiting])
        self._remember(entries)
