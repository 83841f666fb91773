"""Models: named configurations of ours and adopted families, wrapped, in every precision, padded, packed, checkpointed, looked at.

    python tests/lattice/models.py 'model=gemma wrapper=lora precision=bf16'

``tests/lattice/engine.py`` has the other arguments. ``networks.py`` builds the subjects.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # as a program

from minitx.analysis import capture, intervene, knock_out_heads, logit_lens, take_snapshot
from minitx.check.properties import hidden_tokens, later_tokens
from minitx.config import Part
from minitx.generation import Sampler, beam_search, generate
from minitx.generation.sampler import draw, row_uniforms
from minitx.interop import (
    adopt_hf,
    load_hf,
    pretrained_hf,
    release_hf,
    save_hf,
)
from minitx.interop.lora import merged
from minitx.nn import fold_scale, set_scale
from minitx.nn.config_differences import changes_of
from minitx.training.optimizers import adamw
from tests.lattice.engine import KnownFault, Lattice, Oracle, Point, Refusal, run
from tests.lattice.networks import (
    CAUSAL,
    CHANGES,
    COMPILED,
    DECODERS,
    FAMILIES,
    IMAGES,
    OF_ROWS,
    OURS,
    PAIRS,
    PRECISIONS,
    REGISTERS,
    VOCAB,
    WITH_PIXELS,
    WITH_REGISTERS,
    WITHOUT_BACKENDS,
    WRAPPERS,
    Subject,
    joined,
    options_of,
    refused_by_tables,
    seeded,
)

LOOKS = ("nothing", "statistics", "weights", "scores", "values", "heads", "feedforward", "residual")
AXES = {
    "model": (*OURS, *FAMILIES),
    "change": tuple(CHANGES),
    "wrapper": WRAPPERS,
    "precision": tuple(PRECISIONS),
    "rows": ("plain", "left", "right", "inside", "documents", "padded_documents"),
    "checkpointing": ("no", "yes"),
    "backend": ("auto", "math", "sdpa", "chunked"),
    "mode": ("eval", "train"),
    "look": LOOKS,
}


# What is compared


def same_bits(found: Tensor, wanted: Tensor, what: str) -> None:
    assert found.shape == wanted.shape, f"{what}: shape {tuple(found.shape)}, not {tuple(wanted.shape)}"
    equal = torch.equal(found, wanted)
    assert equal, f"{what}: differs by {(found.double() - wanted.double()).abs().max().item():.1e}, wanted the same bits"


def same_gradients(found: dict[str, Tensor], wanted: dict[str, Tensor], rough: dict[str, Tensor], epsilon: float) -> None:
    """Compare norms, parameter by parameter: ``rough`` are the plain model's gradients in the same precision."""
    assert found.keys() == wanted.keys(), f"gradients of {sorted(found.keys() ^ wanted.keys())[:3]} on one side only"
    scale = max(gradient.double().norm() for gradient in wanted.values())
    for name, gradient in wanted.items():
        error = (found[name].double() - gradient.double()).norm()
        allowed = 2 * (rough[name].double() - gradient.double()).norm() + 8 * epsilon * scale
        assert error <= allowed, (
            f"gradient of {name}: differs by {error:.1e}, allowed {allowed:.1e}, norm {gradient.norm():.1e}"
        )


def process_state() -> tuple[Any, ...]:
    """What a call must not change."""
    flags = torch.get_default_dtype(), torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled()
    return (*flags, torch.is_autocast_enabled("cpu"), torch.get_num_threads(), tuple(torch.get_rng_state().tolist()))


@functools.lru_cache(maxsize=256)
def _plain(values: tuple[str, ...], with_gradients: bool) -> tuple[Tensor, dict[str, Tensor]]:
    subject = Subject(dict(zip(AXES, values, strict=True)))
    with torch.no_grad():
        out = subject.answers()
    return out, subject.gradients() if with_gradients else {}


def plain(s: Subject, with_gradients: bool = False, **changes: str) -> tuple[Tensor, dict[str, Tensor]]:
    """The answers and gradients of ``s.plainer``, computed once."""
    return _plain(tuple({**s.plainer, **changes}[axis] for axis in AXES), with_gradients)


# Oracles: values


def equals_the_plain_model_in_float64(s: Subject) -> None:
    exact = plain(s, precision=s.exact)[0]
    error = (plain(s)[0].double() - exact).abs().max().item()
    s.same(s.answers(), exact, "output", error)


def equals_the_plain_quantised_model(s: Subject) -> None:
    s.same(s.answers(), plain(s)[0], "output")


def gradients_equal_those_of_the_plain_model(s: Subject) -> None:
    exact = plain(s, True, precision=s.exact)[1]
    rough = plain(s, True)[1]
    if s.point["wrapper"] == "frozen":
        kept = s.gradients().keys()
        exact, rough = ({name: gradients[name] for name in kept} for gradients in (exact, rough))
        assert len(kept) == 1, f"gradients of {sorted(kept)}"
    same_gradients(s.gradients(), exact, rough, s.epsilon)


def checkpointing_changes_nothing(s: Subject) -> None:
    other = s.but(checkpointing="no")
    same_bits(s.answers(), other.answers(), "output")
    found, wanted = s.gradients(), other.gradients()
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        same_bits(found[name], gradient, f"gradient of {name}")


def every_parameter_matters(s: Subject) -> None:
    """All gradients are finite and not 0, but a bias of the keys moves all scores of a query alike."""
    gradients = s.gradients()
    trained = {name for name, p in s.parameters.items() if p.requires_grad and "pool." not in name}  # called apart
    assert trained <= gradients.keys(), f"no gradient of {sorted(trained - gradients.keys())[:3]}"
    for name, gradient in gradients.items():
        assert gradient.isfinite().all(), f"gradient of {name} is not finite"
        assert gradient.any() or _is_bias_of_keys(name), f"{name} has no effect"


def _is_bias_of_keys(name: str) -> bool:
    return name.endswith("bias") and any(part in name for part in ("k_proj", "key"))


def evaluation_repeats_itself_and_leaves_no_trace(s: Subject) -> None:
    inputs, state = s.inputs(), process_state()
    copies = {name: value.clone() for name, value in inputs.items()}
    weights = tensors_of(s.model)
    before = s.answer(inputs)
    same_bits(s.answer(inputs), before, "a second call")
    with torch.no_grad():
        s.same(s.answer(inputs), before, "without gradients")
    assert process_state() == state, "a call changes the state of the process"
    assert all(torch.equal(inputs[name], value) for name, value in copies.items()), "a call changes its arguments"
    state_now = s.model.state_dict()
    assert all(torch.equal(state_now[name], value) for name, value in weights.items()), "a call changes the weights"


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """A copy of the state dict without the parts of quantised layers that are no tensors."""
    return {name: value.clone() for name, value in model.state_dict().items() if isinstance(value, Tensor)}


# Oracles: what must not matter


def padding_changes_nothing(s: Subject) -> None:
    """Rows together and padded equal each row alone and without padding."""
    inputs = s.inputs()
    out = s.answer(inputs)
    for row in range(2):
        alone = _without_padding(s, inputs, row)
        found = out[row : row + 1] if s.real(inputs) is None else out[row : row + 1, s.real(inputs)[row]]
        s.same(found, s.answer(alone), f"row {row}")


def _without_padding(s: Subject, inputs: dict[str, Tensor], row: int) -> dict[str, Tensor]:
    alone = {}
    for ids, mask in (("input_ids", s.mask), ("decoder_input_ids", f"decoder_{s.mask}")):
        if ids in inputs:
            alone[ids] = inputs[ids][row, inputs[mask][row].bool()][None]
    return alone


def hidden_tokens_change_nothing(s: Subject) -> None:
    inputs = s.inputs()
    _still(s, inputs, hidden_tokens(inputs, s.ids, f"decoder_{s.mask}" if s.has_target else s.mask))


def later_tokens_change_nothing(s: Subject) -> None:
    inputs = s.inputs()
    out, other = _still(s, inputs, later_tokens(inputs, s.ids))
    assert not torch.equal(out[:, -1], other[:, -1]), "the last token has no effect at all"


def _still(s: Subject, inputs: dict[str, Tensor], twins: Any) -> tuple[Tensor, Tensor]:
    """Compare the answers for rows and twins where they must be equal. Both calls draw the same dropout."""
    changed = {name: value[2:] for name, value in twins.inputs.items()}
    wanted, found, still = s.answer(inputs), s.answer(changed), twins.still[:2]
    real = s.real(inputs)
    if wanted.dim() == 2:
        s.same(found, wanted, "rows")
    else:
        keep = still if real is None else still & real
        s.same(found[keep], wanted[keep], "positions that must be still")
    return wanted, found


def rows_do_not_know_each_other(s: Subject) -> None:
    inputs = s.inputs()
    together, real = s.answer(inputs), s.real(inputs)
    for row in range(2):
        alone = s.answer({name: value[row : row + 1] for name, value in inputs.items()})
        keep = slice(None) if real is None else real[row]
        s.same(
            together[row, keep] if together.dim() > 2 else together[row],
            alone[0, keep] if alone.dim() > 2 else alone[0],
            f"row {row}",
        )


def documents_do_not_see_each_other(s: Subject) -> None:
    inputs = s.inputs()
    out = s.answer(inputs)
    for row in range(2):
        for document in inputs["document_ids"][row].unique():
            part = inputs["document_ids"][row] == document
            if s.mask in inputs:
                part = part & inputs[s.mask][row]
            s.same(
                out[row : row + 1, part],
                s.answer({"input_ids": inputs["input_ids"][row : row + 1, part]}),
                f"row {row}, document {document}",
            )


# Oracles: generation


def pieces_with_a_cache_equal_the_whole(s: Subject) -> None:
    inputs = s.inputs()
    length = inputs[s.ids].shape[1]
    whole, pieces, start, kept = s.answer(inputs), [], 0, None
    if s.is_ours:
        kept = s.model.make_cache(32)
    for size in (4, 1, length - 5):
        piece = _piece(s, inputs, start, start + size)
        with torch.no_grad():
            if s.is_ours:
                pieces.append(s.answer({**piece, "cache": kept}))
            else:
                out = s.call({**piece, "past_key_values": kept, "use_cache": True})
                kept = out.past_key_values
                pieces.append(out.logits)
        start += size
    found, real = torch.cat(pieces, 1), s.real(inputs)
    s.same(found if real is None else found[real], whole if real is None else whole[real], "in pieces")


def _piece(s: Subject, inputs: dict[str, Tensor], start: int, end: int) -> dict[str, Tensor]:
    """The arguments of a call that continues a cache. A mask of transformers holds the tokens before, too."""
    piece = {}
    for name, value in inputs.items():
        if s.has_target and not name.startswith("decoder_"):
            piece[name] = value  # the source is whole
        elif name.endswith("attention_mask"):
            piece[name] = value[:, :end]
        else:
            piece[name] = value[:, start:end]
    return piece


def greedy_generation_is_the_argmax_of_whole_rows(s: Subject) -> None:
    inputs = s.inputs()
    model: Any = s.called
    new = torch.stack(generate(model, **inputs, max_new_tokens=6, stop=()))
    for step, whole in enumerate(_texts(s, inputs, new)):
        logits = s.answer(whole)[:, -1]
        gap = logits.amax(-1) - logits.gather(-1, new[:, step, None])[:, 0]
        s.same(gap, torch.zeros_like(gap), f"the best logit over the chosen one at step {step}")


def sampled_rows_are_draws_from_the_logits_of_whole_rows(s: Subject) -> None:
    """Each id is the one at its row's random number, but for 1e-4 beside it."""
    inputs, sampler = s.inputs(), Sampler(temperature=0.7, top_k=9)
    uniforms = row_uniforms(2, 5, torch.Generator().manual_seed(5))
    found = generate(s.called, **inputs, sampler=sampler, generator=torch.Generator().manual_seed(5), max_new_tokens=5, stop=())  # type: ignore[arg-type]
    new, seen = torch.stack(found), torch.zeros(2, VOCAB, dtype=torch.bool)
    for step, whole in enumerate(_texts(s, inputs, new)):
        logits = s.answer(whole)[:, -1]
        probs = sampler.filtered(logits, seen).softmax(-1)
        near = [draw(probs, (uniforms[:, step] + shift).clamp(0, 1 - 1e-9)) for shift in (-1e-4, 0, 1e-4)]
        wanted = torch.stack(near)
        assert (wanted == new[:, step]).any(0).all(), f"step {step}: {new[:, step].tolist()}, wanted {wanted[1].tolist()}"


def _texts(s: Subject, inputs: dict[str, Tensor], new: Tensor) -> Iterator[dict[str, Tensor]]:
    """The arguments of a call without a cache before each new token."""
    for step in range(new.shape[1]):
        whole = dict(inputs)
        whole[s.ids] = torch.cat((inputs[s.ids], new[:, :step]), 1)
        if "key_mask" in inputs and not s.has_target:
            whole["key_mask"] = torch.cat((inputs["key_mask"], torch.ones(2, step, dtype=torch.bool)), 1)
        yield whole


def a_text_ends_where_learned_positions_do(s: Subject) -> None:
    """One token more is refused before the first is written, and without learned positions it is not."""
    inputs, written = s.inputs(), list[int]()
    room = s.config.max_len - inputs[s.ids].shape[1] + 1

    def write(number: int) -> None:
        written.clear()
        generate(s.called, **inputs, max_new_tokens=number, stop=(), on_token=lambda _, token: written.append(token))  # type: ignore[arg-type]

    if s.config.position == "learned":
        write(room)
        message = refusal_by(lambda: write(room + 1))
        assert message is not None and "max_len" in message and not written, f"{len(written)} tokens are written: {message}"
    else:
        write(room + 1)


def beams_of_two_prompts_are_those_of_each_alone(s: Subject) -> None:
    inputs = s.inputs()
    together = beam_search(s.called, **inputs, num_beams=3, max_new_tokens=5, repetition_penalty=3.0, stop=())  # type: ignore[arg-type]
    for row, found in enumerate(together):
        alone = {name: value[row : row + 1] for name, value in inputs.items()}
        [wanted] = beam_search(s.called, **alone, num_beams=3, max_new_tokens=5, repetition_penalty=3.0, stop=())  # type: ignore[arg-type]
        assert torch.equal(found, wanted), f"row {row}: {found.tolist()} beside another row, {wanted.tolist()} alone"


# Oracles: looking


def looking_is_bit_equal(s: Subject) -> None:
    """Output, gradients, random numbers, and the state of the process; and every record is there."""
    blind, what = s.but(look="nothing"), s.point["look"]
    inputs = s.inputs()
    with seeded():
        wanted, state = blind.answer(inputs), process_state()
    with seeded(), capture(s.looked, what=what) as seen:
        with s.around(), seeded():
            found = s.called(**inputs)
        assert process_state() == state, "capture changes the state of the process"
    same_bits(found if isinstance(found, Tensor) else found.logits, wanted, "output")
    silent = [name for name, records in seen.items() if not records]
    assert seen and not silent, f"no record of {silent}"
    if s.point["wrapper"] == "quantised":
        return
    s.stop_looking()
    with capture(s.looked, what=what) as both:
        gradients = s.gradients()
    for name, gradient in blind.gradients().items():
        same_bits(gradients[name], gradient, f"gradient of {name}")
    twice = [name for name, records in both.items() if len(records) != len(seen[name])]
    assert not twice, f"other records of {twice} where a backward pass follows"


WITH_SINKS = ("sinks", "hf_gpt_oss")
"""Their weights sum to less than 1."""


def records_of(s: Subject, what: str) -> dict[str, Tensor]:
    """The last record of each core."""
    with torch.no_grad(), capture(s.looked, what=what) as seen:
        s.answer(s.inputs())
    return {name: records[-1] for name, records in seen.items()}


def heads_are_weights_times_values(s: Subject) -> None:
    weights, values, heads, scores = (records_of(s, what) for what in ("weights", "values", "heads", "scores"))
    assert weights.keys() == values.keys() == heads.keys() == scores.keys(), "the records have other layers"
    has_sinks = s.point["change"] == "sinks" or s.name in WITH_SINKS
    for name, rows in weights.items():
        product, terms = rows.double() @ values[name].double(), rows.double() @ values[name].double().abs()
        error = (heads[name].double() - product).abs()
        allowed = 8 * s.epsilon * (terms + values[name].double().abs().max())
        assert (error <= allowed).all(), f"heads of {name} differ from weights @ values by {error.max():.1e}"
        total = rows.double().sum(-1)
        assert has_sinks or (((total - 1).abs() < 1e-5) | (total == 0)).all(), (
            f"weights of {name} sum to {total.min()} … {total.max()}"
        )
        if not has_sinks:
            softmax = scores[name].double().softmax(-1).nan_to_num()
            error = (softmax - rows.double()).abs().max()
            assert error <= 1e-5, f"weights of {name} differ from the softmax of scores by {error:.1e}"


def a_record_in_its_own_place_changes_nothing(s: Subject) -> None:
    inputs, what = s.inputs(), s.point["look"]
    blind = s.but(look="nothing")
    wanted = blind.answer(inputs)
    with seeded(), blind.around(), capture(blind.looked, what=what) as seen:
        blind.called(**inputs)
    with intervene(blind.looked, what, seen):
        found = blind.answer(inputs)
    real = s.real(inputs)
    keep = slice(None) if real is None else real
    s.same(found[keep], wanted[keep], f"its own {what}")


COPIED = ("none", "deepcopy", "pickle", "torch_save", "frozen", "half_and_back", "shared_layer", "quantised", "lora")


def a_knocked_out_head_changes_the_answer_and_comes_back(s: Subject) -> None:
    inputs = s.inputs()
    wanted = s.answer(inputs)
    with intervene(s.looked, "heads", 0.0, heads=[0], layers=[0]):
        assert not torch.equal(s.answer(inputs), wanted), "head 0 of layer 0 has no effect"
        twin = copy.deepcopy(s.model) if s.point["wrapper"] in COPIED else None
    same_bits(s.answer(inputs), wanted, "after the context")
    if twin is not None:
        same_bits(s.answer(inputs, twin), wanted, "a copy that was made inside of the context")


def a_backward_pass_after_an_intervention_is_right_or_an_error(s: Subject) -> None:
    def silent_head() -> contextlib.AbstractContextManager[None]:
        return intervene(s.looked, "heads", 0.0, heads=[0], layers=[0])

    with silent_head():
        wanted = s.gradients()
    try:
        found = s.gradients(silent_head())
    except RuntimeError as error:
        if "intervene" not in str(error) or s.point["checkpointing"] == "no":
            raise
        return
    for name, gradient in wanted.items():
        same_bits(found[name], gradient, f"gradient of {name}")


def knock_out_heads_is_intervene_head_by_head(s: Subject) -> None:
    def loss(model: nn.Module) -> Tensor:
        return s.answer(s.inputs()).double().flatten(1).square().mean(1)

    with torch.no_grad():
        effects = knock_out_heads(s.model, loss)
        name = effects.names[-1]
        before = loss(s.model)
        with intervene(s.model, "heads", 0.0, heads=[1], layers=[name]):
            alone = loss(s.model) - before
    error = abs(effects.mean[-1, 1].item() - alone.mean().item())
    assert error <= 1e-5 * max(1.0, before.abs().max().item()), (
        f"{name}: {effects.mean[-1, 1]:.6f}, by intervene {alone.mean():.6f}"
    )


def the_lens_ends_with_the_logits(s: Subject) -> None:
    inputs = s.inputs()
    lens = logit_lens(s.model, **inputs)
    s.same(lens[-1], s.answer(inputs), "the last row of the lens")
    blocks = s.config.decoder_layers if s.is_ours and s.has_target else 2
    assert len(lens) == blocks, f"{len(lens)} rows for {blocks} blocks"
    assert not torch.equal(lens[0], lens[-1]), "the first row of the lens is the last"


def a_snapshot_is_what_capture_sees(s: Subject) -> None:
    is_training, state = s.model.training, process_state()
    snapshot = take_snapshot(s.looked, s.inputs())
    assert s.model.training == is_training and process_state() == state, "take_snapshot changes the mode or the process"
    s.model.eval()
    seen = records_of(s, "weights")
    assert len(snapshot.maps) == len(seen), f"{len(snapshot.maps)} maps of {len(seen)} layers"
    for layer, (name, weights) in zip(snapshot.maps, seen.items(), strict=True):
        error = (layer.weights.double() - weights.double()).abs().max()
        assert error <= 1e-5 + (0 if s.point["precision"] != "bf16" else 2.0**-8), (
            f"{name}: the snapshot differs by {error:.1e}"
        )
    if "pixel_values" in snapshot.tokens:  # the places of patches are those of the image, which is not a square
        (_, _, height, width), side = s.inputs()["pixel_values"].shape, IMAGES["patch_size"]
        grid = [f"{row},{column}" for row in range(height // side) for column in range(width // side)]
        registers = [f"register {number}" for number in range(REGISTERS if s.name == WITH_REGISTERS else 0)]
        named = snapshot.tokens["pixel_values"][0]
        assert named in (grid, ["cls", *registers, *grid]), f"the tokens are named {named}"


def hidden_states_are_the_input_of_the_head(s: Subject) -> None:
    inputs = s.inputs()
    hidden = s.answer({**inputs, "return_hidden": True})
    with s.around():
        found = s.model.head(hidden)
    same_bits(found, s.answer(inputs), "the head of the hidden states")


# Oracles: weights and files


def weight_decay_spares_norms_biases_and_vectors(s: Subject) -> None:
    """A norm is what does not notice that its input is three times as large, whatever its name and its axes."""
    decays = {p: group["weight_decay"] for group in adamw(s.model, weight_decay=0.1).param_groups for p in group["params"]}
    for name, parameter in s.model.named_parameters():
        path, _, own = name.rpartition(".")
        is_spared = parameter.dim() < 2 or "bias" in own or _is_norm(s.model.get_submodule(path), parameter)
        found, wanted = decays[parameter], 0.0 if is_spared else 0.1
        assert found == wanted, f"{name} of shape {tuple(parameter.shape)} has a weight decay of {found}, not {wanted}"


def _is_norm(module: nn.Module, parameter: Tensor) -> bool:
    if isinstance(module, nn.Linear | nn.Embedding | nn.ModuleDict | nn.ParameterDict):
        return False
    x = torch.linspace(-9, 7, 5 * parameter.numel(), dtype=torch.float64).view(5, *parameter.shape).to(parameter.dtype)
    try:
        once, thrice = (module(factor * x).double() for factor in (1, 3))
    except Exception:  # it reads something else
        return False
    return torch.allclose(once, thrice, rtol=0.02, atol=0.02) and not torch.equal(once, torch.zeros_like(once))


def a_state_dict_brings_the_model_back(s: Subject) -> None:
    wanted, other = s.answers(), s.but()
    with torch.no_grad():
        for parameter in other.model.parameters():
            parameter.add_(1.0)
    for assign in (False, True):
        weights = {name: value.clone() for name, value in s.model.state_dict().items()}
        result = other.model.load_state_dict(weights, assign=assign)
        assert not result.missing_keys and not result.unexpected_keys, str(result)
        same_bits(other.answers(), wanted, f"after load_state_dict(assign={assign})")
    if s.is_ours:  # load_state_dict(assign=True) of transformers' own models unties
        assert _ties(s.model) == _ties(other.model), "other parameters are tied"


def _ties(model: nn.Module) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return sorted(sorted(group) for group in names.values())


def a_folder_of_transformers_brings_the_model_back(s: Subject) -> None:
    wanted, other = s.answers(), s.but(wrapper="none")
    with tempfile.TemporaryDirectory() as folder:
        s.model.save_pretrained(folder)  # type: ignore[operator]
        again = adopt_hf(type(s.model).from_pretrained(folder, dtype=s.dtype), backend=s.point["backend"], check=False)  # type: ignore[attr-defined]
    other.model = other.called = again.eval()
    state = other.model.state_dict()
    for name, value in s.model.state_dict().items():
        same_bits(state[name], value, name)
    s.same(other.answers(), wanted, "after the folder")


def a_hugging_face_folder_brings_the_function_back(s: Subject) -> None:
    wanted, other = s.answers(), s.but(wrapper="none")
    with tempfile.TemporaryDirectory() as folder:
        save_hf(s.model, folder)  # type: ignore[arg-type]
        other.model = other.called = load_hf(folder, dtype=s.dtype)
    s.same(other.answers(), wanted, "after the folder")


def a_model_of_a_folder_is_built_again_from_its_node(s: Subject) -> None:
    """The node and the state dict of ``pretrained_hf``, with an adapter and without, are all that a checkpoint needs."""
    wrapper = s.point["wrapper"]
    plain = s.but(wrapper="none", look="nothing", precision="f32" if s.point["precision"] == "f64" else s.point["precision"])
    release_hf(plain.model)
    with tempfile.TemporaryDirectory() as folder:
        plain.model.save_pretrained(folder)
        first = pretrained_hf(folder, adopt=True, lora=2 if wrapper == "lora" else None).to(plain.dtype)
    first = copy.deepcopy(first) if wrapper == "deepcopy" else first
    plain.model = plain.called = first
    wanted = plain.answers()
    again = Part.of(first.stored_node, "model").build().to(plain.dtype).eval()  # type: ignore[arg-type]
    again.load_state_dict(first.state_dict())
    assert _ties(again) == _ties(first), "other parameters are tied"
    plain.model = plain.called = again
    same_bits(plain.answers(), wanted, "built again")


def a_model_that_is_not_its_config_is_known(s: Subject) -> None:
    assert changes_of(s.model), "the model is not what its config describes"


def folding_the_scale_keeps_the_function(s: Subject) -> None:
    wanted = s.answers()
    _fold(s, -0.4)
    s.same(s.answers(), wanted, "after fold_scale")
    if s.point["wrapper"] != "fsdp":  # torch copies no sharded model
        same_bits(_answers_of(s, copy.deepcopy(s.model)), s.answers(), "a copy after fold_scale")


def a_fold_and_its_release_change_nothing(s: Subject) -> None:
    """Ours: folded to another scale and back. Adopted: folded and released, against the model before it was adopted."""
    wanted = s.answers()
    before = tensors_of(s.model)
    _fold(s, -0.4)
    changed = {name for name, value in tensors_of(s.model).items() if not torch.equal(value, before[name])}
    assert changed, "fold_scale changes no weight"
    if s.is_ours:
        config = s.config
        fold_scale(s.model, config.scale, factor=config.scale_factor)
        s.same(s.answers(), wanted, "after folding back")
    else:
        s.stop_looking()
        release_hf(s.model)
        s.same(s.answers(), wanted, "after release_hf")
    for name, value in tensors_of(s.model).items():
        error = (value.double() - before[name].double()).abs().max()
        allowed = 4 * torch.finfo(value.dtype).eps * before[name].double().abs().max() if value.is_floating_point() else 0.0
        assert error <= allowed, f"{name} comes back with a difference of {error:.1e}"
        assert name in changed or error == 0, f"{name} changes when the fold is undone"


def another_scale_and_its_release_change_nothing(s: Subject) -> None:
    wanted = s.answers()
    set_scale(s.model, 3.0)
    assert not torch.equal(s.answers(), wanted), "another scale has no effect"
    if s.is_ours:
        config = s.config
        set_scale(s.model, config.scale, factor=config.scale_factor)
        same_bits(s.answers(), wanted, "after set_scale back")
    else:
        s.stop_looking()
        release_hf(s.model)
        same_bits(s.answers(), s.untouched().answers(), "after release_hf")


def a_fold_that_is_impossible_is_refused_and_changes_nothing(s: Subject) -> None:
    wanted = s.answers()
    before = tensors_of(s.model)
    message = refusal_by(lambda: _fold(s, "unscaled"))
    assert message is not None, "fold_scale folds a model that it cannot fold"
    assert "scale" in message, message
    for name, value in tensors_of(s.model).items():
        assert torch.equal(value, before[name]), f"refused, but {name} is changed"
    same_bits(s.answers(), wanted, "refused")


def refusal_by(call: Callable[[], object]) -> str | None:
    """The message of the ValueError or TypeError that ``call`` raises, or None."""
    try:
        call()
    except (ValueError, TypeError) as error:
        return str(error)
    return None


def _fold(s: Subject, to: str | float) -> None:
    fold_scale(s.model, to, inputs=None if s.is_ours else s.inputs())


def _answers_of(s: Subject, model: nn.Module) -> Tensor:
    inputs = s.inputs()
    out, real = s.answer(inputs, model), s.real(inputs)
    return out if real is None else out[real]


def a_merged_adapter_computes_the_same_or_is_refused(s: Subject) -> None:
    if OURS.get(s.point["model"], {}).get("logit_softcap"):  # PEFT adds an adapter after the cap of our head
        with pytest.raises(ValueError, match="after the soft-cap"):
            merged(s.model)
        return
    wanted = s.answers()
    s.same(_answers_of(s, merged(copy.deepcopy(s.model))), wanted, "merged")


# Oracles: adopted models


def adopted_equals_transformers_and_so_does_released(s: Subject) -> None:
    inputs = s.inputs()
    found = s.answers(inputs)
    s.stop_looking()
    untouched = s.untouched()
    wanted = untouched.answers(inputs)
    s.same(found, wanted, "adopted against transformers")
    release_hf(s.model)
    same_bits(s.answers(inputs), wanted, "released against transformers")
    left = [name for name, _ in s.model.named_modules() if name.endswith("core")]
    assert not left, f"release_hf leaves {left}"


def adoption_passes_its_own_check(s: Subject) -> None:
    s.stop_looking()
    release_hf(s.model)
    wanted = s.answers()
    adopt_hf(s.model, backend=s.point["backend"])
    s.same(s.answers(), wanted, "adopted with its check")


# The tables

EVALUATION = {"mode": "eval"}
TEXT_OF_HF = joined([name for name in FAMILIES if name != WITH_REGISTERS])
HF = joined(FAMILIES)
COMPILE = joined(COMPILED)
PADDED = "left|right|inside"
PACKED = "documents|padded_documents"
CANNOT_FOLD = (
    {"model": joined(WITHOUT_BACKENDS, "modern", "yarn")},  # no dot products, a learned scale, or QK-norm of another kind
    {"model": "log_length", "change": "!scale"},  # no fixed scale
    {"change": "learned_scale|qk_norm"},
    {"wrapper": "lora|weight_norm", "model": "!hf_per_head|typed_pair"},  # whose norms of queries and keys take the factor
    # torch quantises nn.Linear, and GPT-2 has it in the head alone
    {"wrapper": "quantised", "model": "!hf_per_head|hf_gpt2|typed_pair"},
    {"wrapper": "fsdp", "model": HF},
)
OTHER_WEIGHTS = {"wrapper": joined(COMPILED, "functional_call")}
"""The weights of the call are not the module's, or their change compiles again."""
CACHED = joined(DECODERS, PAIRS, [name for name in FAMILIES if name not in ("hf_bert", WITH_REGISTERS)])
COUNTS_PADDING = {"model": "hf_gpt2|hf_bert", "rows": "left|inside"}
"""transformers counts padding as positions here."""
GAPS = {"model": HF, "rows": "inside"}
"""transformers counts padding between tokens as positions."""
OF_COLUMNS = [name for name, options in OURS.items() if options.get("position") in ("alibi", "t5") or "window" in options]
COLUMNS = (
    {"model": joined(OF_COLUMNS), "rows": "inside"},
    {"change": "window|t5_bias", "rows": "inside"},
    {"model": "linformer", "rows": "left|inside"},
)
"""Windows and the distances of ALiBi and T5 count columns, padding included, and the slots of Linformer mix columns."""
ONE_CACHE = {"model": HF, "wrapper": "shared_layer"}
"""A layer of transformers has one number, so that one that is used twice writes twice into one place of the cache."""
LIKE_THEIRS = (
    {"model": "gpt|llama|bert|t5|vision", "change": "nothing"},
    {"model": "llama", "change": "window|grouped|rotary"},
    {"model": "bert", "change": "post|types"},
    {"model": "t5", "change": "t5_bias"},
)
"""Our models that a class of transformers computes."""
WRITTEN = {
    "mode": "eval",
    "model": joined(DECODERS, PAIRS),
    "rows": "plain|left",
    "precision": "f64|f32",
    "wrapper": "none|deepcopy|pickle|torch_save|frozen|shared_layer",
}
QUANTISED = {"wrapper": "quantised"}
"""torch's dynamic quantisation has one scale for all activations of a call, so that other rows and tokens change the rounding."""
RECORDED = joined(LOOKS[1:])
COPIES = "none|deepcopy|pickle|torch_save|half_and_back|frozen"
"""Wrappers that leave a model of its class."""

ORACLES = (
    Oracle(
        equals_the_plain_model_in_float64,
        [{"mode": "eval", "wrapper": "!quantised"}],
        [{"model": HF, "wrapper": "half_and_back"}],
    ),
    Oracle(equals_the_plain_quantised_model, [{"mode": "eval", "wrapper": "quantised"}]),
    Oracle(
        gradients_equal_those_of_the_plain_model,
        [{"mode": "eval", "wrapper": "!quantised|weight_norm|ddp|fsdp"}],
        [{"model": HF, "wrapper": "half_and_back"}],
    ),
    Oracle(checkpointing_changes_nothing, [{"checkpointing": "yes", "wrapper": "!quantised|compile|inductor|fsdp"}]),
    Oracle(
        a_backward_pass_after_an_intervention_is_right_or_an_error,
        [{"look": "nothing", "wrapper": "!quantised|compile|inductor|fsdp"}],
    ),
    Oracle(every_parameter_matters, [{"mode": "eval", "wrapper": "!quantised|fsdp", "precision": "f64|f32"}]),
    Oracle(evaluation_repeats_itself_and_leaves_no_trace, [EVALUATION], [{"wrapper": COMPILE}]),
    Oracle(
        padding_changes_nothing,
        [{"mode": "eval", "rows": PADDED}],
        [COUNTS_PADDING, GAPS, *COLUMNS, QUANTISED, {"wrapper": COMPILE}],
    ),
    Oracle(hidden_tokens_change_nothing, [{"rows": f"{PADDED}|padded_documents"}], [QUANTISED]),
    Oracle(later_tokens_change_nothing, [{"model": CAUSAL}], [QUANTISED]),
    Oracle(rows_do_not_know_each_other, [EVALUATION], [QUANTISED, {"wrapper": COMPILE}]),
    Oracle(
        documents_do_not_see_each_other,
        [{"mode": "eval", "rows": PACKED, "model": f"!{OF_ROWS}"}],
        [QUANTISED, {"wrapper": COMPILE}],
    ),
    Oracle(
        pieces_with_a_cache_equal_the_whole,
        [{"mode": "eval", "model": CACHED}],
        [QUANTISED, {"wrapper": COMPILE}, GAPS, COUNTS_PADDING, ONE_CACHE],
    ),
    Oracle(
        greedy_generation_is_the_argmax_of_whole_rows,
        [
            {
                "mode": "eval",
                "model": joined(DECODERS, PAIRS),
                "rows": "plain|left",
                "wrapper": "none|deepcopy|pickle|torch_save|frozen|weight_norm|half_and_back|shared_layer",
            }
        ],
        [{"model": joined(PAIRS), "rows": "left"}],
    ),
    *(
        Oracle(check, [WRITTEN], [{"model": joined(PAIRS), "rows": "left"}])
        for check in (
            sampled_rows_are_draws_from_the_logits_of_whole_rows,
            a_text_ends_where_learned_positions_do,
            beams_of_two_prompts_are_those_of_each_alone,
        )
    ),
    Oracle(looking_is_bit_equal, [{"look": RECORDED}]),
    Oracle(
        heads_are_weights_times_values,
        [{"mode": "eval", "look": "weights|values|heads|scores", "model": f"!{WITHOUT_BACKENDS}"}],
    ),
    Oracle(a_record_in_its_own_place_changes_nothing, [{"mode": "eval", "look": "!nothing|statistics"}]),
    Oracle(a_knocked_out_head_changes_the_answer_and_comes_back, [EVALUATION], [{"wrapper": COMPILE}]),
    Oracle(
        knock_out_heads_is_intervene_head_by_head,
        [{"mode": "eval", "look": "nothing", "precision": "f64|f32"}],
        [OTHER_WEIGHTS],
    ),
    Oracle(the_lens_ends_with_the_logits, [EVALUATION], [{"wrapper": COMPILE}, {"model": "t5_encoder"}, COUNTS_PADDING]),
    Oracle(
        a_snapshot_is_what_capture_sees,
        [{"mode": "eval", "precision": "!autocast", "model": f"!{WITHOUT_BACKENDS}"}],
        [{"wrapper": COMPILE}, COUNTS_PADDING],
    ),
    Oracle(
        hidden_states_are_the_input_of_the_head,
        [{"model": joined(OURS)}],
        [{"wrapper": "!none|deepcopy|pickle|torch_save|frozen"}],
    ),
    Oracle(weight_decay_spares_norms_biases_and_vectors, [{"mode": "train", "wrapper": "none|deepcopy|frozen|lora"}]),
    Oracle(a_state_dict_brings_the_model_back, [{"wrapper": "!quantised|compile|inductor|ddp|fsdp|functional_call"}]),
    Oracle(
        a_folder_of_transformers_brings_the_model_back,
        [{"mode": "eval", "model": HF, "wrapper": COPIES}],
        [{"wrapper": "half_and_back"}],
    ),
    Oracle(
        a_hugging_face_folder_brings_the_function_back,
        [{"mode": "eval", "wrapper": COPIES, **where} for where in LIKE_THEIRS],
    ),
    Oracle(
        a_model_of_a_folder_is_built_again_from_its_node,
        [{"mode": "eval", "model": HF, "wrapper": "none|lora|deepcopy"}],
    ),
    Oracle(
        a_model_that_is_not_its_config_is_known,
        [{"mode": "eval", "model": joined(OURS), "wrapper": "quantised|lora|weight_norm"}],
    ),
    Oracle(folding_the_scale_keeps_the_function, [{"mode": "eval", "precision": "f64|f32"}], [*CANNOT_FOLD, OTHER_WEIGHTS]),
    Oracle(a_fold_and_its_release_change_nothing, [{"mode": "eval", "precision": "f64|f32"}], [*CANNOT_FOLD, OTHER_WEIGHTS]),
    Oracle(
        another_scale_and_its_release_change_nothing,
        [EVALUATION],
        # a learned scale is lost
        [{"wrapper": COMPILE}, {"change": "learned_scale"}, {"model": "modern", "change": "!scale"}],
    ),
    Oracle(
        a_fold_that_is_impossible_is_refused_and_changes_nothing,
        [{"mode": "eval", **where} for where in CANNOT_FOLD],
        [OTHER_WEIGHTS],
    ),
    Oracle(a_merged_adapter_computes_the_same_or_is_refused, [{"mode": "eval", "wrapper": "lora"}]),
    Oracle(
        adopted_equals_transformers_and_so_does_released,
        [{"mode": "eval", "model": HF}],
        [{"wrapper": COMPILE}],
    ),
    Oracle(adoption_passes_its_own_check, [{"mode": "eval", "model": HF}], [{"wrapper": COMPILE}]),
)

OTHER_NORMS = joined([name for name, options in OURS.items() if options.get("norm_position", "pre") != "pre"])
KERNELISED = "linear|performer|linformer"
MEANINGLESS = (
    {"model": HF, "change": "!nothing"},
    {"model": f"{joined(PAIRS)}|{WITH_PIXELS}|{HF}", "rows": PACKED},
    {"model": WITH_PIXELS, "rows": "!plain"},
    {"model": HF, "wrapper": "pickle|torch_save", "checkpointing": "yes"},  # transformers leaves a local function as a hook
    {"wrapper": "quantised", "precision": "!f32"},  # torch's quantised layers take float32
    {"wrapper": "inductor", "model": "!gpt|gemma|performer|bert|t5|vision"},  # each takes half a minute
)


def lattice_point(**values: str) -> Point:
    return {**{axis: listed[0] for axis, listed in AXES.items()}, **values}


def refusals_of_the_config() -> Iterator[Refusal]:
    """The combinations of a named configuration with a change or a backend that the tables of the config refuse."""
    for axis in ("change", "backend"):
        for value in AXES[axis][1:]:
            refused: dict[str, list[str]] = {}
            for name in OURS:
                field = refused_by_tables(options_of(lattice_point(model=name, **{axis: value})))
                if field is not None:
                    refused.setdefault(field, []).append(name)
            for field, names in refused.items():
                yield Refusal({"model": joined(names), axis: value}, f"^{field}=")


REFUSALS = (
    *refusals_of_the_config(),
    Refusal({"wrapper": COMPILE, "look": RECORDED}, "compiled"),
    Refusal({"model": WITHOUT_BACKENDS, "look": "statistics|weights|scores|values"}, "no attention core with weights"),
    Refusal({"model": KERNELISED, "rows": PACKED}, "does not support the mask Documents"),
    Refusal({"model": "linear|performer", "change": "softcap"}, "does not support softcap"),
    Refusal({"model": "linear|performer", "mode": "train"}, "does not support dropout"),
    Refusal({"model": OTHER_NORMS, "change": "parallel"}, "parallel sublayers need"),
    Refusal({"model": "alibi", "change": "post"}, "parallel sublayers need"),
    Refusal({"backend": "sdpa", "change": "softcap|sinks"}, "cannot serve this call: torch's kernels have no"),
    Refusal(
        {"backend": "sdpa", "model": "gemma|sinks|hf_gemma2|hf_gpt_oss"}, "cannot serve this call: torch's kernels have no"
    ),
    Refusal({"model": "hf_gpt_oss", "precision": "f64"}, "Float32, BFloat16 or Float16"),  # torch's grouped products
)
ONE_SCALE = "torch 2.13's dynamic quantisation has one scale for a call, so that what padding computes changes how real tokens are rounded"
KNOWN = (
    KnownFault(
        {"model": "hf_gemma2", "wrapper": "quantised"}, "adoption_passes_its_own_check", "its answer differs by", ONE_SCALE
    ),
    KnownFault(
        {"model": "hf_gemma2", "wrapper": "quantised", "rows": "left"},
        "adopted_equals_transformers_and_so_does_released",
        "adopted against transformers",
        ONE_SCALE,
    ),
    *(
        KnownFault(
            {"model": "hf_gemma2", "rows": "left", "precision": "f64"},
            oracle,
            "differs by nan",
            "transformers 5.23: its eager attention gives NaN in float64 where a padded row sees no key",
        )
        for oracle in (
            "a_fold_and_its_release_change_nothing",
            "another_scale_and_its_release_change_nothing",
            "adopted_equals_transformers_and_so_does_released",
            "adoption_passes_its_own_check",
        )
    ),
)

MODELS = Lattice(
    "tests/lattice/models.py",
    AXES,
    Subject,
    ORACLES,
    REFUSALS,
    KNOWN,
    MEANINGLESS,
    costly={"wrapper": COMPILE},
    errors=(ValueError, TypeError, NotImplementedError, RuntimeError, CheckpointError),
)


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """A group of this process alone, for DDP and FSDP."""
    from torch import distributed

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        gc.collect()  # a DDP model must not outlive its group
        distributed.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with process_group():
        code = run(MODELS)
    raise SystemExit(code)
