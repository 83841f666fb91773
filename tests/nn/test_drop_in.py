"""torch's layer and ours: the same numbers to and fro, in torch's place, and in models; where torch answers differently, on record."""

import copy
import inspect

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from minitx.nn import DropInAttention, MultiHeadAttention, QKNorm, Rotary, ScoreScale, from_key_padding_mask, swap_attention

B, L, S, E, H = 2, 5, 7, 12, 3
F64 = torch.float64


def torch_layer(**options):
    """torch.nn.MultiheadAttention with biases that are not zero; float64."""
    layer = nn.MultiheadAttention(12, 3, **{"batch_first": True, "dtype": F64, **options})
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return layer


class Louder(nn.MultiheadAttention):
    """torch's layer with a forward of its own."""

    def forward(self, *args, **options):
        output, weights = super().forward(*args, **options)
        return 2.0 * output, weights


# ---- the weights

WIDTHS = {"self": {}, "kdim": {"kdim": 8}, "vdim": {"vdim": 10}, "both": {"kdim": 8, "vdim": 10}}


def inputs(theirs):
    widths = E, theirs.kdim, theirs.vdim
    return [torch.randn(B, n, width, dtype=F64) for n, width in zip((L, S, S), widths, strict=True)]


def assert_near(got, want):
    torch.testing.assert_close(got, want, rtol=0, atol=1e-13)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("widths", WIDTHS)
def test_layers_come_back_from_torch_unchanged(widths, bias):
    ours = MultiHeadAttention(E, H, **WIDTHS[widths], bias=bias, dropout=0.25).double().eval()
    for p in ours.parameters():
        nn.init.normal_(p, std=0.5)
    theirs = ours.to_torch()
    assert (theirs.batch_first, theirs.dropout, theirs.training) == (True, 0.25, False)
    back = MultiHeadAttention.from_torch(theirs)
    assert (back.dropout, back.training) == (0.25, False)
    assert {name: p.dtype for name, p in back.named_parameters()} == {name: p.dtype for name, p in ours.named_parameters()}
    assert all(torch.equal(p, back.get_parameter(name)) for name, p in ours.named_parameters())
    given = inputs(theirs)
    assert_near(theirs(*given)[0], ours(*given))


def test_copies_share_no_memory_and_what_is_frozen_stays_frozen():
    theirs = torch_layer()
    theirs.in_proj_weight.requires_grad_(False)
    with torch.no_grad():
        ours = MultiHeadAttention.from_torch(theirs)
    frozen = {name for name, p in ours.named_parameters() if not p.requires_grad}
    assert frozen == {f"{name}_proj.weight" for name in "qkv"}
    before = ours.q_proj.weight.clone()
    theirs.in_proj_weight.zero_()
    assert torch.equal(ours.q_proj.weight, before)


def test_a_matrix_that_two_projections_share_is_copied_to_both():
    theirs = torch_layer(vdim=10)
    theirs.k_proj_weight = theirs.q_proj_weight
    given = inputs(theirs)
    assert_near(MultiHeadAttention.from_torch(theirs)(*given), theirs(*given)[0])


def test_a_row_without_keys_is_nan_in_torch_and_the_output_bias_here():
    theirs = torch_layer()
    given = inputs(theirs)
    nothing = torch.tensor([[True] * S, [False] * S])
    want, _ = theirs(*given, key_padding_mask=nothing)
    got = MultiHeadAttention.from_torch(theirs)(*given, key_mask=from_key_padding_mask(nothing))
    assert want[0].isnan().all()
    assert torch.equal(got[0], theirs.out_proj.bias.expand(L, E))
    assert_near(got[1], want[1])


def hooked():
    layer = torch_layer()
    layer.register_forward_hook(lambda module, args, out: (2.0 * out[0], out[1]))
    return layer


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        *((lambda name=name: nn.MultiheadAttention(E, H, **{name: True}), name) for name in ("add_bias_kv", "add_zero_attn")),
        (lambda: Louder(E, H), "Louder has its own forward"),
        (lambda: prune.random_unstructured(torch_layer(), "in_proj_weight", 0.5), "in_proj_weight_orig"),
        (hooked, "hook"),
    ],
)
def test_a_layer_that_computes_something_else_is_refused_by_its_difference(make, reason):
    with pytest.raises(ValueError, match=reason):
        MultiHeadAttention.from_torch(make())
    with pytest.raises(TypeError, match="got Linear"):
        MultiHeadAttention.from_torch(nn.Linear(2, 2))


def test_a_subclass_that_computes_the_same_is_taken():
    class Named(nn.MultiheadAttention):
        """Only another name."""

    theirs = Named(E, H, batch_first=True, dtype=F64)
    given = inputs(theirs)
    assert_near(MultiHeadAttention.from_torch(theirs)(*given), theirs(*given)[0])


@pytest.mark.parametrize("widths", WIDTHS)
def test_a_frozen_layer_is_frozen_in_torch_and_one_that_is_frozen_in_part_is_refused(widths):
    ours = MultiHeadAttention(E, H, **WIDTHS[widths])
    ours.out_proj.requires_grad_(False)
    for projection in (ours.q_proj, ours.k_proj, ours.v_proj):
        projection.bias.requires_grad_(False)
    theirs = ours.to_torch()
    frozen = {name for name, parameter in theirs.named_parameters() if not parameter.requires_grad}
    assert frozen == {"in_proj_bias", "out_proj.weight", "out_proj.bias"}
    ours.k_proj.bias.requires_grad_(True)
    with pytest.raises(ValueError, match="freeze all of them or none"):
        ours.to_torch()


LACKING = {
    "num_kv_heads": 1, "head_dim": 5, "out_bias": False, "scale": "unscaled", "sinks": True, "softcap": 3.0,
    "qk_norm": QKNorm("rms", 4), "rotary": Rotary(4), "core": nn.Identity(),
}  # fmt: skip
"""A value of each option of ours that torch's layer does not have."""
KEPT = {"embed_dim", "num_heads", "kdim", "vdim", "bias", "dropout"}
OF_SCALE = {"max_len"}


def test_what_torch_does_not_have_is_refused_by_name():
    for name, value in (*LACKING.items(), ("scale", ScoreScale(head_dim=4, factor=2.0))):
        with pytest.raises(ValueError, match=f"has no {'Identity' if name == 'core' else name}"):
            MultiHeadAttention(E, H, **{name: value}).to_torch()
    options = {*inspect.signature(MultiHeadAttention).parameters}
    new = options - LACKING.keys() - KEPT - OF_SCALE
    assert new == set(), (
        "to_torch must keep this option (KEPT) or refuse it: a name in its table `lacking`, and a value in LACKING"
    )


class HalfMerged(MultiHeadAttention):
    def merge(self, heads, query):
        return super().merge(heads / 2, query)


class OwnQueries(MultiHeadAttention):
    def project(self, query, key, value, rotation):
        return super().project(-query, query if key is None else key, value, rotation)


class WithGain(MultiHeadAttention):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.gain = nn.Parameter(torch.ones(1))


@pytest.mark.parametrize(
    ("layer", "reason"), [(HalfMerged, "its own merge"), (OwnQueries, "its own project"), (WithGain, "gain")]
)
def test_a_layer_of_ones_own_is_refused_on_the_way_to_torch(layer, reason):
    with pytest.raises(ValueError, match=f"must be a plain MultiHeadAttention: .*{layer.__name__} has .*{reason}"):
        layer(E, H).to_torch()


@pytest.mark.parametrize("projection", ["q_proj", "k_proj", "v_proj", "out_proj"])
def test_a_projection_that_computes_something_else_is_refused_on_the_way_to_torch(projection):
    changes = (
        (nn.utils.parametrizations.weight_norm, "parametrizations"),
        (lambda layer: layer.register_forward_hook(lambda module, args, out: 2 * out), "has a hook"),
    )
    for change, reason in changes:
        ours = MultiHeadAttention(E, H)
        change(getattr(ours, projection))
        with pytest.raises(ValueError, match=f"{projection} must be a plain Linear layer: .*{reason}"):
            ours.to_torch()


# ---- in torch's place


def cells(*shape):
    """True = hidden, as torch says it; the first key of each row stays visible."""
    hidden = torch.rand(*shape) < 0.4
    hidden[..., 0] = False
    return hidden


def as_float(hidden):
    return torch.zeros(hidden.shape, dtype=F64).masked_fill(hidden, -torch.inf)


def lowest():
    """The dtype's minimum on the first keys, and on all keys of the first query."""
    mask = torch.zeros(L, S, dtype=F64)
    mask[0], mask[:, :3] = torch.finfo(F64).min, torch.finfo(F64).min
    return mask


MASKS = {
    "none": lambda *batch: {},
    "bool a head": lambda *batch: {"attn_mask": cells(H * sum(batch or (1,)), L, S)},
    "both": lambda *batch: {"attn_mask": cells(L, S), "key_padding_mask": cells(*batch, S)},
    "float": lambda *batch: {"attn_mask": torch.randn(L, S, dtype=F64), "key_padding_mask": as_float(cells(*batch, S))},
    "lowest": lambda *batch: {"attn_mask": lowest(), "key_padding_mask": as_float(cells(*batch, S))},
}


@pytest.mark.parametrize("form", ["batch first", "sequence first", "unbatched", "unbatched, sequence first"])
@pytest.mark.parametrize("masks", MASKS)
def test_output_and_weights_are_those_of_torch_in_every_call_form(masks, form):
    torch.manual_seed(0)
    theirs = torch_layer(batch_first="sequence" not in form, kdim=8, vdim=10).eval()
    ours = DropInAttention(theirs)
    batch = () if "unbatched" in form else (B,)
    inputs = [torch.randn(*batch, *shape, dtype=F64) for shape in ((L, E), (S, 8), (S, 10))]
    if form == "sequence first":
        inputs = [x.transpose(0, 1) for x in inputs]
    given = MASKS[masks](*batch)
    for options in ({}, {"average_attn_weights": False}, {"need_weights": False}):
        torch.testing.assert_close(ours(*inputs, **given, **options), theirs(*inputs, **given, **options), rtol=0, atol=1e-12)


def test_self_attention_stays_self_attention():
    """A layer that is called with one tensor three times knows it: a rotary one would refuse another key."""
    ours, x, seen = DropInAttention(torch_layer(batch_first=False)), torch.randn(L, E, dtype=F64), []
    ours.attention.register_forward_pre_hook(lambda module, args: seen.append(args[0] is args[1] is args[2]))
    ours(x, x, x)
    assert seen == [True]


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_the_layers_of_torchs_own_encoder_can_be_swapped(norm_first, training, nested):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(E, 2, 16, dropout=0.0, batch_first=True, norm_first=norm_first, dtype=F64)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(training)
    x, causal = torch.randn(B, L, E, dtype=F64), nn.Transformer.generate_square_subsequent_mask(L, dtype=F64)
    hidden = cells(B, L)
    at_the_end = torch.arange(L) >= torch.arange(L - B + 1, L + 1)[:, None]
    both = {"mask": causal, "is_causal": True, "src_key_padding_mask": as_float(hidden)}
    calls = ({}, {"src_key_padding_mask": hidden}, {"src_key_padding_mask": at_the_end}, both)
    before = [model(x, **call) for call in calls]
    model.use_nested_tensor = nested and not norm_first  # torch's default, which would take padding at the end out
    for layer in model.layers:
        layer.self_attn = DropInAttention(layer.self_attn)
        assert layer.self_attn.training is training
    ran = []
    model.layers[1].self_attn.attention.core.register_forward_hook(lambda *_: ran.append(1))
    for call, wanted in zip(calls, before, strict=True):
        torch.testing.assert_close(model(x, **call), wanted, rtol=0, atol=1e-12)
    assert len(ran) == len(calls)  # torch's fused path would go past the layer


def test_an_encoder_can_be_made_of_a_layer_that_was_swapped_before():
    layer = nn.TransformerEncoderLayer(E, 2, 16, dropout=0.0, batch_first=True, dtype=F64).eval()
    x, want = torch.randn(B, L, E, dtype=F64), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    swapped = copy.deepcopy(layer)
    swapped.self_attn = DropInAttention(swapped.self_attn)
    model = nn.TransformerEncoder(swapped, 2, enable_nested_tensor=False).eval()
    torch.testing.assert_close(model(x), want(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("batch_first", [True, False])
def test_what_code_reads_off_torchs_layer_is_there_and_the_way_back_keeps_the_axis_of_the_batch(batch_first):
    theirs = torch_layer(kdim=8, vdim=10, dropout=0.25, batch_first=batch_first)
    ours = DropInAttention(theirs)
    for name in ("embed_dim", "num_heads", "head_dim", "kdim", "vdim", "dropout", "batch_first", "training"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert ours.to_torch().batch_first is batch_first


# ---- a whole model


class Pair(nn.Module):
    """One layer in two places, and one with other widths."""

    def __init__(self):
        super().__init__()
        self.first, self.cross = torch_layer(), torch_layer(kdim=8, vdim=10, bias=False)
        self.again = nn.ModuleList([self.first])

    def forward(self, x, key, value):
        x = x + self.first(x, x, x)[0]
        return self.cross(x + self.again[0](x, x, x)[0], key, value)[0]


def transformer():
    model = nn.Transformer(E, 2, 2, 1, 16, dropout=0.0, batch_first=True, dtype=F64).eval()
    return model, [torch.randn(B, length, E, dtype=F64) for length in (S, L)]


def pair():
    return Pair().eval(), [torch.randn(B, *shape, dtype=F64) for shape in ((L, E), (S, 8), (S, 10))]


@pytest.mark.parametrize("build", [transformer, pair])
def test_a_swapped_model_is_the_same_function_and_loads_the_weights_of_before(build):
    model, inputs = build()
    want, state = model(*inputs), copy.deepcopy(model.state_dict())
    assert swap_attention(model) is model
    assert not any(isinstance(module, nn.MultiheadAttention) for module in model.modules())
    torch.testing.assert_close(model(*inputs), want, rtol=0, atol=1e-12)
    own = copy.deepcopy(model.state_dict())
    for target in (model, copy.deepcopy(model)):  # a copy translates into itself
        for given in (state, own):
            for parameter in target.parameters():
                nn.init.zeros_(parameter)
            target.load_state_dict(given)
            torch.testing.assert_close(target(*inputs), want, rtol=0, atol=1e-12)


def test_a_layer_in_two_places_stays_one():
    model = swap_attention(Pair())
    assert model.again[0] is model.first
    assert len(list(model.parameters())) == 8 + 4


def test_a_checkpoint_that_does_not_fit_is_still_an_error():
    model = swap_attention(Pair())
    state = Pair().state_dict()
    del state["first.in_proj_bias"]
    state["first.bias_k"] = torch.zeros(1)
    with pytest.raises(RuntimeError, match=r"(?s)Missing.*first\.attention\.q_proj\.bias.*Unexpected.*first\.bias_k"):
        model.load_state_dict(state)


def tied_module(model):
    model.cross = torch_layer()
    model.cross.out_proj = model.first.out_proj


def tied_elsewhere(model):
    model.head = nn.Linear(E, E)
    model.head.weight = model.first.out_proj.weight


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda model: setattr(model, "cross", Louder(E, 3)), "cannot swap cross: .*Louder has its own forward"),
        (lambda model: setattr(model, "cross", torch_layer(add_zero_attn=True)), "cannot swap cross: add_zero_attn"),
        (tied_module, "shares a parameter"),
        (tied_elsewhere, "shares a parameter"),
    ],
)
def test_a_layer_that_cannot_be_swapped_is_named_and_the_model_stays_as_it_was(change, reason):
    model = Pair()
    change(model)
    before = dict(model.named_modules(remove_duplicate=False))
    with pytest.raises(ValueError, match=reason):
        swap_attention(model)
    assert dict(model.named_modules(remove_duplicate=False)) == before


def test_a_model_without_torchs_layer_and_a_layer_alone_are_refused():
    for model in (nn.Linear(2, 2), torch_layer()):
        with pytest.raises(ValueError, match=f"{type(model).__name__} contains no torch.nn.MultiheadAttention"):
            swap_attention(model)


# ---- code that initialises torch's layer, and masks of other shapes


class Text(nn.Module):
    """The text tower of CLIP (Radford et al. 2021), as OpenAI and open_clip write it: its weights are drawn by a method."""

    def __init__(self):
        super().__init__()
        self.resblocks = nn.ModuleList(nn.TransformerEncoderLayer(E, H, 16) for _ in range(2))

    @property
    def attentions(self):
        return [block.self_attn for block in self.resblocks]

    def initialize_parameters(self, init, **options):
        for block in self.resblocks:
            init(block.self_attn.in_proj_weight, **options)
            nn.init.constant_(block.self_attn.in_proj_bias, 0.25)
            nn.init.normal_(block.self_attn.out_proj.weight, std=0.1)


INITS = {
    "normal_": {"std": 0.3}, "uniform_": {"b": 0.5}, "constant_": {"val": 0.7}, "zeros_": {}, "ones_": {}, "kaiming_uniform_": {"a": 2.0},
    "kaiming_normal_": {}, "xavier_uniform_": {"gain": 0.5}, "xavier_normal_": {},
}  # fmt: skip


@pytest.mark.parametrize("init", INITS)
def test_weights_that_are_drawn_after_a_swap_are_those_that_torchs_layer_would_get(init):
    theirs = Text()
    ours = swap_attention(copy.deepcopy(theirs))
    for model in (theirs, ours):
        torch.manual_seed(5)
        model.initialize_parameters(getattr(nn.init, init), **INITS[init])
    for one, other in zip(theirs.attentions, ours.attentions, strict=True):
        back = other.to_torch().state_dict()
        assert all(torch.equal(back[name], tensor) for name, tensor in one.state_dict().items())


def test_what_cannot_be_done_to_torchs_joined_weight_is_an_error_and_changes_nothing():
    layer = DropInAttention(torch_layer())
    before = copy.deepcopy(layer.state_dict())
    for wrong in (
        lambda: layer.in_proj_weight.data.normal_(),
        lambda: layer.in_proj_weight.requires_grad_(False),
        lambda: setattr(layer.in_proj_weight, "requires_grad", False),
        lambda: nn.init.orthogonal_(layer.in_proj_weight),
        lambda: torch.zero_(layer.in_proj_weight),
        lambda: layer.in_proj_bias.unsqueeze_(0),
    ):
        with pytest.raises((AttributeError, TypeError), match=r"attention\.q_proj|no attribute 'requires_grad'"):
            wrong()
    assert all(torch.equal(tensor, before[name]) for name, tensor in layer.state_dict().items())
    assert all(parameter.requires_grad for parameter in layer.parameters())
    other = DropInAttention(torch_layer(kdim=8, bias=False))
    assert other.in_proj_weight is other.in_proj_bias is None  # as in torch
    nn.init.zeros_(other.k_proj_weight)
    assert not other.to_torch().k_proj_weight.any()


def test_a_swapped_encoder_is_compiled_as_one_graph():
    layer = nn.TransformerEncoderLayer(E, 2, 16, dropout=0.0, batch_first=True)
    model = swap_attention(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)).eval()
    x, causal = torch.randn(B, L, E), nn.Transformer.generate_square_subsequent_mask(L)
    given = {"mask": causal, "src_key_padding_mask": as_float(cells(B, L)).float()}
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, **given), model(x, **given))


def test_rows_of_different_lengths_and_masks_of_another_shape_are_refused():
    layer, x = DropInAttention(torch_layer()), torch.randn(B, L, E, dtype=F64)
    nested = torch.nested.nested_tensor([x[0], x[1, :3]], layout=torch.jagged)
    with pytest.raises(TypeError, match="query must not be a nested tensor"):
        layer(nested, nested, nested)
    for name, shape in (
        ("key_padding_mask", (1, L)),
        ("key_padding_mask", (B, L + 1)),
        ("attn_mask", (1, L)),
        ("attn_mask", (B, L, L)),
    ):
        with pytest.raises(ValueError, match=f"{name} must have shape .*got"):
            layer(x, x, x, **{name: torch.zeros(shape, dtype=torch.bool)})
