"""The optimizer's parameter groups: one per algorithm, and more of them while the run is open."""

import logging

import torch

from muond import errors
from muond.torch import routing
from muond.torch.options import check_values

logger = logging.getLogger("muond")


class Groups:
    """Mixed into the optimizer."""

    def names(self):
        """The parameters' names, by group; "param.<group>.<place>" where none were given."""
        return [group.get("param_names") or
                [f"param.{i}.{place}" for place in range(len(group["params"]))]
                for i, group in enumerate(self.param_groups)]

    @torch._disable_dynamo
    def add_param_group(self, param_group):
        """Adds a group; one of both kinds of parameters becomes two. Once the run is joined that is
        done by all ranks alike, between two steps, and the parameters go on from their present
        values, with a state of their own. What is refused leaves nothing."""
        given = dict(param_group) if isinstance(param_group, dict) else {}
        super().add_param_group(param_group)
        group = self.param_groups.pop()
        check_values(group)
        parts, before = self._split(group, given), len(self.param_groups)
        self.param_groups += [part for part, _ in parts]
        self._routes += [routes for _, routes in parts]
        if self._binding is not None:
            try:
                self._grow()
            except BaseException:
                del self.param_groups[before:], self._routes[before:]
                raise

    def _grow(self):
        """The run gets the groups that it has not."""
        binding = self._bound()
        if self._engine is not None:
            raise errors.RunStateError("add_param_group: a DeepSpeed engine holds this optimizer's "
                                       "parameters", hint="build the engine with all of them")
        if binding.unpulled is not None:
            self._conclude(self._due, binding.resume)
        if self._early is not None:
            self._early.forget()
        added = binding.add(*self._contents())
        self._touch_state()
        if self._history is not None:
            self._history.grew(self.next_step)
        if self._early is not None:
            self._early.watch(added)
        logger.info('run "%s": %d parameters were added\n%s', binding.run, len(added),
                    self.describe())

    def _split(self, group, given):
        """The group as one per algorithm, each with its parameters' Routes."""
        named = "param_names" in group
        names = group.get("param_names") or [f"param.{len(self.param_groups)}.{place}"
                                             for place in range(len(group["params"]))]
        routes = [routing.decide(name, parameter, named=named, group=given, route=self._route,
                                 embedding=id(parameter) in self._embeddings)
                  for name, parameter in zip(names, group["params"])]
        parts = []
        for algorithm in (routing.MUON, routing.ADAMW):
            places = [i for i, route in enumerate(routes) if route.algorithm == algorithm]
            if not places and not (algorithm == routing.MUON and not routes):
                continue
            part = {**group, "params": [group["params"][i] for i in places],
                    "algorithm": algorithm}
            if named:
                part["param_names"] = [names[i] for i in places]
            if algorithm == routing.ADAMW:
                part.update({key: given.get(key, value) for key, value in self._adamw.items()})
            parts.append((part, [routes[i] for i in places]))
        return parts
