"""Locks are those of proto/mutex.h, which clang checks: no std::mutex, std::lock_guard and so on.
What guards a field is said by MUOND_GUARDED_BY, not in words.
"""

import re

from tree import Violation

_RAW = re.compile(r"\b(?:std::(?:(?:recursive_|shared_|timed_)*mutex|condition_variable(?:_any)?"
                  r"|(?:unique|scoped|shared)_lock|lock_guard)"
                  r"|absl::(?:\w*MutexLock|Mutex|CondVar))\b")
_WORDS = re.compile(r"Mutex \w+;\s*// .*\bof what follows|;\s*// (?:guarded by|under) \w*mutex")

# path -> why it has them.
MAY = {
    "proto/mutex.h": "what the others have in their place",
    "server/daemon/logging.cc": "spdlog's, which is compiled for std::mutex",
    "tests/tsan/planted_race.cc": "whether ThreadSanitizer knows abseil's",
}


def check(tree):
    for path in tree.matching(".cc", ".h", ".cu", ".cuh"):
        if path in MAY:
            continue
        for number, line in enumerate(tree.lines(path), 1):
            if _WORDS.search(line):
                yield Violation(path, number, "say it by MUOND_GUARDED_BY, which clang checks")
            code = line.split("//")[0]
            if match := _RAW.search(code):
                yield Violation(path, number, f"{match[0]}: use proto/mutex.h, which clang checks")
