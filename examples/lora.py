"""LoRA with the ``peft`` library: train 3 % of the parameters of a model and keep the others frozen.

Hu et al. 2021, arXiv:2106.09685. A frozen matrix W is replaced by W + (α / r) B A, where B (out, r) and A (r, in) are trained.
``q_proj``, ``v_proj`` and ``out_proj`` are ``nn.Linear`` layers of ``MultiHeadAttention``; ``peft`` finds them by name.

    python examples/lora.py

This trains a random model to copy the last token. It prints the loss before and after training, the share of parameters that were
trained, and the largest difference between the logits before and after the adapters are merged into the weights.
"""

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import nn

from minitx.config import TransformerConfig
from minitx.nn import DecoderLM


def main() -> dict[str, float]:
    """Train the adapters, merge them, and print and return the results."""
    torch.manual_seed(0)
    config = TransformerConfig(
        vocab_size=29, embed_dim=64, num_heads=4, num_layers=2, max_len=16, init="lecun", tie_embeddings=False
    )
    base = DecoderLM(config)
    # in a Sequential, because peft would read the attribute `config` of the model as a config of transformers
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
        gap = (model.merge_and_unload()(ids) - adapted).abs().max().item()  # W and B A become one matrix
    results = {
        "loss before": losses[0],
        "loss after": losses[-1],
        "share of numbers trained": share,
        "merged minus adapted": gap,
    }
    for name, number in results.items():
        print(f"{name}: {number:.3g}")
    return results


if __name__ == "__main__":
    main()
