"""LoRA on one of our models, with the ``peft`` library: train 3 % of the numbers, keep the rest as they are.

Hu et al. 2021, arXiv:2106.09685: W stays frozen and W + (α / r) B A is used, with B (out, r) and A (r, in) to be learned. ``q_proj`` and
``v_proj`` are plain ``nn.Linear`` layers of ``MultiHeadAttention``, so ``peft`` finds them by their names.

    python examples/lora.py

teaches a frozen random model to copy the last token, and prints the loss before and after, the share of numbers that were trained, and
how far the merged model is from the one with adapters.
"""

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import nn

from minitx.config import TransformerConfig
from minitx.nn import DecoderLM


def main() -> dict[str, float]:
    """Train the adapters, merge them, and return what the docstring names."""
    torch.manual_seed(0)
    config = TransformerConfig(
        vocab_size=29, embed_dim=64, num_heads=4, num_layers=2, max_len=16, init="lecun", tie_embeddings=False
    )
    base = DecoderLM(config)
    # inside of a Sequential: peft reads a `config` of the outermost module as one of transformers
    model = get_peft_model(nn.Sequential(base), LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "out_proj"]))
    frozen = {name: tensor.clone() for name, tensor in base.state_dict().items() if "lora" not in name}
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, losses = torch.optim.AdamW(learned, lr=1e-2), []
    for _ in range(150):
        ids = torch.randint(29, (32, 16))
        loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(torch.equal(tensor, base.state_dict()[name]) for name, tensor in frozen.items())
    share = sum(p.numel() for p in learned) / sum(p.numel() for p in model.parameters())
    ids = torch.randint(29, (4, 16))
    with torch.no_grad():
        adapted = model(ids)
        gap = (model.merge_and_unload()(ids) - adapted).abs().max().item()  # one matrix again: nothing is slower afterwards
    found = {"loss before": losses[0], "loss after": losses[-1], "share of numbers trained": share, "merged minus adapted": gap}
    for name, number in found.items():
        print(f"{name}: {number:.3g}")
    return found


if __name__ == "__main__":
    main()
