"""The catalogue of ``twin``: changes of a reference that reproduce common mistakes in a port, with numbers measured in both."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitx.check.tensor_trace import LOW, Change, Site, Step, Trace, matched, pattern

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
    "relu": F.relu,
    "squared relu": lambda x: F.relu(x).square(),
}
CLOSE = 1e-6
"""The largest relative error of a measured relation."""


@dataclass
class Pair:
    """A call of the port and a call of the reference.

    Attributes:
        is_matched: for each step of the port, whether the reference has it. is_shared: for each step of the reference, whether the port does.
    """

    port: Trace
    reference: Trace
    model: nn.Module

    def __post_init__(self) -> None:
        self.is_matched = matched(self.port.steps, self.reference.steps)
        self.is_shared = matched(self.reference.steps, self.port.steps)
        self.modules = dict(self.model.named_modules())
        shared = self.is_shared.nonzero()
        self.last_shared = int(shared[-1]) if len(shared) else 0

    def alike(self, path: str) -> list[nn.Module]:
        """Return the modules at the same place of all layers."""
        return [module for name, module in self.modules.items() if pattern(name) == pattern(path)]

    def news(self, features: int, limit: int = 60) -> list[Step]:
        """Return the steps of the port around the first that the reference lacks."""
        missing = (~self.is_matched).nonzero()
        start = max(0, int(missing[0]) - 10) if len(missing) else 0
        return [step for step in self.port.steps[start:] if step.value.shape[-1] == features][:limit]

    def leaves(self) -> dict[str, tuple[Step, Step]]:
        """Return the steps in and out of each module without children, by path."""
        heads: dict[str, Step] = {}
        found: dict[str, tuple[Step, Step]] = {}
        for step in self.reference.steps:
            if step.kind == "in":
                heads[step.key] = step
            elif step.kind == "out" and step.path in heads and not any(self.modules[step.path].children()):
                found.setdefault(step.path, (heads[step.path], step))
        return found


# --- attention


@dataclass(frozen=True)
class Rotation:
    """A rotation of queries or keys.

    Attributes:
        is_halves: whether dimension i is rotated with i + dims/2, or else 2i with 2i + 1.
        table: complex (L, dims/2), the factors by position.
        width: the size of a head.
    """

    is_halves: bool
    table: Tensor
    width: int

    @property
    def dims(self) -> int:
        return 2 * self.table.shape[1]

    @property
    def frequencies(self) -> Tensor:
        """Return the angle between two positions for each pair."""
        return torch.angle(self.table[1] * self.table[0].conj())

    def apply(self, x: Tensor, back: bool = False) -> Tensor:
        """Rotate (B, H, L, D), or undo the rotation."""
        dims = self.dims
        pairs = x[..., :dims].unflatten(-1, (2, -1)).mT if self.is_halves else x[..., :dims].unflatten(-1, (-1, 2))
        turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * (1 / self.table if back else self.table))
        return torch.cat(((turned.mT if self.is_halves else turned).flatten(-2), x[..., dims:]), -1)

    @staticmethod
    def between(before: Tensor, after: Tensor) -> Rotation | None:
        """Return the rotation from one tensor (B, H, L, D) to another, or None."""
        width = before.shape[-1]
        for is_halves in (True, False):
            for dims in sorted({d for d in (width, width // 2, width // 4, 3 * width // 4) if d > 1 and d % 2 == 0}, reverse=True):
                whole = Rotation(is_halves, torch.ones(before.shape[2], dims // 2, dtype=torch.complex128), width)
                z, w = (torch.view_as_complex(whole.pairs(x.double()).contiguous()) for x in (before, after))
                table = (w * z.conj()).sum((0, 1)) / (z.abs() ** 2).sum((0, 1))
                rotation = Rotation(is_halves, table, width)
                if _is_close(rotation.apply(before.double()), after):
                    return rotation
        return None

    def pairs(self, x: Tensor) -> Tensor:
        """Return (B, H, L, dims/2, 2)."""
        return x[..., : self.dims].unflatten(-1, (2, -1)).mT if self.is_halves else x[..., : self.dims].unflatten(-1, (-1, 2))

    @staticmethod
    def at(trace: Trace, site: Site, name: str) -> Rotation | None:
        """Return the rotation of the queries or keys of an attention. Without one, its angles are zero."""
        after: Tensor = getattr(site, name)
        first = after[:, :: _repeats(after)] if name == "key" else after
        H, D = first.shape[1], first.shape[3]
        norms = first.norm(dim=-1)
        for step in reversed(trace.steps[: site.start]):
            if step.value.shape[-1] != H * D:
                continue
            before = step.value.unflatten(-1, (H, D)).transpose(1, 2)
            ratio = norms / before.norm(dim=-1)
            if _is_close(ratio, ratio.mean()) and not _is_close(before * ratio.mean(), first):
                rotation = Rotation.between(before, first)
                if rotation is not None:
                    return rotation
        return Rotation(True, torch.ones(first.shape[2], D // 2, dtype=torch.complex128, device=first.device), D)


def rotary(pair: Pair) -> Iterator[Change]:
    """The rotation of the port."""
    tables = []
    for ours, theirs in zip(pair.reference.sites, pair.port.sites, strict=False):
        try:
            tables.append({n: (Rotation.at(pair.reference, ours, n), Rotation.at(pair.port, theirs, n)) for n in ("query", "key")})
        except (RuntimeError, ValueError):
            return
    if not tables:
        return

    def turn(x: Tensor, rotations: tuple[Rotation, Rotation]) -> Tensor:
        ours, theirs = rotations
        plain = Rotation(theirs.is_halves, theirs.table / theirs.table.abs().mean() * ours.table.abs().mean(), theirs.width)
        return plain.apply(ours.apply(x, back=True))

    def query_key(number: int, site: Site, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        found = tables[number]
        return turn(query, found["query"]), turn(key, found["key"])

    texts = {name: _rotation_text(*tables[0][name]) for name in ("query", "key")}
    if texts["query"] == texts["key"] != ("", ""):
        yield Change(*texts["query"], query_key=query_key)
    else:
        for name, (id, text) in texts.items():
            if text:
                yield Change(id, f"{text} (of each {name} only)", query_key=query_key)


def _rotation_text(ours: Rotation, theirs: Rotation) -> tuple[str, str]:
    """Return the id and the words for the difference of two rotations."""
    f, g = ours.frequencies, theirs.frequencies
    if g.abs().max() < CLOSE < f.abs().max():
        return "rotary-missing", "positions are not rotated; the reference rotates them"
    if f.abs().max() < CLOSE < g.abs().max():
        return "rotary-added", "positions are rotated; the reference does not rotate them"
    words = {True: "halves (i, i + {})", False: "pairs (2i, 2i + 1)"}
    texts, id = [], ""
    if ours.is_halves != theirs.is_halves:
        id = "rotary-form"
        texts.append(f"rotary {words[theirs.is_halves]}; the reference has {words[ours.is_halves]}".format(theirs.dims // 2))
    if len(f) != len(g):
        id = id or "rotary-dims"
        texts.append(f"{theirs.dims} of {theirs.width} dimensions of a head are rotated; in the reference {ours.dims}")
    ratio = g / f if len(f) == len(g) else torch.tensor([1.0, 2.0])
    if len(f) == len(g) and _is_close(ratio, ratio.mean()):
        factor = float(ratio.mean())
        if abs(factor - 1) > 1e-5:
            id = id or ("rotary-direction" if factor < 0 else "rotary-scaling")
            texts.append(f"angles are {_number(factor)} times those of the reference")
    else:
        theta, base = _theta(theirs), _theta(ours)
        if theta and base and abs(theta / base - 1) > 1e-4:
            id = id or "rotary-theta"
            texts.append(f"theta is {_number(theta)}; in the reference {_number(base)}")
        elif not theta:
            id = id or "rotary-frequencies"
            texts.append(f"angles by position are {', '.join(map(_number, g.tolist()[:4]))}; in the reference {', '.join(map(_number, f.tolist()[:4]))}")
    return id, " and ".join(texts)


def _theta(rotation: Rotation) -> float | None:
    """Return θ if the frequencies are θ^(-2i/dims)."""
    f = rotation.frequencies
    if len(f) < 2 or f.min() <= 0:
        return None
    theta = float(f[1]) ** (-rotation.dims / 2)
    expected = theta ** (-torch.arange(len(f), device=f.device).double() * 2 / rotation.dims)
    return theta if torch.allclose(f.double(), expected, rtol=1e-4) else None


def visible(pair: Pair) -> Iterator[Change]:
    """The keys that the port sees."""
    sites = list(zip(pair.reference.sites, pair.port.sites, strict=False))
    if all(torch.equal(ours.visible, theirs.visible) for ours, theirs in sites):
        return

    def scores(number: int, site: Site, scores: Tensor) -> Tensor:
        seen = pair.port.sites[number].visible
        return scores if torch.equal(seen, pair.reference.sites[number].visible) else site.unmasked.where(seen, -torch.inf)

    numbers = [i for i, (ours, theirs) in enumerate(sites) if not torch.equal(ours.visible, theirs.visible)]
    ours, theirs = sites[numbers[0]]
    where = f" (in attention {', '.join(map(str, numbers))} of {len(sites)})" if len(numbers) < len(sites) else ""
    yield Change("visible", f"a token sees {_reach(theirs.visible)}; in the reference {_reach(ours.visible)}{where}", scores=scores)


def _reach(seen: Tensor) -> str:
    rows, columns = seen.nonzero(as_tuple=True)
    back, ahead = int((rows - columns).max()), int((columns - rows).max())
    last = len(seen) - 1
    past = "all tokens before it" if back == last else f"{back} tokens before it"
    return past + (", itself" if seen.diagonal().all() else ", not itself") + (
        "" if ahead <= 0 else " and all tokens after it" if ahead == last else f" and {ahead} after it"
    )


def score_map(pair: Pair) -> Iterator[Change]:
    """The scale and the soft-cap of the scores and of the logits."""
    for ours, theirs in zip(pair.reference.sites, pair.port.sites, strict=False):
        assert ours.scores is not None and theirs.scores is not None
        if ours.scores.shape != theirs.scores.shape:
            return
        seen = (ours.scores > LOW) & (theirs.scores > LOW)
        plain, cap = ours.uncapped
        factor, other = _factor_and_cap(plain[seen], theirs.scores[seen])
        if not factor or (abs(factor - 1) < CLOSE and _same(cap, other)):
            continue

        def scores(number: int, site: Site, scores: Tensor, factor: float = factor, other: float = other) -> Tensor:
            return _capped(site.uncapped[0] * factor, other).where(scores > LOW, scores)

        yield Change(*_map_text("scores", factor, cap, other, plain.shape[1], ours.query.shape[-1]), scores=scores)
        break
    logits = pair.reference.output
    plain, cap = logits, torch.inf
    for step in reversed(pair.reference.steps[-8:]):
        if step.kind == "tanh":
            cap = float((logits / step.value).median())
            plain = step.args[0] * cap
    if plain.shape == pair.port.output.shape:
        factor, other = _factor_and_cap(plain.flatten(), pair.port.output.flatten())
        if factor and not (abs(factor - 1) < CLOSE and _same(cap, other)):
            yield Change(*_map_text("logits", factor, cap, other), output=lambda _: _capped(plain * factor, other))


def _factor_and_cap(x: Tensor, y: Tensor) -> tuple[float, float]:
    """Return (c, t) with y = t · tanh(c · x / t), or (0, 0)."""
    x, y = x.double(), y.double()
    is_large = x.abs() > 1e-3 * x.abs().max()
    x, y = x[is_large], y[is_large]
    if not len(x):
        return 0.0, 0.0

    def fit(cap: float) -> tuple[float, float]:
        ratio = (y if cap == torch.inf else cap * torch.atanh((y / cap).clamp(-1, 1))) / x
        return float((ratio / ratio.median() - 1).abs().nan_to_num(9.0, 9.0).median()), float(ratio.median())

    caps = [torch.inf, *(float(y.abs().max()) * 1.0001 * 1.1**n for n in range(100))]
    best = min(caps, key=lambda cap: fit(cap)[0])
    if best != torch.inf:
        low, high = best / 1.1, best * 1.1
        for _ in range(80):
            left, right = low + (high - low) * 0.382, low + (high - low) * 0.618
            low, high = (low, right) if fit(left)[0] < fit(right)[0] else (left, high)
        best = (low + high) / 2
    factor = fit(best)[1]
    is_fit = _is_close(_capped(x * factor, best), y)
    return (factor, best) if is_fit else (0.0, 0.0)


def _capped(x: Tensor, cap: float) -> Tensor:
    return x if cap == torch.inf else cap * torch.tanh(x / cap)


def _map_text(what: str, factor: float, cap: float, other: float, heads: int = 0, width: int = 0) -> tuple[str, str]:
    texts, id = [], ""
    if abs(factor - 1) > CLOSE:
        id = "scale" if what == "scores" else "multiplier"
        texts.append(f"{what} are {_number(factor)} times those of the reference")
        names = {1 / width**0.5: "1/√d_k", width**0.5: "√d_k", 1 / heads**0.5: "1/√heads"} if width and heads else {}
        texts[-1] += next((f" ({name})" for value, name in names.items() if abs(factor / value - 1) < 1e-5), "")
    if not _same(cap, other):
        id = id or "soft-cap"
        words = ["no soft-cap" if c == torch.inf else f"a soft-cap of {_number(c)}" for c in (other, cap)]
        texts.append(f"{what} have {words[0]}; in the reference {words[1]}")
    return id, " and ".join(texts)


def _same(a: float, b: float) -> bool:
    return a == b or abs(a - b) <= 1e-4 * min(abs(a), abs(b))


def heads(pair: Pair) -> Iterator[Change]:
    """The order of heads."""
    if not pair.reference.sites:
        return
    key = pair.reference.sites[0].key
    H, repeats = key.shape[1], _repeats(key)
    if 1 < repeats < H:
        groups = H // repeats
        order = torch.arange(H) % groups * repeats
        yield Change(
            "head-order",
            f"query head h reads key head h % {groups}; in the reference h // {repeats}",
            query_key=lambda number, site, query, key: (query, key[:, order]),
            value=lambda number, site, value: value[:, order],
        )
    elif repeats == 1 and (groups := next((g for g in range(2, H) if H % g == 0 and _is_close(key[:, :g], key[:, g : 2 * g])), 0)):
        order = torch.arange(H) // (H // groups)
        yield Change(
            "head-order",
            f"query head h reads key head h // {H // groups}; in the reference h % {groups}",
            query_key=lambda number, site, query, key: (query, key[:, order]),
            value=lambda number, site, value: value[:, order],
        )

    def mix(x: Tensor) -> Tensor:
        return x.transpose(1, 2).reshape(x.shape)

    text = "heads are {} by a reshape without transpose(1, 2)"
    yield Change("head-merge", text.format("merged"), merged=lambda number, site, x: x.reshape(x.transpose(1, 2).shape).transpose(1, 2))
    yield Change(
        "head-merge",
        text.format("split"),
        query_key=lambda number, site, query, key: (mix(query), mix(key)),
        value=lambda number, site, value: mix(value),
    )


def _repeats(x: Tensor) -> int:
    """Return how many neighbouring heads are equal."""
    equal = [torch.equal(x[:, h], x[:, 0]) for h in range(x.shape[1])]
    return next((h for h, is_equal in enumerate(equal) if not is_equal), 1)


# --- modules


def splits(pair: Pair) -> Iterator[Change]:
    """The order of the parts of a fused projection."""
    groups: list[list[str]] = []
    last: Step | None = None
    leaves = pair.leaves()
    for path, (inner, _) in leaves.items():
        if max((p.dim() for p in pair.modules[path].parameters()), default=0) == 2 and inner.value.shape[-1] > 1:
            groups = groups if last is not None and _is_close(inner.marks, last.marks) else [*groups, []]
            groups[-1].append(path)
            last = inner
    seen: set[tuple[str, ...]] = set()
    for group in groups:
        if (name := tuple(map(pattern, group))) in seen:
            continue
        seen.add(name)
        sizes = [pair.modules[p].weight.numel() // leaves[p][0].value.shape[-1] for p in group]  # type: ignore[operator]
        for id, text, order in _orders(pair, sum(sizes)):
            yield Change(id, f"{' and '.join(group)}: {text}", modules=_reordered(pair, name, order))


def _orders(pair: Pair, total: int) -> Iterator[tuple[str, str, Tensor]]:
    """Orders of the features of a projection."""
    places = torch.arange(total)
    for site in pair.reference.sites[:1]:
        H, D = site.query.shape[1], site.query.shape[3]
        G = H // _repeats(site.key)
        if total == (H + 2 * G) * D:
            parts = places.split([H * D, G * D, G * D])
            for order in permutations(range(3)):
                if order != (0, 1, 2) and [len(parts[i]) for i in order] == [len(part) for part in parts]:
                    text = "the parts q, k, v are read as " + ", ".join("qkv"[i] for i in order)
                    yield "split-order", text, torch.cat([parts[i] for i in order])
                    if H == G:
                        yield "split-order", text, places.view(H, 3, D)[:, list(order)].flatten()
            grouped = places.view(G, -1, D)
            text = "the features are read as {}; in the reference as {}"
            names = "q, k, v within each head", "all q, all k, all v"
            by_head = torch.cat((grouped[:, :-2].flatten(), grouped[:, -2].flatten(), grouped[:, -1].flatten()))
            yield "split-order", text.format(*names), by_head
            yield "split-order", text.format(*names[::-1]), by_head.argsort()
    if total % 2 == 0:
        yield "gate-order", "the halves are swapped", places.roll(total // 2)
        yield "gate-order", "the halves are interleaved", places.view(-1, 2).T.flatten()
        yield "gate-order", "interleaved features are read as halves", places.view(2, -1).T.flatten()


def _reordered(pair: Pair, group: tuple[str, ...], order: Tensor) -> dict[nn.Module, Callable[[tuple, Any], Any]]:
    """Hooks that give modules with the same input each other's features."""
    hooks: dict[nn.Module, Callable[[tuple, Any], Any]] = {}
    for modules in zip(*map(pair.alike, group), strict=False):
        for number, module in enumerate(modules):

            def hook(args: tuple, out: Any, number: int = number, modules: tuple = modules) -> Any:
                outs = [m.forward(*args) for m in modules]
                return torch.cat(outs, -1)[..., order].split([o.shape[-1] for o in outs], -1)[number]

            hooks[module] = hook
    return hooks


def siblings(pair: Pair) -> Iterator[Change]:
    """Modules that use each other's weights."""
    shapes = {
        path: [p.shape for p in pair.modules[path].parameters()] for path in pair.leaves() if list(pair.modules[path].parameters())
    }
    done: set[tuple[str, str]] = set()
    for a in shapes:
        for b in shapes:
            name, layer = (pattern(a), pattern(b)), re.match(r"\D*\d+\.", a)
            is_near = layer is not None and b.startswith(layer[0]) and type(pair.modules[a]) is type(pair.modules[b])
            if a == b or not is_near or shapes[a] != shapes[b] or name in done:
                continue
            done.add(name)
            given = dict[Tensor, Tensor]()
            both = dict[Tensor, Tensor]()
            for one, two in zip(pair.alike(a), pair.alike(b), strict=False):
                given |= {p: q.detach().clone() for p, q in zip(one.parameters(), two.parameters(), strict=True)}
                both |= {q: p.detach().clone() for p, q in zip(one.parameters(), two.parameters(), strict=True)}
            if a < b:
                id = "gate-order" if shapes[a][0][0] != shapes[a][0][-1] else "swapped-weights"
                yield Change(id, f"{a} and {b} are swapped", tensors=given | both)
            yield Change("swapped-weights", f"{b} takes the place of {a}", tensors=given)


@dataclass(frozen=True)
class Norm:
    """(x - m) / √(variance + eps) · (weight + offset) + bias, with statistics over groups of ``size`` features.

    Attributes:
        is_centred: whether the mean m is subtracted.
    """

    is_centred: bool
    size: int
    offset: float
    eps: float

    def __call__(self, module: nn.Module, x: Tensor) -> Tensor:
        scaled = _groups(x, self.size, self.is_centred)
        scaled = (scaled * torch.rsqrt(scaled.square().mean(-1, keepdim=True) + self.eps)).flatten(-2)
        return _affine(module, scaled, self.offset)

    @staticmethod
    def between(module: nn.Module, before: Tensor, after: Tensor, sizes: list[int]) -> Norm | None:
        """Return the norm that gives ``after`` (B, L, F), or None."""
        for size in dict.fromkeys(sizes):
            for is_centred in (False, True):
                x = _groups(before.double(), size, is_centred)
                for offset in (0.0, 1.0, -1.0):
                    factor, shift = _affine(module, torch.ones_like(before).double(), offset), _affine(module, before * 0.0, offset)
                    y = ((after - shift) / (factor - shift)).unflatten(-1, (-1, size))
                    square = x.square().mean(-1)
                    ratio = (y * x).mean(-1) / square
                    eps = 1 / ratio.square() - square
                    if _is_close(x * ratio.unsqueeze(-1), y) and (eps - eps.median()).abs().max() <= 1e-5 * square.max():
                        least = square.argmin()
                        return Norm(is_centred, size, offset, float(eps.flatten()[least]))
        return None


def _groups(x: Tensor, size: int, is_centred: bool) -> Tensor:
    x = x.unflatten(-1, (-1, size))
    return x - x.mean(-1, keepdim=True) if is_centred else x


def _affine(module: Any, x: Tensor, offset: float) -> Tensor:
    """Multiply (B, L, F) by the weight, which may be that of a head, and add the bias."""
    parts = [p.detach() for p in module.parameters()]
    weight = parts[0].double() + offset if parts else torch.ones(1)
    bias = parts[1].double() if len(parts) > 1 else torch.zeros_like(weight)
    return (x.unflatten(-1, (-1, len(weight))) * weight + bias).flatten(-2)


def norms(pair: Pair) -> Iterator[Change]:
    """Another norm, or none."""
    found: dict[str, tuple[Norm, Step]] = {}
    sizes = [site.query.shape[-1] for site in pair.reference.sites[:1]]
    for path, (inner, outer) in pair.leaves().items():
        parts = list(pair.modules[path].parameters())
        if inner.value.shape != outer.value.shape or any(p.dim() != 1 for p in parts) or not parts:
            continue
        all_sizes = [parts[0].numel(), inner.value.shape[-1], *sizes]
        norm = Norm.between(pair.modules[path], inner.value, outer.value, [s for s in all_sizes if inner.value.shape[-1] % s == 0])
        if norm is not None:
            found[path] = norm, inner
    done: set[tuple[str, Any]] = set()
    for path, (norm, inner) in found.items():
        if (pattern(path), None) in done:
            continue
        done.add((pattern(path), None))
        module, features = pair.modules[path], inner.value.shape[-1]
        all_sizes = [norm.size, features, *(s for s in sizes if features % s == 0)]
        kin = [p for p in found if type(pair.modules[p]) is type(module) and found[p][0] == norm]
        scopes = [[pair.modules[p] for p in kin], pair.alike(path)]
        for step in pair.news(features):
            other = Norm.between(module, inner.value, step.value, all_sizes)
            if other is None or (text := _norm_text(norm, other)) is None or (pattern(path), text) in done:
                continue
            done.add((pattern(path), text))
            for scope in scopes:
                yield Change(*text, modules={m: _norm_hook(m, pair, other) for m in scope})
    for path in found:
        if (pattern(path), "missing") not in done:
            done.add((pattern(path), "missing"))
            yield Change("norm-missing", f"{path} is missing", modules={m: lambda args, out: args[0] for m in pair.alike(path)})
    yield from _norm_after_rotation(pair, found)


def _norm_hook(module: nn.Module, pair: Pair, norm: Norm) -> Callable[[tuple, Any], Any]:
    def hook(args: tuple, out: Any) -> Any:
        x, B, L = args[0], pair.reference.B, pair.reference.L
        if x.dim() == 4 and x.shape[2] == L != x.shape[1]:
            return norm(module, x.transpose(1, 2).flatten(2)).view(B, L, x.shape[1], -1).transpose(1, 2)
        return norm(module, x.flatten(2)).view_as(x)

    return hook


def _norm_text(ours: Norm, theirs: Norm) -> tuple[str, str] | None:
    if ours.is_centred != theirs.is_centred:
        words = {True: "subtracts the mean", False: "does not subtract the mean"}
        return "norm-kind", f"the norm {words[theirs.is_centred]}; in the reference it {words[ours.is_centred]}"
    if ours.offset != theirs.offset:
        words = {0.0: "weight", 1.0: "1 + weight", -1.0: "weight - 1"}
        return "norm-weight", f"the norm multiplies by {words[theirs.offset]}; in the reference by {words[ours.offset]}"
    if ours.size != theirs.size:
        return "norm-heads", f"the norm is over {theirs.size} features; in the reference over {ours.size}"
    if abs(ours.eps - theirs.eps) > 0.05 * max(abs(ours.eps), abs(theirs.eps)):
        return "norm-eps", f"eps is {theirs.eps:.1g}; in the reference {ours.eps:.1g}"
    return None


def _norm_after_rotation(pair: Pair, found: dict[str, tuple[Norm, Step]]) -> Iterator[Change]:
    """The norms of queries and keys after their rotation."""
    for site in pair.reference.sites[:1]:
        D = site.query.shape[-1]
        paths = [p for p, (norm, _) in found.items() if norm.size == D and p.startswith(site.path)][:2]
        if len(paths) == 2:
            many = list(zip(*map(pair.alike, paths), strict=False))

            def query_key(number: int, site: Site, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
                one, two = many[number]
                return one.forward(query), two.forward(key)

            modules: dict[nn.Module, Callable] = {m: lambda args, out: args[0] for ms in many for m in ms}
            text = f"{paths[0]} and {paths[1]} come after the rotation; in the reference before it"
            yield Change("norm-order", text, modules=modules, query_key=query_key)


def activations(pair: Pair) -> Iterator[Change]:
    """Another activation."""
    done: set[str] = set()
    for path, (inner, outer) in pair.leaves().items():
        if inner.value.shape == outer.value.shape and not list(pair.modules[path].parameters()) and pattern(path) not in done:
            done.add(pattern(path))
            for name, function in ACTIVATIONS.items():
                if not _is_close(function(inner.value), outer.value) and not _is_close(inner.value, outer.value):
                    hooks = {m: lambda args, out, f=function: f(args[0]) for m in pair.alike(path)}
                    yield Change("activation", f"the activation is {name}; in the reference {path} is another", modules=hooks)
    for step in pair.reference.steps:
        if step.kind in ("gelu", "silu", "relu") and step.key not in done:
            done.add(step.key)
            for name, function in ACTIVATIONS.items():
                if not _is_close(function(step.args[0]), _like(step)):
                    text = f"the activation is {name}; in the reference {step.kind}"
                    yield Change("activation", text, steps={step.key: lambda args, out, f=function: f(args[0])})


def _like(step: Step) -> Tensor:
    return step.value.reshape(step.args[0].shape) if step.args[0].dim() == 3 else step.value


def multipliers(pair: Pair) -> Iterator[Change]:
    """A sum with other factors, or an output times a constant."""
    done: set[str] = set()
    for step, is_shared in zip(pair.reference.steps, pair.is_shared.tolist(), strict=True):
        if is_shared or step.key in done or len(done) > 30 or step.kind == "in":
            continue
        x, y = [pair.reference._flat(a) if isinstance(a, Tensor) and a.dim() else None for a in (*step.args, None, None)[:2]]
        if step.kind in ("add", "__add__", "__iadd__", "add_", "__radd__") and x is not None and y is not None:
            done.add(step.key)
            x, y = x.expand_as(step.value), y.expand_as(step.value)
            for other in pair.news(step.value.shape[-1]):
                a, b = _weights(x, y, other.value)
                if abs(a) + abs(b) > 0.01 and (abs(a - 1) > CLOSE or abs(b - 1) > CLOSE) and _is_close(a * x + b * y, other.value):
                    text = f"the sum in {step.path or 'the model'} is {_number(a)} x + {_number(b)} y; in the reference x + y"
                    hook = {step.key: lambda args, out, a=a, b=b: a * args[0] + b * args[1]}
                    yield Change("multiplier", text, steps=hook)
                    break
        elif step.kind in ("out", "mul", "__mul__", "linear", "embedding") and step.value.abs().max() > 0:
            done.add(step.key)
            for other in pair.news(step.value.shape[-1], 20):
                factor = float((other.value * step.value).sum() / step.value.square().sum())
                if abs(factor - 1) > CLOSE and abs(factor) > 1e-6 and _is_close(factor * step.value, other.value):
                    text = f"the output of {step.path or 'the model'} is {_number(factor)} times that of the reference"
                    if step.kind == "out" and step.path:
                        hooks = {m: lambda args, out, c=factor: c * out for m in pair.alike(step.path)}
                        yield Change("multiplier", text, modules=hooks)
                    else:
                        yield Change("multiplier", text, steps={step.key: lambda args, out, c=factor: c * out})
                    break


def _weights(x: Tensor, y: Tensor, z: Tensor) -> tuple[float, float]:
    """Return (a, b) with the smallest error of a · x + b · y = z."""
    columns = torch.stack((x.flatten(), y.flatten()), 1).double()
    a, b = torch.linalg.lstsq(columns, z.flatten().double().unsqueeze(1)).solution.flatten().tolist()
    return a, b


def residuals(pair: Pair) -> Iterator[Change]:
    """A norm that reads the residual stream before or after the attention."""
    return iter(())


def tables(pair: Pair) -> Iterator[Change]:
    """Tied weights and positions that begin elsewhere."""
    kinds = [(path, m) for path, m in pair.modules.items() if isinstance(m, nn.Embedding)]
    for path, table in kinds:
        for name, module in pair.modules.items():
            weight = getattr(module, "weight", None)
            if isinstance(weight, Tensor) and weight.shape == table.weight.shape and weight.data_ptr() != table.weight.data_ptr():
                yield Change("tying", f"{name} has the weights of {path}", tensors={weight: table.weight.detach()})
        for offset in (1, 2, -1):

            def shifted(args: tuple, offset: int = offset, size: int = table.num_embeddings) -> tuple:
                return ((args[0] + offset).clamp(0, size - 1), *args[1:])

            if len(kinds) > 1:
                yield Change("position-offset", f"the rows of {path} are read {offset:+d} further", inputs={table: shifted})


def biases(pair: Pair) -> Iterator[Change]:
    """A bias that is not added."""
    done: set[str] = set()
    for path, bias in pair.model.named_parameters():
        if path.endswith("bias") and pattern(path) not in done and bias.any():
            done.add(pattern(path))
            names = [p for n, p in pair.model.named_parameters() if pattern(n) == pattern(path)]
            yield Change("bias-missing", f"{path} is not added", tensors={p: torch.zeros_like(p) for p in names})


CATALOGUE = (rotary, visible, score_map, heads, norms, multipliers, activations, splits, siblings, residuals, tables, biases)
"""Measured changes first: they are few, and seldom fit by accident."""


def _is_close(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors are equal to rounding."""
    if not (x.shape == y.shape or y.dim() == 0):
        return False
    gap = (x - y).abs().max()
    return bool(gap <= CLOSE * torch.maximum(x.abs().max(), y.abs().max()))


def _number(value: float) -> str:
    """Return a short number: 10000, 0.3535534, 1e-05."""
    return str(int(value)) if math.isfinite(value) and value == round(value) and abs(value) < 1e9 else f"{value:.5g}"
