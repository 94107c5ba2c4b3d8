"""Native multi-token prediction: draft, verify, accept, roll back.

accept.py: which drafts stand: greedy prefix, ratio, block, coupled
batch_caches.py: caches of several requests, each behind its own past
batch_depth.py: how many tokens a batch drafts
batch_probe.py: whether a request computes in a batch what it computes alone
batch_prompts.py: rows of several prompts in one forward
batch_slots.py: who joins and leaves where the others stay
batch_verdict.py: what each request of a batch keeps, in one read
costs.py: what rounds were measured to cost
deepseek_v3.py: the DeepSeek-V3 family
depth.py: how many tokens a round drafts: fixed, or what pays
draft_vocabulary.py: drafts from the first rows of lm_head only
family.py: what the engine needs of a model family, and which file has it
finite.py: logits that are no distribution
glm4_moe.py: the GLM-4.x MoE family
grammar.py: masks what a grammar does not allow
head.py: the head of the Qwen families
logprobs.py: log-probabilities of emitted tokens
nextn.py: what DeepSeek-V3 and GLM share, head included
probe.py: whether a verify computes what single steps do
processors.py: penalties and logit bias, row by row
qwen.py: what the Qwen families share
qwen35.py: the Qwen3.5 family
qwen3_next.py: the Qwen3-Next family
rollback.py: takes rows back from caches, bit for bit
sampler.py: from logits to tokens and verdicts, for one request
sampling.py: the one target distribution, for drafts and their verification
schedule.py: where the forwards over a prompt end
seams.py: what a forward, a draft and a wait are, and the Protocol StopCondition
stats.py: counts what a generation did
steps.py: what a generation yields
types.py: Sampling, Round, GenerationStats; free of MLX
weights.py: fills a head: quantisation, dtype, what is missing
"""
