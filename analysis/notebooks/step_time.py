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
# # What does a step cost?
#
# The times of the steps of a study's runs, what they are made of, and how long the host stood still for collectives.
#
#     python run.py -m study=strategies
#     STORE=runs STUDY=strategies python analysis/notebooks/step_time.py
#     STORE=$PWD/runs STUDY=strategies jupytext --to ipynb --execute analysis/notebooks/step_time.py
#
# Steps within one run are not independent: these numbers show where time goes and do not rank arms. To rank them, time
# a study in blocks (`measure: bench`) and read `python -m harness bench STUDY`, which gives intervals.

# %%
import os

import matplotlib.pyplot as plt

from analysis import judge, load, plot

STORE = os.environ.get("STORE", "runs")
STUDY = os.environ.get("STUDY", "strategies")
study = judge.study(STORE, STUDY, sources=None)  # times stand whatever sources made the runs

# %% [markdown]
# ## What was run

# %%
print(study.question or f"The study {STUDY}.")
print(study.incomplete)
shown = ["label", "state", "steps_done", "device", "cpu_model", "torch"]
print(study.runs[shown].to_string(index=False) if len(study.runs) else f"There is no run of {STUDY} under {STORE}.")

# %% [markdown]
# ## Every step
#
# The first step warms up and is left out. Milliseconds: half of a run's steps lie between the 25 % and the 75 %.

# %%
steps = load.steps(study.runs["path"])
warm = steps[steps["step"] > judge.WARM_UP]
styles = {run: own for run, own in study.styles.items() if run in set(warm["run"])}
if len(warm):
    times = 1e3 * warm.set_index("run")["step_time_s"].astype(float)
    times = times.groupby("run", sort=False).describe().rename(study.labels)
    print(times.to_string(float_format="{:.1f}".format))
else:
    print("No run has made a step after its warm-up yet.")

# %% [markdown]
# ## What a step is made of
#
# Medians. The diamond is the time for which rank 0 stood still for collectives: it lies within forward and backward,
# and is what overlap could save.

# %%
parts = judge.parts(steps)
if len(parts):
    figure, ax = plot.bars(len(styles))
    plot.stacks(parts, ax, styles, part="part", value="seconds", scale=1e-3, unit="time of a step (ms)")
    exposed = (1e3 * warm.groupby("run")["exposed_comm_s"].median()).to_dict()
    plot.marks(exposed, ax, styles, "of which waiting for collectives")
    plot.legend(ax)
else:
    print("There is nothing to take apart yet.")

# %%
plt.show()
