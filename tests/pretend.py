"""A pretended accelerator: a device of torch whose tensors hold the CPU's numbers and obey an accelerator's rules.

``register()`` makes ``torch.device("pretend")`` and an accelerator of that name in Lightning's registry. A tensor of the device wraps a
CPU tensor. Its rules differ from the CPU's:

* Tensors of two devices in one operation are an error. As on CUDA, a CPU tensor without dimensions may take part in pointwise
  operations, and an index may be the host's.
* The device has its own default generator. Another device's generator is an error.
* What makes the host wait for a device is counted with its place (``waits``): a number that is read, and a size that depends on numbers
  (``read``); a copy to the CPU (``down``); a blocking copy to the device (``up``), such as ``torch.tensor(..., device=)``. A copy from
  page-locked memory with ``non_blocking=True`` is none.
* Autocast has CUDA's lists of operations.
* A dtype in ``missing_dtypes`` is an error: ``like_apple()`` removes float64. After ``like_cuda()``, what CUDA lacks is an error.

It cannot show kernels, streams, speed, memory, several devices, operations that change a shape in place, or storages (``torch.load`` with
``map_location=`` the device). The API of torch under it is
experimental, and torch cannot remove the device again: use it in a separate process (``ranks.run_ranks``).
"""

import collections
import contextlib
import dataclasses
import gc
import os
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

NAME = "pretend"
IS_SUPPORTED = torch.__version__ >= (2, 13)
is_needed = pytest.mark.skipif(not IS_SUPPORTED, reason="the pretended accelerator needs torch 2.13")
missing_dtypes: set[torch.dtype] = set()

_READING = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "equal",
    "is_nonzero",
    "allclose",
    "bincount",
    "_linalg_check_errors",
}
_READING |= {"_unique2", "unique_dim", "unique_consecutive"}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
_COPYING = {"to", "_to_copy", "copy_", "_copy_from"}
_libraries: list[torch.library.Library] = []  # a library that is freed takes its kernels along


# --- waits

Wait = tuple[str, str, str]
"""The kind (``read``, ``down`` or ``up``), torch's operation, and the place: ``minitx/FILE:LINE``, or the innermost frame outside of torch."""

log: collections.Counter[Wait] = collections.Counter()
_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "minitx") + os.sep
_PASSED_OVER = (os.path.dirname(torch.__file__), os.path.abspath(__file__), contextlib.__file__, "<")


@contextlib.contextmanager
def waits() -> Iterator[collections.Counter[Wait]]:
    """Yield a Counter, which holds at the end what made the host wait in the block."""
    before = log.copy()
    counted: collections.Counter[Wait] = collections.Counter()
    yield counted
    counted.update(log - before)


def _count(kind: str, name: str) -> None:
    frame, innermost = sys._getframe(1), ""
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_PACKAGE) and not path.endswith("transfer.py"):  # whose caller is the place
            innermost = f"minitx/{path[len(_PACKAGE) :]}:{frame.f_lineno}"
            break
        if not innermost and not path.startswith(_PASSED_OVER):
            innermost = f"{path}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    log[kind, name, innermost] += 1


# --- what other devices lack

_lacks_what_cuda_lacks = False
_OF_FLOATS = {"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "vdot"}
"""Products, for which CUDA has no kernel of whole numbers."""
_NOT_DETERMINISTIC = {"kthvalue", "histc", "nll_loss2d_forward", "ctc_loss", "put_", "adaptive_avg_pool2d_backward"}
_NOT_DETERMINISTIC |= {"reflection_pad1d_backward", "upsample_bilinear2d_backward", "replication_pad2d_backward"}
"""What has no deterministic kernel of CUDA (torch.use_deterministic_algorithms); cumsum of floating-point numbers has none either."""


def like_apple() -> None:
    """From now on, the device has no float64."""
    from minitx.nn.precision import widest_float

    missing_dtypes.add(torch.float64)
    widest_float.cache_clear()


def like_cuda() -> None:
    """From now on, operations without a kernel of CUDA are an error."""
    global _lacks_what_cuda_lacks
    _lacks_what_cuda_lacks = True


def _check_kernel(name: str, tensors: list[Tensor]) -> None:
    is_whole = bool(tensors) and not (tensors[0].is_floating_point() or tensors[0].is_complex())
    if (name in _OF_FLOATS and is_whole) or name in ("histogram", "mkldnn_convolution"):
        raise NotImplementedError(f"{name} has no kernel of CUDA for {tensors[0].dtype}")
    is_deterministic = name not in _NOT_DETERMINISTIC and (name != "cumsum" or is_whole)
    if torch.are_deterministic_algorithms_enabled() and not is_deterministic:
        raise RuntimeError(f"{name} does not have a deterministic implementation on CUDA")


# --- random numbers

_TorchGenerator = torch._C.Generator
_generators: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""The device's generators by address: a kernel gets another Python object of the same generator."""
default_generator = _TorchGenerator("cpu")


class _GeneratorType(type(_TorchGenerator)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: object) -> bool:
        return type.__instancecheck__(_TorchGenerator, instance)


class Generator(_TorchGenerator, metaclass=_GeneratorType):  # type: ignore[misc]
    """``torch.Generator`` with support for the pretended device."""

    def __new__(cls, device: Any = "cpu") -> Any:
        if torch.device(device).type != NAME:
            return _TorchGenerator(device)
        generator = _TorchGenerator.__new__(cls, "cpu")
        _generators[generator._cdata] = generator
        return generator

    @property
    def device(self) -> torch.device:
        return torch.device(NAME, 0)


@contextlib.contextmanager
def _drawing(name: str, generator: Any) -> Iterator[None]:
    """A context that lends the device's default generator to the CPU, if ``generator`` is None."""
    if generator is not None:
        if generator._cdata not in _generators:
            raise RuntimeError(f"Expected a '{NAME}' device type for generator but found 'cpu' ({name})")
        yield
        return
    of_host = torch.default_generator.get_state()
    torch.default_generator.set_state(default_generator.get_state())
    try:
        yield
    finally:
        default_generator.set_state(torch.default_generator.get_state())
        torch.default_generator.set_state(of_host)


# --- tensors


class DeviceTensor(Tensor):
    """A tensor of the pretended device. ``on_cpu`` holds its numbers."""

    on_cpu: Tensor

    @staticmethod
    def __new__(cls, on_cpu: Tensor) -> Any:
        if on_cpu.dtype in missing_dtypes:
            raise TypeError(f"{NAME} has no {on_cpu.dtype}")
        options = {"dtype": on_cpu.dtype, "layout": on_cpu.layout, "device": torch.device(NAME, 0), "requires_grad": False}
        shape = on_cpu.size(), on_cpu.stride(), on_cpu.storage_offset()
        tensor = Tensor._make_wrapper_subclass(cls, *shape, **options)  # type: ignore[attr-defined]
        tensor.on_cpu = on_cpu
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:
        return f"{self.on_cpu!r} on {NAME}:0"

    def tolist(self) -> Any:
        _count("read", "tolist")
        return self.on_cpu.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError(f"can't convert {NAME}:0 device type tensor to numpy. Use Tensor.cpu() first")
        return self.detach().cpu().numpy()

    def __array__(self, *_: Any, **__: Any) -> Any:
        return self.numpy()

    def data_ptr(self) -> int:
        return self.on_cpu.data_ptr()

    def untyped_storage(self) -> Any:
        return self.on_cpu.untyped_storage()

    def _with_data(self, on_cpu: Tensor) -> Any:
        """Return a tensor with other numbers and this one's attributes: a parameter, if this is one."""
        tensor = DeviceTensor(on_cpu)
        tensor.__dict__.update({name: value for name, value in self.__dict__.items() if name != "on_cpu"})
        return tensor.requires_grad_(self.requires_grad)

    @property
    def data(self) -> Any:
        return DeviceTensor(self.on_cpu.detach())

    @data.setter
    def data(self, new: Tensor) -> None:
        torch.utils.swap_tensors(self, self._with_data(new.to(NAME).on_cpu.detach()))  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if not self.is_leaf:
            raise RuntimeError("Only Tensors created explicitly by the user support the deepcopy protocol at the moment")
        return memo.setdefault(id(self), self._with_data(self.on_cpu.detach().clone()))

    def __reduce_ex__(self, protocol: Any) -> Any:
        if getattr(self, "_is_param", False):
            return torch._utils._rebuild_parameter, (self.detach(), self.requires_grad, collections.OrderedDict())
        _count("down", "pickle")
        arguments = (self.on_cpu.detach(), self.dtype, str(self.device), self.requires_grad)
        return torch._utils._rebuild_device_tensor_from_cpu_tensor, arguments


# --- operations


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    return type(value)(_mapped(change, each) for each in value) if isinstance(value, list | tuple) else change(value)


def _on_cpu(value: Any) -> Any:
    return value.on_cpu if isinstance(value, DeviceTensor) else value


def _check_devices(func: Any, args: Any, tensors: list[Tensor]) -> None:
    name = func._schema.name[6:]
    indices = [*_tensors(args[1:2])] if name in _INDEXING and isinstance(args[0], DeviceTensor) else []
    takes_scalars = torch.Tag.pointwise in func.tags or name.startswith("_foreach") or bool(indices)
    for tensor in tensors:
        is_index = any(tensor is index for index in indices)
        if not (isinstance(tensor, DeviceTensor) or is_index or (takes_scalars and tensor.dim() == 0)):
            found = f"found at least two devices, {NAME}:0 and cpu"
            raise RuntimeError(f"Expected all tensors to be on the same device, but {found} ({func.name()})")


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Compute an operation of torch on the CPU."""
    names = [argument.name for argument in func._schema.arguments]
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    tensors = [*_tensors(arguments.values())]
    base = func._schema.name[6:]
    if base not in _COPYING:
        _check_devices(func, args, tensors)
    if _lacks_what_cuda_lacks:
        _check_kernel(base, tensors)
    if base == "_pin_memory":
        raise RuntimeError(f"cannot pin a tensor of {NAME}: only dense CPU tensors can be pinned")
    is_to_other = func.name() == "aten::to.other"
    target = arguments["other"].device if is_to_other else arguments.get("device")
    _count_waits(func, base, args, arguments, target)
    on_cpu = {name: _mapped(_on_cpu, value) for name, value in arguments.items() if name != "pin_memory"}
    if arguments.get("device") is not None:
        on_cpu["device"] = torch.device("cpu")
    draws = torch.Tag.nondeterministic_seeded in func.tags
    with torch.no_grad(), _drawing(func.name(), kwargs.get("generator")) if draws else contextlib.nullcontext():
        result = func(**on_cpu)
    known = {id(_on_cpu(tensor)): tensor for tensor in tensors}  # results of operations in place
    aliases = [argument.alias_info for argument in func._schema.arguments]
    is_view = any(alias is not None and not alias.is_write for alias in aliases)
    is_inference = tensors[0].is_inference() if is_view else torch.is_inference_mode_enabled()

    def wrapped(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if target is not None and torch.device(target).type != NAME:
            return value.clone() if id(value) in known else value
        with torch.inference_mode(is_inference):
            tensor = known[id(value)] if id(value) in known else DeviceTensor(value)
        if tensor.shape != value.shape or tensor.stride() != value.stride():
            raise NotImplementedError(f"{func.name()} changes a shape in place")
        return tensor

    return _mapped(wrapped, result)


def _count_waits(func: Any, base: str, args: Any, arguments: dict[str, Any], target: Any) -> None:
    name = func.name()[6:]
    indices = [*_tensors(args[1:2])] if base in _INDEXING else []
    by_mask = any(index.dtype in (torch.bool, torch.uint8) for index in indices)
    if base in _READING or by_mask or name == "repeat_interleave.Tensor":
        _count("read", name)
    for index in indices:
        if isinstance(args[0], DeviceTensor) and not isinstance(index, DeviceTensor):
            _count("up", name)
    from_host = base == "copy_" and not isinstance(args[1], DeviceTensor)
    to_host = base == "copy_" and not isinstance(args[0], DeviceTensor)
    if to_host or (base in _COPYING and target is not None and torch.device(target).type != NAME):
        _count("down", name)
    elif from_host and not (arguments.get("non_blocking") and hasattr(args[1], "is_page_locked")):
        _count("up", name)


def _factory(op: Any) -> Callable[..., DeviceTensor]:
    """A kernel that makes a tensor on the device: ``torch.zeros`` and the like."""
    draws = torch.Tag.nondeterministic_seeded in op.tags

    def kernel(*args: Any, **kwargs: Any) -> DeviceTensor:
        with _drawing(op.name(), kwargs.get("generator")) if draws else contextlib.nullcontext():
            return DeviceTensor(op(*args, **{**kwargs, "device": torch.device("cpu"), "pin_memory": None}))

    return kernel


def _factories() -> Iterator[tuple[str, Any]]:
    """The operations that have a device as an argument and no tensor."""
    others = ("sparse", "quantized", "cudnn", "mkldnn", "nested", "_make_dep_token", "from_file")
    for full_name in torch._C._dispatch_get_all_op_names():
        namespace, _, name = full_name.partition("::")
        if namespace != "aten" or any(other in name for other in others):
            continue
        op = _operation(name)
        if op is None:
            continue
        kinds = {argument.name: str(argument.type) for argument in op._schema.arguments}
        makes_one = [str(result.type) for result in op._schema.returns] == ["Tensor"]
        if makes_one and {"device", "pin_memory"} <= kinds.keys() and not any("Tensor" in kind for kind in kinds.values()):
            # a tensor without memory would be one for the CPU alone
            yield name, torch.ops.aten.zeros.default if name == "_efficientzerotensor" else op


def _operation(name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base, None), overload or "default", None)


# --- autocast: the lists of CUDA (ATen/autocast_mode.h)

_NARROW = (
    "_convolution convolution conv1d conv2d conv3d prelu addmm addmv addr matmul mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul "
    "linalg_multi_dot scaled_dot_product_attention"
)
_WIDE = (
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus "
    "layer_norm native_layer_norm group_norm cosine_similarity nll_loss nll_loss_nd nll_loss2d kl_div l1_loss smooth_l1_loss huber_loss "
    "mse_loss binary_cross_entropy_with_logits dist cdist renorm logsumexp prod prod.dim_int cumprod cumsum sum sum.dim_IntList softmax.int "
    "log_softmax.int linalg_vector_norm linalg_matrix_norm norm.Scalar norm.ScalarOpt_dim"
)
_WIDEST = "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add cat stack"


def _under_autocast(op: Any, kind: str) -> Callable[..., Any]:
    """A kernel that casts its arguments as CUDA's autocast does: to autocast's dtype, to float32, or to the widest of them."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtypes = [tensor.dtype for tensor in _tensors(args) if tensor.is_floating_point()]
        widest = torch.float32 if torch.float32 in dtypes or not dtypes else dtypes[0]
        dtype = {"narrow": torch.get_autocast_dtype(NAME), "wide": torch.float32, "widest": widest}[kind]

        def cast(value: Any) -> Any:
            fits = isinstance(value, Tensor) and value.device.type == NAME and value.is_floating_point()
            return value.to(dtype) if fits and value.dtype != torch.float64 else value

        with torch._C._DisableAutocast():
            return op(
                *(_mapped(cast, value) for value in args), **{name: _mapped(cast, value) for name, value in kwargs.items()}
            )

    return kernel


# --- registering

_torch_swap_tensors = torch.utils.swap_tensors


def _swap_tensors(first: Tensor, second: Tensor) -> None:
    if max(first._use_count(), second._use_count()) > 1:  # type: ignore[attr-defined]
        gc.collect()  # a graph that is part of a cycle holds it
    _torch_swap_tensors(first, second)


def _module() -> types.ModuleType:
    """Return ``torch.pretend``."""
    module: Any = types.ModuleType(f"torch.{NAME}")
    module.is_available = module.is_initialized = lambda: True
    module.device_count, module.current_device, module.set_device = lambda: 1, lambda: 0, lambda device: None
    module._is_in_bad_fork, module._initialized, module.device = lambda: False, True, lambda index: contextlib.nullcontext()
    module.synchronize = lambda device=None: _count("read", "synchronize")
    module.manual_seed = module.manual_seed_all = default_generator.manual_seed
    module.get_rng_state = lambda device=None: default_generator.get_state()
    module.set_rng_state = lambda state, device=None: default_generator.set_state(state)
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    return module


def register() -> torch.device:
    """Make the device, once a process and before its first backward pass, and return it."""
    if _libraries:
        return torch.device(NAME, 0)
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(NAME, backend_module=_module())
    torch.Generator, torch.utils.swap_tensors = Generator, _swap_tensors  # type: ignore[misc]
    torch.__future__.set_swap_module_params_on_conversion(True)  # module.to() makes another kind of tensor of a parameter
    library, fallback = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
    _libraries.extend((library, fallback))
    for name, op in _factories():
        with contextlib.suppress(RuntimeError):  # it is made of others that have a kernel
            library.impl(name, _factory(op), "PrivateUse1")
    copy = torch.ops.aten.copy_.default
    library.impl(
        "_copy_from", lambda source, target, non_blocking=False: _run(copy, (target, source, non_blocking), {}), "PrivateUse1"
    )
    library.impl("_pin_memory", _page_locked, "CPU")
    fallback.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for kind, words in {"narrow": _NARROW, "wide": _WIDE, "widest": _WIDEST}.items():
        for name in words.split():
            library.impl(name, _under_autocast(_operation(name), kind), "AutocastPrivateUse1")
    _register_with_lightning()
    gc.freeze()  # so that _swap_tensors need not walk over all objects each time
    return torch.device(NAME, 0)


def _page_locked(tensor: Tensor, device: Any = None) -> Tensor:
    copy: Any = tensor.clone()
    copy.is_page_locked = True
    return copy


def _register_with_lightning() -> None:
    from lightning.pytorch.accelerators import Accelerator, AcceleratorRegistry

    class PretendAccelerator(Accelerator):
        def setup_device(self, device: torch.device) -> None: ...

        def teardown(self) -> None: ...

        def get_device_stats(self, device: Any) -> dict[str, Any]:
            return {}

        @staticmethod
        def parse_devices(devices: Any) -> int:
            return int(devices)

        @staticmethod
        def get_parallel_devices(devices: int) -> list[torch.device]:
            return [torch.device(NAME, index) for index in range(devices)]

        @staticmethod
        def auto_device_count() -> int:
            return 1

        @staticmethod
        def is_available() -> bool:
            return True

        @staticmethod
        def name() -> str:
            return NAME

    AcceleratorRegistry.register(NAME, PretendAccelerator)


def on_device(config: Any) -> Any:
    """Return the config of a run on the device."""
    return dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, accelerator=NAME))
