"""Chat requests, driven by the entry node: the one that holds the client's connection.

chat.py: runs one request: claims a placement, streams the answer, resumes it after a loss
claim.py: an answer's claim on a placement, held open at the head; calls to heads and runners
images.py: images in a conversation, and notes in their places
metrics.py: measures answers and renders what Prometheus reads
requests.py: the internal chat request and its events
resuming.py: the log of an answer, from which another attempt continues it
scrape.py: metrics of sums and states that other objects hold
totals.py: sums of final stats, by model
wire.py: requests and final stats between the API's form and the runner's messages
"""
