"""Host memory for what a tensor sends and gets.

The interface takes host memory. A contiguous CPU tensor's own memory is read in place; every other
one is copied into a buffer first, a pinned one for a device's tensors. Parameters always arrive in
buffers and are copied when all of them are there: a pull that breaks off changes no parameter.
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


class HostBuffers:
    """Buffers by name, kept from step to step."""

    def __init__(self):
        self._buffers = {}
        self.staged = set()  # names of the tensors whose gradients take a copy, for reports

    def _buffer(self, key, like):
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != like.shape or buffer.dtype != like.dtype:
            pin = like.device.type == "cuda"
            buffer = torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=pin)
            self._buffers[key] = buffer
        return buffer

    def outgoing(self, name, tensor):
        """The tensor's elements in host memory, row-major. After a device's tensors: settle()."""
        tensor = tensor.detach()
        if tensor.is_sparse:
            raise RuntimeError(f'parameter "{name}": Muon does not support sparse gradients')
        if tensor.device.type == "cpu" and tensor.is_contiguous():
            return tensor
        self.staged.add(name)
        buffer = self._buffer(("out", name), tensor)
        buffer.copy_(tensor, non_blocking=True)
        return buffer

    def copy(self, key, tensor):
        """A copy that later changes of the tensor leave alone; a device's: after settle()."""
        buffer = self._buffer(key, tensor)
        buffer.copy_(tensor.detach(), non_blocking=True)
        return buffer

    def incoming(self, name, tensor):
        """A buffer with the tensor's shape and dtype."""
        return self._buffer(("in", name), tensor)

    @staticmethod
    def settle(tensors):
        """Waits until the copies from these tensors' devices are done."""
        for device in {tensor.device for tensor in tensors if tensor.device.type == "cuda"}:
            torch.cuda.current_stream(device).synchronize()


def slice_of(name, buffer):
    """The whole buffer as the one slice that this rank has of a parameter."""
    return sessions.Slice(name, buffer.data_ptr(), buffer.numel(), DTYPES[buffer.dtype])
