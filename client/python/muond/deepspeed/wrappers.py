"""Where DeepSpeed's optimizer wrappers keep master weights and gradients, and which elements of
which layer those are.

Each wrapper replaces the optimizer's parameters by float32 tensors of its own: one flat tensor per
group (ZeRO 1 and 2, BF16_Optimizer), one per sub-group (ZeRO 3), or one per parameter (stage 0 with
fp16 or bf16). Flat tensors end in padding, whose values nobody promises anything about; no Part
covers any of it.
"""

import dataclasses

import torch

from muond import errors
from muond.torch import layout as layouts


@dataclasses.dataclass(frozen=True)
class Part:
    """This rank's elements of one parameter."""

    parameter: torch.nn.Parameter  # of the model
    group: int    # in param_groups
    flat: int     # index in flats()
    start: int    # in the flat tensor
    count: int    # may be 0
    offset: int   # in the flattened parameter
    shape: tuple  # the layer's
    whole: bool = False  # the "flat" tensor is the whole parameter, in its shape


class _Wrapper:
    """What is common: `wrapper` is the engine's optimizer."""

    stage = ""

    def __init__(self, wrapper):
        self.wrapper = wrapper

    def scale(self):
        """What the loss was multiplied by, for gradients that have not been used yet."""
        wrapper = self.wrapper
        if getattr(wrapper, "custom_loss_scaler", False):
            return float(wrapper.external_loss_scale)
        config = getattr(wrapper, "loss_scale_config", None)
        if config is not None:
            return float(config.cur_scale) if config.use_grad_scaling else 1.0
        return float(getattr(wrapper, "loss_scale", 1.0))

    def flats(self):
        raise NotImplementedError

    def parts(self):
        raise NotImplementedError

    def _waiting(self, flat):
        """A flat tensor's gradient while it is not in `.grad` yet, as one tensor."""
        raise errors.RunStateError(f"DeepSpeed {self.stage}: flat tensor {flat} has no gradient")

    def gradients(self, parts):
        """Each part's gradient, still multiplied by scale()."""
        flats, found = self.flats(), {}
        for part in parts:
            if part.flat not in found:
                gradient = flats[part.flat].grad
                found[part.flat] = self._waiting(part.flat) if gradient is None else gradient
        return [found[part.flat] if part.whole else
                found[part.flat].view(-1).narrow(0, part.start, part.count) for part in parts]


class _Zero3(_Wrapper):
    """Every parameter is cut in as many equal parts as there are ranks, the last ones padded; a
    sub-group's flat tensor has this rank's parts one after the other."""

    stage = "ZeRO stage 3"

    def flats(self):
        return self.wrapper.fp32_partitioned_groups_flat

    def parts(self):
        for flat, parameters in enumerate(self.wrapper.fp16_groups):
            start = 0
            for parameter in parameters:
                group = parameter.ds_process_group
                _check_ranks(self.stage, group)
                size = int(parameter.ds_tensor.ds_numel)
                offset = min(torch.distributed.get_rank(group) * size, int(parameter.ds_numel))
                count = min(size, int(parameter.ds_numel) - offset)
                yield Part(parameter, self.wrapper.sub_group_to_group_id[flat], flat, start, count,
                           offset, tuple(map(int, parameter.ds_shape)))
                start += size

    def _waiting(self, flat):
        return torch.cat([part.reshape(-1) for part in self.wrapper.averaged_gradients[flat]])


class _Mapped(_Wrapper):
    """Groups are concatenated, padded, and cut in as many parts as there are ranks;
    `_hp_mapping` says what of a parameter came into this rank's."""

    def groups(self):
        raise NotImplementedError

    def parts(self):
        for group in self.wrapper.real_dp_process_group:
            _check_ranks(self.stage, group)
        for index, parameters in enumerate(self.groups()):
            for parameter in parameters:
                shape, mapping = tuple(parameter.shape), parameter._hp_mapping
                if mapping is None:
                    yield Part(parameter, index, index, 0, 0, 0, shape)
                    continue
                here, there = mapping.hp_fragment_address, mapping.lp_fragment_address
                yield Part(parameter, index, index, int(here.start), int(here.numel),
                           int(there.start), shape)


class _Zero12(_Mapped):
    """`_hp_mapping` counts in the group's own order; where gradients go round robin, the flat
    tensor has another, and its offsets are taken instead."""

    stage = "ZeRO stages 1 and 2"

    def parts(self):
        wrapper = self.wrapper
        if not getattr(wrapper, "round_robin_gradients", False):
            yield from super().parts()
            return
        for index, parameters in enumerate(wrapper.round_robin_bit16_groups):
            group = wrapper.real_dp_process_group[index]
            _check_ranks(self.stage, group)
            size = self.flats()[index].numel()
            first, at = torch.distributed.get_rank(group) * size, 0
            paddings = getattr(wrapper, "round_robin_bit16_padding", None)
            paddings = paddings[index] if paddings else [0] * len(parameters)
            for parameter, padding in zip(parameters, paddings):
                begin = min(max(at, first), at + parameter.numel())
                end = max(begin, min(at + parameter.numel(), first + size))
                start = begin - first if end > begin else 0
                yield Part(parameter, index, index, start, end - begin, begin - at,
                           tuple(parameter.shape))
                at += parameter.numel() + padding

    def flats(self):
        return self.wrapper.single_partition_of_fp32_groups

    def groups(self):
        return self.wrapper.bit16_groups

    def _waiting(self, flat):
        whole = getattr(self.wrapper.averaged_gradients[flat], "flat_partition", None)
        if whole is not None:
            return whole
        return torch.cat([part.reshape(-1) for part in self.wrapper.averaged_gradients[flat]])


class _Bf16(_Mapped):
    stage = "BF16_Optimizer"

    def flats(self):
        return self.wrapper.fp32_groups_flat_partition

    def groups(self):
        return self.wrapper.bf16_groups


class _Unfused(_Wrapper):
    """A float32 copy of each parameter, the same on all ranks."""

    stage = "stage 0"

    def flats(self):
        return [tensor for group in self.wrapper.fp32_groups for tensor in group]

    def parts(self):
        flat = 0
        for index, parameters in enumerate(self.wrapper.fp16_groups):
            for parameter in parameters:
                yield Part(parameter, index, flat, 0, parameter.numel(), 0,
                           tuple(parameter.shape), whole=True)
                flat += 1


# By the names of classes: asking DeepSpeed itself would import it, and its versions move files.
_KINDS = {"DeepSpeedZeroOptimizer_Stage3": _Zero3, "DeepSpeedZeroOptimizer": _Zero12,
          "BF16_Optimizer": _Bf16, "FP16_UnfusedOptimizer": _Unfused}


def _check_ranks(what, group):
    ranks = layouts.world()[1]
    if torch.distributed.get_world_size(group) != ranks:
        raise errors.ShapeMismatch(
            f"DeepSpeed {what}: a parameter is partitioned over "
            f"{torch.distributed.get_world_size(group)} of {ranks} ranks: whose part is whose "
            "across model, pipeline or expert parallel ranks is not known",
            hint="data parallelism over all ranks is supported")


def _refused(engine):
    """Why this engine can't be served, or None."""
    wrapper = engine.optimizer
    if getattr(engine, "has_moe_layers", False):
        return "layers of experts that are spread over ranks"
    if getattr(engine, "pipeline_parallelism", False):
        return "a pipeline of stages"
    if getattr(wrapper, "zenflow", False):
        return "ZenFlow, which updates a part of the parameters on its own"
    if getattr(wrapper, "swap_optimizer", False):
        return "master weights that are swapped to NVMe"
    if getattr(wrapper, "torch_autocast_gradscaler", None) is not None:
        return "torch_autocast with float16, whose GradScaler steps each flat tensor apart"
    return None


def of(engine):
    """The wrapper's description; None where the engine has none and steps the optimizer itself."""
    reason = _refused(engine)
    wrapper = engine.optimizer
    if reason is None and wrapper is engine.basic_optimizer:
        return None
    kind = _KINDS.get(type(wrapper).__name__)
    if reason or kind is None:
        reason = reason or f"the wrapper {type(wrapper).__name__}"
        raise errors.RegistrationError(
            f"bind_deepspeed: {reason} is not supported: which elements of which layer its "
            "tensors hold is not known",
            hint="ZeRO stages 0 to 3 with fp32, fp16 or bf16 are supported, optimizer and "
            "parameters on the device or in host memory")
    return kind(wrapper)
