"""The memory of what a tensor sends and gets.

The interface takes memory of the host and of CUDA devices. A contiguous tensor's own memory is
read in place; every other one is copied into a buffer first, on its device, or in the host's memory
where the interface does not know the device. A device's parameters arrive in place, behind what is
queued on its current stream. A CPU's arrive in buffers and are copied when all of them are there: a
pull that breaks off changes none of them.
"""

import torch

from muond import errors
from muond import session as sessions

DTYPES = {torch.float32: sessions.F32, torch.bfloat16: sessions.BF16,
          torch.float16: sessions.F16}


def check(name, parameter):
    """What the service can't hold is refused before anything is sent."""
    if torch.is_complex(parameter):
        raise RuntimeError(f'parameter "{name}": Muon does not support complex parameters')
    if parameter.dtype not in DTYPES:
        raise errors.RegistrationError(
            f'parameter "{name}": dtype: {parameter.dtype} is not supported',
            hint="float32, bfloat16 and float16 are; master weights are float32 in any case")


def reachable(tensor):
    """Whether the interface takes memory of the tensor's device."""
    return tensor.device.type == "cpu" or (
        tensor.device.type == "cuda" and torch.version.cuda is not None)


class Buffers:
    """By name, kept from step to step."""

    def __init__(self):
        self._buffers = {}
        self.staged = set()  # names of the tensors whose gradients take a copy, for reports

    def _buffer(self, key, like):
        buffer = self._buffers.get(key)
        device = like.device if reachable(like) else torch.device("cpu")
        if (buffer is None or buffer.shape != like.shape or buffer.dtype != like.dtype
                or buffer.device != device):
            buffer = torch.empty(like.shape, dtype=like.dtype, device=device,
                                 pin_memory=device != like.device and like.device.type == "cuda")
            self._buffers[key] = buffer
        return buffer

    def outgoing(self, name, tensor):
        """The tensor's elements where the interface can read them, row-major. Then settle()."""
        tensor = tensor.detach()
        if tensor.is_sparse:
            raise RuntimeError(f'parameter "{name}": Muon does not support sparse gradients')
        if reachable(tensor) and tensor.is_contiguous():
            return tensor
        self.staged.add(name)
        buffer = self._buffer(("out", name), tensor)
        buffer.copy_(tensor, non_blocking=True)
        return buffer

    def copy(self, key, tensor):
        """A copy that later changes of the tensor leave alone."""
        buffer = self._buffer(key, tensor)
        buffer.copy_(tensor.detach(), non_blocking=True)
        return buffer

    def incoming(self, name, tensor):
        """Where the tensor's new elements may be put: itself, or a buffer like it."""
        if tensor.device.type == "cuda" and reachable(tensor) and tensor.is_contiguous():
            return tensor.detach()
        return self._buffer(("in", name), tensor)

    @staticmethod
    def settle(tensors):
        """Waits until the copies between the host and these tensors' devices are done."""
        for device in {tensor.device for tensor in tensors if not reachable(tensor)}:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
            else:
                torch.accelerator.synchronize(device)


def slices_of(named, streams=None):
    """The whole buffers as the one slice that this rank has of each parameter. named: (name,
    buffer). A device's: on its current stream, or by `streams`, a dictionary of devices."""
    streams = {} if streams is None else streams
    slices = []
    for name, buffer in named:
        place = {}
        if buffer.device.type == "cuda":
            if buffer.device not in streams:
                streams[buffer.device] = torch.cuda.current_stream(buffer.device)
            place = {"memory": sessions.CUDA, "device": buffer.device.index,
                     "stream": streams[buffer.device].cuda_stream}
        slices.append(sessions.Slice(name, buffer.data_ptr(), buffer.numel(),
                                     DTYPES[buffer.dtype], **place))
    return slices


def differing(pairs):
    """Names of those whose two tensors, of one device each, don't hold the same bytes; NaN equals
    itself. pairs: (name, one, other). Waits once, not for each."""
    names, equal = [], []
    for name, one, other in pairs:
        if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
            names.append(name)
            continue
        one, other = (tensor.contiguous().reshape(-1).view(torch.uint8)
                      for tensor in (one, other))
        equal.append((name, (one == other).all() if one.is_cuda else torch.equal(one, other)))
    on_device = [flag for _, flag in equal if isinstance(flag, torch.Tensor)]
    told = iter(torch.stack([flag.to(on_device[0].device) for flag in on_device]).tolist()
                if on_device else ())
    return names + [name for name, flag in equal
                    if not (next(told) if isinstance(flag, torch.Tensor) else flag)]
