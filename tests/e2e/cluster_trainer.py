"""A rank of a run that several daemons share, made of the .proto files alone: what a daemon owns
goes there and comes from there. And a small model to train: a two-layer net in numpy."""

import grpc
import numpy as np

from foreign_trainer import CALL_SECONDS, DTYPES, NUMPY_OF, crc32c, parameter, whole
from muond_stubs import optimizer as pb
from muond_stubs import optimizer_grpc
from muond_stubs import types


class ClusterTrainer:
    """Registers with every daemon; begins, pushes and finishes each step on all of them."""

    def __init__(self, address, run, rank=0):
        self.run, self.rank = run, rank
        self.shapes = {p.name: tuple(p.shape.dims) for p in run.parameters}
        self.names = [p.name for p in run.parameters]
        first = self._connect(address)
        reply = self._register(first)
        self.generation = reply.position.generation
        daemons = list(reply.daemons) or [address]
        self.stubs = [first if i == reply.daemon else self._connect(daemon)
                      for i, daemon in enumerate(daemons)]
        for i, stub in enumerate(self.stubs):
            if i != reply.daemon:
                self._register(stub)
        # By daemon: [(name, first, elements)]
        self.owned = [[] for _ in daemons]
        for shard in reply.shards:
            self.owned[shard.daemon].append(
                (self.names[shard.parameter], shard.first, shard.elements))
        if not reply.shards:
            self.owned[0] = [(n, 0, int(np.prod(s))) for n, s in self.shapes.items()]

    def _connect(self, address):
        channel = grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
        return optimizer_grpc.OptimizerStub(channel)

    def _register(self, stub):
        slices = [types.ParameterSlices(parameter=name, boxes=[whole(shape)])
                  for name, shape in self.shapes.items()]
        return stub.Register(pb.RegisterRequest(run=self.run, rank=self.rank, slices=slices,
                                                client="cluster_trainer.py"), timeout=CALL_SECONDS)

    def run_id(self):
        return pb.RunId(run=self.run.name, generation=self.generation)

    def _chunks(self, daemon, tensors):
        for name, first, elements in self.owned[daemon]:
            if elements == 0:
                continue
            flat = np.ascontiguousarray(tensors[name]).reshape(-1)[first:first + elements]
            data = flat.tobytes()
            yield pb.Chunk(parameter=name, dtype=DTYPES[flat.dtype], offset=first,
                           crc32c=crc32c(data), data=data)

    def initialize(self, values):
        for daemon, stub in enumerate(self.stubs):
            if self.owned[daemon]:
                stub.Initialize((pb.InitializeRequest(id=self.run_id(), rank=self.rank, chunk=c)
                                 for c in self._chunks(daemon, values)), timeout=CALL_SECONDS)

    def begin(self, step, loss_scale=1.0, **hyperparameters):
        for stub in self.stubs:
            stub.Begin(pb.BeginRequest(id=self.run_id(), rank=self.rank, step=step,
                                       loss_scale=loss_scale, **hyperparameters),
                       timeout=CALL_SECONDS)

    def step(self, step, gradients, loss_scale=1.0, **hyperparameters):
        """The outcome, the same from every daemon."""
        self.begin(step, loss_scale, **hyperparameters)
        for daemon, stub in enumerate(self.stubs):
            stub.Push((pb.PushRequest(id=self.run_id(), rank=self.rank, step=step, chunk=c)
                       for c in self._chunks(daemon, gradients)), timeout=CALL_SECONDS)
        waiting = [stub.Finish.future(pb.FinishRequest(id=self.run_id(), rank=self.rank, step=step),
                                      timeout=CALL_SECONDS) for stub in self.stubs]
        return [reply.result().outcome for reply in waiting][0]

    def pull(self, version):
        tensors = {name: np.zeros(int(np.prod(shape)), np.float32)
                   for name, shape in self.shapes.items()}
        for stub in self.stubs:
            for reply in stub.Pull(pb.PullRequest(id=self.run_id(), rank=self.rank,
                                                  version=version), timeout=CALL_SECONDS):
                values = np.frombuffer(reply.chunk.data, NUMPY_OF[reply.chunk.dtype])
                at = reply.chunk.offset
                tensors[reply.chunk.parameter][at:at + values.size] = values
        return {name: tensor.reshape(self.shapes[name]) for name, tensor in tensors.items()}


class Net:
    """y = W2 tanh(W1 x + b): the gradients of its squared error on data of its own."""

    def __init__(self, seed=0, width=32):
        rng = np.random.default_rng(seed)
        self.x = rng.standard_normal((width, 256)).astype(np.float32)
        self.y = np.tanh(rng.standard_normal((width, width)) @ self.x / width).astype(np.float32)
        self.values = {"blk.0.w1": rng.standard_normal((width, width)).astype(np.float32) / 6,
                       "blk.1.w2": rng.standard_normal((width, width)).astype(np.float32) / 6,
                       "blk.0.bias": np.zeros(width, np.float32)}

    def parameters(self, hidden=types.ROLE_HIDDEN):
        return [parameter(name, list(value.shape),
                          role=types.ROLE_BIAS if value.ndim == 1 else hidden)
                for name, value in self.values.items()]

    def run(self, name, hidden=types.ROLE_HIDDEN, **fields):
        return types.Run(**{"name": name, "world_size": 1, "parameters": self.parameters(hidden),
                            "groups": [types.Group(
                                name="weights", muon=types.Hyperparameters(lr=.02, momentum=.9))],
                            **fields})

    def gradients(self, values, scale=1.0):
        """Loss, and its gradients times the scale."""
        hidden = np.tanh(values["blk.0.w1"] @ self.x + values["blk.0.bias"][:, None])
        error = values["blk.1.w2"] @ hidden - self.y
        back = (values["blk.1.w2"].T @ error) * (1 - hidden ** 2)
        count = self.x.shape[1]
        gradients = {"blk.1.w2": error @ hidden.T / count, "blk.0.w1": back @ self.x.T / count,
                     "blk.0.bias": back.mean(axis=1)}
        return float(np.mean(error ** 2)), {name: (g * scale).astype(np.float32)
                                            for name, g in gradients.items()}
