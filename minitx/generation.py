"""What a model writes: greedy, by sampling or by beam search, over any causal or encoder–decoder model.

``generate`` is the way in. The filters are pure functions of logits (B, V) that set what they leave out to −inf; in
sampling they follow one another in the order of this file: repetition penalty, temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minitx.nn import KVCache
from minitx.nn.models import TransformerModel


def penalise_repeats(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """x / θ where x > 0 and x · θ elsewhere, for the ids that are in the text already.

    Keskar et al. 2019, "CTRL", arXiv:1909.05858, §4.1, who divide by θ throughout, which makes an id with a negative
    logit *likelier*; multiplying there is what ``transformers`` does.

    Args:
        logits: (B, V). seen: bool (B, V), True = in the row's text. penalty: θ > 0; 1 changes nothing, the paper has 1.2.

    >>> penalise_repeats(torch.tensor([[3.0, -1.0, 3.0]]), torch.tensor([[True, True, False]]), 2.0).tolist()
    [[1.5, -2.0, 3.0]]
    """
    if not 0.0 < penalty < math.inf:
        raise ValueError(f"repetition_penalty={penalty} must be a positive number (1 for none)")
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def apply_temperature(logits: Tensor, temperature: float) -> Tensor:
    """(x − max x) / T: the softmax of x / T, with nothing that overflows where T is tiny.

    Ackley et al. 1985, "A learning algorithm for Boltzmann machines".
    """
    if not 0.0 < temperature < math.inf:
        raise ValueError(f"temperature={temperature} must be a positive number (0 for greedy, in generate)")
    return (logits - logits.amax(dim=-1, keepdim=True)) / temperature


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """The k largest logits; among equals, the lower ids. Fan et al. 2018, arXiv:1805.04833, §5.1.

    >>> keep_top_k(torch.tensor([[2.0, 5.0, 3.0]]), 2).tolist()
    [[-inf, 5.0, 3.0]]
    """
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise ValueError(f"top_k={k} must be a positive whole number")
    order = logits.argsort(dim=-1, descending=True, stable=True)
    return logits.scatter(-1, order[..., k:], -math.inf)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """The nucleus: the fewest ids, likeliest first, whose probabilities sum to p or more; never none.

    An id stays if the mass of those before it is below p. Holtzman et al. 2020, arXiv:1904.09751, §3.1.

    >>> keep_top_p(torch.tensor([[0.5, 0.125, 0.375]]).log(), 0.6).exp().tolist()
    [[0.5, 0.0, 0.375]]
    """
    if not 0.0 < p <= 1.0:
        raise ValueError(f"top_p={p} must lie in (0, 1] (1 keeps everything)")
    if p == 1.0:  # rounding may bring the mass to 1 before the last id
        return logits
    ranked, order = logits.sort(dim=-1, descending=True, stable=True)
    probs = ranked.softmax(dim=-1)
    dropped = probs.cumsum(dim=-1) - probs >= p  # never the first, before which there is 0
    return logits.scatter(-1, order, ranked.masked_fill(dropped, -math.inf))


def keep_min_p(logits: Tensor, ratio: float) -> Tensor:
    """The ids with p_i ≥ ratio · max p. Nguyen et al. 2024, arXiv:2407.01082, §3.

    >>> keep_min_p(torch.tensor([[0.5, 0.125, 0.375]]).log(), 0.5).exp().tolist()
    [[0.5, 0.0, 0.375]]
    """
    if not 0.0 <= ratio <= 1.0:
        raise ValueError(f"min_p={ratio} must lie in [0, 1] (0 keeps everything)")
    probs = logits.softmax(dim=-1)
    return logits.masked_fill(probs < ratio * probs.amax(dim=-1, keepdim=True), -math.inf)


def draw(logits: Tensor, uniforms: Tensor) -> Tensor:
    """One id a row from softmax(logits): the first i with p_0 + … + p_i > u. On the CPU, in float64, on every device.

    Args:
        logits: (B, V). uniforms: float64 (B,) in [0, 1), on the CPU: one number a row and step, so that a row draws
            alike whatever stands beside it.

    >>> draw(torch.tensor([[0.5, 0.0, 0.5]]).log().repeat(2, 1), torch.tensor([0.4, 0.5], dtype=torch.float64)).tolist()
    [0, 2]
    """
    mass = logits.softmax(dim=-1).cpu().double().cumsum(dim=-1)
    ids = torch.searchsorted(mass, (uniforms * mass[:, -1]).unsqueeze(1), right=True)
    return ids.squeeze(1).to(logits.device)


def row_uniforms(num_rows: int, length: int, generator: torch.Generator | None = None) -> Tensor:
    """float64 (num_rows, length) in [0, 1): row i has a generator of its own, seeded by the i-th draw from ``generator``.

    So row i is the same whatever ``num_rows`` is, and a longer row begins like a shorter one.
    """
    device = "cpu" if generator is None else generator.device
    seeds = torch.randint(2**63 - 1, (num_rows,), generator=generator, device=device)
    own = [torch.Generator().manual_seed(seed) for seed in seeds.tolist()]
    return torch.stack([torch.rand(length, dtype=torch.float64, generator=each) for each in own])


def length_norm(length: int, penalty: float) -> float:
    """lp(Y) = ((5 + |Y|) / 6)^α, by which beam search divides log P(Y).

    Wu et al. 2016, arXiv:1609.08144, eq. 14. α = 0 compares log P itself, which favours short answers.

    >>> length_norm(1, 0.6), length_norm(7, 1.0)
    (1.0, 2.0)
    """
    return ((5 + length) / 6) ** penalty


@torch.no_grad()
def generate(
    model: nn.Module,
    input_ids: Tensor,
    *,
    key_mask: Tensor | None = None,
    decoder_input_ids: Tensor | None = None,
    max_new_tokens: int | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    num_beams: int = 1,
    length_penalty: float = 0.6,
    stop: Iterable[int] | None = None,
    generator: torch.Generator | None = None,
    use_cache: bool = True,
    context: int | None = None,
    on_token: Callable[[int, int], object] | None = None,
) -> list[Tensor]:
    """The ids that ``model`` writes after each row: greedy, sampled (``temperature`` > 0) or by beam search.

    Beam search keeps the ``num_beams`` likeliest continuations and returns the answer with the largest
    log P(Y) / lp(Y) (``length_norm``; |Y| counts the stop token) among those that were stopped or cut; it ends where
    nothing still open could become better.

    Args:
        model: in eval mode; a causal model as ``DecoderLM``, or one with ``encode`` as ``EncoderDecoder``.
        input_ids: int (B, L): the prompts, or the sources of an encoder–decoder.
        key_mask: bool (B, L), True = real token; prompts are padded on the left.
        decoder_input_ids: int (B, T), how an encoder–decoder's answers begin; default ``config.bos_id``.
        max_new_tokens: the longest answer; default 256, or what a table of positions leaves room for.
        temperature: 0 takes the likeliest id, else logits are divided by it and an id is drawn.
        top_k, top_p, min_p: filters of sampling, None for off.
        repetition_penalty: on ids of the prompt and the answer (an encoder–decoder: of the answer), 1 for off.
        num_beams: 1 for no beam search. length_penalty: α of beam search; 0.6 as in Vaswani et al. 2017, §6.1.
        stop: ids that end an answer; default ``config.eos_id``, if there is one.
        generator: seeds one stream of draws a row: a row's answer does not depend on the others. Default torch's global one.
        context: the most tokens of a causal model's text to look back on; where it grows longer, the older half is forgotten
            and the rest read anew, in positions that the model was trained on. None: everything is kept.
        use_cache: keep keys and values, else the whole text is read again for each token; the same ids.
        on_token: called with (row, id) for each id of the answers at once; with beams, when the search is done.

    Returns:
        B tensors of new ids, without the stop token: shorter than ``max_new_tokens`` exactly where a row was stopped.

    Raises:
        ValueError: an argument out of range, one that would have no effect, or inputs that the model has no room for.
        FloatingPointError: logits that are NaN or infinite.

    >>> from minitx.config import TransformerConfig
    >>> from minitx.nn import DecoderLM
    >>> model = DecoderLM(TransformerConfig(vocab_size=11, embed_dim=12, num_heads=3, num_layers=2)).eval()
    >>> [answer.shape for answer in generate(model, torch.tensor([[1, 2, 3], [5, 7, 2]]), max_new_tokens=4)]
    [torch.Size([4]), torch.Size([4])]
    """
    filters = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    _check_choice(model, max_new_tokens, temperature, filters, num_beams, length_penalty)
    prompt, prompt_mask = _prompt(model, input_ids, key_mask, decoder_input_ids)
    max_new_tokens = _fitting(model, prompt.shape[1], max_new_tokens, context)
    capacity = prompt.shape[1] + max_new_tokens - 1
    reader = _Reader(model, input_ids, key_mask, capacity if use_cache else None, context)
    logits = reader.read(prompt, prompt_mask)
    seen = None if repetition_penalty == 1.0 else _seen(prompt, prompt_mask, logits)
    stop_ids = _stop_ids(model, stop, logits)

    def penalised(logits: Tensor, seen: Tensor | None) -> Tensor:
        return logits if seen is None else penalise_repeats(logits, seen, repetition_penalty)

    if num_beams > 1:
        answers = _beam_search(reader, logits, seen, penalised, stop_ids, max_new_tokens, num_beams, length_penalty)
        for row, answer in enumerate(answers):
            for token in answer.tolist() if on_token is not None else ():
                on_token(row, token)  # type: ignore[misc]
        return answers
    uniforms = row_uniforms(len(prompt), max_new_tokens, generator) if temperature > 0.0 else None

    def choose(logits: Tensor, step: int) -> Tensor:
        logits = penalised(logits, seen)
        return logits.argmax(-1) if uniforms is None else draw(_filtered(logits, temperature, **filters), uniforms[:, step])  # type: ignore[arg-type]

    return _token_by_token(reader, logits, seen, choose, stop_ids, max_new_tokens, on_token)


def _filtered(logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, min_p: float | None) -> Tensor:
    logits = apply_temperature(logits, temperature)
    logits = logits if top_k is None else keep_top_k(logits, top_k)
    logits = logits if top_p is None else keep_top_p(logits, top_p)
    return logits if min_p is None else keep_min_p(logits, min_p)


def _token_by_token(
    reader: _Reader,
    logits: Tensor,
    seen: Tensor | None,
    choose: Callable[[Tensor, int], Tensor],
    stop: Tensor,
    max_new_tokens: int,
    on_token: Callable[[int, int], object] | None,
) -> list[Tensor]:
    """Greedy or sampled answers; a row that was stopped is read on with the others, and what follows is dropped."""
    answers: list[list[int]] = [[] for _ in logits]
    done = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
    for step in range(max_new_tokens):
        tokens = choose(logits, step)  # (B,)
        done |= torch.isin(tokens, stop)
        for row, (token, is_done) in enumerate(zip(tokens.tolist(), done.tolist(), strict=True)):
            if not is_done:
                answers[row].append(token)
                if on_token is not None:
                    on_token(row, token)
        if step + 1 == max_new_tokens or bool(done.all()):
            break
        if seen is not None:
            seen.scatter_(1, tokens.unsqueeze(1), True)
        logits = reader.read(tokens.unsqueeze(1))
    return [torch.tensor(answer, dtype=torch.long, device=logits.device) for answer in answers]


def _beam_search(
    reader: _Reader,
    logits: Tensor,
    seen: Tensor | None,
    penalised: Callable[[Tensor, Tensor | None], Tensor],
    stop: Tensor,
    max_new_tokens: int,
    num_beams: int,
    penalty: float,
) -> list[Tensor]:
    """The best answer of each row. Of each step's ``num_beams`` likeliest texts, those that end leave the beam.

    Sutskever et al. 2014, arXiv:1409.3215, §3.2. The beam begins with one text, the prompt; a place that an ended text
    left has the score −inf until another takes it.
    """
    B, V = logits.shape
    scores = logits.new_zeros(B, 1)  # log P of k texts a row
    texts = torch.zeros(B, 1, 0, dtype=torch.long, device=logits.device)
    best_score, best = logits.new_full((B,), -math.inf), list(texts[:, 0])
    for length in range(1, max_new_tokens + 1):
        k = scores.shape[1]
        log_probs = penalised(logits, seen).log_softmax(dim=-1).view(B, k, V)
        scores, chosen = (scores.unsqueeze(-1) + log_probs).flatten(1).topk(min(num_beams, k * V))  # (B, k')
        parents, tokens = chosen // V, chosen % V
        texts = texts.gather(1, parents.unsqueeze(-1).expand(-1, -1, length - 1))
        texts = torch.cat((texts, tokens.unsqueeze(-1)), dim=-1)  # (B, k', length)
        ends = torch.isin(tokens, stop) | (length == max_new_tokens)
        score, beam = (scores / length_norm(length, penalty)).masked_fill(~ends, -math.inf).max(dim=1)
        for row in (score > best_score).nonzero().flatten().tolist():
            best_score[row], best[row] = score[row], texts[row, beam[row]]
        scores = scores.masked_fill(ends, -math.inf)
        # log P only falls, so no open text can come to more than it has now, divided by the largest norm ahead
        ahead = max(length_norm(length + 1, penalty), length_norm(max_new_tokens, penalty))
        if bool((best_score >= scores.amax(dim=1) / ahead).all()):
            break
        rows = (parents + k * torch.arange(B, device=parents.device).unsqueeze(1)).flatten()  # (B * k',)
        reader.reorder(rows)
        if seen is not None:
            seen = seen.index_select(0, rows).scatter(1, tokens.view(-1, 1), True)
        logits = reader.read(tokens.view(-1, 1))
    return [answer[:-1] if bool(torch.isin(answer[-1:], stop)) else answer for answer in best]


class _Reader:
    """Hands a model the next ids of each row and remembers what it has read: in a cache, or (``capacity=None``) as ids.

    With more than ``context`` ids, the older half is forgotten and what is left is read anew.
    """

    def __init__(
        self, model: nn.Module, input_ids: Tensor, key_mask: Tensor | None, capacity: int | None, context: int | None = None
    ) -> None:
        self.model, self.capacity, self.context = model, capacity, context
        self.memory = model.encode(input_ids, key_mask=key_mask) if _has_source(model) else None  # type: ignore[operator]
        self.source_mask = key_mask if _has_source(model) else None
        self.cache: KVCache | None = None
        self.ids: Tensor | None = None  # what the model has in view, and its padding
        self.key_mask: Tensor | None = None

    def read(self, ids: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """ids (B, L) -> logits (B, V) of what follows the last, in float32 at least; ``key_mask`` is the prompt's."""
        kept, new_mask = self.context, key_mask
        fresh = self.ids is None or self.cache is None
        if self.ids is not None:
            kept = None if kept is None else max(kept // 2, 1)
            key_mask = None if self.key_mask is None else F.pad(self.key_mask, (0, ids.shape[1]), value=True)
        view = ids if self.ids is None else torch.cat((self.ids, ids), dim=1)
        if self.context is not None and kept is not None and view.shape[1] > self.context:
            view, key_mask, fresh = view[:, -kept:], None if key_mask is None else key_mask[:, -kept:], True
        self.ids, self.key_mask = view, key_mask
        if fresh:
            ids, new_mask, self.cache = view, key_mask, self._new_cache()
        options = {} if self.cache is None else {"cache": self.cache}
        if self.memory is None:
            last = self._last_logits(ids, key_mask=new_mask, **options)
        else:
            last = self._last_logits(None, ids, key_mask=self.source_mask, memory=self.memory, **options)
        last = last.to(torch.promote_types(last.dtype, torch.float32))
        if not bool(torch.isfinite(last.amax(dim=-1)).all()):
            raise FloatingPointError("the model's logits are not finite")
        return last

    def _last_logits(self, *args: Any, **options: Any) -> Tensor:
        """(B, V) after the last position; of a prompt, the head, often the largest matrix, need not see the others."""
        if not isinstance(self.model, TransformerModel):
            return self.model(*args, **options)[:, -1]
        hidden, _ = self.model(*args, **options, return_extras=True)
        return self.model.get_submodule("head")(hidden[:, -1])

    def _new_cache(self) -> KVCache | None:
        if self.capacity is None:
            return None
        config: Any = self.model.config
        return KVCache(min(self.capacity, self.context or self.capacity), getattr(config, "decoder_layers", config.num_layers))

    def reorder(self, rows: Tensor) -> None:
        """Row i becomes the old row ``rows[i]``."""
        if self.cache is not None:
            self.cache.reorder(rows)
        for name in ("memory", "source_mask", "ids", "key_mask"):
            kept = getattr(self, name)
            setattr(self, name, None if kept is None else kept.index_select(0, rows))


def _of_config(model: nn.Module, name: str) -> Any:
    return getattr(getattr(model, "config", None), name, None)


def _has_source(model: nn.Module) -> bool:
    return hasattr(model, "encode")


def _prompt(
    model: nn.Module, input_ids: Tensor, key_mask: Tensor | None, decoder_input_ids: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """What the answers continue, and its padding."""
    if input_ids.dim() != 2 or 0 in input_ids.shape:
        raise ValueError(f"input_ids must have shape (B, L) with a row and a token at least, got {tuple(input_ids.shape)}")
    if key_mask is not None and (key_mask.shape != input_ids.shape or key_mask.dtype != torch.bool):
        wanted = f"bool of the shape of input_ids, {tuple(input_ids.shape)}"
        raise ValueError(f"key_mask must be {wanted}, got {key_mask.dtype} {tuple(key_mask.shape)}")
    if not _has_source(model):
        if decoder_input_ids is not None:
            raise ValueError("decoder_input_ids belong to an encoder-decoder, and this model has no encode()")
        if key_mask is not None and not bool(key_mask[:, -1].all()):
            raise ValueError("key_mask must be True in the last column: generation continues it, so pad prompts on the left")
        return input_ids, key_mask
    if decoder_input_ids is None:
        bos_id = _of_config(model, "bos_id")
        if bos_id is None:
            raise ValueError("decoder_input_ids=None: the config has no bos_id with which an answer could begin")
        return input_ids.new_full((len(input_ids), 1), bos_id), None
    if decoder_input_ids.dim() != 2 or len(decoder_input_ids) != len(input_ids) or not decoder_input_ids.shape[1]:
        raise ValueError(
            f"decoder_input_ids must have shape (B, T) = ({len(input_ids)}, T), got {tuple(decoder_input_ids.shape)}"
        )
    return decoder_input_ids, None


def _fitting(model: nn.Module, length: int, max_new_tokens: int | None, context: int | None) -> int:
    """``max_new_tokens`` if it fits behind ``length`` tokens, or its default; the last new token is never read."""
    is_table, max_len = _of_config(model, "position") == "learned", _of_config(model, "max_len")
    if context is not None:
        if _has_source(model):
            raise ValueError(f"context={context} is for causal models: an encoder-decoder forgets nothing")
        if isinstance(context, bool) or not isinstance(context, int) or context < 1:
            raise ValueError(f"context={context} must be a positive whole number")
        if is_table and context > max_len:
            raise ValueError(f"context={context}: the position table ends at max_len={max_len}")
    if context is not None or not is_table:
        return max_new_tokens or 256
    room, end = max_len - length + 1, f"the position table ends at max_len={max_len}"
    if room < 1:
        name = "decoder_input_ids" if _has_source(model) else "input_ids"
        raise ValueError(f"{name} has {length} tokens a row, but {end}")
    if max_new_tokens is not None and max_new_tokens > room:
        raise ValueError(f"max_new_tokens={max_new_tokens} after {length} tokens: {end}, which leaves room for {room}")
    return max_new_tokens or min(room, 256)


def _check_choice(
    model: nn.Module,
    max_new_tokens: int | None,
    temperature: float,
    filters: dict[str, Any],
    num_beams: int,
    length_penalty: float,
) -> None:
    if model.training:
        raise ValueError("model is in training mode, where dropout is active: call model.eval() first")
    for name, number in (("max_new_tokens", max_new_tokens), ("num_beams", num_beams)):
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            raise ValueError(f"{name}={number} must be a positive whole number")
    if not 0.0 <= temperature < math.inf:
        raise ValueError(f"temperature={temperature} must be zero (greedy) or a positive number")
    if not math.isfinite(length_penalty):
        raise ValueError(f"length_penalty={length_penalty} must be a finite number")
    if num_beams > 1 and temperature > 0.0:
        raise ValueError(f"num_beams={num_beams} with temperature={temperature}: beam search draws nothing; set temperature=0")
    for name, value in filters.items():
        if value is not None and temperature == 0.0:
            raise ValueError(f"{name}={value} has no effect without sampling: set temperature above 0")


def _seen(prompt: Tensor, prompt_mask: Tensor | None, logits: Tensor) -> Tensor:
    """bool (B, V): the ids of the prompt's real tokens."""
    counts = torch.zeros(logits.shape, dtype=torch.long, device=logits.device)
    real = torch.ones_like(prompt) if prompt_mask is None else prompt_mask.long()
    return counts.scatter_add(1, prompt.long(), real) > 0


def _stop_ids(model: nn.Module, stop: Iterable[int] | None, logits: Tensor) -> Tensor:
    if stop is None:
        eos_id = _of_config(model, "eos_id")
        stop = () if eos_id is None else (eos_id,)
    ids, V = list(stop), logits.shape[-1]
    for id in ids:
        if isinstance(id, bool) or not isinstance(id, int) or not 0 <= id < V:
            raise ValueError(f"stop must be ids in [0, {V}), got {id!r}")
    return torch.tensor(ids, dtype=torch.long, device=logits.device)
