"""Pushing gradients while backward still runs.

A hook on each parameter takes a copy of its gradient the moment that it is accumulated, and a
thread pushes the copies. Nobody promises that gradients are final then: DDP's all-reduce,
GradScaler.unscale_, clipping and a second backward change them afterwards. So step() compares every
gradient with the copy that was pushed, bit by bit. If one differs, or a hyperparameter, the attempt
is given up by a new generation and all is pushed again: right, though slower than not to have
begun. Where that happens every time, early pushing ends, with a warning.
"""

import logging
import queue
import threading

import torch

from muond.torch import layout as layouts
from muond.torch import recovery, staging

logger = logging.getLogger("muond")

# Restarts one after the other before early pushing ends.
RESTARTS_MAX = 3


class EarlyPush:
    """Of one optimizer that has joined its run. Hooks come from autograd's threads."""

    def __init__(self, binding, scale):
        """`scale`: weak reference to a function that tells what gradients are multiplied by."""
        self.paused = 0        # > 0: backward passes are not the step's last
        self.early = 0         # slices pushed early, in all
        self.again = 0         # of these, pushed again
        self.restarts = 0      # one after the other
        self._binding, self._scale = binding, scale
        self._lock = threading.Lock()
        self._queue = queue.Queue()
        self._streams = {}     # by device: those that the thread pushes from
        self._clear()
        self._ended = False    # by too many restarts
        self._hooks = []
        self.watch(binding.entries)
        self._thread = threading.Thread(target=self._work, name="muond-push", daemon=True)
        self._thread.start()

    def _clear(self):
        self._pushed = {}     # name -> copy
        self._begun = None    # (terms, scale) of the begun attempt
        self._error = None

    def watch(self, entries):
        """Pushes the gradients of these, too."""
        if not self._ended:
            self._hooks += [
                entry.parameter.register_post_accumulate_grad_hook(self._accumulated)
                for entry in entries
                if entry.layout.box and entry.layout.elements and entry.layout.sends]

    def forget(self):
        """What was pushed since the last step is void: step() pushes all of it again."""
        self._queue.join()
        with self._lock:
            self._clear()

    def stop(self):
        """Removes the hooks and ends the thread."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._queue.put(None)
        self._thread.join()

    def words(self):
        if not self._hooks:
            return f"all at step(): gradients changed after early pushes {RESTARTS_MAX} times"
        return (f"from backward's hooks: {self.early} slices so far, {self.again} of them changed "
                "afterwards and were pushed again")

    def _accumulated(self, parameter):
        """The hook: copies, and leaves the rest to the thread."""
        binding = self._binding
        if self.paused or binding.unpulled is not None:
            return
        entry = binding.by_id[id(parameter)]
        gradient = layouts.local_gradient(parameter)
        with self._lock:
            if gradient is None or entry.name in self._pushed:
                return  # a second backward: step() finds the difference
            copy = binding.buffers.copy(("early", entry.name), gradient)
            done = None
            if gradient.device.type == "cuda":
                done = torch.cuda.current_stream(gradient.device).record_event()
            if self._begun is None:
                self._begun = binding.terms(), self._scale()()
                self._queue.put(("begin", *self._begun))
            self._pushed[entry.name] = copy
            self._queue.put((entry.name, copy, done))

    def _work(self):
        while (item := self._queue.get()) is not None:
            try:
                if self._error is None:
                    self._send(*item)
            except Exception as error:  # whatever it is: step() goes the other way then
                self._error = error
            finally:
                self._queue.task_done()

    def _send(self, name, what, detail):
        if name == "begin":
            self._binding.session.begin(what, detail)
            return
        if detail is not None:
            detail.synchronize()
        if what.device.type == "cuda" and what.device not in self._streams:
            self._streams[what.device] = torch.cuda.Stream(what.device)
        self._binding.session.push(staging.slices_of([(name, what)], self._streams))
        self.early += 1

    def finish(self, terms, scale, present):
        """The step's outcome; None where the caller has to take the whole step."""
        self._queue.join()
        with self._lock:
            pushed, begun, error = self._pushed, self._begun, self._error
            self._clear()
        if begun is None:
            return None
        session = self._binding.session
        if error is not None:
            logger.warning('run "%s": early push: %s', self._binding.run,
                           getattr(error, "message", error))
            return None
        changed = self._changed(pushed, present)
        if changed or begun != (terms, scale):
            self._start_over(changed)
            return None
        self.restarts = 0
        rest = [(entry, gradient) for entry, gradient in present if entry.name not in pushed]
        slices, _, kept = self._binding.gradients(rest)
        try:
            session.push(slices)
            return self._binding.finish(self._binding.absent(present))
        except recovery.LOST as lost:
            logger.warning('run "%s": %s', self._binding.run, lost.message)
            return None
        finally:
            del kept

    def _changed(self, pushed, present):
        """Names whose gradient is not the one that was pushed."""
        now = dict((entry.name, gradient) for entry, gradient in present)
        buffers = self._binding.buffers
        there = [(name, copy, buffers.outgoing(name, now[name]))
                 for name, copy in pushed.items() if name in now]
        buffers.settle([now[name] for name, _, _ in there])
        return [name for name in pushed if name not in now] + staging.differing(there)

    def _start_over(self, changed):
        self.again += len(changed)
        self.restarts += 1
        what = f'gradients of "{changed[0]}" and others' if changed else "hyperparameters"
        logger.info('run "%s": early push: %s changed afterwards', self._binding.run, what)
        self._binding.session.raise_generation(f"{what} changed after the push")
        if self.restarts == RESTARTS_MAX:
            logger.warning(
                'run "%s": early push: %s changed after the push in %d steps one after the other '
                "(an all-reduce, unscale_, clipping or a second backward does that): from now on "
                "everything is pushed at step()", self._binding.run, what, RESTARTS_MAX)
            for hook in self._hooks:
                hook.remove()
            self._hooks, self._ended = [], True
