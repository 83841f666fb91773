"""The catalogue of ``twin``: changes of a reference that reproduce mistakes in a port, with numbers measured in both."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import permutations, product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitx.check.calling import tensors_of
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


class Pair:
    """A call of the port and a call of the reference.

    Attributes:
        is_matched: for each step of the port, whether the reference has it.
        near: the steps of the port around the place where they differ.
        tables: the paths of embeddings, by key.
        fresh: the outputs of the reference that the port lacks, and the outputs of tables, the first of all layers, by key.
        leaves: the outputs of the modules of the reference without children, by path.
        suspects: those that the port lacks although it has the input, the first of all layers, by key.
    """

    def __init__(self, port: Trace, reference: Trace, model: nn.Module) -> None:
        self.port, self.reference = port, reference
        self.modules: dict[str, Any] = dict(model.named_modules())
        self.tables = {pattern(path): path for path, module in self.modules.items() if isinstance(module, nn.Embedding)}
        self.is_matched = matched(port.steps, reference.steps)
        is_known = dict(zip(reference.steps, matched(reference.steps, port.steps).tolist(), strict=True))
        last = max([0, *self.is_matched.nonzero().flatten().tolist()])
        self.near = port.steps[max(0, last - 60) : last + 60]
        steps = [step for step in reference.steps if step.kind != "in"]
        leaves = [step for step in steps if step.inner and not list(self.modules[step.path].children())]
        self.fresh = _firsts("key", [s for s in steps if not is_known[s] or (s.key in self.tables and s.kind == "out")])
        self.leaves = _firsts("path", leaves)
        self.suspects = _firsts("key", [step for step in leaves if is_known[step.inner[0]] and not is_known[step]])
        self.sites = list(zip(reference.sites, port.sites, strict=False))

    def alike(self, path: str) -> list[Any]:
        """Return the modules at the same place of all layers."""
        return [module for name, module in self.modules.items() if pattern(name) == pattern(path)]

    def places(self, step: Step) -> list[Any]:
        """Return the place of a step in all layers: modules, or the key of a function."""
        return self.alike(step.path) if step.kind == "out" else [step.key]

    def shapes(self, path: str) -> dict[str, torch.Size]:
        """Return the shapes of the parameters of a module."""
        return {name: parameter.shape for name, parameter in self.modules[path].named_parameters()}

    def is_norm(self, path: str) -> bool:
        """Return whether a module keeps the shape, with parameters of one shape (F,)."""
        step, shapes = self.leaves.get(path), set(self.shapes(path).values())
        return step is not None and step.inner[0].value.shape == step.value.shape and [*map(len, shapes)] == [1]

    def scopes(self, path: str) -> list[list[Any]]:
        """Return modules with the same mistake: of the same kind, of these those in layers, those at the same place."""
        kind = type(self.modules[path]), self.shapes(path)
        kin = {name: module for name, module in self.modules.items() if (type(module), self.shapes(name)) == kind}
        layers = [module for name, module in kin.items() if "*" in pattern(name)]
        return [scope for scope in ([*kin.values()], layers, self.alike(path)) if scope]


def _firsts(name: str, steps: list[Step]) -> dict[str, Step]:
    """Return the first step with each value of an attribute."""
    return {getattr(step, name): step for step in steps} | {getattr(step, name): step for step in reversed(steps)}


# --- attention


Rotation = tuple[Tensor, Tensor]


def _described(order: Tensor, table: Tensor) -> str:
    """Describe a rotation: which dimensions are pairs, and the angles."""
    f = torch.angle(table[2] * table[1].conj())
    if f.abs().max() < CLOSE:
        return "no rotation"
    base = float((f[1] / f[0]).abs()) ** -len(f) if len(f) > 1 else 1.0
    is_plain = torch.allclose(f, f[0] * base ** (-torch.arange(len(f)).to(f) / len(f)), rtol=1e-3)
    words = f"theta {_number(base)}" if is_plain else f"frequencies {', '.join(map(_number, f[:4].tolist()))}"
    words += f", angles times {_number(float(f[0]))}" if is_plain and abs(f[0] - 1) > 1e-5 else ""
    start = float(torch.angle(table[1])[0] / f[0]) - 1
    words += f", positions from {_number(start)}" if abs(start) > 1e-5 else ""
    pairs = "pairs (2i, 2i + 1)" if order[1] == 1 else f"halves (i, i + {len(f)})"
    return f"rotation of {pairs} in {2 * len(f)} dimensions, {words}"


def _rotation(trace: Trace, site: Site, name: str) -> Rotation:
    """Return the rotation of the queries or keys (B, H, L, D) of an attention. Without one, the angles are zero.

    Returns:
        The dimensions that are rotated: the first with the second, the third with the fourth, and so on. The factors, complex
        (L, dimensions / 2).
    """
    after = getattr(site, name)
    after = after[:, _distinct(after)]
    H, L, D = after.shape[1:]
    places = torch.arange(D, device=after.device)
    found = [(places, torch.ones(L, D // 2, dtype=torch.complex128, device=after.device))]
    for step in [step for step in trace.steps[: site.start] if step.value.shape[-1] == H * D]:
        before = step.value.unflatten(-1, (H, D)).transpose(1, 2)
        ratio = after.norm(dim=-1) / before.norm(dim=-1)
        before = before * ratio.mean()  # a scale of queries is one of scores
        is_turned = _is_close(ratio, ratio.mean()) and not _is_close(before, after)
        for part in [part for part in (1, 2, 4) if is_turned and D % (2 * part) == 0]:
            orders = places[: D // part].view(2, -1).mT.flatten(), places[: D // part]
            for one, two in product(orders, repeat=2):
                table = torch.sgn((_complex(after, two) * _complex(before, one).conj()).sum((0, 1)))
                if _is_close(_turned(before, one, two, table), after):
                    found.append((one, table))
    return min(found[1:] or found, key=lambda rotation: float(torch.angle(rotation[1][0]).abs().max()))  # not (-b, a)


def _turned(x: Tensor, order: Tensor, new_order: Tensor, table: Tensor) -> Tensor:
    """Multiply the pairs of dimensions of (B, H, L, D), as complex numbers, by factors."""
    y = x.clone()
    y[..., new_order] = torch.view_as_real(_complex(x, order) * table).flatten(-2).to(x.dtype)
    return y


def _complex(x: Tensor, order: Tensor) -> Tensor:
    return torch.view_as_complex(x.double()[..., order].unflatten(-1, (-1, 2)))


def rotary(pair: Pair) -> Iterator[Change]:
    """The rotation of the port."""
    found: dict[tuple[str, int], tuple[Rotation, Rotation]] = {}
    for (ours, theirs), name in product(pair.sites, ("query", "key")):
        found[name, ours.number] = _rotation(pair.reference, ours, name), _rotation(pair.port, theirs, name)

    def turn(name: str, site: Site, args: tuple, x: Tensor) -> Tensor:
        (order, table), (new_order, new_table) = found[name, site.number]
        return _turned(_turned(x, order, order, 1 / table), new_order, new_order, new_table)

    words = {name: [_described(*rotation) for rotation in found[name, 0]] for name in ("query", "key")}
    if differ := [name for name, (one, two) in words.items() if one != two]:
        text = "{1}; in the reference {0}".format(*words[differ[0]]) + f" ({differ[0]} only)" * (len(differ) == 1)
        yield Change("rotary", text, {name: partial(turn, name) for name in words})


def visible(pair: Pair) -> Iterator[Change]:
    """The keys that the port sees."""
    # a query that sees nothing shows how keys are hidden
    low = {ours.number: theirs.scores.min() for ours, theirs in pair.sites}
    both = {ours.number: [(site.scores > LOW).flatten(0, -3).any(0) for site in (theirs, ours)] for ours, theirs in pair.sites}
    seen = {number: sides for number, sides in both.items() if not torch.equal(*sides)}

    def scores(site: Site, args: tuple, x: Tensor) -> Tensor:
        if site.number not in seen:
            return x
        fit = _fit(site.raw[x > LOW], x[x > LOW])
        shift = (x - site.whole).where(x > LOW, torch.nan).nanmean(-1, keepdim=True).nan_to_num()  # by hand: less the maximum
        return x.where(x > LOW, _capped(site.raw, *fit) if fit else site.whole + shift).where(
            seen[site.number][0], low[site.number]
        )

    if seen:
        words = map(_reach, next(iter(seen.values())))
        where = f" (in attention {', '.join(map(str, seen))})" if len(seen) < len(pair.sites) else ""
        yield Change("visible", "a token sees {}; in the reference {}".format(*words) + where, {"scores": scores})


def _reach(seen: Tensor) -> str:
    distance = torch.stack(seen.nonzero(as_tuple=True)).diff(dim=0)
    back, ahead, last = -int(distance.min()), int(distance.max()), len(seen) - 1
    words = ["all tokens before it" if back == last else f"{back} tokens before it", "itself" if seen.diagonal().any() else ""]
    return " and ".join(filter(None, [*words, "" if ahead < 1 else "all after it" if ahead == last else f"{ahead} after it"]))


def scores(pair: Pair) -> Iterator[Change]:
    """The scale and the soft-cap of the scores."""
    return _scales("scores", "scores", *pair.sites[0])


def logits(pair: Pair) -> Iterator[Change]:
    """The scale and the soft-cap of the logits."""
    return _scales("logits", "", pair.reference.head, pair.port.head)


def _scales(what: str, place: str, ours: Site, theirs: Site) -> Iterator[Change]:
    is_seen = (ours.scores > LOW) & (theirs.scores > LOW)
    one, two = (_fit(ours.raw[is_seen], side.scores[is_seen]) for side in (ours, theirs))
    if not (one and two):
        return
    change = {place: lambda site, args, x: _capped(site.raw, *two).where(x > LOW, x)}
    words = ["no soft-cap" if cap == torch.inf else f"a soft-cap of {_number(cap)}" for _, cap in (two, one)]
    if abs((factor := two[0] / one[0]) - 1) > CLOSE:
        width = theirs.query.shape[-1] if place else 0
        roots = {" (√d_k)": width**0.5, " (1/√d_k)": width**-0.5} if width else {}
        root = next((name for name, root in roots.items() if abs(factor / root - 1) < 1e-5), "")
        text = f"{what} are {_number(factor)}{root} times the reference's"
        yield Change("scale", text, {"raw": partial(_combined, [factor])}) if place else Change("multiplier", text, change)
    elif words[0] != words[1]:
        yield Change("soft-cap", f"{what} have {words[0]}, in the reference {words[1]}", change)


def _fit(x: Tensor, y: Tensor) -> tuple[float, float] | None:
    """Return (c, t) with y = t · tanh(c · x / t), or None."""
    x, y = x.double(), y.double()
    is_large = y.abs() > y.abs().max() / 2

    def factors(cap: float) -> list[float]:
        ratio = (y if cap == torch.inf else cap * torch.atanh(y / cap)) / x
        return [float(part.nanmedian()) for part in (ratio[is_large], ratio[~is_large])]

    if _is_close(x * factors(torch.inf)[1], y):
        return factors(torch.inf)[1], torch.inf
    low, cap = float(y.abs().max()), 1e6 * float(y.abs().max())
    for _ in range(60):  # too small a cap makes the factor of large scores too large
        middle = (low * cap) ** 0.5
        large, small = factors(middle)
        low, cap = (middle, cap) if large > small else (low, middle)
    return (small, cap) if _is_close(_capped(x, small, cap), y) else None


def _capped(x: Tensor, factor: float, cap: float) -> Tensor:
    return x * factor if cap == torch.inf else cap * torch.tanh(x * factor / cap)


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


# --- modules and functions


def features(pair: Pair) -> Iterator[Change]:
    """The order of the features of projections with the same input."""
    groups: dict[tuple[float, ...], list[str]] = {}
    for path, step in pair.leaves.items():
        if max(map(len, pair.shapes(path).values()), default=0) == 2:
            groups.setdefault(tuple(step.inner[0].marks.flatten().tolist()), []).append(path)
    for group in {tuple(map(pattern, group)): group for group in reversed(groups.values())}.values():
        sizes = [pair.leaves[path].value.shape[-1] for path in group]
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
    """Other numbers in a module, the weights of another module, or no module."""
    tables = list(pair.tables.values())
    for path in dict.fromkeys([*(step.path for step in pair.suspects.values()), *tables]):
        for scope, (id, text, function) in product(pair.scopes(path), _edits(pair, path)):
            yield Change(id, f"{path}: {text}", dict.fromkeys(scope, function))
        layer = re.match(r"\D*\d+\.", path)
        near = [other for other in pair.leaves if layer and other.startswith(layer[0])]
        for other in [other for other in (*tables, *near) if other != path and pair.shapes(other) == pair.shapes(path) != {}]:
            given = dict(zip(pair.alike(path), pair.alike(other), strict=False))
            both = "swapped-weights", f"{path} and {other} are swapped", {b: a for a, b in given.items()} | given
            one = "swapped-weights", f"{path} is {other}", given
            tied = "tying", f"{path}: has the weights of {other}", given
            for id, text, sources in [tied] if other in tables else [both, one]:
                yield Change(id, text, dict.fromkeys(sources, partial(_with_weights, sources)))


def with_values(module: nn.Module, args: tuple, out: Any = None, /, **values: Callable[[Any], Any]) -> Tensor:
    """Return the output of a module with functions of its parameters or attributes in their place. It loses them afterwards."""
    with ExitStack() as stack:
        for name, value in values.items():
            old = getattr(module, name)
            stack.callback(setattr, module, name, old)
            setattr(module, name, nn.Parameter(value(old)) if isinstance(old, Tensor) else value(old))
        return module.forward(*args)


def _with_weights(sources: dict[nn.Module, nn.Module], module: nn.Module, args: tuple, out: Tensor) -> Tensor:
    return with_values(module, args, **{name: lambda _, p=p: p for name, p in sources[module].named_parameters()})


def _with_input(change: Function, module: nn.Module, args: tuple, out: Tensor) -> Tensor:
    return module.forward(change(args[0]), *args[1:])


def _edits(pair: Pair, path: str) -> Iterator[tuple[str, str, Function]]:
    """Other outputs of a module."""
    module, rows = pair.modules[path], getattr(pair.modules[path], "num_embeddings", 0)
    for n in (1, 2, -1, -2) if rows and len(pair.tables) > 1 else ():
        shift = partial(_with_input, lambda x, n=n: (x + n).clamp(0, rows - 1))
        yield "position-offset", f"the rows are read {n:+d} further", shift
    yield "bias-missing", "the bias is not added", partial(with_values, bias=torch.zeros_like)
    if not pair.is_norm(path):
        return
    yield "norm-missing", "missing", lambda module, args, out: args[0]
    [(weight, (width,)), *_] = pair.shapes(path).items()
    for n, words in ((1, ("1 + weight", "weight")), (-1, ("weight", "1 + weight"))):
        text = "the norm multiplies by {}, in the reference by {}".format(*words)
        yield "norm-weight", text, partial(with_values, **{weight: lambda old, n=n: old + n})
    centred = partial(_with_input, lambda x: x - x.mean(-1, keepdim=True))
    yield "norm-kind", "the norm subtracts the mean, unlike in the reference", centred
    name, eps = next(((k, v) for k, v in vars(module).items() if isinstance(v, float) and 0 <= v < 0.01), ("", 0.0))
    for other in [10.0**-n for n in range(2, 13) if 10.0**-n != eps]:
        change = partial(with_values, **{name: lambda old, new=other: new})
        yield "norm-eps", f"eps is {other:.0e}, in the reference {eps:.0e}", change
    D = pair.reference.sites[0].query.shape[-1] if pair.reference.sites else 1

    def over_others(module: Any, args: tuple, out: Tensor) -> Tensor:
        square = args[0].square()
        heads = [axis for axis in range(1, square.dim() - 1) if square.shape[axis] != pair.reference.L]
        by_head = square.unflatten(-1, (-1, D)).mean(-1).repeat_interleave(D, -1)
        other = square.mean((*heads, -1), keepdim=True) if heads else by_head
        return out * ((square.mean(-1, keepdim=True) + eps) / (other + eps)).sqrt()

    words = ("all heads", "each head") if width == D else ("each head", "all heads")
    yield "norm-heads", "the norm is over {}, in the reference over {}".format(*words), over_others


def norm_order(pair: Pair) -> Iterator[Change]:
    """Norms of queries and keys after their rotation."""
    squares: dict[Any, Tensor] = {}

    def left_out(norm: Any, args: tuple, out: Tensor) -> Tensor:
        squares[norm] = args[0].square().mean()
        return args[0]

    def late(norms: list[Any], site: Site, args: tuple, x: Tensor) -> Tensor:
        size = (x.square().mean() / squares[norms[site.number]]).sqrt()  # a scale of queries is one of scores
        return norms[site.number].forward(x / size) * size

    kinds = [pair.scopes(step.path)[0] for step in pair.suspects.values() if pair.is_norm(step.path)]
    for norms in [norms for norms in kinds if len(norms) == 2 * len(pair.sites)]:
        outputs = {"query": partial(late, norms[::2]), "key": partial(late, norms[1::2])} | dict.fromkeys(norms, left_out)
        yield Change("norm-order", "norms of queries and keys are after the rotation", outputs)


def activations(pair: Pair) -> Iterator[Change]:
    """Another activation."""
    for step in pair.fresh.values():
        inputs = [x for x in map(pair.reference.flat, tensors_of(step.args[:1])) if x is not None]
        names = [name for x in inputs for name, f in ACTIVATIONS.items() if _is_close(f(x), step.value)]
        for name in [name for name in ACTIVATIONS if names and name not in names]:
            hook = lambda owner, args, out, f=ACTIVATIONS[name]: f(args[0])  # noqa: E731
            text = f"the activation is {name}, in the reference {names[0]}"
            yield Change("activation", text, dict.fromkeys(pair.places(step), hook))


def multipliers(pair: Pair) -> Iterator[Change]:
    """A sum with other factors, or an output times a constant."""
    for step in pair.fresh.values():
        is_sum, found = step.kind == "add" and all(isinstance(term, Tensor) for term in step.args[:2]), dict[str, list[float]]()
        terms = torch.broadcast_tensors(*step.args[:2]) if is_sum else [step.value]
        columns = torch.stack([flat.flatten() for term in terms if (flat := pair.reference.flat(term)) is not None], 1)
        for other in [other.value for other in pair.near if other.value.shape == step.value.shape]:
            factors = torch.linalg.lstsq(columns, other.reshape(-1, 1)).solution.flatten()
            factors = factors.where(factors.abs() > CLOSE * factors.abs().max(), 0.0)
            is_other = factors.norm() > 1e-3 and not _is_close(factors, torch.ones_like(factors))
            if is_other and _is_close(columns @ factors, other.flatten()):
                a, b = [_number(factor) for factor in (*factors.tolist(), 0.0)[:2]]
                found.setdefault(f"{a} x + {b} y" if is_sum else f"{a} times the reference's", factors.tolist())
        word = "sum" if is_sum else "output" if step.kind == "out" else step.kind
        for text, factors in sorted(found.items(), key=lambda item: -min(map(abs, item[1]))):
            text = f"the {word} in {step.path or 'the model'} is {text}"
            yield Change("multiplier", text, dict.fromkeys(pair.places(step), partial(_combined, factors)))


def _combined(factors: list[float], owner: Any, args: tuple, out: Tensor) -> Tensor:
    return sum((a * x for a, x in zip(factors, args if len(factors) > 1 else (out,), strict=False)), torch.zeros_like(out))


MEASURED = (rotary, visible, scores, logits, heads)
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
