"""The CPU time that a child process has used, by the operating system."""

import psutil


def cpu_seconds(pid: int) -> float:
    """User and system time of the process, without its children's; 0.0 where it is gone."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return times.user + times.system
