# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # Is it still the same training run?
#
# One study, held against its control: the verdicts, the curves, how far they are apart, and what rounding explains. Run
# it as a program or as a notebook, from any folder:
#
#     python run.py -m study=parity_pair
#     STORE=runs STUDY=parity_pair python analysis/notebooks/loss_parity.py
#     STORE=$PWD/runs STUDY=parity_pair jupytext --to ipynb --execute analysis/notebooks/loss_parity.py
#
# The last line makes `loss_parity.ipynb` beside the program. A notebook runs in its own folder, hence `$PWD`. An
# unfinished study is told as far as it has come.

# %%
import os

import matplotlib.pyplot as plt

from analysis import judge, load, plot

STORE = os.environ.get("STORE", "runs")
STUDY = os.environ.get("STUDY", "parity_pair")
SOURCES = None if os.environ.get("ARCHIVED") else "checkout"  # ARCHIVED=1: runs that other sources made
study = judge.study(STORE, STUDY, sources=SOURCES)

# %% [markdown]
# ## What was run

# %%
print(study.question or f"The study {STUDY}.")
print(study.incomplete)
shown = ["label", "state", "steps_done", "steps", "final_loss", "final_grad_norm"]
print(study.runs[shown].to_string(index=False) if len(study.runs) else f"There is no run of {STUDY} under {STORE}.")

# %% [markdown]
# ## Verdicts
#
# Each arm against its control. Two runs are EQUIVALENT if every captured gradient and every logged number differs by no
# more than rounding explains; `docs/verdicts.md` derives how much that is. `used` is the share of its bound that the
# worst check used up.

# %%
if study.verdict:
    count = len(study.verdict.arms)
    print(f"{study.verdict.outcome.value}: study {STUDY}, {count} comparison{'s' * (count != 1)}")
table = judge.verdicts(study)
shown = ["label", "control", "verdict", "tier", "used", "check", "resolution"]
print(table[shown].to_string(index=False, float_format="{:.3g}".format) if len(table) else "Nothing was judged.")
for sentence in table.loc[~table["verdict"].isin(["EQUAL", "EQUIVALENT"]), "sentence"]:
    print(f"\n{sentence}")

# %% [markdown]
# ## The curves
#
# They lie on top of each other, which proves little: the loss of a run whose gradients are all doubled lies there too.

# %%
steps = load.steps(study.runs["path"])
if len(steps):
    figure, ax = plt.subplots(figsize=(8, 4.4), layout="constrained")
    plot.losses(steps, ax, study.styles)
    plot.legend(ax, columns=2)
else:
    print("No run has made a step yet.")

# %% [markdown]
# ## How far apart, and how far rounding may drive them
#
# The bound grows: after a few steps two runs walk apart, and the early steps carry the information.

# %%
apart, bounds = judge.differences(study), judge.bounds(study)
if len(apart):
    figure, ax = plt.subplots(figsize=(8, 4.4), layout="constrained")
    plot.differences(apart, ax, study.styles, bounds)
    plot.legend(ax, columns=2)
else:
    print("No run was judged, so there is no distance to show.")

# %%
plt.show()
