"""The optimizer in words: who gets which algorithm and why, and by what path."""

from muond.torch import layout as layouts
from muond.torch import routing, staging


def _rows(optimizer, binding):
    owners = {}
    if binding is not None:
        owners = {routed["name"]: routed for routed in binding.report["routing"]["parameters"]}
    for index, (group, names, routes) in enumerate(zip(*optimizer._contents())):
        for parameter, name, route in zip(group["params"], names, routes):
            frozen = not parameter.requires_grad
            entry = binding.by_id.get(id(parameter)) if binding else None
            place = ""
            if entry is not None:
                place = "all" if entry.layout.replicated or binding.ranks == 1 else (
                    str(list(entry.layout.box[1])) if entry.layout.box else "nothing")
            matrices = " + ".join(
                f"{view['count']} of {view['rows']} x {view['cols']}"
                for view in owners.get(name, {}).get("matrices", []))
            yield (name, str(list(routing.logical_shape(name, parameter))),
                   "frozen" if frozen else route.algorithm, str(index), matrices, place,
                   owners.get(name, {}).get("owner", ""),
                   "not registered" if frozen else route.reason)


def _table(header, rows):
    rows = [header, *rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    keep = [i for i in range(len(header)) if any(row[i] for row in rows[1:])]
    return ["  ".join(row[i].ljust(widths[i]) for i in keep).rstrip() for row in rows]


def _path(binding):
    """How bytes travel, the detours included."""
    lines = [f"data path    {path['name']} to {path['daemon']}: {path['reason'] or 'only path'}"
             for path in binding.session.transports()]
    tensors = [layouts.local(entry.parameter) for entry in binding.entries]
    for device in sorted({tensor.device.type for tensor in tensors
                          if not staging.reachable(tensor)}):
        lines.append(f"staging      {device} tensors go through host memory: the interface knows "
                     "no other way to them")
    if any(map(staging.reachable, tensors)):
        copied = len(binding.buffers.staged)
        lines.append("staging      gradients are read in place"
                     + (f", {copied} of them, not contiguous, by a copy" if copied else ""))
    return lines


def describe(optimizer, binding):
    """Lines of text, the last a summary."""
    rows = list(_rows(optimizer, binding))
    header = ("parameter", "shape", "algorithm", "group", "matrices", "this rank's", "owner",
              "reason")
    muon = sum(row[2] == routing.MUON for row in rows)
    adamw = sum(row[2] == routing.ADAMW for row in rows)
    lines = _table(header, rows) + [""]
    if binding is None:
        lines.append("run          not joined: that happens at the first step")
    else:
        position = binding.session.position()
        lines.append(f"run          {binding.run}, rank {binding.rank} of {binding.ranks}, "
                     f"generation {position.generation}, step {position.next_step}")
        lines += _path(binding)
    lines.append(f"loss scale   {optimizer.scaling()}")
    lines.append(f"push         {optimizer.pushing()}")
    lines.append(f"{muon} parameters by Muon, {adamw} by AdamW, "
                 f"{len(rows) - muon - adamw} frozen")
    return "\n".join(lines)
