"""Why 1/√d_k? Each step of the usual explanation as a short function, with a table and a figure.

Run the whole file (``python examples/why_scale.py``, about half a minute on one core), or run it cell by cell in an editor that
supports ``# %%``. docs/why_scale.md explains the results, and tests/examples/test_why_scale.py checks them.
"""

# %% [markdown]
# # Why 1/√d_k?
# Queries have shape (1, H, L, D) and keys (1, H, S, D), with D = d_k. A row is the softmax of one query over n = S keys. c is the
# factor on q·k.

# %%
from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import why_scale_figures as figures
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from minitx.analysis import attention_statistics, capture, zhai_entropy_bound
from minitx.config import KeyValueDataConfig, OptimizerConfig, ParameterRule, ScheduleConfig, TransformerConfig
from minitx.data.addressing import VALIDATION_SEED, Batch, generator
from minitx.data.synthetic import key_value_examples
from minitx.nn import AttentionCall, DecoderLM, attention_weights, masked_softmax, scale_multiplier
from minitx.training.optimizers import build_optimizer
from minitx.training.schedules import lr_factor

WIDTHS = (8, 16, 32, 64, 128, 256, 512, 1024)
SCALES = ("unscaled", "inv_sqrt", "inv")


if __name__ == "__main__":
    torch.set_num_threads(1)
    OUTPUT = figures.Output(figures.output_folder([] if "ipykernel" in sys.modules else sys.argv[1:]))

# %% [markdown]
# ## 1. q·k has variance d_k


# %%
def normal(seed: int, *shape: int) -> Tensor:
    """Return independent numbers from N(0, 1)."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def signs(seed: int, *shape: int) -> Tensor:
    """Return independent random signs, +1 or -1."""
    return normal(seed, *shape).sign()


def alike(seed: int, *shape: int) -> Tensor:
    """Return numbers from N(0, 1), but with equal entries in each vector."""
    return normal(seed, *shape[:-1], 1).expand(shape)


def variance_of_dot_products(head_dim: int, draw: Callable[..., Tensor] = normal) -> float:
    """Return the variance of q·k over 96 keys, as a mean over 6,144 queries."""
    query, key = draw(0, 1, 64, 96, head_dim), draw(1, 1, 64, 96, head_dim)
    return attention_statistics(AttentionCall(query, key, key, scale=1.0))["dot_product_variance"].mean().item()


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the exponent p in y ∝ x^p, by least squares on the logarithms."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


if __name__ == "__main__":
    widths = WIDTHS[:6]
    variances = {draw.__name__: [variance_of_dot_products(width, draw) for width in widths] for draw in (normal, signs, alike)}
    rows = [[name, *np.divide(of, widths), f"{slope(widths, of):.3f}"] for name, of in variances.items()]
    OUTPUT.table("variance", ["Var(q·k) / d_k", *(f"d_k {width}" for width in widths), "slope"], rows)

    OUTPUT.figure("variance", figures.variance(widths, variances))

# %% [markdown]
# ## 2. Large logits saturate softmax


# %%
def three_logits(scale: float) -> Tensor:
    """Return softmax(scale · [1, 2, 30]) in float64."""
    return masked_softmax(scale * torch.tensor([1.0, 2.0, 30.0], dtype=torch.float64))


def at_spread(std: float, num_keys: int) -> dict[str, float]:
    """Return means over 2,000 rows of logits N(0, std²): entropy / ln n, Zhai's lower bound for it, and the largest weight."""
    key = normal(0, 1, 2000, num_keys, 1)
    query = torch.full((1, 2000, 1, 1), std)  # the logits of a row are std · key
    found = attention_statistics(AttentionCall(query, key, key, scale=1.0))
    bound = zhai_entropy_bound(std * key.squeeze(-1).double()).mean().item() / np.log(num_keys)
    return {"entropy": found["entropy"].mean().item(), "bound": bound, "max_weight": found["max_weight"].mean().item()}


def step_0(num_keys: int, head_dim: int, scale: str) -> dict[str, float]:
    """Return statistics of 6,400 rows with queries and keys from N(0, 1), as before the first update."""
    query, key = normal(0, 1, 200, 32, head_dim), normal(1, 1, 200, num_keys, head_dim)
    found = attention_statistics(AttentionCall(query, key, key, scale=scale_multiplier(scale, head_dim)))
    names = ("entropy", "max_weight", "saturation_90", "saturation_99", "jacobian_l1", "jacobian_fro")
    return {name: found[name].mean().item() for name in names}


if __name__ == "__main__":
    rows = [[f"{scale:g}", *three_logits(scale).tolist()] for scale in (1.0, 1 / 8)]
    OUTPUT.table("three logits", ["scale", "weight of 1", "weight of 2", "weight of 30"], rows)
    cells = [(64, 8, "unscaled"), (64, 64, "unscaled"), (64, 256, "unscaled"), (64, 64, "inv_sqrt")]
    cells += [(256, 64, "unscaled"), (256, 64, "inv_sqrt")]
    rows = [[*map(str, cell), *(f"{value:.3f}" for value in list(step_0(*cell).values())[:4])] for cell in cells]
    OUTPUT.table(
        "saturation", ["n", "d_k", "scale", "entropy / ln n", "largest weight", "rows above .9", "rows above .99"], rows
    )

    spreads = [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0]
    found = {n: [at_spread(std, n) for std in spreads] for n in (16, 64, 256)}
    OUTPUT.figure("saturation", figures.saturation(spreads, found))

# %% [markdown]
# ## 3. A saturated softmax has a small Jacobian


# %%
def jacobian_norms(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return ½ ‖J‖₁ and ‖J‖_F² of the Jacobian J = ∂p/∂z = diag(p) - p pᵀ, with elementwise norms."""
    jacobian = torch.diag_embed(weights) - weights.unsqueeze(-1) * weights.unsqueeze(-2)
    return jacobian.abs().sum((-2, -1)) / 2, jacobian.square().sum((-2, -1))


def gap_density(num_keys: int) -> float:
    """Return the density at 0 of the gap between the two largest of n normal numbers, n(n-1) ∫ φ(x)² Φ(x)^(n-2) dx."""
    x = torch.linspace(-9.0, 9.0, 9001, dtype=torch.float64)
    unit = torch.distributions.Normal(torch.zeros((), dtype=torch.float64), 1.0)
    integrand = unit.log_prob(x).exp().square() * unit.cdf(x) ** (num_keys - 2)
    return num_keys * (num_keys - 1) * torch.trapezoid(integrand, x).item()


if __name__ == "__main__":
    before = {scale: [step_0(64, width, scale) for width in WIDTHS] for scale in SCALES}
    multipliers = {scale: [scale_multiplier(scale, width) for width in WIDTHS] for scale in SCALES}
    size = {scale: [row["jacobian_l1"] for row in of] for scale, of in before.items()}
    reaching = {scale: list(np.multiply(multipliers[scale], size[scale])) for scale in SCALES}
    rows = [["½ ‖J‖₁", scale, *size[scale]] for scale in SCALES]
    rows += [["‖J‖_F²", scale, *(row["jacobian_fro"] for row in before[scale])] for scale in SCALES]
    rows += [["½ ‖c·J‖₁", scale, *reaching[scale]] for scale in SCALES]
    OUTPUT.table("jacobian", ["mean of", "scale", *(f"d_k {width}" for width in WIDTHS)], rows)

    OUTPUT.figure("jacobian", figures.jacobian(WIDTHS, size, reaching, gap_density(64)))

# %% [markdown]
# ## 4. The gradient at init


# %%
def query_gradients(num_keys: int, head_dim: int, scale: str) -> Tensor:
    """Return ‖dL/dq‖ of 6,400 rows, with dL/dp (the gradient of the weights) drawn from N(0, 1)."""
    query, key = normal(0, 1, 200, 32, head_dim).requires_grad_(), normal(1, 1, 200, num_keys, head_dim)
    weights = attention_weights(AttentionCall(query, key, key, scale=scale_multiplier(scale, head_dim)))
    (gradient,) = torch.autograd.grad(weights, query, normal(2, *weights.shape))
    return gradient.norm(dim=-1).flatten()


def crossing(widths: Sequence[int], falling: Sequence[float], level: Sequence[float]) -> float:
    """Return the d_k at which ``falling`` crosses ``level``. Between two widths, ln(falling / level) is linear in √d_k."""
    excess = np.log(falling) - np.log(level)
    below = int(np.argmax(excess < 0))
    return float(np.interp(0.0, excess[[below, below - 1]], np.sqrt([widths[below], widths[below - 1]]))) ** 2


# an example has eight keys with their values, then one of the keys; the answer is its value
TASK = KeyValueDataConfig(num_keys=32, num_pairs=8)


def one_layer(**switches: Any) -> DecoderLM:
    """Return a one-layer model for ``TASK``. Default: one head, d_k = 64, queries and keys of variance 1. ``switches`` change it."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 48, "type_vocab_size": 17, "embed_dim": 64, "num_heads": 1, "num_layers": 1, "ffn_dim": 64}
    plain = {"max_len": 64, "position": "none", "bias": False, "tie_embeddings": False, "activation": "relu", "init": "lecun"}
    return DecoderLM(TransformerConfig(**{**sizes, **plain, **switches}))


def fresh_batch(step: int) -> Batch:
    """Return the 64 training examples of a step."""
    return key_value_examples(TASK, TASK.batch_size, generator(0, "train", step))


def unseen_batch() -> Batch:
    """Return 1,024 validation examples."""
    return key_value_examples(TASK, TASK.val_size, generator(VALIDATION_SEED, "val"))


def answers(model: nn.Module, batch: Batch) -> Tensor:
    """Return the logits at the last position, where the answer is predicted."""
    return model(batch["input_ids"], token_type_ids=batch["token_type_ids"])[:, -1]


def recall_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross-entropy of the answers, in nats."""
    return F.cross_entropy(answers(model, batch), batch["labels"][:, -1])


def model_gradients(head_dim: int, scale: str, init: str = "lecun") -> dict[str, float]:
    """Return ‖∇W_Q‖, ‖∇W_K‖ and ‖∇W_V‖ of a model of width 128 on 256 examples, before the first update."""
    model = one_layer(embed_dim=128, num_heads=max(1, 128 // head_dim), head_dim=head_dim, scale=scale, init=init)
    recall_loss(model, {key: value[:256] for key, value in unseen_batch().items()}).backward()
    attention = model.blocks[0].attention
    return {name: getattr(attention, name).weight.grad.norm().item() for name in ("q_proj", "k_proj", "v_proj")}


if __name__ == "__main__":
    rms, medians, rows = {}, {}, []
    for num_keys, widths in ((16, (64, 128, 256)), (256, (256, 512, 1024)), (64, WIDTHS)):
        norms = {scale: [query_gradients(num_keys, width, scale) for width in widths] for scale in SCALES}
        rms = {scale: [of.square().mean().sqrt().item() for of in norms[scale]] for scale in SCALES}
        medians = {scale: [of.median().item() for of in norms[scale]] for scale in SCALES}
        rows.append([str(num_keys), f"{crossing(widths, medians['unscaled'], medians['inv_sqrt']):.0f}"])
    OUTPUT.table(
        "crossing", ["n", "d_k from which the median row gets less without the scale"], sorted(rows, key=lambda r: int(r[0]))
    )
    models = {
        init: {scale: [model_gradients(width, scale, init)["q_proj"] for width in WIDTHS] for scale in SCALES}
        for init in ("lecun", "gpt2")
    }
    kinds = {
        "RMS of ‖dL/dq‖": rms,
        "median of ‖dL/dq‖": medians,
        "‖∇W_Q‖, lecun": models["lecun"],
        "‖∇W_Q‖, gpt2": models["gpt2"],
    }
    rows = [[kind, scale, *of[scale]] for kind, of in kinds.items() for scale in SCALES]
    OUTPUT.table("gradients", ["", "scale", *(f"d_k {width}" for width in WIDTHS)], rows)

    OUTPUT.figure("gradients", figures.gradients(WIDTHS, rms, medians, models))

# %% [markdown]
# ## 5. Which learning rates work


# %%
def train(model: nn.Module, optimizer: Optimizer, steps: int) -> list[float]:
    """Train on 64 new examples per step and return the losses. 5 % warm-up, then cosine decay to a tenth of the peak rate."""
    losses = []
    schedule = LambdaLR(optimizer, lr_factor(ScheduleConfig(warmup_steps=steps // 20), steps))
    for step in range(steps):
        loss = recall_loss(model, fresh_batch(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


def recall_accuracy(lr: float, **switches: Any) -> float:
    """Return the accuracy on 1,024 validation examples after 100 AdamW updates with peak rate ``lr``. Chance is 1/16."""
    model = one_layer(**switches)
    train(model, build_optimizer(model, OptimizerConfig(lr=lr), head_dim=64), steps=100)
    batch = unseen_batch()
    with torch.no_grad():
        hits = answers(model, batch).argmax(-1) == batch["labels"][:, -1]
    return hits.double().mean().item()


def first_logit_step(lr: float, **switches: Any) -> float:
    """Return the RMS change of the last query's attention logits in the first AdamW update."""
    model, batch = one_layer(**switches), fresh_batch(0)
    optimizer = build_optimizer(model, OptimizerConfig(lr=lr), head_dim=64)
    with capture(model, what="scores") as seen:
        recall_loss(model, batch).backward()
        optimizer.step()
        answers(model, batch)
    ((before, after),) = seen.values()
    return (after - before)[:, :, -1].square().mean().sqrt().item()


if __name__ == "__main__":
    rates = (1e-3, 3e-3, 1e-2, 3e-2)
    arms: dict[tuple[str, str], dict[str, str]] = {
        ("variance 1", "inv_sqrt"): {"scale": "inv_sqrt"},
        ("variance 1", "unscaled"): {"scale": "unscaled"},
        ("variance 1", "t5"): {"scale": "unscaled", "init": "t5"},
        ("N(0, 0.02²)", "inv_sqrt"): {"scale": "inv_sqrt", "init": "gpt2"},
        ("N(0, 0.02²)", "unscaled"): {"scale": "unscaled", "init": "gpt2"},
    }
    accuracies = {arm: [recall_accuracy(lr, **switches) for lr in rates] for arm, switches in arms.items()}
    rows = [[*arm, *(f"{value:.2f}" for value in of), first_logit_step(1e-2, **arms[arm])] for arm, of in accuracies.items()]
    OUTPUT.table(
        "rates", ["start", "arm", *(f"rate {rate:g}" for rate in rates), "first step of the logits at rate 0.01"], rows
    )

    OUTPUT.figure("rates", figures.rates(rates, accuracies, chance=1 / TASK.num_values))

    steps = {scale: [first_logit_step(1e-2, scale=scale, head_dim=width) for width in WIDTHS] for scale in SCALES}
    OUTPUT.table("steps", ["scale", *(f"d_k {width}" for width in WIDTHS)], [[scale, *of] for scale, of in steps.items()])
    OUTPUT.figure("steps", figures.steps(WIDTHS, steps))

# %% [markdown]
# ## 6. Limits of this explanation
# The scale can be moved into the initial weights, if the optimizer is changed accordingly.


# %%
MakeOptimizer = Callable[[DecoderLM, float], Optimizer]


def adamw(model: DecoderLM, fold: float) -> Optimizer:
    """Return AdamW with the same rate for all parameters. ``fold`` is not used."""
    return build_optimizer(model, OptimizerConfig(lr=1e-2), head_dim=64)


def folded_adamw(model: DecoderLM, fold: float) -> Optimizer:
    """Return AdamW with the rate of W_Q multiplied by ``fold`` and its eps divided by it."""
    rule = ParameterRule(match="q_proj", lr=fold, eps=1 / fold)
    return build_optimizer(model, OptimizerConfig(lr=1e-2, rules=(rule,)), head_dim=64)


def adafactor(model: DecoderLM, fold: float) -> Optimizer:
    """Return Adafactor, whose steps are proportional to the size of the matrix. ``fold`` is not used."""
    return torch.optim.Adafactor(model.parameters(), lr=0.1)


def twins(optimizer: MakeOptimizer, head_dim: int = 64, dtype: torch.dtype = torch.float32) -> list[list[float]]:
    """Return the losses of 60 steps with 1/√d_k in the scores, and of 60 steps with 1/√d_k in the initial W_Q."""
    runs = []
    for scale, fold in (("inv_sqrt", 1.0), ("unscaled", head_dim**-0.5)):
        model = one_layer(head_dim=head_dim, scale=scale).to(dtype)
        with torch.no_grad():
            model.blocks[0].attention.q_proj.weight.mul_(fold)
        runs.append(train(model, optimizer(model, fold), steps=60))
    return runs


if __name__ == "__main__":
    pairs = {"AdamW, W_Q's rate and eps folded too": twins(folded_adamw)}
    pairs |= {"AdamW, one rate for all": twins(adamw), "Adafactor, T5's optimizer": twins(adafactor)}
    rows = [[name, a[-1], b[-1], max(np.abs(np.subtract(a, b)))] for name, (a, b) in pairs.items()]
    OUTPUT.table(
        "folds", ["optimizer", "last loss, scale in the scores", "last loss, scale in W_Q", "largest difference"], rows
    )

    OUTPUT.figure("folds", figures.folds(pairs))

# %% [markdown]
# The initial weights decide whether the softmax saturates.


# %%
def logit_spread(init: str, embed_dim: int) -> float:
    """Return the standard deviation of unscaled logits over the keys, for heads of d_k 64 and 64 random tokens."""
    sizes = {"embed_dim": embed_dim, "num_heads": embed_dim // 64, "vocab_size": 997, "type_vocab_size": 0}
    model = one_layer(**sizes, init=init, scale="unscaled")
    with capture(model) as seen, torch.no_grad():
        model(torch.randint(997, (4, 64), generator=torch.Generator().manual_seed(0)))
    ((record,),) = seen.values()
    return record["row_std"].mean().item()


if __name__ == "__main__":
    widths = (64, 128, 256, 512, 768, 1600)
    stds = {init: [logit_spread(init, w) for w in widths] for init in ("lecun", "torch_mha", "t5", "torch_linear", "gpt2")}
    OUTPUT.table("spreads", ["init", *(f"d_model {w}" for w in widths)], [[init, *of] for init, of in stds.items()])

    OUTPUT.figure("spreads", figures.spreads(widths, stds))
    print(f"\nfigures and tables.md are in {OUTPUT.folder}")
