"""What a trainer does when a daemon went away: it waits until all daemons have the run's state
again, and goes on where that stands.

A daemon that was restarted in good order has saved the last step: then the call under way is simply
repeated. One that died brings an older version back, from its newest checkpoint: RolledBack tells
where the run stands then.
"""

import logging
import time

from muond import errors
from muond import session as sessions

logger = logging.getLogger("muond")

# What another try after a rejoin can mend. (NeedsRestore is a RunStateError.)
LOST = (errors.DaemonUnavailable, errors.NotFound, errors.RunStateError, errors.StepAborted)
# Tries after which an error that no rejoin changes is the caller's.
_TRIES_MAX = 3
_PAUSE_SECONDS = 0.1


class Recovery:
    """Repeats calls on one session. `timeout`: seconds that daemons have to come back, 0: none.
    `initialize`: gives a run that has taken no step its starting values."""

    def __init__(self, session, run, timeout, initialize):
        self._session, self._run, self._timeout = session, run, timeout
        self._initialize = initialize

    def step(self, action):
        """The Outcome of action(), which takes the session's next step, or skips it. RolledBack
        when the run stands before an earlier one."""
        step = self._session.position().next_step

        def ended():
            return self._session.newest_outcome()
        return self._until_done(action, step, ended)

    def pull(self, version, action):
        """action(), which pulls `version`. RolledBack when there is an earlier one only."""
        self._until_done(action, version, None)

    def _until_done(self, action, step, ended):
        """action() while the run stands before `step`; ended() when it turns out to be over."""
        deadline, tries = None, 0
        while True:
            generation = self._session.position().generation
            try:
                return action()
            except LOST as error:
                if self._timeout <= 0:
                    raise
                tries += 1
                if deadline is None:
                    deadline = time.monotonic() + self._timeout
                elif time.monotonic() >= deadline:
                    raise
                position = self._rejoined(error, step, deadline)
                changed = position.generation != generation or position.next_step != step
                if (tries >= _TRIES_MAX and not changed
                        and not isinstance(error, errors.DaemonUnavailable)):
                    raise
            if position.next_step == step + 1 and position.last_step == step and ended:
                return ended()
            if position.next_step != step:
                raise errors.RolledBack(self._run, step, position.next_step)
            time.sleep(_PAUSE_SECONDS)

    def _rejoined(self, error, step, deadline):
        """The run's position once its daemons have the state again."""
        logger.warning('run "%s": %s', self._run, error.message)
        position = self.await_state(deadline)
        if position.state == sessions.OPENING and step == 0:
            self._initialize()
        elif position.state == sessions.OPENING:
            raise errors.StateLost(
                f'run "{self._run}": its daemons came back without their state, that of version '
                f"{step}, and there was no checkpoint of it",
                hint="opt.restart_from_parameters() on all ranks goes on from the present "
                     "parameters with fresh momentum; daemons with --checkpoint-dir and "
                     "--checkpoint-every-steps keep the state") from error
        return position

    def await_state(self, deadline=None):
        """Rejoins until all daemons have the run's state, and returns its position: NeedsRestore,
        or DaemonUnavailable, when the time is over."""
        rest = self._timeout if deadline is None else deadline - time.monotonic()
        logger.info('run "%s": waiting for its daemons, at most %.0f s', self._run, rest)
        try:
            self._session.await_restore(max(rest, _PAUSE_SECONDS))
        except errors.StepTimeout as late:
            kind = (errors.NeedsRestore if "was not restored" in late.message
                    else errors.DaemonUnavailable)
            raise kind(late.message, code=late.code) from None
        return self._session.position()

    def follow(self, version):
        """The run's next step once it stands at `version` or before: another rank was told so."""
        deadline = time.monotonic() + max(self._timeout, 1)
        while (position := self.await_state(deadline)).next_step > version:
            if time.monotonic() >= deadline:
                raise errors.RunStateError(
                    f'run "{self._run}": another rank was told that it stands at version '
                    f"{version}, this one still sees {position.next_step}")
            time.sleep(_PAUSE_SECONDS)
        return position.next_step
