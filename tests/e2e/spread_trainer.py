"""A trainer of a run that spans several daemons, from docs/protocol.md and docs/checkpoints.md: it
sends every parameter to its owner, and goes on from wherever a restore has put the run."""

import time

import grpc

from foreign_trainer import Trainer
from muond_stubs import optimizer as pb

RETRY_SECONDS = 0.05


class SpreadTrainer:
    """One rank that holds everything. Every parameter lies whole on one daemon (checked)."""

    def __init__(self, addresses, run):
        self.run = run
        self.trainers = [Trainer(address, run, session="spread") for address in addresses]
        self.owned = []
        self.position = None
        self.loss_scale = 1.0

    def register(self):
        """With every daemon; True when all are running at one position."""
        replies = [trainer.register() for trainer in self.trainers]
        holders = [p.name for p in self.run.parameters]
        self.owned = [[] for _ in replies]
        for shard in replies[0].shards:
            assert shard.first == 0, f"{holders[shard.parameter]} is cut"
            self.owned[shard.daemon].append(holders[shard.parameter])
        if not replies[0].shards:
            self.owned[0] = holders
        self.position = replies[0].position
        self.loss_scale = replies[0].loss_scale
        positions = {(r.position.generation, r.position.next_step, r.position.state)
                     for r in replies}
        return len(positions) == 1 and self.position.state == pb.RUN_STATE_RUNNING

    def join(self, seconds):
        """Until the run is restored and running, whatever dies meanwhile."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                if self.register():
                    return self.position.next_step
                why = pb.RunState.Name(self.position.state)
            except grpc.RpcError as error:
                why = error.details()
            assert time.monotonic() < deadline, f"not running within {seconds} s: {why}"
            time.sleep(RETRY_SECONDS)

    def _own(self, daemon, tensors):
        return {name: tensors[name] for name in self.owned[daemon] if name in tensors}

    def initialize(self, values):
        self.register()
        for daemon, trainer in enumerate(self.trainers):
            if self.owned[daemon]:
                trainer.initialize(self._own(daemon, values))
        assert self.register(), "running once all values are there"

    def step(self, step, gradients, loss_scale):
        """The outcome; None when the run must be joined again."""
        try:
            for trainer in self.trainers:
                trainer.begin(step, loss_scale=loss_scale)
            for daemon, trainer in enumerate(self.trainers):
                if self.owned[daemon]:
                    trainer.push(step, self._own(daemon, gradients))
            finishes = [trainer.stub.Finish.future(trainer.finish_request(step, wait_ms=20_000),
                                                   timeout=30) for trainer in self.trainers]
            return [finish.result().outcome for finish in finishes][0]
        except grpc.RpcError as error:
            return self._explain(error)

    @staticmethod
    def _explain(error):
        """A refusal that a restore or a daemon's death explains; all else is a fault."""
        expected = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED,
                    grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.NOT_FOUND,
                    grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED}
        assert error.code() in expected, f"{error.code()}: {error.details()}"
        return None
