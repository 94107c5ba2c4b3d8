"""Native multi-token prediction: draft, verify, accept, roll back.

accept.py: acceptance of drafts: the matching ones, or the longest block
batch_probe.py: whether a request computes the same bits in a batch as alone
batch_prompts.py: rows of several prompts in one forward
batch_verdict.py: the verdict over a batch's verify, in one read
finite.py: logits that are no distribution
grammar.py: masks ids that a grammar does not allow
logprobs.py: log-probabilities of emitted tokens
lookup_probe.py: measured costs of rounds that copy
part_probe.py: the first part whose rows differ in a block
pieces.py: work in pieces of about one forward
probe.py: whether a verify computes the same bits as single steps
processors.py: penalties, logit bias and barred end tokens, row by row
sampler.py: from logits to tokens and verdicts, for one request
sampling.py: the one target distribution, for drafts and their verification
schedule.py: the ends of the forwards over a prompt
seams.py: results of forwards, drafts, and the Protocol StopCondition
stats.py: counts the rounds of an answer
targets.py: the target model: ids in, logits out
types.py: Sampling, Round, GenerationStats; free of MLX
"""
