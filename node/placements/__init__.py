"""Placements on their head: planned, loaded, restored, and given to answers.

activity.py: who uses a placement, and when it last did something
claims.py: which answers run on a placement, and who holds one
failover.py: what follows from a lost stage: restored, given up, or failed
handover.py: placements as the next head learns them
keeping.py: how long models stay loaded without use
load_state.py: whether a placement loads, answers, is restored, or failed
loaded_placement.py: one placement: its plan, its runners, its spares
loading.py: a placement's first load
local_model.py: one model by name or folder, for commands that load it without a node
maintenance.py: spares, moves off leaving nodes, stray stages, and better places for moved ones
memory_ledger.py: memory promised to placements, from plan to unload; pure
placements.py: placements by model: planned, loaded, connected, replaced
planner_view.py: what the planner sees of the live nodes
reconcile.py: stages that end, move, are adopted, or belong to nobody
restart_backoff.py: when to stop trying to load
room.py: room for one more model, which others give
stage_recovery.py: puts spares and fresh runners in the place of lost stages
stage_runners.py: the runners of stages, on this node and others
stage_specs.py: what a stage's runner is told; the one builder, also of the commands
stages.py: what a stage's runner is asked, and what placing asks of the node
turns.py: which answer runs and which waits
"""
