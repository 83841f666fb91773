"""Other people's models and ours with the same weights.

Each peer is built from one ``TransformerConfig`` as its own documentation has it. The decoders get our weights, so that equal
losses show that both sides compute the same thing. Where a peer lacks a bias, ours goes without it too.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitx.config import TransformerConfig
from minitx.nn import DecoderLM

NANOGPT = os.environ.get("NANOGPT")
"""A checkout of nanoGPT (it is not a package); its rows are measured if the environment names one."""


@dataclass(frozen=True)
class Peer:
    """A decoder of others, and ours with the same weights; ``loss`` is theirs, of (B, L) ids and labels."""

    name: str
    module: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor]
    ours: nn.Module

    def our_loss(self, ids: Tensor, labels: Tensor) -> Tensor:
        """The same of ours."""
        return loss_of(self.ours(ids), labels)


def decoder(vocab_size: int, width: int, layers: int, context: int, **more: Any) -> TransformerConfig:
    """GPT-2's architecture in another size: heads of 32 up to width 256, of 64 from there on."""
    sizes = {"embed_dim": width, "num_layers": layers, "num_heads": width // (32 if width <= 256 else 64), "max_len": context}
    return TransformerConfig(vocab_size=vocab_size, **sizes, **more)  # type: ignore[arg-type]


def decoders(config: TransformerConfig) -> Iterator[Peer]:
    """Every peer that is here."""
    yield hugging_face(config)
    yield x_transformers(config)
    yield torch_encoder(config)
    yield torch_encoder(dataclasses.replace(config, norm_position="post"))
    if NANOGPT:
        yield nano_gpt(config, NANOGPT)


def hugging_face(config: TransformerConfig) -> Peer:
    """``GPT2LMHeadModel`` with torch's fused attention, without dropout, and without the cache that training would throw away."""
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers import logging as spoken

    from minitx.interop import load_hf

    spoken.set_verbosity_error()
    spoken.disable_progress_bar()
    sizes = {"vocab_size": config.vocab_size, "n_positions": config.max_len, "n_embd": config.embed_dim}
    sizes |= {"n_layer": config.num_layers, "n_head": config.num_heads}
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None}
    theirs = GPT2LMHeadModel(GPT2Config(**sizes, **none, attn_implementation="sdpa"))  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = load_hf(folder)
    return Peer("Hugging Face GPT-2", theirs, lambda ids, y: loss_of(theirs(input_ids=ids, use_cache=False).logits, y), ours)


def x_transformers(config: TransformerConfig) -> Peer:
    """``TransformerWrapper(Decoder)`` with flash attention on; it has no biases in attention and norms."""
    from x_transformers import Decoder, TransformerWrapper

    E, D = config.embed_dim, config.width_per_head
    layers = Decoder(dim=E, depth=config.num_layers, heads=config.num_heads, attn_dim_head=D, attn_flash=True)
    sizes = {"num_tokens": config.vocab_size, "max_seq_len": config.max_len, "attn_layers": layers}
    theirs = TransformerWrapper(**sizes, tie_embedding=True, tie_embedding_scale=1.0)
    ours = DecoderLM(dataclasses.replace(config, qkv_bias=False, out_bias=False))
    position = ours.embeddings.position.table.weight / theirs.pos_emb.scale
    pairs = [(theirs.token_emb.emb.weight, ours.embeddings.token.weight), (theirs.pos_emb.emb.weight, position)]
    every = iter(theirs.attn_layers.layers)
    for block, attend, feed in zip(ours.blocks, every, every, strict=True):
        names = {"to_q": "q_proj", "to_k": "k_proj", "to_v": "v_proj", "to_out": "out_proj"}
        pairs += [(getattr(attend[1], a).weight, getattr(block.attention, b).weight) for a, b in names.items()]
        up, down = (m for m in feed[1].modules() if isinstance(m, nn.Linear))
        pairs += _linear(up, block.feedforward.up_proj) + _linear(down, block.feedforward.down_proj)
    _copy(pairs)  # norms begin alike on both sides
    return Peer("x-transformers", theirs, lambda ids, y: loss_of(theirs(ids), y), ours)


class TorchModel(nn.Module):
    """What torch itself has for the purpose: embeddings, ``nn.TransformerEncoder`` and a head, as ``config`` says."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        E, V, pre = config.embed_dim, config.vocab_size or 0, config.norm_position == "pre"
        self.causal = config.architecture == "decoder"
        self.token, self.position = nn.Embedding(V, E), nn.Embedding(config.max_len, E)
        self.norm = nn.LayerNorm(E) if config.embed_norm else nn.Identity()
        layer = nn.TransformerEncoderLayer(E, config.num_heads, config.ffn_width, 0.0, "gelu", batch_first=True, norm_first=pre)
        norm = nn.LayerNorm(E) if pre else None
        self.body = nn.TransformerEncoder(layer, config.num_layers, norm=norm, enable_nested_tensor=not self.causal and not pre)
        self.head = nn.Linear(E, V, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.token.weight

    def forward(self, input_ids: Tensor, key_mask: Tensor | None = None) -> Tensor:
        L = input_ids.shape[1]
        x = self.norm(self.token(input_ids) + self.position.weight[:L])
        mask = nn.Transformer.generate_square_subsequent_mask(L) if self.causal else None
        padding = None if key_mask is None else ~key_mask
        return self.head(self.body(x, mask=mask, src_key_padding_mask=padding, is_causal=self.causal))


def torch_encoder(config: TransformerConfig) -> Peer:
    """``nn.TransformerEncoder`` with a causal mask; pre- or post-norm, as ``config`` says."""
    theirs, ours = TorchModel(config), DecoderLM(config)
    embeddings = ours.embeddings
    pairs = [(theirs.token.weight, embeddings.token.weight), (theirs.position.weight, embeddings.position.table.weight)]
    for layer, block in zip(theirs.body.layers, ours.blocks, strict=True):
        layer.self_attn.load_state_dict(block.attention.to_torch().state_dict())
        pairs += _linear(layer.linear1, block.feedforward.up_proj) + _linear(layer.linear2, block.feedforward.down_proj)
    _copy(pairs)
    name = f"nn.TransformerEncoder, {config.norm_position}-norm"
    return Peer(name, theirs, lambda ids, y: loss_of(theirs(ids), y), ours)


def nano_gpt(config: TransformerConfig, checkout: str) -> Peer:
    """``GPT`` of ``model.py`` in a checkout of nanoGPT, without dropout; the head sees all positions, as in training."""
    if not (path := Path(checkout) / "model.py").is_file():
        raise SystemExit(f"error: nanogpt: {path} does not exist")
    sys.path.append(checkout)
    module = importlib.import_module("model")
    sizes = {"vocab_size": config.vocab_size, "n_embd": config.embed_dim, "block_size": config.max_len}
    sizes |= {"n_layer": config.num_layers, "n_head": config.num_heads}
    theirs = module.GPT(module.GPTConfig(**sizes, dropout=0.0, bias=config.bias))
    ours, body = DecoderLM(config), theirs.transformer
    pairs = [(body.wte.weight, ours.embeddings.token.weight), (body.wpe.weight, ours.embeddings.position.table.weight)]
    for layer, block in zip(body.h, ours.blocks, strict=True):
        attention, feed = block.attention, block.feedforward
        three = (attention.q_proj, attention.k_proj, attention.v_proj)
        for kind in ("weight", "bias") if config.bias else ("weight",):
            pairs.append((getattr(layer.attn.c_attn, kind), torch.cat([getattr(p, kind) for p in three])))
        for theirs_, ours_ in zip((layer.attn.c_proj, layer.mlp.c_fc, layer.mlp.c_proj),
                                  (attention.out_proj, feed.up_proj, feed.down_proj), strict=True):  # fmt: skip
            pairs += _linear(theirs_, ours_)
    _copy(pairs)
    return Peer("nanoGPT", theirs, lambda ids, y: theirs(ids, y)[1], ours)


class Bert(nn.Module):
    """transformers' BERT with a head as in ``TorchModel``."""

    def __init__(self, body: nn.Module, config: TransformerConfig) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(config.embed_dim, config.vocab_size or 0, bias=False)

    def forward(self, input_ids: Tensor, key_mask: Tensor) -> Tensor:
        return self.head(self.body(input_ids=input_ids, attention_mask=key_mask).last_hidden_state)


def hugging_face_encoder(config: TransformerConfig) -> nn.Module:
    """``Bert`` in our sizes."""
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": config.embed_dim, "num_hidden_layers": config.num_layers, "intermediate_size": config.ffn_width}
    sizes |= {"num_attention_heads": config.num_heads, "max_position_embeddings": config.max_len, "type_vocab_size": 1}
    plain = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "attn_implementation": "sdpa"}
    theirs = BertConfig(vocab_size=config.vocab_size, **sizes, **plain)  # type: ignore[arg-type]
    return Bert(BertModel(theirs, add_pooling_layer=False), config)


def check_equal(peer: Peer, ids: Tensor, labels: Tensor) -> float:
    """The loss that both sides give; ends the benchmark where losses or numbers of parameters differ by more than rounding."""
    with torch.no_grad():
        theirs, ours = float(peer.loss(ids, labels)), float(peer.our_loss(ids, labels))
    counts = [sum(p.numel() for p in module.parameters()) for module in (peer.module, peer.ours)]
    if not abs(theirs - ours) <= 1e-5 * abs(ours) or abs(counts[0] / counts[1] - 1) >= 0.01:
        raise SystemExit(f"error: {peer.name} has the loss {theirs} and {counts[0]} parameters, ours {ours} and {counts[1]}")
    return ours


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy, (B, L, V) and (B, L)."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _linear(theirs: nn.Linear, ours: nn.Linear) -> list[tuple[Tensor, Tensor]]:
    return [(theirs.weight, ours.weight), *([(theirs.bias, ours.bias)] if ours.bias is not None else [])]


@torch.no_grad()
def _copy(pairs: Iterable[tuple[Any, Any]]) -> None:
    """Into the first of each pair what stands in the second."""
    for target, source in pairs:
        target.copy_(source)
