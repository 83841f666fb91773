"""Replace the attention of GPT-2 in ``transformers`` by ``MultiHeadAttention``.

``transformers`` calls its attention with other arguments: ``hidden_states``, ``past_key_values`` and a mask. ``OurAttention`` is an adapter
that copies the weights and translates the call. ``TheirCache`` lets our layer append to their cache. The outputs stay equal, and their
cache and their ``generate`` still work.

    python examples/swap_gpt2.py

This needs ``transformers``, but no network, because the weights are random. It prints the largest difference of the logits in float32 and
float64, with and without left padding and a cache, and whether ``generate`` returns the same tokens.

Not covered are cross-attention, ``output_attentions=True`` (use ``minitx.analysis.recorder`` to see the weights), and
``attn_implementation="eager"``, whose masks are floats; our layer raises a TypeError for them. To load a whole GPT-2 as a minitx model, use
``minitx.interop.load_hf``.
"""

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from minitx.nn import MultiHeadAttention


class TheirCache:
    """One layer of ``past_key_values``, with the interface of a minitx cache: ``append`` returns all keys and values so far."""

    memory = None  # used in cross-attention only

    def __init__(self, past_key_values, layer: int) -> None:
        self.append = lambda key, value: past_key_values.update(key, value, layer)

    def advance(self, num_new: int) -> None:
        """Their cache counts by itself."""


class OurAttention(nn.Module):
    """A ``MultiHeadAttention`` with the weights of a ``GPT2Attention`` and its arguments."""

    def __init__(self, theirs: nn.Module) -> None:
        super().__init__()
        dropout = theirs.attn_dropout.p
        attention = MultiHeadAttention(theirs.embed_dim, theirs.num_heads, scale=theirs.scaling, dropout=dropout)
        self.attention = attention.to(theirs.c_proj.weight)
        self.resid_dropout, self.layer = theirs.resid_dropout, theirs.layer_idx
        # their matrices have shape (in, out), and c_attn holds q, k and v
        weights = (*theirs.c_attn.weight.T.chunk(3), theirs.c_proj.weight.T)
        biases = (*theirs.c_attn.bias.chunk(3), theirs.c_proj.bias)
        ours = attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj
        with torch.no_grad():
            for linear, weight, bias in zip(ours, weights, biases, strict=True):
                linear.weight.copy_(weight), linear.bias.copy_(bias)
        self.train(theirs.training)

    def forward(self, hidden_states: Tensor, past_key_values=None, attention_mask: Tensor | None = None, **unused):
        cache = None if past_key_values is None else TheirCache(past_key_values, self.layer)
        # attention_mask is bool (B, 1, L, S), True = may attend, or None for a causal mask
        out = self.attention(hidden_states, attn_mask=attention_mask, is_causal=attention_mask is None, cache=cache)
        return self.resid_dropout(out), None


def their_model(dtype: torch.dtype = torch.float32) -> GPT2LMHeadModel:
    """Return a GPT-2 in evaluation mode, with random weights that are large enough for attention to matter."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "n_positions": 64, "n_embd": 48, "n_layer": 3, "n_head": 4}
    config = GPT2Config(**sizes, initializer_range=0.2, bos_token_id=0, eos_token_id=1)
    return GPT2LMHeadModel(config).to(dtype).eval()


def swap(model: GPT2LMHeadModel) -> None:
    """Replace the attention of each block."""
    for block in model.transformer.h:
        block.attn = OurAttention(block.attn)


def whole(model: GPT2LMHeadModel, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Return the logits of a prompt that is read in one call."""
    return model(input_ids, attention_mask=attention_mask).logits


def in_two_pieces(model: GPT2LMHeadModel, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Return the logits of a prompt that is read in two calls, the second with the cache of the first."""
    first = model(input_ids[:, :11], attention_mask=attention_mask[:, :11], use_cache=True)
    second = model(input_ids[:, 11:], attention_mask=attention_mask, past_key_values=first.past_key_values)
    return torch.cat((first.logits, second.logits), dim=1)


@torch.no_grad()
def main() -> dict[str, float | bool]:
    """Print and return the results."""
    input_ids = torch.randint(2, 97, (3, 17), generator=torch.Generator().manual_seed(1))
    real = torch.arange(17) >= torch.tensor([[0], [4], [9]])  # left-padded prompts; logits at padding are not compared
    results: dict[str, float | bool] = {}
    for dtype in (torch.float32, torch.float64):
        theirs, ours = their_model(dtype), their_model(dtype)
        swap(ours)
        for run in (whole, in_two_pieces):
            for mask in (torch.ones_like(real), real):
                expected, actual = (run(model, input_ids, mask.long())[mask] for model in (theirs, ours))
                precision, way = str(dtype).removeprefix("torch."), run.__name__.replace("_", " ")
                name = f"{precision}, {way}{'' if mask.all() else ', left-padded'}"
                results[name] = (actual - expected).abs().max().item()
                print(f"largest difference of the logits, {name}: {results[name]:.1e}")
    options = {"attention_mask": real.long(), "max_new_tokens": 20, "do_sample": False, "pad_token_id": 1}
    results["same tokens"] = torch.equal(*(model.generate(input_ids, **options) for model in (theirs, ours)))
    print(f"generate returns the same 20 tokens after left-padded prompts: {results['same tokens']}")
    return results


if __name__ == "__main__":
    main()
