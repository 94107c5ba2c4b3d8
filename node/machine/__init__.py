"""This machine and process: settings, log, hardware, files, tasks. Imports no room of node/.

awake.py: keeps the machine from sleeping while it answers; notices that it slept
background_reads.py: files read beside the event loop, so that a disk that hangs does not block it
data_dir_lock.py: the lock of a data folder, by which commands find its node
events.py: the log of the cluster's events, one line each
hardware.py: chip, backend, memory, bandwidth
interfaces.py: addresses that peers may use
json_size.py: the lists, objects and elements of JSON texts, counted before they are parsed
local_network.py: macOS's permission for the local network
log.py: log lines
node_names.py: nodes by name or the beginning of an id
open_files.py: the limit of open files
own_command.py: the words that start this program in a shell
private_files.py: files that only their owner may read, created and replaced whole, and locks
setting_sources.py: the flag and the variable of each setting
setting_values.py: values of settings from their texts
settings.py: every flag and environment variable
switches.py: switches of native MTP that change at run time
tasks.py: background tasks that report their errors, and loops that restart
timing.py: the periods, timeouts and backoffs of a node, in two profiles
"""
