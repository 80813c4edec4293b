"""Resources, restarts and failures of an agent's processes."""

import math
import os
import time

import psutil
from msgspec import structs

from kvbus.agent.staging_devices import StagingDevices
from kvbus.data.client import DataProcess
from kvbus.protocol.tools import ProcessStatus

READINGS = {
    "data_running": "1 while the agent's data process runs, else 0.",
    "data_restarts": "Restarts of the data process.",
    "data_replaced": "Kills of the data process, because a READ did not end.",
    "data_end_timestamp_seconds": "Last end of a data process, in seconds since 1970; 0: never.",
    "data_cpu_seconds": "CPU time of the running data process.",
    "data_memory_bytes": "Memory of the data process, without shared memory.",
    "data_jobs": "Pending jobs of the data process.",
}

READ_S = 1.0
NOT_READ = ProcessStatus("")


class ProcessReport:
    """A report that is refreshed at most once per `READ_S`: unauthorized callers may request it."""

    def __init__(self, data: DataProcess, staging: StagingDevices) -> None:
        self._data, self._staging = data, staging
        self._ended_at = 0.0
        self._read_at, self._read = -math.inf, (NOT_READ, NOT_READ)

    def note_end(self) -> None:
        self._ended_at = time.time()

    def processes(self) -> tuple[ProcessStatus, ProcessStatus]:
        now_s, status = time.monotonic(), self._data.status()
        if status.pid != self._read[1].pid or now_s >= self._read_at + READ_S:
            self._read_at = now_s
            self._read = _process("control", os.getpid()), _process("data", status.pid)
        control, data = self._read
        restarts, reason = status.num_restarts, status.last_end
        gpu_bytes = self._staging.gpu_bytes()
        return control, structs.replace(
            data, num_restarts=restarts, last_end=reason, gpu_bytes=gpu_bytes
        )

    def readings(self) -> dict[str, float]:
        _, data = self.processes()
        return {
            "data_running": float(self._data.is_running),
            "data_restarts": data.num_restarts,
            "data_replaced": self._data.num_replaced,
            "data_end_timestamp_seconds": self._ended_at,
            "data_cpu_seconds": data.cpu_s,
            "data_memory_bytes": data.memory_bytes,
            "data_jobs": self._data.num_jobs,
        }


def _process(name: str, pid: int) -> ProcessStatus:
    if not pid:
        return ProcessStatus(name=name)
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            times, memory = process.cpu_times(), process.memory_info()
    except psutil.Error:  # it is ending
        return ProcessStatus(name=name, pid=pid)
    return ProcessStatus(
        name=name,
        pid=pid,
        cpu_s=times.user + times.system,
        memory_bytes=max(0, memory.rss - memory.shared),
    )
