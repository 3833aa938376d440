#!/usr/bin/env python3
"""One step of a trainer in a process of its own, for tests that kill it.

usage: trainer_process.py ADDRESS RUN SESSION stall|complete

Prints one JSON line: after half a slice, and then sends no more (stall); or after the whole step
(complete).
"""

import json
import sys
import threading

import numpy as np

from foreign_trainer import Trainer, parameter
from muond_stubs import types

SHAPE = [4, 4]


def run_named(name):
    return types.Run(name=name, world_size=1, parameters=[parameter("w", SHAPE)],
                     groups=[types.Group(name="weights")])


def values():
    return {"w": np.eye(4, dtype=np.float32)}


def gradients():
    return {"w": np.diag([1, 2, 3, 4]).astype(np.float32)}


def stalling(requests):
    """The first chunk, the word that it is out, and then silence."""
    yield next(requests)
    print(json.dumps({"stalled": True}), flush=True)
    threading.Event().wait()


def main():
    address, name, session, what = sys.argv[1:]
    trainer = Trainer(address, run_named(name), session=session, chunk_bytes=16)
    joined = trainer.register()
    step = joined.position.next_step
    if not joined.rejoined:
        trainer.initialize(values())
    trainer.begin(step)
    if what == "stall":
        trainer.stub.Push(stalling(trainer.push_requests(step, gradients())))
        return
    pushed = trainer.push(step, gradients())
    outcome = trainer.finish(step)
    print(json.dumps({"rejoined": joined.rejoined, "step": step, "applied": outcome.applied,
                      "slices_accepted": pushed.slices_accepted,
                      "digest": trainer.digest().tensor_digest}), flush=True)


if __name__ == "__main__":
    main()
