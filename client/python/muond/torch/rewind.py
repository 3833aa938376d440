"""Steps that come to nothing: a daemon died, the run went back to its newest checkpoint, and what
was trained since has to be trained again, with the same batches, learning rates and random numbers.

    for step in opt.steps(1000, rewind=[scheduler]):
        ...                                            # the batch of `step`
"""

import collections
import copy
import logging

import torch

from muond import errors
from muond.torch import layout as layouts
from muond.torch.ending import Ending

logger = logging.getLogger("muond")

# Of steps taken: how far back the parameters' step counts can be set right.
_TAKEN_MAX = 100_000


class History:
    """How things stood before each of the last steps: learning rates and the like, torch's random
    numbers, and whatever has state_dict() and load_state_dict()."""

    def __init__(self, optimizer, objects, length):
        for thing in objects:
            if not hasattr(thing, "state_dict") or not hasattr(thing, "load_state_dict"):
                raise TypeError(f"steps: rewind: {type(thing).__name__} has no state_dict and "
                                "load_state_dict")
        self._optimizer, self._objects, self._length = optimizer, list(objects), length
        self._kept = {}  # by step, ascending

    def covers(self, step):
        return step in self._kept

    def at(self, step):
        """Before `step`: keeps how things stand, or brings them back to how they stood then."""
        if step in self._kept:
            self._go_back(step)
            return
        self._kept[step] = (
            self._terms(self._optimizer.param_groups),
            [copy.deepcopy(thing.state_dict()) for thing in self._objects],
            torch.get_rng_state(),
            torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None)
        while len(self._kept) > self._length:
            del self._kept[next(iter(self._kept))]

    def grew(self, step):
        """Groups were added while `step` was being prepared: they belong to how things stood."""
        if step in self._kept:
            groups = self._kept[step][0]
            groups += self._terms(self._optimizer.param_groups[len(groups):])

    @staticmethod
    def _terms(groups):
        return [{key: copy.deepcopy(value) for key, value in group.items()
                 if key not in ("params", "param_names")} for group in groups]

    def _go_back(self, step):
        groups, states, cpu, cuda = self._kept[step]
        for later in [kept for kept in self._kept if kept > step]:
            del self._kept[later]
        for group, values in zip(self._optimizer.param_groups, copy.deepcopy(groups)):
            group.update(values)
        for thing, state in zip(self._objects, states):
            thing.load_state_dict(copy.deepcopy(state))
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)


class Rewinding:
    """How a step ends, and checkpoints. Mixed into the optimizer."""

    def _reset_rewinding(self):
        self._history, self._due = None, 0
        self._taken = collections.deque(maxlen=_TAKEN_MAX)  # (step, parameters), of applied ones

    @property
    def next_step(self):
        """The number of steps that the run has consumed, applied or skipped, and so that of the
        next one; joins the run if need be."""
        return self._bound().session.position().next_step

    def steps(self, total, *, rewind=(), history=1000):
        """Counts from the run's next step to `total`, and goes back with the run when that lost its
        state: then learning rates, torch's random numbers and the objects in `rewind` (schedulers,
        scalers, loaders, all that has state_dict and load_state_dict) are as they were before that
        step. What is kept for it: `history` steps. Use once: the body takes one step."""
        self._history = History(self, rewind, history)
        try:
            while True:
                self._watch.settle()
                binding = self._bound()
                if binding.unpulled is not None:
                    self._conclude(self._due, binding.resume)
                step = self.next_step
                if step >= total:
                    return
                self._history.at(step)
                yield step
        finally:
            self._history = None

    def save_checkpoint(self):
        """Has the daemons save the run, and returns the checkpoint's name, "ckpt-<next step>", once
        that is durable. Between two steps; all ranks call it."""
        session = self._bound().session
        return layouts.from_first(session.save)["name"]

    def restore_checkpoint(self, name=""):
        """Takes run and parameters back to a checkpoint of the daemons, by default the newest, and
        returns the next step. All ranks call it."""
        binding = self._bound()
        binding.restore(name)
        self._ended_at(binding.conclude(binding.session.position().next_step))
        return self.next_step

    def _consume(self, take, parameters=()):
        """Has take() take or skip the next step, and all ranks end it together."""
        binding = self._bound()
        step = binding.session.position().next_step
        ending = Ending(binding, step + 1, take)

        def end():
            try:
                return ending.run()
            finally:
                if ending.outcome is not None:
                    self._note(step, ending.outcome, parameters)
        self._conclude(step + 1, end)

    def _note(self, step, outcome, parameters):
        self.last_outcome = outcome
        if outcome.applied:
            for parameter in parameters:
                self.state[parameter]["step"] += 1
            self._taken.append((step, parameters))

    def _conclude(self, version, end):
        """end() must bring the run to `version`; else it went back. Where it fails, step() calls
        this again, with what was due."""
        self._due = version
        step = end()
        if step >= version:
            return
        self._ended_at(step)
        if self._history is not None and self._history.covers(step):
            logger.warning('run "%s": back before step %d, to take the steps since again',
                           self._binding.run, step)
        elif self._options["on_rollback"] == "raise":
            raise errors.RolledBack(self._binding.run, version - 1, step)
        else:
            logger.warning('run "%s": went back before step %d: the steps since are lost',
                           self._binding.run, step)

    def _ended_at(self, step):
        """Takes back what was noted of the steps since."""
        while self._taken and self._taken[-1][0] >= step:
            for parameter in self._taken.pop()[1]:
                self.state[parameter]["step"] -= 1
        session = self._binding.session
        self.last_outcome = (session.newest_outcome() if session.position().last_step >= 0
                             else None)
