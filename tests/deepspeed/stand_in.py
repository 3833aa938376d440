"""Has DeepSpeed's own tests of Muon run against ours: imported there, deepspeed.initialize builds a
muond.torch.Muon wherever a configuration asks for DeepSpeed's."""

import copy
import itertools
import os
import sys

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator

import muond.deepspeed
import muond.torch

_numbers = itertools.count()
_original = deepspeed.initialize


def _optimizer(model, wanted):
    values = {"lr": 1e-3, "weight_decay": 0.0, "momentum": 0.95, **wanted}
    lr = values["lr"]
    test = os.environ.get("PYTEST_CURRENT_TEST", "test")
    optimizer = muond.torch.Muon(
        model.named_parameters(), lr=values.get("muon_lr", lr), momentum=values["momentum"],
        weight_decay=values["weight_decay"], local=True, threads=1, require_muon=False,
        adamw={"lr": values.get("adam_lr", lr), "weight_decay": values["weight_decay"]},
        run=f"own-{abs(hash(test)) % 10 ** 6}-{next(_numbers)}")
    for group in optimizer.param_groups:
        group["use_muon"] = group["algorithm"] == "muon"
    return optimizer


def initialize(*arguments, config=None, model=None, model_parameters=None, **options):
    settings = copy.deepcopy(config)
    asked = (settings or {}).get("optimizer", {})
    if not isinstance(settings, dict) or asked.get("type", "").lower() != "muon":
        return _original(*arguments, config=config, model=model,
                         model_parameters=model_parameters, **options)
    del settings["optimizer"]
    settings.update(zero_allow_untested_optimizer=True, zero_force_ds_cpu_optimizer=False)
    result = _original(*arguments, config=settings, model=model,
                       optimizer=_optimizer(model, asked["params"]), **options)
    optimizer = muond.deepspeed.bind_deepspeed(result[0])
    print(f"stand_in: {type(result[0].optimizer).__name__} over {type(optimizer).__module__}",
          file=sys.stderr)
    return result


deepspeed.initialize = initialize
if not torch.cuda.is_available() or get_accelerator().device_name() == "cpu":
    type(get_accelerator()).is_fp16_supported = lambda self: True
