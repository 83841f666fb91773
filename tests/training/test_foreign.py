"""Models and data given from Python: how a model is called, and what a run promises."""

import contextlib
import copy
import dataclasses
import itertools
import json
import math
import warnings
from functools import partial

import extra
import lightning.pytorch as L
import peft
import pytest
import torch
import transformers
from extra import last, losses_of
from torch import nn
from torch.utils.data import DataLoader, default_collate

from minitx.config import (
    ConfigError,
    EvaluationConfig,
    InitFrom,
    RunConfig,
    TrainerConfig,
    TransformerConfig,
    node,
)
from minitx.data.datamodule import DataModule
from minitx.data.task import Task
from minitx.generation import generate
from minitx.nn import DecoderLM, build_model
from minitx.nn.efficient import LinearAttention
from minitx.training.checkpoints import load_model
from minitx.training.evaluation import evaluate
from minitx.training.metrics_csv import read_metrics
from minitx.training.net import Net
from minitx.training.network_building import build_network, fitted, put_into_training
from minitx.training.nonfinite import NonFiniteError
from minitx.training.run import train
from tests.interop.families import TEXT, build


def squares():
    """Seven rows, whose ``labels`` are numbers."""
    columns = (torch.randn(7, width, dtype=torch.float64) for width in (3, 2))
    return [dict(zip(("input", "labels"), row, strict=True)) for row in zip(*columns, strict=True)]


def task_of(rows, **options):
    return Task(name="mine", train=rows, val=rows, **options)


def squared(logits, batch):
    return (logits - batch["labels"]).square().sum()


CONSTANT = {"_target_": "torch.optim.lr_scheduler.ConstantLR", "factor": 1.0}
PLAIN = {"max_steps": 4, "val_every": 0, "precision": "64-true", "schedule": CONSTANT}
PLAIN["optimizer"] = {"_target_": "torch.optim.SGD", "lr": 0.05}


def fit(folder, data, *, model=None, objective=squared, **options):
    """A plain run on ``data``; see ``extra.fit``."""
    model = nn.Linear(3, 2) if model is None else model
    return extra.fit(folder, data, model=model, objective=objective, **{**PLAIN, **options})


def test_a_micro_batch_without_a_label_adds_nothing(tmp_path):
    ids = torch.tensor([[1, -100], [-100, -100], [0, 1], [1, 0]])
    rows = [{"input": torch.randn(2, 3, dtype=torch.float64), "labels": labels} for labels in ids]
    fit(tmp_path, task_of(rows), objective=None, accumulate=2, max_steps=2)
    assert all(math.isfinite(loss) for loss in losses_of(tmp_path))
    assert read_metrics(str(tmp_path / "metrics.csv"))[-1]["tokens"] == 5


NOTHING = {
    "classes": (None, torch.tensor(-100), torch.tensor(1)),
    "numbers": (nn.MSELoss(reduction="sum"), torch.full((2,), math.nan).double(), torch.tensor([-100.0, math.nan]).double()),
}
"""An objective, a label that does not count, and one that does."""


@pytest.mark.parametrize("kind", NOTHING)
def test_a_step_without_a_label_that_counts_has_a_loss_of_zero_and_is_told_once(tmp_path, caplog, kind):
    objective, *labels = NOTHING[kind]
    rows = [{"input": torch.randn(3, dtype=torch.float64), "labels": label} for label in labels]
    result = fit(tmp_path, task_of(rows), objective=objective, max_steps=2, batch_size=1)
    losses = losses_of(tmp_path)
    assert result["steps"] == 2 and sorted(losses)[0] == 0.0
    assert [line for line in caplog.messages if "has no loss" in line] == [
        f"step {losses.index(0.0) + 1} has no loss: none of its labels counts"
    ]


@pytest.mark.parametrize("kind", ["other", "classify"])
def test_a_validation_without_a_label_that_counts_is_no_perfect_one(tmp_path, caplog, kind):
    rows = [{"input": torch.randn(3, dtype=torch.float64), "labels": label} for label in (0, 1, -100)]
    task = Task(name="mine", kind=kind, train=rows[:2], val=rows[2:])
    assert fit(tmp_path, task, objective=None)["val_loss"] is None
    assert "the val rows have no loss: none of their labels counts" in caplog.text
    with pytest.raises(ConfigError, match=r"^data: there is nothing to evaluate: no label counts"):
        evaluate(nn.Linear(3, 2).double(), task)


@pytest.mark.parametrize("label", [True, 1.0, -1, 2, torch.tensor(2)])
def test_a_class_that_a_task_does_not_have_is_refused_before_the_first_step_where_rows_are_a_list(tmp_path, label):
    rows = [{"input": torch.zeros(3), "labels": label} for label in (0, 1, -100, label)]
    for splits in ({"train": rows, "val": rows[:3]}, {"train": rows[:3] * 2, "val": rows}):
        data = Task(name="mine", kind="classify", **splits, model_fields={"num_labels": 2})
        with pytest.raises(ConfigError, match="mine: labels must be classes from 0 to 1, or -100"):
            fit(tmp_path / "run", data, objective=None, precision="32-true", batch_size=2)
    assert not (tmp_path / "run").exists()


def test_fields_that_the_data_decide_are_fields_of_the_model(tmp_path):
    sizes = {"vocab_size": 5, "embed_dim": 8, "num_heads": 2, "num_layers": 1}
    rows = [{"input_ids": [1, 2], "labels": 1}]
    config = RunConfig(model=node(build_model, architecture="encoder", head="sequence", **sizes))
    assert (
        build_network(config.model, DataModule(task_of(rows, model_fields={"num_classes": 3}), batch_size=1)).config.num_labels
        == 3
    )
    with pytest.raises(ConfigError, match=r"model\.num_class=3, but a model has no such field"):
        build_network(config.model, DataModule(task_of(rows, model_fields={"num_class": 3}), batch_size=1))


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_what_is_not_finite_ends_the_run_before_the_update_also_without_found_inf(tmp_path, where):
    data, model, steps = task_of(squares()), nn.Linear(3, 2), itertools.count(1)

    def spoiled(x):
        return x * math.inf if next(steps) == 3 else x

    if where == "loss":
        model.register_forward_hook(lambda part, inputs, logits: spoiled(logits) if part.training else logits)
    else:
        model.weight.register_hook(spoiled)
    result = fit(tmp_path / "run", data, model=model, on_nonfinite="record", log_every=10, ckpt_every=2)
    assert (result["nonfinite_step"], result["steps"]) == (3, 2)
    torch.testing.assert_close(model.weight, last(tmp_path / "run")["state_dict"]["network.weight"], rtol=0, atol=0)
    with pytest.raises(NonFiniteError, match=r"not finite in step 1 .*the update was skipped"):
        fit(tmp_path / "stop", data, objective=lambda logits, batch: squared(logits, batch) * math.nan)


@pytest.mark.parametrize("where", ["training", "validation"])
def test_an_objective_whose_sums_differ_between_batches_is_refused(tmp_path, where):
    calls = itertools.count()

    def objective(logits, batch):
        is_other = torch.is_grad_enabled() == (where == "training") and next(calls) % 2
        return {"loss": squared(logits, batch), **({"more": logits.sum()} if is_other else {})}

    with pytest.raises(ConfigError, match=r"^objective must return the same sums for every batch, but it returned loss, and"):
        fit(tmp_path / "run", task_of(squares()), objective=objective, accumulate=2, val_batch_size=2)


# --- models of transformers, and wrappers around them


def bert(**options):
    return transformers.BertForMaskedLM(transformers.BertConfig(**TEXT, **options))


def lora(model, *targets):
    with warnings.catch_warnings(action="ignore"):  # PEFT's own
        return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=list(targets)))


MODELS = {
    **{name: partial(build, name) for name in ("Bert", "GPT2", "Llama", "T5")},
    "compiled lora on GPT2": lambda: torch.compile(lora(build("GPT2"), "c_attn"), backend="eager"),
}


def padded_batch(of_pairs=False):
    """Three rows of 7 tokens, of which 7, 5 and 2 are real; for a model of pairs also targets."""
    real = torch.arange(7) < torch.tensor([[7], [5], [2]])
    batch = {"input_ids": torch.randint(3, 37, (3, 7)), "key_mask": real, "labels": torch.randint(3, 37, (3, 7))}
    if of_pairs:
        batch |= {"decoder_input_ids": torch.randint(3, 37, (3, 5)), "labels": torch.randint(37, (3, 5))}
        batch["decoder_key_mask"] = torch.arange(5) < torch.tensor([[3], [5], [2]])
    return batch


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_transformers_gets_our_masks_under_its_names_and_neither_labels_nor_a_cache(name):
    torch.manual_seed(3)
    model, calls = MODELS[name]().eval(), []
    inner = next(part for part in model.modules() if isinstance(part, transformers.PreTrainedModel))
    batch = padded_batch(of_pairs=name == "T5")
    with torch.no_grad():
        ids, asked = {"input_ids": batch["input_ids"]}, {"attention_mask": batch["key_mask"].long()}
        if name == "T5":
            ids |= {"decoder_input_ids": batch["decoder_input_ids"]}
            ids |= {"decoder_attention_mask": batch["decoder_key_mask"].long()}
        wanted, without = inner(**ids, **asked).logits, inner(**ids).logits
        inner.register_forward_pre_hook(lambda part, args, kwargs: calls.append(kwargs), with_kwargs=True)
        found = Net.of(model)(batch | {"num_targets": torch.tensor(3)})
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    if name in ("Bert", "T5"):  # padding on the right is in nobody's past
        assert not torch.allclose(found, without)
    assert calls[0].get("labels") is None and "num_targets" not in calls[0] and calls[0].get("use_cache") is not True
    if name in ("GPT2", "Llama", "T5"):
        assert calls[0]["use_cache"] is False


@pytest.mark.parametrize("package", ["lightning.pytorch.core.module", "pytorch_lightning.core.module"])
def test_a_lightning_module_is_a_network_unless_it_has_a_training_step(tmp_path, package):
    """A class of ``pytorch_lightning`` is played by one that says so."""
    base = L.LightningModule
    if not package.startswith("lightning."):
        body = {"__module__": package, "training_step": lambda self: None, "forward": base.forward}
        base = type("LightningModule", (nn.Module,), body)

    class Line(base):
        def __init__(self):
            super().__init__()
            self.line = nn.Linear(3, 2)

        def forward(self, x):
            return self.line(x)

    class Stepped(Line):
        def training_step(self, batch, index):
            raise AssertionError

    data = task_of([{"x": row["input"], "labels": row["labels"]} for row in squares()])
    model = Line()
    result = fit(tmp_path / "run", data, model=model)
    assert result["val_loss"] == pytest.approx(evaluate(model, data, objective=squared).metrics["loss"].value)
    with pytest.raises(ConfigError, match=r"^model: Stepped is a LightningModule with its own training_step"):
        fit(tmp_path / "own", data, model=Stepped())
    assert not (tmp_path / "own").exists()


def test_pairs_of_a_loader_reach_the_first_parameter_and_give_the_run_of_named_rows(tmp_path):
    rows, model = squares(), nn.Linear(3, 2)
    module = L.LightningDataModule()
    module.train_dataloader = lambda: DataLoader([(*row.values(),) for row in rows], batch_size=2, shuffle=True)
    module.val_dataloader = module.train_dataloader
    for place, data in {"named": task_of(rows), "pairs": module}.items():
        fit(tmp_path / place, data, model=copy.deepcopy(model), batch_size=4, accumulate=2)
    assert losses_of(tmp_path / "pairs") == losses_of(tmp_path / "named")


def rows_of_tokens(real, **more):
    return [{"input_ids": list(range(3, 3 + n)), "labels": list(range(3, 3 + n)), **more} for n in real]


def train_tokens(folder, model, rows, *, vocab_size=99, num_labels=2, run=None, **options):
    fields = {"vocab_size": vocab_size, "num_labels": num_labels}
    task = Task(**{"name": "mine", "train": rows, "val": rows, "model_fields": fields, **options})
    options = {"objective": None, "precision": "32-true", "max_steps": 2, "val_batch_size": 2, **(run or {})}
    return fit(folder, task, model=model, batch_size=len(rows), **options)


@pytest.mark.parametrize(("given", "of_data", "wanted"), [(None, 5, 5), (5, 5, 5), (3, 5, (3, 5)), ((3, 5), (5, 7), (3, 5, 7))])
def test_what_ends_the_rows_ends_a_text_beside_what_the_weights_say(given, of_data, wanted):
    task = Task(
        name="mine", train=rows_of_tokens([3]), val=rows_of_tokens([3]), model_fields={"vocab_size": 37, "eos_id": of_data}
    )
    found = fitted(TransformerConfig(eos_id=given), DataModule(task, batch_size=1))
    assert found.eos_id == wanted


class Reads(nn.Module):
    """Takes every argument, and reads the ids alone."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(99, 8), nn.Linear(8, 99)

    def forward(self, input_ids, **kwargs):
        return self.head(self.embed(input_ids))


class ReadsAnything(Reads):
    def forward(self, **kwargs):
        return super().forward(kwargs["input_ids"])


def test_a_mask_that_does_not_reach_the_model_is_refused_where_it_hides_anything_also_in_a_later_batch(tmp_path):
    assert train_tokens(tmp_path / "full", Reads(), rows_of_tokens([5, 5, 5]))["steps"] == 2  # nothing is hidden
    assert train_tokens(tmp_path / "none", Reads(), rows_of_tokens([5, 3, 5]), key_masks={}, pad={"input_ids": 0})["steps"] == 2
    several = [row | {"document_ids": [0, 0, 1]} for row in rows_of_tokens([3, 3])]
    lone = [row | {"document_ids": [0, 0, -1]} for row in rows_of_tokens([3, 3])]
    assert train_tokens(tmp_path / "lone", Reads(), lone)["steps"] == 2
    for said, model, rows in (
        ("Reads.forward has no parameter key_mask or attention_mask", Reads(), rows_of_tokens([5, 3])),
        ("Reads.forward has no parameter document_ids", Reads(), several),
        ("no parameter of ReadsAnything.forward matches a key of the batch", ReadsAnything(), rows_of_tokens([5])),
    ):
        with pytest.raises(ConfigError, match=said):
            train_tokens(tmp_path / "refused", model, rows)
        assert not (tmp_path / "refused").exists()
    with pytest.raises(ConfigError, match=r"Reads\.forward has no parameter key_mask"):
        train_tokens(tmp_path / "later", Reads(), rows_of_tokens([5, 5, 5]), val=rows_of_tokens([5, 5, 5, 2]))


class ReadsByPosition(Reads):
    def forward(self, input_ids, /):
        return super().forward(input_ids)


def test_parameters_that_cannot_be_passed_by_name_are_refused_as_such(tmp_path):
    with pytest.raises(
        ConfigError, match=r"^model: ReadsByPosition\.forward takes input_ids only by position, .*: remove the /"
    ):
        train_tokens(tmp_path / "run", ReadsByPosition(), rows_of_tokens([5, 5]))


class Sums(nn.Module):
    """Reads a key of its own, with its mask."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 2)

    def forward(self, src, src_mask):
        return self.head((self.embed(src) * src_mask[..., None]).sum(1))


def test_a_mask_of_ones_own_name_reaches_the_model_or_is_refused(tmp_path):
    rows = [{"src": list(range(1, 1 + n)), "labels": n % 2} for n in (5, 3, 4)]
    model, alone = Sums(), [{**row, "src_mask": [True] * len(row["src"])} for row in rows]
    task = task_of(rows, key_masks={"src": "src_mask"}, model_fields={"num_labels": 2})
    losses = [evaluate(model, each, batch_size=size).metrics["loss"].value for each, size in ((task, 3), (task_of(alone), 1))]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    fit(tmp_path / "run", task, model=Sums(), objective=None, precision="32-true", batch_size=3)
    lost = task_of([{"input_ids": row["src"], "labels": 1} for row in rows], key_masks={"input_ids": "mask_of_ids"})
    with pytest.raises(ConfigError, match=r"Reads\.forward has no parameter mask_of_ids"):
        fit(tmp_path / "lost", lost, model=Reads(), objective=None, precision="32-true", batch_size=3)
    with pytest.raises(ConfigError, match=r"Reads\.forward has no parameter mask_of_ids"):
        evaluate(Reads(), lost)


def test_a_model_from_pretrained_trains_with_dropout_and_what_its_owner_froze_stays_as_it_is(tmp_path, caplog):
    caplog.set_level("INFO")
    given = bert(hidden_dropout_prob=0.5).eval()  # as from_pretrained leaves it
    modes = []
    given.bert.embeddings.dropout.register_forward_hook(lambda part, *_: modes.append(part.training))
    train_tokens(tmp_path / "bert", given, rows_of_tokens([5, 3, 2]))
    assert modes.count(True) == 2 and "in evaluation mode" not in caplog.text  # the other calls are checks and validation

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.frozen = bert().requires_grad_(False).eval()
            self.tuned, self.norm, self.head = bert().eval(), nn.BatchNorm1d(99).eval(), nn.Linear(99, 99)

        def forward(self, input_ids, attention_mask):
            logits = self.frozen(input_ids, attention_mask).logits + self.tuned(input_ids, attention_mask).logits
            return self.head(self.norm(logits.mT).mT)

    net = Mixed()
    train_tokens(tmp_path / "net", net, rows_of_tokens([5, 3, 2]))
    assert "stays in evaluation mode: frozen, norm" in caplog.text
    assert not any(part.training for part in [*net.frozen.modules(), net.norm])
    assert all(part.training for part in net.tuned.modules()) and int(net.norm.num_batches_tracked) == 0

    adapted = lora(bert(hidden_dropout_prob=0.5).eval(), "query")
    assert put_into_training(adapted) == [] and all(part.training for part in adapted.modules())


def test_what_of_a_model_does_not_take_part_is_said_at_the_start(tmp_path, caplog):
    caplog.set_level("INFO")
    train_tokens(tmp_path / "mixture", build("Mixtral"), rows_of_tokens([5, 3, 2]))
    assert "its router loss is not part of the objective" in caplog.text and "is larger than" not in caplog.text
    caplog.clear()
    task = {"vocab_size": 31, "key_masks": {}, "pad": {"input_ids": 0}}
    train_tokens(tmp_path / "larger", bert(), rows_of_tokens([5, 3, 2], token_type_ids=[0]), **task)
    assert "the vocabulary of BertForMaskedLM, 99, is larger than the data needs, 31" in caplog.text
    assert "router" not in caplog.text
    with pytest.raises(ConfigError, match="the vocabulary of BertForMaskedLM, 99, is smaller than the data needs, 101"):
        train_tokens(tmp_path / "smaller", torch.compile(bert(), backend="eager"), rows_of_tokens([5]), vocab_size=101)
    with pytest.raises(ConfigError, match="the number of labels of BertForMaskedLM, 2, is smaller than the data needs, 3"):
        train_tokens(tmp_path / "labels", bert(), rows_of_tokens([5]), num_labels=3)


class AnswersNone:
    """A config that has no names but those that it is given."""

    def __init__(self, **names):
        vars(self).update(names)

    def __getattr__(self, name):
        return None


def test_a_config_that_answers_none_says_nothing(tmp_path, caplog):
    caplog.set_level("INFO")
    model = Reads()
    model.config = AnswersNone(position="learned", architecture="decoder")
    train_tokens(tmp_path / "run", model, rows_of_tokens([5, 5]))
    assert "mixture of experts" not in caplog.text
    assert [ids.tolist() for ids in generate(Counts().eval(), torch.tensor([[3, 4]]), max_new_tokens=2)] == [[5, 6]]
    for small in (AnswersNone(vocab_size=31), {"vocab_size": 31}):
        model.config = small
        with pytest.raises(ConfigError, match="the vocabulary of Reads, 31, is smaller than the data needs, 99"):
            train_tokens(tmp_path / "smaller", model, rows_of_tokens([5]))
    model.config = AnswersNone(vocab_size="99 words")
    train_tokens(tmp_path / "words", model, rows_of_tokens([5, 5]))


class Counts(nn.Module):
    """The token after id i is i + 1."""

    config = AnswersNone(position="learned")

    def forward(self, input_ids):
        return nn.functional.one_hot(input_ids + 1, 99).float()


def with_linear_attention(config):
    model = DecoderLM(config)
    for block in model.blocks:
        block.attention.core = LinearAttention()
    return model


def test_the_checkpoint_of_a_changed_model_of_ours_is_loaded_into_a_model_that_was_changed_alike_and_no_other(tmp_path, caplog):
    caplog.set_level("INFO")
    config = TransformerConfig(vocab_size=99, embed_dim=8, num_heads=2, num_layers=2)
    model = with_linear_attention(config)
    train_tokens(tmp_path / "run", model, rows_of_tokens([5, 5, 3]))
    assert "load its checkpoints with load_model(path, model=...), because blocks.0.attention.core is" in caplog.text
    path, ids = tmp_path / "run" / "checkpoints" / "last.ckpt", torch.tensor([[3, 5, 4]])
    difference = r"differs from its config: blocks\.0\.attention\.core is \S+LinearAttention, not \S+DotProductAttention"
    with pytest.raises(
        ConfigError, match=rf"^ckpt_path=\S+ contains a model that {difference}.* call load_model\(path, model="
    ):
        load_model(path)
    loaded = load_model(path, model=with_linear_attention(config))[0]
    torch.testing.assert_close(loaded(ids), model.eval()(ids), rtol=0, atol=0)
    for options, refusal in (
        ({"ckpt_path": str(path), "max_steps": 3}, r"contains another model than the config: model\.(changes|_target_) "),
        ({"init_from": InitFrom(path=str(path))}, rf"^init_from\.path=\S+ contains a model that {difference}"),
    ):
        where = tmp_path / ("run" if "ckpt_path" in options else "new")
        with pytest.raises(ConfigError, match=refusal):
            train_tokens(where, DecoderLM(config), rows_of_tokens([5, 5, 3]), run=options)
        steps = train_tokens(where, with_linear_attention(config), rows_of_tokens([5, 5, 3]), run=options)["steps"]
        assert steps == options.get("max_steps", 2)


@pytest.mark.parametrize("how", ["object", "config"])
def test_sizes_are_checked_alike_for_a_model_from_python_and_one_of_the_config(tmp_path, how):
    sizes = {"embed_dim": 8, "num_heads": 2, "num_layers": 1, "position": "learned", "max_len": 8}
    of_labels = {"architecture": "encoder", "head": "sequence"}
    cases = (
        ({}, {"longest": 20}, {}, "^model.max_len=8 is smaller than the longest row of the data, 20 tokens"),
        ({}, {}, {"batch_size": 4}, "^mine has 3 training rows, fewer than data.batch_size=4: lower it"),
        ({**of_labels, "num_labels": 2}, {"kind": "classify"}, {}, "^model.*labels.* the data"),
    )
    for fields, task, options, refusal in cases:
        rows = [{**row, "labels": 1} if task.get("kind") else row for row in rows_of_tokens([5, 5, 3])]
        data = Task(**{"name": "mine", "train": rows, "val": rows, "model_fields": {"vocab_size": 99, "num_labels": 3}, **task})
        if not fields:
            data = dataclasses.replace(data, model_fields={"vocab_size": 99})
        if how == "object":
            kinds = {"model": build_model(TransformerConfig(vocab_size=99, **sizes, **fields))}
        else:
            kinds = {"config": node(build_model, **sizes, **fields)}
        config = RunConfig(model=kinds.get("config", node(build_model)), trainer=TrainerConfig(max_steps=1, accelerator="cpu"))
        with pytest.raises(ConfigError, match=refusal):
            train(config, tmp_path / "run", model=kinds.get("model"), data=data, batch_size=options.get("batch_size", 3))
    assert not (tmp_path / "run").exists()


FREEZE = {"_target_": "minitx.training.optimizers.sgd", "lr": 0.05, "rules": [{"match": "bias", "trainable": False}]}


@pytest.mark.parametrize("ending", ["done", "refused", "failed"])
@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-true"])
def test_of_a_run_only_weights_and_modes_are_left_on_the_model_of_its_user(tmp_path, ending, precision):
    def objective(logits, batch):
        return squared(logits, batch) * (math.nan if ending == "failed" else 1)

    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    model[0].weight.requires_grad_(False)  # as its owner wants it

    def traces():
        """The attributes of each module, and the number of entries of those that are dicts, such as hooks."""
        return [{name: isinstance(x, dict) and len(x) for name, x in vars(part).items()} for part in model.modules()]

    before, trainable = traces(), [parameter.requires_grad for parameter in model.parameters()]
    options = {"precision": precision, "optimizer": FREEZE, "max_steps": 2}
    options |= {"evaluation": EvaluationConfig(test="last")} if ending == "refused" else {}  # there is no test split
    rows = [{name: value.float() for name, value in row.items()} for row in squares()]
    errors = {"done": (), "refused": ConfigError, "failed": NonFiniteError}[ending]
    with pytest.raises(errors) if errors else contextlib.nullcontext():
        fit(tmp_path / "run", task_of(rows), model=model, objective=objective, **options)
    assert traces() == before and [parameter.requires_grad for parameter in model.parameters()] == trainable


# --- counts, metrics and splits


@pytest.mark.parametrize("size", [0, -4, 2.5, "four"])
def test_a_batch_size_from_python_is_read_as_that_of_a_config_is(tmp_path, size):
    rows = squares()
    with pytest.raises(ConfigError, match=rf"^batch_size={size} must be"):
        fit(tmp_path / "run", Task(name="mine", train=rows, val=rows), batch_size=size)
    assert not (tmp_path / "run").exists()


def test_epochs_count_the_rows_of_a_task(tmp_path):
    rows = squares()
    task = Task(name="mine", train=rows, val=rows[:3], test=rows[3:])
    options = {"max_steps": None, "val_every": None, "log_every": 5}
    result = fit(tmp_path / "run", task, max_epochs=5, **options)  # 2 rows a step: 17.5 steps
    found = [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.csv") if row["val_loss"] is not None]
    assert result["steps"] == 18 and found == [4, 8, 12, 16, 18]
    assert fit(tmp_path / "short", task, max_epochs=5, **{**options, "max_steps": 3})["steps"] == 3
    drawn = dataclasses.replace(task, train=lambda count, generator: {})
    with pytest.raises(ConfigError, match=r"^trainer\.max_epochs=5 needs a fixed number of training rows"):
        fit(tmp_path / "drawn", drawn, max_epochs=5, **options)


AVERAGED = {"_target_": "lightning.pytorch.callbacks.EMAWeightAveraging", "decay": 0.2}


@pytest.mark.parametrize("parts", [{}, {"ema": AVERAGED}], ids=["plain", "averaged"])
def test_a_test_split_is_evaluated_at_the_end_with_the_weights_that_were_asked_for(tmp_path, parts):
    rows, model = squares(), nn.Linear(3, 2)
    task, batch = Task(name="mine", train=rows[:4], val=rows[4:5], test=rows[5:]), default_collate(rows[5:])
    for which in ("last", "best"):
        test = EvaluationConfig(test=which, at_end=True)
        options = {"evaluation": test, "callbacks": parts, "monitor_mode": "max"}
        result = fit(tmp_path / which, task, model=copy.deepcopy(model), val_every=2, max_steps=9, **options)
        loaded = load_model(tmp_path / which / "checkpoints" / f"{which}.ckpt", model=copy.deepcopy(model).double())[0]
        wanted = squared(loaded(batch["input"]), batch).item() / 4
        assert result["metrics"]["test_loss"] == pytest.approx(wanted, rel=1e-9)
        at_end = json.loads((tmp_path / which / "evaluation.json").read_text(encoding="utf-8"))["metrics"]["loss"]["value"]
        assert at_end == pytest.approx(result["val_loss"], rel=1e-9)  # of the last weights
    assert last(tmp_path / "best", "best")["global_step"] < 9
    with pytest.raises(ConfigError, match=r"^evaluation\.test=best: the data has no test split"):
        fit(tmp_path / "none", dataclasses.replace(task, test=None), evaluation=test)
    finished = {**options, "max_steps": 9, "ckpt_path": str(tmp_path / "last" / "checkpoints" / "last.ckpt")}
    with pytest.raises(ConfigError, match=r"^evaluation\.test=best: there is no best\.ckpt, because trainer\.monitor="):
        fit(tmp_path / "no validation", task, **finished)


def test_a_schedule_that_reads_a_metric_gets_it_after_each_validation_and_resumes(tmp_path):
    plateau = {"_target_": "torch.optim.lr_scheduler.ReduceLROnPlateau", "patience": 0, "threshold": 9.0, "factor": 0.5}
    options = {"schedule": plateau, "val_every": 1, "monitor": "train_loss", "ckpt_every": 1}
    data = task_of(squares())
    fit(tmp_path / "run", data, max_steps=3, **options)
    result = fit(tmp_path / "run", data, max_steps=6, ckpt_path="last", **options)
    rates = [row["lr"] for row in read_metrics(tmp_path / "run" / "metrics.csv")]
    assert result["metrics"]["lr"] == 0.0015625
    assert rates == [0.05, 0.025, 0.0125, 0.00625, 0.003125, 0.0015625]
    with pytest.raises(ConfigError, match=r"^trainer\.monitor=nothing is not logged, but the schedule needs it"):
        fit(tmp_path / "none", data, **{**options, "monitor": "nothing"})


# --- validation


def test_every_validation_row_is_read_and_the_summary_says_where_some_are_not(tmp_path, caplog):
    caplog.set_level("INFO")
    rows = [{"input": torch.zeros(3), "labels": torch.full((2,), float(i == 700))} for i in range(701)]
    data = task_of(rows)
    options = {"max_steps": 1, "precision": "32-true", "val_batch_size": 7}
    model = nn.Linear(3, 2, bias=False)
    assert fit(tmp_path / "all", data, model=model, **options)["val_loss"] == pytest.approx(2 / 1402)
    assert "the first" not in caplog.text
    assert fit(tmp_path / "some", data, model=model, val_batches=100, **options)["val_loss"] == 0.0
    assert "the first 700 of 701 to validate" in caplog.text
