"""The subjects of the model lattice: named configurations of our four kinds, families of transformers, and what is wrapped around them."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from minitx.analysis import capture
from minitx.check.properties import rounding
from minitx.config import TransformerConfig
from minitx.config.transformer import _BELONG_TO, _LIMITS
from minitx.interop import adopt_hf
from minitx.nn import build_model
from tests.lattice.engine import Point

VOCAB, LENGTH, TARGET, EXTRA = 23, 9, 7, 3
"""Number of tokens, real tokens of a row, real tokens of a target, tokens that are padding in row 0 and real in row 1."""

SIZES = {"vocab_size": VOCAB, "embed_dim": 16, "num_heads": 4, "num_layers": 2, "max_len": 32, "init": "lecun"}
LLAMA = {"position": "rotary", "norm": "rms", "bias": False, "activation": "swiglu", "num_kv_heads": 1, "tie_embeddings": False}
T5 = {
    "position": "t5", "num_buckets": 8, "max_distance": 11, "norm": "rms", "bias": False, "scale": "unscaled", "activation": "relu",
}  # fmt: skip
BERT = {"norm_position": "post", "embed_norm": True, "type_vocab_size": 2}
YARN = {"rotary_scaling": "yarn", "rotary_factor": 4.0, "rotary_original_len": 8}
SEQUENCE = {"head": "sequence", "num_labels": 5}
IMAGES = {**SEQUENCE, "vocab_size": None, "image_size": 8, "num_channels": 2, "patch_size": 4}

DECODERS: dict[str, dict[str, Any]] = {
    "gpt": {"init_fold": "symmetric"},
    "llama": {**LLAMA, "rotary_scaling": "llama3", "rotary_factor": 4.0, "rotary_original_len": 8},
    "modern": {
        "position": "rotary", "qk_norm": "rms", "norm": "rms", "bias": False, "qkv_bias": True, "activation": "relu2",
        "tie_embeddings": False, "logit_softcap": 3.0, "scale": "learned",
    },
    "gemma": {
        "position": "rotary", "rotary_base": (10.0, 100.0), "rotary_scaling": "linear", "rotary_factor": (1.0, 3.0),
        "window": (3, None), "norm": "rms", "norm_position": "sandwich", "activation": "geglu_tanh", "ffn_dim": 11, "softcap": 1.5,
        "logit_softcap": 3.0, "scale_embeddings": True, "head_dim": 6, "scale": "head_dim^-0.25",
    },
    "sinks": {**YARN, "position": "rotary", "sinks": True, "window": (3, None), "bias": False, "out_bias": True, "head_bias": True},
    "alibi": {"position": "alibi", "window": 3, "parallel": True, "norm_eps": 1e-3, "activation": "gelu_tanh"},
    "log_length": {"scale": "log_length", "norm_position": "deepnorm", "embed_norm": True, "position": "sinusoidal"},
    "yarn": {
        **YARN, "rotary_original_len": 64, "rotary_low": 2.0, "rotary_high": 3.0, "rotary_base": 100.0, "head_dim": 8,
        "position": "rotary", "rotary_interleaved": True, "norm_position": "post", "qk_norm": "l2", "qk_norm_eps": 2.0,
    },
    "layer_scale": {"layer_scale": 0.3, "stochastic_depth": 0.3, "num_heads": 2, "head_dim": 5, "activation": "geglu", "position_offset": 2},
    "additive": {"attention": "additive", "position": "rotary"},
    "linear": {"attention": "linear"},
    "performer": {"attention": "performer", "num_features": 7, "position": "rotary", "rotary_scaling": "ntk", "rotary_factor": 2.0},
}  # fmt: skip
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {**BERT, "head_transform": True, "head_bias": True},
    "bert_rows": {**BERT, **SEQUENCE, "pooler": True, "position_offset": 2},
    "mean_rows": {**SEQUENCE, "pooling": "mean", "position": "rotary", "scale": -0.7, "scale_factor": 0.5},
    "labels": {"head": "token", "num_labels": 5, "position": "alibi", "activation": "reglu"},
    "t5_encoder": {**T5, "head": "none", "pooler": True},
    "linformer": {"attention": "linformer", "num_slots": 4},
}
PAIRS: dict[str, dict[str, Any]] = {
    "vaswani": {"position": "sinusoidal", "norm_position": "post", "scale_embeddings": True, "activation": "relu"},
    "t5": {**T5, "scale_logits": True},
    "deep_target": {"position": "rotary", "norm_position": "deepnorm", "num_decoder_layers": 3, "init_fold": "query"},
    "typed_pair": {"scale": "inv", "type_vocab_size": 2, "qk_norm": "layer"},
}
IMAGE_MODELS: dict[str, dict[str, Any]] = {
    "vision": IMAGES,
    "mean_patches": {**IMAGES, "pooling": "mean", "norm": "rms", "position": "none"},
}
KINDS = {"decoder": DECODERS, "encoder": ENCODERS, "encoder_decoder": PAIRS, "vision": IMAGE_MODELS}
OURS = {name: {"architecture": kind, **options} for kind, models in KINDS.items() for name, options in models.items()}

WITH_REGISTERS, REGISTERS = "hf_vit_registers", 3
SMALL = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 48}
TEXT = {**SMALL, "vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LOCAL = {**TEXT, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 5}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "hf_gpt2": (
        "GPT2LMHeadModel",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "hf_llama": ("LlamaForCausalLM", {**TEXT, "num_key_value_heads": 2}),
    "hf_gemma2": ("Gemma2ForCausalLM", {**LOCAL, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "hf_per_head": ("CohereForCausalLM", {**TEXT, "num_key_value_heads": 2, "use_qk_norm": True}),  # norms (heads, head_dim)
    "hf_gpt_oss": ("GptOssForCausalLM", {**LOCAL, "num_local_experts": 2, "num_experts_per_tok": 2}),
    "hf_bert": ("BertForMaskedLM", TEXT),
    "hf_t5": (
        "T5ForConditionalGeneration",
        {
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "vocab_size": VOCAB,
            "decoder_start_token_id": 0,
        },
    ),
    WITH_REGISTERS: (
        "Dinov2WithRegistersForImageClassification",
        {**SMALL, "image_size": 8, "patch_size": 4, "num_register_tokens": REGISTERS, "num_labels": 5},
    ),
}
ATTENTION_DROPOUT = ("attention_probs_dropout_prob", "attention_dropout", "attn_pdrop", "dropout_rate")

CHANGES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "window": {"window": 3},
    "scale": {"scale": "unscaled", "scale_factor": 0.4},
    "learned_scale": {"scale": "learned"},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": True},
    "grouped": {"num_kv_heads": 2},
    "qk_norm": {"qk_norm": "l2"},
    "rotary": {"position": "rotary"},
    "t5_bias": {"position": "t5", "num_buckets": 8, "max_distance": 11},
    "post": {"norm_position": "post"},
    "parallel": {"parallel": True},
    "types": {"type_vocab_size": 2},
}
"""Options on top of a named configuration. The config refuses some of them."""

PRECISIONS = {"f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "autocast": torch.float32}
COMPILED = {"compile": "aot_eager", "inductor": "inductor"}
WRAPPERS = (
    "none", "deepcopy", "pickle", "torch_save", "functional_call", "frozen", "weight_norm", "half_and_back", "shared_layer",
    "quantised", "lora", *COMPILED, "ddp", "fsdp",
)  # fmt: skip
KEEP_WEIGHTS = "none|deepcopy|pickle|torch_save|functional_call|frozen|weight_norm|half_and_back|compile|inductor|ddp|fsdp"
"""The wrappers that keep the function."""


def joined(*groups: Any) -> str:
    """Names as the engine takes them: ``a|b``."""
    return "|".join(name for group in groups for name in ([group] if isinstance(group, str) else group))


CAUSAL = joined(DECODERS, PAIRS, "hf_gpt2", "hf_llama", "hf_gemma2", "hf_per_head", "hf_gpt_oss", "hf_t5")
WITH_TARGET = joined(PAIRS, "hf_t5")
WITH_PIXELS = joined(IMAGE_MODELS, WITH_REGISTERS)
OF_ROWS = joined("bert_rows", "mean_rows", WITH_PIXELS)
"""Models that answer once a row."""


def options_of(point: Mapping[str, str]) -> dict[str, Any]:
    """The arguments of the config of one of our models."""
    options = {**SIZES, **OURS[point["model"]], **CHANGES[point["change"]]}
    options["checkpointing"] = point["checkpointing"] == "yes"
    options["dropout"] = 0.2 if point["mode"] == "train" else 0.0
    return options if point["backend"] == "auto" else {**options, "backend": point["backend"]}


def refused_by_tables(options: Mapping[str, Any]) -> str | None:
    """The field that the tables of ``TransformerConfig`` refuse together with the others, or None."""
    defaults = {name: entry.default for name, entry in TransformerConfig.__dataclass_fields__.items()}
    values = {**defaults, **options}
    for belonging in _BELONG_TO:
        for name in belonging.names:
            if values[name] != defaults[name] and values[belonging.to] not in belonging.values:
                return name
    for limit in _LIMITS:
        if values[limit.other] in limit.kinds and values[limit.name] not in limit.values:
            return limit.name
    return None


@functools.lru_cache(maxsize=64)
def _built(name: str, change: str, backend: str, checkpointing: str, mode: str) -> nn.Module:
    """A model in float64, with learned numbers that start alike drawn apart."""
    point = {"model": name, "change": change, "backend": backend, "checkpointing": checkpointing, "mode": mode}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build_model(TransformerConfig(**options_of(point))) if name in OURS else _family(point)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() < 2 or (parameter == parameter.flatten()[0]).all():
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
            elif name in FAMILIES:
                parameter.mul_(3)
    return model.double().train(mode == "train")


def _family(point: Mapping[str, str]) -> nn.Module:
    """A model of transformers, not adopted."""
    import transformers

    kind, options = FAMILIES[point["model"]]
    cls: Any = getattr(transformers, kind)
    names = set(cls.config_class().to_dict())
    rate = 0.2 if point["mode"] == "train" else 0.0
    rates = dict.fromkeys(names & set(ATTENTION_DROPOUT), rate)
    rates |= dict.fromkeys(names & {"resid_pdrop", "embd_pdrop", "hidden_dropout_prob"}, 0.0)
    model = cls(cls.config_class(**options, **rates))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.endswith(".mask_token"))  # for pretraining alone
    for module in model.modules():  # the decoder of T5 has a config of its own
        if hasattr(module, "config"):
            module.config.use_cache = False  # under autocast, a cache makes float32 of all values; checkpointing allows none
    if point["checkpointing"] == "yes":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


@contextlib.contextmanager
def seeded(seed: int = 0) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


class Subject:
    """A model at a point, and how it is called. ``changes`` are other values of the point's axes."""

    def __init__(self, point: Mapping[str, str], *, is_adopted: bool = True, **changes: str) -> None:
        self.point: Point = {**point, **changes}
        self.is_adopted = is_adopted
        self.name, self.rows = self.point["model"], self.point["rows"]
        self.is_ours = self.name in OURS
        self.dtype = PRECISIONS[self.point["precision"]]
        self.has_target = self.name in WITH_TARGET.split("|")
        self.ids = "decoder_input_ids" if self.has_target else "input_ids"
        self.mask = "key_mask" if self.is_ours else "attention_mask"
        self.parameters: Mapping[str, Tensor] = {}
        self.called, self.model = self._wrapped(self._in_precision())
        self.parameters = self.parameters or dict(self.model.named_parameters())

    def but(self, **changes: str) -> Subject:
        """The subject with other values of some axes."""
        return Subject(self.point, **changes)

    def untouched(self) -> Subject:
        """The model of transformers that was never adopted."""
        return Subject(self.point, is_adopted=False, look="nothing")

    def stop_looking(self) -> None:
        self.point = {**self.point, "look": "nothing"}

    @property
    def config(self) -> TransformerConfig:
        """The config of one of our models."""
        return TransformerConfig(**options_of(self.point))

    def _in_precision(self) -> nn.Module:
        axes = ("model", "change", "backend", "checkpointing", "mode")
        raw = dict(self.point) if self.is_ours else {**self.point, "backend": "auto"}
        model = copy.deepcopy(_built(*(raw[axis] for axis in axes))).to(self.dtype)
        if self.point["wrapper"] == "half_and_back":
            weights = copy.deepcopy(model.state_dict())
            model = model.bfloat16().to(self.dtype)
            model.load_state_dict(weights)
        return model

    def _wrapped(self, model: Any) -> tuple[Callable[..., Any], nn.Module]:
        """What is called, and the module to look at."""
        wrapper = self.point["wrapper"]
        if not self.is_ours and self.is_adopted:
            adopt_hf(model, backend=self.point["backend"], check=False)
        if wrapper == "deepcopy":
            model = copy.deepcopy(model)
        elif wrapper == "pickle":
            model = pickle.loads(pickle.dumps(model))
        elif wrapper == "torch_save":
            file = io.BytesIO()
            torch.save(model, file)
            model = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
        elif wrapper == "functional_call":
            self.parameters = {name: p.detach().clone().requires_grad_(p.requires_grad) for name, p in model.named_parameters()}
            return lambda **inputs: torch.func.functional_call(model, dict(self.parameters), (), inputs), model
        elif wrapper == "frozen":
            trained = next(model.parameters())
            model.requires_grad_(False)
            trained.requires_grad_(True)
        elif wrapper == "weight_norm":
            names = [name for name, _ in model.named_modules() if name.endswith((".q_proj", ".query", ".q", ".c_attn"))]
            nn.utils.parametrizations.weight_norm(model.get_submodule(names[0]))
        elif wrapper == "shared_layer":
            layers = next(module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == 2)
            layers[1] = layers[0]
        elif wrapper == "quantised":
            model = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
        elif wrapper == "lora":
            model = _with_lora(model)
        elif wrapper in COMPILED:
            torch._dynamo.reset()
            return torch.compile(model, backend=COMPILED[wrapper], dynamic=False), model
        elif wrapper == "ddp":
            return nn.parallel.DistributedDataParallel(model), model
        elif wrapper == "fsdp":
            _shard(model)
        return model, model

    @property
    def looked(self) -> nn.Module:
        """What ``capture`` gets: the wrapper where it is a module that the user has in hand."""
        return self.called if isinstance(self.called, nn.Module) else self.model

    # Calls

    def tokens(self, length: int, seed: int) -> Tensor:
        return torch.randint(3, VOCAB, (2, length), generator=torch.Generator().manual_seed(seed))

    def inputs(self) -> dict[str, Tensor]:
        """The arguments of a call of two rows. Row 0 has padding where ``rows`` says so, and row 1 is longer."""
        if self.name in WITH_PIXELS.split("|"):
            generator = torch.Generator().manual_seed(1)
            pixels = torch.randn(2, 2 if self.is_ours else 3, 8, 12, generator=generator, dtype=torch.float64)
            return {"pixel_values": pixels.to(self.dtype)}
        inputs = self._text("input_ids", self.mask, LENGTH, 1)
        if self.has_target:
            inputs |= self._text("decoder_input_ids", f"decoder_{self.mask}", TARGET, 2)
        if self.rows == "documents":
            inputs["document_ids"] = torch.tensor([[0] * 4 + [1] * 5, [0] * 2 + [1] * 3 + [2] * 4])
        elif self.rows == "padded_documents":  # the padding belongs to the first document
            inputs["document_ids"] = torch.tensor([[0] * 7 + [1] * 5, [0] * 2 + [1] * 3 + [2] * 7])
        return inputs

    def _text(self, ids: str, mask: str, length: int, seed: int) -> dict[str, Tensor]:
        if self.rows in ("plain", "documents"):
            return {ids: self.tokens(length, seed)}
        start = {"right": length, "inside": 3}.get(self.rows, 0)
        real = torch.ones(2, length + EXTRA, dtype=torch.bool)
        real[0, start : start + EXTRA] = False
        return {ids: self.tokens(length + EXTRA, seed), mask: real if self.is_ours else real.long()}

    def real(self, inputs: Mapping[str, Tensor]) -> Tensor | None:
        """Which positions of the answer count, bool (B, L), or None for all."""
        mask = inputs.get(f"decoder_{self.mask}" if self.has_target else self.mask)
        return None if mask is None or self.name in OF_ROWS.split("|") else mask.bool()

    def around(self) -> contextlib.AbstractContextManager[Any]:
        if self.point["precision"] == "autocast":
            return torch.autocast("cpu", dtype=torch.bfloat16)
        return contextlib.nullcontext()

    def call(self, inputs: Mapping[str, Any], called: Callable[..., Any] | None = None) -> Any:
        """What the model returns, with the same random numbers at every call, under the point's look."""
        look = self.point["look"]
        looking = contextlib.nullcontext() if look == "nothing" else capture(self.looked, what=look)
        with looking, seeded(), self.around():
            return (called or self.called)(**inputs)

    def answer(self, inputs: Mapping[str, Any], called: Callable[..., Any] | None = None) -> Tensor:
        """The logits of a call."""
        out = self.call(inputs, called)
        return out if isinstance(out, Tensor) else out.logits

    def answers(self, inputs: Mapping[str, Tensor] | None = None) -> Tensor:
        """The logits at real positions (N, V), or of rows."""
        inputs = self.inputs() if inputs is None else inputs
        out, real = self.answer(inputs), self.real(inputs)
        return out if real is None else out[real]

    def gradients(self, forward: contextlib.AbstractContextManager[Any] | None = None) -> dict[str, Tensor]:
        """The gradients of a weighted sum of the answers, by parameter. The context is around the forward pass alone."""
        for parameter in self.parameters.values():
            parameter.grad = None
        with forward or contextlib.nullcontext():
            out = self.answers().double()
        out.mul(torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)).sum().backward()
        return {name: p.grad.clone() for name, p in self.parameters.items() if p.grad is not None}

    # Rounding

    @property
    def exact(self) -> str:
        """The precision of the reference. Torch has no grouped products of float64, which the experts of gpt-oss need."""
        return "f32" if self.name == "hf_gpt_oss" else "f64"

    @property
    def plainer(self) -> Point:
        """The point of the same function and precision without looking and, where it keeps the function, without a wrapper."""
        wrapper = "none" if self.point["wrapper"] in KEEP_WEIGHTS.split("|") else self.point["wrapper"]
        backend = "auto" if self.name in WITHOUT_BACKENDS.split("|") else "math"
        return {**self.point, "wrapper": wrapper, "look": "nothing", "backend": backend, "checkpointing": "no"}

    def noise(self) -> float:
        """How far rounding moves the answer: the largest of three draws."""
        axes = ("model", "change", "wrapper", "precision", "rows", "mode")
        return _noise(tuple(self.plainer[axis] for axis in axes))

    def same(self, found: Tensor, wanted: Tensor, what: str, error: float = 0.0) -> None:
        """Raise AssertionError unless rounding explains the difference. ``error`` is allowed besides."""
        assert found.shape == wanted.shape, f"{what}: shape {tuple(found.shape)}, not {tuple(wanted.shape)}"
        size = (found.double() - wanted.double()).abs()
        allowed = FACTOR * (self.noise() + self.epsilon * wanted.double().abs()) + 2 * error
        excess = (size - allowed).nan_to_num(torch.inf).flatten()
        worst = int(excess.argmax())
        least = allowed.flatten()[worst]
        assert excess[worst] <= 0, f"{what}: differs by {size.flatten()[worst]:.1e}, and rounding explains {least:.1e}"

    @property
    def epsilon(self) -> float:
        """The relative rounding error of the precision. Our models compute every step of float64 in float64; transformers' do not."""
        if self.point["precision"] == "f64":
            return 2.0**-23 * (SHRINK if self.is_ours else 1.0)
        return 2.0**-23 if self.point["precision"] == "f32" else 2.0**-7


FACTOR = 4.0
SHRINK = 2.0**-20
"""Float64 of our models against the rounding of float32, which ``rounding`` tries at least."""
WITHOUT_BACKENDS = "additive|linear|performer|linformer"
"""Models whose core has one way to compute, and no weights that are the softmax of q·k."""


@functools.lru_cache(maxsize=256)
def _noise(values: tuple[str, ...]) -> float:
    name, change, wrapper, precision, rows, mode = values
    point = {"model": name, "change": change, "wrapper": wrapper, "precision": precision, "rows": rows, "mode": mode}
    backend = "auto" if name in WITHOUT_BACKENDS.split("|") else "math"
    subject = Subject({**point, "backend": backend, "checkpointing": "no", "look": "nothing"})
    inputs = subject.inputs()
    real = subject.real(inputs)

    def answer(inputs: Any) -> Tensor:
        with torch.no_grad():
            return subject.answer(inputs)

    noise = max(rounding(answer, subject.model, inputs, where=real, seed=seed) for seed in range(3))
    return noise * (SHRINK if precision == "f64" and subject.is_ours else 1.0)


def _with_lora(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    is_training = model.training
    with seeded(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped: nn.Module = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.005 * torch.randn(parameter.shape, generator=generator))
    return wrapped.train(is_training)


def _shard(model: nn.Module) -> None:
    """Shard a model as a run with ``trainer.strategy=fsdp`` does, over the one process of a group."""
    from torch.distributed.device_mesh import DeviceMesh

    from minitx.training.sharding import layers_to_shard, parallelize

    parallelize(model, DeviceMesh("cpu", [0]), layers_to_shard(model))
