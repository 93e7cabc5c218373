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
# One study, held against its control: the curves, how far they are apart, what rounding explains, and the verdicts. It
# only narrates: tables come from `analysis.load`, numbers from `analysis.stats`, pictures from `analysis.plot`, and
# verdicts from `harness.parity`. Run it as a notebook, or as a program:
#
#     python run.py -m study=parity_pair
#     STORE=runs STUDY=parity_pair python analysis/notebooks/loss_parity.py
#     STORE=$PWD/runs STUDY=parity_pair jupytext --to ipynb --execute analysis/notebooks/loss_parity.py

# %%
import os

import matplotlib.pyplot as plt
import pandas as pd

from analysis import load, plot, stats
from harness.config.errors import BadRequest
from harness.parity import loss_bounds, study_text, verdict

STORE = os.environ.get("STORE", "runs")
STUDY = os.environ.get("STUDY", "parity_pair")
SOURCES = None if os.environ.get("ARCHIVED") else "checkout"  # ARCHIVED=1: runs that other sources made

# %% [markdown]
# ## What was run
#
# A run that is not `done` is shown here and judged nowhere.

# %%
runs = load.runs(STORE, STUDY)
print(runs.drop(columns=["path", "sources", "cpu_model"]).to_string(index=False))

# %% [markdown]
# ## Verdicts
#
# Each arm against the control. Two runs are EQUIVALENT if every captured gradient and every logged number differs by no
# more than rounding explains; `docs/verdicts.md` derives how much that is.

# %%
try:
    study = verdict(STORE, STUDY, sources=SOURCES)
    print(study_text(study))
except BadRequest as unfinished:
    study = None
    print(unfinished)

# %% [markdown]
# ## The curves
#
# They lie on top of each other, which proves little: the loss of a run whose gradients are all doubled lies there too.

# %%
judged = [arm for arm in study.arms if arm.tier != "T0"] if study else []
names = dict(zip(runs["path"], runs["run"], strict=True))
steps = load.steps(dict.fromkeys(path for arm in judged for path in (arm.control, arm.arm)))
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
plot.losses(steps, left)
if judged:
    left.legend(fontsize=6)

# %% [markdown]
# ## How far apart, and how far rounding may drive them
#
# The bound grows: after a few steps two runs walk apart, and the early steps carry the information.

# %%
for arm in judged:
    plot.differences(
        stats.against(steps[steps["run"].isin([names[arm.arm], names[arm.control]])], names[arm.control]), right
    )
    limits = pd.DataFrame([(f.step, f.allowed) for f in loss_bounds(arm.arm, arm.control)], columns=["step", "allowed"])
    plot.bound(limits, right, "what rounding explains")
if judged:
    right.legend(fontsize=6)
figure.tight_layout()

# %% [markdown]
# ## Where the gradients lie
#
# The five parameters of each arm whose gradients at step 1 are farthest from the control's.

# %%
for arm in judged:
    table = load.gradients(arm.arm, arm.control)
    print(table.nlargest(5, "distance").to_string(index=False))

# %% [markdown]
# ## What it costs

# %%
print(stats.costs(steps).to_string(index=False) if judged else "no run was judged")

# %%
plt.show()
