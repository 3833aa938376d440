"""Which part of each parameter this rank sends, and how all ranks get it back.

A box is (offset, size) per dimension of the logical tensor. What a DTensor shards is tiled by the
ranks' boxes. What all ranks hold whole (plain tensors under DDP, replicated DTensors) one rank
sends, and every rank pulls. Of replicas of shards (HSDP) one sends and pulls, and the others get
the result from it over their process group.
"""

import dataclasses
import math

import torch
import torch.distributed as dist

from muond import errors

try:
    from torch.distributed.tensor import DTensor
except ImportError:  # a torch built without distributed
    class DTensor:  # noqa: D101 - nothing is an instance of it
        pass


@dataclasses.dataclass(frozen=True)
class Layout:
    """Of one parameter on one rank."""

    shape: tuple             # logical
    box: tuple | None        # (offset, size) this rank sends and pulls; None: it holds nothing
    flat: bool = False       # the box is a range of the flattened tensor
    replicated: bool = False  # all ranks hold all of it
    sends: bool = True       # of a replicated one: this rank pushes its gradient
    copies: tuple = ()       # (process group, source rank in it) to broadcast through, in order

    @property
    def elements(self):
        return math.prod(self.box[1]) if self.box else 0


def local(tensor):
    """The elements that this rank holds."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def local_gradient(parameter):
    """The gradient's elements that belong to the parameter's, None when there is none. One that
    lies elsewhere, or has another dtype, is the parameter's `muond_grad`."""
    gradient = getattr(parameter, "muond_grad", None)
    gradient = parameter.grad if gradient is None else gradient
    if not isinstance(gradient, DTensor) or not isinstance(parameter, DTensor):
        return gradient
    if gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    return gradient.to_local()


def world():
    """(rank, ranks) of the default process group; (0, 1) without one."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def chunk(start, length, parts, index):
    """torch.chunk's rule: part `index` of [start, start + length)."""
    size = -(-length // parts)
    first = min(index * size, length)
    return start + first, min(size, length - first)


def shard_box(shape, placements, mesh_shape, coordinate):
    """(offset, size) of the shard at a mesh coordinate.

    Several mesh dimensions may cut one tensor dimension. They cut from left to right, except that a
    strided shard (FSDP around tensor parallelism) cuts what the later ones have left.
    """
    offset, size = [0] * len(shape), list(shape)
    sharded = [(type(placement).__name__ == "_StridedShard", mesh_dim)
               for mesh_dim, placement in enumerate(placements) if hasattr(placement, "dim")]
    for _, mesh_dim in sorted(sharded):
        dim = placements[mesh_dim].dim % len(shape)
        offset[dim], size[dim] = chunk(offset[dim], size[dim], mesh_shape[mesh_dim],
                                       coordinate[mesh_dim])
    return tuple(offset), tuple(size)


def _of_dtensor(name, parameter, index):
    mesh, placements = parameter.device_mesh, parameter.placements
    coordinate = mesh.get_coordinate()
    if coordinate is None or mesh.size() != world()[1]:
        raise errors.ShapeMismatch(
            f'parameter "{name}": mesh of {mesh.size()} ranks in a world of {world()[1]}: each '
            "parameter's mesh must span all ranks", hint="pipelines of stages are not supported")
    if any(placement.is_partial() for placement in placements):
        raise errors.ShapeMismatch(f'parameter "{name}": placements {placements}: a partial sum '
                                   "is no parameter", hint="")
    shape = tuple(parameter.shape)
    box = shard_box(shape, placements, mesh.shape, coordinate)
    if box[1] != tuple(local(parameter).shape):
        raise errors.ShapeMismatch(
            f'parameter "{name}": placements {placements} at {coordinate}: expected a shard of '
            f"{list(box[1])}, got {list(local(parameter).shape)}",
            hint="placements like these are not supported")
    replicas = [dim for dim, placement in enumerate(placements) if placement.is_replicate()]
    if len(replicas) == len(placements):
        return None
    # Another replica sends, parameter by parameter, so that all have their part of the work.
    copies = tuple((mesh.get_group(dim), index % mesh.size(dim)) for dim in replicas
                   if mesh.size(dim) > 1)
    first = all(coordinate[dim] == index % mesh.size(dim) for dim in replicas)
    return Layout(shape, box if first and math.prod(box[1]) > 0 else None, copies=copies)


def _declared(name, parameter, shape):
    """A flat range of the logical tensor, by the parameter's muond_offset."""
    offset, count = int(parameter.muond_offset), parameter.numel()
    if offset < 0 or offset + count > math.prod(shape):
        raise errors.ShapeMismatch(
            f'parameter "{name}": elements {offset} to {offset + count} lie outside of shape '
            f"{list(shape)}", hint="muond_offset counts elements of the flattened muond_shape")
    return Layout(shape, ((offset,), (count,)) if count else None, flat=True)


def layouts(names, parameters, shapes, reduced, first=0):
    """A Layout for each parameter. `reduced`: plain gradients are the same on all ranks (DDP), so
    that one rank's is enough; else the service averages them. `first`: how many the run has before
    these, so that they fall to the same replicas whether they are added or there from the start."""
    rank, ranks = world()
    result = []
    load = [0] * ranks  # bytes that each rank sends of what all of them hold
    for index, (name, parameter, shape) in enumerate(zip(names, parameters, shapes), first):
        layout = None
        if isinstance(parameter, DTensor):
            layout = _of_dtensor(name, parameter, index)
        elif getattr(parameter, "muond_offset", None) is not None:
            layout = _declared(name, parameter, shape)
        elif tuple(parameter.shape) != shape:
            raise errors.ShapeMismatch(
                f'parameter "{name}": shape: its layer is {list(shape)}, here are '
                f"{list(parameter.shape)}: which part of it is not known")
        if layout is None:
            sender = load.index(min(load))
            load[sender] += parameter.numel() * parameter.element_size()
            layout = Layout(shape, ((0,) * len(shape), shape), replicated=ranks > 1,
                            sends=not reduced or sender == rank)
        result.append(layout)
    return result


def copy_from_primary(layout, tensor):
    """Gives all replicas of a shard what the one that pulled it has."""
    for group, source in layout.copies:
        dist.broadcast(tensor, group=group, src=dist.get_global_rank(group, source))


def raise_alike(error):
    """Raises this rank's error, or, where it has none, that of the first rank that has one. All
    ranks call it; nothing happens where none has one."""
    mine = None
    if isinstance(error, errors.MuondError):
        mine = type(error), error.message, error.code, error.hint
    elif error is not None:
        mine = errors.MuondError, f"{type(error).__name__}: {error}", None, None
    told = [mine]
    if world()[1] > 1:
        told = [None] * world()[1]
        dist.all_gather_object(told, mine)
    if error is not None:
        raise error
    for rank, parts in enumerate(told):
        if parts is not None:
            kind, message, code, hint = parts
            raise kind(f"rank {rank}: {message}", code=code, hint=hint)


def together(action):
    """What action() returns on this rank; where it fails on one, all ranks raise."""
    result = error = None
    try:
        result = action()
    except Exception as caught:  # whatever it is: the other ranks must not wait for this one
        error = caught
    raise_alike(error)
    return result


def from_first(action):
    """What rank 0 gets from action(), or its MuondError, on every rank."""
    answer = [None]
    if world()[0] == 0:
        try:
            answer = [(action(), None)]
        except errors.MuondError as error:
            answer = [(None, (type(error), error.message, error.code, error.hint))]
    if world()[1] > 1:
        dist.broadcast_object_list(answer, src=0)
    result, error = answer[0]
    if error is not None:
        kind, message, code, hint = error
        raise kind(message, code=code, hint=hint)
    return result
