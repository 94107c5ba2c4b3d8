"""Runner processes: started, watched, called.

cpu_time.py: the CPU time that a runner has used, and whether a signal stopped it
load_watch.py: the progress of a runner that loads; pure
runner_client.py: calls to runners
runner_log.py: the log lines of runners
supervisor.py: runner processes, started, watched and ended
"""
