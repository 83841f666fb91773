"""Other people's decoders and ours with the same weights: what the benchmarks of training and decoding compare.

Each peer is built from one ``TransformerConfig`` as its own documentation has it, and gets the weights of ours, so that equal
answers show that both sides compute the same thing. Where a peer lacks a bias, ours goes without it too.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitx.config import TransformerConfig
from minitx.interop import load_hf
from minitx.nn import DecoderLM


@dataclass(frozen=True)
class Peer:
    """A decoder of others, and ours with the same weights; ``logits`` are those of (B, L) ids.

    ``own_loss`` is for a module that makes its mean cross-entropy of ids and labels by itself.
    """

    name: str
    module: nn.Module
    logits: Callable[[Tensor], Tensor]
    ours: DecoderLM
    own_loss: Callable[[Tensor, Tensor], Tensor] | None = None

    def loss(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy of (B, L) labels."""
        return loss_of(self.logits(ids), labels) if self.own_loss is None else self.own_loss(ids, labels)


def decoder(vocab_size: int, width: int, layers: int, context: int, **more: Any) -> TransformerConfig:
    """GPT-2's architecture in another size: heads of 32 up to width 256, of 64 from there on."""
    heads = width // (32 if width <= 256 else 64)
    return TransformerConfig(
        vocab_size=vocab_size, embed_dim=width, num_layers=layers, num_heads=heads, max_len=context, **more
    )


def hugging_face(config: TransformerConfig) -> Peer:
    """``GPT2LMHeadModel`` with torch's fused attention, without dropout, and without the cache that training would throw away."""
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers import logging as spoken

    spoken.set_verbosity_error()
    spoken.disable_progress_bar()
    sizes = {"vocab_size": config.vocab_size, "n_positions": config.max_len, "n_embd": config.embed_dim}
    sizes |= {"n_layer": config.num_layers, "n_head": config.num_heads}
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None}
    theirs = GPT2LMHeadModel(GPT2Config(**sizes, **none, attn_implementation="sdpa"))  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = load_hf(folder)
    assert isinstance(ours, DecoderLM)
    return Peer("Hugging Face GPT-2", theirs, lambda ids: theirs(input_ids=ids, use_cache=False).logits, ours)


def x_transformers(config: TransformerConfig) -> Peer:
    """``TransformerWrapper(Decoder)`` with flash attention on; it has no biases in attention and norms."""
    from x_transformers import Decoder, TransformerWrapper

    E, D = config.embed_dim, config.width_per_head
    layers = Decoder(dim=E, depth=config.num_layers, heads=config.num_heads, attn_dim_head=D, attn_flash=True)
    theirs = TransformerWrapper(
        num_tokens=config.vocab_size,
        max_seq_len=config.max_len,
        attn_layers=layers,
        tie_embedding=True,
        tie_embedding_scale=1.0,
    )
    ours = DecoderLM(dataclasses.replace(config, qkv_bias=False, out_bias=False))
    scale = theirs.pos_emb.scale
    pairs = [
        (theirs.token_emb.emb.weight, ours.embeddings.token.weight),
        (theirs.pos_emb.emb.weight, ours.embeddings.position.table.weight / scale),
    ]
    for block, (attend, feed) in zip(ours.blocks, _in_twos(theirs.attn_layers.layers), strict=True):
        names = {"to_q": "q_proj", "to_k": "k_proj", "to_v": "v_proj", "to_out": "out_proj"}
        pairs += [(getattr(attend[1], a).weight, getattr(block.attention, b).weight) for a, b in names.items()]
        up, down = (m for m in feed[1].modules() if isinstance(m, nn.Linear))
        pairs += _linear(up, block.feedforward.up_proj) + _linear(down, block.feedforward.down_proj)
    _copy(pairs)  # norms begin alike on both sides
    return Peer("x-transformers", theirs, theirs, ours)


class TorchDecoder(nn.Module):
    """Embeddings, ``nn.TransformerEncoder`` with a causal mask, and a tied head: what torch itself has for the purpose."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        E, pre = config.embed_dim, config.norm_position == "pre"
        self.token, self.position = nn.Embedding(config.vocab_size or 0, E), nn.Embedding(config.max_len, E)
        layer = nn.TransformerEncoderLayer(
            E, config.num_heads, config.ffn_width, dropout=0.0, activation="gelu", batch_first=True, norm_first=pre
        )
        norm = nn.LayerNorm(E) if pre else None
        self.encoder = nn.TransformerEncoder(layer, config.num_layers, norm=norm, enable_nested_tensor=False)

    def forward(self, ids: Tensor) -> Tensor:
        L = ids.shape[1]
        x = self.token(ids) + self.position(torch.arange(L))
        mask = nn.Transformer.generate_square_subsequent_mask(L)
        return F.linear(self.encoder(x, mask=mask, is_causal=True), self.token.weight)


def torch_encoder(config: TransformerConfig) -> Peer:
    """``nn.TransformerEncoder``; pre- or post-norm, as ``config`` says."""
    theirs, ours = TorchDecoder(config), DecoderLM(config)
    pairs = [
        (theirs.token.weight, ours.embeddings.token.weight),
        (theirs.position.weight, ours.embeddings.position.table.weight),
    ]
    for layer, block in zip(theirs.encoder.layers, ours.blocks, strict=True):
        layer.self_attn.load_state_dict(block.attention.to_torch().state_dict())
        pairs += _linear(layer.linear1, block.feedforward.up_proj) + _linear(layer.linear2, block.feedforward.down_proj)
    _copy(pairs)
    return Peer(f"nn.TransformerEncoder, {config.norm_position}-norm", theirs, theirs, ours)


def nano_gpt(config: TransformerConfig, checkout: Path) -> Peer:
    """``GPT`` of ``model.py`` in a checkout of nanoGPT, with biases and without dropout; the head sees all positions, as in training."""
    module = _load(checkout / "model.py")
    names = ("vocab_size", "n_layer", "n_head", "n_embd", "block_size")
    sizes = (config.vocab_size, config.num_layers, config.num_heads, config.embed_dim, config.max_len)
    theirs = module.GPT(module.GPTConfig(**dict(zip(names, sizes, strict=True)), dropout=0.0, bias=True))
    ours, body = DecoderLM(config), theirs.transformer
    pairs = [(body.wte.weight, ours.embeddings.token.weight), (body.wpe.weight, ours.embeddings.position.table.weight)]
    for layer, block in zip(body.h, ours.blocks, strict=True):
        attention = block.attention
        joined = [
            torch.cat([getattr(p, kind) for p in (attention.q_proj, attention.k_proj, attention.v_proj)])
            for kind in ("weight", "bias")
        ]
        pairs += [(layer.attn.c_attn.weight, joined[0]), (layer.attn.c_attn.bias, joined[1])]
        pairs += _linear(layer.attn.c_proj, attention.out_proj)
        pairs += _linear(layer.mlp.c_fc, block.feedforward.up_proj) + _linear(layer.mlp.c_proj, block.feedforward.down_proj)
    _copy(pairs)
    return Peer("nanoGPT", theirs, lambda ids: theirs(ids, ids)[0], ours, lambda ids, labels: theirs(ids, labels)[1])


def check_equal(peer: Peer, ids: Tensor, labels: Tensor) -> float:
    """The loss that both sides give; ends the benchmark where they differ by more than rounding."""
    with torch.no_grad():
        theirs, ours = float(peer.loss(ids, labels)), float(loss_of(peer.ours(ids), labels))
    if not abs(theirs - ours) <= 1e-5 * abs(ours):
        raise SystemExit(f"error: {peer.name} has the loss {theirs}, ours {ours}: there is nothing to compare")
    return ours


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy, (B, L, V) and (B, L)."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def num_parameters(module: nn.Module) -> int:
    """Scalars that are trained; a tied head counts once."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


def _load(path: Path) -> ModuleType:
    if not path.is_file():
        raise SystemExit(f"error: --nanogpt: {path} does not exist")
    found = importlib.util.spec_from_file_location("nanogpt_model", path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module  # its dataclass looks itself up there
    found.loader.exec_module(module)
    return module


def _in_twos(layers: Iterable[Any]) -> Iterable[tuple[Any, Any]]:
    every = iter(layers)
    return zip(every, every, strict=True)


def _linear(theirs: nn.Linear, ours: nn.Linear) -> list[tuple[Tensor, Tensor]]:
    return [(theirs.weight, ours.weight), (theirs.bias, ours.bias)]


@torch.no_grad()
def _copy(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Into the first of each pair what stands in the second."""
    for target, source in pairs:
        target.copy_(source)
