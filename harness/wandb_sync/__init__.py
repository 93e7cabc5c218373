"""Weights & Biases as a copy of the store: one run there for one signature here, over all attempts.

    python -m harness.wandb_sync RUN    follow a run while it trains; rank 0 starts it (`harness.train.wandb_sync`)
    sync(runs, mode)                what is stored, whole, with each arm's distance to its control
    push(root, study, mode)         a study's verdicts, evidence, pictures and dashboard

[Note: The record is the truth] A copy reads `metrics.jsonl` and nothing else of the training process, which cannot
be slowed, changed or stopped by it. A line is sent as the step it is, so that one that is sent twice is kept once.
"""
