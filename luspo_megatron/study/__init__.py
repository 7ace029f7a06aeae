"""The length-bias study: what the objectives do to the response length, at a scale that a laptop can run.

- tabular.py       a policy of a few hundred numbers, its tasks, samples in packed form
- length_bias.py   `luspo study length-bias`: the objectives on that policy, same prompts, seeds and start
- drift.py         the exact push on the length, through the project's own objective
- page.py, figures.py   its report.html and PNGs
- model.py         `luspo study model`: the same comparison with `luspo train`
"""
