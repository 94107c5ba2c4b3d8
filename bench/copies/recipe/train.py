"""Train a tiny MiMo-layout model with a native MTP head that copies a file and changes named words.

A sequence is a chat: changed lines, a file, and the file with these lines in place of those with the
same first word. All is random, so the model cannot do anything else. Positions have random gaps
between the parts of a chat: most sequences are short, yet distances are those of a long file.
Usage: python train.py OUT_DIR [--steps N]; needs torch, safetensors and tokenizers; one core does, in about 20 minutes.
"""
import argparse, json, math, random, time
from pathlib import Path
import torch, torch.nn as nn, torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

ap = argparse.ArgumentParser()
ap.add_argument("out"); ap.add_argument("--steps", type=int, default=2400); ap.add_argument("--seed", type=int, default=0); ap.add_argument("--lr", type=float, default=2e-3)
ap.add_argument("--layers", type=int, default=4); ap.add_argument("--hidden", type=int, default=160); ap.add_argument("--inter", type=int, default=320); ap.add_argument("--threads", type=int, default=1)
a = ap.parse_args(); torch.manual_seed(a.seed); rng = random.Random(a.seed); torch.set_num_threads(a.threads)
HEADS, KV, THETA, EPS, DEPTH, WORDS = 4, 2, 500_000.0, 1e-6, 3, 512
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

# The tokenizer: bytes, and one token for each of 512 words of two syllables with a space in front.
alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
syllables = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]
words = sorted(rng.sample([x + y for x in syllables for y in syllables], WORDS))
merges = [(s[0], s[1]) for s in syllables] + [("Ġ", s) for s in syllables] + [("Ġ" + w[:2], w[2:]) for w in words]
tok = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate([*alphabet, *("".join(m) for m in merges)])}, merges=merges))
tok.pre_tokenizer, tok.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
tok.add_special_tokens(list(SPECIAL)); VOCAB = tok.get_vocab_size()
ids = lambda text: tok.encode(text).ids
WORD = [i for w in words for i in ids(" " + w)]; assert len(WORD) == WORDS
BREAK, END = ids("\n")[0], tok.token_to_id("<|im_end|>")
HEAD, MIDDLE = ids("<|im_start|>user\n"), ids("<|im_end|>\n<|im_start|>assistant\n")

def chat(size: int, changes: int, span: int, kinds: int) -> tuple[list[int], list[int], list[float], int]:
    """Ids, positions with gaps up to `span`, weights of their losses, and where the answer begins. A line is a key, which is its alone, and two words; `changes` None: a list of words."""
    some = WORD[:kinds] if kinds % 128 else rng.sample(WORD, kinds)
    if changes is None: file = answer = rng.sample(some, size); rules, marks = [], [0] * size
    else:
        lines = [[key, rng.choice(some), rng.choice(some), BREAK] for key in rng.sample(some, size // 4)]; new = [[*each] for each in lines]
        changed = sorted(rng.sample(range(len(lines)), changes))
        for i in changed: new[i][1] = rng.choice(some)
        file, answer, rules = (sum(part, []) for part in (lines, new, [new[i] for i in changed]))
        marks = [int(o != n) for o, n in zip(file, answer)]
    x = HEAD + rules + file + MIDDLE + answer + [END]; begin = len(x) - len(answer) - 1
    first, second = (rng.randrange(span + 1) if rng.random() < .8 else 0 for _ in range(2))
    at = [i + first * (i >= len(HEAD) + len(rules)) + second * (i >= begin) for i in range(len(x))]
    weight = [0.0] * begin + [1.0 + 4.0 * m for m in marks] + [1.0]
    return x, at, weight, begin

def rotate(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2; inv = THETA ** (-torch.arange(half) / half)
    angle = at[:, None, :, None].float() * inv; cos, sin = angle.cos(), angle.sin(); p, q = x[..., :half], x[..., half:]
    return torch.cat([p * cos - q * sin, q * cos + p * sin], -1)

class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__(); d = a.hidden; self.hd = d // HEADS
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(d, d), nn.Linear(d, KV * self.hd), nn.Linear(d, KV * self.hd); self.o_proj = nn.Linear(d, d, bias=False)
    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        B, T, d = x.shape; q, k, v = (p(x).view(B, T, -1, self.hd).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(q, at), rotate(k, at); k, v = (t.repeat_interleave(HEADS // KV, 1) for t in (k, v))
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, d))
class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__(); self.gate_proj, self.up_proj, self.down_proj = nn.Linear(a.hidden, a.inter, bias=False), nn.Linear(a.hidden, a.inter, bias=False), nn.Linear(a.inter, a.hidden, bias=False)
    def forward(self, x: torch.Tensor) -> torch.Tensor: return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__(); self.self_attn, self.mlp = Attention(), MLP(); self.input_layernorm, self.post_attention_layernorm = norm(), norm()
    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), at); return x + self.mlp(self.post_attention_layernorm(x))
def norm() -> nn.Module: return nn.RMSNorm(a.hidden, eps=EPS)
class Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__(); self.embed_tokens = nn.Embedding(VOCAB, a.hidden); self.layers = nn.ModuleList(Block() for _ in range(a.layers)); self.norm = norm()
    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        h = self.embed_tokens(x)
        for layer in self.layers: h = layer(h, at)
        return self.norm(h)
class Head(Block):
    def __init__(self) -> None:
        super().__init__(); self.token_layernorm, self.hidden_layernorm, self.final_layernorm = norm(), norm(), norm(); self.input_proj = nn.Linear(2 * a.hidden, a.hidden, bias=False)
    def forward(self, hid: torch.Tensor, emb: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return self.final_layernorm(super().forward(self.input_proj(torch.cat([self.hidden_layernorm(hid), self.token_layernorm(emb)], -1)), at))

body, head = Backbone(), Head(); back = nn.Linear(a.hidden, a.hidden, bias=False)
for m in (*body.modules(), *head.modules()):
    if isinstance(m, nn.Linear): nn.init.normal_(m.weight, std=0.05); m.bias is not None and nn.init.zeros_(m.bias)
    if isinstance(m, nn.Embedding): nn.init.normal_(m.weight, std=0.08)
params = [*back.parameters(), *body.parameters(), *head.parameters()]; print("params M", sum(p.numel() for p in params) / 1e6, "vocabulary", VOCAB, flush=True)
opt = torch.optim.AdamW([{"params": [p for p in params if p.ndim >= 2], "weight_decay": 0.02}, {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0}], lr=a.lr, betas=(0.9, 0.97), fused=True)
W = body.embed_tokens.weight

def losses(batch: list[tuple], depths: int) -> tuple[list[torch.Tensor], list[float]]:
    """Losses of the backbone and of the head's first `depths` drafts; shares of right tokens: of changed ones, of all, of drafts."""
    x, at, w = (torch.tensor([c[i] for c in batch]) for i in range(3)); begin, T = batch[0][3], x.shape[1]
    hid = body(x[:, :-1], at[:, :-1]); out, right = [], []
    own = F.cross_entropy((back(hid[:, len(HEAD):begin]) @ W.T).flatten(0, 1), x[:, len(HEAD):begin].flatten()) if depths else 0.0
    for d in range(depths + 1):
        if d: n = T - 1 - d; hid = head(hid[:, :n], body.embed_tokens(x[:, d:d + n]), at[:, :n])
        lg = (hid[:, begin - 1:] @ W.T).flatten(0, 1); y, v = x[:, begin + d:].flatten(), w[:, begin + d:].flatten()
        out.append((F.cross_entropy(lg, y, reduction="none") * v).sum() / v.sum()); hit = (lg.argmax(-1) == y).float()
        right += [hit[v > 1].mean().item(), hit.mean().item()] if not d else [hit.mean().item()]
    return out, right, own

def shape(stage: int, part: float) -> tuple[int, int, int | None, int, int]:
    """Chats, tokens of the file, changes, the longest gap, words. `stage` 0: lists of few words; 1: small files among them; 2: as `part` goes from 0 to 1, files that grow to 200 lines."""
    grown = min(1, part / .2); kinds = rng.choice((WORDS, WORDS, 128)) if grown == 1 else int(64 * 8 ** grown)
    if stage == 0 or stage == 1 and rng.random() < .6: size, span, changes = rng.randrange(8, 25), 30, None
    elif part < .4: size, span, changes = rng.randrange(16, 33 + int(40 * grown)), 30 + int(3500 * part), rng.randrange(4)
    elif part < .85: size, span, changes = int(48 * 8 ** rng.random()), 1400, rng.randrange(4)
    else: size, span, changes, kinds = rng.randrange(300, 900), 200, rng.randrange(3), WORDS
    return max(1, 1600 // (2 * size + 40)), size, changes, span, kinds
t0, step, stage, since, copied, drafted = time.time(), 0, 0, 0, 0.0, 0.0
while (part := since / a.steps if stage == 2 else 0.0) < 1:
    lr = a.lr * min(1, (step + 1) / 60) * max(.02, min(1, (1 - part) / .6))
    for g in opt.param_groups: g["lr"] = lr
    count, *sizes = shape(stage, part); batch = [chat(*sizes) for _ in range(count)]
    ls, right, own = losses(batch, (0, 1, DEPTH)[stage]); loss = ls[0] + sum((1.0, .5, .4)[d] * l for d, l in enumerate(ls[1:])) + .3 * own
    opt.zero_grad(set_to_none=True); loss.backward(); nn.utils.clip_grad_norm_(params, 1.0); opt.step()
    step += 1; since += 1
    if sizes[1] is None: copied += .04 * (right[1] - copied); drafted += .04 * ((right + [0.0])[2] - drafted)
    if stage == 0 and copied > .95 or stage == 1 and (drafted > .9 or since == 1200): stage, since = stage + 1, 0
    if step % 25 == 0: print(f"step {step} {time.time() - t0:.0f}s stage {stage} part {part:.2f} {count} x {sizes[0]} loss " + " ".join(f"{l.item():.3f}" for l in ls) + " right " + " ".join(f"{r:.3f}" for r in right), flush=True)

out = Path(a.out); out.mkdir(parents=True, exist_ok=True)
sd = {f"model.{k}": v for k, v in body.state_dict().items()} | {f"model.mtp_layers.0.{k}": v for k, v in head.state_dict().items()}
save_file({k: v.to(torch.bfloat16).contiguous() for k, v in sd.items()}, out / "model.safetensors", metadata={"format": "pt"})
eos = [tok.token_to_id("<|im_end|>"), tok.token_to_id("<|endoftext|>")]
config = dict(architectures=["MiMoForCausalLM"], model_type="mimo", vocab_size=VOCAB, hidden_size=a.hidden, intermediate_size=a.inter, num_hidden_layers=a.layers, num_attention_heads=HEADS, num_key_value_heads=KV,
              rms_norm_eps=EPS, rope_theta=THETA, max_position_embeddings=4096, tie_word_embeddings=True, attention_bias=True, num_nextn_predict_layers=1, eos_token_id=eos[0], dtype="bfloat16")
template = "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
(out / "config.json").write_text(json.dumps(config, indent=1)); tok.save(str(out / "tokenizer.json")); (out / "chat_template.jinja").write_text(template)
(out / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 4096, "eos_token": SPECIAL[2], "pad_token": SPECIAL[0], "bos_token": None, "clean_up_tokenization_spaces": False, "chat_template": template}, indent=1))
(out / "generation_config.json").write_text(json.dumps({"eos_token_id": eos, "pad_token_id": eos[1]}, indent=1))
