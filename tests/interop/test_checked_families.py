"""Families of transformers, as installed and with our core, under the check of models. What is wrong was reproduced without it."""

from __future__ import annotations

import pytest
import torch

from minitx.check import Status, check_model
from minitx.check.model_checks import PROPERTIES
from tests.interop.families import BESIDE, NAMES, QUICK, build

pytest.importorskip("transformers")

WORDS = [word for word in PROPERTIES if word != "compile"]
WRONG = {
    "Jamba": {"cache-differs"},  # a third piece of several tokens
    "Bamba": {"cache-differs"},  # tokens after the first piece, on a CPU
    "Whisper": {"cannot-be-called"},  # sound is not tried
}
"""What the check finds in a family of the table, by its id."""


def families(names):
    return [
        pytest.param(name, marks=() if name in ("Llama",) else pytest.mark.slow if name in QUICK else pytest.mark.release)
        for name in names
    ]


@pytest.mark.parametrize("name", families([*NAMES, *BESIDE]))
def test_what_is_wrong_with_a_family_is_known(name):
    torch.set_num_threads(1)
    report = check_model(build(name), only=WORDS)
    assert {f.id for f in report.findings if f.severity == "wrong"} == WRONG.get(name, set()), str(report)


@pytest.mark.filterwarnings("ignore:.*adopted model is not checked")  # Whisper: no inputs are made up for sound
@pytest.mark.parametrize("name", families(NAMES))
def test_nothing_new_is_wrong_with_an_adopted_family(name):
    from minitx.interop import adopt_hf

    torch.set_num_threads(1)
    report = check_model(adopt_hf(build(name)), only=["rows", "causality", "padding", "cache", "gradient"])
    assert {f.id for f in report.findings if f.severity == "wrong"} <= WRONG.get(name, set()), str(report)


YOSO = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 99}


@pytest.mark.slow
def test_what_the_check_found_in_transformers_is_still_found():
    import transformers

    torch.manual_seed(0)
    yoso = transformers.YosoForMaskedLM(transformers.YosoConfig(**YOSO))
    assert "mask-ignored" in {finding.id for finding in check_model(yoso, only="padding").findings}
    oss = check_model(build("GptOss"), only="documents")
    assert "positions-join-documents" in {finding.id for finding in oss.findings}
    assert not oss.with_status(Status.PASSED)[1:]
    llama = check_model(build("Llama"), only="documents")
    assert [finding.id for finding in llama.findings] == ["mask-joins-documents"]
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 99, "state_size": 8}
    mamba = transformers.MambaForCausalLM(transformers.MambaConfig(**sizes))
    report = check_model(mamba, only="cache")
    assert [check.status for check in report.checks if check.id == "cache/token-by-token"] == [Status.PASSED]
    assert [check.status for check in report.checks if check.id == "cache/pieces"] == [Status.FAILED]
