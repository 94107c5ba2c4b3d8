"""Runner processes: started, watched, called.

load_watch.py: whether a loading runner still makes progress; pure
runner_client.py: calls to runners
supervisor.py: runner processes, started, watched and ended
"""
