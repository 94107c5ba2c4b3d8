"""Runner processes: started, watched, called.

load_watch.py: the progress of a runner that loads, and the CPU time that it used
runner_client.py: calls to runners
runner_log.py: the log lines of runners
supervisor.py: runner processes, started, watched and ended
"""
