"""Native multi-token prediction: draft, verify, accept, roll back.

accept.py: acceptance of drafts: greedy prefix, ratio, block, coupled
batch_caches.py: caches of several requests, each behind its own past
batch_depth.py: how many tokens a batch drafts
batch_lookup.py: the rounds of a batch: drafts of the head, and who copies
batch_probe.py: whether a request computes the same bits in a batch as alone
batch_prompts.py: rows of several prompts in one forward
batch_slots.py: requests join and leave a batch in place
batch_verdict.py: the verdict over a batch's verify, in one read
costs.py: measured costs of rounds
deepseek_v3.py: the DeepSeek-V3 family
deepseek_v32.py: the DeepSeek-V3.2 and GLM-5 families
depth.py: how many tokens a round drafts: fixed, or the best by measured costs
draft_vocabulary.py: drafts from the first rows of lm_head only
end_bar.py: end tokens get probability 0 until an answer is long enough
ernie.py: the Ernie-4.5 family
family.py: a model family: the parts of a model that drafts, and the class of each
finite.py: logits that are no distribution
glm4_moe.py: the GLM-4.x MoE family
glm4_moe_lite.py: the GLM-4.7-Flash family
grammar.py: masks ids that a grammar does not allow
head.py: the interface of a draft head, and the head of the Qwen families
image_blocks.py: masks of models whose image rows see all of their image
latent_attention.py: latent attention whose blocks compute what single rows do
logprobs.py: log-probabilities of emitted tokens
longcat.py: the LongCat-Flash family, head layer included
lookup.py: where the last tokens of a request occurred before
lookup_drafts.py: drafts of a request that are copied from its prompt and answer
lookup_length.py: how many tokens a round copies, by evidence and measured costs
lookup_probe.py: measured costs of rounds that copy
mimo.py: the MiMo family, head included
mimo_v2.py: the MiMo-V2-Flash family, by the first layer of its head
nemotron_h.py: the Nemotron-H family, its recurrent layer included
nextn.py: the common part of DeepSeek-V3 and GLM, head included
placed_rope.py: rotary positions of requests with images
positions.py: the number of rows of each request of a batch
probe.py: whether a verify computes the same bits as single steps
processors.py: penalties and logit bias, row by row
qwen.py: the common part of the Qwen families
qwen35.py: the Qwen3.5 family
qwen3_next.py: the Qwen3-Next family
rollback.py: removes rows from caches, bit for bit
sampler.py: from logits to tokens and verdicts, for one request
sampling.py: the one target distribution, for drafts and their verification
schedule.py: the ends of the forwards over a prompt
seams.py: results of forwards, drafts, and the Protocol StopCondition
stats.py: counts the rounds of an answer
step3p5.py: the Step-3.5 family, by the first layer of its head
steps.py: the steps of an answer in progress
taped_gated_delta.py: a recurrent layer whose rows can be rolled back
targets.py: the target model: ids in, logits out
types.py: Sampling, Round, GenerationStats; free of MLX
weights.py: loads a draft head: quantisation, dtype, missing tensors
window.py: the cache of a sliding window, whose rows can be taken back
"""
