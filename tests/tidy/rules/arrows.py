"""Folders include only what stands below them in ARCHITECTURE.md, and the libraries listed there.

A file belongs to the module with the longest matching prefix. Tests (*_test.cc, tests/) may use
their module's arrows plus what TEST_MAY_USE says. No include cycles between files either.
"""

import re

from cpp import includes
from tree import Violation

# Prefix of the file's path -> module.
MODULES = {
    "kernels/tensor.": "tensor",
    "kernels/": "kernels",
    "kernels/device_memory.": "device-memory",
    "kernels/host_device_memory.": "device-memory",
    "kernels/cuda/": "kernels-cuda",
    "kernels/lab/": "kernels-lab",
    "proto/values.": "values",
    "proto/shard.": "values",
    "proto/check.": "values",
    "proto/long_turns.": "values",
    "proto/mutex.": "mutex",
    "proto/steady_time.": "values",
    "proto/version.": "values",
    "proto/": "proto",
    "muond/v1/": "messages",
    "nccl/": "nccl",
    "nccl/cuda/": "nccl-cuda",
    "server/faults/": "faults",
    "server/registry/": "registry",
    "server/checkpoint/": "checkpoint",
    "server/step/": "step",
    "server/engine/": "engine",
    "server/transport/": "transport",
    "server/cluster/": "cluster",
    "server/buddy/": "buddy",
    "server/metrics/": "metrics",
    "server/run/": "run",
    "server/rpc/": "rpc",
    "server/daemon/": "daemon",
    "server/daemon/embedded.h": "embedded",
    "client/cpp/": "client-cpp",
    "client/c/": "client-c",
    "client/models/": "client-models",
    "client/cli/": "client-cli",
    "client/bench/": "client-bench",
    "client/examples/": "client-examples",
    "tests/support/": "tests-support",
    "tests/": "tests",
}

# Module -> modules that it may include (itself always). Read top-down: nothing points up.
ARROWS = {
    "tensor": (),
    "mutex": (),
    "device-memory": ("kernels", "tensor"),
    "kernels": ("tensor",),
    "kernels-cuda": ("kernels", "device-memory", "tensor"),
    "kernels-lab": ("kernels-cuda", "kernels", "tensor"),
    "values": ("tensor",),
    "messages": (),
    "proto": ("values", "tensor", "messages"),
    "nccl": ("values", "tensor"),
    "nccl-cuda": ("nccl", "values", "tensor"),
    "faults": ("values", "tensor"),
    "registry": ("values", "tensor"),
    "checkpoint": ("registry", "proto", "values", "tensor"),
    "step": ("registry", "values", "tensor"),
    "engine": ("registry", "faults", "values", "tensor", "kernels", "device-memory"),
    "transport": ("nccl", "registry", "proto", "messages", "values", "tensor", "kernels",
                  "device-memory"),
    "cluster": ("step", "registry", "proto", "messages", "values", "tensor"),
    "buddy": ("cluster", "engine", "step", "registry", "faults", "proto", "messages", "values",
              "tensor", "kernels"),
    "metrics": ("values", "tensor"),
    "run": ("buddy", "checkpoint",
            "step", "engine", "transport", "cluster", "metrics", "registry", "faults", "proto",
            "messages", "values", "tensor", "kernels", "device-memory"),
    "rpc": ("run", "checkpoint", "nccl",
            "step", "engine", "transport", "cluster", "metrics", "registry", "faults",
            "proto", "messages", "values", "tensor", "device-memory"),
    "embedded": (),
    "daemon": ("nccl", "nccl-cuda",
               "embedded", "rpc", "run", "step", "engine", "transport", "cluster", "metrics",
               "registry",
               "faults", "proto", "messages", "values", "tensor", "kernels", "kernels-cuda",
               "device-memory"),
    "client-cpp": ("nccl", "nccl-cuda", "proto", "messages", "values", "tensor"),
    "client-c": ("embedded", "client-cpp", "proto", "messages", "values", "tensor"),
    "client-models": ("values", "tensor"),
    "client-cli": ("client-cpp", "client-models", "proto", "messages", "values", "tensor"),
    "client-bench": ("embedded", "client-cpp", "client-models", "proto", "messages", "values",
                     "tensor"),
    "client-examples": ("embedded", "client-cpp", "proto", "messages", "values", "tensor"),
}

# (file, module) -> why this one arrow is allowed all the same.
EXCEPTIONS = {
    ("client/cli/verb_plan.cc", "registry"):
        "`muonctl plan` answers before any daemon runs, with the pure function that daemons use",
    ("client/cli/machine_file.h", "registry"):
        "rates that the planner's estimate of a step's time takes",
    ("client/cli/checkpoint_files.cc", "checkpoint"):
        "`muonctl checkpoint` reads directories without a daemon, with the daemons' own reader",
}

# What needs the standard library only, and every folder may include.
ANY_MAY_USE = ("mutex",)

# What a test may use beside its module's arrows: a real service in its own process, test helpers.
TEST_MAY_USE = ("embedded", "tests-support", "values", "tensor")

# Third-party prefix -> modules that may include it. Test libraries: tests and benchmarks only.
LIBRARIES = {
    "absl/": {"values", "proto", "nccl", "nccl-cuda",
              "faults", "registry", "checkpoint", "step", "engine", "transport", "buddy",
              "cluster", "metrics", "run", "rpc", "daemon", "embedded", "client-cpp", "client-c",
              "client-models", "client-cli",
              "client-bench", "client-examples"},
    "grpc": {"proto", "transport", "buddy", "cluster", "rpc", "daemon", "embedded", "client-cpp",
             "client-c", "client-cli",
             "client-bench", "client-examples"},
    "google/protobuf/": {"proto", "transport", "buddy", "cluster", "rpc", "daemon", "client-cpp",
                         "client-c", "client-cli",
                         "client-bench"},
    "prometheus/": {"metrics"},
    "civetweb.h": {"metrics"},
    "spdlog/": {"run", "rpc", "daemon", "client-c", "client-bench", "client-examples"},
    "CLI/": {"daemon", "client-cli", "client-bench", "client-examples"},
    "nlohmann/": {"checkpoint",
                  "daemon", "client-models", "client-cli", "client-bench", "client-examples"},
    "systemd/": {"daemon"},
    "re2/": {"registry"},
    "xxhash.h": {"registry", "checkpoint",
                 "step", "engine", "transport"},
    "xxh_x86dispatch.h": {"transport"},
    "isa-l": {"proto"},
    "openssl/": {"proto"},
    "cblas": {"kernels", "client-bench", "client-examples"},
    "openblas": {"kernels", "client-bench"},
    "tbb/": {"kernels"},
    "oneapi/": {"kernels", "client-bench"},
    "cuda": {"nccl-cuda", "kernels-cuda", "kernels-lab", "client-examples"},
    "cublas": {"kernels-cuda"},
}
TEST_LIBRARIES = ("gtest/", "gmock/", "benchmark/")


def is_test(path):
    return path.startswith("tests/") or re.search(r"_(test|benchmark)\.(cc|cu)$|_for_test\.", path)


def module_of(path):
    prefixes = [prefix for prefix in MODULES if path.startswith(prefix)]
    return MODULES[max(prefixes, key=len)] if prefixes else None


def _check_project_include(path, number, target, test):
    module, used = module_of(path), module_of(target)
    if used is None or used == module or module in ("tests", "tests-support"):
        return
    if used in ARROWS.get(module, ()) or used in ANY_MAY_USE or (test and used in TEST_MAY_USE):
        return
    if (path, used) in EXCEPTIONS:
        return
    yield Violation(path, number, f"{module} must not include {used} ({target})")


def _check_library(path, number, target, test):
    module = module_of(path)
    if target.startswith(TEST_LIBRARIES):
        if not test:
            yield Violation(path, number, f"{target} outside of a test")
        return
    for prefix, modules in LIBRARIES.items():
        if target.startswith(prefix) and module not in modules and not test:
            yield Violation(path, number, f"{module} must not use <{target}>")


def _cycles(graph):
    """Each file that can reach itself, with the path that leads back."""
    state = {}

    def visit(path, trail):
        state[path] = "open"
        for number, target in graph.get(path, ()):
            if state.get(target) == "open":
                loop = trail[trail.index(target):] + [target]
                yield Violation(path, number, "include cycle: " + " -> ".join(loop))
            elif target in graph and target not in state:
                yield from visit(target, trail + [target])
        state[path] = "done"

    for path in graph:
        if path not in state:
            yield from visit(path, [path])


def check(tree):
    sources = tree.matching(".h", ".cc", ".cu", ".cuh")
    known = set(tree.files)
    graph = {path: [] for path in sources}
    for path in sources:
        test = bool(is_test(path))
        for number, target, quoted in includes(tree.text(path)):
            if module_of(target) is None:
                yield from _check_library(path, number, target, test)
                continue
            if not quoted:
                yield Violation(path, number, f'own header in angle brackets: <{target}>')
            if target not in known and not target.startswith("muond/v1/"):
                yield Violation(path, number, f"no such file: {target}")
            if ".." in target or "./" in target:
                yield Violation(path, number, f"include rooted at the repository, not {target}")
            graph[path].append((number, target))
            yield from _check_project_include(path, number, target, test)
        for number, target, quoted in includes(tree.text(path)):
            if quoted and "/" not in target and not target.startswith(tuple(LIBRARIES)):
                yield Violation(path, number, f"include rooted at the repository, not {target}")
    yield from _cycles(graph)
