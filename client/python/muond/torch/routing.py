"""Which algorithm each parameter gets, and why: decided by names and logical shapes, before
anything is sent. The service decides again at registration; both must agree.

First match wins: the `route` function of the caller; the parameter's attribute `use_muon`; its
group's `use_muon` or `algorithm`; a frozen or odd shape; what the parameter's module is (where the
model itself was given); its name; else Muon for what has a matrix.
"""

import dataclasses
import re

import torch

from muond import errors

MUON, ADAMW = "muon", "adamw"

# A component of the name, "." between them, that says what its matrix does. Deliberately few: what
# they miss, route= or the model itself (its nn.Embedding modules) tell.
_NAMED = (
    (re.compile(r"embed|^wte$|^wpe$", re.I), "embedding"),
    (re.compile(r"^lm_head$|^unembed", re.I), "lm_head"),
    (re.compile(r"^router$", re.I), "other"),
)
KINDS = ("matrix", "experts", "conv", "vector", "scalar")


@dataclasses.dataclass(frozen=True)
class Route:
    """What `route` may return for a parameter: `algorithm` "muon" or "adamw"; `kind` where the
    shape does not say it (a 3-D tensor: "experts" or "conv"); `role` for reports."""

    algorithm: str
    kind: str = ""
    role: str = ""
    reason: str = ""

    def __post_init__(self):
        if self.algorithm not in (MUON, ADAMW):
            raise ValueError(f'route: algorithm: expected "muon" or "adamw", got '
                             f"{self.algorithm!r}")
        if self.kind and self.kind not in KINDS:
            raise ValueError(f"route: kind: expected one of {KINDS}, got {self.kind!r}")


def logical_shape(name, parameter):
    """The layer's shape, never a shard's: ShapeMismatch where only a placeholder is there."""
    declared = getattr(parameter, "muond_shape", None) or getattr(parameter, "ds_shape", None)
    if declared is not None:
        return tuple(int(size) for size in declared)
    shape = tuple(parameter.shape)  # of a DTensor the global one
    if shape == (0,):
        raise errors.ShapeMismatch(
            f'parameter "{name}": shape: (0,) is the placeholder of a partitioned parameter, and '
            "its layer's shape is not known: routing by it would leave Muon silently inactive")
    if type(parameter).__name__ == "FlatParameter":
        raise errors.ShapeMismatch(
            f'parameter "{name}": shape: a FlatParameter of FSDP1 holds many layers in one row',
            hint="use FSDP2, torch.distributed.fsdp.fully_shard")
    return shape


def _kind(name, shape, wanted):
    """How the shape is seen: `wanted` or what its rank says."""
    if wanted:
        return wanted
    if len(shape) < 3:
        return ("scalar", "vector", "matrix")[len(shape)]
    if len(shape) == 3:
        raise errors.ShapeMismatch(
            f'parameter "{name}": shape {list(shape)}: three dimensions are a stack of matrices or '
            "a convolution's kernel, and nothing says which; Muon only supports 2D parameters "
            "without being told",
            hint='set parameter.muond_kind = "experts" or "conv", or return muond.torch.Route(...) '
                 "from route=")
    return "conv"


def _matrix(shape, kind):
    """rows, cols that Newton-Schulz would see."""
    if kind == "experts":
        return shape[-2:]
    cols = 1
    for size in shape[1:]:
        cols *= size
    return shape[0], cols


def _by_hand(name, parameter, group, route):
    """What the caller said of this parameter; None: nothing."""
    said = route(name, parameter) if route is not None else None
    if isinstance(said, str):
        said = Route(said, reason="route says so")
    if said is not None:
        return dataclasses.replace(said, reason=said.reason or "route says so")
    if getattr(parameter, "use_muon", None) is not None:
        return Route(MUON if parameter.use_muon else ADAMW, reason="its attribute use_muon")
    if group.get("use_muon") is not None:
        return Route(MUON if group["use_muon"] else ADAMW, reason="its group's use_muon")
    if group.get("algorithm") in (MUON, ADAMW):
        return Route(group["algorithm"], reason="its group's algorithm")
    return None


def decide(name, parameter, *, named=True, embedding=False, group=None, route=None):
    """The Route of one parameter, its kind and reason filled in. `embedding`: an nn.Embedding holds
    it. `named`: the name was given by the caller, not made up."""
    shape = logical_shape(name, parameter)
    said = _by_hand(name, parameter, group or {}, route)
    kind = _kind(name, shape, (said.kind if said else "") or
                 getattr(parameter, "muond_kind", ""))
    if said is not None:
        if said.algorithm == MUON and kind in ("vector", "scalar"):
            raise errors.ShapeMismatch(
                f'parameter "{name}": shape {list(shape)}: Muon only supports 2D parameters, and '
                f"this was asked for: {said.reason}")
        role = said.role or ("hidden" if said.algorithm == MUON else "other")
        return dataclasses.replace(said, kind=kind, role=role)
    if kind in ("vector", "scalar"):
        return Route(ADAMW, kind, "other", f"a {kind}")
    rows, cols = _matrix(shape, kind)
    if rows == 1 or cols == 1:
        return Route(ADAMW, kind, "other", f"{rows} x {cols} is no proper matrix")
    if 0 in shape:
        return Route(ADAMW, kind, "other", "it has no elements")
    if embedding:
        return Route(ADAMW, kind, "embedding", "the weight of an nn.Embedding")
    for part in name.split(".") if named else ():
        for pattern, role in _NAMED:
            if pattern.search(part):
                return Route(ADAMW, kind, role, f'"{part}" in its name')
    unknown = "" if named else ", no name was given that says otherwise"
    return Route(MUON, kind, "hidden", f"hidden {kind}{unknown}")


def check_whole(groups, routes):
    """RegistrationError where flat tensors took the places of the parameters that were given: what
    they hold is not known, and to take them as they are would leave Muon silently inactive."""
    given = [part for part in routes if part]
    groups = [group for group in groups if group["params"]]
    what = ""
    if len(groups) != len(given):
        what = f"step: {len(groups)} parameter groups are left of {len(given)}"
    for index, (group, part) in enumerate(zip(groups, given)):
        flat = [tuple(parameter.shape) for parameter, route in zip(group["params"], part)
                if route.kind in ("matrix", "experts", "conv")
                and len(logical_shape(f"param_groups[{index}]", parameter)) < 2]
        if len(group["params"]) != len(part):
            what = what or (f"param_groups[{index}]: {len(group['params'])} tensors are left of "
                            f"{len(part)} parameters")
        elif flat:
            what = what or f"param_groups[{index}]: a flat tensor {list(flat[0])} for a matrix"
    if what:
        raise errors.RegistrationError(
            f"{what}: an engine has flattened them, and which elements of which layer they hold is "
            "not known", hint="under DeepSpeed: muond.deepspeed.bind_deepspeed(engine), right "
            "after deepspeed.initialize")


def embeddings_of(model):
    """ids of the weights that nn.Embedding modules of a model hold."""
    return {id(module.weight) for module in model.modules()
            if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag))}
