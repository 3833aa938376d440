"""The optimizer's parameter groups: one per algorithm."""

import torch

from muond import errors
from muond.torch import routing
from muond.torch.options import check_values


class Groups:
    """Mixed into the optimizer."""

    def names(self):
        """The parameters' names, by group; "param.<group>.<place>" where none were given."""
        return [group.get("param_names") or
                [f"param.{i}.{place}" for place in range(len(group["params"]))]
                for i, group in enumerate(self.param_groups)]

    @torch._disable_dynamo
    def add_param_group(self, param_group):
        """Adds a group, before the first step; one of both kinds of parameters becomes two."""
        if self._binding is not None:
            raise errors.RunStateError("add_param_group: the run is open",
                                       hint="parameters can't join a run after its first step")
        given = dict(param_group) if isinstance(param_group, dict) else {}
        super().add_param_group(param_group)
        group = self.param_groups.pop()  # before what may fail: a refused group leaves nothing
        check_values(group)
        for part, routes in self._split(group, given):
            self.param_groups.append(part)
            self._routes.append(routes)

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
