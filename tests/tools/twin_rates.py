"""How many mistakes in ports ``minitx.check.twin`` names: python tests/tools/twin_rates.py [--pairs 24 | --right]"""

from __future__ import annotations

import argparse
import copy
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[2]))

from minitx.check import Finding, Report, Severity, twin
from minitx.interop import adopt_hf, load_hf
from tests.interop.families import KINDS, build


@dataclass(frozen=True)
class Mistake:
    """An edit of a port, the id that names it, and the first module that differs (a|b: either, nothing: the model)."""

    family: str
    name: str
    id: str
    first: str
    old: str
    new: str


SDPA = "y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen"
MISTAKES = [
    Mistake("gpt2", "positions begin at 2", "position-offset", "|pos", "torch.arange(ids.shape[1], device=ids.device)", "torch.arange(2, ids.shape[1] + 2)"),
    Mistake("gpt2", "k before q", "split-order", "blocks.0.attn", "q, k, v = self.c_attn", "k, q, v = self.c_attn"),
    Mistake("gpt2", "q, k, v within each head", "split-order", "blocks.0.attn", "= self.c_attn(x).split(E, dim=2)", "= (t.flatten(2) for t in self.c_attn(x).view(B, L, self.heads, 3, -1).unbind(3))"),
    Mistake("gpt2", "no scale", "scale", "blocks.0.attn", SDPA, SDPA + ", scale=1.0"),
    Mistake("gpt2", "scale by the width", "scale", "blocks.0.attn", SDPA, SDPA + ", scale=E**-0.5"),
    Mistake("gpt2", "exact gelu", "activation", "blocks.0", ', approximate="tanh"', ""),
    Mistake("gpt2", "eps 1e-12", "norm-eps", "blocks.0.ln_1", "nn.LayerNorm(width), nn.LayerNorm(width)", "(nn.LayerNorm(width, eps=1e-12) for _ in range(2))"),
    Mistake("gpt2", "no last norm", "norm-missing", "|head", "self.head(self.ln_f(x))", "self.head(x)"),
    Mistake("gpt2", "no positions", "multiplier", "|blocks.0", " + self.pos(torch.arange(ids.shape[1], device=ids.device))", ""),
    Mistake("gpt2", "sees the next token", "visible", "blocks.0.attn", ".tril()", ".tril(1)"),
    Mistake("gpt2", "not causal", "visible", "blocks.0.attn", ".tril()", ""),
    Mistake("gpt2", "heads merged without transpose", "head-merge", "blocks.0.attn", "y.transpose(1, 2).reshape", "y.reshape"),
    Mistake("gpt2", "heads split without transpose", "head-merge", "blocks.0.attn", "t.view(B, L, self.heads, E // self.heads).transpose(1, 2)", "t.reshape(B, self.heads, L, E // self.heads)"),
    Mistake("gpt2", "mask inverted", "mask-polarity", "", "mask.bool()", "~mask.bool()"),
    Mistake("gpt2", "mask ignored", "mask-ignored", "", "x = block(x, mask)", "x = block(x, None)"),
    Mistake("gpt2", "the second norm twice", "swapped-weights", "blocks.0.ln_2", "self.attn(self.ln_1(x), mask)", "self.attn(self.ln_2(x), mask)"),
    Mistake("llama", "rotary pairs", "rotary", "layers.0.attn", "a, b = x.chunk(2, -1)\n    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)", "a, b = x[..., ::2], x[..., 1::2]\n    return torch.stack((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1).flatten(-2)"),
    Mistake("llama", "theta 500000", "rotary", "layers.0.attn", 'c.rope_parameters["rope_theta"]', "500000.0"),
    Mistake("llama", "gate and up", "gate-order|swapped-weights", "layers.0", "F.silu(self.w1(h)) * self.w3(h)", "F.silu(self.w3(h)) * self.w1(h)"),
    Mistake("llama", "heads tiled", "head-order", "layers.0.attn", "t.repeat_interleave(self.heads // self.groups, dim=1)", "t.repeat(1, self.heads // self.groups, 1, 1)"),
    Mistake("llama", "eps 1e-5", "norm-eps", "layers.0.attn_norm", "torch.ones(width)), eps", "torch.ones(width)), 1e-5"),
    Mistake("llama", "half of each head rotated", "rotary", "layers.0.attn", "q, k = rotate(q, self.theta), rotate(k, self.theta)", "q, k = (torch.cat((rotate(t[..., : self.dim // 2], self.theta), t[..., self.dim // 2 :]), -1) for t in (q, k))"),
    Mistake("llama", "positions halved", "rotary", "layers.0.attn", "torch.arange(L, device=x.device)[:, None] * freqs", "torch.arange(L)[:, None] / 2 * freqs"),
    Mistake("llama", "keys not rotated", "rotary", "layers.0.attn", ", rotate(k, self.theta)", ", k"),
    Mistake("llama", "keys rotated backwards", "rotary", "layers.0.attn", "rotate(k, self.theta)", "rotate(k.flip(-1), self.theta).flip(-1)"),
    Mistake("llama", "LayerNorm", "norm-kind", "layers.0.attn_norm", "return self.weight", "x = x - x.mean(-1, keepdim=True)\n        return self.weight"),
    Mistake("llama", "1 + weight", "norm-weight", "layers.0.attn_norm", "self.weight * x", "(1 + self.weight) * x"),
    Mistake("llama", "head tied", "tying", "", "return self.head(self.norm(x))", "return F.linear(self.norm(x), self.tok.weight)"),
    Mistake("llama", "gelu", "activation", "layers.0", "F.silu(", "F.gelu("),
    Mistake("llama", "mask inverted", "mask-polarity", "", "(mask == 0)", "(mask != 0)"),
    Mistake("llama", "sqrt of the width", "scale", "layers.0.attn", "math.sqrt(self.dim)", "math.sqrt(E)"),
    Mistake("llama", "values and keys swapped", "split-order|swapped-weights", "layers.0.attn", "self.wq(x), self.wk(x), self.wv(x)", "self.wq(x), self.wv(x), self.wk(x)"),
    Mistake("llama", "attention without residual", "multiplier", "layers.0", "x = x + self.attn(self", "x = self.attn(self"),
    Mistake("gemma2", "window of one more", "visible", "blocks.0.attn", "distance < self.window", "distance <= self.window"),
    Mistake("gemma2", "windows in the other layers", "visible", "blocks.0.attn", "number % 2 == 0", "number % 2 == 1"),
    Mistake("gemma2", "no soft-cap of scores", "soft-cap", "blocks.0.attn", "        scores = torch.tanh(scores / c.attn_logit_softcapping) * c.attn_logit_softcapping\n", ""),
    Mistake("gemma2", "soft-cap 30", "soft-cap", "blocks.0.attn", "torch.tanh(scores / c.attn_logit_softcapping) * c.attn_logit_softcapping", "torch.tanh(scores / 30) * 30"),
    Mistake("gemma2", "no last soft-cap", "soft-cap", "", "torch.tanh(logits / self.config.final_logit_softcapping) * self.config.final_logit_softcapping", "logits"),
    Mistake("gemma2", "embedding not scaled", "multiplier", "|blocks.0", " * self.config.hidden_size**0.5", ""),
    Mistake("gemma2", "weight, not 1 + weight", "norm-weight", "blocks.0.norms.0", "(1 + self.scale)", "self.scale"),
    Mistake("gemma2", "scale by the head", "scale", "blocks.0.attn", "c.query_pre_attn_scalar**-0.5", "c.head_dim**-0.5"),
    Mistake("gemma2", "no norm after attention", "norm-missing", "blocks.0", "self.norms[1](self.attn(self.norms[0](x)))", "self.attn(self.norms[0](x))"),
    Mistake("gemma2", "exact gelu", "activation", "blocks.0", ', approximate="tanh"', ""),
    Mistake("gemma2", "windows everywhere", "visible", "blocks.1.attn", "number % 2 == 0", "True"),
    Mistake("gemma2", "norms 2 and 3 swapped", "swapped-weights", "blocks.0.norms", "h = self.norms[2](x)\n        h = self.down(F.gelu(self.gate(h), approximate=\"tanh\") * self.up(h))\n        return x + self.norms[3](h)", "h = self.norms[3](x)\n        h = self.down(F.gelu(self.gate(h), approximate=\"tanh\") * self.up(h))\n        return x + self.norms[2](h)"),
    Mistake("gemma2", "theta 1000000", "rotary", "blocks.0.attn", "rope(q, 10000.0), rope(k, 10000.0)", "rope(q, 1e6), rope(k, 1e6)"),
    Mistake("qwen3", "no norm of queries and keys", "norm-missing", "layers.0.self_attn", "        q, k = self.q_norm(q), self.k_norm(k)\n", ""),
    Mistake("qwen3", "norm after rotation", "norm-order", "layers.0.self_attn", "q, k = self.q_norm(q), self.k_norm(k)\n        q, k = rope(q, angles), rope(k, angles)", "q, k = rope(q, angles), rope(k, angles)\n        q, k = self.q_norm(q), self.k_norm(k)"),
    Mistake("qwen3", "norm before the split into heads", "norm-heads", "layers.0.self_attn", "q, k = self.q_norm(q), self.k_norm(k)", "q, k = (t * torch.rsqrt(t.square().mean((-2, -1), keepdim=True) + n.eps) * n.weight for t, n in ((q, self.q_norm), (k, self.k_norm)))"),
    Mistake("qwen3", "norms of queries and keys swapped", "swapped-weights", "layers.0.self_attn", "self.q_norm(q), self.k_norm(k)", "self.k_norm(q), self.q_norm(k)"),
    Mistake("qwen3", "theta 123456", "rotary", "layers.0.self_attn", "theta = self.config.head_dim, self.config.rope_parameters[\"rope_theta\"]", "theta = self.config.head_dim, 123456.0"),
    Mistake("qwen3", "heads tiled", "head-order", "layers.0.self_attn", "y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)", "k, v = (t.repeat(1, q.shape[1] // k.shape[1], 1, 1) for t in (k, v))\n        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)"),
    Mistake("qwen3", "eps 1e-3 in the norms of heads", "norm-eps", "layers.0.self_attn.q_norm", "nn.RMSNorm(c.head_dim, eps=c.rms_norm_eps)", "nn.RMSNorm(c.head_dim, eps=1e-3)"),
    Mistake("qwen3", "rotary pairs", "rotary", "layers.0.self_attn", "    a, b = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]\n", "    a, b = x[..., ::2], x[..., 1::2]\n"),
    Mistake("gpt_neox", "fused in three parts", "split-order", "blocks.0", "view(B, L, self.heads, 3, self.dim).unbind(3)", "view(B, L, 3, self.heads, self.dim).unbind(2)"),
    Mistake("gpt_neox", "whole heads rotated", "rotary", "blocks.0", 'int(self.dim * c.rope_parameters["partial_rotary_factor"])', "self.dim"),
    Mistake("gpt_neox", "sequential residual", "residual-order", "blocks.0", "        return x + attended + self.down(F.gelu(self.up(self.ln2(x))))", "        x = x + attended\n        return x + self.down(F.gelu(self.up(self.ln2(x))))"),
    Mistake("gpt_neox", "rotary pairs", "rotary", "blocks.0", "a, b, rest = x[..., : dims // 2], x[..., dims // 2 : dims], x[..., dims:]\n    return torch.cat((a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos(), rest), -1)", "a, b, rest = x[..., :dims:2], x[..., 1:dims:2], x[..., dims:]\n    return torch.cat((torch.stack((a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), -1).flatten(-2), rest), -1)"),
    Mistake("gpt_neox", "frequencies of the whole head", "rotary", "blocks.0", "(torch.arange(0, dims, 2, device=x.device) / dims)", "(torch.arange(0, dims, 2, device=x.device) / x.shape[-1])"),
    Mistake("gpt_neox", "gelu by tanh", "activation", "blocks.0", "self.up(self.ln2(x))", 'self.up(self.ln2(x)), approximate="tanh"'),
    Mistake("gpt_neox", "no bias after attention", "bias-missing", "blocks.0", "return self.out(", "return F.linear(weight=self.out.weight, input="),
    Mistake("gpt_neox", "one norm for both", "swapped-weights", "blocks.0", "self.up(self.ln2(x))", "self.up(self.ln1(x))"),
    Mistake("gpt_neox", "scale 1/d", "scale", "blocks.0", "self.dim**-0.5", "self.dim**-1.0"),
    Mistake("phi3", "window of one more", "visible", "layers.0.self_attn", "i - j < (", "i - j <= ("),
    Mistake("phi3", "up before gate", "gate-order", "layers.0", "gate, up = self", "up, gate = self"),
    Mistake("phi3", "v before k", "split-order", "layers.0.self_attn", "q, k, v = self.qkv_proj", "q, v, k = self.qkv_proj"),
    Mistake("phi3", "no window", "visible", "layers.0.self_attn", "seen = (j <= i) & (i - j < (self.config.sliding_window or L))", "seen = j <= i"),
    Mistake("phi3", "theta 20000", "rotary", "layers.0.self_attn", "10000.0", "20000.0"),
    Mistake("phi3", "residual divided by √2", "multiplier", "layers.0", "x = x + self.self_attn(self.norm1(x), *rest)", "x = x + self.self_attn(self.norm1(x), *rest) / 2**0.5"),
    Mistake("phi3", "logits divided by 2", "multiplier", "", "return self.lm_head(self.norm(x))", "return self.lm_head(self.norm(x)) / 2"),
    Mistake("phi3", "gate and up interleaved", "gate-order", "layers.0", "self.gate_up_proj(self.norm2(x)).chunk(2, dim=-1)", "self.gate_up_proj(self.norm2(x)).unflatten(-1, (-1, 2)).unbind(-1)"),
    Mistake("phi3", "heads tiled", "head-order", "layers.0.self_attn", "t[:, :, None].expand(-1, -1, self.heads // self.groups, -1, -1)", "t[:, None].expand(-1, self.heads // self.groups, -1, -1, -1)"),
    Mistake("phi3", "rotated backwards", "rotary", "layers.0.self_attn", "torch.cat((-b, a), dim=-1)", "torch.cat((b, -a), dim=-1)"),
]  # fmt: skip
LATER = [
    Mistake("gpt2","eps 1e-3 in the last norm","norm-eps","ln_f","self.ln_f = nn.LayerNorm(config.n_embd)","self.ln_f = nn.LayerNorm(config.n_embd, eps=1e-3)"),
    Mistake("gpt2","no bias in the projection","bias-missing","blocks.0.attn","return self.c_proj(","return F.linear(weight=self.c_proj.weight, input="),
    Mistake("llama","values tiled","head-order","layers.0.attn","k, v = (t.repeat_interleave(self.heads // self.groups, dim=1) for t in (k, v))","k = k.repeat_interleave(self.heads // self.groups, dim=1)\n        v = v.repeat(1, self.heads // self.groups, 1, 1)"),
    Mistake("llama","a window of 6","visible","layers.0.attn",".triu(1)",".triu(1) | torch.ones(L, L, dtype=torch.bool).tril(-6)"),
    Mistake("llama","residual after the norm","multiplier|residual","layers.0","return x + self.w2","return h + self.w2"),
    Mistake("gemma2","scaled twice","scale","blocks.0.attn","scores = torch.tanh(scores /","scores = torch.tanh(scores / 4 /"),
    Mistake("gemma2","no norm before the MLP","norm-missing","blocks.0","h = self.norms[2](x)","h = x"),
    Mistake("qwen3","keys without a norm","norm-missing","layers.0.self_attn","self.q_norm(q), self.k_norm(k)","self.q_norm(q), k"),
    Mistake("gpt_neox","values rotated, too","rotary","blocks.0","        scores = torch.einsum","        v = rotate(v, self.dims, 10000.0)\n        scores = torch.einsum"),
    Mistake("phi3","keys one position further","rotary","layers.0.self_attn","self.rotate(k, cos, sin)","self.rotate(k, cos.roll(1, 0), sin.roll(1, 0))"),
    Mistake("qwen3","half of a head rotated","rotary","layers.0.self_attn","q, k = rope(q, angles), rope(k, angles)","q, k = (torch.cat((rope(t[..., :4], angles[:, :2]), t[..., 4:]), -1) for t in (q, k))"),
    Mistake("gpt_neox","relu","activation","blocks.0","F.gelu","F.relu"),
    Mistake("phi3","squares in the norm without mean","norm-kind|multiplier","layers.0.norm1","wide.pow(2).mean(-1, keepdim=True)","wide.pow(2).sum(-1, keepdim=True)"),
    Mistake("llama","embedding scaled","multiplier","|layers.0","x = self.tok(ids)","x = self.tok(ids) * 8"),
    Mistake("phi3","logits of the second norm","swapped-weights|multiplier","","return self.lm_head(self.norm(x))","return self.lm_head(self.layers[1].norm2(x))"),
]  # fmt: skip
"""Mistakes of other kinds, several outside the catalogue."""

PORTS = Path(__file__).parent / "ports"
FAMILIES = {"gpt2": "GPT2", "llama": "Llama", "gemma2": "Gemma2", "qwen3": "Qwen3", "gpt_neox": "GPTNeoX", "phi3": "Phi3"}
CHANGED = {"Gemma2": {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 10.0}, "GPTNeoX": {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5, "rope_type": "default"}}, "Phi3": {"sliding_window": 5}}  # fmt: skip


def reference(family: str) -> Any:
    """A small model of transformers with large matrices."""
    name = FAMILIES[family]
    cls = getattr(transformers, "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")
    torch.manual_seed(0)
    model = cls(cls.config_class(**{**KINDS["ForCausalLM"][name], **CHANGED.get(name, {})})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(3)
    return model


def port(family: str, mistakes: Sequence[Mistake] = ()) -> dict[str, Any]:
    """The port of a family with mistakes in its source."""
    source = (PORTS / f"{family}.py").read_text()
    for mistake in mistakes:
        assert source.count(mistake.old) == 1, mistake.name
        source = source.replace(mistake.old, mistake.new)
    space: dict[str, Any] = {}
    exec(compile(source, f"{family}.py", "exec"), space)
    return space


def report(family: str, mistakes: Sequence[Mistake] = ()) -> Report:
    model = reference(family)
    space = port(family, mistakes)
    return twin(space["Port"](model.config), model, weights=space["weights"])


def first_of(finding: Finding) -> str:
    """The first module of a finding ("": the model itself)."""
    word = finding.witness.partition("first module: ")[2].partition(" ")[0].strip(",;")
    return "" if word == "Port" else word


def is_named(mistake: Mistake, finding: Finding, with_module: bool = True) -> bool:
    first = first_of(finding)
    is_first = any(first == path or (path and first.startswith(path + ".")) for path in mistake.first.split("|"))
    return finding.id.startswith(tuple(mistake.id.split("|"))) and (is_first or not with_module)


def are_named(both: Sequence[Mistake], findings: Sequence[Finding]) -> bool:
    """Whether each of two mistakes is named by a finding, and nothing else is reported."""
    names = [[is_named(mistake, finding, with_module=False) for finding in findings] for mistake in both]
    return len(findings) == 2 and all(map(any, names)) and all(any(column) for column in zip(*names, strict=True))


def held_out() -> set[int]:
    """A third of the mistakes, on which the catalogue was not tuned."""
    return set(random.Random(0).sample(range(len(MISTAKES)), len(MISTAKES) // 3))


def rights() -> dict[str, Callable[[], Report]]:
    """Comparisons of right implementations."""
    found: dict[str, Callable[[], Report]] = {
        f"{family}: port like transformers": lambda f=family: report(f) for family in FAMILIES
    }

    def ours(name: str, other: Any = None) -> Report:
        theirs = build(name)
        with TemporaryDirectory() as folder:
            theirs.save_pretrained(folder)
            return twin(load_hf(folder) if other is None else other(folder), theirs)

    def adopted(name: str) -> Report:
        theirs = build(name)
        return twin(adopt_hf(copy.deepcopy(theirs)), theirs)

    for name in ("GPT2", "Llama", "Mistral", "Qwen2", "Gemma2"):
        found[f"{name}: load_hf like transformers"] = lambda name=name: ours(name)
    for name in ("Phi3", "GPTNeoX", "Olmo2", "Cohere"):
        found[f"{name}: adopt_hf like transformers"] = lambda name=name: adopted(name)
    found["Llama: eager like sdpa"] = lambda: ours(
        "Llama", lambda folder: transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    )

    def port_like_ours() -> Report:
        theirs, space = build("Llama"), port("llama")
        mine = space["Port"](theirs.config)
        mine.load_state_dict(space["weights"](theirs.state_dict()))
        with TemporaryDirectory() as folder:
            theirs.save_pretrained(folder)
            return twin(mine, load_hf(folder))

    found["Llama: port like load_hf"] = port_like_ours
    return found


def pairs(number: int) -> list[tuple[Mistake, Mistake]]:
    """Random pairs of mistakes of one family whose edits do not overlap."""
    draw, chosen = random.Random(1), list[tuple[Mistake, Mistake]]()
    while len(chosen) < number:
        one, two = draw.sample(MISTAKES, 2)
        source = (PORTS / f"{one.family}.py").read_text()
        is_apart = one.old not in two.new and source.replace(one.old, one.new).count(two.old) == 1
        if one.family == two.family and is_apart and (one, two) not in chosen and one.id != two.id:
            chosen.append((one, two))
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="mistakes whose kind, family and name have these words")
    parser.add_argument("--pairs", type=int, default=0, help="the number of random pairs of mistakes")
    parser.add_argument("--right", action="store_true", help="compare right implementations")
    options = parser.parse_args()
    torch.set_num_threads(1)
    hits, seconds = Counter(), list[float]()

    def row(kind: str, name: str, call: Callable[[], Report], judge: Callable[[tuple[Finding, ...]], bool]) -> None:
        start = time.process_time()
        try:
            findings = call().findings
        except Exception as error:
            findings = (Finding(f"raised {type(error).__name__}: {error}", Severity.WRONG, ""),)
        seconds.append(time.process_time() - start)
        is_right = judge(findings)
        hits[kind, "tried"] += 1
        hits[kind, "right"] += is_right
        words = ", ".join(f"{finding.id} in {first_of(finding) or 'the model'}" for finding in findings) or "equal"
        print(f"| {kind} | {name} | {words} | {'yes' if is_right else '**no**'} | {seconds[-1]:.1f} |", flush=True)

    if options.right:
        for name, call in rights().items():
            row("right", name, call, lambda findings: all(f.severity == Severity.NOTE for f in findings))
    elif options.pairs:
        for both in pairs(options.pairs):
            name = f"{both[0].family}: {both[0].name} + {both[1].name}"
            row(
                "pair",
                name,
                lambda both=both: report(both[0].family, both),
                lambda findings, both=both: are_named(both, findings),
            )
    else:
        for number, mistake in enumerate([*MISTAKES, *LATER]):
            kind = "held out" if number in held_out() else "mistake" if number < len(MISTAKES) else "later"
            if options.only in f"{kind} {mistake.family} {mistake.name}":
                call = lambda mistake=mistake: report(mistake.family, [mistake])  # noqa: E731
                row(kind, f"{mistake.family}: {mistake.name}", call, lambda f, m=mistake: len(f) == 1 and is_named(m, f[0]))
    print(dict(hits), f"{max(seconds):.1f} seconds at most, {sum(seconds):.0f} in all")


if __name__ == "__main__":
    main()
