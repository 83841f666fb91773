"""A pretended accelerator: a device of torch whose tensors hold the CPU's numbers and obey an accelerator's rules.

``register()`` makes ``torch.device("pretend")`` and an accelerator of that name in Lightning's registry. A tensor of the device wraps a
CPU tensor. Three rules differ from the CPU's:

* Tensors of two devices in one operation are an error. As on CUDA, a CPU tensor without dimensions may take part in pointwise
  operations, and an index may be the host's.
* The device has its own default generator. Another device's generator is an error.
* A dtype in ``missing_dtypes`` is an error, as float64 is on Apple's GPU.

It cannot show kernels, streams, speed, memory, several devices, or operations that change a shape in place. The API of torch under it is
experimental, and torch cannot remove the device again: use it in a separate process (``ranks.run_ranks``).
"""

import collections
import contextlib
import copy
import gc
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

NAME = "pretend"
IS_SUPPORTED = torch.__version__ >= (2, 13)
missing_dtypes: set[torch.dtype] = set()

_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
_COPYING = {"to", "_to_copy", "copy_", "_copy_from"}
_libraries: list[torch.library.Library] = []  # a library that is freed takes its kernels along


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
    if func._schema.name[6:] not in _COPYING:
        _check_devices(func, args, tensors)
    is_to_other = func.name() == "aten::to.other"
    target = arguments["other"].device if is_to_other else arguments.get("device")
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
        base, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, base, None), overload or "default", None)
        if op is None:
            continue
        kinds = {argument.name: str(argument.type) for argument in op._schema.arguments}
        makes_one = [str(result.type) for result in op._schema.returns] == ["Tensor"]
        if makes_one and {"device", "pin_memory"} <= kinds.keys() and not any("Tensor" in kind for kind in kinds.values()):
            yield name, op


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
    module.synchronize = lambda device=None: None
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
    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)
    for name, op in _factories():
        with contextlib.suppress(RuntimeError):  # it is made of others that have a kernel
            library.impl(name, _factory(op), "PrivateUse1")
    copy = torch.ops.aten.copy_.default
    library.impl("_copy_from", lambda source, target, non_blocking=False: _run(copy, (target, source), {}), "PrivateUse1")
    library.impl("_pin_memory", lambda tensor, device=None: tensor.clone(), "CPU")
    _register_with_lightning()
    gc.freeze()  # so that _swap_tensors need not walk over all objects each time
    return torch.device(NAME, 0)


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


def with_device(trainer: Any) -> Any:
    """Return a ``TrainerConfig`` with the device. The key ``accelerator`` itself takes the names of Lightning's own devices alone."""
    trainer = copy.copy(trainer)
    object.__setattr__(trainer, "accelerator", NAME)
    return trainer


def on_device(config: Any) -> Any:
    """Return the config of a run on the device."""
    config = copy.copy(config)
    object.__setattr__(config, "trainer", with_device(config.trainer))
    return config
