"""Placements on their head: observed, reconciled with what is desired, and given to answers.

claims.py: which answers run on a placement, and who holds one
head_watch.py: begins and ends this node's time as the head; a pass each second
loaded_placement.py: one placement as the rest of the node reads it
local_model.py: one model by name or folder, for commands that load it without a node
observations.py: what the head remembers between two passes: runners and failures
placement_records.py: placements made of runners, and the events about them
placements.py: the loop: observes, reconciles, performs; requests and losses come in here
plan_wire.py: plans on the wire, as every runner carries them
planner_view.py: what the planner sees of the live nodes
planning.py: the planner as the reconciler asks it, and the cards of what it may plan
readers.py: runners that only read prompts for others
reconcile.py: what the head does next; pure
replicas.py: placements of one model: how many, where, or why not; which one answers; pure
room.py: room for one more model, which others give; pure
situation.py: the observed state as questions; pure
stage_actions.py: loads, connects, pings and ends runners; notes those that are lost
stage_runners.py: the runners of stages, on this node and others
stage_specs.py: specifications of stages; the one builder, also of the commands
stages.py: what a stage's runner is asked, and what placing asks of the node
state.py: the values that the reconciler reads, and its actions; pure
turns.py: which answer runs and which waits
waiting_requests.py: requests that wait for their models' placements
"""
