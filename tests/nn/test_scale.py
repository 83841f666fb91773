"""What the words for the scale mean, and that every path honours them."""

import math

import pytest
import torch

from minitx.check.reference import naive_attention
from minitx.config import ConfigError, TransformerConfig
from minitx.nn import DecoderLM, DotProductAttention, MultiHeadAttention, Padding, ScoreScale, scale_multiplier, set_scale

D, H = 7, 3
WORDS = {"inv_sqrt": 7**-0.5, "unscaled": 1.0, "inv": 1 / 7, "head_dim^-0.75": 7**-0.75, "head_dim^2": 49.0, 0: 0.0, -2.5: -2.5}


@pytest.mark.parametrize(("word", "multiplier"), WORDS.items())
def test_fixed_words_and_numbers_by_hand(word, multiplier):
    assert scale_multiplier(word, D) == multiplier
    query = torch.randn(2, H, 5, D)
    same, factor = ScoreScale(word, head_dim=D)(query)
    assert same is query
    assert factor == multiplier


def test_learned_is_one_log_scale_per_head_starting_at_one_over_sqrt_of_d():
    scale = ScoreScale("learned", head_dim=D, num_heads=H)
    assert {name: tuple(p.shape) for name, p in scale.named_parameters()} == {"log_scale": (H,)}
    torch.testing.assert_close(scale.log_scale.detach(), torch.full((H,), math.log(1 / math.sqrt(D))))


def test_log_length_by_hand():
    scale = ScoreScale("log_length", head_dim=4, max_len=16)
    counts = torch.tensor([1, 4, 16, 0]).view(1, 1, 4, 1)
    scaled, multiplier = scale(torch.ones(1, 1, 4, 4, dtype=torch.float64), counts)
    assert multiplier == 1.0
    # ln 1, ln 4, ln 16 over ln 16, over √4; a query without a real key stays finite
    assert scaled[0, 0, :, 0].tolist() == pytest.approx([0.0, 0.25, 0.5, 0.0])
    assert not list(scale.parameters())


@pytest.mark.parametrize(
    ("word", "is_causal", "backend"),
    [
        *((word, True, "math") for word in ("inv", -2.5)),
        *((word, is_causal, "auto") for word in ("learned", "log_length") for is_causal in (True, False)),
    ],
)
def test_every_word_and_a_factor_equal_plain_formulas(word, is_causal, backend):
    E, L = 12, 5
    scale = ScoreScale(word, head_dim=D, num_heads=H, max_len=11, factor=1.5)
    attention = MultiHeadAttention(E, H, head_dim=D, scale=scale, core=DotProductAttention(backend=backend)).double()
    if word == "learned":
        with torch.no_grad():
            scale.log_scale.copy_(torch.tensor([-1.0, 0.3, 0.1], dtype=torch.float64))
    x = torch.randn(2, L, E, dtype=torch.float64)
    real = torch.tensor([[False, True, True, True, True], [True] * 5])
    # the formula: c per head and per query
    ones = torch.ones(2, H, L, 1, dtype=torch.float64)
    visible = real[:, None, None, :] & (torch.ones(L, L, dtype=torch.bool).tril() if is_causal else True)
    counts = visible.expand(2, 1, L, L).sum(-1, keepdim=True).clamp(min=1)
    c = 1.5 * {
        "learned": ones * torch.tensor([-1.0, 0.3, 0.1], dtype=torch.float64).exp().view(1, H, 1, 1),
        "log_length": ones * counts.double().log() / math.log(11) / math.sqrt(D),
    }.get(word, ones * WORDS.get(word, 1.0))
    q, k, v = (p(x).view(2, L, H, D).transpose(1, 2) for p in (attention.q_proj, attention.k_proj, attention.v_proj))
    heads, _ = naive_attention(c * q, k, v, visible, scale=1.0)
    want = attention.out_proj(heads.transpose(1, 2).reshape(2, L, H * D))
    torch.testing.assert_close(attention(x, attn_mask=Padding(real), is_causal=is_causal), want, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    "word", [None, "sqrt", "1", True, math.nan, math.inf, [1], "head_dim**2", "head_dim^-1/2", "head_dim^nan"]
)
def test_anything_else_is_refused(word):
    for build in (lambda: ScoreScale(word, head_dim=4), lambda: TransformerConfig(scale=word)):
        with pytest.raises(ConfigError, match=r"\bscale\b"):
            build()


@pytest.mark.parametrize("scale", ["unscaled", "inv_sqrt", "head_dim^-0.75", 0.3, "learned"])
def test_set_scale_gives_the_model_that_was_built_with_the_scale(scale):
    config = TransformerConfig(vocab_size=11, embed_dim=12, num_heads=3, num_layers=2, max_len=7, position="rotary")
    model = DecoderLM(config).double().eval()
    built = DecoderLM(TransformerConfig(**{**vars(config), "scale": scale, "scale_factor": 1.5})).double().eval()
    built.load_state_dict(model.state_dict(), strict=False)
    ids = torch.randint(11, (2, 5))
    assert set_scale(model, scale, factor=1.5) is model
    assert torch.equal(model(ids), built(ids)) and model.config == built.config
    assert {p.dtype for p in model.parameters()} == {torch.float64}


def test_set_scale_refuses_a_model_without_attention_and_an_unknown_scale():
    with pytest.raises(ValueError, match="no attention layer"):
        set_scale(torch.nn.Linear(2, 3), "unscaled")
    model = MultiHeadAttention(12, 3)
    with pytest.raises((ValueError, ConfigError)):
        set_scale(model, None)
    assert model.scale.scale == "inv_sqrt"
