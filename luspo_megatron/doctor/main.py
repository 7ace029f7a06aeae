"""The command: all checks, one line each. Exit code 1 when one is an error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from luspo_megatron import config_checks
from luspo_megatron.config import Config
from luspo_megatron.doctor.lines import Line, error, ok
from luspo_megatron.doctor.machine import machine_lines


def main(config: Config | None) -> int:
    """Without a configuration only the machine is looked at."""
    counts: Counter[str] = Counter()
    for line in _lines(config):
        counts[line.level] += 1
        print(line, flush=True)
    print(f"{counts['error']} errors, {counts['warning']} warnings, {counts['ok']} ok")
    return int(counts["error"] > 0)


def _lines(config: Config | None) -> Iterator[Line]:
    yield from machine_lines(config)
    if config is None:
        return
    violations = config_checks.validate(config)
    for violation in violations:
        yield error("configuration", f"{violation.flag} {violation.value}", violation.mend)
    if not violations:
        yield ok("configuration", "no violations")
    if not any(violation.flag == "--model.hf" for violation in violations):
        from luspo_megatron.doctor.recipe import recipe_lines

        yield from recipe_lines(config)
