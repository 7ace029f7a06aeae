"""luspo report: one run, several runs, the words of its command line, the server without a browser."""

from __future__ import annotations

import http.client
import json
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from luspo_megatron import cli
from luspo_megatron.config_io import field_types, split_words
from luspo_megatron.config_tools import ReportConfig
from luspo_megatron.errors import UserError
from luspo_megatron.report.compare import MAX_RUNS, read_runs
from luspo_megatron.report.overlay import Line, overlay_figure
from luspo_megatron.report.serve import make_server
from tests.unit.test_report_html import parse, write_run


def make_run(folder: Path, steps: int = 20, objective: str = "luspo", seed: int = 0) -> Path:
    folder.mkdir(parents=True)
    write_run(folder, steps)
    (folder / "config.yaml").write_text(
        f"run: {{dir: {folder}, seed: {seed}}}\nalgorithm: {{objective: {objective}, clip_low: 0.002}}\n")
    return folder


def test_runs_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = make_run(tmp_path / "a"), make_run(tmp_path / "b<&", 30, "gspo", 1)
    (first / "summary.json").write_text(json.dumps({"finished": True, "seconds": 61.0}))
    assert cli.main(["report", str(first), str(second)]) == 0
    path = Path(capsys.readouterr().out.strip())
    assert path == tmp_path / "comparison.html"
    page, html = parse(path)
    text = " ".join(page.text)
    for part in ("Comparison of 2 runs", "b<&", "1 min 01 s", "1 without a summary", "Settings that differ",
                 "algorithm.objective", "Response length", "30.0% \u00b1 1.0%", "Effective weight per token, shortest"):
        assert part in text, part
    assert ">algorithm.objective<" in html
    assert ">algorithm.clip_low<" not in html and ">run.dir<" not in html  # the same in both; a folder is no setting
    assert html.count('class="chart"') > 25


def test_one_run_and_another_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "a")
    assert cli.main(["report", str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    assert cli.main(["report", "--out", str(tmp_path / "x.html"), str(run)]) == 0
    assert (tmp_path / "x.html").read_text().count("<main>") == 1


@pytest.mark.parametrize(("words", "text"), [
    ([], "needs one or more run folders"), (["nowhere"], "run folder nowhere does not exist"),
    (["."], "no run of `luspo train`"), (["a", "a/."], "given twice"), (["a", "--servee"], "did you mean --serve"),
    (["a", "--serve", "--out", "x"], "exclude each other"), (["a", "--port", "70000"], "--port 70000")])
def test_mistakes(words: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                  capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "a")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["report", *words]) == 2
    assert text in capsys.readouterr().err


def test_words_between_flags() -> None:
    types = field_types(ReportConfig)
    assert split_words(["--serve", "a", "--port", "0", "b"], types) == (["a", "b"], ["--serve", "--port", "0"])
    assert split_words(["--serve", "false", "a", "--out=x"], types) == (["a"], ["--serve", "false", "--out=x"])
    assert split_words(["-h"], types) == ([], ["-h"])


def test_equal_folder_names_are_told_apart(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name / "run") for name in ("x", "y")]
    assert [run.label for run in read_runs(runs)] == ["x/run", "y/run"]
    with pytest.raises(UserError, match="at most"):
        read_runs([tmp_path / str(index) for index in range(MAX_RUNS + 1)])


def test_bands_are_over_runs_and_lines_keep_their_colour() -> None:
    def run(value: float, steps: int = 3) -> list[dict[str, float]]:
        return [{"step": step, "response_length_mean": value} for step in range(1, steps + 1)]

    html = overlay_figure("response_length_mean", [Line("two", [run(10.0), run(20.0)]), Line("none", [[]]),
                                                   Line("one", [run(5.0, 2)])])
    assert "two: 15.0 (10.0 to 20.0)" in html and "one: 5.0" in html and "none (not recorded)" in html
    assert 'class="s2"' in html and html.count('class="band"') == 1
    assert overlay_figure("kl_ref", [Line("two", [run(1.0)])]) == ""
    assert "nan" not in overlay_figure("response_length_mean", [Line("x", [run(math.nan), run(2.0)])])


@contextmanager
def serving(*runs: Path) -> Iterator[int]:
    server = make_server([str(run) for run in runs], 0, 0.1)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def get(port: int, path: str = "/", **headers: str) -> tuple[int, str, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, answer.getheader("ETag") or "", body


def test_the_server_sends_a_page_anew_only_when_a_file_has_changed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", 3)
    with serving(run) as port:
        status, tag, body = get(port)
        assert status == 200 and "up to step 3" in body and "<script>" in body
        assert get(port, If_None_Match=tag) == (304, tag, "")
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 4, "reward_mean": 0.5}\n')
        status, other, body = get(port, If_None_Match=tag)
        assert status == 200 and other != tag and "up to step 4" in body
        assert get(port, "/etc/passwd")[0] == 404
        assert get(port, Host="evil.example")[0] == 403  # a foreign name that resolves to this machine
        with pytest.raises(UserError, match="--port"):
            make_server([str(run)], port, 1.0)


def test_the_server_shows_several_runs(tmp_path: Path) -> None:
    with serving(make_run(tmp_path / "a", 3), make_run(tmp_path / "b", 5)) as port:
        assert "Comparison of 2 runs" in get(port)[2]
