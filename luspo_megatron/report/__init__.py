"""What a person sees of a run: metrics, progress, summary and report.html.

Called by rank 0 of the trainer. Imports neither torch nor megatron, so that a report can be written anywhere.

- metrics.py      the names of all metrics in one table; metrics.jsonl, samples.jsonl and TensorBoard
- progress.py     bars and table rows in a terminal, plain lines elsewhere
- summary.py      the final summary and summary.json
- html.py         report.html (with svg.py, binning.py)
- environment.py  the versions a run was made with
- watch.py        warnings about runs that cannot learn
- records.py      the files under all of these
"""
