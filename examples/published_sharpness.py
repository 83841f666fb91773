"""Cohen et al. 2022: full-batch Adam trains at the edge of stability, where the preconditioned sharpness is 38/η.

Claim (arXiv:2207.14484): Adam is gradient descent with momentum, preconditioned by P = (1 − β₁ᵗ) (√v̂ + ε), where v̂ is the bias-corrected
second moment after t updates. With P held fixed it is stable while the largest eigenvalue λ of P⁻¹H (H the Hessian of the loss) is below
(2 + 2 β₁) / ((1 − β₁) η), which is 38/η at β₁ = 0.9. In full-batch training λ rises to this value and stays near it.

Setting: recall of 8 pairs, width 128, one head of d_k 128, solved with AdamW (rate 0.0032) on new batches to 99 %. Then full-batch Adam on 128
fixed rows, in two arms that start as the same function: with 1/√d_k, and without (``fold_scale``). λ is found by 12 steps of Lanczos, with
Hessian-vector products by autograd. The number shown is λη at five moments in the last quarter of the run.

Limits: a small model on few rows. With plain cross-entropy a solved model has no minimum to settle at: the loss goes to 0, and the Hessian
with it. Label smoothing of 0.1 gives it one. The paper trains from random weights on natural data, and has no second arm.

``python examples/published_sharpness.py`` takes minutes on one core.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Iterable, Sequence

import torch
from published import Record, markdown, run, spread
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from minitx.config import TransformerConfig
from minitx.data import kv_lookup
from minitx.data.seeding import generator
from minitx.data.task import Batch
from minitx.nn import DecoderLM, fold_scale
from minitx.training.optimizers import adamw

PAPER = 38.0
TASK = kv_lookup(num_keys=32, num_pairs=8)
CASES = ((0.1, 0.95, 3e-4), (0.1, 0.95, 1e-3), (0.1, 0.95, 3e-3), (0.1, 0.95, 1e-2), (0.1, 0.999, 1e-3), (0.0, 0.95, 1e-3))
"""Label smoothing, β₂ and the rate η."""


def recall_loss(model: nn.Module, batch: Batch, smoothing: float = 0.0) -> tuple[Tensor, float]:
    """Return the mean cross-entropy of the answers, and the share of correct answers."""
    logits, answers = model(batch["input_ids"], token_type_ids=batch["token_type_ids"])[:, -1], batch["labels"][:, -1]
    return cross_entropy(logits, answers, label_smoothing=smoothing), (logits.argmax(-1) == answers).double().mean().item()


def solved(seed: int, width: int = 128) -> DecoderLM:
    """Return a one-layer model that answers 99 % of a new batch."""
    torch.manual_seed(seed)
    sizes = {"embed_dim": width, "num_heads": 1, "num_layers": 1, "ffn_dim": width, "max_len": 16, "position": "none"}
    plain = {"bias": False, "tie_embeddings": False, "init": "lecun", "backend": "math"}  # math: derivatives of derivatives
    model = DecoderLM(TransformerConfig(**sizes, **plain, **TASK.model_fields))
    optimizer = adamw(model, lr=3.2e-3)
    for step in range(2000):
        loss, accuracy = recall_loss(model, TASK.train(64, generator(seed, "train", step)))
        if accuracy >= 0.99:
            return model
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    raise ArithmeticError(f"seed {seed}: no 99 % within 2,000 steps")


def preconditioner(optimizer: torch.optim.Optimizer) -> Tensor:
    """Return the diagonal of Adam's P after an update, so that the update was −η m / P with m the first moment."""
    parts = []
    for group in optimizer.param_groups:
        beta1, beta2 = group["betas"]
        for state in (optimizer.state[parameter] for parameter in group["params"]):
            t = state["step"].item()
            parts.append((1 - beta1**t) * ((state["exp_avg_sq"] / (1 - beta2**t)).sqrt() + group["eps"]).flatten())
    return torch.cat(parts)


def sharpness(loss: Tensor, parameters: Iterable[Tensor], diagonal: Tensor, steps: int = 12) -> float:
    """Return the largest eigenvalue of P^-½ H P^-½, which is that of P⁻¹H, by Lanczos with full orthogonalisation.

    Args:
        loss: H is its Hessian by ``parameters``.
        diagonal: of P, over the entries of ``parameters`` in order.
        steps: Hessian-vector products.
    """
    parameters, root = list(parameters), diagonal.rsqrt()
    gradient = torch.cat([part.flatten() for part in torch.autograd.grad(loss, parameters, create_graph=True)])
    vector = torch.randn(root.shape, generator=torch.Generator().manual_seed(0), dtype=root.dtype)
    basis, images = list[Tensor](), list[Tensor]()
    for _ in range(steps):
        for _ in range(2):  # twice, against rounding
            vector = vector - sum((other @ vector) * other for other in basis)
        basis.append(vector / vector.norm())
        product = torch.autograd.grad(gradient @ (root * basis[-1]), parameters, retain_graph=True)
        images.append(root * torch.cat([part.flatten() for part in product]))
        vector = images[-1]
    projected = torch.stack(basis) @ torch.stack(images).T
    return torch.linalg.eigvalsh((projected + projected.T) / 2)[-1].item()


def train(model: DecoderLM, batch: Batch, smoothing: float, beta2: float, rate: float, steps: int) -> tuple[list[float], float]:
    """Train ``model`` on the one batch. Return λη at five moments in the last quarter, and the last loss."""
    optimizer, products = torch.optim.Adam(model.parameters(), lr=rate, betas=(0.9, beta2)), []
    for step in range(1, steps + 1):
        loss, _ = recall_loss(model, batch, smoothing)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (steps - step) % max(1, steps // 20) == 0 and step > 0.79 * steps:
            now, _ = recall_loss(model, batch, smoothing)
            products.append(sharpness(now, model.parameters(), preconditioner(optimizer)) * rate)
    return products, loss.item()


def measure(cases: Sequence[tuple[float, float, float]] = CASES, seeds: int = 3, steps: int = 400, width: int = 128) -> Record:
    """Return λη (over seeds and moments) and the last loss by case and arm."""
    entries: dict[str, list[dict[str, list[float] | float]]] = {}
    for seed in range(seeds):
        scaled, batch = solved(seed, width), TASK.train(128, generator(seed, "val"))
        for case in cases:
            for arm, model in (("with", copy.deepcopy(scaled)), ("without", fold_scale(copy.deepcopy(scaled)))):
                values, loss = train(model, batch, *case, steps)
                entry = {"product": [float(f"{value:.4g}") for value in values], "loss": float(f"{loss:.4g}")}
                entries.setdefault(f"{arm} {case}", []).append(entry)
    return {"cases": [list(case) for case in cases], "found": entries}


def table(record: Record) -> str:
    """Return the table: λη over all seeds and moments beside the paper's number."""
    rows = []
    for smoothing, beta2, rate in record["cases"]:
        for arm in ("with", "without"):
            seeds = record["found"][f"{arm} {(smoothing, beta2, rate)}"]
            products = spread([value for seed in seeds for value in seed["product"]], digits=1)
            loss = statistics.median(seed["loss"] for seed in seeds)
            rows.append([f"{smoothing:g}", f"{beta2:g}", f"{rate:g}", arm, products, f"{loss:.2g}", f"{PAPER:g}"])
    return markdown(["smoothing", "β₂", "rate η", "1/√d_k", "λη, median (range)", "last loss", "paper"], rows)


QUICK = {"cases": CASES[1:2], "seeds": 1, "steps": 40, "width": 32}

if __name__ == "__main__":
    run("published_sharpness", measure, table, QUICK)
