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
# # What is a pass worth?
#
# A verdict that passes everything is worthless. Three looks at how much this study's verdicts could have seen: how near
# the bounds the checks came, how small an error would have shown, and which faults the same rules find when faults are
# put in on purpose.
#
#     python run.py -m study=parity_pair
#     STORE=runs STUDY=parity_pair python analysis/notebooks/verdict_power.py
#     STORE=$PWD/runs STUDY=parity_pair jupytext --to ipynb --execute analysis/notebooks/verdict_power.py

# %%
import os
from pathlib import Path

import pandas as pd

import analysis
from analysis import judge

STORE = os.environ.get("STORE", "runs")
STUDY = os.environ.get("STUDY", "parity_pair")
SOURCES = None if os.environ.get("ARCHIVED") else "checkout"  # ARCHIVED=1: runs that other sources made
CAMPAIGN = Path(os.environ.get("CAMPAIGN", Path(analysis.__file__).parents[1] / "benchmarks/data/power.csv"))
study = judge.study(STORE, STUDY, sources=SOURCES)
print(study.question or f"The study {STUDY}.")
print(study.incomplete)
table = judge.verdicts(study)
for sentence in table.loc[~table["verdict"].isin(["EQUAL", "EQUIVALENT"]), "sentence"]:
    print(f"\n{sentence}")

# %% [markdown]
# ## How near the bounds
#
# The three checks of each arm that came nearest: what was observed over what rounding explains. A bound that everything
# stays a thousandfold below is loose; one that clean runs touch would raise false alarms. A check without a number (is
# the loss finite?) has no row; the sentence above says where one failed.

# %%
evidence = judge.evidence(study)
if len(evidence):
    nearest = evidence.sort_values("used", ascending=False).groupby("run", sort=False).head(3)
    nearest = nearest.assign(label=nearest["run"].map(study.labels))
    shown = ["label", "check", "step", "observed", "allowed", "used"]
    print(nearest[shown].to_string(index=False, float_format="{:.3g}".format))
else:
    print("No run was judged, so no bound was used.")

# %% [markdown]
# ## How small an error would have shown
#
# The smallest relative error in the scale of all gradients that would have been called DIFFERENT: with 2 ranks, a lost
# rank is an error of 0.5.

# %%
seen = table[["label", "resolution"]].dropna().astype({"resolution": float})
if len(seen):
    print(seen.to_string(index=False, float_format="{:.3g}".format))
else:
    print("No gradients were compared, so nothing says how small an error would have been detected.")
for seeds in study.verdict.seeds if study.verdict else ():
    print(seeds.sentence)

# %% [markdown]
# ## Faults put in on purpose
#
# The campaign over whole runs (docs/records/power.md): the share of faulty runs that did not pass, by strength, and of
# clean ones that did not pass either, with 95 % intervals.

# %%
if CAMPAIGN.exists():
    pairs = pd.read_csv(CAMPAIGN, keep_default_na=False)
    pairs["stopped"] = ~pairs["outcome"].isin(["EQUAL", "EQUIVALENT"])
    pairs["group"] = pairs["strength"].map(lambda strength: f"faults found, {strength} strength")
    pairs.loc[pairs["kind"] == "clean", "group"] = "false alarms of clean pairs"
    for group, stopped in pairs.groupby("group", sort=False)["stopped"]:
        low, high = judge.interval(int(stopped.sum()), len(stopped))
        print(f"{group}: {stopped.sum()} of {len(stopped)}, {stopped.mean():.1%} ({low:.1%} to {high:.1%})")
else:
    print(f"There is no campaign at {CAMPAIGN}.")
