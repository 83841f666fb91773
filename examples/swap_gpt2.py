"""Our attention in the GPT-2 of ``transformers``: two lines, equal outputs, their cache and their ``generate``.

``transformers`` calls its attention in a way of its own (``hidden_states``, ``past_key_values``, a mask that it has built), so a small
adapter stands between: ``OurAttention`` copies the weights and translates the call, ``TheirCache`` lets our layer append to their cache.

    python examples/swap_gpt2.py

needs ``transformers``, no network (the weights are random), and prints the largest difference of the logits in float32 and float64, with
left padding and with a cache, and whether ``generate`` gives the same tokens.

Not covered: cross-attention, ``output_attentions=True`` (``minitx.analysis.capture`` shows the weights), and ``attn_implementation=
"eager"``, which hands over additive masks: our layer refuses those with a sentence. To have all of GPT-2 here: ``minitx.interop.load_hf``.
"""

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from minitx.nn import MultiHeadAttention


class TheirCache:
    """One layer of ``past_key_values``, as our attention uses a cache: append, and get everything so far."""

    memory = None  # that of cross-attention

    def __init__(self, past_key_values, layer: int) -> None:
        self.append = lambda key, value: past_key_values.update(key, value, layer)


class OurAttention(nn.Module):
    """``MultiHeadAttention`` with the weights of a ``GPT2Attention``, called as ``transformers`` calls that."""

    def __init__(self, theirs: nn.Module) -> None:
        super().__init__()
        dropout = theirs.attn_dropout.p
        attention = MultiHeadAttention(theirs.embed_dim, theirs.num_heads, scale=theirs.scaling, dropout=dropout)
        self.attention, self.resid_dropout, self.layer = (
            attention.to(theirs.c_proj.weight),
            theirs.resid_dropout,
            theirs.layer_idx,
        )
        weights = (*theirs.c_attn.weight.T.chunk(3), theirs.c_proj.weight.T)  # theirs are (in, out), and q, k, v are one
        biases = (*theirs.c_attn.bias.chunk(3), theirs.c_proj.bias)
        ours = attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj
        with torch.no_grad():
            for linear, weight, bias in zip(ours, weights, biases, strict=True):
                linear.weight.copy_(weight), linear.bias.copy_(bias)
        self.train(theirs.training)

    def forward(self, hidden_states: Tensor, past_key_values=None, attention_mask: Tensor | None = None, **unused):
        cache = None if past_key_values is None else TheirCache(past_key_values, self.layer)
        # bool (B, 1, L, S), True = may attend, as here; None is their way of saying "causal, nothing else"
        out = self.attention(hidden_states, attn_mask=attention_mask, is_causal=attention_mask is None, cache=cache)
        return self.resid_dropout(out), None


def their_model(dtype: torch.dtype = torch.float32) -> GPT2LMHeadModel:
    """A GPT-2 with random weights, large enough that attention counts, in evaluation mode."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "n_positions": 64, "n_embd": 48, "n_layer": 3, "n_head": 4}
    config = GPT2Config(**sizes, initializer_range=0.2, bos_token_id=0, eos_token_id=1)
    return GPT2LMHeadModel(config).to(dtype).eval()


def swap(model: GPT2LMHeadModel) -> None:
    """The replacement."""
    for block in model.transformer.h:
        block.attn = OurAttention(block.attn)


def whole(model: GPT2LMHeadModel, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """The logits of a prompt read in one call."""
    return model(input_ids, attention_mask=attention_mask).logits


def in_two_pieces(model: GPT2LMHeadModel, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """The logits of a prompt read in two calls, the second with the cache of the first."""
    first = model(input_ids[:, :11], attention_mask=attention_mask[:, :11], use_cache=True)
    second = model(input_ids[:, 11:], attention_mask=attention_mask, past_key_values=first.past_key_values)
    return torch.cat((first.logits, second.logits), dim=1)


@torch.no_grad()
def main() -> dict[str, float | bool]:
    """Print and return what was measured."""
    input_ids = torch.randint(2, 97, (3, 17), generator=torch.Generator().manual_seed(1))
    real = torch.arange(17) >= torch.tensor([[0], [4], [9]])  # left-padded prompts; what stands at padding is nobody's business
    found: dict[str, float | bool] = {}
    for dtype in (torch.float32, torch.float64):
        theirs, ours = their_model(dtype), their_model(dtype)
        swap(ours)
        for run in (whole, in_two_pieces):
            for mask in (torch.ones_like(real), real):
                want, got = (run(model, input_ids, mask.long())[mask] for model in (theirs, ours))
                what = f"{dtype}, {run.__name__}{'' if mask.all() else ', left-padded'}".removeprefix("torch.").replace(
                    "_", " "
                )
                found[what] = (got - want).abs().max().item()
                print(f"largest difference of the logits, {what}: {found[what]:.1e}")
    options = {"attention_mask": real.long(), "max_new_tokens": 20, "do_sample": False, "pad_token_id": 1}
    found["same tokens"] = torch.equal(*(model.generate(input_ids, **options) for model in (theirs, ours)))
    print(
        f"generate, 20 greedy tokens after left-padded prompts: {'the same tokens' if found['same tokens'] else 'OTHER tokens'}"
    )
    return found


if __name__ == "__main__":
    main()
