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
# # What is kept, and what is sent?
#
# Bytes that rank 0's engine keeps between steps, by role, and bytes that it sends in a step, by kind of collective.
#
#     python run.py -m study=strategies
#     STORE=runs STUDY=strategies python analysis/notebooks/memory_and_bytes.py
#     STORE=$PWD/runs STUDY=strategies jupytext --to ipynb --execute analysis/notebooks/memory_and_bytes.py
#
# Neither depends on how busy the machine was; `docs/engine.md` has the formulas.

# %%
import os

import matplotlib.pyplot as plt

from analysis import judge, load, plot

STORE = os.environ.get("STORE", "runs")
STUDY = os.environ.get("STUDY", "strategies")
study = judge.study(STORE, STUDY, sources=None)  # bytes stand whatever sources made the runs

# %% [markdown]
# ## What was run

# %%
print(study.question or f"The study {STUDY}.")
print(study.incomplete)
planned = ["planned_kept_bytes", "planned_peak_bytes", "planned_sent_bytes"]  # of timed runs (measure=bench)
sizes = study.runs[["label", "state", "accounted_bytes", "peak_bytes", "sent_bytes", *planned]]
print(sizes.to_string(index=False) if len(sizes) else f"There is no run of {STUDY} under {STORE}.")
for run in study.runs.itertuples():
    if run.leaves_plan:
        print(f"{run.label}: {run.leaves_plan}")

# %% [markdown]
# ## Kept between steps
#
# By the engine's own account, padding apart. The diamond is the most tensor storage that was held within a step, where
# that was measured (`measure=bench`, or on a GPU).

# %%
kept = load.memory(study.runs["path"])
if len(kept):
    styles = {run: own for run, own in study.styles.items() if run in set(kept["run"])}
    figure, ax = plot.bars(len(styles))
    plot.stacks(kept, ax, styles, part="role", value="bytes", scale=plot.MIB, unit="kept by rank 0 between steps (MiB)")
    peaks = (study.runs.set_index("run")["peak_bytes"].dropna().astype(float) / plot.MIB).to_dict()
    plot.marks(peaks, ax, styles, "most within a step")
    plot.legend(ax)
else:
    print("No run has said yet what it keeps: that is written when a run ends.")

# %% [markdown]
# ## Sent in a step

# %%
sent = load.traffic(study.runs["path"])
if len(sent):
    styles = {run: own for run, own in study.styles.items() if run in set(load.steps(study.runs["path"])["run"])}
    figure, ax = plot.bars(len(styles))
    plot.stacks(sent, ax, styles, part="kind", value="bytes", scale=plot.MIB, unit="sent by rank 0 in a step (MiB)")
    plot.legend(ax)
else:
    print("No run has sent anything yet.")

# %%
plt.show()
