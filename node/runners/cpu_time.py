"""Facts of the operating system about a child process: its CPU time, and whether it is stopped."""

import psutil


def cpu_seconds(pid: int) -> float:
    """User and system time of the process, without its children's; 0.0 where it is gone."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return times.user + times.system


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped the process: it neither computes nor waits for a disk."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return False
