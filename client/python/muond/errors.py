"""What can go wrong between a trainer and the service: one class per kind, each with a hint.

Every one is a MuondError; where Python has a class for the kind (ConnectionError, TimeoutError,
ValueError), it is one of those, too. `code` is the service's status code (docs/errors.md), or None
where no call was made; str() is the message and the hint.
"""

import re


class MuondError(RuntimeError):
    """Something that the optimizer or its service could not do; nothing was changed."""

    hint = ""

    def __init__(self, message, *, code=None, hint=None):
        self.message = message
        self.code = code
        if hint is not None:
            self.hint = hint
        super().__init__(f"{message}\nhint: {self.hint}" if self.hint else message)


class LibraryError(MuondError, ImportError):
    """libmuond_client.so is missing, lacks a library that it needs, or is of another version."""

    hint = ("install the package from the repository, `pip install .`, after "
            "`deploy/install-packages --build`; or set MUOND_LIBRARY to a libmuond_client.so")


class DaemonUnavailable(MuondError, ConnectionError):
    """No daemon answered within the time; a step that was under way may be repeated."""

    hint = ("is muond running, and is the endpoint right (endpoint=... or MUOND_ENDPOINT)? "
            "`muonctl --endpoint ADDRESS health` tells; step() may simply be called again once it "
            "is back")


class StepTimeout(MuondError, TimeoutError):
    """Other ranks, slices or daemons were missing when the time was over; what came is kept."""

    hint = ("the message names who is missing: did another rank stop, or skip a step that this one "
            "takes? step() may be called again")


class VersionMismatch(MuondError):
    """The daemon is of another version than this client."""

    hint = "install daemon and client of one version: `muonctl version`, `muond.__version__`"


class RunTaken(MuondError):
    """Another trainer holds this run's rank."""

    hint = ("give this training a run of its own (run=... or MUOND_RUN); if it is the same "
            "training, started again, pass the session of the former one (session=..., it is in "
            "its state_dict)")


class RegistrationError(MuondError, ValueError):
    """The service refuses the run as it was described."""

    hint = "the message names parameter and cause; opt.describe() shows what was registered"


class ShapeMismatch(RegistrationError):
    """A shape is not what it must be: a placeholder, a shard taken for the whole, or a change."""

    hint = ("shapes must be the layers' own: build the optimizer from named_parameters() of a "
            "model whose parameters are whole tensors or DTensors; for other layouts set "
            "muond_shape and muond_offset on the parameter")


class MuonInactive(RegistrationError):
    """No parameter would be updated by Muon."""

    hint = ("pass model.named_parameters(), not flattened shards; route= or the parameter's "
            "use_muon attribute decide by hand; require_muon=False if AdamW alone is meant")


class RunStateError(MuondError):
    """The run can't do this now: a wrong step or version, a failed run."""

    hint = "`muonctl status` shows where the run stands"


class NeedsRestore(RunStateError):
    """A daemon lost the run's state: momentum and moments are gone."""

    hint = ("the daemon's log says why no checkpoint was restored; opt.restart_from_parameters() "
            "on all ranks goes on from the present parameters with fresh momentum")


class RolledBack(MuondError):
    """A daemon lost its state, and the run went back to a checkpoint: the parameters are those of
    before `step` now, and the steps since have to be taken again."""

    hint = ("go on with the batch of that step: `for step in opt.steps(total, rewind=[...])` does "
            "so by itself; on_rollback=\"continue\" takes the loss of those steps")

    def __init__(self, run, stood, step):
        super().__init__(f'run "{run}": it stood before step {stood}, and stands before step '
                         f"{step} now, restored from a checkpoint")
        self.step = step


class StepAborted(MuondError):
    """The step's attempt was discarded, repeatedly."""

    hint = "another rank raised the generation or the run moved on; call step() again"


class SliceConflict(MuondError):
    """A slice was pushed again with other bytes in the same step."""

    hint = "all ranks must push the gradients of the same step"


class NotFound(MuondError, LookupError):
    """No such run, parameter or slice."""

    hint = "was the run closed, or the daemon restarted? `muonctl status` lists its runs"


class LimitExceeded(MuondError):
    """A limit of the daemon; the message names the flag that raises it."""

    hint = "raise the limit that the message names, or send less"


class DataLoss(MuondError):
    """Bytes arrived damaged, repeatedly."""

    hint = "look for a faulty link or memory between trainer and daemon"


class ServiceError(MuondError):
    """A fault inside the service or the client library."""

    hint = "the daemon's log has more; the run's state must not be trusted if it is `failed`"


class StateLost(MuondError):
    """A loaded state is not the one that the service has."""

    hint = ("the service keeps momentum and moments: load a state_dict while its run is still "
            "there and at that version; on_lost_state=\"restore\" takes the run back to the "
            "daemons' checkpoint of that version, \"fresh\" accepts fresh momentum instead")


class ParameterChanged(MuondError):
    """A parameter's values were changed by somebody else since the last step."""

    hint = ("the service's master weights would overwrite the change: "
            "opt.restart_from_parameters() takes the present values over, with fresh momentum")


INVALID_ARGUMENT, DEADLINE_EXCEEDED, ALREADY_EXISTS = 3, 4, 6
FAILED_PRECONDITION, ABORTED, UNIMPLEMENTED, UNAVAILABLE = 9, 10, 12, 14
_BY_CODE = {
    INVALID_ARGUMENT: RegistrationError,
    DEADLINE_EXCEEDED: StepTimeout,
    5: NotFound,
    ALREADY_EXISTS: SliceConflict,
    8: LimitExceeded,
    FAILED_PRECONDITION: RunStateError,
    ABORTED: StepAborted,
    UNIMPLEMENTED: VersionMismatch,
    UNAVAILABLE: DaemonUnavailable,
    15: DataLoss,
}


def from_code(code, message, opening=False):
    """The exception for a status code of the service; `opening`: of a call that joins a run."""
    kind = _BY_CODE.get(code, ServiceError)
    if code == FAILED_PRECONDITION:
        if re.search(r'^daemon ".*": version: ', message):
            kind = VersionMismatch
        elif "silently inactive" in message:
            kind = MuonInactive
        elif re.search(r"needs a restore|needs_restore|states don't belong together", message):
            kind = NeedsRestore
    elif opening and code == ALREADY_EXISTS:
        kind = RunTaken
    elif opening and code == DEADLINE_EXCEEDED:
        kind = DaemonUnavailable
    elif code == INVALID_ARGUMENT and re.search(r"\bshape\b|\belements\b", message):
        kind = ShapeMismatch
    return kind(message, code=code)
