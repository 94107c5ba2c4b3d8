"""Runner processes: started, watched, called.

load_watch.py: the progress of a runner that loads; pure
runner_client.py: calls to runners
supervisor.py: runner processes, started, watched and ended
"""
