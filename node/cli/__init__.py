"""The commands of `exo-node`.

bench.py: `exo-node bench`
bench_cluster.py: `exo-node bench cluster`
child.py: the child process of a command that loads a model
client.py: HTTP to the running node
convert_models.py: `exo-node models graft`, `convert` and `check`
doctor.py: `exo-node doctor`
events.py: `exo-node events`
failures.py: the end of a command that fails
flags.py: flags that several commands share
get_models.py: `exo-node models pull`, `rm`, `show` and `recommend`
join.py: nodes, approve, deny, join, key, leave, rekey, dashboard
later.py: commands whose options are read when one of them runs
main.py: the commands
model_table.py: tables of models
models.py: `exo-node models`
output.py: tables and lines on the terminal
plan.py: `exo-node plan`
report.py: `exo-node report`
service.py: `exo-node service`
session.py: `exo-node chat` without a prompt
start.py: `exo-node start` and `exo-node stop`
token.py: `exo-node token`
top.py: `exo-node top`
top_view.py: a node's reading and the text of it
unload.py: `exo-node models unload`
verify.py: `exo-node verify`
"""
