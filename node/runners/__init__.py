"""Runner processes: started, watched, called.

cpu_time.py: the CPU time that a runner has used
load_watch.py: the progress of a runner that loads; pure
runner_client.py: calls to runners
supervisor.py: runner processes, started, watched and ended
"""
