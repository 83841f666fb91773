"""What a run says before its first step, and presets that Hydra composes."""

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.utils import get_class

from minitx.config import ParameterRule
from minitx.training.run import train


def lines_of(caplog):
    """What the run said before its first step, by the first word of each line."""
    said = next(message for message in caplog.messages if message.startswith("model "))
    return dict(line.split(maxsplit=1) for line in said.splitlines())


def test_a_run_says_model_device_data_steps_and_folder(make_config, tmp_path, caplog):
    caplog.set_level("INFO")
    frozen = (ParameterRule(match="ffn|feed", trainable=False),)
    train(make_config(trainer__val_every=3, trainer__accumulate=2, optimizer__rules=frozen), tmp_path / "run")
    lines = lines_of(caplog)
    assert list(lines) == ["model", "device", "data", "tokenizer", "steps", "folder"]
    for part in ("DecoderLM", "parameters", "trained", "num_layers 1", "num_heads 2", "embed_dim 8"):
        assert part in lines["model"]
    assert "CPU" in lines["device"] and "32-true" in lines["device"]
    assert "12 a step in 2 parts" in lines["data"]
    assert lines["steps"].split(", ") == ["6", "validation every 3"]
    assert lines["folder"] == str(tmp_path / "run")


def test_presets_of_callbacks_add_up_and_name_classes_that_exist(request):
    folder = request.config.rootpath / "configs"
    for group in ("callbacks", "logger"):
        names = {path.stem for path in (folder / group).glob("*.yaml")}
        GlobalHydra.instance().clear()
        with initialize_config_dir(str(folder), version_base="1.3"):
            found = compose(overrides=[f"+{group}=[{','.join(sorted(names))}]"])[group]
        assert names - {"default", "csv"} <= set(found)
        for node in found.values():
            assert "_target_" not in (node if hasattr(node, "keys") else ()) or isinstance(get_class(node["_target_"]), type)
