"""What a check may find, in sentences: the severity, the mistake, the advice, and where the mistake shows.

>>> finding("few-axes", few="(L, D)", many="(B, H, L, D)", also="").fault
'checked with (L, D): with (B, H, L, D), it runs and gives another result'
"""

from __future__ import annotations

from typing import Any

from minitx.check.results import FRAGILE, NOTE, WRONG, Finding, Severity

_DIFFERS = "the output differs by {gap.size:.2g}"
_ROW_DIFFERS = "the output of the row differs by {gap.size:.2g} (a visible token moves it by {exam.typical:.2g})"
_MIXED = "Look for a view that mixes axes, or a mean over axis 0. torch's attention and nn.GRU take (L, B, E) unless batch_first=True."
_LEAK = "other tokens at hidden places {where} move the output of row {gap.place[0]}{token} by {gap.size:.2g} (a visible token: {exam.typical:.2g})"
_DETACHED = "Look for detach(), no_grad, .data"

FINDINGS: dict[str, tuple[Severity | None, *tuple[str, ...]]] = {
    # of a model: the call
    "not-finite": (WRONG, "the output contains NaN or infinity for ordinary tokens"),
    "changes-inputs": (WRONG, "the call changes its argument {name} in place", "Copy the tensor before you change it."),
    "no-effect": (WRONG, "changing {name} does not change the output"),
    "raises-{part}": (FRAGILE, "it raises in the check of {name}", "", "{error}"),
    "random": (WRONG, "two calls with the same inputs differ", "Without dropout, they are equal: in evaluation, F.dropout needs {training}, and attention dropout_p=0."),
    "random-by-itself": (FRAGILE, "it draws random numbers in evaluation, and not for dropout, so nothing else is judged", "Seed each call, or draw them once.", _DIFFERS),
    "length-first": (None, "it takes the length first, (L, B): with (B, L), the rows of a batch change each other",
     "nn.MultiheadAttention, nn.TransformerEncoderLayer and nn.GRU take (B, L) with batch_first=True."),
    # its weights, sizes and modes
    "unregistered-modules": (WRONG, "modules in the plain list or dict {place} are not part of the model: not trained, saved or moved", "Use nn.ModuleList or nn.ModuleDict."),
    "tied-otherwise": (FRAGILE, "config.tie_word_embeddings={is_tied}, but head and table {actual}", "Call tie_weights()."),
    "crashes-at-a-length": (FRAGILE, "{length} token{s} crash", "", "{error}"),
    "nan-at-a-length": (WRONG, "NaN for {length} token{s}"),
    "loses-axis": (FRAGILE, "the output for {length} token{s} has the shape {shape}", "squeeze() needs its axis."),
    "crashes-at-its-limit": (FRAGILE, "{length} tokens, its limit, crash", "", "{error}"),
    "nan-at-its-limit": (WRONG, "NaN for {length} tokens; its limit is {limit}"),
    "beyond-its-limit": (NOTE, "{length} tokens, one more than its limit, raise no error"),
    "last-id-crashes": (FRAGILE, "the last id, {token} of {count}, crashes", "", "{error}"),
    "ids-outside": (NOTE, "id {token} is outside of the table of {count} ids, but raises no error"),
    "not-causal-in-training": (None, "in train mode, later tokens change earlier outputs",
     "Batch norm takes its mean over all positions: use LayerNorm or RMSNorm.", "changing the last token moves the output of row {gap.place[0]}, token {gap.place[1]}, by {gap.size:.2g}"),
    "train-mode-differs": (FRAGILE, "train mode differs from evaluation without randomness", "Look for self.training.", _DIFFERS),
    "random-training": (NOTE, "it is random in train mode, though no nn.Dropout has p > 0"),
    "changes-with-{argument}": (WRONG, "{name}=True changes the output",
     "Look for a second path of the attention: it needs the same mask and scale.", "the output of row {gap.place[0]} differs by {gap.size:.2g} (a visible token moves it by {exam.typical:.2g})"),
    "bfloat16-not-finite": (WRONG, "NaN or infinity in bfloat16"),
    "bfloat16-differs": (FRAGILE, "bfloat16 differs from float32 by more than rounding",
     "Keep positions, angles, norms and the softmax in float32.", "the output differs by {gap.size:.2g}, {share:.0%} of the largest output; rounding explains {gap.allowed:.2g}"),
    "compile-raises": (FRAGILE, "torch.compile raises", "", "{error}"),
    "compile-differs": (WRONG, "the compiled model differs", "", _DIFFERS),
    # what its tokens see
    "rows-mixed": (WRONG, "rows of a batch change each other", _MIXED, "changing row 1 moves the output of row {gap.place[0]} by {gap.size:.2g}"),
    "row-alone-differs": (WRONG, "the output of a row alone differs from its output in a batch", _MIXED, "row {gap.place[0]} alone and in its batch differ by {gap.size:.2g}"),
    "not-bidirectional": (WRONG, "no token sees a later token, although the model is declared bidirectional", "Remove the causal mask."),
    "other-window": (WRONG, "the output of token {i} {depends} on token {j}, {distance} before it, with window:{width}",
     "A window of w tokens is the token itself and w - 1 before it; n layers of width w see n · (w - 1) + 1 tokens.", "{count} such pairs"),
    "not-causal": (None, "{fault}", "{advice}", "changing token {j} moves the output of token {i} by {size:.2g} (a token that it may see: {exam.typical:.2g}); {count} such pair{s}"),
    "prefix-differs": (None, "the outputs of a prefix depend on the number of tokens that follow",
     "Look for a mean or a norm over the length.", "{short} of {length} tokens alone: the output of token {gap.place[1]} differs by {gap.size:.2g}"),
    "not-causal-with-a-mask": (None, "with {mask}, the model is not causal",
     "Combine the two masks: causal & padding.", "with {mask}, the last 3 tokens move the output of token {gap.place[1]} by {gap.size:.2g}"),
    "not-causal-in-a-long-row": (None, "in a long row, later tokens change earlier outputs",
     "Look at the borders of blocks or chunks.", "the tokens from {cut} to {last} move the output of token {gap.place[1]} by {gap.size:.2g}"),
    "gradient-cut": (WRONG, "outputs depend on tokens that get no gradient", _DETACHED + " or a copy through numpy.", "{witness}"),
    "gradient-cut-in-part": (NOTE, "some outputs depend on tokens that get no gradient, as after an argmax: {witness}"),
    "gradient-leaks": (WRONG, "gradients reach later tokens, whose values change nothing",
     "Mask before the softmax, not after.", "the output of token {i} sends a gradient to token {j}; {count} such pairs"),
    "sees-no-other": (FRAGILE, "no token sees any other token", "If the model has attention, it has no effect: look at its output projection, its mask and its kernel."),
    "no-order": (NOTE, "swapping two earlier tokens does not change the output of the last token", "Are there positions?"),
    "position-ids-ignored": (FRAGILE, "position_ids are ignored: packed documents and padded rows keep their places in the row"),
    "positions-not-relative": (WRONG, "positions are not relative, as declared",
     "Rotate queries and keys with the same angles and pairs of features, or add a bias of the distance alone.", "adding 3 to all position_ids moves the output by {gap.size:.2g} (a visible token: {exam.typical:.2g})"),
    # its padding, documents and cache
    "{source}mask-inverted": (WRONG, "{mask} is inverted: 1 hides a token", "In attention_mask, 1 is a real token: masked_fill(mask == 0, -inf)."),
    "{source}mask-of-ones-changes": (WRONG, "{mask} changes the output, although it hides nothing",
     "Does the mask replace the causal mask?", "a mask that hides nothing moves the output by {gap.size:.2g}"),
    "{source}nan-{side}": (WRONG, "NaN at real tokens with padding {where}", "Hide with a finite number, or clear rows that see nothing."),
    "{source}nan-at-padding": (FRAGILE, "NaN at the padding itself, so the sum of all losses is NaN", "Clear rows that see nothing."),
    "{source}mask-ignored": (WRONG, "{mask} is ignored", "Pass it on to the attention of every layer.", _LEAK),
    "{source}padding-leaks": (WRONG, "hidden tokens leak through {mask}", "Hide their keys in every layer and in cross-attention, and clear their values in other modules that mix positions.", _LEAK),
    "{source}padding-changes-rows": (WRONG, "padding of a row changes other rows", "", "padding of row 1 moves the output of row {gap.place[0]} by {gap.size:.2g}"),
    "{source}mask-in-a-batch-of-one": (WRONG, "in a batch of one, {mask} has another effect",
     "Look for conditions on the batch size.", "the output of the padded row differs by {gap.size:.2g} (a visible token moves it by {exam.typical:.2g})"),
    "{source}padding-by-id": (NOTE, "padding is recognised by the id {pad}, not by {mask}", "Hide tokens with this id."),
    "{source}reads-{side}-edge": (NOTE, "the output is read at the {edge} token, also if {mask} hides it", "Do not pad on the {side}."),
    "{source}needs-another-mask": (NOTE, "{mask} hides tokens only together with {other}", "Pass the mask as {other}, too."),
    "{source}padded-row-differs": (FRAGILE, "a row with padding on the right differs from the same row alone", "Look for a mean, a norm or a last token over the whole length.", _ROW_DIFFERS),
    "{source}positions-of-left-padding": (None, "with padding on the left, positions are counted from the padding", "{advice}", _ROW_DIFFERS),
    "documents-leak": (WRONG, "documents of a row see each other", "", "a token of the first document moves token {gap.place[1]} of the second by {gap.size:.2g}"),
    "document-differs": (FRAGILE, "the second document of a row is isolated, but differs from the same document alone",
     "Count positions in each document.", "the output of the second document differs by {gap.size:.2g}"),
    "mask-joins-documents": (FRAGILE, "position_ids that restart isolate documents, but not together with {mask}", "Do not pass {mask} with packed documents."),
    "positions-join-documents": (NOTE, "position_ids that restart do not isolate packed documents"),
    "cache-differs{kind}": (None, "with a cache{what}, pieces differ from one call",
     "Look at the positions of new tokens, and align the causal mask to the lower right: tril(diagonal=S - L).", "{how}: the output of token {gap.place[1]} differs by {gap.size:.2g}"),
    # its loss and its gradients
    "labels-shifted-twice": (WRONG, "labels are shifted twice: the loss is of the token after the next", "Shift in the data or in the model."),
    "loss-of-hidden-targets": (FRAGILE, "the loss of {what} is not the mean over the labels that are not {label}", "Divide by their number."),
    "no-gradient": (WRONG, "the output has no gradient", "Look for no_grad, detach() or .data around the whole model."),
    "gradient-not-finite": (WRONG, "NaN or infinity in gradients", "", "of {names}"),
    "parameter-without-gradient": (WRONG, "parameters change the output and get no gradient",
     _DETACHED + ".", "changing {name} moves the output by {gap.size:.2g}, but its gradient is 0; {count} of {tried} tried"),
    "unused-parameters": (NOTE, "{count} of {all} parameters change nothing here: {names}"),
    "precision-lost": (FRAGILE, "parts of the float32 model compute in lower precision",
     "Look for autocast, half() or bfloat16().", "the output differs from float64 by {gap.size:.2g}; rounding explains {gap.allowed:.2g}"),
    "gradient-differs": (FRAGILE, "gradients differ from the slope of the output", _DETACHED + " or a custom backward. A straight-through estimator does this on purpose.", "{witness}"),
    # of a function or a layer
    "cannot-be-called": (None, "{fault}", "{advice}", "{witness}"),
    "untried-{case}": (WRONG, "{case} could not be tried: {reason}", "Stage {stage} needs it."),
    "other-shape": (WRONG, "the output has the shape {shape}, not {expected}", "The output is weights @ value: it has the width of the values."),
    "differs": (None, "it differs from the definition, and no known mistake explains it", "", "{witness}"),
    "other-selection": (None, "{fault}", "Count the places of a window from the last key. Take the largest scores of the keys that the masks show, for each query alone.", "{witness}"),
    "more-than-the-definition": (
        NOTE,
        "{beyond}, so it is not compared with the definition",
        "Check a model that contains it: causality and padding are properties of a model.",
    ),
    "same-numbers": (NOTE, "the same numbers come from: {others}"),
    "half-{case}": (FRAGILE, "in {cases}: {reason}", "Compute scores and softmax in float32, and use torch.finfo(dtype).min or -inf for what is hidden."),
    "nan-gradient-where-a-query-sees-nothing": (FRAGILE, "NaN in the gradient where a query sees nothing", "Hide with a finite number, and multiply the weights by the mask after the softmax."),
    "other-weights": (WRONG, "the returned weights differ from the weights that give the output", "", "seen in: {name} (by {size:.2g})"),
    "padding-mask-keeps": (FRAGILE, "{mask} is True where a key is kept. In torch, an argument with this name is True where there is padding", "Set mask=keep or mask=hide to choose."),
    "mask-hides": (FRAGILE, "in {mask}, True = hide. If True should mean keep: mask inverted", "Set mask=keep or mask=hide to choose."),
    "mask-not-accepted": (FRAGILE, "{mask} accepts none of the forms of mask that were tried"),
    "few-axes": (FRAGILE, "checked with {few}: with {many}, it runs and gives another result", "Count axes from the end: softmax(dim=-1) and transpose(-2, -1).", "{also}"),
    "changes-its-arguments": (FRAGILE, "it changes its arguments in place", "Write q = q * scale instead of q *= scale."),
    "changes-the-mask": (WRONG, "it changes {mask} in place, so the next layer gets another mask", "Copy {mask} before you change it."),
    "idle-parameters": (WRONG, "unused parameters: {names}"),
}  # fmt: skip
"""The findings by their ids. An id may have a placeholder. A severity of None depends on the declaration."""


def finding(key: str, severity: Severity | None = None, **words: Any) -> Finding:
    """Return the finding in the row ``key`` of ``FINDINGS``, with ``words`` in its id and its sentences."""
    usual, *sentences = FINDINGS[key]
    return Finding(key.format(**words), usual or severity or NOTE, *(sentence.format(**words) for sentence in sentences))
