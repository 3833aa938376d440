"""A trainer that knows nothing but the .proto files and docs/protocol.md: no code of ours."""

import grpc
import numpy as np

from muond_stubs import optimizer as pb
from muond_stubs import optimizer_grpc
from muond_stubs import types

CALL_SECONDS = 60
DTYPES = {np.dtype("<f4"): types.DTYPE_F32, np.dtype("<f2"): types.DTYPE_F16}
NUMPY_OF = {number: dtype for dtype, number in DTYPES.items()}


def _crc_table():
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


CRC_TABLE = _crc_table()


def crc32c(data):
    """RFC 3720: Castagnoli's polynomial, reflected."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = CRC_TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def parameter(name, shape, group="weights", role=types.ROLE_HIDDEN, **fields):
    return types.Parameter(name=name, shape=types.Shape(dims=shape), group=group, role=role,
                           **{"dtype": types.DTYPE_F32, **fields})


def whole(shape):
    """The box of a whole tensor; a scalar's has no dimensions."""
    return types.Box(offset=[0] * len(shape), size=shape)


def position_of(error):
    """The RunPosition that comes with a refusal; None when there is none."""
    for key, value in error.trailing_metadata() or ():
        if key == "muond-position-bin":
            return pb.RunPosition.FromString(value)
    return None


class Trainer:
    """One rank of a run. `slices`: {name: [Box]}, by default every parameter whole."""

    def __init__(self, address, run, rank=0, slices=None, session="", chunk_bytes=1 << 20):
        self.channel = grpc.insecure_channel(
            address, options=[("grpc.use_local_subchannel_pool", 1)])
        self.stub = optimizer_grpc.OptimizerStub(self.channel)
        self.run = run
        self.rank = rank
        self.slices = slices if slices is not None else {
            p.name: [whole(p.shape.dims)] for p in run.parameters}
        self.shapes = {p.name: tuple(p.shape.dims) for p in run.parameters}
        self.session = session
        self.chunk_bytes = chunk_bytes
        self.generation = 0
        self.sent_bytes = self.sent_messages = 0
        self.received_bytes = self.received_messages = 0

    def run_id(self):
        return pb.RunId(run=self.run.name, generation=self.generation)

    def register(self):
        slices = [types.ParameterSlices(parameter=name, boxes=boxes)
                  for name, boxes in self.slices.items()]
        reply = self.stub.Register(
            pb.RegisterRequest(run=self.run, rank=self.rank, session=self.session, slices=slices,
                               client="foreign_trainer.py"), timeout=CALL_SECONDS)
        self.generation = reply.position.generation
        return reply

    def chunks(self, tensors):
        """Cuts the rank's slices of `tensors`, {name: array}, into chunks."""
        for name, tensor in tensors.items():
            assert tensor.shape == self.shapes[name], f"{name}: {tensor.shape}"
            for index, box in enumerate(self.slices.get(name, ())):
                place = tuple(slice(o, o + s) for o, s in zip(box.offset, box.size))
                flat = np.ascontiguousarray(tensor[place]).reshape(-1)
                count = max(self.chunk_bytes // flat.itemsize, 1)
                for first in range(0, flat.size, count):
                    data = flat[first:first + count].tobytes()
                    self.sent_bytes += len(data)
                    self.sent_messages += 1
                    yield pb.Chunk(parameter=name, slice=index, dtype=DTYPES[flat.dtype],
                                   offset=first, crc32c=crc32c(data), data=data)

    def initialize(self, values):
        requests = (pb.InitializeRequest(id=self.run_id(), rank=self.rank, chunk=chunk)
                    for chunk in self.chunks(values))
        return self.stub.Initialize(requests, timeout=CALL_SECONDS)

    def begin(self, step, loss_scale=1.0, muon=None, adamw=None):
        return self.stub.Begin(
            pb.BeginRequest(id=self.run_id(), rank=self.rank, step=step, loss_scale=loss_scale,
                            muon=muon or {}, adamw=adamw or {}), timeout=CALL_SECONDS)

    def push_requests(self, step, gradients):
        for chunk in self.chunks(gradients):
            yield pb.PushRequest(id=self.run_id(), rank=self.rank, step=step, chunk=chunk)

    def push(self, step, gradients):
        return self.stub.Push(self.push_requests(step, gradients), timeout=CALL_SECONDS)

    def finish_request(self, step, absent=(), wait_ms=0):
        return pb.FinishRequest(id=self.run_id(), rank=self.rank, step=step, absent=absent,
                                wait_ms=wait_ms)

    def finish(self, step, absent=(), wait_ms=0):
        return self.stub.Finish(self.finish_request(step, absent, wait_ms),
                                timeout=CALL_SECONDS).outcome

    def step(self, step, gradients, **begin):
        """Begin, Push and Finish; the outcome."""
        self.begin(step, **begin)
        self.push(step, gradients)
        return self.finish(step)

    def skip(self, step, cause=types.SKIP_CAUSE_TRAINER, loss_scale=0.0):
        return self.stub.Skip(
            pb.SkipRequest(id=self.run_id(), rank=self.rank, step=step, cause=cause,
                           loss_scale=loss_scale), timeout=CALL_SECONDS).outcome

    def pull(self, version, master=False, chunk_bytes=0):
        """{name: array}; NaN where the rank holds nothing."""
        tensors = {}
        expected = {}
        replies = self.stub.Pull(
            pb.PullRequest(id=self.run_id(), rank=self.rank, version=version, master=master,
                           chunk_bytes=chunk_bytes), timeout=CALL_SECONDS)
        for reply in replies:
            chunk = reply.chunk
            key = (chunk.parameter, chunk.slice)
            assert reply.version == version, f"version {reply.version} within {version}"
            assert crc32c(chunk.data) == chunk.crc32c, f"{key}: wrong crc32c"
            assert chunk.offset == expected.get(key, 0), f"{key}: a hole at {chunk.offset}"
            values = np.frombuffer(chunk.data, NUMPY_OF[chunk.dtype])
            expected[key] = chunk.offset + values.size
            self.received_bytes += len(chunk.data)
            self.received_messages += 1
            tensor = tensors.setdefault(
                chunk.parameter, np.full(self.shapes[chunk.parameter], np.nan, values.dtype))
            box = self.slices[chunk.parameter][chunk.slice]
            place = tuple(slice(o, o + s) for o, s in zip(box.offset, box.size))
            part = np.array(tensor[place]).reshape(-1)
            part[chunk.offset:chunk.offset + values.size] = values
            tensor[place] = part.reshape(tensor[place].shape)
        return tensors

    def status(self):
        return self.stub.Status(pb.StatusRequest(run=self.run.name), timeout=CALL_SECONDS).runs[0]

    def describe(self, *names):
        reply = self.stub.DescribeParameters(
            pb.DescribeParametersRequest(run=self.run.name, names=names), timeout=CALL_SECONDS)
        return {state.parameter.name: state for state in reply.parameters}

    def digest(self, per_parameter=False):
        return self.stub.Digest(
            pb.DigestRequest(run=self.run.name, per_parameter=per_parameter), timeout=CALL_SECONDS)

    def close(self):
        reply = self.stub.Close(pb.CloseRequest(id=self.run_id(), rank=self.rank),
                                timeout=CALL_SECONDS)
        self.channel.close()
        return reply
