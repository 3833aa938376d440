"""Nothing waits by the wall clock, which jumps: SteadyNow() of proto/steady_time.h is for waits and
deadlines. absl::Now() and system_clock stay with what people read and with certificates.
"""

import re

from tree import Violation

_WALL = re.compile(r"\babsl::Now\(|\bsystem_clock::now\(|\bToChronoTime\(")

# Who tells the time of day: by path, what a line must have that may ask for it.
TELLS = {
    "client/bench/bare_stream.cc": "system_clock",  # a measurement's own server
    "client/cli/verb_doctor.cc": "facts.now",  # dates of certificates
    "client/cli/verb_top.cc": "now",  # what people read
    "client/cpp/fake_service.cc": "system_clock",  # as gRPC hands deadlines over
    "proto/tls.cc": "CheckTlsFiles",  # dates of certificates
    "server/daemon/secure_listen.cc": "now",  # likewise
    "server/engine/diagnostics.cc": "time_since_epoch",  # the time of a sample
    "server/run/checkpointer.cc": "OnCheckpointSaved|saved_at|ToUnixNanos",
    "server/run/run_create.cc": "opened",
    # Times of steps, for events and dashboards.
    "server/run/run_compute.cc": "OnVerdict|OnStepFailed",
    "server/run/run_peers.cc": "OnVote",
    "server/run/run_step.cc": "const absl::Time now",
}


def check(tree):
    for path in tree.matching(".cc", ".h", ".cu", ".cuh"):
        if not path.startswith(("client/", "server/", "proto/")) or path.endswith("_test.cc"):
            continue
        if path.startswith("client/examples/"):
            continue
        for number, line in enumerate(tree.lines(path), 1):
            match = _WALL.search(line)
            may = path in TELLS and re.search(TELLS[path], line)
            if match and not may and not line.lstrip().startswith("//"):
                yield Violation(path, number, f"{match[0]}: that clock jumps: SteadyNow()")
