"""How much of the package a use loads, and which packages: the limits go down with what is loaded."""

import ast
import io
import os
import sys
import tokenize
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from tests.composing import composing_anew

LIMITS = {"attention": 2_446, "char_lm": 9_179}
"""Code lines of minitx: of the import of one block, and of two steps of a run."""

AROUND = {"analysis", "check", "interop"}
"""Packages that neither of the two loads."""

RUN = "experiment=char_lm trainer.max_steps=2 evaluation.at_end=false output_dir=run callbacks.progress=false data=text data.path=text.txt"


def loaded(folder: Path) -> dict[str, dict[str, str]]:
    """The files of minitx that each use loads into a process without one. What other packages have loaded may stay."""
    os.chdir(folder)
    for name in [name for name in sys.modules if name.split(".")[0] == "minitx"]:
        del sys.modules[name]

    def files() -> dict[str, str]:
        return {name: module.__file__ for name, module in sys.modules.items() if name.split(".")[0] == "minitx"}

    from minitx.nn import MultiHeadAttention  # noqa: F401

    found = {"attention": files()}
    sys.argv[1:] = RUN.split()
    from minitx.cli.train import main

    with composing_anew():
        assert main() == 0
    return found | {"char_lm": files()}


def code_lines(path: str) -> int:
    """Lines with a token that is neither a comment nor part of a docstring."""
    source, docs = Path(path).read_text(encoding="utf-8"), set()
    for node in ast.walk(ast.parse(source)):
        is_documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if is_documented and ast.get_docstring(node, clean=False) is not None:
            docs |= {*range(node.body[0].lineno, node.body[0].end_lineno + 1)}
    empty = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = (token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type not in empty)
    return len({line for token in tokens for line in range(token.start[0], token.end[0] + 1)} - docs)


def test_attention_and_a_run_load_the_core_alone_and_no_more_of_it_than_before(tmp_path):
    (tmp_path / "text.txt").write_text(
        "Once upon a midnight dreary, while I pondered, weak and weary,\n" * 400, encoding="utf-8"
    )
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:
        found = pool.submit(loaded, tmp_path).result()
    for use, files in found.items():
        lines = Counter()
        for name, path in files.items():
            lines[name.split(".")[1] if "." in name else ""] += code_lines(path)
        assert not AROUND & {*lines}, f"{use}: the core imports none of {AROUND}, got {dict(lines)}"
        found_here = f"{use} loads {lines.total():,} code lines of minitx, {dict(lines)}: "
        assert lines.total() <= LIMITS[use], found_here + (
            "import what few uses need where it is used, take out what it replaces, or raise LIMITS in a commit that says why"
        )
        assert LIMITS[use] - 100 < lines.total(), found_here + "lower LIMITS"
