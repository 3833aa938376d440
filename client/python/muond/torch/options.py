"""The optimizer's arguments, checked as torch.optim checks its own."""

import os

import torch

from muond.torch.registration import MOMENTUM_DTYPES, SHAPE_FACTORS

_CHOICES = {
    "amp_scaling": ("trainer", "daemon"),
    "gradients": ("reduced", "local"),
    "clip_policy": ("adamw_only", "all"),
    "on_lost_state": ("raise", "restore", "fresh"),
    "on_rollback": ("raise", "continue"),
    "at_exit": ("close", "keep"),
}
_DEFAULTS = {
    "endpoint": None, "run": None, "session": None, "local": False, "backend": "cpu", "threads": 0,
    "loss_scale": None, "grad_scaler": None, "async_push": False, "max_grad_norm": 0.0,
    "transport": "auto", "call_timeout": 30.0, "step_timeout": 120.0, "bulk_timeout": 300.0,
    "recovery_timeout": 120.0, "checkpoint_dir": "", "checkpoint_every_steps": 0,
    **{name: values[0] for name, values in _CHOICES.items()},
}


def check_flags(**flags):
    """torch.optim's switches between implementations: the service is its own."""
    for name, value in flags.items():
        if value:
            raise RuntimeError(f"{name}=True is not supported: the service takes the step")


def check_values(group):
    """ValueError for a hyperparameter out of range, with torch.optim.Muon's words."""
    lr = group["lr"]
    if isinstance(lr, torch.Tensor) and lr.numel() != 1:
        raise ValueError("Tensor lr must be 1-element")
    if not 0.0 <= lr:
        raise ValueError(f"Learning rate should be >= 0 but is: {lr}")
    if not 0.0 <= group["momentum"] < 1.0:
        raise ValueError(f"momentum should be >= 0 and < 1 but is: {group['momentum']}")
    if not 0.0 <= group["weight_decay"]:
        raise ValueError(f"weight decay should be >= 0 but is: {group['weight_decay']}")
    if group["adjust_lr_fn"] not in SHAPE_FACTORS:
        raise ValueError(
            f"Adjust learning rate function {group['adjust_lr_fn']} is not supported")
    if group.get("momentum_dtype", "f32") not in MOMENTUM_DTYPES:
        raise ValueError(f"momentum_dtype should be f32 or bf16 but is: {group['momentum_dtype']}")
    if not 0 < group["ns_steps"] < 100:
        raise ValueError("Number of steps must be less than 100 for computational efficiency")
    coefficients = group["ns_coefficients"]
    if not isinstance(coefficients, str) and len(coefficients) != 3:
        raise ValueError("Coefficients must be a tuple of exactly 3 values")
    for beta in group.get("betas", ()):
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"betas should be >= 0 and < 1 but are: {group['betas']}")


def _loss_scale(value):
    """As the contract's LossScale, in JSON."""
    if value is None:
        return {"mode": "MODE_EXTERNAL"}
    if value == "dynamic":
        return {"mode": "MODE_DYNAMIC"}
    if isinstance(value, dict):
        return {"mode": "MODE_DYNAMIC", **value}
    if isinstance(value, (int, float)) and value > 0:
        return {"mode": "MODE_STATIC", "initial": float(value)}
    raise ValueError('loss_scale: expected None, "dynamic", a positive number or a dictionary, '
                     f"got {value!r}")


def parse_options(given):
    """(options, GradScaler or None) from the constructor's further keywords."""
    if unknown := set(given) - set(_DEFAULTS):
        raise TypeError(f"Muon: unknown arguments {sorted(unknown)}")
    options = {**_DEFAULTS, **given}
    for name, choices in _CHOICES.items():
        if options[name] not in choices:
            raise ValueError(f"{name}: expected one of {choices}, got {options[name]!r}")
    for name in ("checkpoint_dir", "checkpoint_every_steps"):
        if options[name] and not options["local"]:
            raise ValueError(f"{name}: only local=True takes it, a daemon has its own")
    options["checkpoint_dir"] = os.fspath(options["checkpoint_dir"])
    options["loss_scale"] = _loss_scale(options["loss_scale"])
    return options, options.pop("grad_scaler")
