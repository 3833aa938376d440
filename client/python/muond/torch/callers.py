"""Who calls step(): libraries take steps that are none, to have optimizers make their state."""

import sys

# DeepSpeed's wrappers call step() with zero gradients, and the learning rate as it is, in here.
_INITIALIZING = "initialize_optimizer_states"
_DEPTH = 12


def initializing():
    """Whether one of the callers only wants the optimizer's state to exist."""
    frame = sys._getframe(1)
    for _ in range(_DEPTH):
        frame = frame.f_back
        if frame is None:
            return False
        if frame.f_code.co_name == _INITIALIZING:
            return True
    return False
