"""The commands of `exo-node`.

bench.py: `exo-node bench`: `mtp` and `serve` where `bench/` is installed
chat.py: `exo-node chat`
child.py: the child process of a command that loads a model
client.py: HTTP to the running node
coding_tools.py: the coding tools that `exo-node launch` starts, and how each is set up
convert_models.py: `exo-node models graft`, `convert` and `import`
doctor.py: `exo-node doctor`
failures.py: the end of a command that fails
flags.py: flags that several commands share
get_models.py: `exo-node models search`, `pull`, `rm`, `load` and `unload`
join.py: nodes, approve, deny, join, key, leave, dashboard
launch.py: `exo-node launch`
load.py: a model's place: `exo-node plan`, and a load with its progress
main.py: the list of commands
models.py: `exo-node models`, `show` and `recommend`
output.py: tables, answers and notes on the terminal
report.py: `exo-node report`
service.py: `exo-node service`
start.py: `exo-node start` and `exo-node stop`
status.py: `exo-node status`
times.py: the times of commands
token.py: `exo-node token`
verify.py: `exo-node verify`
"""
