"""Runner processes: started, watched, called.

load_watch.py: the progress of a runner that loads, and the CPU time that it used
runner_client.py: calls to runners
runner_log.py: the log lines of runners
runner_process.py: one runner as a child process, started, watched and ended
supervisor.py: the runners of this node, by placement and stage
"""
