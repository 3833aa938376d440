"""What the service is told of parameters and their groups: at registration, and at each step."""

import dataclasses

import torch

from muond import errors
from muond.torch import layout as layouts
from muond.torch import routing, staging

SHAPE_FACTORS = {None: "ORIGINAL", "original": "ORIGINAL", "match_rms_adamw": "MATCH_RMS_ADAMW",
                 "spectral_unclamped": "UNIT_RMS"}
# What the service keeps Muon's momentum in, and the contract's name; None: its default.
MOMENTUM_DTYPES = {"f32": None, torch.float32: None,
                   "bf16": "DTYPE_BF16", torch.bfloat16: "DTYPE_BF16"}
_SIMPLE = ((3.4445, -4.7750, 2.0315), 5)


@dataclasses.dataclass
class Entry:
    """One parameter of the run."""

    name: str
    parameter: torch.Tensor
    group: str
    route: routing.Route
    layout: layouts.Layout
    written: int = -1  # version counter of its tensor after our last write


def group_name(index):
    return f"group{index}"


def fixed_terms(index, group):
    """What the service fixes for a group when the run opens: the JSON of a Group."""
    if group["algorithm"] == routing.ADAMW:
        return {"name": group_name(index), "algorithm": "ALGORITHM_ADAMW"}
    spec = {"name": group_name(index), "algorithm": "ALGORITHM_MUON",
            "plainMomentum": not group["nesterov"], "normFloor": float(group["eps"]),
            "shapeFactor": f"SHAPE_FACTOR_{SHAPE_FACTORS[group['adjust_lr_fn']]}"}
    if kept := MOMENTUM_DTYPES[group.get("momentum_dtype", "f32")]:
        spec["momentumDtype"] = kept
    coefficients, steps = group["ns_coefficients"], int(group["ns_steps"])
    if isinstance(coefficients, str):
        return {**spec, "coefficients": coefficients}
    if (tuple(coefficients), steps) == _SIMPLE:
        return {**spec, "coefficients": "simple"}
    return {**spec, "coefficients": "custom", "customSteps": [*map(float, coefficients)] * steps}


def described(groups, entries):
    """(groups, parameters, slices) of these entries, the JSON of a registration. Groups without
    what each step tells anew: it would keep a program that starts again from its run."""
    used = {entry.group for entry in entries}
    parameters = [{
        "name": entry.name, "shape": {"dims": list(entry.layout.shape)},
        "allowEmpty": 0 in entry.layout.shape, "group": entry.group,
        "dtype": staging.DTYPES[entry.parameter.dtype],
        "kind": f"KIND_{entry.route.kind.upper()}", "role": f"ROLE_{entry.route.role.upper()}",
        "exclude": entry.route.algorithm == routing.ADAMW,
        "replicated": entry.layout.replicated} for entry in entries]
    slices = [{"parameter": entry.name, "boxes": [{
        "offset": list(entry.layout.box[0]), "size": list(entry.layout.box[1]),
        "flat": entry.layout.flat}]} for entry in entries if entry.layout.box]
    specs = [fixed_terms(i, group) for i, group in enumerate(groups) if group_name(i) in used]
    return specs, parameters, slices


def step_terms(groups, entries):
    """The hyperparameters of a step as the entries' groups have them now: the JSON of a
    BeginRequest."""
    terms, used = {"muon": {}, "adamw": {}}, {entry.group for entry in entries}
    for index, group in enumerate(groups):
        if group_name(index) not in used:
            continue
        values = {"lr": float(group["lr"]), "weightDecay": float(group["weight_decay"])}
        if group["algorithm"] == routing.MUON:
            values["momentum"] = float(group["momentum"])
        else:
            beta1, beta2 = group["betas"]
            values.update(beta1=float(beta1), beta2=float(beta2), eps=float(group["eps"]))
        terms[group["algorithm"]][group_name(index)] = values
    return terms


def checked(entries, added):
    """The added, if they can be beside these: RegistrationError else."""
    names = {entry.name for entry in entries}
    places = {layouts.local(entry.parameter).data_ptr(): entry.name
              for entry in entries if entry.layout.elements}
    for entry in added:
        if entry.name in names:
            raise errors.RegistrationError(
                f'parameter "{entry.name}": the run has one of that name',
                hint="name the new ones: add_param_group({\"params\": [(name, parameter), ...]})")
        place = layouts.local(entry.parameter).data_ptr() if entry.layout.elements else None
        if place in places:
            raise errors.RegistrationError(
                f'parameter "{entry.name}": it is tied to "{places[place]}", whose memory it '
                "shares: that one takes its steps",
                hint="leave it away: a tied tensor is one parameter")
        names.add(entry.name)
        if place is not None:
            places[place] = entry.name
    return added
