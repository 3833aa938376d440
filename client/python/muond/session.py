"""Runs, slices and steps of the optimizer service, without PyTorch.

    session = Session(registration, endpoint="unix:///run/muond/muond.sock")
    session.initialize([Slice("w", address, 1024)])
    outcome = session.step({"muon": {"all": {"lr": 0.02}}}, gradients)
    session.pull(outcome.version, sinks)

A registration is a dictionary as protobuf's JSON of RegisterRequest (proto/muond/v1/). Addresses
are those of host memory or a CUDA device's, which the caller keeps alive during the call. Errors:
muond.errors. Threads: calls on one session wait for each other. A child process that was forked
must not use its parent's sessions; there, close() and the end of a session do nothing.
"""

import ctypes
import dataclasses
import json
import os

from muond import _library, errors

F32, BF16, F16 = 1, 2, 3
HOST, CUDA = 0, 1
OPENING, RUNNING, DRAINING, FAILED, NEEDS_RESTORE = 1, 2, 3, 4, 5
CAUSES = {0: "", 1: "overflow", 2: "state_overflow", 3: "norm_threshold", 4: "trainer"}
OVERFLOW, TRAINER = 1, 4


@dataclasses.dataclass(frozen=True)
class Slice:
    """Elements of a parameter: box `index` of this rank's registration. Of memory CUDA: the
    device's ordinal, and the stream whose work makes the values, or reads them."""

    parameter: str
    address: int
    elements: int
    dtype: int = F32
    index: int = 0
    memory: int = HOST
    device: int = 0
    stream: int = 0


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a step. A skip is an outcome, not an error; `cause` is "" when applied."""

    step: int
    version: int
    applied: bool
    cause: str
    loss_scale: float
    next_loss_scale: float
    grad_norm: float
    clip_coefficient: float
    applied_steps: int
    skipped_steps: int
    consecutive_skips: int
    newton_schulz_calls: int
    newton_schulz_fallbacks: int
    zero_inputs: int
    nonfinite_elements: int


def _encoded(text):
    data = (text or "").encode()
    return data, len(data)


class Service:
    """The service inside this process. Free it, with close(), after the sessions that use it."""

    def __init__(self, backend="cpu", threads=0, listen="", log_level="warn", checkpoint_dir="",
                 checkpoint_every_steps=0):
        self._library = _library.load()
        handle = ctypes.c_void_p()
        options = _library.ServiceOptions(threads=threads,
                                          checkpoint_every_steps=checkpoint_every_steps)
        for name, value in (("backend", backend), ("listen", listen), ("log_level", log_level),
                            ("checkpoint_dir", checkpoint_dir)):
            data, size = _encoded(value)
            setattr(options, name, data)
            setattr(options, f"{name}_bytes", size)
        _library.call("service_start", ctypes.byref(options), ctypes.byref(handle))
        self.handle, self._pid = handle, os.getpid()
        self.address = _library.text(self._library.muond_service_address, handle)

    def close(self):
        """Stops it; the state of its runs is gone."""
        handle, self.handle = self.handle, None
        if handle is not None and self._pid == os.getpid():
            self._library.muond_service_free(handle)


class Session:
    """One rank's part in one run."""

    def __init__(self, registration, *, endpoint=None, service=None, call_timeout=0.0,
                 step_timeout=0.0, bulk_timeout=0.0, transport="auto", memory=HOST, device=0,
                 gradient_dtype=0, recovery_timeout=0.0):
        self.handle = None
        self._library = _library.load()
        self._service = service  # must outlive the session
        handle = ctypes.c_void_p()
        data, size = _encoded(endpoint)
        path, path_size = _encoded(transport)
        options = _library.SessionOptions(
            endpoint=data, endpoint_bytes=size, service=service.handle if service else None,
            call_timeout=call_timeout, step_timeout=step_timeout, bulk_timeout=bulk_timeout,
            transport=path, transport_bytes=path_size, memory=memory, device=device,
            gradient_dtype=gradient_dtype, recovery_timeout=recovery_timeout)
        text, size = _encoded(json.dumps(registration))
        _library.call("session_open", ctypes.byref(options), text, size, ctypes.byref(handle),
                      opening=True)
        self.handle, self._pid = handle, os.getpid()

    def __del__(self):
        self.free()

    def free(self):
        """Forgets the session; the run goes on."""
        handle, self.handle = self.handle, None
        if handle is not None and self._pid == os.getpid():
            self._library.muond_session_free(handle)

    def close(self):
        """Leaves the run; true when it was the last rank, and the run is gone."""
        if self.handle is None or self._pid != os.getpid():
            return False
        closed = ctypes.c_int32()
        try:
            self._call("session_close", ctypes.byref(closed))
        finally:
            self.free()
        return bool(closed.value)

    def _call(self, name, *arguments):
        if self.handle is None:
            raise errors.RunStateError(f"{name}: the session is closed", hint="")
        _library.call(name, self.handle, *arguments)

    def _json(self, name, *arguments):
        text = ctypes.c_void_p()
        self._call(name, *arguments, ctypes.byref(text))
        try:
            return json.loads(_library.text(self._library.muond_text_data, text))
        finally:
            self._library.muond_text_free(text)

    def position(self):
        """Where the run stands, as far as this session knows: muond.h's muond_position."""
        position = _library.Position()
        self._call("session_position", ctypes.byref(position))
        return position

    def describe(self):
        """RegisterReply: routing with reasons, daemons, data path."""
        return self._json("session_describe")

    def transports(self):
        """The data path to each daemon: dictionaries of daemon, name, reason."""
        return self._json("session_transports")

    def status(self):
        """StatusReply with this run, of the first contact."""
        return self._json("session_status")

    def digest(self):
        """DigestReply of the run."""
        return self._json("session_digest")

    def last_outcome(self):
        """StepOutcome of the newest known step, offenders by name."""
        return self._json("session_last_outcome")

    def newest_outcome(self):
        """Likewise, as an Outcome."""
        return _outcome_from_json(self.last_outcome())

    def add_parameters(self, addition):
        """Adds parameters to the run, between two steps: `addition`, a dictionary as protobuf's
        JSON of AddParametersRequest with groups, parameters and this rank's slices. All ranks call
        it, then initialize() with the new values; describe() has them then."""
        try:
            self._call("session_add_parameters", *_encoded(json.dumps(addition)))
        except errors.SliceConflict as taken:  # of the rank or a name, here
            kind = (errors.RunTaken if "held by another session" in taken.message
                    else errors.RegistrationError)
            raise kind(taken.message, code=taken.code) from None

    def rejoin(self):
        """Registers again and adopts where the run stands."""
        self._call("session_rejoin")

    def save(self):
        """Has the daemons save the run; a SaveReply once that is durable: its name and step."""
        return self._json("session_save")

    def restore(self, name="", allow_relayout=False):
        """Takes the run back to a checkpoint, "ckpt-1200" or the newest, for all ranks. The others
        are refused until they rejoin; position() tells this one where to go on."""
        return self._json("session_restore", *_encoded(name), allow_relayout)

    def await_restore(self, timeout):
        """Rejoins until no daemon of the run lacks its state, at most `timeout` seconds."""
        self._call("session_await_restore", timeout)

    def raise_generation(self, reason):
        """Starts the step in flight over, for all ranks."""
        self._call("session_raise_generation", *_encoded(reason))

    def initialize(self, values):
        """Starting values; true when the run has all ranks'."""
        complete = ctypes.c_int32()
        self._call("session_initialize", _sources(values), len(values), ctypes.byref(complete))
        return bool(complete.value)

    def reinitialize(self, values, reason):
        """Goes on from these values with fresh momentum; all ranks call it."""
        complete = ctypes.c_int32()
        self._call("session_reinitialize", _sources(values), len(values), *_encoded(reason),
                   ctypes.byref(complete))
        return bool(complete.value)

    def pull(self, version, sinks, masters=False):
        """Fills the sinks' memory with parameters of that version, whole or not at all."""
        self._call("session_pull", version, _sinks(sinks), len(sinks), masters)

    def step(self, hyperparameters, gradients, absent=(), loss_scale=0.0):
        """A whole step, the session's next; starts over by itself when the attempt was discarded
        meanwhile."""
        begin, outcome = _begin(hyperparameters, loss_scale), _library.Outcome()
        self._call("session_step", ctypes.byref(begin), _sources(gradients), len(gradients),
                   _names(absent), ctypes.byref(outcome))
        return _outcome(outcome)

    def step_and_pull(self, hyperparameters, gradients, sinks, absent=(), loss_scale=0.0):
        """A whole step and a pull of the version that it leads to. An error may be the pull's: the
        step is taken then, and position().last_step tells so."""
        begin, outcome = _begin(hyperparameters, loss_scale), _library.Outcome()
        self._call("session_step_and_pull", ctypes.byref(begin), _sources(gradients),
                   len(gradients), _names(absent), _sinks(sinks), len(sinks),
                   ctypes.byref(outcome))
        return _outcome(outcome)

    def begin(self, hyperparameters, loss_scale=0.0):
        begin = _begin(hyperparameters, loss_scale)
        self._call("session_begin", ctypes.byref(begin))

    def push(self, gradients):
        self._call("session_push", _sources(gradients), len(gradients))

    def finish(self, absent=()):
        outcome = _library.Outcome()
        self._call("session_finish", _names(absent), ctypes.byref(outcome))
        return _outcome(outcome)

    def finish_and_pull(self, sinks, absent=()):
        """Likewise, with a pull, as step_and_pull."""
        outcome = _library.Outcome()
        self._call("session_finish_and_pull", _names(absent), _sinks(sinks), len(sinks),
                   ctypes.byref(outcome))
        return _outcome(outcome)

    def skip(self, cause, loss_scale):
        """Discards the next step on the trainer's word; all ranks must."""
        outcome = _library.Outcome()
        self._call("session_skip", cause, loss_scale, ctypes.byref(outcome))
        return _outcome(outcome)


def _fill(element, part):
    element.parameter, element.parameter_bytes = _encoded(part.parameter)
    element.data, element.elements = part.address, part.elements
    element.slice, element.dtype, element.memory = part.index, part.dtype, part.memory
    element.device, element.stream = part.device, part.stream


def _sources(parts, kind=_library.Source):
    array = (kind * len(parts))()
    for element, part in zip(array, parts):
        _fill(element, part)
    return array


def _sinks(parts):
    return _sources(parts, _library.Sink)


def _names(names):
    encoded = [name.encode() for name in names]
    return ctypes.byref(_library.Names(
        (ctypes.c_char_p * len(encoded))(*encoded),
        (ctypes.c_size_t * len(encoded))(*map(len, encoded)), len(encoded)))


def _begin(hyperparameters, loss_scale):
    data, size = _encoded(json.dumps(hyperparameters))
    return _library.Begin(step=-1, loss_scale=loss_scale, micro_batches=1, hyperparameters=data,
                          hyperparameters_bytes=size)


def _outcome_from_json(reply):
    """protobuf's JSON has 64-bit integers as strings, and no infinities as numbers."""
    values = {}
    for field in dataclasses.fields(Outcome):
        head, *rest = field.name.split("_")
        values[field.name] = field.type(reply[head + "".join(map(str.capitalize, rest))])
    cause = values["cause"].removeprefix("SKIP_CAUSE_").lower()
    return Outcome(**{**values, "cause": "" if cause == "none" else cause})


def _outcome(raw):
    values = {field.name: getattr(raw, field.name) for field in dataclasses.fields(Outcome)}
    return Outcome(**{**values, "applied": bool(raw.applied), "cause": CAUSES[raw.cause]})
