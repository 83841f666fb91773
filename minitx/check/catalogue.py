"""The catalogue of ``twin``: changes of a reference that reproduce mistakes in a port, with numbers measured in both."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
        last: the number of the last step of the port that the reference has.
        leaves: the steps in and out of the modules of the reference without children, by path.
        suspects: the paths of those whose input the port has, but not their output.
    """

    def __init__(self, port: Trace, reference: Trace, model: nn.Module) -> None:
        self.port, self.reference, self.model = port, reference, model
        self.modules: dict[str, Any] = dict(model.named_modules())
        self.is_matched, self.is_shared = matched(port.steps, reference.steps), matched(reference.steps, port.steps)
        self.last = max([0, *self.is_matched.nonzero().flatten().tolist()])
        self.leaves: dict[str, tuple[Step, Step]] = {}
        inner: dict[str, Step] = {}
        for step in reference.steps:
            if step.kind == "in":
                inner[step.key] = step
            elif step.kind == "out" and step.path in inner and not list(self.modules[step.path].children()):
                self.leaves.setdefault(step.path, (inner[step.path], step))
        shared = {step for step, is_shared in zip(reference.steps, self.is_shared.tolist(), strict=True) if is_shared}
        self.suspects = {path for path, (one, two) in self.leaves.items() if one in shared and two not in shared}

    def alike(self, path: str) -> list[Any]:
        """Return the modules at the same place of all layers."""
        return [module for name, module in self.modules.items() if pattern(name) == pattern(path)]

    def near(self, features: int, is_new: bool = True) -> list[Tensor]:
        """Return the tensors of the port around the place where it leaves the reference."""
        places = range(max(0, self.last - 60), min(len(self.port.steps), self.last + 60))
        steps = [self.port.steps[i] for i in places if not (is_new and self.is_matched[i])]
        return [step.value for step in steps if step.value.shape[-1] == features]

    @property
    def sites(self) -> list[tuple[Site, Site]]:
        """The attentions of the reference and of the port."""
        return list(zip(self.reference.sites, self.port.sites, strict=False))


# --- attention


@dataclass(frozen=True)
class Rotation:
    """A rotation of queries or keys (B, H, L, D).

    Attributes:
        is_halves: whether dimension i is rotated with i + dims/2, or else 2i with 2i + 1.
        table: complex (L, dims/2), the factors.
    """

    is_halves: bool
    table: Tensor

    @property
    def angles(self) -> Tensor:
        """Return the angle between two positions for each pair."""
        return torch.angle(self.table[2] * self.table[1].conj())

    def __str__(self) -> str:
        f = self.angles
        if f.abs().max() < CLOSE:
            return "no rotation"
        base = float((f[1] / f[0]).abs()) ** -len(f) if len(f) > 1 else 1.0
        is_plain = torch.allclose(f, f[0] * base ** (-torch.arange(len(f)).to(f) / len(f)), rtol=1e-3)
        words = f"theta {_number(base)}" if is_plain else f"frequencies {', '.join(map(_number, f[:4].tolist()))}"
        words += f", angles times {_number(float(f[0]))}" if is_plain and abs(f[0] - 1) > 1e-5 else ""
        start = float(torch.angle(self.table[1])[0] / f[0]) - 1
        words += f", positions from {_number(start)}" if abs(start) > 1e-5 else ""
        pairs = f"halves (i, i + {len(f)})" if self.is_halves else "pairs (2i, 2i + 1)"
        return f"rotation of {pairs} in {2 * len(f)} dimensions, {words}"

    def complex(self, x: Tensor) -> Tensor:
        """Return the rotated dimensions of (B, H, L, D) as complex numbers."""
        x = x[..., : 2 * self.table.shape[1]].double()
        return torch.view_as_complex((x.unflatten(-1, (2, -1)).mT if self.is_halves else x.unflatten(-1, (-1, 2))).contiguous())

    def apply(self, x: Tensor, back: bool = False) -> Tensor:
        """Rotate (B, H, L, D), or undo the rotation."""
        y = torch.view_as_real(self.complex(x) * (1 / self.table if back else self.table))
        return torch.cat(((y.mT if self.is_halves else y).flatten(-2), x[..., 2 * self.table.shape[1] :]), -1).to(x.dtype)

    @staticmethod
    def between(before: Tensor, after: Tensor) -> Rotation | None:
        """Return the rotation from one tensor to another, perhaps with the pairs in the other layout afterwards, or None."""
        L, D = before.shape[2:]
        for is_halves, is_turned, part in product((True, False), (False, True), (1, 2, 4)):
            if D % (2 * part) == 0:
                ones = torch.ones(L, D // part // 2, dtype=torch.complex128, device=before.device)
                z, w = Rotation(is_halves, ones).complex(before), Rotation(is_halves ^ is_turned, ones).complex(after)
                table, rest = (w * z.conj()).sum((0, 1)) / z.abs().square().sum((0, 1)), slice(D // part, D)
                if _is_close(z * table, w) and (part == 1 or _is_close(before[..., rest], after[..., rest])):
                    return Rotation(is_halves, table)
        return None

    @staticmethod
    def of(trace: Trace, site: Site, after: Tensor) -> Rotation:
        """Return the rotation of the queries or keys of an attention. Without one, the angles are zero."""
        after = after[:, _distinct(after)]
        H, L, D = after.shape[1:]
        found = [Rotation(True, torch.ones(L, D // 2, dtype=torch.complex128, device=after.device))]
        for step in trace.steps[: site.start]:
            if step.value.shape[-1] == H * D:
                before = step.value.unflatten(-1, (H, D)).transpose(1, 2)
                ratio = after.norm(dim=-1) / before.norm(dim=-1)
                if _is_close(ratio, ratio.mean()) and not _is_close(before * ratio.mean(), after):
                    found += filter(None, [Rotation.between(before, after)])
        return min(found[1:] or found, key=lambda rotation: float(torch.angle(rotation.table[0]).abs().max()))  # not (-b, a)


def rotary(pair: Pair) -> Iterator[Change]:
    """The rotation of the port."""
    found: dict[str, list[tuple[Rotation, Rotation]]] = {"query": [], "key": []}
    for (ours, theirs), name in product(pair.sites, found):
        sides = (pair.reference, ours), (pair.port, theirs)
        found[name].append(tuple(Rotation.of(trace, site, getattr(site, name)) for trace, site in sides))  # type: ignore[arg-type]

    def turn(name: str) -> Function:
        def change(site: Site, x: Tensor) -> Tensor:
            ours, theirs = found[name][site.number]
            unscaled = theirs.table / theirs.table.abs().mean() * ours.table.abs().mean()  # a scale of queries is one of scores
            return Rotation(theirs.is_halves, unscaled).apply(ours.apply(x, back=True))

        return change

    words = {name: [str(rotation) for rotation in tables[0]] for name, tables in found.items() if tables}
    if differ := [name for name, (one, two) in words.items() if one != two]:
        text = "{1}; in the reference {0}".format(*words[differ[0]])
        text += f" ({differ[0]} only)" if len(differ) == 1 else ""
        yield Change("rotary", text, attention={name: turn(name) for name in found})


def visible(pair: Pair) -> Iterator[Change]:
    """The keys that the port sees."""
    seen = {ours.number: (theirs.visible, ours.visible) for ours, theirs in pair.sites}
    seen = {number: both for number, both in seen.items() if not torch.equal(*both)}

    def scores(site: Site, scores: Tensor) -> Tensor:
        return site.unmasked.where(seen[site.number][0], -torch.inf) if site.number in seen else scores

    if seen:
        words = [_reach(side) for side in next(iter(seen.values()))]
        where = f" (in attention {', '.join(map(str, seen))})" if len(seen) < len(pair.sites) else ""
        yield Change("visible", "a token sees {}; in the reference {}".format(*words) + where, attention={"scores": scores})


def _reach(seen: Tensor) -> str:
    distance = torch.stack(seen.nonzero(as_tuple=True)).diff(dim=0)
    back, ahead, last = -int(distance.min()), int(distance.max()), len(seen) - 1
    words = ["all tokens before it" if back == last else f"{back} tokens before it", "itself" if seen.diagonal().any() else ""]
    return " and ".join(filter(None, [*words, "" if ahead < 1 else "all after it" if ahead == last else f"{ahead} after it"]))


def score_map(pair: Pair) -> Iterator[Change]:
    """The scale and the soft-cap of the scores and of the logits."""
    for ours, theirs in pair.sites:
        if ours.scores.shape == theirs.scores.shape and (fit := _fit(*_seen(ours, theirs))):

            def scores(site: Site, scores: Tensor, factor: float = fit[0], cap: float = fit[1]) -> Tensor:
                site.chain.append(("map", scores, _capped(site.uncapped[0] * factor, cap)))
                return site.chain[-1][2].where(scores > LOW, scores)

            yield Change(*_map_text("scores", *fit, ours.query.shape[-1]), attention={"scores": scores})
            break
    logits, cap = pair.reference.output, torch.inf
    for step in [step for step in pair.reference.steps[-8:] if step.kind == "tanh"]:
        cap = float((pair.reference.output / step.value).nanmedian())
        logits = step.args[0] * cap
    if logits.shape == pair.port.output.shape and (fit := _fit(logits, pair.port.output, cap)):
        yield Change(*_map_text("logits", *fit), outputs={"": lambda args, out: _capped(logits * fit[0], fit[1])})


def _seen(ours: Site, theirs: Site) -> tuple[Tensor, Tensor, float]:
    seen, (plain, cap) = (ours.scores > LOW) & (theirs.scores > LOW), ours.uncapped
    return plain[seen], theirs.scores[seen], cap


def _fit(x: Tensor, y: Tensor, cap: float) -> tuple[float, float, float] | None:
    """Return (c, t, cap) with y = t · tanh(c · x / t), unless c = 1 and t = cap."""
    x, y = x.flatten().double(), y.flatten().double()
    x, y = x[is_large := x.abs() > 1e-3 * x.abs().max()], y[is_large]

    def spread(cap: float) -> tuple[float, float]:
        ratio = (y if cap == torch.inf else cap * torch.atanh((y / cap).clamp(-1, 1))) / x
        return float((ratio / ratio.nanmedian() - 1).abs().nan_to_num(9.0, 9.0).median()), float(ratio.nanmedian())

    best, step = torch.inf, 1.1
    if len(x):
        best = min([torch.inf, *(float(y.abs().max()) * 1.0001 * step**n for n in range(100))], key=lambda cap: spread(cap)[0])
    for _ in range(60 if best < torch.inf else 0):
        best = min((best / step, best, best * step), key=lambda cap: spread(cap)[0])
        step = step**0.75
    if not len(x) or not _is_close(_capped(x * (factor := spread(best)[1]), best), y):
        return None
    return None if abs(factor - 1) < CLOSE and (best == cap or abs(best - cap) < 1e-4 * cap) else (factor, best, cap)


def _capped(x: Tensor, cap: float) -> Tensor:
    return x if cap == torch.inf else cap * torch.tanh(x / cap)


def _map_text(what: str, factor: float, cap: float, ours: float, width: int = 1) -> tuple[str, str]:
    if abs(factor - 1) > CLOSE:
        names = {width**0.5: " (√d_k)", width**-0.5: " (1/√d_k)"}
        name = next((name for value, name in names.items() if width > 1 and abs(factor / value - 1) < 1e-5), "")
        return "scale" if what == "scores" else "multiplier", f"{what} are {_number(factor)}{name} times the reference's"
    words = ["no soft-cap" if t == torch.inf else f"a soft-cap of {_number(t)}" for t in (cap, ours)]
    return "soft-cap", f"{what} have {words[0]}, in the reference {words[1]}"


def heads(pair: Pair) -> Iterator[Change]:
    """The order of heads, and their axis."""
    for site in pair.reference.sites[:1]:
        distinct, H = _distinct(site.key), site.key.shape[1]
        if 1 < (G := len(distinct)) < H:
            is_tiled = distinct == list(range(G))
            words = ["tiled", "repeated one by one"]
            text = "{{}} heads are {}, in the reference {}".format(*(words[::-1] if is_tiled else words))
            order = torch.arange(H) // (H // G) if is_tiled else torch.arange(H) % G * (H // G)
            for names in (("key", "value"), ("key",), ("value",)):
                reorder = dict.fromkeys(names, lambda site, x, order=order: x[:, order])
                yield Change("head-order", text.format(" and ".join(names)), attention=reorder)
    text = "heads are {} by a reshape without transpose(1, 2)"
    split = dict.fromkeys(("query", "key", "value"), lambda site, x: x.transpose(1, 2).reshape(x.shape))
    yield Change("head-merge", text.format("split"), attention=split)
    merged = {"merged": lambda site, x: x.reshape(x.transpose(1, 2).shape).transpose(1, 2)}
    yield Change("head-merge", text.format("merged"), attention=merged)


def _distinct(x: Tensor) -> list[int]:
    """Return the heads that no earlier head equals."""
    return [h for h in range(x.shape[1]) if not any(torch.equal(x[:, h], x[:, i]) for i in range(h))]


# --- modules


def splits(pair: Pair) -> Iterator[Change]:
    """The order of the features of projections with the same input."""
    groups: list[list[str]] = []
    last: Tensor | None = None
    for path, (inner, _) in pair.leaves.items():
        if max((p.dim() for p in pair.modules[path].parameters()), default=0) == 2 and inner.value.shape[-1] > 1:
            groups = groups if last is not None and _is_close(inner.marks, last) else [*groups, []]
            groups[-1].append(path)
            last = inner.marks
    for group in {tuple(map(pattern, group)): group for group in reversed(groups)}.values():
        for id, text, order in _orders(pair, sum(pair.leaves[path][1].value.shape[-1] for path in group)):
            hooks = {}
            for modules in zip(*map(pair.alike, group), strict=False):
                for number, module in enumerate(modules):
                    hooks[module] = _reordered(modules, number, order)
            yield Change(id, f"{' and '.join(group)}: {text}", outputs=hooks)


def _reordered(modules: tuple, number: int, order: Tensor) -> Function:
    def hook(args: tuple, out: Tensor) -> Tensor:
        outs = [module.forward(*args) for module in modules]
        return torch.cat(outs, -1)[..., order].split([x.shape[-1] for x in outs], -1)[number]

    return hook


def _orders(pair: Pair, total: int) -> Iterator[tuple[str, str, Tensor]]:
    """Orders of the features of fused projections."""
    places = torch.arange(total)
    for site in pair.reference.sites[:1]:
        H, D = site.query.shape[1], site.query.shape[3]
        G = len(_distinct(site.key))
        if total == (H + 2 * G) * D:
            parts, grouped = places.split([H * D, G * D, G * D]), places.view(G, -1, D)
            for order in list(permutations(range(3)))[1:]:
                text = "the parts q, k, v are read as " + ", ".join("qkv"[i] for i in order)
                if [len(parts[i]) for i in order] == [len(part) for part in parts]:
                    yield "split-order", text, torch.cat([parts[i] for i in order])
                if H == G:
                    yield "split-order", text, grouped[:, order].flatten()
            by_head = torch.cat((grouped[:, :-2].flatten(), grouped[:, -2].flatten(), grouped[:, -1].flatten()))
            yield "split-order", "the features are read as (heads, 3), in the reference as (3, heads)", by_head
            yield "split-order", "the features are read as (3, heads), in the reference as (heads, 3)", by_head.argsort()
    if total % 2 == 0:
        yield "gate-order", "the halves are swapped", places.roll(total // 2)
        yield "gate-order", "the features are interleaved, in the reference in halves", places.view(-1, 2).T.flatten()
        yield "gate-order", "the features are in halves, in the reference interleaved", places.view(2, -1).T.flatten()


def siblings(pair: Pair) -> Iterator[Change]:
    """Modules of a layer that use each other's weights."""
    shapes = {path: [p.shape for p in pair.modules[path].parameters()] for path in pair.leaves}
    done: set[tuple[str, str]] = set()
    for a, b in permutations([path for path, found in shapes.items() if found], 2):
        layer, name = re.match(r"\D*\d+\.", a), (pattern(a), pattern(b))
        if layer and b.startswith(layer[0]) and shapes[a] == shapes[b] and name not in done and {a, b} & pair.suspects:
            done.add(name)
            couples = [
                zip(one.parameters(), two.parameters(), strict=True)
                for one, two in zip(pair.alike(a), pair.alike(b), strict=False)
            ]
            given = {p: q for couple in couples for p, q in couple}
            if a < b:
                yield Change("swapped-weights", f"{a} and {b} are swapped", tensors=given | {q: p for p, q in given.items()})
            yield Change("swapped-weights", f"{b} takes the place of {a}", tensors=given)


def norms(pair: Pair) -> Iterator[Change]:
    """Another norm, or none."""
    done: set[Any] = set()
    found: dict[str, list[str]] = {}
    for path, (inner, outer) in pair.leaves.items():
        shapes = {p.shape for p in pair.modules[path].parameters()}
        if inner.value.shape == outer.value.shape and len(shapes) == 1 and len(next(iter(shapes))) == 1:
            found.setdefault(path.rpartition(".")[0], []).append(path)
    for path in [path for paths in found.values() for path in paths if path in pair.suspects]:
        kin = [m for m in pair.modules.values() if _kind(m) == _kind(pair.modules[path])]
        layers = [m for name, m in pair.modules.items() if m in kin and "*" in pattern(name)]
        for scope in (kin, layers, pair.alike(path)):
            if scope and (key := frozenset(scope)) not in done:
                done.add(key)
                yield from _other_norms(pair, scope, pair.leaves[path][0].value.shape[-1])
    for parent, paths in found.items():
        for group in [*([path] for path in paths), *([paths] if len(paths) == 2 else [])]:
            if (name := tuple(map(pattern, group))) not in done and pair.suspects & {*group}:
                done.add(name)
                hooks = {m: lambda args, out: args[0] for path in group for m in pair.alike(path)}
                yield Change("norm-missing", f"{' and '.join(group)}: missing", outputs=hooks)
                if len(group) == 2 and any(site.path == parent for site in pair.reference.sites):
                    late = {n: _late(pair.alike(p)) for n, p in zip(("query", "key"), group, strict=True)}
                    yield Change("norm-order", f"{' and '.join(group)}: after the rotation", outputs=hooks, attention=late)


def _other_norms(pair: Pair, scope: list[Any], features: int) -> Iterator[Change]:
    weights = [next(module.parameters()) for module in scope]
    for offset, text in ((1, "1 + weight, in the reference by weight"), (-1, "weight, in the reference by 1 + weight")):
        yield Change("norm-weight", f"the norm multiplies by {text}", tensors={p: p + offset for p in weights})
    centred: dict[nn.Module, Function] = {m: lambda args: (args[0] - args[0].mean(-1, keepdim=True), *args[1:]) for m in scope}
    yield Change("norm-kind", "the norm subtracts the mean, unlike in the reference", inputs=centred)
    names = [name for name, value in vars(scope[0]).items() if isinstance(value, float) and 0 <= value < 0.01]
    eps = getattr(scope[0], names[0]) if names else 0.0
    for other in [10.0**-n for n in range(2, 13) if 10.0**-n != eps] if names else []:
        values = {(module, names[0]): other for module in scope}
        yield Change("norm-eps", f"eps is {other:.0e}, in the reference {eps:.0e}", attributes=values)
    D = pair.reference.sites[0].query.shape[-1] if pair.reference.sites else features
    if features > D and weights[0].numel() in (D, features):
        words = ["all heads", "each head"] if weights[0].numel() == D else ["each head", "all heads"]

        def hook(args: tuple, out: Tensor) -> Tensor:
            square = args[0].square()
            heads = [axis for axis in range(1, square.dim() - 1) if square.shape[axis] != pair.reference.L]
            by_head = square.unflatten(-1, (-1, D)).mean(-1).repeat_interleave(D, -1)
            other = square.mean((*heads, -1), keepdim=True) if heads else by_head
            return out * ((square.mean(-1, keepdim=True) + eps) / (other + eps)).sqrt()

        text = "the norm is over {}, in the reference over {}".format(*words)
        yield Change("norm-heads", text, outputs=dict.fromkeys(scope, hook))


def _kind(module: nn.Module) -> Any:
    return type(module), [p.shape for p in module.parameters()]


def _late(modules: list[Any]) -> Function:
    return lambda site, x: modules[site.number].forward(x)


def activations(pair: Pair) -> Iterator[Change]:
    """Another activation."""
    done: set[str] = set()
    for step in pair.reference.steps:
        is_module = step.path in pair.leaves and step.kind == "out" and not list(pair.modules[step.path].parameters())
        x = pair.reference.flat(step.args[0]) if step.args and (is_module or step.kind in ("gelu", "silu", "relu")) else None
        is_other = x is None or x.shape != step.value.shape or (is_module and step.path not in pair.suspects)
        if x is None or is_other or step.key in done or _is_close(x, step.value):
            continue
        done.add(step.key)
        for name, function in ACTIVATIONS.items():
            if not _is_close(function(x), step.value):
                hook = lambda args, out, f=function: f(args[0])  # noqa: E731
                hooks: dict[Any, Function] = dict.fromkeys(pair.alike(step.path), hook) if is_module else {step.key: hook}
                yield Change("activation", f"the activation is {name}, unlike in the reference", outputs=hooks)


def multipliers(pair: Pair) -> Iterator[Change]:
    """A sum with other factors, or an output times a constant."""
    done: set[str] = set()
    last = max([0, *pair.is_shared.nonzero().flatten().tolist()])
    for number in range(max(0, last - 60), min(len(pair.reference.steps), last + 60)):
        step, is_shared = pair.reference.steps[number], bool(pair.is_shared[number])
        is_table = isinstance(pair.modules.get(step.key), nn.Embedding)
        if (is_shared and not is_table) or step.key in done or step.kind == "in":
            continue
        parts = [pair.reference.flat(part) for part in step.args[:2]] if step.kind in SUMS else [step.value]
        if any(part is None or part.shape != step.value.shape for part in parts):
            continue
        done.add(step.key)
        columns = torch.stack([part.flatten() for part in parts if part is not None], 1)
        where, is_sum, found = step.path or "the model", len(parts) == 2, list[list[float]]()
        for other in pair.near(step.value.shape[-1], is_new=is_sum or is_shared):
            factors = torch.linalg.lstsq(columns, other.reshape(-1, 1)).solution.flatten()
            is_other = factors.norm() > 1e-3 and not _is_close(factors, torch.ones_like(factors))
            found += [factors.tolist()] if is_other and _is_close(columns @ factors, other.flatten()) else []
        found.sort(key=lambda factors: -min(map(abs, factors)))
        for a, b in [[*factors, 0.0][:2] for factors in found[:1]] + [(0.0, 1.0), (1.0, 0.0)] * is_sum:
            word = "sum" if is_sum else "output" if step.kind == "out" else step.kind
            text = f"{_number(a)} x + {_number(b)} y" if is_sum else f"{_number(a)} times that of the reference"
            hook = _combined(a, b) if is_sum else _scaled(a)
            hooks: dict[Any, Function] = dict.fromkeys(pair.alike(step.path), hook) if step.kind == "out" else {step.key: hook}
            yield Change("multiplier", f"the {word} in {where} is {text}", outputs=hooks)


def _combined(a: float, b: float) -> Function:
    return lambda args, out: a * args[0] + b * args[1]


def _scaled(a: float) -> Function:
    return lambda args, out: a * out


def tables(pair: Pair) -> Iterator[Change]:
    """Tied weights, and positions that begin elsewhere or are missing."""
    found = {path: module for path, module in pair.modules.items() if isinstance(module, nn.Embedding)}
    for path, table in found.items():
        for name, module in pair.modules.items():
            weight = getattr(module, "weight", None)
            if isinstance(weight, Tensor) and weight.shape == table.weight.shape and weight is not table.weight:
                yield Change("tying", f"{name} has the weights of {path}", tensors={weight: table.weight})
        if len(found) > 1:
            yield Change("multiplier", f"{path} is not added", outputs={table: lambda args, out: 0 * out})
            for n in (1, 2, -1, -2):
                hooks: dict[nn.Module, Function] = {table: _shifted(n, table.num_embeddings)}
                yield Change("position-offset", f"the rows of {path} are read {n:+d} further", inputs=hooks)


def _shifted(n: int, size: int) -> Function:
    return lambda args: ((args[0] + n).clamp(0, size - 1), *args[1:])


def biases(pair: Pair) -> Iterator[Change]:
    """A bias that is not added."""
    found = {pattern(path): path for path, p in pair.model.named_parameters() if path.endswith("bias") and p.any()}
    for name, path in found.items():
        zeros = {p: torch.zeros_like(p) for n, p in pair.model.named_parameters() if pattern(n) == name}
        yield Change("bias-missing", f"{path} is not added", tensors=zeros)


MEASURED = (rotary, visible, score_map, heads)
"""Changes that seldom fit by accident."""

CATALOGUE = (*MEASURED, multipliers, norms, activations, splits, siblings, tables, biases)


def _is_close(x: Tensor, y: Tensor, tolerance: float = CLOSE) -> bool:
    """Return whether two tensors are equal to rounding."""
    if x.shape != y.shape and y.dim():
        return False
    return bool((x - y).abs().max() <= tolerance * torch.maximum(x.abs().max(), y.abs().max()))


def _number(value: float) -> str:
    """Return a short number: 10000, 0.35355."""
    return f"{value:.0f}" if abs(value) < 1e9 and abs(value - round(value)) < 1e-4 * abs(value) else f"{value:.4g}"
