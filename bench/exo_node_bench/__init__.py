"""The commands `exo-node bench mtp` and `exo-node bench serve`, and what they share.

charts.py: charts as SVG, with matplotlib
folder.py: the folder of a result
page.py: the page to share
prompts.py: prompts from a file, and the bundled ones
spread.py: the statistics
tables.py: tables, for the terminal and the page
"""
