"""Objectives, schedules, optimizers: worked out by hand."""

import inspect
import math
import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from minitx.config import ConfigError, ParameterRule, Part, RunConfig, TransformerConfig, node
from minitx.data.task import num_targets
from minitx.nn.counting import allocations, count_flops
from minitx.nn.models import build_model
from minitx.training import schedules
from minitx.training.module import TrainingModule
from minitx.training.objectives import (
    CrossEntropy,
    build_objective,
    checked_sums,
    chunked_cross_entropy,
    cross_entropy,
)
from minitx.training.optimizers import adamw, build_optimizer, freeze, parameter_groups, sgd


def test_the_loss_is_a_sum_over_the_labels_that_count_and_label_smoothing_leaves_the_likelihood_alone():
    logits, labels = torch.randn(2, 3, 7, dtype=torch.float64), torch.tensor([[1, -100, 6], [0, 2, 3]])
    labels[1] = logits[1].argmax(-1)  # three right answers
    sums = build_objective(node(CrossEntropy, label_smoothing=0.3))(logits, {"labels": labels})
    log_p, counted = logits.log_softmax(-1)[labels != -100], labels[labels != -100]
    hit = -log_p.gather(-1, counted[:, None]).sum()
    assert (int(sums["correct"]), int(num_targets(labels))) == (int((log_p.argmax(-1) == counted).sum()), 5)
    assert int(sums["correct"]) >= 3
    assert float(sums["nll"]) == pytest.approx(float(hit))
    assert float(sums["loss"]) == pytest.approx(float(0.7 * hit - 0.3 * log_p.mean(-1).sum()))
    plain = CrossEntropy()(logits, {"labels": labels})  # by default nothing is smoothed, and answers are counted in training
    assert (float(plain["loss"]), plain["correct"]) == (pytest.approx(float(hit)), sums["correct"])


def test_answers_that_training_does_not_count_are_counted_in_a_validation():
    objective, given = CrossEntropy(count_correct=False), (torch.eye(3), {"labels": torch.arange(3)})
    assert "correct" not in objective(*given)
    with torch.no_grad():
        assert int(objective(*given)["correct"]) == 3


def objective_of(thing):
    """The objective of a run, of an object or of a part."""
    return build_objective(thing if isinstance(thing, Part) else Part.of_object(thing, "objective"))


def test_a_loss_of_torch_sums_over_the_labels_and_a_function_stays_as_it_is():
    logits, labels = torch.randn(2, 3, 7, dtype=torch.float64), torch.tensor([[1, -100, 6], [0, 2, 3]])
    nll = cross_entropy(logits, labels)["loss"].item()
    for loss, given, right, wanted in (
        (torch.nn.CrossEntropyLoss, logits, labels, nll),
        (torch.nn.MSELoss, logits, logits + 2, 4.0 * logits.numel()),
    ):
        for objective in (loss(reduction="sum"), node(loss, reduction="sum")):
            assert objective_of(objective)(given, {"labels": right})["loss"].item() == pytest.approx(wanted)
    own = type("Own", (torch.nn.Module,), {})()
    assert objective_of(cross_entropy) is cross_entropy and objective_of(own) is own


def test_an_objective_that_is_no_sum_is_refused():
    weight = torch.nn.Bilinear(1, 1, 1), "Bilinear has a weight weight, but no optimizer trains it"
    zero = torch.nn.CrossEntropyLoss(reduction="sum", ignore_index=0), "ignore_index=0 must be -100"  # divided by all labels
    mean = torch.nn.MSELoss(), "reduction=mean must be"
    for objective, said in ((3, "objective=int must be callable"), weight, mean, zero):
        with pytest.raises(ConfigError, match=said):
            objective_of(objective)


@pytest.mark.parametrize(("label", "said"), [(3, "3"), (-1, "-1"), (True, "bool"), (1.0, "float32")])
def test_cross_entropy_refuses_labels_that_are_no_classes_and_says_which_classes_there_are(label, said):
    with pytest.raises(ConfigError, match=rf"classes from 0 to 2, or -100 .*{said}"):
        CrossEntropy()(torch.zeros(1, 3), {"labels": torch.tensor([label])})


@pytest.mark.parametrize(("logits", "labels"), [((2, 7, 11), (2,)), ((2, 11), (2, 7)), ((2, 7, 11), (7, 2))])
def test_cross_entropy_refuses_logits_that_do_not_belong_to_the_labels_and_says_both_shapes(logits, labels):
    with pytest.raises(ConfigError, match=re.escape(f"shape {logits} for labels of shape {labels}")):
        CrossEntropy()(torch.zeros(logits), {"labels": torch.zeros(labels, dtype=torch.long)})


@pytest.mark.parametrize(("logits", "labels"), [((5, 1), (5,)), ((5,), (5, 1)), ((3, 5), (5,))])
def test_a_loss_of_numbers_needs_logits_in_the_shape_of_the_labels(logits, labels):
    objective = objective_of(torch.nn.L1Loss(reduction="sum"))
    with pytest.raises(ConfigError, match=r"^objective: L1Loss compares each logit with its label"):
        objective(torch.zeros(logits), {"labels": torch.zeros(labels)})
    assert float(objective(torch.zeros(logits), {"labels": torch.ones(logits)})["loss"]) == math.prod(logits)


@pytest.mark.parametrize("name", ["MSELoss", "L1Loss", "HuberLoss", "BCEWithLogitsLoss", "KLDivLoss", "SoftMarginLoss"])
def test_a_loss_of_numbers_leaves_out_labels_that_do_not_count(name):
    given, objective = torch.nn.Parameter(torch.randn(2, 3).double()), getattr(torch.nn, name)(reduction="sum")
    labels, counted = torch.rand(2, 3).double(), torch.tensor([[True, False, True], [True, False, False]])
    labels[0, 2] = -100 if name in ("MSELoss", "L1Loss", "HuberLoss") else 1  # a number as any other
    loss = objective_of(objective)(given, {"labels": labels.masked_fill(~counted, math.nan)})["loss"]
    wanted = objective(given[counted], labels[counted])
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(*(torch.autograd.grad(x, given)[0] for x in (loss, wanted)))


@pytest.mark.parametrize(
    ("loss", "logits", "said"),
    [
        ("MultiLabelSoftMarginLoss", (2, 3), "returns one number for several labels"),
        ("CrossEntropyLoss", (2, 3), "not probabilities"),  # torch's mean divides by 2
        ("CrossEntropyLoss", (2, 3, 3), r"\(2, 3, 3\) and labels of shape \(2, 4\)"),  # classes are the last axis
    ],
)
def test_a_loss_that_is_not_one_of_each_label_is_refused(loss, logits, said):
    objective = objective_of(getattr(torch.nn, loss)(reduction="sum"))
    labels = torch.zeros(2, 4).long() if len(logits) == 3 else torch.rand(2, 3)
    with pytest.raises(ConfigError, match=f"^objective: {loss} .*{said}"):
        objective(torch.zeros(logits), {"labels": labels})


def test_what_an_objective_returns_is_a_number_or_numbers_by_name_with_loss_among_them():
    one = torch.tensor(2.0)
    assert checked_sums(one) == {"loss": one} and checked_sums({"loss": one, "nll": one}) == {"loss": one, "nll": one}
    for wrong, said in [
        ({"nll": one}, "got nll"),
        ({}, "got nothing"),
        (None, "loss is NoneType"),
        (torch.ones(2), r"loss is a tensor of shape \(2,\)"),
        ({"loss": 1.0}, "loss is float"),
        ({"loss": one, "nll": 1.0}, "nll is float"),
    ]:
        with pytest.raises(ConfigError, match=f"^objective must return .*{said}"):
            checked_sums(wrong)


def test_a_sum_that_would_be_lost_or_overwritten_under_its_name_is_refused():
    one = torch.tensor(2.0)
    for wrong, said in (
        ({"loss": one, "count": one}, "a sum named count, the name of the number of targets"),
        ({"loss": one, "correct": one, "accuracy": one}, "the sums correct and accuracy, but the mean of correct"),
    ):
        with pytest.raises(ConfigError, match=f"^objective returns {said}"):
            checked_sums(wrong)
    assert checked_sums({"loss": one, "accuracy": one}).keys() == {"loss", "accuracy"}


HEADS = {
    "lm, model.head_transform=False, model.logit_softcap=5.0": {"logit_softcap": 5.0},
    "lm, model.head_transform=True, model.logit_softcap=None": {"architecture": "encoder", "head_transform": True},
    "token, model.head_transform=False, model.logit_softcap=None": {
        "architecture": "encoder",
        "head": "token",
        "num_labels": 3,
    },
    "none, model.head_transform=False, model.logit_softcap=None": {"architecture": "encoder", "head": "none"},
}


@pytest.mark.parametrize("found", HEADS)
def test_a_loss_in_chunks_needs_a_head_that_is_one_linear_map(found):
    module = TrainingModule(network(**HEADS[found]), CrossEntropy(chunk_tokens=3), None, None)
    with pytest.raises(ConfigError, match=rf"^objective\.chunk_tokens=3 needs model\.head=lm .* got model\.head={found}: "):
        module.sums({"input_ids": torch.tensor([[1, 2, 3]]), "labels": torch.tensor([[2, 3, 4]])})


@pytest.mark.parametrize(("chunk_tokens", "labels", "said"), [(0, (3,), "chunk_tokens=0"), (2, (4,), "hidden must have")])
def test_chunks_of_nothing_and_shapes_that_do_not_fit_are_refused(chunk_tokens, labels, said):
    with pytest.raises(ValueError, match=said):
        chunked_cross_entropy(torch.randn(3, 5), torch.randn(7, 5), None, torch.zeros(labels).long(), chunk_tokens=chunk_tokens)


def lr_factor(name, max_steps, **keys):
    """The factor of a schedule of ours, by step. A key that it has no use for is left out."""
    target = getattr(schedules, name)
    known = {key: value for key, value in keys.items() if key in inspect.signature(target).parameters}
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    return node(target, **known).build(optimizer, max_steps=max_steps).lr_lambdas[0]


@pytest.mark.parametrize(
    ("name", "warmup", "final", "steps", "expected"),
    [
        ("constant", 4, 0.1, 6, [0.25, 0.5, 0.75, 1, 1, 1]),
        ("linear", 2, 0.0, 6, [0.5, 1, 1, 0.75, 0.5, 0.25]),
        ("cosine", 0, 0.0, 4, [1, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5]),
        ("cosine", 1, 0.2, 3, [1, 1, 0.6]),
        ("trapezoid", 2, 0.0, 10, [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 0.5]),
        ("linear", 1 / 3, 0.0, 6, [0.5, 1, 1, 0.75, 0.5, 0.25]),  # a share of the steps
        ("trapezoid", 0.2, 0.0, 10, [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 0.5]),
    ],
)
def test_schedules_by_hand(name, warmup, final, steps, expected):
    factor = lr_factor(name, steps, warmup_steps=warmup, final_lr=final)
    assert [factor(step) for step in range(steps)] == pytest.approx(expected)


@pytest.mark.parametrize("name", ["cosine", "linear", "trapezoid"])
def test_a_schedule_ends_at_final_lr_and_a_warm_up_as_long_as_the_run_never_divides_by_zero(name):
    factor = lr_factor(name, 20, warmup_steps=3, final_lr=0.125, decay_fraction=0.5)
    assert factor(20) == factor(10_000) == pytest.approx(0.125)
    factor = lr_factor(name, 5, warmup_steps=5)
    assert [factor(step) for step in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert math.isfinite(factor(5))


def network(**values):
    return build_model(TransformerConfig(vocab_size=11, embed_dim=12, num_heads=3, num_layers=2, max_len=7, **values))


def groups_by_name(model, **options):
    names = {id(p): name for name, p in model.named_parameters()}
    groups = parameter_groups(model, **options)
    return {names[id(p)]: group for group in groups for p in group["params"]}


def test_every_parameter_is_updated_once_and_weight_decay_spares_every_vector():
    model = network(tie_embeddings=True)
    found = groups_by_name(model, lr=1e-3, weight_decay=0.3)
    assert sum(len(group["params"]) for group in parameter_groups(model, lr=1e-3)) == len(found)
    decays = {name: 0.3 if parameter.dim() > 1 else 0.0 for name, parameter in model.named_parameters()}
    assert {name: group["weight_decay"] for name, group in found.items()} == decays


def test_the_first_rule_that_matches_wins_and_factors_may_be_powers_of_head_dim_and_what_is_frozen_is_in_no_group():
    rules = (ParameterRule(match=r"q_proj\.weight", lr=2.0), ParameterRule(match="q_proj", lr=3.0, eps=10.0))
    rules += (ParameterRule(match="k_proj", lr="head_dim^-0.25", weight_decay="head_dim^0.25", eps="head_dim^0.25"),)
    found = groups_by_name(network(), lr=0.1, weight_decay=0.2, rules=rules, eps=1e-8, head_dim=16)
    weight, bias = found["blocks.0.attention.q_proj.weight"], found["blocks.0.attention.q_proj.bias"]
    assert (weight["lr"], weight["eps"]) == pytest.approx((0.2, 1e-8))
    assert (bias["lr"], bias["eps"]) == pytest.approx((0.3, 1e-7))
    group = found["blocks.1.attention.k_proj.weight"]
    assert (group["lr"], group["weight_decay"], group["eps"]) == (0.05, 0.4, 2e-8)
    assert found["blocks.0.attention.v_proj.weight"]["lr"] == 0.1
    frozen = groups_by_name(network(), lr=0.1, rules=(ParameterRule(match="(q|k)_proj", trainable=False),))
    assert found.keys() - frozen.keys() == {name for name in found if "q_proj" in name or "k_proj" in name}


def test_building_an_optimizer_changes_no_weight_and_freeze_freezes_those_that_it_leaves_out():
    model, rules = network(), (ParameterRule(match="k_proj.weight"), ParameterRule(match="(q|k)_proj", trainable=False))
    part = RunConfig(optimizer=node(adamw, rules=rules)).optimizer
    before = build_optimizer(part, model)
    assert all(parameter.requires_grad for parameter in model.parameters())
    freeze(model, part)
    trained = {parameter for parameter in model.parameters() if parameter.requires_grad}
    assert trained == {parameter for group in before.param_groups for parameter in group["params"]}
    assert 0 < len(trained) < len([*model.parameters()])


RULES = {
    "optimizer.rules[1].match=q_proj": [{"match": "proj"}, {"match": "q_proj"}],  # hidden by the first
    "optimizer.rules[0].weight_decay=head_dim^1000": [{"match": "q_proj", "weight_decay": "head_dim^1000"}],
}


@pytest.mark.parametrize("key", RULES)
def test_rules_that_cannot_be_followed_are_refused_by_key(key):
    with pytest.raises(ConfigError, match=f"^{re.escape(key)}"):
        build_optimizer(node(adamw, weight_decay=0.1, rules=RULES[key]), network(), head_dim=16)


def test_sgd_has_momentum_decay_and_the_rates_of_the_rules():
    rules = (ParameterRule(match="q_proj", lr="head_dim^-0.5"),)
    optimizer = build_optimizer(node(sgd, lr=0.1, momentum=0.75, weight_decay=0.5, rules=rules), network(), head_dim=16)
    assert type(optimizer) is torch.optim.SGD
    found = {(group["lr"], group["momentum"], group["weight_decay"]) for group in optimizer.param_groups}
    assert found == {(lr, 0.75, decay) for lr in (0.1, 0.025) for decay in (0.5, 0.0)}


# --- the chunked cross-entropy

T, WIDTH, WORDS = 23, 7, 11


def head_and_tokens(*, bias=True, dtype=torch.float64, ignored=0.3):
    torch.manual_seed(3)
    hidden = torch.randn(T, WIDTH, dtype=dtype, requires_grad=True)
    head = torch.nn.Linear(WIDTH, WORDS, bias=bias, dtype=dtype)
    labels = torch.randint(WORDS, (T,)).masked_fill(torch.rand(T) < ignored, -100)
    return hidden, head, labels


def gradients(loss, hidden, head, factor=1.0):
    wanted = [x for x in (hidden, *head.parameters()) if x.requires_grad]
    return torch.autograd.grad(loss * factor, wanted)


@pytest.mark.parametrize(("chunk_tokens", "bias", "smoothing"), [(1, True, 0.0), (5, False, 0.3), (1000, True, 0.0)])
def test_the_chunked_loss_and_its_gradients_are_the_plain_ones(chunk_tokens, bias, smoothing):
    hidden, head, labels = head_and_tokens(bias=bias)
    plain = cross_entropy(head(hidden), labels, label_smoothing=smoothing)
    ours = chunked_cross_entropy(hidden, head.weight, head.bias, labels, chunk_tokens=chunk_tokens, label_smoothing=smoothing)
    torch.testing.assert_close(ours, plain, rtol=1e-13, atol=0)
    found, wanted = gradients(ours["loss"], hidden, head, 0.37), gradients(plain["loss"], hidden, head, 0.37)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)
    assert found[0][labels == -100].abs().max() == 0.0
    head.requires_grad_(False)  # frozen
    ours = chunked_cross_entropy(hidden, head.weight, head.bias, labels, chunk_tokens=chunk_tokens, label_smoothing=smoothing)
    torch.testing.assert_close(gradients(ours["loss"], hidden, head, 0.37)[0], wanted[0], rtol=1e-12, atol=1e-14)


def test_the_chunked_loss_without_a_label_is_zero_and_so_is_its_gradient_though_a_hidden_state_is_not_finite():
    hidden, head, labels = head_and_tokens()
    hidden = (hidden.detach() * torch.inf).requires_grad_()
    empty = chunked_cross_entropy(hidden, head.weight, None, torch.full_like(labels, -100), chunk_tokens=4)
    assert (float(empty["loss"].detach()), int(empty["correct"])) == (0.0, 0)
    assert not torch.autograd.grad(empty["loss"], hidden)[0].any()


def test_under_bfloat16_autocast_the_chunked_loss_is_near_the_plain_one_and_in_float32():
    hidden, head, labels = head_and_tokens(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        plain = cross_entropy(head(hidden), labels)["loss"]
        ours = chunked_cross_entropy(hidden, head.weight, head.bias, labels, chunk_tokens=5)["loss"]
    torch.testing.assert_close(ours, plain, rtol=2**-7, atol=0)
    torch.testing.assert_close(gradients(ours, hidden, head), gradients(plain, hidden, head), rtol=2**-5, atol=2**-5)


def test_the_chunked_loss_never_holds_the_logits_of_all_tokens():
    """512 tokens, 2,003 words: the plain loss holds three tensors of 512 x 2,003, the chunked one none of more than 64 x 2,003."""
    tokens, words = 512, 2003
    hidden, weight = (torch.randn(rows, 8, requires_grad=True) for rows in (tokens, words))
    labels = torch.randint(words, (tokens,))

    def step(loss):
        hidden.grad = weight.grad = None
        loss()["loss"].backward()

    plain = partial(step, lambda: cross_entropy(F.linear(hidden, weight), labels))
    ours = partial(step, lambda: chunked_cross_entropy(hidden, weight, None, labels, chunk_tokens=64))
    (plain_largest, plain_peak), (largest, peak) = allocations(plain), allocations(ours)
    assert plain_largest == 4 * tokens * words
    assert largest == 4 * 64 * words
    assert peak < plain_peak / 4
    assert count_flops(ours) == count_flops(plain)  # nothing is computed twice
