"""What a trainer does when a daemon went away: it joins the run again until all daemons have its
state, and learns where that stands.

A daemon that was restarted in good order has saved the last step: then the call under way is simply
repeated. One that died brings an older version back, from its newest checkpoint.
"""

import logging
import time

from muond import errors
from muond import session as sessions

logger = logging.getLogger("muond")

# What another try after a rejoin can mend. (NeedsRestore is a RunStateError.)
LOST = (errors.DaemonUnavailable, errors.NotFound, errors.RunStateError, errors.StepAborted)
PAUSE_SECONDS = 0.1


class Recovery:
    """Of one session. `timeout`: seconds that daemons have to come back, 0: none."""

    def __init__(self, session, run, timeout):
        self._session, self._run, self.timeout = session, run, timeout

    def await_state(self, deadline=None):
        """Rejoins until all daemons have the run's state, and returns its position: NeedsRestore,
        or DaemonUnavailable, when the time is over."""
        rest = self.timeout if deadline is None else deadline - time.monotonic()
        logger.info('run "%s": waiting for its daemons, at most %.0f s', self._run, rest)
        try:
            self._session.await_restore(max(rest, PAUSE_SECONDS))
        except errors.StepTimeout as late:
            kind = (errors.NeedsRestore if "was not restored" in late.message
                    else errors.DaemonUnavailable)
            raise kind(late.message, code=late.code) from None
        return self._session.position()

    def look(self, seconds):
        """The run's position if all daemons have its state already, else None."""
        try:
            self._session.await_restore(seconds)
        except errors.MuondError:
            return None
        position = self._session.position()
        return position if position.state != sessions.OPENING else None
