"""Chat requests, driven by the entry node: the one that holds the client's connection.

chat.py: runs one chat request: claims a placement, decides on drafting, streams the answer
claim.py: an answer's claim on a placement, held open at the head
final_stats.py: final stats as the API has them
metric_families.py: the metrics of requests
metrics.py: measures answers and renders what Prometheus reads
readiness.py: whether a loaded model would answer now
requests.py: the internal chat request and its events
resuming.py: the log of an answer, from which it goes on elsewhere
scrape.py: metrics of what is summed or known elsewhere
totals.py: sums of final stats, by model
wire.py: a request as the message that its runner gets
"""
