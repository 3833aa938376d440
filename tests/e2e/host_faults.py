"""A machine that misbehaves under a process: a full disk, a slow one, a wall clock that jumps. The
process gets `environment` and from then on feels what is set here (host_faults/host_faults.c)."""

import mmap
import struct

from muond_process import program

FIELDS = ("disk_full", "sync_delay", "clock_shift")


class HostFaults:
    """Of the processes that were started with `environment`."""

    def __init__(self, path):
        path.write_bytes(bytes(8 * len(FIELDS)))
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self.environment = {"LD_PRELOAD": program("libmuond_host_faults.so"),
                            "MUOND_HOST_FAULTS": str(path)}
        self.clock_seconds = 0.0

    def _set(self, field, value):
        struct.pack_into("=q", self._map, 8 * FIELDS.index(field), value)

    def disk_full(self, full):
        """Every write to a regular file fails."""
        self._set("disk_full", int(full))

    def slow_sync(self, seconds):
        """Each fsync takes so much longer."""
        self._set("sync_delay", round(seconds * 1e6))

    def clock_jump(self, seconds):
        """The wall clock goes forward, or back, and stays so."""
        self.clock_seconds += seconds
        self._set("clock_shift", round(self.clock_seconds * 1e9))
