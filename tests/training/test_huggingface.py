"""Models of Hugging Face as they are, through ``model=hf``: what they learn, store and refuse."""

import json
import shutil
import sys
from functools import partial

import pytest
import torch
from extra import QUIET, last, losses_of
from ranks import run_ranks, train_as
from safetensors.torch import load_file, save_file

from minitx.ablation.design import AblationConfig, StudyConfig, ThresholdConfig
from minitx.ablation.execution import run_cells
from minitx.ablation.grid import cells
from minitx.cli.ablate import run_cell
from minitx.cli.compose import compose_config
from minitx.config import ConfigError
from minitx.data.datamodule import open_data
from minitx.data.tokenizer import train_tokenizer
from minitx.interop import hf_from_config, pretrained_hf
from minitx.interop.lora import Lora
from minitx.training.checkpoints import load_model, load_stored
from minitx.training.run import open_parts, train
from tests.ablation.pretended_runs import Here

transformers = pytest.importorskip("transformers", reason="Hugging Face models need the package transformers")
pytest.importorskip("peft", reason="adapters need the package peft")

WIDE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
WORDS = "the cat sat on a mat and saw one dog run to it"
DOCUMENTS = [WORDS[i : i + n] for i, n in enumerate([7, 3, 19, 11, 5, 2, 13, 17])]
ONE_STEP = ["optimizer=sgd", "optimizer.lr=1.0", "optimizer.weight_decay=0", "schedule=constant", "trainer.max_steps=1"]
ONE_STEP += ["trainer.precision=64-true", "trainer.clip=null", "data.bucket=false"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Small models with one tokenizer, as the hub has them, and files of data."""
    root = tmp_path_factory.mktemp("hub")
    tokenizer = train_tokenizer("char", [WORDS], marks=["pad", "eos", "cls"])
    marks = {f"{name}_token_id": tokenizer.mark_ids[name] for name in ("pad", "eos")}
    size = {"vocab_size": tokenizer.vocab_size, "bos_token_id": None, **marks}
    torch.manual_seed(3)
    models = {
        "llama": transformers.LlamaForCausalLM(transformers.LlamaConfig(**size, **WIDE, initializer_range=0.3)),
        "gpt2": transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, n_embd=16, n_layer=2, n_head=2)),
        "bert": transformers.BertForMaskedLM(transformers.BertConfig(**size, **WIDE)),
    }
    for name, model in models.items():
        model.save_pretrained(root / name)
        tokenizer.save(root / name / "tokenizer.json")
    for name, rows in (("train", DOCUMENTS), ("val", DOCUMENTS[:3])):
        lines = (json.dumps({"text": text, "label": "ab"[len(text) % 2]}) for text in rows)
        (root / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return root


@pytest.fixture
def words(folders):
    """``words(model, *more)``: the overrides of a run on the documents."""

    def make(model, *more, data="hf"):
        files = [f"data.path={folders / 'train.jsonl'}", f"data.val_path={folders / 'val.jsonl'}"]
        chosen = ["experiment=finetune", "model=hf", f"model.path={folders / model}", f"data={data}", *files, *QUIET]
        short = ["evaluation.at_end=false", "data.batch_size=2", "trainer.max_steps=2", "schedule.warmup_steps=0"]
        rows = ["data.context_len=23"] if data == "hf" else []  # at least as many packed rows as in a batch
        return [*chosen, *short, *rows, *more]

    return make


@pytest.fixture
def assert_one_step(words, folders, tmp_path):
    """One step of SGD on all rows moves the weights of a model without dropout by the gradients of ``loss``.

    ``loss(plain, rows)`` gives terms of the mean over all targets, from transformers alone.
    """

    def check(kind, name, loss, *more, data, **options):
        still = kind.from_pretrained(folders / name, **options)
        still.save_pretrained(tmp_path / "still")
        shutil.copy(folders / name / "tokenizer.json", tmp_path / "still")
        chosen = words(name, f"model.path={tmp_path / 'still'}", *ONE_STEP, *more, data=data)
        config = compose_config(chosen)
        rows = list(open_data(config.data, config.trainer, seed=config.seed).task.train)
        train(compose_config([*chosen, f"data.batch_size={len(rows)}"]), tmp_path / "run")
        after = last(tmp_path / "run")["state_dict"]
        plain = kind.from_pretrained(tmp_path / "still", dtype="float64").train()
        for term in loss(plain, rows):
            term.backward()
        for key, parameter in plain.named_parameters():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            moved = still.state_dict()[key].double() - after[f"network.{key}"]
            torch.testing.assert_close(moved, gradient, rtol=1e-6, atol=1e-9, msg=key)

    return check


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("adopt", [False, True], ids=["plain", "adopted"])
def test_a_step_has_the_gradients_of_a_loop_in_plain_transformers(packing, adopt, assert_one_step):
    """GPT-2; ``tests/lattice/runs.py`` has Llama."""

    def loss(plain, rows):
        assert len(rows) < len(DOCUMENTS) if packing else len(rows) == len(DOCUMENTS)
        marks = train_tokenizer("char", [WORDS], marks=["pad", "eos", "cls"])
        eos = marks.mark_ids["eos"]
        documents = [torch.tensor([eos, *marks.encode(text).tolist(), eos]) for text in DOCUMENTS]
        for ids in documents:
            logits = plain(input_ids=ids[None, :-1], use_cache=False).logits[0]
            yield torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum") / sum(len(one) - 1 for one in documents)

    drop = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    more = [f"data.packing={packing}", "data.context_len=23", f"model.adopt={adopt}"]
    assert_one_step(transformers.AutoModelForCausalLM, "gpt2", loss, *more, data="hf", **drop)


class LooksEverywhere(transformers.LlamaForCausalLM):
    """Takes positions, but its mask does not separate documents by them."""

    def forward(self, input_ids, position_ids=None, **kwargs):
        return super().forward(input_ids, **kwargs)


def test_a_model_whose_positions_do_not_separate_documents_is_refused(words, folders, tmp_path):
    model = LooksEverywhere.from_pretrained(folders / "llama")
    with pytest.raises(ConfigError, match=r"attention of LooksEverywhere crosses the documents of a row.*data\.packing=false"):
        train(compose_config(words("llama")), tmp_path / "run", model=model)
    assert not (tmp_path / "run").exists()


def test_a_run_of_another_scale_that_goes_on_is_bit_equal_to_one_that_was_never_stopped(words, tmp_path):
    chosen = words("gpt2", "model.adopt=true", "model.scale=unscaled", "schedule=constant")
    train(compose_config([*chosen, "trainer.max_steps=4"]), tmp_path / "whole")
    train(compose_config(chosen), tmp_path / "half")
    train(compose_config([*chosen, "trainer.max_steps=4", "ckpt_path=last"]), tmp_path / "half")
    whole, half = (last(tmp_path / name) for name in ("whole", "half"))
    torch.testing.assert_close(half["state_dict"], whole["state_dict"], rtol=0, atol=0)
    torch.testing.assert_close(half["optimizer_states"][0]["state"], whole["optimizer_states"][0]["state"], rtol=0, atol=0)


def test_an_adapter_is_all_that_trains_and_its_checkpoint_needs_neither_trust_nor_the_folder_that_it_came_from(
    words, folders, tmp_path
):
    shutil.copytree(folders / "llama", tmp_path / "gone")
    train(
        compose_config(words("llama", f"model.path={tmp_path / 'gone'}", "model.lora=3", "model.adopt=true")), tmp_path / "run"
    )
    shutil.rmtree(tmp_path / "gone")
    state = last(tmp_path / "run")["state_dict"]
    before = transformers.AutoModelForCausalLM.from_pretrained(folders / "llama").state_dict()
    for name, weight in before.items():
        layer, _, kind = name.rpartition(".")
        kept = (state.get(f"network.base_model.model.{layer}{part}.{kind}") for part in ("", ".base_layer"))
        torch.testing.assert_close(next(each for each in kept if each is not None), weight, rtol=0, atol=0)
    adapters = {name: weight for name, weight in state.items() if "lora_" in name}
    assert len(adapters) == 2 * 2 * 7 and all(3 in weight.shape for weight in adapters.values())
    assert all(weight.any() for name, weight in adapters.items() if "lora_B" in name)
    model, tokenizer, _ = load_model(tmp_path / "run" / "checkpoints" / "last.ckpt")
    assert type(model).__name__.startswith("Peft") and hasattr(model.get_base_model(), "adoption")
    assert tokenizer.encode("cat").tolist() == train_tokenizer("char", [WORDS]).encode("cat").tolist()
    found = {f"network.{name}": weight for name, weight in model.state_dict().items()}
    torch.testing.assert_close(found, dict(state), rtol=0, atol=0)


def test_a_step_of_a_classifier_has_the_gradients_of_a_loop_over_rows_without_padding(assert_one_step):
    def loss(plain, rows):
        assert len({len(row["input_ids"]) for row in rows}) > 4
        for row in rows:
            yield plain(torch.tensor(row["input_ids"])[None], labels=torch.tensor([row["labels"]])).loss / len(rows)

    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 2}
    assert_one_step(transformers.AutoModelForSequenceClassification, "bert", loss, data="classify", **still)


def test_a_classifier_has_a_new_head_and_pads_with_the_end_mark_that_is_all_its_tokenizer_has(words, folders, tmp_path, caplog):
    caplog.set_level("INFO")
    shutil.copytree(folders / "gpt2", tmp_path / "gpt2")
    train_tokenizer("char", [WORDS], marks=["eos"]).save(tmp_path / "gpt2" / "tokenizer.json")
    train(compose_config(words("gpt2", f"model.path={tmp_path / 'gpt2'}", data="classify")), tmp_path / "run")
    assert "so they are new" in caplog.text
    stored = load_stored(tmp_path / "run" / "checkpoints" / "last.ckpt")
    assert type(stored.network).__name__.endswith("ForSequenceClassification") and stored.network.config.num_labels == 2
    assert stored.task().label_names == ("a", "b")
    end = stored.tokenizer.mark_ids["eos"]
    assert stored.network.config.pad_token_id == end and stored.task().pad["input_ids"] == end
    text = torch.tensor([stored.tokenizer.encode("the cat").tolist()])
    padded = torch.nn.functional.pad(text, (0, 5), value=end)
    with torch.no_grad():
        torch.testing.assert_close(stored.network(padded).logits, stored.network(text).logits)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "data"), [("llama", "hf"), ("bert", "classify")])
def test_the_largest_stable_rate_of_an_adopted_model_is_found(model, data, words, tmp_path):
    """Also with a head that the folder does not have: the check of the start draws it as the run does."""
    rule = ThresholdConfig(first={"folded": 0.01}, bisections=0, metric="train_loss", value=1.0, window=2)
    base = words(model, "model.adopt=true", "schedule=constant", "trainer.max_steps=4", "trainer.accelerator=cpu", data=data)
    study = StudyConfig(base=tuple(base), arms=("folded",), threshold=rule)
    grid = AblationConfig(arms={"folded": ("model.scale=unscaled", "model.fold_scale=true")}, studies={"text": study})
    (record,) = run_cells(Here(), grid, cells(grid), tmp_path, run_cell)
    assert record["status"] == "done", record["reason"]
    assert 0.0 <= record["result"]["start_error"] < 1e-5
    assert record["result"]["high"] == pytest.approx(2 * record["result"]["low"])


def test_an_adopted_model_that_starts_as_another_function_is_refused(words, folders, tmp_path):
    start = f"path: {folders / 'llama'}"
    model = f"{{_target_: ${{model._target_}}, {start}, _partial_: true}}"
    check = f"+callbacks.same_start={{_target_: minitx.ablation.measures.SameStart, {start}, model: {model}}}"
    with pytest.raises(ConfigError, match="the outputs differ from the outputs of"):
        train(compose_config(words("llama", "model.adopt=true", "model.scale=unscaled", check)), tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["model.lora=2"], ["model.adopt=true"]], ids=["plain", "lora", "adopted"])
def test_two_processes_that_share_the_weights_train_as_one(more, words, tmp_path):
    chosen = words("llama", *more, "trainer.precision=64-true", "evaluation.at_end=true", "data.packing=false")
    for place, processes, over in (("one", 1, []), ("two", 2, ["trainer.devices=2", "trainer.strategy=sharded"])):
        run_ranks(processes, train_as, [*chosen, *over], tmp_path / place, tmp_path / "cache")
    one, two = (last(tmp_path / place)["state_dict"] for place in ("one", "two"))
    torch.testing.assert_close(two, one, rtol=0, atol=1e-9)
    assert losses_of(tmp_path / "two") == pytest.approx(losses_of(tmp_path / "one"), rel=1e-9)
    assert (tmp_path / "two" / "evaluation.json").exists()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["model.scale=unscaled"], "scale=unscaled needs adopt=true"),
        (["model.adopt=true", "model.fold_scale=true"], "fold_scale=true needs a scale other than"),
        (["model.path=nowhere"], "experiment=finetune: model.path"),
        (["data.tokenizer=char"], "data.tokenizer has other ids than the tokenizer of the model"),
        (["model.lora={megatron_core: os}"], "model.lora.megatron_core is not a key"),
        (["model.lora={r: two}"], "model.lora.r=two must be a whole number"),
        (["model.lora=0"], "model.lora=0 must be positive"),
        (["model.lora={lora_alpha: 0}"], "model.lora.lora_alpha=0 must be"),
        (["+model.tokenizer=char"], "model.tokenizer=char cannot be set"),
        (["callbacks.probe.every=1", "callbacks.probe.batch_size=2"], "model.adopt=true"),
        (["trainer.strategy=sharded", "trainer.shard=[Nothing]"], "trainer.shard=Nothing is not the class of any module"),
    ],
)
def test_what_cannot_be_had_of_a_model_is_one_sentence_and_leaves_no_folder(more, said, words, tmp_path):
    with pytest.raises(ConfigError, match=said.replace(".", r"\.")):
        train(compose_config(words("llama", *more)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_from_python_a_switch_is_no_rank_either(folders):
    with pytest.raises(ConfigError, match="lora=true must be"):
        pretrained_hf(str(folders / "llama"), lora=True)
    for values in ({"r": True}, {"lora_alpha": 0}, {"lora_dropout": 1.5}):
        with pytest.raises(ConfigError, match=f"^{next(iter(values))}="):
            Lora(**values)


@pytest.mark.parametrize("words", [{"task": "lm"}, {"attention": "falsh"}, {"attention": "falsh", "adopt": True}])
def test_from_python_a_word_that_is_no_choice_is_refused_with_the_choices(folders, words):
    choices = "language_model, masked_lm, seq2seq, classify, tag, other" if "task" in words else "sdpa, eager"
    config = transformers.AutoConfig.from_pretrained(folders / "llama").to_dict()
    for build in (partial(pretrained_hf, str(folders / "llama")), partial(hf_from_config, config)):
        with pytest.raises(ConfigError, match=rf"^\w+=\w+ is not allowed: one of {choices}"):
            build(**words)


@pytest.mark.parametrize(("package", "options"), [("peft", {"lora": 2}), ("transformers", {})])
def test_a_package_that_is_missing_is_named_with_how_to_install_it(package, options, folders, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"needs the package {package}: install minitx with the extra hf$"):
        pretrained_hf(str(folders / "llama"), **options)


def test_a_config_of_python_whose_labels_have_numbers_gives_its_model():
    config = transformers.BertConfig(**WIDE, vocab_size=19).to_dict()
    assert hf_from_config(config=config).config.id2label == config["id2label"]


def test_weights_that_are_missing_are_refused(words, folders, tmp_path):
    shutil.copytree(folders / "llama", tmp_path / "torn")
    weights = load_file(tmp_path / "torn" / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "torn" / "model.safetensors", metadata={"format": "pt"})
    for data in ("hf", "classify"):
        with pytest.raises(ConfigError, match=r"lacks .* such as .*"):
            train(compose_config(words("llama", f"model.path={tmp_path / 'torn'}", data=data)), tmp_path / "run")


def test_a_trained_head_numbers_the_labels_unless_a_new_one_is_asked_for(words, folders, tmp_path):
    tokenizer = train_tokenizer("char", [WORDS], marks=["pad", "eos", "cls"])
    names = {"id2label": {0: "b", 1: "a"}, "label2id": {"b": 0, "a": 1}}
    size = {"vocab_size": tokenizer.vocab_size, "pad_token_id": tokenizer.mark_ids["pad"], **WIDE}
    theirs = transformers.BertForSequenceClassification(transformers.BertConfig(**size, **names))
    theirs.save_pretrained(tmp_path / "head")
    tokenizer.save(tmp_path / "head" / "tokenizer.json")
    chosen = words(tmp_path / "head", data="classify")
    starts = [word for word in chosen if not word.startswith("model")] + [f"init_from.path={tmp_path / 'head'}"]
    networks = []
    for line, order in ((chosen, "ba"), (starts, "ba"), ([*chosen, "model.new_head=true"], "ab")):
        _, rows, network = open_parts(compose_config(line))
        assert rows.task.label_names == (*order,)
        labels = rows.probe_batch(3)["labels"]
        assert [order[label] for label in labels] == ["ab"[len(text) % 2] for text in DOCUMENTS[:3]]
        networks.append(network)
    kept, new = (network.classifier.weight for network in (networks[0], networks[2]))
    assert torch.equal(kept, theirs.classifier.weight) and not torch.equal(new, kept)
    assert torch.equal(networks[2].bert.pooler.dense.weight, theirs.bert.pooler.dense.weight)
    train(compose_config(chosen), tmp_path / "run")
    stored = load_stored(tmp_path / "run" / "checkpoints" / "last.ckpt")
    assert stored.task().label_names == ("b", "a")
