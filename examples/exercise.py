"""The source of the notebooks ``exercise.ipynb`` and ``exercise.zh.ipynb``: ``python tests/tools/make_notebook.py exercise`` makes them.

Text cells come in pairs, English and Chinese. It also runs as a program.
"""

# %% [markdown] en
# # Write attention, and find out what is wrong with it
#
# $$\mathrm{Attention}(Q, K, V) = \mathrm{softmax}\left(\frac{Q K^\top}{\sqrt{d_k}}\right) V$$
#
# You write this formula in a few lines of torch. `check_attention` compares your function with the definition and names mistakes. There
# are five stages, each harder than the one before. At the end, three broken functions wait for you to find out what is wrong with them.

# %% [markdown] zh
# # 自己写注意力，再找出哪里不对
#
# $$\mathrm{Attention}(Q, K, V) = \mathrm{softmax}\left(\frac{Q K^\top}{\sqrt{d_k}}\right) V$$
#
# 请用几行 torch 代码写出这个公式。`check_attention` 把你的函数与定义作比较，并说出错误的名字。要求分五个阶段逐步提高。最后有三个写错的函数，等你找出它们错在哪里。

# %%
import torch

from minitx.check import check_attention, mutant
from minitx.check.mutants import MUTANTS

# %% [markdown] en
# ## 1. Your attention
#
# `query` has the shape (B, H, L, d_k), `key` (B, H, S, d_k) and `value` (B, H, S, d_v). `mask` is None, or a bool tensor of shape
# (B, 1, L, S) that is True where a query may see a key. Replace the line that raises, and run the cells below again until they agree.

# %% [markdown] zh
# ## 1. 你的注意力函数
#
# `query` 的形状是 (B, H, L, d_k)，`key` 是 (B, H, S, d_k)，`value` 是 (B, H, S, d_v)。`mask` 要么是 None，要么是形状为 (B, 1, L, S) 的布尔张量：查询可以看到键的位置为 True。请把抛出异常的那一行换成你的代码，然后反复运行下面的单元格，直到没有错误。


# %%
def attention(query, key, value, mask=None):
    raise NotImplementedError("write attention here")


# %% [markdown] en
# ## 2. The checker
#
# Stage 1 has no mask. *wrong* names the mistake, and the line below it says what to write instead.

# %% [markdown] zh
# ## 2. 检查
#
# 第 1 阶段没有掩码。*wrong* 一行是错误的名字，下一行说明应该怎样写。

# %%
print(check_attention(attention, stage=1))

# %% [markdown] en
# Stage 2 has a mask. A check that could not be tried earns no point.

# %% [markdown] zh
# 第 2 阶段有掩码。没能进行的检查不得分。

# %%
print(check_attention(attention, stage=2, mask="keep"))

# %% [markdown] en
# ## 3. Repair
#
# In stage 3, some queries see no key at all, as in a row that is all padding. What does your function return for them? A softmax over
# -inf only is NaN. With -1e9 in place of -inf, it is the mean of values that the mask hides. Neither is right: return 0.

# %% [markdown] zh
# ## 3. 修正
#
# 在第 3 阶段，有些查询一个键也看不到，例如整行都是填充的时候。你的函数会返回什么？如果所有分数都是 -inf，softmax 的结果是 NaN。如果用 -1e9 代替 -inf，结果是那些本应被遮住的值的平均。两者都不对：应当返回 0。

# %%
print(check_attention(attention, stage=3, mask="keep"))

# %% [markdown] en
# Stage 4 has values of another width, and a causal mask with a cache: three new queries, and seven keys. Stage 5 has half precision
# and scores that are very large or very low.

# %% [markdown] zh
# 第 4 阶段的值有不同的宽度，还有带缓存的因果掩码：三个新查询，七个键。第 5 阶段是半精度，以及非常大或非常小的分数。

# %%
for stage in (4, 5):
    print(check_attention(attention, stage=stage, mask="keep"), "\n")

# %% [markdown] en
# ## 4. Three puzzles
#
# Three functions, each with one mistake. They take (query, key, value, mask, is_causal) and return (output, weights). Give them small
# inputs and look at the weights, before you ask the checker.

# %% [markdown] zh
# ## 4. 三道谜题
#
# 下面三个函数各有一个错误。它们的参数是 (query, key, value, mask, is_causal)，返回 (output, weights)。请先给它们一些小的输入，看看权重，再去问检查程序。

# %%
puzzles = [mutant(MUTANTS[number].name) for number in (1, 16, 36)]
torch.manual_seed(0)
query, key, value = torch.randn(3, 1, 2, 4, 8).unbind()
for number, puzzle in enumerate(puzzles, 1):
    _, weights = puzzle(query[:, :, -2:], key, value, is_causal=True)
    print(f"puzzle {number}: weights of the last two queries in the first head")
    print(weights[0, 0], "\n")

# %% [markdown] en
# What is wrong with each? Write your guesses down. Then run the next cell.

# %% [markdown] zh
# 它们各错在哪里？先写下你的猜测，再运行下一个单元格。

# %%
for number, puzzle in enumerate(puzzles, 1):
    finding = check_attention(puzzle, mask="keep").mend_first
    print(f"puzzle {number}: {finding.fault}. {finding.advice}")
