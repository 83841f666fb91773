"""The catalogue of ``twin``: changes of a reference that reproduce mistakes in a port, with numbers measured in both."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import permutations, product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitx.check.tensor_trace import LOW, Change, Function, Site, Step, Trace, matched, pattern

CLOSE = 1e-6
"""The largest relative error of a measured relation."""

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
    "relu": F.relu,
    "squared relu": lambda x: F.relu(x).square(),
}
SUMS = {"add", "__add__", "__iadd__", "add_", "__radd__"}


class Pair:
    """A call of the port and a call of the reference.

    Attributes:
        is_matched: for each step of the port, whether the reference has it. is_shared: the reverse.
        leaves: the steps in and out of the modules of the reference without children, by path.
        suspects: the paths of those whose input the port has, but not their output, the first of all layers.
        near: numbers of steps of the port and of the reference around the place where they differ.
    """

    def __init__(self, port: Trace, reference: Trace, model: nn.Module) -> None:
        self.port, self.reference = port, reference
        self.modules: dict[str, Any] = dict(model.named_modules())
        self.is_matched, self.is_shared = matched(port.steps, reference.steps), matched(reference.steps, port.steps)
        self.leaves: dict[str, tuple[Step, Step]] = {}
        self.suspects: dict[str, str] = {}
        inner: dict[str, tuple[Step, bool]] = {}
        for step, is_shared in zip(reference.steps, self.is_shared.tolist(), strict=True):
            if step.kind == "in":
                inner[step.key] = step, is_shared
            elif step.kind == "out" and step.path in inner and not list(self.modules[step.path].children()):
                self.leaves.setdefault(step.path, (inner[step.path][0], step))
                if inner[step.path][1] and not is_shared:
                    self.suspects.setdefault(pattern(step.path), step.path)
        lasts = [max([0, *found.nonzero().flatten().tolist()]) for found in (self.is_matched, self.is_shared)]
        self.near = [slice(max(0, last - 60), last + 60) for last in lasts]
        self.sites = list(zip(reference.sites, port.sites, strict=False))

    def alike(self, path: str) -> list[Any]:
        """Return the modules at the same place of all layers."""
        return [module for name, module in self.modules.items() if pattern(name) == pattern(path)]


# --- attention


@dataclass(frozen=True)
class Rotation:
    """A rotation of queries or keys (B, H, L, D).

    Attributes:
        order: the dimensions that are rotated: the first with the second, the third with the fourth, and so on.
        table: complex (L, len(order)/2), the factors.
    """

    order: Tensor
    table: Tensor

    def __str__(self) -> str:
        f = torch.angle(self.table[2] * self.table[1].conj())
        if f.abs().max() < CLOSE:
            return "no rotation"
        base = float((f[1] / f[0]).abs()) ** -len(f) if len(f) > 1 else 1.0
        is_plain = torch.allclose(f, f[0] * base ** (-torch.arange(len(f)).to(f) / len(f)), rtol=1e-3)
        words = f"theta {_number(base)}" if is_plain else f"frequencies {', '.join(map(_number, f[:4].tolist()))}"
        words += f", angles times {_number(float(f[0]))}" if is_plain and abs(f[0] - 1) > 1e-5 else ""
        start = float(torch.angle(self.table[1])[0] / f[0]) - 1
        words += f", positions from {_number(start)}" if abs(start) > 1e-5 else ""
        pairs = "pairs (2i, 2i + 1)" if self.order[1] == 1 else f"halves (i, i + {len(f)})"
        return f"rotation of {pairs} in {2 * len(f)} dimensions, {words}"

    def apply(self, x: Tensor, table: Tensor) -> Tensor:
        """Multiply the pairs of dimensions of (B, H, L, D), as complex numbers, by other factors."""
        y = x.clone()
        y[..., self.order] = torch.view_as_real(_complex(x, self.order) * table).flatten(-2).to(x.dtype)
        return y

    @staticmethod
    def between(before: Tensor, after: Tensor) -> Rotation | None:
        """Return the rotation from one tensor to another, perhaps with the pairs in the other layout afterwards, or None."""
        D = before.shape[-1]
        for part in [part for part in (1, 2, 4) if D % (2 * part) == 0]:
            places, rest = torch.arange(D // part, device=before.device), slice(D // part, D)
            for one, two in product((places.view(2, -1).mT.flatten(), places), repeat=2):
                z, w = _complex(before, one), _complex(after, two)
                table = (w * z.conj()).sum((0, 1)) / z.abs().square().sum((0, 1))
                if _is_close(z * table, w) and (part == 1 or _is_close(before[..., rest], after[..., rest])):
                    return Rotation(one, table)
        return None

    @staticmethod
    def of(trace: Trace, site: Site, after: Tensor) -> Rotation:
        """Return the rotation of the queries or keys of an attention. Without one, the angles are zero."""
        after = after[:, _distinct(after)]
        H, L, D = after.shape[1:]
        places = torch.arange(D, device=after.device)
        found = [Rotation(places, torch.ones(L, D // 2, dtype=torch.complex128, device=after.device))]
        for step in trace.steps[: site.start]:
            if step.value.shape[-1] == H * D:
                before = step.value.unflatten(-1, (H, D)).transpose(1, 2)
                ratio = after.norm(dim=-1) / before.norm(dim=-1)
                if _is_close(ratio, ratio.mean()) and not _is_close(before * ratio.mean(), after):
                    found += filter(None, [Rotation.between(before, after)])
        return min(found[1:] or found, key=lambda rotation: float(torch.angle(rotation.table[0]).abs().max()))  # not (-b, a)


def _complex(x: Tensor, order: Tensor) -> Tensor:
    return torch.view_as_complex(x.double()[..., order].unflatten(-1, (-1, 2)))


def rotary(pair: Pair) -> Iterator[Change]:
    """The rotation of the port."""
    found: dict[tuple[str, int], list[Rotation]] = {}
    for sites, name in product(pair.sites, ("query", "key")):
        sides = zip((pair.reference, pair.port), sites, strict=True)
        found[name, sites[0].number] = [Rotation.of(trace, site, getattr(site, name)) for trace, site in sides]

    def turn(name: str, site: Site, args: tuple, x: Tensor) -> Tensor:
        ours, theirs = found[name, site.number]
        size = ours.table.abs().mean() / theirs.table.abs().mean()  # a scale of queries is one of scores
        return theirs.apply(ours.apply(x, 1 / ours.table), theirs.table * size)

    words = {name: [str(rotation) for rotation in both] for (name, number), both in found.items() if number == 0}
    if differ := [name for name, (one, two) in words.items() if one != two]:
        text = "{1}; in the reference {0}".format(*words[differ[0]]) + f" ({differ[0]} only)" * (len(differ) == 1)
        yield Change("rotary", text, {name: partial(turn, name) for name in words})


def visible(pair: Pair) -> Iterator[Change]:
    """The keys that the port sees."""
    both = [(ours.number, theirs.visible, ours.visible) for ours, theirs in pair.sites]
    seen = {number: (one, two) for number, one, two in both if not torch.equal(one, two)}

    def scores(site: Site, args: tuple, x: Tensor) -> Tensor:
        if site.number not in seen:
            return x
        fit = _fit(site.raw[x > LOW], x[x > LOW])
        return x.where(x > LOW, _capped(site.raw, *fit) if fit else site.whole).where(seen[site.number][0], -torch.inf)

    if seen:
        words = [_reach(side) for side in next(iter(seen.values()))]
        where = f" (in attention {', '.join(map(str, seen))})" if len(seen) < len(pair.sites) else ""
        yield Change("visible", "a token sees {}; in the reference {}".format(*words) + where, {"scores": scores})


def _reach(seen: Tensor) -> str:
    distance = torch.stack(seen.nonzero(as_tuple=True)).diff(dim=0)
    back, ahead, last = -int(distance.min()), int(distance.max()), len(seen) - 1
    words = ["all tokens before it" if back == last else f"{back} tokens before it", "itself" if seen.diagonal().any() else ""]
    return " and ".join(filter(None, [*words, "" if ahead < 1 else "all after it" if ahead == last else f"{ahead} after it"]))


def scales(pair: Pair) -> Iterator[Change]:
    """The scale and the soft-cap of the scores and of the logits."""
    sides = [("logits", 1, pair.reference.raw, pair.reference.output, pair.port.output)]
    for site, other in pair.sites[:1]:
        sides.insert(0, ("scores", site.query.shape[-1], site.raw, site.scores, other.scores))
    for what, width, raw, *both in sides:
        if {side.shape for side in both} == {raw.shape}:
            is_seen = (both[0] > LOW) & (both[1] > LOW)
            ours, theirs = (_fit(raw[is_seen], side[is_seen]) for side in both)
            if ours and theirs and (text := _scale_text(what, width, *ours, *theirs)):
                change = lambda owner, args, x, fit=theirs: _capped(owner.raw, *fit).where(x > LOW, x)  # noqa: E731
                scaled = {"raw": partial(_combined, [theirs[0] / ours[0]])}
                yield Change(*text, scaled if text[0] == "scale" else {"scores" if what == "scores" else "": change})


def _fit(x: Tensor, y: Tensor) -> tuple[float, float] | None:
    """Return (c, t) with y = t · tanh(c · x / t), or None."""
    x, y = x.flatten().double(), y.flatten().double()
    x, y = x[is_large := x.abs() > 1e-3 * x.abs().max()], y[is_large]

    def spread(cap: float) -> tuple[float, float]:
        part = y.abs() < 0.9 * cap  # the others say little about c
        ratio = (y if cap == torch.inf else cap * torch.atanh(y / cap))[part] / x[part]
        return (float((ratio / ratio.median() - 1).abs().median()), float(ratio.median())) if len(ratio) > 3 else (9.0, 1.0)

    if not len(x):
        return None
    best, step = torch.inf, 1.1
    if not _is_close(x * spread(best)[1], y):
        best = min([float(y.abs().max()) * 1.0001 * step**n for n in range(100)], key=lambda cap: spread(cap)[0])
        for _ in range(60):
            best = min((best / step, best, best * step), key=lambda cap: spread(cap)[0])
            step = step**0.75
    factor = spread(best)[1]
    return (factor, best) if _is_close(_capped(x, factor, best), y) else None


def _capped(x: Tensor, factor: float, cap: float) -> Tensor:
    return x * factor if cap == torch.inf else cap * torch.tanh(x * factor / cap)


def _scale_text(what: str, width: int, c: float, cap: float, factor: float, other: float) -> tuple[str, str] | None:
    if abs((factor := factor / c) - 1) > CLOSE:
        names = {width**0.5: " (√d_k)", width**-0.5: " (1/√d_k)"}
        name = next((name for value, name in names.items() if width > 1 and abs(factor / value - 1) < 1e-5), "")
        return "scale" if what == "scores" else "multiplier", f"{what} are {_number(factor)}{name} times the reference's"
    words = ["no soft-cap" if t == torch.inf else f"a soft-cap of {_number(t)}" for t in (other, cap)]
    return ("soft-cap", f"{what} have {words[0]}, in the reference {words[1]}") if words[0] != words[1] else None


def heads(pair: Pair) -> Iterator[Change]:
    """The order of heads, and their axis."""
    for site in pair.reference.sites[:1]:
        distinct, H = _distinct(site.key), site.key.shape[1]
        if 1 < (G := len(distinct)) < H:
            orders = [("tiled", torch.arange(H) % G * (H // G)), ("repeated one by one", torch.arange(H) // (H // G))]
            (word, order), (other, _) = orders[::-1] if distinct == list(range(G)) else orders
            for names in (("key", "value"), ("key",), ("value",)):
                text = f"{' and '.join(names)} heads are {word}, in the reference {other}"
                yield Change("head-order", text, dict.fromkeys(names, lambda site, args, x, order=order: x[:, order]))
    split = dict.fromkeys(("query", "key", "value"), lambda site, args, x: x.transpose(1, 2).reshape(x.shape))
    merged = {"merged": lambda site, args, x: x.reshape(x.transpose(1, 2).shape).transpose(1, 2)}
    for word, outputs in (("split", split), ("merged", merged)):
        yield Change("head-merge", f"heads are {word} by a reshape without transpose(1, 2)", outputs)


def _distinct(x: Tensor) -> list[int]:
    """Return the heads that no earlier head equals."""
    return [h for h in range(x.shape[1]) if not any(torch.equal(x[:, h], x[:, i]) for i in range(h))]


# --- modules


def features(pair: Pair) -> Iterator[Change]:
    """The order of the features of projections with the same input."""
    groups: dict[tuple[float, ...], list[str]] = {}
    for path, (inner, _) in pair.leaves.items():
        if max((p.dim() for p in pair.modules[path].parameters()), default=0) == 2 and inner.value.shape[-1] > 1:
            groups.setdefault(tuple(inner.marks.flatten().tolist()), []).append(path)
    for group in {tuple(map(pattern, group)): group for group in reversed(groups.values())}.values():
        sizes = [pair.leaves[path][1].value.shape[-1] for path in group]
        fused = {module: modules for modules in zip(*map(pair.alike, group), strict=False) for module in modules}
        for id, text, order in _orders(pair, sum(sizes)):
            change = partial(_reordered, fused, sizes, order)
            yield Change(id, f"{' and '.join(group)}: {text}", dict.fromkeys(fused, change))


def _reordered(fused: dict[Any, tuple], sizes: list[int], order: Tensor, module: Any, args: tuple, out: Tensor) -> Tensor:
    features = torch.cat([one.forward(*args) for one in fused[module]], -1)
    return features[..., order].split(sizes, -1)[fused[module].index(module)]


def _orders(pair: Pair, total: int) -> Iterator[tuple[str, str, Tensor]]:
    """Orders of the features of fused projections."""
    places = torch.arange(total)
    for site in pair.reference.sites[:1]:
        H, D, G = site.query.shape[1], site.query.shape[3], len(_distinct(site.key))
        if total == (H + 2 * G) * D:
            by_head = places.view(G, -1, D).split([H // G, 1, 1], 1)
            layouts = {"(3, heads)": places.split([H * D, G * D, G * D]), "(heads, 3)": [part.flatten() for part in by_head]}
            for (one, ours), (two, theirs), order in product(layouts.items(), layouts.items(), permutations(range(3))):
                read = [theirs[i] for i in order]
                if [*map(len, read)] == [*map(len, ours)] and not torch.equal(torch.cat(read), torch.cat(list(ours))):
                    text = f"read as {', '.join('qkv'[i] for i in order)} of {two}, in the reference as q, k, v of {one}"
                    yield "split-order", text, torch.cat(read)[torch.cat(list(ours)).argsort()]
    if total % 2 == 0:
        yield "gate-order", "the halves are swapped", places.roll(total // 2)
        yield "gate-order", "the features are interleaved, in the reference in halves", places.view(-1, 2).T.flatten()
        yield "gate-order", "the features are in halves, in the reference interleaved", places.view(2, -1).T.flatten()


def modules(pair: Pair) -> Iterator[Change]:
    """Other numbers in a module, another module in its place, or none."""
    tables = {pattern(path): path for path, module in pair.modules.items() if isinstance(module, nn.Embedding)}
    for path in (pair.suspects | tables).values():
        for scope, (id, text, function) in product(_scopes(pair, path), _variants(pair, path, list(tables.values()))):
            yield Change(id, f"{path}: {text}", dict.fromkeys(scope, function))
        layer, (_, shapes) = re.match(r"\D*\d+\.", path), _kind(pair.modules[path])
        for other in [other for other in pair.leaves if layer and shapes and other.startswith(layer[0]) and other != path]:
            if shapes == _kind(pair.modules[other])[1]:
                given = dict(zip(pair.alike(path), pair.alike(other), strict=False))
                for text, sources in (("and {} are swapped", {b: a for a, b in given.items()} | given), ("is {}", given)):
                    change = lambda module, args, out, sources=sources: sources[module].forward(*args)  # noqa: E731
                    yield Change("swapped-weights", f"{path} {text.format(other)}", dict.fromkeys(sources, change))


def _scopes(pair: Pair, path: str) -> list[list[Any]]:
    """Modules with the same mistake: of the same kind, of these those in layers, those at the same place."""
    if not _is_norm(pair, path):
        return [pair.alike(path)]
    kin = [m for m in pair.modules.values() if _kind(m) == _kind(pair.modules[path])]
    layers = [m for name, m in pair.modules.items() if m in kin and "*" in pattern(name)]
    return [scope for scope in (kin, layers, pair.alike(path)) if scope]


def _is_norm(pair: Pair, path: str) -> bool:
    steps, shapes = pair.leaves.get(path), {p.shape for p in pair.modules[path].parameters()}
    return steps is not None and steps[0].value.shape == steps[1].value.shape and len(shapes) == 1 == len(next(iter(shapes)))


def _kind(module: nn.Module) -> tuple[type, list[torch.Size]]:
    return type(module), [p.shape for p in module.parameters()]


def with_values(module: nn.Module, args: tuple, **values: Any) -> Tensor:
    """Return the output of a module with other parameters or attributes, which it loses afterwards."""
    with ExitStack() as stack:
        for name, value in values.items():
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, nn.Parameter(value) if isinstance(value, Tensor) else value)
        return module.forward(*args)


def _variants(pair: Pair, path: str, tables: list[str]) -> Iterator[tuple[str, str, Function]]:
    """Other outputs of a module."""
    module, parameters = pair.modules[path], dict(pair.modules[path].named_parameters(recurse=False))
    if path in tables:
        for n in (1, 2, -1, -2) if len(tables) > 1 else ():
            shift = lambda m, args, out, n=n: m.forward((args[0] + n).clamp(0, m.num_embeddings - 1))  # noqa: E731
            yield "position-offset", f"the rows are read {n:+d} further", shift
        return
    for name in tables:
        if (table := pair.modules[name].weight).shape == getattr(parameters.get("weight"), "shape", None):
            yield "tying", f"has the weights of {name}", lambda m, args, out, table=table: with_values(m, args, weight=table)
    if parameters.get("bias") is not None:
        zero = torch.zeros_like(parameters["bias"])
        yield "bias-missing", "the bias is not added", lambda m, args, out: with_values(m, args, bias=zero)
    if _is_norm(pair, path):
        yield "norm-missing", "missing", lambda m, args, out: args[0]
        yield from _norms(pair, module, next(iter(parameters)))


def _norms(pair: Pair, module: Any, weight: str) -> Iterator[tuple[str, str, Function]]:
    for n, text in ((1, "1 + weight, in the reference by weight"), (-1, "weight, in the reference by 1 + weight")):
        change = lambda m, args, out, n=n: with_values(m, args, **{weight: getattr(m, weight) + n})  # noqa: E731
        yield "norm-weight", f"the norm multiplies by {text}", change
    centred = lambda m, args, out: m.forward(args[0] - args[0].mean(-1, keepdim=True), *args[1:])  # noqa: E731
    yield "norm-kind", "the norm subtracts the mean, unlike in the reference", centred
    name, eps = next(((k, v) for k, v in vars(module).items() if isinstance(v, float) and 0 <= v < 0.01), ("", 0.0))
    for other in [10.0**-n for n in range(2, 13) if name and 10.0**-n != eps]:
        change = lambda m, args, out, other=other: with_values(m, args, **{name: other})  # noqa: E731
        yield "norm-eps", f"eps is {other:.0e}, in the reference {eps:.0e}", change
    D = pair.reference.sites[0].query.shape[-1] if pair.reference.sites else 1

    def over_others(m: Any, args: tuple, out: Tensor) -> Tensor:
        square = args[0].square()
        heads = [axis for axis in range(1, square.dim() - 1) if square.shape[axis] != pair.reference.L]
        by_head = square.unflatten(-1, (-1, D)).mean(-1).repeat_interleave(D, -1)
        other = square.mean((*heads, -1), keepdim=True) if heads else by_head
        return out * ((square.mean(-1, keepdim=True) + eps) / (other + eps)).sqrt()

    words = ["all heads", "each head"] if len(getattr(module, weight)) == D else ["each head", "all heads"]
    yield "norm-heads", "the norm is over {}, in the reference over {}".format(*words), over_others


def norm_order(pair: Pair) -> Iterator[Change]:
    """Norms of queries and keys after their rotation."""
    kinds = [_scopes(pair, path)[0] for path in pair.suspects.values() if _is_norm(pair, path)]
    for norms in [norms for norms in kinds if len(norms) == 2 * len(pair.sites)]:
        late = {name: partial(_late, norms[n::2]) for n, name in enumerate(("query", "key"))}
        text = "norms of queries and keys are after the rotation"
        yield Change("norm-order", text, late | dict.fromkeys(norms, lambda m, args, out: args[0]))


def _late(norms: list[Any], site: Site, args: tuple, x: Tensor) -> Tensor:
    return norms[site.number].forward(x)


def activations(pair: Pair) -> Iterator[Change]:
    """Another activation."""
    done: set[str] = set()
    for step, is_shared in zip(pair.reference.steps, pair.is_shared.tolist(), strict=True):
        x = pair.reference.flat(step.args[0]) if step.args and step.kind in ("out", "gelu", "silu", "relu") else None
        names = [] if x is None else [name for name, f in ACTIVATIONS.items() if _is_close(f(x), step.value)]
        if names and not is_shared and step.key not in done:
            done.add(step.key)
            places = pair.alike(step.path) if step.kind == "out" else [step.key]
            for name in [name for name in ACTIVATIONS if name not in names]:
                hook = lambda owner, args, out, f=ACTIVATIONS[name]: f(args[0])  # noqa: E731
                text = f"the activation is {name}, in the reference {names[0]}"
                yield Change("activation", text, dict.fromkeys(places, hook))


def multipliers(pair: Pair) -> Iterator[Change]:
    """A sum with other factors, or an output times a constant."""
    done: set[str] = set()
    for step, is_shared in list(zip(pair.reference.steps, pair.is_shared.tolist(), strict=True))[pair.near[1]]:
        is_table = isinstance(pair.modules.get(step.key), nn.Embedding)
        if step.key in done or step.kind == "in" or (is_shared and not is_table):
            continue
        done.add(step.key)
        is_sum = step.kind in SUMS and all(isinstance(term, Tensor) for term in step.args[:2])
        terms = torch.broadcast_tensors(*step.args[:2]) if is_sum else [step.value]
        flats = [flat.flatten() for term in terms if (flat := pair.reference.flat(term)) is not None]
        columns, found = torch.stack(flats, 1), dict[str, list[float]]()
        for other in [other.value for other in pair.port.steps[pair.near[0]] if other.value.shape == step.value.shape]:
            factors = torch.linalg.lstsq(columns, other.reshape(-1, 1)).solution.flatten()
            factors = factors.where(factors.abs() > CLOSE * factors.abs().max(), 0.0)
            is_other = factors.norm() > 1e-3 and not _is_close(factors, torch.ones_like(factors))
            if is_other and _is_close(columns @ factors, other.flatten()):
                a, b = [_number(factor) for factor in (*factors.tolist(), 0.0)[:2]]
                found.setdefault(f"{a} x + {b} y" if is_sum else f"{a} times the reference's", factors.tolist())
        for text, factors in sorted(found.items(), key=lambda item: -min(map(abs, item[1]))):
            word, places = ("output", pair.alike(step.path)) if step.kind == "out" else (step.kind, [step.key])
            text = f"the {'sum' if is_sum else word} in {step.path or 'the model'} is {text}"
            yield Change("multiplier", text, dict.fromkeys(places, partial(_combined, factors)))


def _combined(factors: list[float], owner: Any, args: tuple, out: Tensor) -> Tensor:
    return sum((a * x for a, x in zip(factors, args if len(factors) > 1 else (out,), strict=False)), torch.zeros_like(out))


MEASURED = (rotary, visible, scales, heads)
"""Changes that seldom fit by accident."""

CATALOGUE = (*MEASURED, multipliers, norm_order, modules, activations, features)


def _is_close(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors are equal to rounding."""
    if x.shape != y.shape and y.dim():
        return False
    return bool((x - y).abs().max() <= CLOSE * torch.maximum(x.abs().max(), y.abs().max()))


def _number(value: float) -> str:
    """Return a short number: 10000, 0.35355."""
    return f"{value:.0f}" if abs(value) < 1e9 and abs(value - round(value)) < 1e-4 * abs(value) else f"{value:.4g}"
