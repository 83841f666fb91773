"""``init_from``: weights to start from, of a Hugging Face folder, a folder of ours or a checkpoint."""

import json
import shutil

import pytest
import tokenizers
import torch
import transformers

from minitx.cli.compose import compose_config
from minitx.config import ConfigError, RunConfig, TransformerConfig, to_dict
from minitx.data.tokenizer import train_tokenizer
from minitx.generation.reader import eos_ids
from minitx.interop import load_hf, release_hf, save_hf
from minitx.nn import DecoderLM
from minitx.training.checkpoint_files import read_checkpoint, write_checkpoint
from minitx.training.checkpoints import load_model
from minitx.training.init_from import Start
from minitx.training.metrics_csv import read_metrics
from minitx.training.net import Net
from tests.cli.conftest import SHORT, copy_example

TEXT = "In the beginning was the Word, and the Word was with God, and the Word was God. " * 40
GPT2 = {"embed_dim": 12, "num_heads": 3, "num_layers": 1, "max_len": 64, "activation": "gelu_tanh"}
STILL = "optimizer.lr=1e-30"  # training that leaves the weights as they were
LAST = "run/checkpoints/last.ckpt"


@pytest.fixture
def theirs(place):
    """A folder in GPT-2's format with a byte-level tokenizer, as the hub has them."""
    tokenizer = train_tokenizer("bpe", [TEXT], vocab_size=300)
    torch.manual_seed(2)
    save_hf(DecoderLM(TransformerConfig(vocab_size=tokenizer.vocab_size, **GPT2)), place / "theirs")
    tokenizer.save(place / "theirs" / "tokenizer.json")
    (place / "text.txt").write_text(TEXT, encoding="utf-8")
    return place / "theirs"


def finetune(path, *more):
    chosen = ["experiment=finetune", f"init_from.path={path}", "data.path=text.txt", "data.context_len=32", "output_dir=run"]
    return [*chosen, *(word for word in SHORT if not word.startswith("model.")), *more]


def same_weights(path):
    """The checkpoint at ``path`` and the last one of the new run, which has the same weights."""
    old, new = read_checkpoint(path), read_checkpoint(LAST)
    for name, weight in old["state_dict"].items():
        torch.testing.assert_close(new["state_dict"][name], weight)
    return old, new


def test_a_folder_brings_weights_shape_and_tokenizer(output, theirs):
    output("train", *finetune(theirs, STILL))
    model, tokenizer, _ = load_model(LAST)
    ids = tokenizers.Tokenizer.from_file(str(theirs / "tokenizer.json")).encode("the Word was God").ids
    assert tokenizer.encode("the Word was God").tolist() == ids
    with torch.no_grad():
        torch.testing.assert_close(model(torch.tensor([ids])), load_hf(theirs)(torch.tensor([ids])))


def as_it_is(path, *more):
    """The words that fine-tune a model of Hugging Face as it is."""
    kept = (word for word in finetune(path) if not word.startswith("init_from"))
    return [*kept, "model=hf", f"model.path={path}", *more]


PROBED = ["model.adopt=true", "callbacks.probe.every=1", "callbacks.probe.weights_every=1"]


@pytest.mark.parametrize("more", [[], PROBED], ids=["plain", "adopted"])
def test_a_model_as_it_is_is_trained_evaluated_shown_and_writes_text_without_trust(output, theirs, more):
    output("train", *as_it_is(theirs, STILL, *more))
    shutil.rmtree(theirs)
    assert "bits_per_byte" in output("evaluate", f"ckpt_path={LAST}", "device=cpu")
    assert output("generate", f"ckpt_path={LAST}", "prompt=the Word", "max_new_tokens=3", "device=cpu")
    assert "1 layer, 3 heads" in output("view", f"ckpt_path={LAST}", "text=the Word was God", "device=cpu")
    if more:
        assert "1 layer, 3 heads, 3 steps" in output("view", "ckpt_path=run", "row=0")


@pytest.mark.parametrize(("named", "found"), [(3, (3,)), ([2, 99, 5], (2, 5)), (None, ())])
def test_a_model_of_transformers_ends_a_text_where_its_config_says(named, found):
    config = transformers.GPT2Config(vocab_size=11, n_embd=4, n_layer=1, n_head=1, bos_token_id=None, eos_token_id=named)
    net = Net.of(transformers.GPT2LMHeadModel(config))
    assert eos_ids(net.writer(11, "last.ckpt")) == found


def test_conversations_are_written_with_the_template_of_the_folder_of_the_model(cli, theirs, place):
    chat = {"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "God."}]}
    (place / "chats.jsonl").write_text("\n".join([json.dumps(chat)] * 20), encoding="utf-8")
    template = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    (theirs / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}), encoding="utf-8")
    words = [word for word in as_it_is(theirs, STILL) if not word.startswith("data.")]
    words += ["data=chat", "data.path=chats.jsonl", "data.context_len=32", "data.batch_size=4"]
    said = cli(*words, "trainer.val_batch_size=4")
    assert (said.code, said.err) == (0, "")


@pytest.mark.parametrize("more", [
    "", "model.adopt=true model.lora=2", "model.adopt=true model.scale=20", "model.adopt=true model.scale=20 model.lora=2",
    "model.adopt=true model.scale=20 model.fold_scale=true", "model.lora={r:2,target_modules:[lm_head]}",
])  # fmt: skip
def test_a_model_as_it_is_is_exported_as_its_own_library_saves_it(cli, output, theirs, place, more):
    assert cli(*as_it_is(theirs, *more.split())).code == 0
    output("export", f"ckpt_path={LAST}", "output=out")
    network, tokenizer, _ = load_model(LAST)
    ids = torch.tensor([tokenizer.encode("the Word was God").tolist()])
    again = transformers.AutoModelForCausalLM.from_pretrained(place / "out").eval()
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, network(input_ids=ids).logits, rtol=0, atol=1e-5)
        if "scale=20" in more and "fold_scale" not in more:  # whose scores are tiny
            assert (again(ids).logits - release_hf(network)(input_ids=ids).logits).abs().max() > 1e-4
    assert transformers.AutoTokenizer.from_pretrained(place / "out")("the Word was God").input_ids == ids[0].tolist()
    assert "lora" not in (place / "out" / "config.json").read_text()
    assert "GPT2LMHeadModel" in (place / "out" / "README.md").read_text()


def test_an_exported_model_keeps_the_special_tokens_and_the_template_of_the_folder_it_came_from(cli, output, theirs, place):
    settings = {"pad_token": {"content": "God"}, "unk_token": "the", "mask_token": "nowhere", "chat_template": "{{ messages }}"}
    known = json.loads((theirs / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    settings["pad_token"]["content"], settings["unk_token"] = sorted(known)[40:42]
    (theirs / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    assert cli(*as_it_is(theirs)).code == 0
    shutil.rmtree(theirs)
    output("export", f"ckpt_path={LAST}", "output=out")
    found = transformers.AutoTokenizer.from_pretrained(place / "out")
    assert (found.pad_token, found.unk_token) == tuple(sorted(known)[40:42])
    assert found.mask_token is None and found.chat_template == "{{ messages }}"
    assert len({len(row) for row in found(["the Word", "God"], padding=True).input_ids}) == 1


@pytest.mark.parametrize("preset", ["finetune", "mine"])
def test_an_experiment_for_trained_models_needs_one_whatever_its_name(assert_refused, theirs, preset):
    (theirs.parent / "conf" / "experiment").mkdir(parents=True)
    (theirs.parent / "conf" / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ndefaults: [finetune]\nexperiment: mine\n"
    )
    words = ["--config-dir=conf", *(word for word in finetune(theirs) if not word.startswith(("init_from", "experiment=")))]
    sentence = "model is missing: start from a trained model, init_from.path=FOLDER or model=hf model.path=FOLDER, or choose model=OPTION"
    assert_refused(sentence, f"experiment={preset}", *words)
    assert compose_config([f"experiment={preset}", *words, "model=hf", f"model.path={theirs}"]).init_from.path is None
    assert RunConfig(experiment="finetune").init_from.path is None


def test_keys_on_the_command_line_win_over_those_in_the_folder(cli, assert_refused, theirs):
    config = json.loads((theirs / "config.json").read_text(encoding="utf-8"))
    (theirs / "config.json").write_text(json.dumps({**config, "new_trick": 3, "eos_token_id": [3, 5]}), encoding="utf-8")
    assert_refused("new_trick", *finetune(theirs))
    chosen = ("model.window=7", "model.dropout=0.1", "model.backend=math")
    assert cli(*finetune(theirs, "+init_from.overrides.new_trick=null", *chosen)).code == 0
    config = load_model(LAST)[0].config
    assert (config.window, config.dropout, config.backend) == (7, 0.1, "math")
    assert (config.eos_id, config.embed_dim, config.activation) == ((3, 5), 12, "gelu_tanh")


def test_a_checkpoint_starts_a_new_run_with_a_fresh_optimizer_at_step_0(cli, last, theirs, place):
    path = last("text").partition("=")[2]
    (place / "text.txt").write_text("In the beginning God created the heaven. " * 60, encoding="utf-8")
    assert cli(*finetune(path, STILL)).code == 0
    old, new = same_weights(path)
    assert new["minitx"]["tokenizer"] == old["minitx"]["tokenizer"]
    assert (old["global_step"], new["global_step"]) == (20, 2)
    assert {int(state["step"]) for state in new["optimizer_states"][0]["state"].values()} == {2}
    assert [row["step"] for row in read_metrics(place / "run" / "metrics.csv")][-1] == 2


def test_a_checkpoint_is_data_and_no_interpolation_in_it_is_resolved(assert_refused, last, theirs, place):
    checkpoint = read_checkpoint(last("text").partition("=")[2])
    checkpoint["minitx"]["model"]["backend"] = "${oc.env:HOME}"
    write_checkpoint(checkpoint, place / "other.ckpt")
    assert_refused("${oc.env:HOME}", *finetune("other.ckpt"))


def test_a_checkpoint_of_a_model_of_ones_own_is_one_to_start_from(cli, place, monkeypatch):
    copy_example("own_project", place)
    words = "--config-dir=conf", "experiment=sorted_task", "trainer.max_steps=3", "trainer.accelerator=cpu"
    assert cli(*words, "output_dir=first").code == 0
    assert cli(*words, "output_dir=run", "init_from.path=first/checkpoints/last.ckpt", "optimizer.lr=1e-30").code == 0
    assert same_weights("first/checkpoints/last.ckpt")[1]["global_step"] == 3


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        (["init_from.path=gone"], "init_from.path=gone"),
        (["model.ffn_dim=13"], "blocks.0.feedforward.up_proj.weight"),
        (["model.scale=unscaled"], "or set init_from.fold_scale=true"),
        (["init_from.path=mute"], "data.tokenizer=char would be a new tokenizer"),
    ],
)
def test_what_cannot_be_started_from_is_one_sentence_and_leaves_no_folder(assert_refused, theirs, place, changed, part):
    shutil.copytree(theirs, place / "mute")
    (place / "mute" / "tokenizer.json").unlink()
    words = [word for word in finetune(theirs) if word.partition("=")[0] != changed[0].partition("=")[0]]
    assert_refused(part, *words, *changed)
    assert not (place / "run").exists()


def test_a_scale_without_a_multiplier_cannot_be_folded_and_is_named():
    stored, fresh = (DecoderLM(TransformerConfig(vocab_size=7, **GPT2, scale=scale)) for scale in ("log_length", "inv_sqrt"))
    contents = {"weights": dict(stored.state_dict()), "model_config": to_dict(stored.config), "tokenizer": None}
    with pytest.raises(ConfigError, match="scale=log_length has no fixed multiplier"):
        Start(path="last.ckpt", fold_scale=True, **contents).load_into(fresh)


def test_equal_scales_need_no_fold_where_none_is_possible():
    """The norms of ``qk_norm=l2`` have no weights to fold into: a run with the scale of its weights starts as it is."""
    shapes = [TransformerConfig(vocab_size=7, **GPT2, qk_norm="l2", scale=scale) for scale in ("inv_sqrt", "unscaled")]
    stored, same, other = (DecoderLM(shape) for shape in (shapes[0], *shapes))
    contents = {"weights": dict(stored.state_dict()), "model_config": to_dict(stored.config), "tokenizer": None}
    start = Start(path="last.ckpt", fold_scale=True, **contents)
    start.load_into(same)
    ids = torch.arange(5)[None]
    assert torch.equal(same.eval()(ids), stored.eval()(ids))
    with pytest.raises(ConfigError, match="qk_norm=l2"):
        start.load_into(other)
