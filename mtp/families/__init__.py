"""Model families: what each needs to draft, and to verify bit for bit.

deepseek_v32.py: the DeepSeek-V3.2 and GLM-5 families
ernie.py: the Ernie-4.5 family
family.py: the base class of a model family: the parts of a model that drafts
head.py: a draft head, and its tensors
latent_attention.py: latent attention whose blocks compute what single rows do: DeepSeek-V3 and
  GLM-4.7-Flash
longcat.py: the LongCat-Flash family, head layer included
mimo.py: the MiMo family
mimo_v2.py: the MiMo-V2-Flash family, by the first layer of its head
nemotron_h.py: the Nemotron-H family, its recurrent layer included
nextn.py: the common part of families with NextN heads; GLM-4.x MoE
placed_rope.py: positions, masks and features of requests with images
qwen.py: the common part of the Qwen families
qwen35.py: the Qwen3.5 family
qwen3_next.py: the Qwen3-Next family
qwen4_exp.py: Qwen3.8-Flash-Next, model included, of mlx-vlm's modules
row_table.py: a table of embeddings whose rows are read from the disk
step3p5.py: the Step-3.5 family, by the first layer of its head
table.py: the family of a loaded model: the table of classes
taped_gated_delta.py: a recurrent layer whose rows can be rolled back
weights.py: loads a draft head: quantisation, dtype, missing tensors
"""
