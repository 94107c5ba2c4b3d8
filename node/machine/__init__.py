"""This machine and process: settings, log, hardware, files, tasks. Imports no room of node/.

background_reads.py: files read beside the event loop, which a disk that hangs must not stop
data_dir_lock.py: one node for each data folder, and how commands find it
durations.py: durations as people write them; pure
events.py: the log of what happened, one line each
hardware.py: chip, backend, memory, bandwidth
interfaces.py: addresses that peers may use
log.py: log lines
node_names.py: which node a name or the beginning of an id means
open_files.py: the limit of open files
private_files.py: files that only their owner may read, created and replaced whole
setting_values.py: the texts of settings as values
settings.py: every flag and environment variable
switches.py: switches of native MTP that change at run time
tasks.py: background tasks that report their errors, and loops that restart
timing.py: every period, patience and backoff of a node, in two profiles
"""
