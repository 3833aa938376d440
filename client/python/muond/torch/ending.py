"""How all ranks end a step alike, also when daemons go away in the middle of it.

A step ends with a round, an all-reduce of a few numbers by which each rank tells how it fares.
Parameters change only after a round in which all have arrived at one version.

A rank that is interrupted tells so at once. Others may be done: they wait in the round for this
rank, it waits for the run, and the run, which its daemons restore when all ranks have joined it
again, waits for the others. Until they have come to the round the rank goes on by itself as far as
it can, since they may just as well be at the daemons, waiting for its gradients. After the round
all join the run again together, go on from where that stands, and end with another round.
"""

import logging
import time

import torch
import torch.distributed as dist

from muond import errors
from muond import session as sessions
from muond.torch import layout as layouts
from muond.torch.recovery import LOST, PAUSE_SECONDS

logger = logging.getLogger("muond")

_DONE, _INTERRUPTED, _LATE, _FAILED = range(4)
# Tries after which an error that no rejoin changes is the caller's.
_TRIES_MAX = 3
# How long a rank by itself looks whether the daemons are back before it looks at the round.
_LOOK_SECONDS = 0.5


class _Round:
    """One all-reduce, begun."""

    def __init__(self, ranks, device, version, fares):
        ends = (-version, version) if fares == _DONE else (-2**62, -2**62)
        told = [fares == kind for kind in (_INTERRUPTED, _LATE, _FAILED)]
        self._values = torch.tensor([*ends, *told], dtype=torch.int64, device=device)
        self._work = None
        if ranks > 1:
            self._work = dist.all_reduce(self._values, op=dist.ReduceOp.MAX, async_op=True)

    def over(self):
        """Whether all ranks have come to it."""
        return self._work is None or self._work.is_completed()

    def result(self):
        """How the ranks fare together: the worst, but an interruption, which can be mended, counts
        more than the lateness of those that waited for the interrupted one."""
        if self._work is not None:
            self._work.wait()
        lowest, highest, interrupted, late, failed = self._values.tolist()
        if failed or (late and not interrupted):
            return _FAILED
        return _INTERRUPTED if interrupted or -lowest != highest else _DONE


class Ending:
    """One rank's part in the end of a step, or, without take(), in a pull alone."""

    def __init__(self, binding, due, take=None, pull=True):
        """`due`: the version to come to. take(): takes or skips step due - 1, and returns its
        Outcome; it may be called repeatedly. `pull` false: the parameters are of that version."""
        self.version = due   # that this rank comes to: an earlier one if the run went back
        self.outcome = None  # of the step, once it is known
        self._binding, self._due, self._take, self._pull = binding, due, take, pull
        self._waiting = None  # what the parameters of `version` have come into
        self._fares, self._trouble = _DONE, None
        self._deadline, self._tries, self._seen = None, 0, None

    def run(self):
        """Comes to `due` on all ranks, or to the version that the run went back to, and returns
        which. None of the parameters changes unless all have arrived on every rank. Where a rank
        fails all raise, and `unpulled` of the binding tells what may be tried again."""
        binding = self._binding
        device = layouts.local(binding.entries[0].parameter).device
        self._try(self._advance)
        while True:
            round_ = _Round(binding.ranks, device, self.version, self._fares)
            if self._fares == _INTERRUPTED:
                self._go_on_alone(round_)
            together = round_.result()
            if together == _FAILED:
                self._stop()
            if together == _DONE:
                binding.write(self._waiting if self._pull else None)
                return self.version
            if self._fares != _FAILED:
                self._try(self._go_on_together)

    def _stop(self):
        """Raises. A step that was taken is to be concluded by the next call."""
        if self._take is None or self.outcome is not None or self.version != self._due:
            self._binding.unpulled = self.version, self._pull
        layouts.raise_alike(self._trouble)

    # ---- tries ---------------------------------------------------------------------------------

    def _try(self, action):
        try:
            action()
            self._fares, self._trouble = _DONE, None
        except Exception as error:  # whatever it is: the other ranks must not wait for this one
            self._fares, self._trouble = self._judge(error), error
            if self._fares == _INTERRUPTED:
                logger.warning('run "%s": %s', self._binding.run, error.message)

    def _judge(self, error):
        late = isinstance(error, errors.StepTimeout)
        if not late and not isinstance(error, LOST):
            return _FAILED
        if self._deadline is not None and time.monotonic() >= self._deadline:
            return _FAILED
        if late:
            return _LATE
        position = self._binding.session.position()
        seen = position.generation, position.next_step
        changed = seen != self._seen or isinstance(error, errors.DaemonUnavailable)
        self._tries, self._seen = 1 if changed else self._tries + 1, seen
        given_up = self._binding.recovery.timeout <= 0 or self._tries >= _TRIES_MAX
        return _FAILED if given_up else _INTERRUPTED

    def _go_on_alone(self, round_):
        while self._fares == _INTERRUPTED and not round_.over():
            position = self._binding.recovery.look(_LOOK_SECONDS)
            if position is not None:
                self._try(lambda: self._go_on(position))
            if self._fares == _INTERRUPTED:
                time.sleep(PAUSE_SECONDS)

    def _go_on_together(self):
        recovery = self._binding.recovery
        if self._deadline is None:
            self._deadline = time.monotonic() + max(recovery.timeout, 1)
        elif time.monotonic() >= self._deadline:
            raise errors.RunStateError(
                f'run "{self._binding.run}": the ranks do not come to one version: this one is at '
                f"{self.version}, others were told of an earlier one")
        else:
            time.sleep(PAUSE_SECONDS)
        self._go_on(recovery.await_state(self._deadline))

    def _go_on(self, position):
        self._stand(position)
        self._advance()

    # ---- one rank's way ------------------------------------------------------------------------

    def _advance(self):
        """Does what is missing for `version`."""
        if self._take is not None and self.outcome is None and self.version == self._due:
            self.outcome = self._taken()
            self._pull = self.outcome.applied
        if self._pull and self._waiting is None:
            self._waiting = self._binding.fetch(self.version)

    def _taken(self):
        try:
            return self._take()
        except errors.MuondError:
            session = self._binding.session
            position = session.position()
            if (position.last_step, position.next_step) != (self._due - 1, self._due):
                raise
            return session.newest_outcome()  # it is taken, and the pull went wrong: once more

    def _stand(self, position):
        """Goes on from where the run stands."""
        if position.state == sessions.OPENING:
            self._open_again(position)
            return
        stands, step = position.next_step, self._due - 1
        if stands > self.version:
            raise errors.RunStateError(
                f'run "{self._binding.run}": it stands before step {stands}, and this rank was to '
                f"come to version {self.version}")
        if stands == self._due:
            if self._take is not None and self.outcome is None:
                self.outcome = self._binding.session.newest_outcome()
                self._pull = self.outcome.applied
        elif stands == step and self._take is not None:
            self._start_over(self._due)  # the gradients are still there
        elif stands < self.version:
            self._start_over(stands)

    def _start_over(self, version):
        self.version, self.outcome, self._pull, self._waiting = version, None, True, None
        self._binding.forget()

    def _open_again(self, position):
        """The daemons came back with nothing: before the first step nothing is lost by that. Or an
        addition ended half way, and nothing is lost at all."""
        binding, version = self._binding, self._due - (self._take is not None)
        if binding.adding and position.next_step == version:
            raise errors.RunStateError(
                f'run "{binding.run}": values of parameters that were added are missing, and '
                "without them no step is taken",
                hint="call add_param_group again, on all ranks, with the group whose addition "
                     "failed")
        if version > 0 or (self._waiting and binding.came_in_place(self._waiting)):
            raise errors.StateLost(
                f'run "{binding.run}": its daemons came back without their state, that of version '
                f"{version}, and there was no checkpoint of it",
                hint="opt.restart_from_parameters() on all ranks goes on from the present "
                     "parameters with fresh momentum; daemons with --checkpoint-dir and "
                     "--checkpoint-every-steps keep the state")
        self._start_over(self._due)
        binding.initialize()
